//! `windlass dispatch`: claims containers from the queue and runs them on this machine or through Slurm.

mod outputs;

use std::{path::PathBuf, time::Duration};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use windlass_api::queue_client::QueueHttpClient;
use windlass_dispatch::{
    local::{self, LocalScheduler},
    metrics::Metrics,
    queue_client::{DispatcherName, QueueClient},
    queue_events::QueueEvents,
    reconcile_loop::{Dispatcher, RoundError, Settings},
    scheduler::Scheduler,
    slurm::{self, Slurm},
    wake_socket::{self, WakeSocket},
};
use windlass_model::{error_chain::format_chain, time::Span};

use super::server::{LogFormat, LogLevel, block_on_workers, init_logging};
use crate::{cli::ServerArgs, context, error::CliError, exit::Exit, login, output};

const EXAMPLES: &str = "\
Examples:
  (umask 077; windlass dispatch token > /etc/windlass/dispatch.token)
  windlass dispatch local --server http://127.0.0.1:3000 --token-file /etc/windlass/dispatch.token
  windlass dispatch slurm --server https://windlass:3443 --server-cert cert.pem --token-file dispatch.token";

/// Maximum time for which frequent queue events are coalesced.
const COALESCE_MAX: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CommonArgs {
    /// URL of the server
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", default_value = "http://127.0.0.1:3000")]
    pub(crate) server: String,
    /// Certificate of an `https` server, in PEM format; defaults to the trust store of this machine. Also passed to
    /// executors
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    pub(crate) server_cert: Option<String>,
    /// File with the dispatcher's token; `windlass dispatch token` creates one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// Polling interval in seconds when there are no queue events
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub(crate) poll: f64,
    /// Seconds after which a container without a job is considered lost; increase it for a scheduler that shows jobs
    /// late
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) lost_after: u32,
    /// Seconds without a report from this process after which another process with the same token takes over
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) lease: u64,
    /// File for metrics in the Prometheus text format, written after every poll
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics_file: Option<PathBuf>,
    /// Socket on which the dispatcher accepts requests to poll immediately: `windlass dispatch knock FILE` sends one
    /// from a hook of the scheduler
    #[arg(long, value_name = "FILE")]
    pub(crate) hook_socket: Option<PathBuf>,
    /// Poll once, process the result and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Runtime of containers with an image: `auto` uses Docker, Podman or Apptainer, whichever the node has, and `oci` if
    /// it has none; `oci` needs `crun` or `runc` only; `process` ignores images and needs `--allow-process`
    #[arg(long, value_name = "RUNTIME", default_value = "auto",
          value_parser = ["auto", "process", "docker", "podman", "apptainer", "oci"])]
    pub(crate) runtime: String,
    /// Directory of the nodes for images that run without an engine, on a local disk; default: `/var/lib/windlass/images`
    /// if executors run as root, otherwise `/var/tmp/windlass-images-UID`
    #[arg(long, value_name = "DIR")]
    pub(crate) images: Option<String>,
    /// Run containers without an image (`none`) as plain processes. If executors run as root, each process has a
    /// separate user; otherwise it has all rights of the executor's user, including read access to its files
    #[arg(long)]
    pub(crate) allow_process: bool,
    /// Range of user IDs for plain processes, one each, if executors run as root; no other user may have these IDs
    #[arg(long, value_name = "FIRST-LAST", default_value = "1900100000-1900165535")]
    pub(crate) process_users: String,
    /// Network of containers with an image: `bridge` is a separate network, `host` is that of the machine, where its
    /// policy allows it. Apptainer supports only `host`
    #[arg(long, value_name = "NETWORK", default_value = "bridge", value_parser = ["bridge", "host"])]
    pub(crate) network: String,
    /// Directory in which the `output_path` content of containers is stored, which nodes must mount under the same path;
    /// or a bucket: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&credentials=FILE`. Not stored by default
    #[arg(long, value_name = "DIR|URL", value_parser = outputs::parse)]
    pub(crate) outputs: Option<outputs::Outputs>,
    /// Path of the `windlass-agent` binary; defaults to the directory of this binary
    #[arg(long, env = "WINDLASS_AGENT", value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Create a token for a dispatcher and print it once
    #[command(after_help = "Examples:\n  (umask 077; windlass dispatch token > dispatch.token)")]
    Token {
        #[command(flatten)]
        at: ServerArgs,
    },
    /// Make a dispatcher poll immediately; for a hook that runs when a job ends
    #[command(after_help = "Examples:\n  windlass dispatch knock /run/windlass/dispatch.sock")]
    #[command(name = "knock")]
    Notify {
        /// Path that was passed to the dispatcher as `--hook-socket`
        #[arg(value_name = "FILE")]
        socket: PathBuf,
    },
    /// Run containers on this machine
    #[command(
        after_help = "Examples:\n  windlass dispatch local --token-file dispatch.token --dir /var/lib/windlass/containers"
    )]
    Local {
        #[command(flatten)]
        common: CommonArgs,
        /// Directory for the state of attempts, so that a restarted dispatcher finds them
        #[arg(long, value_name = "DIR", default_value = "/var/lib/windlass/containers")]
        dir: PathBuf,
        /// Number of GPUs that containers may use, numbered from 0; defaults to those that the kernel reports
        #[arg(long, value_name = "COUNT")]
        gpus: Option<u32>,
    },
    /// Run containers as jobs of a Slurm cluster
    #[command(
        after_help = "Examples:\n  windlass dispatch slurm --token-file dispatch.token --account science"
    )]
    Slurm {
        #[command(flatten)]
        common: CommonArgs,
        /// Slurm configuration file, if it is not in the default location
        #[arg(long, env = "SLURM_CONF", value_name = "FILE")]
        slurm_conf: Option<PathBuf>,
        /// Tag for the jobs of this dispatcher; other jobs are never touched
        #[arg(long, value_name = "TAG", default_value = "windlass")]
        tag: String,
        /// Name of this cluster, by which fleets with `backend: slurm` select it
        #[arg(long, value_name = "NAME", default_value = "slurm")]
        name: String,
        /// Partition for containers that specify none
        #[arg(long, value_name = "PARTITION")]
        partition: Option<String>,
        /// Account that jobs are charged to
        #[arg(long, value_name = "ACCOUNT")]
        account: Option<String>,
        /// QOS for preemptible containers
        #[arg(long, value_name = "QOS")]
        preemptible_qos: Option<String>,
        /// Socket of a `slurmrestd` through which jobs are submitted, which is faster than starting `sbatch` for each
        #[arg(long, value_name = "FILE")]
        rest_socket: Option<PathBuf>,
    },
}

