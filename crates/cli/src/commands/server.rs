//! `windlass server`: runs the control plane until it is stopped.

mod backup;
mod limits;
mod oidc;

use std::{
    ffi::OsString,
    io::{IsTerminal as _, Write as _},
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::LevelFilter;
use windlass_server::{
    Server,
    config::{Settings, SettingsSource, read_token_file},
};

use crate::{
    cli::{Format, OutputArgs},
    error::CliError,
    exit::Exit,
    home::Home,
    local_server::{self, ServerProcess},
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass server                                        listen on port 3000 of this machine, with SQLite
  windlass server --host 0.0.0.0 --database-url postgres://windlass@db/windlass
  windlass server start                                  start in the background
  windlass server status && windlass server stop
  windlass server backup /backups/windlass.db            copy the SQLite database of a running server";

const STATUS: &str = "\
Examples:
  windlass server status            exit code 1 if no server is running
  windlass server status -o name    only its URL";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = false, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    /// Address to listen on
    #[arg(long, env = "WINDLASS_SERVER_HOST", global = true, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Port to listen on; 0 selects a free port
    #[arg(long, env = "WINDLASS_SERVER_PORT", global = true, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// Directory for the files of the server
    #[arg(long, env = "WINDLASS_SERVER_DATA_DIR", global = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Database: `sqlite:PATH` or `postgres://…`
    #[arg(
        long,
        env = "WINDLASS_SERVER_DATABASE_URL",
        global = true,
        value_name = "URL",
        hide_env_values = true
    )]
    pub(crate) database_url: Option<String>,
    /// Token of the user `admin`; generated at the first start by default. Prefer a file: command lines stay in the
    /// shell history
    #[arg(
        long,
        env = "WINDLASS_SERVER_ADMIN_TOKEN",
        global = true,
        value_name = "TOKEN",
        hide_env_values = true
    )]
    pub(crate) admin_token: Option<String>,
    /// File with the token of the user `admin`
    #[arg(
        long,
        env = "WINDLASS_SERVER_ADMIN_TOKEN_FILE",
        global = true,
        value_name = "FILE",
        conflicts_with = "admin_token"
    )]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Expiry of tokens created for users, in days: `90d`, or `off` for never
    #[arg(long, env = "WINDLASS_SERVER_TOKEN_EXPIRY", global = true, value_name = "DAYS")]
    pub(crate) token_expiry: Option<String>,
    /// Replace the values of secrets with asterisks in the logs of jobs; enabled by default
    #[arg(long, env = "WINDLASS_SERVER_MASK_SECRETS", global = true, value_name = "BOOL")]
    pub(crate) mask_secrets: Option<bool>,
    /// File with the encryption keys of secrets; the same on every replica
    #[arg(long, env = "WINDLASS_SERVER_KEY_FILE", global = true, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Detach from the terminal; set by commands that start a server
    #[arg(long, hide = true)]
    pub(crate) background: bool,
    /// Preferred port of a background server without `--port`; any free port if it is in use
    #[arg(long, hide = true, global = true)]
    pub(crate) usual_port: Option<u16>,
    /// Do not offer this machine as fleet `local`
    #[arg(long, global = true)]
    pub(crate) no_local: bool,
    /// Path of the `windlass-agent` binary; defaults to the directory of this binary
    #[arg(long, env = "WINDLASS_AGENT", global = true, value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
    /// Static `crun` or `runc`, one per processor architecture, uploaded to SSH hosts so that containers need nothing
    /// installed there: `FILE@sha256:HEX[,…]`
    #[arg(long, env = "WINDLASS_SERVER_OCI_PROGRAMS", global = true, value_name = "FILES")]
    pub(crate) oci_programs: Option<String>,
    /// Runtime of jobs on this machine: `any` (containers for jobs with an image, plain processes for others), `any-oci`
    /// (the same without a container engine), `docker` or `process`. Defaults to `any` if an engine responds or once did,
    /// and to `any-oci` if none is installed
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_RUNTIME", global = true, value_name = "RUNTIME")]
    pub(crate) local_runtime: Option<String>,
    /// Privileges of plain processes on this machine: `confined` (default; isolated from other tasks and from the
    /// server), `own` (those of the server, while it has one user) or `refused`
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_PROCESSES", global = true, value_name = "MODE")]
    pub(crate) local_processes: Option<String>,
    /// Socket of this machine's container engine; defaults to `DOCKER_HOST` or the usual paths
    #[arg(long, env = "WINDLASS_SERVER_DOCKER_SOCKET", global = true, value_name = "PATH")]
    pub(crate) docker_socket: Option<PathBuf>,
    /// Image of jobs that specify none, on instances that run only containers
    #[arg(long, env = "WINDLASS_SERVER_DEFAULT_IMAGE", global = true, value_name = "IMAGE")]
    pub(crate) default_image: Option<String>,
    /// Image with the CUDA compiler, for jobs with `nvcc: true`
    #[arg(long, env = "WINDLASS_SERVER_NVCC_IMAGE", global = true, value_name = "IMAGE")]
    pub(crate) nvcc_image: Option<String>,
    /// Image with Docker and `start-dockerd`, for jobs with `docker: true`
    #[arg(long, env = "WINDLASS_SERVER_DOCKER_IMAGE", global = true, value_name = "IMAGE")]
    pub(crate) docker_image: Option<String>,
    /// Storage for logs of jobs: `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL`
    #[arg(long, env = "WINDLASS_SERVER_LOG_STORE", global = true, value_name = "PLACE")]
    pub(crate) log_store: Option<String>,
    /// Retention of job logs after the end of their run: `30d`, or `off` for no limit
    #[arg(long, env = "WINDLASS_SERVER_KEEP_LOGS", global = true, value_name = "DAYS")]
    pub(crate) keep_logs: Option<String>,
    /// Time without contact to a host after which its jobs are lost and may be retried elsewhere: `2m`
    #[arg(long, env = "WINDLASS_SERVER_LOST_AFTER", global = true, value_name = "TIME")]
    pub(crate) lost_after: Option<String>,
    /// Delay before the first retry of a run; later delays are multiples of it: `15s`
    #[arg(long, env = "WINDLASS_SERVER_RETRY_DELAY", global = true, value_name = "TIME")]
    pub(crate) retry_delay: Option<String>,
    /// Time after which another replica takes over the work of one that died: `30s`, at least `5s`
    #[arg(long, env = "WINDLASS_SERVER_LOCK_TIMEOUT", global = true, value_name = "TIME")]
    pub(crate) lock_timeout: Option<String>,
    /// Maximum number of managed jobs that are launching, over all replicas
    #[arg(long, env = "WINDLASS_SERVER_JOBS_LAUNCHING_MAX", global = true, value_name = "N")]
    pub(crate) jobs_launching_max: Option<u32>,
    /// Maximum number of managed jobs that are alive, over all replicas
    #[arg(long, env = "WINDLASS_SERVER_JOBS_ALIVE_MAX", global = true, value_name = "N")]
    pub(crate) jobs_alive_max: Option<u32>,
    /// Port for HTTPS, in addition to HTTP; uses a self-signed certificate unless `--tls-cert` is set
    #[arg(long, env = "WINDLASS_SERVER_TLS_PORT", global = true, value_name = "PORT")]
    pub(crate) tls_port: Option<u16>,
    /// Certificate for HTTPS, in PEM format
    #[arg(long, env = "WINDLASS_SERVER_TLS_CERT", global = true, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM format
    #[arg(long, env = "WINDLASS_SERVER_TLS_KEY", global = true, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Let every user request containers of the queue, not only users with the `queue` right
    #[arg(long, env = "WINDLASS_SERVER_QUEUE_FOR_EVERYONE", global = true)]
    pub(crate) queue_for_everyone: bool,
    /// Lifetime of tokens that users create for the queue's API: `14d` by default, or `off`. They also end with the
    /// user's own token
    #[arg(long, env = "WINDLASS_SERVER_QUEUE_TOKEN_LIFE", global = true, value_name = "DAYS")]
    pub(crate) queue_token_life: Option<String>,
    /// Networks in which SSH hosts are allowed although they are loopback, link-local or similar: `127.0.0.0/8`
    #[arg(long, env = "WINDLASS_SERVER_ALLOW_HOST_NETWORKS", global = true, value_name = "CIDR,…")]
    pub(crate) allow_host_networks: Option<String>,
    /// Maximum time to query a registry for an image before a run is placed: `5s` by default, or `off`
    #[arg(
        long,
        env = "WINDLASS_SERVER_IMAGE_LOOKUP",
        global = true,
        value_name = "TIME",
        hide_env_values = true
    )]
    pub(crate) image_lookup: Option<String>,
    /// Registries that the server queries without TLS, and although they may be on this machine: `10.0.0.5:5000`
    #[arg(long, env = "WINDLASS_SERVER_INSECURE_REGISTRIES", global = true, value_name = "HOST:PORT,…")]
    pub(crate) insecure_registries: Option<String>,
    /// Private networks in which the server queries registries; it does not contact others: `10.0.0.0/8`
    #[arg(long, env = "WINDLASS_SERVER_REGISTRY_NETWORKS", global = true, value_name = "CIDR,…")]
    pub(crate) registry_networks: Option<String>,
    /// Do not serve the web UI
    #[arg(long, env = "WINDLASS_SERVER_NO_UI", global = true)]
    pub(crate) no_ui: bool,
    /// Port that serves only services, as a separate origin for browsers; pages of services on the main port are
    /// sandboxed
    #[arg(long, env = "WINDLASS_SERVER_SERVICES_PORT", global = true, value_name = "PORT")]
    pub(crate) services_port: Option<u16>,
    /// Let browsers on other machines log in without TLS, although others could read their tokens
    #[arg(long, env = "WINDLASS_SERVER_INSECURE_WEB_LOGIN", global = true)]
    pub(crate) insecure_web_login: bool,
    /// Log level
    #[arg(long, env = "WINDLASS_LOG", global = true, value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log_level: LogLevel,
    /// Log format; `auto` is text on a terminal and JSON elsewhere
    #[arg(long, env = "WINDLASS_LOG_FORMAT", global = true, value_enum, default_value_t = LogFormat::Auto)]
    pub(crate) log_format: LogFormat,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) oidc: oidc::OidcArgs,
    #[command(flatten)]
    pub(crate) limits: limits::LimitArgs,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Start the server of this machine in the background, unless it is running
    #[command(
        after_help = "Examples:\n  windlass server start    as the first command does if no server is configured"
    )]
    Start,
    /// Create a new encryption key, re-encrypt all secrets with it and delete the old keys
    #[command(after_help = "Examples:\n  windlass server stop && windlass server rotate-keys")]
    RotateKeys,
    /// Stop the server that uses this data directory
    #[command(
        after_help = "Examples:\n  windlass server stop\n  windlass server stop --data-dir /var/lib/windlass"
    )]
    Stop,
    /// Show whether a server is running with this data directory, and its URL
    #[command(after_help = STATUS)]
    Status,
    /// Back up the database to a new file, also while the server runs
    #[command(after_help = backup::BACKUP)]
    Backup {
        /// Target file; it must not exist
        file: PathBuf,
    },
    /// Replace the database with a backup
    #[command(after_help = backup::RESTORE)]
    Restore {
        /// File written by `windlass server backup`
        file: PathBuf,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum LogFormat {
    Auto,
    Text,
    Json,
}

/// Name of the file with the token that the first start generated.
const FIRST_TOKEN_FILE: &str = "first-admin-token";
/// Maximum size of a token on the command line.
const TOKEN_BYTES_MAX: usize = 4096;

/// Enough for database and network I/O; the rest of the machine belongs to jobs.
const WORKERS_MAX: usize = 4;

pub(crate) fn run(mut args: Args) -> Result<Exit, CliError> {
    if args.background {
        // A new session has no terminal: Ctrl-C and a closed window do not affect it.
        rustix::process::setsid()
            .map_err(|error| CliError::from_error("failed to detach from the terminal", &error))?;
    }
    let (action, format) = (args.action.take(), args.output.format);
    if matches!(action, Some(Action::Start)) {
        return start_in_background(&args, format);
    }
    if let (None, Some(token)) = (&action, &args.admin_token)
        && let Some(words) = strip_token(std::env::args_os().skip(1).collect())
    {
        return Err(reexec_without_token(words, token));
    }
    init_logging(args.log_level, args.log_format);
    let settings = settings(args)?;
    match action {
        None | Some(Action::Start) => block_on_workers(serve(settings, StartMode::Plain))?,
        Some(Action::RotateKeys) => block_on_workers(rotate_keys(settings))?,
        Some(Action::Stop) => stop(&settings.data_dir)?,
        Some(Action::Status) => return status(&settings.data_dir, format),
        Some(Action::Backup { file }) => backup::back_up(&settings, &file, format)?,
        Some(Action::Restore { file }) => backup::restore(&settings, &file, format)?,
    }
    Ok(Exit::Done)
}

/// Runs a future to completion on a separate runtime.
pub(crate) fn block_on_workers<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let workers = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, WORKERS_MAX);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    runtime.block_on(work)
}

