//! `windlass apply`: reads a configuration, shows the plan, asks for confirmation, applies it and follows the run to
//! its end.

pub(crate) mod archive;
mod config_diff;
mod config_source;
mod fleet;
mod git;
mod keys;
mod plan;
mod run;
mod secrets;
pub(crate) mod service;
mod volume_gateway;

use std::{
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use windlass_api::runs::RunPlan;
use windlass_model::config::{Configuration, job_spec::AppSpec, ports::PortMapping};

pub(crate) use self::{
    config_source::{ApplyInput, ConfigSource, DEFAULT_FILES, parse_file, read_text, with_overrides},
    plan::{format_refusals, format_resources},
};
use super::resource_flags::Overrides;
use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context,
    error::{CliError, ErrorCode},
    exit::Exit,
    follow::Ports,
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass apply -f train.yml                     show the plan, ask, submit, follow the output
  windlass apply -f train.yml -y -d               do not ask, do not wait
  windlass apply -f train.yml -e SEED=7 -- --lr 3 variables, and arguments for ${{ run.args }}
  windlass apply -f train.yml --gpu H100:8 --spot --max-duration 6h
  windlass apply -f app.yml -p 8080:80            forward local port 8080 to port 80 of the job
  windlass apply -f train.yml -y -o jsonl         print progress and output as JSON events
  windlass apply -f fleet.yml -y                  create or update a fleet, volume or gateway

The exit code is that of the job if it is below 200. Otherwise:
  200  another failure      202  the job exited with 200 or more
  201  stopped              203  a limit such as `max_duration` was reached
  2    usage error";

/// Default number of offers in a plan.
const OFFERS_SHOWN: u16 = 3;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Configuration file; `-` is standard input. Defaults to `windlass.yml` or `.dstack.yml`
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Return as soon as the run is submitted
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Name, overriding the one in the configuration
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Environment variable of the run; `K` alone passes the value from your environment
    #[arg(short, long = "env", value_name = "K[=V]", value_parser = parse_variable)]
    pub(crate) env: Vec<(String, Option<String>)>,
    /// Replace an active run of this name even if nothing changed
    #[arg(long)]
    pub(crate) force: bool,
    /// Port of the job to forward: `8000`, `LOCAL:8000` or `*:8000`; in addition to `ports` in the file
    #[arg(short, long = "port", value_name = "MAPPING", value_parser = PortMapping::parse)]
    pub(crate) port: Vec<PortMapping>,
    /// Local address on which ports are forwarded
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Pass escape sequences in the job's output to the terminal
    #[arg(long)]
    pub(crate) raw: bool,
    /// Number of offers in the plan
    #[arg(long, value_name = "N", default_value_t = OFFERS_SHOWN)]
    pub(crate) max_offers: u16,
    /// Profile of `.windlass/profiles.yml` or `.dstack/profiles.yml` to use
    #[arg(long, value_name = "NAME", env = "WINDLASS_PROFILE")]
    pub(crate) profile: Option<String>,
    /// Private key with which instances clone the repository; sent to the server
    #[arg(long, value_name = "FILE")]
    pub(crate) git_identity: Option<PathBuf>,
    /// Token with which instances clone the repository; sent to the server
    #[arg(long, value_name = "TOKEN", env = "WINDLASS_GIT_TOKEN", hide_env_values = true)]
    pub(crate) git_token: Option<String>,
    #[command(flatten)]
    pub(crate) overrides: Overrides,
    /// File given without `-f`
    #[arg(hide = true, value_name = "FILE")]
    pub(crate) unused: Option<PathBuf>,
    /// Arguments that replace `${{ run.args }}` in commands
    #[arg(last = true, value_name = "ARG")]
    pub(crate) args: Vec<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl Args {
    /// Returns the arguments of a command line without any flag except `-y`, if `yes` is set.
    pub(crate) fn plain(at: ServerArgs, output: OutputArgs, yes: bool) -> Self {
        Self {
            file: None,
            yes,
            detach: false,
            name: None,
            env: Vec::new(),
            force: false,
            port: Vec::new(),
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            raw: false,
            max_offers: OFFERS_SHOWN,
            profile: None,
            git_identity: None,
            git_token: None,
            overrides: Overrides::default(),
            unused: None,
            args: Vec::new(),
            at,
            output,
        }
    }

    /// Returns the ports to forward while the run is followed: those of the file, extended or replaced by those of the
    /// command line.
    fn merge_ports(&self, plan: &RunPlan) -> Result<Ports, CliError> {
        let first = plan.job_plans.first().map(|job| job.job_spec.value()).transpose();
        let spec = first
            .map_err(|error| CliError::from_error("failed to read the plan", &error))?
            .unwrap_or_default();
        Ok(Ports { host: self.host, ports: ports(&spec, &self.port), replica: 0, job: 0 })
    }
}

/// Returns the port mappings of a job. A mapping given on the command line replaces that of the file.
pub(crate) fn ports(job_spec: &serde_json::Value, named: &[PortMapping]) -> Vec<PortMapping> {
    let apps: Vec<AppSpec> = serde_json::from_value(job_spec["app_specs"].clone()).unwrap_or_default();
    let of_file =
        apps.iter().map(|app| PortMapping { local_port: app.map_to_port, container_port: app.port });
    let is_named = |port: &PortMapping| named.iter().any(|other| other.container_port == port.container_port);
    let mut all: Vec<PortMapping> = of_file.filter(|port| !is_named(port)).collect();
    all.extend(named.iter().cloned());
    all
}

pub(crate) fn parse_variable(text: &str) -> Result<(String, Option<String>), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("expected NAME or NAME=VALUE".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), Some(value.to_owned()))),
        None if text.is_empty() => Err("expected NAME or NAME=VALUE".to_owned()),
        None => Ok((text.to_owned(), None)),
    }
}

