//! `windlass dispatch`: takes containers from the queue and has them run, here or by Slurm.

use std::{path::PathBuf, time::Duration};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use windlass_api::queue::QueueHttpClient;
use windlass_dispatch::{
    hook::{self, WakeSocket},
    local::{self, LocalScheduler},
    metrics::Metrics,
    news::QueueEvents,
    queue::{DispatcherName, QueueClient},
    rounds::{Dispatcher, RoundError, Settings},
    scheduler::Scheduler,
    slurm::{self, Slurm},
};
use windlass_model::{causes::chain, time::Span};

use super::server::{LogFormat, LogLevel, block_on_workers, log};
use crate::{cli::ServerArgs, context, exit::Exit, login, output, problem::CliError};

const EXAMPLES: &str = "\
Examples:
  (umask 077; windlass dispatch token > /etc/windlass/dispatch.token)
  windlass dispatch local --server http://127.0.0.1:3000 --token-file /etc/windlass/dispatch.token
  windlass dispatch slurm --server https://windlass:3443 --server-cert cert.pem --token-file dispatch.token";

/// News that come thick and fast are gathered for this long at most.
const COALESCE_MAX: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CommonArgs {
    /// Where the server is
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", default_value = "http://127.0.0.1:3000")]
    pub(crate) server: String,
    /// Certificate that an `https` server is known by, as PEM; what this machine trusts, if not given. Executors are
    /// given it too
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    pub(crate) server_cert: Option<String>,
    /// File with the dispatcher's token; `windlass dispatch token` makes one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// Seconds between two looks at the queue when there is no news
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub(crate) poll: f64,
    /// Seconds after which a container without a job is given up; a scheduler that is slow to show jobs needs more
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) lost_after: u32,
    /// Seconds after which another process with the same token takes over from this one when it is not heard of
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) lease: u64,
    /// Write figures to this file after every look, in the text format of Prometheus
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics_file: Option<PathBuf>,
    /// Look at once when somebody knocks at this socket: `windlass dispatch knock FILE` does, from a hook of the
    /// scheduler
    #[arg(long, value_name = "FILE")]
    pub(crate) hook_socket: Option<PathBuf>,
    /// Look once, do what there is to do, and end
    #[arg(long)]
    pub(crate) once: bool,
    /// What runs containers that have an image: `auto` takes Docker, Podman or Apptainer, whichever the node has;
    /// `process` ignores images, and needs `--allow-process`
    #[arg(long, value_name = "RUNTIME", default_value = "auto",
          value_parser = ["auto", "process", "docker", "podman", "apptainer"])]
    pub(crate) runtime: String,
    /// Run containers without an image (`none`) as plain processes. Each has a user of its own where executors are root;
    /// elsewhere it can do what their user can, and read what that user can read
    #[arg(long)]
    pub(crate) allow_process: bool,
    /// Users that plain processes have, one each, where executors are root; nobody else may have these numbers
    #[arg(long, value_name = "FIRST-LAST", default_value = "1900100000-1900165535")]
    pub(crate) process_users: String,
    /// Network of containers with an image: `bridge` is one of their own, `host` that of the machine, where its policy
    /// allows it. Apptainer knows that of the machine only
    #[arg(long, value_name = "NETWORK", default_value = "bridge", value_parser = ["bridge", "host"])]
    pub(crate) network: String,
    /// Keep what containers leave in their `output_path` below this directory, which nodes must see under the same name;
    /// it is not kept, if not given
    #[arg(long, value_name = "DIR")]
    pub(crate) outputs: Option<PathBuf>,
    /// The program `windlass-agent`; the one beside this program, if not given
    #[arg(long, env = "WINDLASS_AGENT", value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Make a token for a dispatcher and print it, this once
    #[command(after_help = "Examples:\n  (umask 077; windlass dispatch token > dispatch.token)")]
    Token {
        #[command(flatten)]
        at: ServerArgs,
    },
    /// Make a dispatcher look at once; for a hook that runs when a job ends
    #[command(after_help = "Examples:\n  windlass dispatch knock /run/windlass/dispatch.sock")]
    Knock {
        /// What the dispatcher was given as `--hook-socket`
        #[arg(value_name = "FILE")]
        socket: PathBuf,
    },
    /// Run containers on this machine
    #[command(
        after_help = "Examples:\n  windlass dispatch local --token-file dispatch.token --dir /var/lib/windlass/containers"
    )]
    LocalScheduler {
        #[command(flatten)]
        common: CommonArgs,
        /// Where attempts are kept, so that a dispatcher that comes back finds them
        #[arg(long, value_name = "DIR", default_value = "/var/lib/windlass/containers")]
        dir: PathBuf,
        /// How many GPUs containers may use, numbered from 0; those that the kernel shows, if not given
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
        /// Slurm's configuration, where it is not the usual one
        #[arg(long, env = "SLURM_CONF", value_name = "FILE")]
        slurm_conf: Option<PathBuf>,
        /// Marks the jobs of this dispatcher; others are never touched
        #[arg(long, value_name = "TAG", default_value = "windlass")]
        tag: String,
        /// What people call this cluster: fleets with `backend: slurm` choose it by this name
        #[arg(long, value_name = "NAME", default_value = "slurm")]
        name: String,
        /// Partition for containers that name none
        #[arg(long, value_name = "PARTITION")]
        partition: Option<String>,
        /// Account that jobs are charged to
        #[arg(long, value_name = "ACCOUNT")]
        account: Option<String>,
        /// Quality of service for containers that may be preempted
        #[arg(long, value_name = "QOS")]
        preemptible_qos: Option<String>,
        /// Hand jobs over through the `slurmrestd` at this socket, which is faster than a program for each
        #[arg(long, value_name = "FILE")]
        rest_socket: Option<PathBuf>,
    },
}

