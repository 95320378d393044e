//! Replacement for dstack-shim: started without arguments, configured by environment variables.
//!
//! A dstack server copies a binary of that name to a host, writes its variables to a file and starts it as a service.
//! It waits for `host_info.json` and for the health check on the loopback port.

use std::{ffi::OsStr, io::Write, net::Ipv4Addr, path::PathBuf, process::ExitCode};

use clap::Parser;
use windlass_api::agent::SHIM_PORT;

use super::{
    api::COMPAT_VERSION,
    boot::BootConfig,
    cli::{self, LogLevel, ProcessModeName, RuntimeName},
    policy,
};

const NAME: &str = "dstack-shim";
const HOME: &str = "DSTACK_SHIM_HOME";

#[derive(Debug, Parser)]
#[command(name = NAME, disable_version_flag = true, about = "windlass-agent in place of dstack-shim")]
struct Args {
    /// Directory for tasks and the journal
    #[arg(long, value_name = "DIR", env = HOME)]
    shim_home: PathBuf,
    /// Loopback port to listen on
    #[arg(long, value_name = "PORT", env = "DSTACK_SHIM_HTTP_PORT", default_value_t = SHIM_PORT)]
    shim_http_port: u16,
    /// Log level from 0 (panic) to 6 (trace)
    #[arg(long, value_name = "N", env = "DSTACK_SHIM_LOG_LEVEL", default_value_t = 4)]
    shim_log_level: u8,
    /// Runtime that starts tasks [default: `any` if an engine answers, else none that a dstack server can use]
    #[arg(long, value_name = "NAME", env = "WINDLASS_AGENT_RUNTIME")]
    runtime: Option<RuntimeName>,
    /// Handling of tasks without an image
    #[arg(long, value_name = "MODE", env = "WINDLASS_AGENT_PROCESSES", default_value = "confined")]
    processes: ProcessModeName,
    /// Write host_info.json
    #[arg(long, env = "DSTACK_SERVICE_MODE", num_args = 0..=1, default_value = "0", default_missing_value = "1")]
    service: String,
}

/// Returns whether this process must act as dstack-shim: it has that name, or it has no arguments and the variable
/// `DSTACK_SHIM_HOME` is set. The agent's own commands begin with a subcommand: a runner starts them by the path of
/// this file, whatever its name is.
pub fn is_requested(mut argv: impl Iterator<Item = std::ffi::OsString>) -> bool {
    let program = argv.next().map(PathBuf::from).unwrap_or_default();
    match argv.next() {
        None => program.file_name() == Some(OsStr::new(NAME)) || std::env::var_os(HOME).is_some(),
        Some(first) => {
            program.file_name() == Some(OsStr::new(NAME)) && first.as_encoded_bytes().starts_with(b"-")
        }
    }
}

pub fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|arg| arg == "--version" || arg == "-v") {
        // The third field is the version; dstack reads no further.
        let own = env!("CARGO_PKG_VERSION");
        let message = writeln!(std::io::stdout(), "{NAME} version {COMPAT_VERSION} (windlass-agent {own})");
        return if message.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let args = Args::parse();
    let boot = BootConfig {
        socket: args.shim_home.join("shim.sock"),
        home: args.shim_home,
        runtime: args.runtime,
        docker_socket: None,
        oci_program: None,
        oci_program_sha256: None,
        cdi_dirs: Vec::new(),
        processes: args.processes.into(),
        hidden: Vec::new(),
        policy: PathBuf::from(policy::DEFAULT_FILE),
        compat_tcp: Some((Ipv4Addr::LOCALHOST, args.shim_http_port).into()),
        own_container: false,
        #[cfg(feature = "testing")]
        simulated: super::boot::SimulationConfig::default(),
        write_host_info: !matches!(args.service.as_str(), "" | "0" | "false"),
    };
    cli::run(boot, log_level(args.shim_log_level))
}

/// Maps the log levels of the Go program.
fn log_level(number: u8) -> LogLevel {
    match number {
        0..=2 => LogLevel::Error,
        3 => LogLevel::Warn,
        4 => LogLevel::Info,
        5 => LogLevel::Debug,
        6.. => LogLevel::Trace,
    }
}

#[cfg(test)]
mod tests {
    use super::is_requested;

    #[test]
    fn the_dstack_shim_name_selects_compatibility_only_without_a_subcommand() {
        let is = |line: &str| is_requested(line.split(' ').map(Into::into));
        assert!(is("/usr/local/bin/dstack-shim") && is("/usr/local/bin/dstack-shim --version"));
        assert!(!is("/usr/local/bin/dstack-shim child ssh -p 22 git@example.com"));
        assert!(!is("/usr/local/bin/dstack-shim runner --inner --dir /x"));
        assert!(!is("windlass-agent --version") && !is("windlass-agent shim"));
    }
}