/// Errors of this command use exit codes from 200: lower codes belong to the job.
pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    apply(args).map_err(CliError::ours)
}

fn apply(args: &Args) -> Result<Exit, CliError> {
    if let Some(unused) = &args.unused {
        let unused = unused.display();
        return Err(CliError::usage(format!("unexpected argument `{unused}`")).hint(format!(
            "use `windlass apply -f {unused}` for a file; put arguments of the run after `--`"
        )));
    }
    check_can_confirm(args)?;
    // Local checks come first, so that an invalid configuration does not start a server.
    match config_source::read(args)? {
        ApplyInput::Configuration(source) => submit(args, &source),
        ApplyInput::Service(service) => submit_service(args, &service),
    }
}

/// Applies a SkyPilot file with a service.
pub(crate) fn submit_service(args: &Args, service: &service::ServiceSource) -> Result<Exit, CliError> {
    check_can_confirm(args)?;
    check_output(args, true)?;
    context::with_context(&args.at, async |cx| {
        let source = service.resolve(cx, args).await?;
        run::apply(cx, args, &source).await
    })
}

/// Fails if the output format needs standard output, which shows the output of a followed run.
fn check_output(args: &Args, is_run: bool) -> Result<(), CliError> {
    if is_run && !args.detach && !matches!(args.output.format, Format::Table | Format::Jsonl) {
        return Err(CliError::usage(
            "`-o` cannot be used while the run is followed: standard output shows the job's output",
        )
        .hint("add `-d`, or use `-o jsonl` for progress and output as events"));
    }
    Ok(())
}

/// Fails early if the plan needs a confirmation and there is no terminal to ask on.
fn check_can_confirm(args: &Args) -> Result<(), CliError> {
    if !args.yes && !output::can_prompt() {
        return Err(CliError::usage("confirmation needed: apply the configuration?")
            .code(ErrorCode::ConfirmationRequired)
            .hint("pass `-y`: there is no terminal to ask on"));
    }
    Ok(())
}

/// Shows the plan, asks for confirmation, applies and follows.
pub(crate) fn submit(args: &Args, source: &ConfigSource) -> Result<Exit, CliError> {
    check_can_confirm(args)?;
    check_output(args, source.configuration.run().is_some())?;
    context::with_context(&args.at, async |cx| match &source.configuration {
        Configuration::Task(_) | Configuration::Service(_) | Configuration::DevEnvironment(_) => {
            run::apply(cx, args, source).await
        }
        Configuration::Fleet(config) => fleet::apply(cx, args, source, config).await,
        Configuration::Volume(_) => volume_gateway::apply_volume(cx, args, source).await,
        Configuration::Gateway(_) => volume_gateway::apply_gateway(cx, args, source).await,
    })
}

/// Asks for confirmation unless `-y` was given.
fn confirm_apply(args: &Args, question: &str) -> Result<bool, CliError> {
    if output::confirm(args.yes, question)? {
        return Ok(true);
    }
    output::print_message("Nothing was changed.");
    Ok(false)
}
