//! The commands and their flags.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

const AFTER: &str = "\
Try it:
  windlass apply -f examples/hello.yml    run a task and see its output
  windlass ps -a                          what ran
  windlass logs hello                     what it wrote

Without a server configured, the first command starts one on this machine, in the background.";

/// Runs container workloads on machines you own or rent.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, after_help = AFTER)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run what a configuration file says, or make it so
    #[command(after_help = APPLY)]
    Apply(ApplyArgs),
    /// List runs
    Ps(PsArgs),
    /// Print what a run wrote
    Logs(LogsArgs),
    /// Stop runs
    Stop(StopArgs),
    /// Say why a run waits, failed or ended
    Why(WhyArgs),
    /// List, show and delete fleets
    Fleet(FleetArgs),
    /// List and delete volumes
    Volume(ThingArgs),
    /// List and delete gateways
    Gateway(ThingArgs),
    /// Validate configuration files, without a server
    Check(CheckArgs),
    /// Choose the server that commands talk to
    Login(LoginArgs),
    /// Run the server
    Server(ServerArgs),
    /// Run a server for development: in the foreground, and gone when it ends
    Dev(DevArgs),
}

/// Which server, as whom, where.
#[derive(Clone, Debug, Args)]
pub(crate) struct At {
    /// Project to work in
    #[arg(long, env = "WINDLASS_PROJECT", value_name = "NAME", global = true, help_heading = "Server")]
    pub(crate) project: Option<String>,
    /// Address of the server, instead of the one `windlass login` chose
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", global = true, help_heading = "Server")]
    pub(crate) url: Option<String>,
    /// Token for that server
    #[arg(
        long,
        env = "WINDLASS_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        global = true,
        help_heading = "Server"
    )]
    pub(crate) token: Option<String>,
}

/// How to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For people, with every column
    Wide,
    /// One document
    Json,
    /// One document per line
    Jsonl,
    /// Names alone, one per line
    Name,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Output {
    /// How to answer
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORMAT", global = true)]
    pub(crate) format: Format,
}

const APPLY: &str = "\
Examples:
  windlass apply -f train.yml                     plan, ask, run, follow the output
  windlass apply -f train.yml -y -d               no question, do not wait
  windlass apply -f train.yml -e SEED=7 -- --lr 3 variables, and arguments for ${{ run.args }}
  windlass apply -f fleet.yml -y                  a fleet, volume or gateway is made the same way

The exit code is the job's own when it is below 200. From 200 on it is ours: 200 failed otherwise, 201 stopped,
202 the job returned 200 or more. 2 is misuse.";