/// Returns the arguments of a command line without the token, or `None` if they contain none.
fn strip_token(words: Vec<OsString>) -> Option<Vec<OsString>> {
    let before = words.len();
    let mut words = words.into_iter();
    let mut left = Vec::new();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--admin-token") => drop(words.next()),
            Some(text) if text.starts_with("--admin-token=") => {}
            Some(_) | None => left.push(word),
        }
    }
    (left.len() < before).then_some(left)
}

/// Replaces this process with the same program without the token in its arguments, because all users of the machine can
/// read the command line of a process. The new program reads the token from a pipe. Returns only on failure.
fn reexec_without_token(mut words: Vec<OsString>, token: &str) -> CliError {
    let failed = |error: &dyn std::error::Error| {
        CliError::from_error("failed to remove the token from the command line", error)
    };
    let (read, mut write) = match std::io::pipe() {
        Ok(pipe) => pipe,
        Err(error) => return failed(&error),
    };
    // Smaller than the buffer of a pipe, so the write does not wait for a reader.
    if token.len() > TOKEN_BYTES_MAX {
        return CliError::usage(format!("the token is longer than {TOKEN_BYTES_MAX} bytes"));
    }
    if let Err(error) = write.write_all(token.as_bytes()) {
        return failed(&error);
    }
    drop(write);
    if let Err(error) = rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::empty()) {
        return failed(&error);
    }
    words.push("--admin-token-file".into());
    words.push(format!("/dev/fd/{}", read.as_raw_fd()).into());
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return failed(&error),
    };
    let error = Command::new(program)
        .args(words)
        .env_remove("WINDLASS_SERVER_ADMIN_TOKEN")
        .env_remove("WINDLASS_SERVER_ADMIN_TOKEN_FILE")
        .exec();
    failed(&error)
}

