//! `windlass-agent shim`: its flags, and its subcommand that enrols the host.

use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
    path::PathBuf,
    process::ExitCode,
};

use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};
use windlass_api::agent::shim::ProcessMode;
use windlass_model::{error_chain::format_chain, id::InstanceId};

use super::{
    boot::{self, BootConfig},
    enrolment::{self, Enrolment},
    gateway_key::GatewayKey,
    policy,
};

#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "The socket requires the credential of the host's enrolment (`windlass-agent shim enrol`). \
                  Tasks continue when the shim stops or is killed; the next start adopts them."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Enrol this host with a server: write HOME/enrolment.json. A running shim applies it at once
    Enrol(EnrolArgs),
}

#[derive(Debug, clap::Args)]
#[group(skip)]
struct Flags {
    /// Directory for tasks, journal and credentials
    #[arg(long, value_name = "DIR", env = "WINDLASS_AGENT_HOME", required = true)]
    home: Option<PathBuf>,
    /// Unix socket to listen on [default: HOME/shim.sock]
    #[arg(long, value_name = "PATH", env = "WINDLASS_AGENT_SOCKET")]
    socket: Option<PathBuf>,
    /// Runtime that starts tasks [default: `any` if an engine answers, `any-oci` if none is installed and this host can
    /// run containers without one, else `process`]
    #[arg(long, value_name = "NAME", env = "WINDLASS_AGENT_RUNTIME")]
    runtime: Option<RuntimeName>,
    /// Handling of tasks without an image; the policy takes precedence
    #[arg(long, value_name = "MODE", env = "WINDLASS_AGENT_PROCESSES", default_value = "confined")]
    processes: ProcessModeName,
    /// Directory that confined tasks must not see and that no policy can mount, such as the server's data; may be
    /// repeated
    #[arg(long, value_name = "DIR", env = "WINDLASS_AGENT_HIDE", value_delimiter = ':')]
    hide: Vec<PathBuf>,
    /// Socket of the container engine [default: `DOCKER_HOST`, else the usual paths, including those of Podman]
    #[arg(long, value_name = "PATH", env = "WINDLASS_AGENT_DOCKER_SOCKET")]
    docker_socket: Option<PathBuf>,
    /// OCI runtime that starts containers on a host without an engine [default: `crun` or `runc` of this host]
    #[arg(long, value_name = "PATH", env = "WINDLASS_AGENT_OCI_PROGRAM")]
    oci_program: Option<PathBuf>,
    /// SHA-256 of `--oci-program`, in hex: checked before each start of a container. With it, the program alone does not
    /// choose the runtime
    #[arg(long, value_name = "HEX", env = "WINDLASS_AGENT_OCI_PROGRAM_SHA256", requires = "oci_program")]
    oci_program_sha256: Option<String>,
    /// Directory with specifications of the Container Device Interface, for containers without an engine; may be repeated,
    /// and later ones take precedence [default: `/etc/cdi` and `/var/run/cdi`]
    #[arg(long, value_name = "DIR", env = "WINDLASS_AGENT_CDI_DIRS", value_delimiter = ':')]
    cdi_dir: Vec<PathBuf>,
    /// Policy file with the permissions of tasks on this host; must be owned by root
    #[arg(long, value_name = "PATH", env = "WINDLASS_AGENT_POLICY", default_value = policy::DEFAULT_FILE)]
    policy: PathBuf,
    /// Also serve a dstack server on this loopback address, without a credential
    #[arg(
        long,
        value_name = "ADDR",
        env = "WINDLASS_AGENT_COMPAT_TCP",
        num_args = 0..=1,
        default_missing_value = "127.0.0.1:10998",
        value_parser = loopback
    )]
    compat_tcp: Option<SocketAddr>,
    /// Number of hosts in one process, each with its socket HOME/host-NNNN/shim.sock; simulated runtime only
    #[cfg(feature = "testing")]
    #[arg(long, value_name = "N", env = "WINDLASS_AGENT_HOSTS", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: Option<u32>,
    #[cfg(feature = "testing")]
    #[command(flatten)]
    simulation: super::simulated_runtime::SimulationFlags,
    /// Run tasks in the container of this shim: with its variables, working directory and devices. For the runtime
    /// `process` in a container that belongs to one job
    #[arg(long, hide = true)]
    own_container: bool,
    /// Start a new session, so that the shim outlives the process and the terminal that started it
    #[arg(long)]
    own_session: bool,
    /// Log level on standard error
    #[arg(long, value_name = "LEVEL", env = "WINDLASS_AGENT_LOG", default_value = "info")]
    log: LogLevel,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EnrolArgs {
    /// Home directory of the shim
    #[arg(long, value_name = "DIR", env = "WINDLASS_AGENT_HOME")]
    pub(crate) home: PathBuf,
    /// Id of this instance on the server
    #[arg(long, value_name = "ID")]
    instance: InstanceId,
    /// SHA-256 of the credential that the server presents, in hex; two values during a rotation
    #[arg(long, value_name = "HEX", required = true)]
    credential_sha256: Vec<String>,
    /// Public key of the server's signatures of task specifications: Ed25519, base64; may be repeated
    #[arg(long, value_name = "KEY", required = true)]
    server_key: Vec<String>,
    /// Public key of gateways, which grants connections to the shim's socket and nothing else on this host
    #[arg(long, value_name = "KEY", requires = "gateway_user")]
    gateway_key: Option<String>,
    /// Account that gateways log in to
    #[arg(long, value_name = "USER", requires = "gateway_key")]
    gateway_user: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RuntimeName {
    /// Containers for tasks with an image, plain processes for the others
    Any,
    /// Containers only, with Docker or Podman
    Docker,
    /// Containers only, without an engine: images are pulled by the agent and run by `crun` or `runc`
    Oci,
    /// Containers without an engine for tasks with an image, plain processes for the others
    AnyOci,
    /// Plain processes only
    Process,
    /// Simulated tasks, for tests
    #[cfg(feature = "testing")]
    Simulated,
}

/// Plain processes that are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ProcessModeName {
    /// Confined processes only: with a separate user, process namespace and file system
    Confined,
    /// Also processes that request the rights of the agent's user
    Own,
    /// None: every task needs an image
    Refused,
}

