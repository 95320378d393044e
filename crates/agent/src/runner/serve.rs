//! The runner process: listens, takes the job through its steps, and exits with the job's exit status.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use windlass_model::job::TerminationReason;

use super::{
    api,
    init::NOTICES_VARIABLE,
    job::{Job, RunnerContext, StopSignal, error_chain},
    job_end::{EndCause, describe_end},
    launch,
    login_session::SessionProvider,
    metrics::Meter,
    ssh,
    state_log::StateLog,
    steps::{Step, StepEvent},
    supervisor,
};
use crate::{
    http,
    isolation::{ConfinedTask, restrict},
    spool::{self, Spool, Stream, Timestamps},
    task_dir::{HTTP_PORT_FILE, RUNNER_CONFIG, RUNNER_SOCKET, RunnerConfig, SSH_PORT_FILE},
};

/// Only the shim and root may connect to the socket.
const SOCKET_MODE: u32 = 0o600;
const HOST_KEY: &str = "ssh.key";
/// Exit code of a runner whose job never ran.
const EXIT_NOT_RUN: u8 = 1;
/// Exit code of a runner that failed itself.
pub const EXIT_RUNNER_FAILED: u8 = 125;

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("failed to read {}", .file.display())]
    Config {
        file: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to parse {}", .file.display())]
    Understand {
        file: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("failed to start the event loop")]
    Runtime(#[source] io::Error),
    #[error("failed to read the environment of the runner")]
    Observe(#[source] io::Error),
    #[error("failed to open the spool")]
    Spool(#[from] spool::write::Error),
    #[error("failed to open the log of states")]
    States(#[source] io::Error),
    #[error("failed to listen on {what}")]
    Listen {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("failed to install signal handlers")]
    Signals(#[source] io::Error),
}

/// Runs until the output has been read; the exit code is the job's.
pub fn main(dir: &Path) -> ExitCode {
    match run(dir) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            use std::io::Write as _;
            let _ = io::stderr().write_all(format!("runner: {}\n", error_chain(&error)).as_bytes());
            ExitCode::from(EXIT_RUNNER_FAILED)
        }
    }
}

fn run(dir: &Path) -> Result<u8, ServeError> {
    launch::mark_inherited_files().map_err(ServeError::Observe)?;
    let config = read_config(dir)?;
    let around = RunnerContext::inspect(dir, config).map_err(ServeError::Observe)?;
    match &around.confined {
        Some(ConfinedTask { user: Some(_), .. }) => restrict::restrict_children(),
        // The job has the same user: it must not read the memory of this process.
        Some(ConfinedTask { user: None, .. }) => restrict::hide_memory().map_err(ServeError::Observe)?,
        None => {}
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ServeError::Runtime)?;
    let code = runtime.block_on(serve(around))?;
    // Threads that still read for a client are not waited for.
    runtime.shutdown_background();
    Ok(code)
}

fn read_config(dir: &Path) -> Result<RunnerConfig, ServeError> {
    let file = dir.join(RUNNER_CONFIG);
    let text = std::fs::read(&file).map_err(|source| ServeError::Config { file: file.clone(), source })?;
    serde_json::from_slice(&text).map_err(|source| ServeError::Understand { file, source })
}

async fn serve(around: RunnerContext) -> Result<u8, ServeError> {
    let spool = Spool::open(&around.run, Timestamps::new())?;
    init_logging(&spool);
    log_notices();
    let states = StateLog::open(&around.run, Arc::clone(spool.stamps())).map_err(ServeError::States)?;
    let job = Arc::new(Job::new(around, spool, states));
    let stop = CancellationToken::new();
    let mut servers = JoinSet::new();
    handle_signals(&job)?;
    listen(&job, &stop, &mut servers).await.inspect_err(|error| record_port_conflict(&job, error))?;
    let code = run_steps(&job).await;
    tracing::info!(code, "runner exiting");
    stop.cancel();
    while servers.join_next().await.is_some() {}
    if let Err(error) = job.spool.writer(Stream::Runner).finish() {
        tracing::debug!(%error, "failed to complete the runner's log");
    }
    Ok(code)
}

/// Writes the runner's log to a separate stream of the spool.
fn init_logging(spool: &Arc<Spool>) {
    let writer = spool.writer(Stream::Runner).clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .with_target(false)
        // It would print an error to stderr for a line that cannot be written, and panic when that is full too.
        .log_internal_errors(false)
        .with_max_level(tracing::Level::INFO)
        .finish();
    // Only a test in this process could have set another before.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Logs the messages of the init process.
fn log_notices() {
    if let Ok(lines) = std::env::var(NOTICES_VARIABLE) {
        for line in lines.lines() {
            tracing::info!("{line}");
        }
    }
}

fn handle_signals(job: &Arc<Job>) -> Result<(), ServeError> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signals = signal(kind).map_err(ServeError::Signals)?;
        let job = Arc::clone(job);
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                job.stop(StopSignal::End);
            }
        });
    }
    Ok(())
}

