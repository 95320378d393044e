//! The commands and their flags.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Runs container workloads on machines you own or rent.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    Server(ServerArgs),
    /// Validate configuration files, without a server
    Check(CheckArgs),
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = false, subcommand_negates_reqs = true)]
pub(crate) struct ServerArgs {
    #[command(subcommand)]
    pub(crate) action: Option<ServerAction>,
    /// Address to listen on
    #[arg(long, env = "WINDLASS_SERVER_HOST", global = true, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Port to listen on; 0 lets the system choose
    #[arg(long, env = "WINDLASS_SERVER_PORT", global = true, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// Where the server keeps its files
    #[arg(long, env = "WINDLASS_SERVER_DATA_DIR", global = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://…`
    #[arg(
        long,
        env = "WINDLASS_SERVER_DATABASE_URL",
        global = true,
        value_name = "URL",
        hide_env_values = true
    )]
    pub(crate) database_url: Option<String>,
    /// Token of the user `admin`; drawn at the first start if not given
    #[arg(
        long,
        env = "WINDLASS_SERVER_ADMIN_TOKEN",
        global = true,
        value_name = "TOKEN",
        hide_env_values = true
    )]
    pub(crate) admin_token: Option<String>,
    /// File with the keys that seal secrets; the same on every replica
    #[arg(long, env = "WINDLASS_SERVER_KEY_FILE", global = true, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Do not offer this machine as fleet `local`
    #[arg(long, global = true)]
    pub(crate) no_local: bool,
    /// The program `windlass-agent`, if it is not beside this one
    #[arg(long, env = "WINDLASS_AGENT", global = true, value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
    /// How jobs run on this machine: `docker` or `process`; containers where an engine answers, if not given
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_RUNTIME", global = true, value_name = "RUNTIME")]
    pub(crate) local_runtime: Option<String>,
    /// Socket of this machine's container engine; `DOCKER_HOST` or the usual places, if not given
    #[arg(long, env = "WINDLASS_SERVER_DOCKER_SOCKET", global = true, value_name = "PATH")]
    pub(crate) docker_socket: Option<PathBuf>,
    /// Script of a mock cloud: a backend `mock` for trials
    #[arg(long, env = "WINDLASS_MOCK_CLOUD", global = true, value_name = "FILE", hide = true)]
    pub(crate) mock_cloud: Option<PathBuf>,
    /// How much to log
    #[arg(long, env = "WINDLASS_LOG", global = true, value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log_level: LogLevel,
    /// How to write the log; `auto` is text on a terminal and JSON elsewhere
    #[arg(long, env = "WINDLASS_LOG_FORMAT", global = true, value_enum, default_value_t = LogFormat::Auto)]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum ServerAction {
    /// Make a new sealing key, seal everything with it and forget the old ones
    RotateKeys,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    Auto,
    Text,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Files to validate; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Value of an environment variable that the configuration takes from its surroundings
    #[arg(short, long = "env", value_name = "K=V", value_parser = assignment)]
    pub(crate) env: Vec<(String, String)>,
    /// How to answer
    #[arg(short, long, value_enum, default_value_t = CheckOutput::Text)]
    pub(crate) output: CheckOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckOutput {
    /// Problems with their lines, to standard error
    Text,
    /// One document, to standard output
    Json,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("want NAME=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_flags_make_sense_together() {
        super::Cli::command().debug_assert();
    }
}