pub(crate) fn run(args: Args) -> Result<Exit, CliError> {
    let begun = Instant::now();
    match args.action {
        Action::Token { at } => create_token(&at),
        Action::Notify { socket } => {
            wake_socket::notify(&socket).map_err(|error| {
                CliError::from_error(
                    &format!("failed to wake the dispatcher at {}", socket.display()),
                    &error,
                )
                .hint("check that a dispatcher with this `--hook-socket` is running")
            })?;
            Ok(Exit::Done)
        }
        Action::Local { common, dir, gpus } => {
            check_flags(&common)?;
            init_logging(LogLevel::Info, LogFormat::Auto);
            let settings = local::Settings { dir, executor: find_agent_binary(&common)?, size: None, gpus };
            let scheduler = LocalScheduler::new(settings, begun);
            Ok(block_on_workers(serve(common, scheduler, begun, None))?)
        }
        Action::Slurm { common, slurm_conf, tag, name, partition, account, preemptible_qos, rest_socket } => {
            check_flags(&common)?;
            common.outputs.as_ref().map_or(Ok(()), outputs::Outputs::check_cluster)?;
            init_logging(LogLevel::Info, LogFormat::Auto);
            let settings = slurm::Settings {
                config: slurm_conf,
                partition,
                account,
                preemptible_qos,
                rest: rest_socket,
                ..slurm::Settings::new(tag, find_agent_binary(&common)?)
            };
            let scheduler = Slurm::since(settings, begun);
            Ok(block_on_workers(serve(common, scheduler, begun, Some(DispatcherName::of_slurm(name))))?)
        }
    }
}