#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    /// The configuration; `-` is standard input. `windlass.yml` or `.dstack.yml` if not given
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Return as soon as it is submitted
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Name it so, whatever the configuration says
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Set a variable of the run; `K` alone takes it from your environment
    #[arg(short, long = "env", value_name = "K[=V]", value_parser = variable)]
    pub(crate) env: Vec<(String, Option<String>)>,
    /// Replace what runs under this name even if nothing changed
    #[arg(long)]
    pub(crate) force: bool,
    /// How many offers the plan shows
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) max_offers: u16,
    /// Take defaults from this profile of `.windlass/profiles.yml` or `.dstack/profiles.yml`
    #[arg(long, value_name = "NAME", env = "WINDLASS_PROFILE")]
    pub(crate) profile: Option<String>,
    /// Private key with which hosts clone the repository; it is sent to the server
    #[arg(long, value_name = "FILE")]
    pub(crate) git_identity: Option<PathBuf>,
    /// Token with which hosts clone the repository; it is sent to the server
    #[arg(long, value_name = "TOKEN", env = "WINDLASS_GIT_TOKEN", hide_env_values = true)]
    pub(crate) git_token: Option<String>,
    /// Arguments that replace `${{ run.args }}` in commands
    #[arg(last = true, value_name = "ARG")]
    pub(crate) args: Vec<String>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Finished runs too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Show it again whenever it changes
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// The newest N, finished or not
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) last: Option<u32>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The run
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Go on until the run ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Which replica of a service
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) replica: i64,
    /// Which job of the replica: the rank of the node
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) job: i64,
    /// Only what was written since then: `10s`, `5m`, `1d` ago, or a time such as `2026-11-20T09:00:00Z`
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// What the agent wrote about the job, instead of what the job wrote
    #[arg(long)]
    pub(crate) diagnose: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// The runs
    #[arg(required = true, value_name = "RUN")]
    pub(crate) names: Vec<String>,
    /// At once, without a chance to end in good order
    #[arg(short = 'x', long)]
    pub(crate) abort: bool,
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Return when they have ended, not when the server knows that they shall
    #[arg(short, long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// The run
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct FleetArgs {
    #[command(subcommand)]
    pub(crate) action: Option<FleetAction>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FleetAction {
    /// List fleets and their instances
    List,
    /// Show one fleet
    Get {
        #[arg(value_name = "FLEET")]
        name: String,
    },
    /// Delete fleets, or single instances of one
    Delete {
        #[arg(required = true, value_name = "FLEET")]
        names: Vec<String>,
        /// Only this instance of the fleet; may be repeated
        #[arg(short, long, value_name = "NUM")]
        instance: Vec<i64>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        /// Return when they are gone, not when the server knows that they shall be
        #[arg(short, long)]
        wait: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ThingArgs {
    #[command(subcommand)]
    pub(crate) action: Option<ThingAction>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ThingAction {
    /// List them
    List,
    /// Delete some of them
    Delete {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LoginArgs {
    /// Address of the server
    #[arg(long, value_name = "URL")]
    pub(crate) url: String,
    /// Your token; `-` reads it from standard input
    #[arg(long, value_name = "TOKEN", env = "WINDLASS_TOKEN", hide_env_values = true)]
    pub(crate) token: String,
    /// Project to work in; the only one, or `main`, if not given
    #[arg(long, value_name = "NAME")]
    pub(crate) project: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct DevArgs {
    /// Port to listen on; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(crate) port: u16,
    /// Keep everything in this directory; without it, a temporary one that goes away at the end
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The program `windlass-agent`, if it is not beside this one
    #[arg(long, env = "WINDLASS_AGENT", value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
    /// How jobs run on this machine: `docker` or `process`; containers where an engine answers, if not given
    #[arg(long, env = "WINDLASS_SERVER_LOCAL_RUNTIME", value_name = "RUNTIME")]
    pub(crate) local_runtime: Option<String>,
    /// How much to log
    #[arg(long, env = "WINDLASS_LOG", value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log_level: LogLevel,
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
    /// Leave the terminal; said by the command that starts a server for itself
    #[arg(long, hide = true)]
    pub(crate) background: bool,
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
    /// Where logs of jobs are kept: `files`, `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL`
    #[arg(long, env = "WINDLASS_SERVER_LOG_STORE", global = true, value_name = "PLACE")]
    pub(crate) log_store: Option<String>,
    /// How long logs of jobs are kept after the end of their run: `30d`, or `off` for ever
    #[arg(long, env = "WINDLASS_SERVER_KEEP_LOGS", global = true, value_name = "DAYS")]
    pub(crate) keep_logs: Option<String>,
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
    /// Stop the server that runs with this data directory
    Stop,
    /// Say whether a server runs with this data directory, and where
    Status,
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
    /// Set a variable of the run, as `apply` does
    #[arg(short, long = "env", value_name = "K=V", value_parser = assignment)]
    pub(crate) env: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) output: Output,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("want NAME=VALUE".to_owned()),
    }
}

fn variable(text: &str) -> Result<(String, Option<String>), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("want NAME or NAME=VALUE".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), Some(value.to_owned()))),
        None if text.is_empty() => Err("want NAME or NAME=VALUE".to_owned()),
        None => Ok((text.to_owned(), None)),
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
