//! `windlass server`: the control plane, until it is told to stop.

use std::{io::IsTerminal as _, path::PathBuf};

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
    output,
};

/// Enough for the work between database and network; the rest of the machine belongs to jobs.
const WORKERS_MAX: usize = 4;

pub(crate) fn run(args: ServerArgs) -> anyhow::Result<Exit> {
    log(args.log_level, args.log_format);
    let action = args.action;
    let settings = settings(args)?;
    let workers = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, WORKERS_MAX);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        match action {
            None => serve(settings).await,
            Some(ServerAction::RotateKeys) => rotate_keys(settings).await,
        }
    })?;
    Ok(Exit::Done)
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
    };
    Ok(Settings::new(given, home().as_deref())?)
}

fn home() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("WINDLASS_HOME").or_else(|| set("HOME").map(|home| home.join(".windlass")))
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    // Asked for before anything else, so that a signal during start ends it in good order too.
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let server = Server::start(settings).await?;
    let url = format!("http://{}", server.address());
    if let Some(token) = server.first_token() {
        output::say(&format!("Token of user `admin`, shown this once: {}", token.text()));
    }
    output::say(&format!("windlass is ready at {url} (stop it with Ctrl-C)"));
    server
        .run(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await;
    Ok(())
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

fn log(level: LogLevel, format: LogFormat) {
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