fn start_in_background(args: &Args, format: Format) -> Result<Exit, CliError> {
    let home = Home::find()?;
    if args.data_dir.as_ref().is_some_and(|given| *given != home.server_dir()) {
        return Err(CliError::usage("`server start` accepts only the data directory in `WINDLASS_HOME`")
            .hint("run `windlass server --data-dir DIR` to use another one, in the foreground"));
    }
    let flags = server_flags(std::env::args_os().skip(1).collect());
    let is_plain = flags.is_empty();
    let admin_token = match (&args.admin_token, &args.admin_token_file) {
        (None, Some(file)) => Some(read_token_file(file).map_err(anyhow::Error::from)?),
        (given, _) => given.clone(),
    };
    let (login, started) =
        local_server::start_once(&home, local_server::StartRequest::Flags { flags, admin_token })?;
    if started {
        output::print_message(&format!(
            "Started a server at {}. Run `windlass server stop` to stop it.",
            login.url
        ));
    } else if is_plain {
        output::print_message(&format!("A server is already running at {}.", login.url));
    } else {
        output::print_message(&format!(
            "A server is already running at {}. Run `windlass server stop` first to start it with these flags.",
            login.url
        ));
    }
    status(&home.server_dir(), format)
}

/// Returns the flags of `server start` that are passed on to the server.
fn server_flags(words: Vec<OsString>) -> Vec<OsString> {
    let mut flags = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("server" | "start") => {}
            // Flags for the output of this command; the token is passed separately.
            Some("-o" | "--output" | "--admin-token" | "--admin-token-file" | "--data-dir") => {
                drop(words.next());
            }
            Some(text)
                if ["-o", "--output=", "--admin-token=", "--admin-token-file=", "--data-dir="]
                    .iter()
                    .any(|flag| text.starts_with(flag)) => {}
            Some(_) | None => flags.push(word),
        }
    }
    flags
}

