//! The commands, and the flags that several of them share. Each command's own flags are in its module.

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::{
    apply, attach, check, completion, container, contexts, cost, delete, dev, dispatch, doctor, event,
    explain, fleet, gateway, help, init, instance, jobs, login, logs, metrics, offer, project, ps, run,
    secret, server, show, ssh, stop, top, user, volume, why,
};

const AFTER_HELP: &str = "\
Examples:
  windlass apply -f examples/hello.yml    run a task and see its output
  windlass ps -a                          what ran
  windlass logs hello                     what it wrote

Without a server configured, the first command starts one on this machine, in the background. `--url`, `--token`,
`--project` and `--server-cert` may stand before the command too.";

/// Runs container workloads on machines you own or rent.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, disable_help_subcommand = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run or create what a configuration file describes
    Apply(apply::Args),
    /// Run a command, without a file
    Run(run::Args),
    /// Stay with a run: its ports, `ssh RUN`, its output
    Attach(attach::Args),
    /// List runs
    Ps(ps::Args),
    /// Show a run: what was submitted, its jobs, where they run, how they ended
    Show(show::Args),
    /// Open a shell in a job that runs, or run a command there
    Ssh(ssh::Args),
    /// Run a program in a job that runs
    Exec(ssh::ExecArgs),
    /// Print what a run wrote
    Logs(logs::Args),
    /// Stop runs
    Stop(stop::Args),
    /// Delete finished runs, or what a configuration file describes
    Delete(delete::Args),
    /// Launch, list, follow and cancel managed jobs, which outlive their machines
    Jobs(jobs::Args),
    /// Show why a run or a managed job is waiting, failed or ended
    Why(why::Args),
    /// Watch runs, instances, queue and events, and act on them
    Top(top::Args),
    /// Show what a run's jobs use of processors, memory and GPUs
    Metrics(metrics::Args),
    /// List machines that fit what you want, and why others do not
    Offer(offer::Args),
    /// List, show and delete fleets
    Fleet(fleet::Args),
    /// List and show instances of fleets
    Instance(instance::Args),
    /// List, show and delete volumes
    Volume(volume::Args),
    /// List, show, change and delete gateways
    Gateway(gateway::Args),
    /// Store, list and delete secrets
    Secret(secret::Args),
    /// List what happened
    Event(event::Args),
    /// List, show, stop and weigh containers of the queue
    Container(container::Args),
    /// Take containers from the queue and run them here or by Slurm
    Dispatch(dispatch::Args),
    /// Add up what machines cost
    Cost(cost::Args),
    /// List and change projects, their members and your default
    Project(project::Args),
    /// List, add and remove users
    User(user::Args),
    /// Look at a folder and write a configuration for it
    Init(init::Args),
    /// Validate configuration files, without a server
    Check(check::Args),
    /// Print a script that completes commands and names in your shell
    Completion(completion::Args),
    /// Choose the server that commands talk to
    Login(login::Args),
    /// Forget the server that commands talk to, and its token
    Logout(contexts::LogoutArgs),
    /// List the servers that were logged in to, and choose one
    Context(contexts::Args),
    /// Run the server
    Server(Box<server::Args>),
    /// Run a server for development: in the foreground, and gone when it ends
    Dev(dev::Args),
    /// Check this machine and the way to the server, and say how to mend what is wrong
    Doctor(doctor::Args),
    /// Explain an error by its code, without a server
    Explain(explain::Args),
    /// Print help for a command or a topic
    Help(help::Args),
}

/// Which server, as whom, where.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServerArgs {
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
    /// Certificate that an `https` server is known by, as PEM; what this machine trusts, if not given
    #[arg(
        long,
        env = "WINDLASS_CERT",
        value_name = "FILE",
        hide_env_values = true,
        global = true,
        help_heading = "Server"
    )]
    pub(crate) server_cert: Option<String>,
}

/// Output formats.
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
pub(crate) struct OutputArgs {
    /// Output format
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORMAT", global = true)]
    pub(crate) format: Format,
}

/// How often to answer.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct WatchArgs {
    /// Show it again whenever it changes
    #[arg(short = 'w', long)]
    pub(crate) watch: bool,
}

