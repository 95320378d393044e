//! `windlass attach RUN`: forwards the ports of a run, enables `ssh RUN`, and shows its output if requested.

use std::{net::IpAddr, path::PathBuf};

use tokio::io::{AsyncWriteExt as _, copy, split};
use windlass_api::runs::{ConnectRequest, Run};
use windlass_model::config::ports::PortMapping;

use super::{apply::ports, is_finished, logs::parse_since};
use crate::{
    cli::ServerArgs,
    context::{self, Context},
    error::{CliError, ErrorCode},
    exit::Exit,
    follow::{
        self, FollowOptions, JobProgress, LogPrinter, OutputMode, PortForwards, Ports, SshLogin,
        job_progress,
        ssh::{self, LoginTarget},
    },
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass attach dev                  wait until it runs, forward its ports; then `ssh dev` in another terminal
  windlass attach --logs train         also follow its output, as `windlass apply` does
  windlass attach -p 8080:80 web       forward local port 8080 to port 80 of the job
  windlass attach --job 1 train        attach to the second node; then `ssh train-1-0`

Ctrl-C detaches and leaves the run running. `ssh` works while the run is running, attached or not: its entry is in
WINDLASS_HOME/ssh, which ~/.ssh/config includes, so editors find it too.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Run to attach to
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Follow the output as well
    #[arg(long)]
    pub(crate) logs: bool,
    /// Show output written since this time: `10s`, `5m`, `1d` ago, or a time such as `2026-11-20T09:00:00Z`
    #[arg(long, value_name = "WHEN", requires = "logs")]
    pub(crate) since: Option<String>,
    /// Pass escape sequences in the job's output to the terminal
    #[arg(long, requires = "logs")]
    pub(crate) raw: bool,
    /// Port of the job to forward: `8000`, `LOCAL:8000` or `*:8000`; in addition to those of its configuration
    #[arg(short, long = "port", value_name = "MAPPING", value_parser = PortMapping::parse)]
    pub(crate) port: Vec<PortMapping>,
    /// Local address on which ports are forwarded
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Replica of a service; defaults to any running replica
    #[arg(long, value_name = "N")]
    pub(crate) replica: Option<i64>,
    /// Job of the replica: the rank of the node
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) job: i64,
    /// Private key for `ssh`, instead of the one that the server stores for you
    #[arg(long, value_name = "FILE")]
    pub(crate) ssh_identity: Option<PathBuf>,
    /// Connect standard input and output to the job's SSH server; for OpenSSH
    #[arg(long, hide = true)]
    pub(crate) stdio: bool,
    /// File that describes how to reach the server; for OpenSSH
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) connection: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if args.stdio {
        let at = match &args.connection {
            Some(file) => ssh::read_saved_server(file, args.at.project.clone())?,
            None => args.at.clone(),
        };
        return context::with_context(&at, async |cx| proxy_stdio(cx, args).await);
    }
    let since = args.since.as_deref().map(parse_since).transpose()?;
    let attached = context::with_context(&args.at, async |cx| {
        let run = cx.run(&args.name).await?;
        if is_finished(&run.status) {
            return Err(CliError::new(format!("cannot attach to `{}`", args.name))
                .why(format!("it has ended: {}", run.status_message))
                .hint(format!("run `windlass logs {}` to see its output", args.name)));
        }
        let place = select_job(&run, args.replica, args.job);
        let spec = find_job_spec(&run, place);
        let ports = Ports {
            host: args.host,
            ports: ports(&spec, &args.port),
            replica: place.replica,
            job: place.job,
        };
        let how = FollowOptions {
            output: args.logs.then(|| OutputMode::Text(LogPrinter::new(args.raw, false, None))),
            since,
            forwards: Some(PortForwards::bind(ports).await?),
            may_stop: false,
            login: Some(SshLogin { at: args.at.clone(), place, identity: args.ssh_identity.clone() }),
        };
        follow::follow(cx, &run, how).await
    });
    attached.map_err(CliError::ours)
}

/// Selects a job. Without a replica number, selects the first running replica.
pub(super) fn select_job(run: &Run, replica: Option<i64>, rank: i64) -> LoginTarget {
    let all = job_progress(run);
    let of_rank = |job: &&JobProgress| job.job == rank;
    let any =
        all.iter().filter(of_rank).find(|job| job.status == "running").or_else(|| all.iter().find(of_rank));
    let replica = replica.unwrap_or_else(|| any.map_or(0, |job| job.replica));
    LoginTarget { replica, job: rank }
}

fn find_job_spec(run: &Run, place: LoginTarget) -> serde_json::Value {
    let mut specs = run.jobs.iter().map(|job| job.job_spec.value().unwrap_or_default());
    specs
        .find(|spec| spec["replica_num"] == place.replica && spec["job_num"] == place.job)
        .unwrap_or_default()
}

/// Relays stdin and stdout of an OpenSSH `ProxyCommand` to the job's SSH server. Ends when the job closes the
/// connection.
async fn proxy_stdio(cx: &Context, args: &Args) -> Result<Exit, CliError> {
    let run = cx.run(&args.name).await?;
    let place = select_job(&run, args.replica, args.job);
    let job = job_progress(&run)
        .into_iter()
        .find(|job| place.matches(job) && job.status == "running")
        .ok_or_else(|| {
            CliError::new(format!("cannot log in to `{}`", args.name))
                .code(ErrorCode::UnknownName)
                .why(format!(
                    "job {} of replica {} is not running: the run is {}",
                    place.job, place.replica, run.status
                ))
                .hint(format!("run `windlass why {}` for details", args.name))
        })?;
    let request = ConnectRequest { run_name: args.name.clone(), job_submission_id: job.submission, port: 0 };
    let far = match cx.client.connect_job(&cx.project, &request).await {
        Ok(far) => far,
        Err(error) => return Err(cx.explain(&error).await),
    };
    let (mut from_job, mut to_job) = split(far);
    let up = async {
        let mut input = tokio::io::stdin();
        let _ = copy(&mut input, &mut to_job).await;
        let _ = to_job.shutdown().await;
        std::future::pending::<()>().await;
    };
    let down = async {
        let mut out = output::async_stdout();
        let _ = copy(&mut from_job, &mut out).await;
        let _ = out.flush().await;
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
    Ok(Exit::Done)
}