async fn listen(
    job: &Arc<Job>,
    stop: &CancellationToken,
    servers: &mut JoinSet<()>,
) -> Result<(), ServeError> {
    let config = &job.around.config;
    let meter = Arc::new(Meter::new(config.gpus.clone()));
    if let Some(address) = &config.compat_http {
        let listener = bind(address).await?;
        if config.has_any_http_port() {
            let listen = |source| ServeError::Listen { what: address.clone(), source };
            let port = listener.local_addr().map_err(listen)?.port();
            write_port(&job.around.run.join(HTTP_PORT_FILE), port).map_err(listen)?;
        }
        servers.spawn(http::serve(listener, api::compat_router(job, &meter), stop.clone()));
    }
    if let Some(address) = &config.ssh_listen {
        let listener = match bind(address).await {
            Err(ServeError::Listen { source, .. })
                if config.ssh_any_port_if_taken && source.kind() == io::ErrorKind::AddrInUse =>
            {
                bind(&with_any_port(address)).await?
            }
            bound => bound?,
        };
        // Bound before anything is served, so that a port in use ends the runner at once.
        let for_nodes = match &config.node_ssh_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        servers.spawn(serve_ssh(Arc::clone(job), listener, for_nodes, stop.clone()));
    }
    // Last: a client that finds the socket finds everything else as well.
    let path = job.around.run.join(RUNNER_SOCKET);
    let listen = |source| ServeError::Listen { what: path.display().to_string(), source };
    let listener = http::bind_unix(&path, SOCKET_MODE).map_err(listen)?;
    servers.spawn(http::serve(listener, api::authenticated_router(job, &meter), stop.clone()));
    Ok(())
}

/// Records that another process uses a port which this runner needs. The shim reads it after the exit.
fn record_port_conflict(job: &Job, error: &ServeError) {
    if let ServeError::Listen { what, source } = error
        && source.kind() == io::ErrorKind::AddrInUse
    {
        let reason = TerminationReason::PortsBindingFailed.as_str();
        let why = format!("another process on the host listens on {what}, which this job needs");
        job.states.say(describe_end(EndCause::NotStarted { reason, why }, None, false));
    }
}

/// Returns the same address with port 0, which means any free port.
fn with_any_port(address: &str) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:0")
}

async fn bind(address: &str) -> Result<TcpListener, ServeError> {
    // Names would need a resolver; `localhost` is the one that dstack's servers use.
    let numeric = address.replacen("localhost", "127.0.0.1", 1);
    let listen = |source| ServeError::Listen { what: address.to_owned(), source };
    let parsed: std::net::SocketAddr = numeric.parse().map_err(|_| {
        listen(io::Error::new(io::ErrorKind::InvalidInput, "expected an IP address and port"))
    })?;
    TcpListener::bind(parsed).await.map_err(listen)
}

/// Serves SSH, also for other nodes on the same host. The host key is created concurrently: the job does not wait for
/// it.
async fn serve_ssh(
    job: Arc<Job>,
    listener: TcpListener,
    for_nodes: Option<TcpListener>,
    stop: CancellationToken,
) {
    let run = &job.around.run;
    let port = match listener.local_addr() {
        Ok(address) => address.port(),
        Err(error) => return tracing::warn!(%error, "failed to determine the port of the SSH server"),
    };
    if let Err(error) = write_port(&run.join(SSH_PORT_FILE), port) {
        tracing::warn!(%error, "failed to record the port of the SSH server");
    }
    let host_key = match ssh::HostKey::keep(&run.join(HOST_KEY)) {
        Ok(host_key) => host_key,
        Err(error) => {
            return tracing::warn!(error = error_chain(&error), "failed to prepare the SSH host key");
        }
    };
    let sessions: SessionProvider = {
        let job = Arc::clone(&job);
        Arc::new(move || job.session_for())
    };
    let has_port = job.around.config.compat_http.is_some() && !job.around.config.has_any_http_port();
    let config = ssh::Config {
        keys: job.keys.clone(),
        host_key,
        sessions: Some(sessions),
        connections: job.connections.clone(),
        // Decided by the configuration and not by which process listens: on the host's network that may be a foreign
        // process.
        runner: (!has_port).then(|| api::guest_router(spool::http::job_tail_router(&job.spool))),
    };
    match for_nodes {
        Some(other) => {
            tokio::join!(ssh::serve(listener, config.clone(), stop.clone()), ssh::serve(other, config, stop));
        }
        None => ssh::serve(listener, config, stop).await,
    }
}

/// Writes the file atomically: the shim may read it at any moment.
fn write_port(file: &Path, port: u16) -> io::Result<()> {
    let next_to = file.with_extension("port.new");
    launch::write_with_mode(&next_to, format!("{port}\n").as_bytes(), 0o644)?;
    std::fs::rename(next_to, file)
}

/// Runs all steps, from waiting for the job to the last reader of its output.
async fn run_steps(job: &Job) -> u8 {
    let timeout = Duration::from_secs(job.around.config.wait_secs);
    if !supervisor::wait_for_start(job, timeout).await {
        job.happen(StepEvent::SubmitTimeout);
        tracing::warn!(secs = timeout.as_secs(), "job was not started in time");
        return EXIT_NOT_RUN;
    }
    job.reached(Step::ServeLogs).await;
    // The process that stops the runner reads the output from disk.
    if !job.is_ending() {
        wait_for_readers(job, timeout).await;
    }
    let status = job.states.end().and_then(|end| end.exit_status);
    status.map_or(EXIT_NOT_RUN, |status| u8::try_from(status).unwrap_or(u8::MAX))
}

/// Waits for the server and the last reader, at most `patience`.
async fn wait_for_readers(job: &Job, time_limit: Duration) {
    let read = async {
        job.spool.all_read().await;
        // A dstack server cannot read the disk. The output of a job that printed nothing counts as read from the start,
        // but the server must still learn of the end.
        if job.around.config.compat_http.is_some() {
            job.end_reported().await;
        }
        job.happen(StepEvent::ServerReadAll);
        job.happen(StepEvent::NoReadersLeft);
    };
    tokio::select! {
        read = timeout(time_limit, read) => {
            if read.is_err() {
                tracing::warn!(secs = time_limit.as_secs(), "output was not read to its end in time");
                job.happen(StepEvent::ReadTimeout);
            }
        }
        () = job.wait_for_shutdown() => {}
    }
}
