//! `windlass dev`: runs a server in the foreground, with all data in a directory that is deleted at exit.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_api::{
    operations::{ListRuns, StopRuns},
    runs::{ListRequest, StopRequest},
};
use windlass_server::config::{Settings, SettingsSource};

use super::server::{LogFormat, LogLevel, StartMode, block_on_workers, init_logging, serve};
use crate::{
    context::{Context, run_name},
    error::CliError,
    exit::Exit,
    local_server,
    login::{DEFAULT_PROJECT, ServerTarget},
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass dev                      run a server with temporary data; Ctrl-C stops it and its runs
  windlass dev --data-dir ./data    keep its data
  windlass dev --log-level debug    log more";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Port to listen on; 0 selects a free port
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(crate) port: u16,
    /// Data directory to keep; defaults to a temporary one that is deleted at exit
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Path of the `windlass-agent` binary; defaults to the directory of this binary
    #[arg(long, env = "WINDLASS_AGENT", value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
    /// Runtime of jobs on this machine: `any`, `docker` or `process`; defaults to `any` if a container engine responds
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_RUNTIME", value_name = "RUNTIME")]
    pub(crate) local_runtime: Option<String>,
    /// Privileges of plain processes on this machine: `confined`, `own` (those of the server) or `refused`
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_PROCESSES", value_name = "MODE")]
    pub(crate) local_processes: Option<String>,
    /// Log level
    #[arg(long, env = "WINDLASS_LOG", value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log_level: LogLevel,
}

/// Time limit for stopping all runs at exit.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A directory that is deleted with its guard, unless the user named it.
struct DataDir {
    path: PathBuf,
    kept: bool,
}

impl DataDir {
    fn new(given: Option<&Path>) -> Result<Self, CliError> {
        if let Some(path) = given {
            return Ok(Self { path: path.to_owned(), kept: true });
        }
        let name = format!("windlass-dev-{}-{}", std::process::id(), &local_server::generate_token()?[..8]);
        let path = std::env::temp_dir().join(name);
        // The directory must be new: in a shared `/tmp` another user may have created it.
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            CliError::from_error(&format!("failed to create `{}`", path.display()), &error)
        })?;
        Ok(Self { path, kept: false })
    }
}

impl Drop for DataDir {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    init_logging(args.log_level, LogFormat::Text);
    let place = DataDir::new(args.data_dir.as_deref())?;
    let token = local_server::generate_token()?;
    let given = SettingsSource {
        port: Some(args.port),
        data_dir: Some(place.path.clone()),
        admin_token: Some(token.clone()),
        agent: args.agent.clone(),
        local_runtime: args.local_runtime.clone(),
        local_processes: args.local_processes.clone(),
        ..SettingsSource::default()
    };
    let settings =
        Settings::new(given, None).map_err(|error| CliError::from_error("invalid settings", &error))?;
    block_on_workers(serve(settings, StartMode::Dev { token, kept: place.kept }))?;
    Ok(Exit::Done)
}

/// Stops all runs at exit. Runs on this machine would otherwise continue without their server.
pub(super) async fn stop_runs(url: &str, token: &str) {
    match tokio::time::timeout(STOP_TIMEOUT, try_stop_runs(url, token)).await {
        Ok(Ok(())) => {}
        Ok(Err(problem)) => output::print_message(&problem.text()),
        Err(_) => {
            output::print_message("Some runs did not end in time; they may continue without the server.")
        }
    }
}

async fn try_stop_runs(url: &str, token: &str) -> Result<(), CliError> {
    let chosen = ServerTarget {
        url: url.to_owned(),
        token: token.to_owned(),
        certificate: None,
        project: DEFAULT_PROJECT.to_owned(),
    };
    let cx = Context::new(chosen)?;
    let request = ListRequest { only_active: true, include_jobs: false, ..ListRequest::default() };
    loop {
        let runs_names: Vec<String> = cx.call::<ListRuns>(&request).await?.iter().map(run_name).collect();
        if runs_names.is_empty() {
            return Ok(());
        }
        cx.call::<StopRuns>(&StopRequest { runs_names, abort: true }).await?;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