/// Rejects contradictory flags before anything is started.
fn check_flags(common: &CommonArgs) -> Result<(), CliError> {
    if common.runtime == "process" && !common.allow_process {
        return Err(CliError::usage(
            "`--runtime process` requires `--allow-process`: it runs every container as a plain process",
        )
        .hint("pass `--allow-process` if this is intended"));
    }
    let found = std::fs::metadata(&common.token_file).map_err(|error| {
        CliError::from_error(&format!("failed to read {}", common.token_file.display()), &error)
    })?;
    if std::os::unix::fs::MetadataExt::mode(&found) & 0o007 != 0 {
        let file = common.token_file.display();
        return Err(CliError::new(format!(
            "other users of this machine have access to the token file {file}"
        ))
        .hint(format!("run `chmod 600 {file}`; replace the token if others may have read it")));
    }
    Ok(())
}

fn find_agent_binary(common: &CommonArgs) -> Result<PathBuf, CliError> {
    if let Some(agent) = &common.agent {
        return Ok(agent.clone());
    }
    let own = std::env::current_exe()
        .map_err(|error| CliError::from_error("failed to find the path of this program", &error))?;
    let next_to = own.with_file_name("windlass-agent");
    if next_to.is_file() {
        Ok(next_to)
    } else {
        Err(CliError::new("`windlass-agent` is not in the directory of this program")
            .hint("pass its path with `--agent FILE`"))
    }
}

fn create_token(at: &ServerArgs) -> Result<Exit, CliError> {
    context::with_context(at, async |cx| {
        let client = super::container::queue_client(cx)?;
        let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
        let made = client.post("api_client_authorizations", &body).await;
        let made = made.map_err(|error| CliError::from_error("failed to create a token", &error))?;
        let part = |name: &str| made[name].as_str().unwrap_or_default().to_owned();
        output::print_data(&format!("v2/{}/{}", part("uuid"), part("api_token")));
        Ok(Exit::Done)
    })
}

