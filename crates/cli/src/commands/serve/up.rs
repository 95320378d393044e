//! `windlass serve up FILE` and `windlass serve update SERVICE FILE`.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use windlass_api::{operations::ReadRun, runs::ReadRequest};
use windlass_model::skypilot::{self, UpdateMode};

use super::is_service;
use crate::{
    cli::{OutputArgs, ServerArgs},
    commands::{
        apply::{
            self, parse_variable, read_text,
            service::{ServiceSource, ServiceValues, not_active},
        },
        is_finished,
        jobs::resolve_values,
    },
    context,
    error::{CliError, ErrorCode},
    exit::Exit,
};

const EXAMPLES: &str = "\
Examples:
  windlass serve up -n web service.yaml
  windlass serve up -y --env MODEL=llama --secret HF_TOKEN service.yaml
  windlass serve up -y --no-auth service.yaml    answer requests without a token";

const UPDATE_EXAMPLES: &str = "\
Examples:
  windlass serve update web service.yaml                      replace the replicas one by one
  windlass serve update -y --mode blue_green web service.yaml  start all new replicas at once";

/// Arguments that both commands share.
#[derive(Debug, clap::Args)]
struct FileArgs {
    /// File with the service; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Environment variable; `K` alone passes the value from your environment
    #[arg(short, long = "env", value_name = "K[=V]", value_parser = parse_variable)]
    env: Vec<(String, Option<String>)>,
    /// Secret, stored for this service until `serve down`; `K` alone passes the value from your environment
    #[arg(long = "secret", value_name = "K[=V]", value_parser = parse_variable)]
    secret: Vec<(String, Option<String>)>,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    yes: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the service, overriding the one in the file
    #[arg(short, long, alias = "service-name", value_name = "NAME")]
    name: Option<String>,
    /// Answer requests without a token of a project member
    #[arg(long)]
    no_auth: bool,
    #[command(flatten)]
    of: FileArgs,
}

/// Order in which replicas are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Mode {
    /// One new replica at a time
    Rolling,
    /// All new replicas at once, beside the old ones
    BlueGreen,
}

#[derive(Debug, clap::Args)]
#[command(after_help = UPDATE_EXAMPLES)]
pub(crate) struct UpdateArgs {
    /// Name of the active service
    #[arg(value_name = "SERVICE")]
    name: String,
    /// Order in which the replicas are replaced
    #[arg(long, value_enum, default_value_t = Mode::Rolling)]
    mode: Mode,
    #[command(flatten)]
    of: FileArgs,
}

pub(super) fn run(args: &Args, at: &ServerArgs, output: OutputArgs) -> Result<Exit, CliError> {
    let mut source = read(&args.of, args.name.clone())?;
    source.has_auth = !args.no_auth;
    context::with_context(at, async |cx| {
        let request = ReadRequest { run_name: Some(source.name.clone()), id: None };
        match cx.try_call::<ReadRun>(&request).await {
            Ok(run) if !is_finished(&run.status) => {
                Err(CliError::new(format!("a run named `{}` is active", source.name))
                    .code(ErrorCode::Failed)
                    .hint(format!(
                        "run `windlass serve update {0} FILE` to change it, or choose another name with `-n`",
                        source.name
                    )))
            }
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(cx.explain(&error).await),
        }
    })?;
    apply::submit_service(&apply_args(&args.of, at, output), &source)
}

pub(super) fn update(args: &UpdateArgs, at: &ServerArgs, output: OutputArgs) -> Result<Exit, CliError> {
    let mut source = read(&args.of, Some(args.name.clone()))?;
    source.is_update_only = true;
    source.mode = match args.mode {
        Mode::Rolling => UpdateMode::Rolling,
        Mode::BlueGreen => UpdateMode::BlueGreen,
    };
    context::with_context(at, async |cx| {
        let run = cx.run(&args.name).await?;
        if is_finished(&run.status) || !is_service(&run) { Err(not_active(&args.name)) } else { Ok(()) }
    })?;
    apply::submit_service(&apply_args(&args.of, at, output), &source)
}

fn apply_args(of: &FileArgs, at: &ServerArgs, output: OutputArgs) -> apply::Args {
    apply::Args { detach: true, ..apply::Args::plain(at.clone(), output, of.yes) }
}

fn read(of: &FileArgs, name: Option<String>) -> Result<ServiceSource, CliError> {
    let is_stdin = of.file.as_os_str() == "-";
    let file = of.file.display().to_string();
    let text = read_text(Path::new(&of.file), is_stdin)?;
    if !skypilot::is_service_file(&text) {
        return Err(CliError::usage(format!("`{file}` has no section `service`"))
            .hint("run `windlass apply -f FILE` for a configuration, and `windlass jobs launch FILE` for a task file"));
    }
    let values = ServiceValues {
        name,
        envs: resolve_values(&of.env, "env")?,
        secrets: resolve_values(&of.secret, "secret")?,
    };
    ServiceSource::parse(&file, &text, values)
}