/// Flags of [`ServerArgs`], which may stand before the command.
const SERVER_FLAGS: [&str; 4] = ["--url", "--token", "--project", "--server-cert"];

/// The words of a command line, with flags that name the server moved behind the command, which has them.
pub(crate) fn arranged(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words = words.peekable();
    let mut arranged: Vec<OsString> = words.next().into_iter().collect();
    let mut moved = Vec::new();
    while let Some(word) = words.peek() {
        let text = word.to_string_lossy();
        let is_alone = SERVER_FLAGS.contains(&text.as_ref());
        let is_joined = text.split_once('=').is_some_and(|(flag, _)| SERVER_FLAGS.contains(&flag));
        if !is_alone && !is_joined {
            break;
        }
        moved.extend(words.next());
        if is_alone {
            moved.extend(words.next());
        }
    }
    arranged.extend(words.next());
    arranged.extend(moved);
    arranged.extend(words);
    arranged
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory as _, Parser as _};

    use super::{Cli, arranged};

    #[test]
    fn flags_that_name_the_server_may_stand_before_the_command() {
        let line = |text: &str| {
            let words = arranged(text.split(' ').map(Into::into));
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            line("windlass --url http://h:1 --token=t ps -a"),
            "windlass ps --url http://h:1 --token=t -a"
        );
        assert_eq!(line("windlass ps --url http://h:1"), "windlass ps --url http://h:1");
        assert_eq!(line("windlass --project lab fleet delete x"), "windlass fleet --project lab delete x");
        assert_eq!(line("windlass --version"), "windlass --version");
        assert!(
            Cli::try_parse_from(arranged("windlass --url http://h:1 ps".split(' ').map(Into::into))).is_ok()
        );
        assert!(
            Cli::try_parse_from(arranged("windlass --url http://h:1 explain".split(' ').map(Into::into)))
                .is_err()
        );
    }

    #[test]
    fn the_flags_make_sense_together() {
        Cli::command().debug_assert();
    }

    /// Every command that people see, with its whole name.
    fn walk(name: &str, command: &Command, visit: &mut impl FnMut(&str, &Command)) {
        visit(name, command);
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            walk(&format!("{name} {}", below.get_name()), below, visit);
        }
    }

    fn help(command: &Command) -> String {
        command.get_after_help().map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn every_command_says_what_it_does_and_shows_how() {
        let mut wrong = Vec::new();
        walk("windlass", &Cli::command(), &mut |name, command| {
            if !help(command).contains("Examples:\n") {
                wrong.push(format!("`{name}` has no examples: `#[command(after_help = EXAMPLES)]`"));
            }
            if command.get_about().is_none() {
                wrong.push(format!("`{name}` does not say what it does"));
            }
            for arg in command.get_arguments().filter(|arg| arg.get_help().is_none() && !arg.is_hide_set()) {
                wrong.push(format!("`{}` of `{name}` has no help", arg.get_id()));
            }
        });
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    }

    #[test]
    fn every_example_is_a_command_that_can_be_typed() {
        let (mut wrong, mut seen) = (Vec::new(), 0);
        walk("windlass", &Cli::command(), &mut |name, command| {
            let help = help(command);
            // What is said about it stands after two spaces.
            let typed = help.lines().filter_map(|line| line.trim().split("  ").next());
            let commands =
                typed.flat_map(|line| line.split(" && ")).filter(|line| line.starts_with("windlass "));
            for line in commands.map(|line| line.split(['|', '<', '>']).next().unwrap_or(line)) {
                seen += 1;
                if let Err(error) = Cli::try_parse_from(words(line)) {
                    wrong.push(format!("`{line}` in the help of `{name}`: {error}"));
                }
            }
        });
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
        assert!(seen > 20, "only {seen} were found");
    }

    /// As a shell splits them, without anything but quotes.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut quote) = (vec![String::new()], None);
        for letter in line.trim().chars() {
            match (quote, letter) {
                (Some(open), letter) if open == letter => quote = None,
                (None, '\'' | '"') => quote = Some(letter),
                (None, ' ') => words.push(String::new()),
                (Some(_) | None, letter) => words.last_mut().unwrap().push(letter),
            }
        }
        words
    }
}