fn absolute_path(path: &std::path::Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Logs the isolation of plain processes, which matters to operators who do not run executors as root.
fn log_process_isolation(is_here: bool) {
    if is_here && rustix::process::geteuid().is_root() {
        tracing::info!("containers without an image run as plain processes, each with a separate user");
    } else {
        tracing::warn!(
            "containers without an image run as plain processes: unless executors run as root, every user of the queue \
             has the rights of the executors' user, and can read this dispatcher's token and other containers' files"
        );
    }
}

async fn serve(
    common: CommonArgs,
    scheduler: impl Scheduler + Sync,
    begun: Instant,
    name: Option<DispatcherName>,
) -> anyhow::Result<Exit> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = std::fs::read_to_string(&common.token_file)
        .map_err(|error| anyhow::anyhow!("failed to read {}: {error}", common.token_file.display()))?;
    let certificate = login::read_certificate(common.server_cert.as_deref())
        .map_err(|problem| anyhow::anyhow!(problem.parts().0))?;
    let client = QueueHttpClient::with_certificate(&common.server, &token, certificate.as_deref())?;
    if let Some(outputs) = common.outputs.as_ref().filter(|_| scheduler.is_here()) {
        outputs.check_bucket().await?;
    }
    let pause = Duration::from_secs_f64(common.poll.clamp(0.05, 3600.0));
    let news = QueueEvents::listen(client.clone());
    let hook = common.hook_socket.as_deref().map(|path| {
        WakeSocket::bind(path)
            .map_err(|error| anyhow::anyhow!("failed to listen on {}: {error}", path.display()))
    });
    let hook = hook.transpose()?;
    let listener = loop {
        match QueueClient::open(client.clone()).await {
            Ok(listener) => break listener.named(name),
            Err(error) if common.once || error.is_refusal() => return Err(error.into()),
            Err(error) => tracing::warn!(error = %format_chain(&error), "failed to reach the queue"),
        }
        tokio::time::sleep(pause).await;
    };
    tracing::info!(token = %listener.token_uuid, "dispatcher started");
    let mut environment = vec![
        ("WINDLASS_EXEC_RUNTIME".to_owned(), common.runtime.clone()),
        ("WINDLASS_EXEC_NETWORK".to_owned(), common.network.clone()),
    ];
    environment.extend(common.images.clone().map(|dir| ("WINDLASS_EXEC_IMAGES".to_owned(), dir)));
    if common.allow_process {
        log_process_isolation(scheduler.is_here());
        environment.push(("WINDLASS_EXEC_ALLOW_PROCESS".to_owned(), "true".to_owned()));
        environment.push(("WINDLASS_EXEC_PROCESS_USERS".to_owned(), common.process_users.clone()));
        let stored = common.outputs.as_ref().and_then(outputs::Outputs::hidden_path);
        let hidden = [Some(common.token_file.clone()), stored];
        let hidden: Vec<String> =
            hidden.into_iter().flatten().map(|path| absolute_path(&path).display().to_string()).collect();
        environment.push(("WINDLASS_EXEC_HIDE".to_owned(), hidden.join(":")));
    }
    // Pass on a non-default location of this machine's policy.
    let policy = std::env::var("WINDLASS_AGENT_POLICY").ok();
    environment.extend(policy.map(|file| ("WINDLASS_AGENT_POLICY".to_owned(), file)));
    if let Some(outputs) = &common.outputs {
        environment.extend(outputs.environment());
    }
    // Nodes cannot read files of this machine, so the certificate is passed by value.
    environment.extend(certificate.map(|text| ("WINDLASS_CERT".to_owned(), text)));
    // Pass on the address of the container engine, which users conventionally set in `DOCKER_HOST`.
    environment.extend(std::env::var("DOCKER_HOST").ok().map(|host| ("DOCKER_HOST".to_owned(), host)));
    let settings = Settings {
        begun,
        lost_after: Span::secs(common.lost_after.into()),
        environment,
        lease: Duration::from_secs(common.lease),
    };
    let mut metrics = Metrics::new(common.metrics_file.clone());
    let mut dispatcher = Dispatcher::new(listener, scheduler, settings);
    let mut waits_for = None;
    loop {
        let inspected = Instant::now();
        let done = match dispatcher.round().await {
            Ok(done) => {
                if waits_for.take().is_some() {
                    tracing::info!("took over from the previous dispatcher");
                }
                Some(done)
            }
            Err(error) if common.once => return Err(error.into()),
            Err(error @ RoundError::Waits { .. }) => {
                let reported = error.to_string();
                if waits_for.as_ref() != Some(&reported) {
                    tracing::warn!("{reported}");
                }
                waits_for = Some(reported);
                None
            }
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "failed to poll the queue");
                None
            }
        };
        metrics.add(done, inspected.elapsed());
        if common.once {
            dispatcher.release().await;
            return Ok(Exit::Done);
        }
        let rested = Instant::now() + (pause / 10).min(COALESCE_MAX);
        let knocked = async {
            match &hook {
                Some(hook) => hook.next().await,
                None => std::future::pending().await,
            }
        };
        let woken = async {
            tokio::select! {
                () = news.next() => {}
                () = knocked => {}
                () = dispatcher.changed() => {}
            }
            tokio::time::sleep_until(rested).await;
        };
        // Running containers continue without a dispatcher, and the next dispatcher finds them.
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = woken => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    dispatcher.release().await;
    Ok(Exit::Done)
}