pub(crate) fn run(args: Args) -> Result<Exit, CliError> {
    let begun = Instant::now();
    match args.action {
        Action::Token { at } => token(&at),
        Action::Knock { socket } => {
            hook::notify(&socket).map_err(|error| {
                CliError::from_error(&format!("knock at {}", socket.display()), &error)
                    .hint("a dispatcher with `--hook-socket` listens there while it runs")
            })?;
            Ok(Exit::Done)
        }
        Action::Local { common, dir, gpus } => {
            check_flags(&common)?;
            log(LogLevel::Info, LogFormat::Auto);
            let settings = local::Settings { dir, executor: executor(&common)?, size: None, gpus };
            let scheduler = LocalScheduler::new(settings, begun);
            Ok(block_on_workers(serve(common, scheduler, begun, None))?)
        }
        Action::Slurm { common, slurm_conf, tag, name, partition, account, preemptible_qos, rest_socket } => {
            check_flags(&common)?;
            log(LogLevel::Info, LogFormat::Auto);
            let settings = slurm::Settings {
                config: slurm_conf,
                partition,
                account,
                preemptible_qos,
                rest: rest_socket,
                ..slurm::Settings::new(tag, executor(&common)?)
            };
            let scheduler = Slurm::since(settings, begun);
            Ok(block_on_workers(serve(common, scheduler, begun, Some(DispatcherName::of_slurm(name))))?)
        }
    }
}

/// What cannot be meant, before anything is started.
fn check_flags(common: &CommonArgs) -> Result<(), CliError> {
    if common.runtime == "process" && !common.allow_process {
        return Err(CliError::usage("`--runtime process` runs every container as a plain process")
            .hint("say `--allow-process` too if that is meant"));
    }
    let found = std::fs::metadata(&common.token_file)
        .map_err(|error| CliError::from_error(&format!("read {}", common.token_file.display()), &error))?;
    if std::os::unix::fs::MetadataExt::mode(&found) & 0o007 != 0 {
        let file = common.token_file.display();
        return Err(CliError::new(format!(
            "everybody on this machine may open {file}, which holds the token"
        ))
        .hint(format!("`chmod 600 {file}`; a token that others may have read is replaced by a new one")));
    }
    Ok(())
}

fn executor(common: &CommonArgs) -> Result<PathBuf, CliError> {
    if let Some(agent) = &common.agent {
        return Ok(agent.clone());
    }
    let own = std::env::current_exe().map_err(|error| CliError::from_error("find this program", &error))?;
    let beside = own.with_file_name("windlass-agent");
    if beside.is_file() {
        Ok(beside)
    } else {
        Err(CliError::new("`windlass-agent` is not beside this program").hint("name it with `--agent FILE`"))
    }
}

fn token(at: &ServerArgs) -> Result<Exit, CliError> {
    context::with_context(at, async |cx| {
        let client = super::container::client(cx)?;
        let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
        let made = client.post("api_client_authorizations", &body).await;
        let made = made.map_err(|error| CliError::from_error("make a token", &error))?;
        let part = |name: &str| made[name].as_str().unwrap_or_default().to_owned();
        output::data(&format!("v2/{}/{}", part("uuid"), part("api_token")));
        Ok(Exit::Done)
    })
}

