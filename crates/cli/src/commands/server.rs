//! `windlass server`: the control plane, until it is told to stop.

use std::{io::IsTerminal as _, path::Path};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::LevelFilter;
use windlass_server::{
    Server,
    config::{Given, Settings},
};

use crate::{
    cli::{LogFormat, LogLevel, ServerAction, ServerArgs},
    exit::Exit,
    home::Home,
    local::{self, Running},
    output,
    problem::Problem,
};

/// Enough for the work between database and network; the rest of the machine belongs to jobs.
const WORKERS_MAX: usize = 4;

pub(crate) fn run(args: ServerArgs) -> Result<Exit, Problem> {
    if args.background {
        // A new session has no terminal: neither Ctrl-C nor a closed window reaches it.
        rustix::process::setsid().map_err(|error| Problem::caused("leave the terminal", &error))?;
    }
    log(args.log_level, args.log_format);
    let action = args.action;
    let settings = settings(args)?;
    match action {
        None => turn(serve(settings, Start::Plain))?,
        Some(ServerAction::RotateKeys) => turn(rotate_keys(settings))?,
        Some(ServerAction::Stop) => stop(&settings.data_dir)?,
        Some(ServerAction::Status) => return Ok(status(&settings.data_dir)),
    }
    Ok(Exit::Done)
}

/// On a runtime of its own, to the end.
pub(crate) fn turn<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let workers = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, WORKERS_MAX);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(work)
}

fn stop(data_dir: &Path) -> Result<(), Problem> {
    match local::stop(data_dir)? {
        Some(running) => output::say(&format!("Stopped the server at {}.", running.url)),
        None => output::say(&format!("No server runs with the data in {}.", data_dir.display())),
    }
    Ok(())
}

fn status(data_dir: &Path) -> Exit {
    match Running::find(data_dir) {
        Some(running) => {
            output::data(&format!("running at {} (process {})", running.url, running.pid));
            Exit::Done
        }
        None => {
            output::data("not running");
            Exit::Failed
        }
    }
}

fn settings(args: ServerArgs) -> anyhow::Result<Settings> {
    let given = Given {
        host: args.host,
        port: args.port,
        data_dir: args.data_dir,
        database_url: args.database_url,
        admin_token: args.admin_token,
        key_file: args.key_file,
        no_local: args.no_local.then_some(true),
        agent: args.agent,
        local_runtime: args.local_runtime,
        docker_socket: args.docker_socket,
        mock_cloud: args.mock_cloud,
        keep_logs: args.keep_logs,
        log_store: args.log_store,
    };
    Ok(Settings::new(given, Home::path().as_deref())?)
}

/// Who starts the server, and so what it says.
pub(crate) enum Start {
    Plain,
    /// `windlass dev`: the token was drawn for it.
    Dev {
        token: String,
        kept: bool,
    },
}

pub(crate) async fn serve(settings: Settings, start: Start) -> anyhow::Result<()> {
    // Asked for before anything else, so that a signal during start ends it in good order too.
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    crate::open_files::raise();
    let data_dir = settings.data_dir.clone();
    let server = Server::start(settings).await?;
    let url = format!("http://{}", server.address());
    if let Some(token) = server.first_token() {
        output::say(&format!("Token of user `admin`, shown this once: {}", token.text()));
    }
    // The socket listens already: whoever reads the file may connect.
    let running = Running::this(&url);
    if let Some(running) = &running {
        running.write(&data_dir).context("write down where the server is")?;
    }
    match &start {
        Start::Plain => {}
        Start::Dev { token, kept } => tell_dev(&url, token, &data_dir, *kept),
    }
    output::say(&format!("windlass is ready at {url} (stop it with Ctrl-C)"));
    let stopped = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if let Start::Dev { token, kept: false } = start {
            super::dev::end_runs(&url, &token).await;
        }
    };
    server.run(stopped).await;
    if let Some(running) = running {
        running.remove(&data_dir);
    }
    Ok(())
}

fn tell_dev(url: &str, token: &str, data_dir: &Path, kept: bool) {
    let fate = if kept { "kept" } else { "removed at the end" };
    output::say(&format!(
        "A server for development; its data in {} is {fate}. In another terminal:\n\n  \
         export WINDLASS_URL={url} WINDLASS_TOKEN={token}\n  \
         windlass apply -f FILE\n\nor, to choose it for all terminals:\n\n  \
         windlass login --url {url} --token {token}\n",
        data_dir.display()
    ));
}

async fn rotate_keys(mut settings: Settings) -> anyhow::Result<()> {
    // Nobody should reach it meanwhile: any free port of this machine.
    settings.address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    settings.address.set_port(0);
    let server = Server::start(settings).await?;
    windlass_server::services::secrets::turn_keys(server.app()).await?;
    server.run(async {}).await;
    output::say("Everything is sealed with a new key; the old ones are gone.");
    Ok(())
}

pub(crate) fn log(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    let json = match format {
        LogFormat::Auto => !terminal,
        LogFormat::Json => true,
        LogFormat::Text => false,
    };
    if json {
        builder.json().flatten_event(true).init();
    } else {
        builder.with_ansi(terminal).init();
    }
}