fn stop(data_dir: &Path) -> Result<(), CliError> {
    match local_server::stop(data_dir)? {
        Some(running) => output::print_message(&format!("Stopped the server at {}.", running.url)),
        None => output::print_message(&format!(
            "No server is running with data directory {}.",
            data_dir.display()
        )),
    }
    Ok(())
}

/// Fails if no server is running, so that scripts can check it.
fn status(data_dir: &Path, format: Format) -> Result<Exit, CliError> {
    let running = ServerProcess::find(data_dir);
    let log = local_server::log_file(data_dir);
    let document = json!({
        "running": running.is_some(),
        "url": running.as_ref().map(|running| &running.url),
        "pid": running.as_ref().map(|running| running.pid),
        "data_dir": data_dir,
        "log": log.exists().then_some(log),
    });
    let name = running.as_ref().map_or("", |running| &running.url);
    output::print_one(format, &document, name, |_| match &running {
        Some(running) => output::print_data(&format!("running at {} (process {})", running.url, running.pid)),
        None => output::print_data("not running"),
    })?;
    Ok(if running.is_some() { Exit::Done } else { Exit::Failed })
}

fn settings(args: Args) -> anyhow::Result<Settings> {
    let given = SettingsSource {
        host: args.host,
        port: args.port,
        usual_port: args.usual_port,
        data_dir: args.data_dir,
        database_url: args.database_url,
        admin_token: args.admin_token,
        admin_token_file: args.admin_token_file,
        token_expiry: args.token_expiry,
        mask_secrets: args.mask_secrets,
        key_file: args.key_file,
        no_local: args.no_local.then_some(true),
        agent: args.agent,
        oci_programs: args.oci_programs,
        local_runtime: args.local_runtime,
        local_processes: args.local_processes,
        docker_socket: args.docker_socket,
        default_image: args.default_image,
        nvcc_image: args.nvcc_image,
        docker_image: args.docker_image,
        keep_logs: args.keep_logs,
        log_store: args.log_store,
        lost_after: args.lost_after,
        retry_delay: args.retry_delay,
        lock_timeout: args.lock_timeout,
        jobs_launching_max: args.jobs_launching_max,
        jobs_alive_max: args.jobs_alive_max,
        tls_port: args.tls_port,
        tls_cert: args.tls_cert,
        tls_key: args.tls_key,
        queue_for_everyone: args.queue_for_everyone.then_some(true),
        queue_token_life: args.queue_token_life,
        allow_host_networks: args.allow_host_networks,
        image_lookup: args.image_lookup,
        insecure_registries: args.insecure_registries,
        registry_networks: args.registry_networks,
        no_ui: args.no_ui.then_some(true),
        services_port: args.services_port,
        insecure_web_login: args.insecure_web_login.then_some(true),
        oidc: args.oidc.into(),
        // Only in `config.yml`.
        kubernetes: None,
        projects: None,
        limits: args.limits.into(),
    };
    Ok(Settings::new(given, Home::path().as_deref())?)
}