impl From<ProcessModeName> for ProcessMode {
    fn from(name: ProcessModeName) -> Self {
        match name {
            ProcessModeName::Confined => Self::Confined,
            ProcessModeName::Own => Self::Own,
            ProcessModeName::Refused => Self::Refused,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Returns the filter: events of windlass at this level, events of libraries at WARN and above only.
    fn targets(self) -> Targets {
        let level = self.filter();
        Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("windlass", level)
    }

    fn filter(self) -> LevelFilter {
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        }
    }
}

/// Parses a loopback address. The port requires no credential, so it must not be reachable from other hosts.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "expected ADDRESS:PORT".to_owned())?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err("expected a loopback address, because this listener requires no credential".to_owned())
}

pub fn main(args: &Args) -> ExitCode {
    match &args.command {
        Some(Command::Enrol(args)) => enrol(args),
        None => start(&args.flags),
    }
}

fn start(flags: &Flags) -> ExitCode {
    let Some(home) = flags.home.clone() else { return report_failure("`--home` is required") };
    if flags.own_session
        && let Err(error) = rustix::process::setsid()
    {
        return report_failure(&format!("failed to start a session: {error}"));
    }
    let boot = BootConfig {
        socket: flags.socket.clone().unwrap_or_else(|| home.join("shim.sock")),
        home,
        runtime: flags.runtime,
        docker_socket: flags.docker_socket.clone(),
        oci_program: flags.oci_program.clone(),
        oci_program_sha256: flags.oci_program_sha256.clone(),
        cdi_dirs: flags.cdi_dir.clone(),
        processes: flags.processes.into(),
        hidden: flags.hide.clone(),
        policy: flags.policy.clone(),
        compat_tcp: flags.compat_tcp,
        own_container: flags.own_container,
        #[cfg(feature = "testing")]
        simulated: boot::SimulationConfig { hosts: flags.hosts, plan: flags.simulation.into() },
        write_host_info: false,
    };
    run(boot, flags.log)
}

/// Runs a shim to its end in a separate runtime.
pub(super) fn run(boot: BootConfig, log: LogLevel) -> ExitCode {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // A line that cannot be written, on a full disk, is lost; reporting that on the same stream would panic.
        .log_internal_errors(false)
        // Colours in a file are noise.
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(lines.with_filter(log.targets())).init();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report_failure(&format!("failed to start the runtime: {error}")),
    };
    let ended = runtime.block_on(boot::run(boot));
    // Work that waits for a disk must not delay the exit.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report_failure(&format_chain(&error)),
    }
}

fn enrol(args: &EnrolArgs) -> ExitCode {
    match write_enrolment(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report_failure(&error),
    }
}

/// Creates the home and writes its enrolment.
pub(crate) fn write_enrolment(args: &EnrolArgs) -> Result<(), String> {
    let enrolment = Enrolment {
        instance_id: args.instance,
        credential_sha256: args.credential_sha256.clone(),
        server_keys: args.server_key.clone(),
        gateway: { args.gateway_user.clone().zip(args.gateway_key.clone()) }
            .map(|(user, key)| GatewayKey { user, key }),
    };
    boot::create_home(&args.home).map_err(|error| format_chain(&error))?;
    enrolment.write(&args.home.join(enrolment::FILE)).map_err(|error| format_chain(&error))
}

fn report_failure(text: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "error: {text}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_flags_do_not_conflict() {
        #[derive(clap::Parser)]
        struct TestCli {
            #[command(flatten)]
            _args: Args,
        }
        <TestCli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn libraries_log_only_warnings_and_errors() {
        use tracing::Level;
        let table = [
            (LogLevel::Debug, "windlass_agent::shim", Level::DEBUG, true),
            (LogLevel::Debug, "windlass_agent::shim", Level::TRACE, false),
            (LogLevel::Debug, "h2::codec", Level::DEBUG, false),
            (LogLevel::Trace, "hyper_util", Level::INFO, false),
            (LogLevel::Debug, "bollard", Level::WARN, true),
            (LogLevel::Error, "bollard", Level::WARN, false),
        ];
        for (log, target, level, is_received) in table {
            assert_eq!(log.targets().would_enable(target, &level), is_received, "{log:?} {target} {level}");
        }
    }

    #[test]
    fn the_compat_address_must_be_loopback() {
        for good in ["127.0.0.1:10998", "127.8.0.1:1", "[::1]:10998"] {
            assert!(loopback(good).is_ok(), "{good}");
        }
        for bad in ["0.0.0.0:10998", "10.0.0.1:1", "[::]:1", "localhost:1", "10998"] {
            assert!(loopback(bad).is_err(), "{bad}");
        }
    }
}
