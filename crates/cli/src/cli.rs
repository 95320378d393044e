//! The commands, and the flags that several of them share. Each command's own flags are in its module.

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::{
    apply, check, completion, dev, explain, fleet, gateway, help, login, logs, ps, server, stop, volume, why,
};

const AFTER: &str = "\
Examples:
  windlass apply -f examples/hello.yml    run a task and see its output
  windlass ps -a                          what ran
  windlass logs hello                     what it wrote

Without a server configured, the first command starts one on this machine, in the background.";

/// Runs container workloads on machines you own or rent.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, disable_help_subcommand = true, after_help = AFTER)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run what a configuration file says, or make it so
    Apply(apply::Args),
    /// List runs
    Ps(ps::Args),
    /// Print what a run wrote
    Logs(logs::Args),
    /// Stop runs
    Stop(stop::Args),
    /// Say why a run waits, failed or ended
    Why(why::Args),
    /// List, show and delete fleets
    Fleet(fleet::Args),
    /// List and delete volumes
    Volume(volume::Args),
    /// List and delete gateways
    Gateway(gateway::Args),
    /// Validate configuration files, without a server
    Check(check::Args),
    /// Print a script that completes commands and names in your shell
    Completion(completion::Args),
    /// Choose the server that commands talk to
    Login(login::Args),
    /// Run the server
    Server(server::Args),
    /// Run a server for development: in the foreground, and gone when it ends
    Dev(dev::Args),
    /// Explain an error by its code, without a server
    Explain(explain::Args),
    /// Print help for a command or a topic
    Help(help::Args),
}

/// Which server, as whom, where.
#[derive(Clone, Debug, Args)]
pub(crate) struct At {
    /// Project to work in
    #[arg(long, env = "WINDLASS_PROJECT", value_name = "PROJECT", global = true, help_heading = "Server")]
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_flags_make_sense_together() {
        super::Cli::command().debug_assert();
    }
}