/// The command that starts the server, which determines its messages.
pub(crate) enum StartMode {
    Plain,
    /// `windlass dev`, with the token generated for it.
    Dev {
        token: String,
        kept: bool,
    },
}

pub(crate) async fn serve(settings: Settings, start: StartMode) -> anyhow::Result<()> {
    // Registered first, so that a signal during the start also shuts down cleanly.
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    crate::fd_limit::raise_limit();
    let data_dir = settings.data_dir.clone();
    let is_own = settings.tls.as_ref().is_some_and(|tls| tls.given.is_none());
    let server = Server::start(settings).await?;
    let url = format!("http://{}", server.address());
    if let Some(token) = server.first_token() {
        show_first_token(token.text(), &data_dir).context("failed to write the token of user `admin`")?;
    }
    // The socket is already listening: readers of the file can connect.
    let running = ServerProcess::this(&url);
    if let Some(running) = &running {
        running.write(&data_dir).context("failed to record the address of the server")?;
    }
    match &start {
        StartMode::Plain => {}
        StartMode::Dev { token, kept } => print_dev_help(&url, token, &data_dir, *kept),
    }
    if let Some(address) = server.tls_address() {
        let certificate = data_dir.join("tls/cert.pem");
        let known = if is_own { format!(" (certificate: {})", certificate.display()) } else { String::new() };
        output::print_message(&format!("HTTPS is at https://{address}{known}"));
    }
    output::print_message(&format!("windlass is ready at {url} (press Ctrl-C to stop)"));
    let stopped = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if let StartMode::Dev { token, kept: false } = start {
            super::dev::stop_runs(&url, &token).await;
        }
    };
    server.run(stopped).await;
    if let Some(running) = running {
        running.remove(&data_dir);
    }
    Ok(())
}

