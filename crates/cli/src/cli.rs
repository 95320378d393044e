//! Commands, and the flags that several of them share. The flags of one command are in its module.

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::{
    apply, attach, backend, budget, check, completion, container, contexts, cost, delete, dev, dispatch,
    doctor, event, explain, export, fleet, gateway, help, init, instance, jobs, login, logs, metrics, offer,
    project, ps, queue, quota, run, secret, serve, server, show, ssh, stop, top, ui, usage, user, volume,
    why,
};

const AFTER_HELP: &str = "\
Examples:
  windlass apply -f examples/hello.yml    run a task and show its output
  windlass ps -a                          list all runs
  windlass logs hello                     print the output of a run

If no server is configured, the first command starts one on this machine, in the background. `--url`, `--token`,
`--project` and `--server-cert` are also accepted before the command.";

/// Runs container workloads on machines you own or rent.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, disable_help_subcommand = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Apply a configuration file: start a run, or create a resource
    Apply(apply::Args),
    /// Run a command without a configuration file
    Run(run::Args),
    /// Attach to a run: forward its ports, enable `ssh RUN`, show its output
    Attach(attach::Args),
    /// List runs
    Ps(ps::Args),
    /// Show a run: its configuration, its jobs, their instances and results
    Show(show::Args),
    /// Open a shell in a running job, or run a command in it
    Ssh(ssh::Args),
    /// Run a program in a running job
    Exec(ssh::ExecArgs),
    /// Print the output of a run
    Logs(logs::Args),
    /// Stop runs
    Stop(stop::Args),
    /// Delete finished runs, or the resource that a configuration file describes
    Delete(delete::Args),
    /// Launch, list, follow and cancel managed jobs, which are restarted when their instances are lost
    Jobs(jobs::Args),
    /// Start, list, update and stop services from SkyPilot files
    Serve(serve::Args),
    /// Show why a run or a managed job is waiting, failed or ended
    Why(why::Args),
    /// List the runs that wait for instances, in the order in which they start
    Queue(queue::Args),
    /// Watch runs, instances, the queue and events, and act on them
    Top(top::Args),
    /// Open the web UI in a browser
    Ui(ui::Args),
    /// Show the CPU, memory and GPU usage of a run's jobs
    Metrics(metrics::Args),
    /// List offers that match your requirements, and why others do not
    Offer(offer::Args),
    /// List, show and delete fleets
    Fleet(fleet::Args),
    /// List and show instances
    Instance(instance::Args),
    /// List, show and delete volumes
    Volume(volume::Args),
    /// List the backends of the server, and check what they need
    Backend(backend::Args),
    /// List, show, update and delete gateways
    Gateway(gateway::Args),
    /// Store, list and delete secrets
    Secret(secret::Args),
    /// Show and set how much the project and its members may hold at once
    Quota(quota::Args),
    /// Share fleets and gateways with other projects
    Export(export::Args),
    /// List what other projects share with this one
    Import(export::ImportArgs),
    /// List events
    Event(event::Args),
    /// List, show, stop and reprioritise queued containers
    Container(container::Args),
    /// Run queued containers on this machine or through Slurm
    Dispatch(dispatch::Args),
    /// Show the cost of instances
    Cost(cost::Args),
    /// Show GPU hours, CPU hours and cost by project, user and class over time
    Usage(usage::Args),
    /// Show and set how much the project and its members may spend in a period
    Budget(budget::Args),
    /// List and update projects and their members, and set your default project
    Project(project::Args),
    /// List, add and delete users
    User(user::Args),
    /// Inspect a directory and write a configuration for it
    Init(init::Args),
    /// Validate configuration files without contacting a server
    Check(check::Args),
    /// Print a shell completion script
    Completion(completion::Args),
    /// Log in to a server
    Login(login::Args),
    /// Log out of a server and delete its stored token
    Logout(contexts::LogoutArgs),
    /// List the servers that you have logged in to, and select one
    Context(contexts::Args),
    /// Run the server
    Server(Box<server::Args>),
    /// Run a development server in the foreground, with data that is deleted when it exits
    Dev(dev::Args),
    /// Diagnose this machine and its connection to the server, and suggest fixes
    Doctor(doctor::Args),
    /// Explain an error code, without contacting a server
    Explain(explain::Args),
    /// Print help for a command or a topic
    Help(help::Args),
}

/// Flags that select the server, the credentials and the project.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServerArgs {
    /// Project to use
    #[arg(long, env = "WINDLASS_PROJECT", value_name = "PROJECT", global = true, help_heading = "Server")]
    pub(crate) project: Option<String>,
    /// URL of the server; defaults to the server selected by `windlass login`
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", global = true, help_heading = "Server")]
    pub(crate) url: Option<String>,
    /// Token for the server
    #[arg(
        long,
        env = "WINDLASS_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        global = true,
        help_heading = "Server"
    )]
    pub(crate) token: Option<String>,
    /// Certificate of an `https` server, in PEM format; defaults to the trust store of this machine
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
    /// Table for people
    Table,
    /// Table for people, with all columns
    Wide,
    /// One JSON document
    Json,
    /// One JSON document per line
    Jsonl,
    /// One YAML document
    Yaml,
    /// Names only, one per line
    Name,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// Output format
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORMAT", global = true)]
    pub(crate) format: Format,
}

/// Flag of commands that can repeat their output.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct WatchArgs {
    /// Update the output when it changes
    #[arg(short = 'w', long)]
    pub(crate) watch: bool,
}

/// Flags of [`ServerArgs`], which may also precede the command.
const SERVER_FLAGS: [&str; 4] = ["--url", "--token", "--project", "--server-cert"];

/// Returns the arguments of a command line with the server flags moved after the subcommand, which defines them.
pub(crate) fn move_server_flags(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
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

    use super::{Cli, move_server_flags};

    #[test]
    fn server_flags_are_accepted_before_the_command() {
        let line = |text: &str| {
            let words = move_server_flags(text.split(' ').map(Into::into));
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
            Cli::try_parse_from(move_server_flags("windlass --url http://h:1 ps".split(' ').map(Into::into)))
                .is_ok()
        );
        assert!(
            Cli::try_parse_from(move_server_flags(
                "windlass --url http://h:1 explain".split(' ').map(Into::into)
            ))
            .is_err()
        );
    }

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Visits every command that is not hidden, with its full name.
    fn walk(name: &str, command: &Command, visitor: &mut impl FnMut(&str, &Command)) {
        visitor(name, command);
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            walk(&format!("{name} {}", below.get_name()), below, visitor);
        }
    }

    fn help(command: &Command) -> String {
        command.get_after_help().map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn every_command_has_a_description_argument_help_and_examples() {
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
    fn every_help_example_parses() {
        let (mut wrong, mut seen) = (Vec::new(), 0);
        walk("windlass", &Cli::command(), &mut |name, command| {
            let help = help(command);
            // The description follows the command after two spaces.
            let typed = help.lines().filter_map(|line| line.trim().split("  ").next());
            let commands =
                typed.flat_map(|line| line.split(" && ")).filter(|line| line.starts_with("windlass "));
            for line in commands.map(|line| line.split(['|', '<', '>']).next().unwrap_or(line)) {
                seen += 1;
                if let Err(error) = Cli::try_parse_from(split_words(line)) {
                    wrong.push(format!("`{line}` in the help of `{name}`: {error}"));
                }
            }
        });
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
        assert!(seen > 20, "only {seen} were found");
    }

    /// Splits a line as a shell does; only quotes are supported.
    fn split_words(line: &str) -> Vec<String> {
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