fn absolute(path: &std::path::Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Plain processes are what people must know of who run this as somebody else than root.
fn log_process_isolation(is_here: bool) {
    if is_here && rustix::process::geteuid().is_root() {
        tracing::info!("containers without an image run as plain processes, each with a user of its own");
    } else {
        tracing::warn!(
            "containers without an image run as plain processes: unless executors are root, whoever may use the queue \
             can do what their user can, and read this dispatcher's token and other containers' files"
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
        .map_err(|error| anyhow::anyhow!("read {}: {error}", common.token_file.display()))?;
    let certificate = login::certificate(common.server_cert.as_deref())
        .map_err(|problem| anyhow::anyhow!(problem.parts().0))?;
    let client = QueueHttpClient::with_certificate(&common.server, &token, certificate.as_deref())?;
    let pause = Duration::from_secs_f64(common.poll.clamp(0.05, 3600.0));
    let news = QueueEvents::listen(client.clone());
    let hook = common.hook_socket.as_deref().map(|path| {
        WakeSocket::bind(path).map_err(|error| anyhow::anyhow!("listen at {}: {error}", path.display()))
    });
    let hook = hook.transpose()?;
    let door = loop {
        match QueueClient::open(client.clone()).await {
            Ok(door) => break door.named(name),
            Err(error) if common.once || error.is_refusal() => return Err(error.into()),
            Err(error) => tracing::warn!(error = %chain(&error), "reach the queue"),
        }
        tokio::time::sleep(pause).await;
    };
    tracing::info!(token = %door.token_uuid, "dispatching");
    let mut environment = vec![
        ("WINDLASS_EXEC_RUNTIME".to_owned(), common.runtime.clone()),
        ("WINDLASS_EXEC_NETWORK".to_owned(), common.network.clone()),
    ];
    if common.allow_process {
        log_process_isolation(scheduler.is_here());
        environment.push(("WINDLASS_EXEC_ALLOW_PROCESS".to_owned(), "true".to_owned()));
        environment.push(("WINDLASS_EXEC_PROCESS_USERS".to_owned(), common.process_users.clone()));
        let hidden = [Some(&common.token_file), common.outputs.as_ref()];
        let hidden: Vec<String> =
            hidden.into_iter().flatten().map(|path| absolute(path).display().to_string()).collect();
        environment.push(("WINDLASS_EXEC_HIDE".to_owned(), hidden.join(":")));
    }
    // Where this machine's policy is, for those that have it elsewhere.
    let policy = std::env::var("WINDLASS_AGENT_POLICY").ok();
    environment.extend(policy.map(|file| ("WINDLASS_AGENT_POLICY".to_owned(), file)));
    let outputs = common.outputs.as_ref().map(|dir| dir.display().to_string());
    environment.extend(outputs.map(|dir| ("WINDLASS_EXEC_OUTPUTS".to_owned(), dir)));
    // On a node there is no file of this machine.
    environment.extend(certificate.map(|text| ("WINDLASS_CERT".to_owned(), text)));
    // Where the engine is, for those that are told so as the whole world is.
    environment.extend(std::env::var("DOCKER_HOST").ok().map(|host| ("DOCKER_HOST".to_owned(), host)));
    let settings = Settings {
        begun,
        lost_after: Span::secs(common.lost_after.into()),
        environment,
        lease: Duration::from_secs(common.lease),
    };
    let mut metrics = Metrics::new(common.metrics_file.clone());
    let mut dispatcher = Dispatcher::new(door, scheduler, settings);
    let mut waits_for = None;
    loop {
        let looked = Instant::now();
        let done = match dispatcher.round().await {
            Ok(done) => {
                if waits_for.take().is_some() {
                    tracing::info!("the other dispatcher is gone: this one works now");
                }
                Some(done)
            }
            Err(error) if common.once => return Err(error.into()),
            Err(error @ RoundError::Waits { .. }) => {
                let told = error.to_string();
                if waits_for.as_ref() != Some(&told) {
                    tracing::warn!("{told}");
                }
                waits_for = Some(told);
                None
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "look");
                None
            }
        };
        metrics.add(done, looked.elapsed());
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
        // What runs goes on without a dispatcher, and the next one finds it.
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