/// Writes the token that the first start generated to a file that only its owner can read. Prints it only to a
/// terminal: a service manager would store it in its journal.
fn show_first_token(token: &str, data_dir: &Path) -> std::io::Result<()> {
    let file = data_dir.join(FIRST_TOKEN_FILE);
    crate::home::write_private(&file, &format!("{token}\n"))?;
    if std::io::stderr().is_terminal() {
        output::print_message(&format!("Token of user `admin`, shown only once: {token}"));
    }
    output::print_message(&format!(
        "The token of user `admin` is in {}. Store it elsewhere and delete the file.",
        file.display()
    ));
    Ok(())
}

fn print_dev_help(url: &str, token: &str, data_dir: &Path, kept: bool) {
    let outcome = if kept { "kept" } else { "removed at exit" };
    output::print_message(&format!(
        "Development server: its data in {} is {outcome}. In another terminal:\n\n  \
         export WINDLASS_URL={url} WINDLASS_TOKEN={token}\n  \
         windlass apply -f FILE\n\nor, to use it in all terminals:\n\n  \
         windlass login --url {url} --token {token}\n",
        data_dir.display()
    ));
}

async fn rotate_keys(mut settings: Settings) -> anyhow::Result<()> {
    // The server must not be reachable meanwhile: use any free loopback port.
    settings.address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    settings.address.set_port(0);
    let server = Server::start(settings).await?;
    windlass_server::services::secrets::rotate_keys(server.app()).await?;
    server.run(async {}).await;
    output::print_message("All secrets are encrypted with a new key; the old keys are deleted.");
    Ok(())
}

pub(crate) fn init_logging(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let terminal = std::io::stderr().is_terminal();
    // A line that cannot be written, such as on a full disk, is dropped; reporting that through the same writer would
    // panic.
    let builder = tracing_subscriber::fmt().with_max_level(level).log_internal_errors(false);
    let builder = builder.with_writer(std::io::stderr);
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
