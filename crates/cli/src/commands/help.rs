//! `windlass help`: the help of a command, or of a general topic.

use clap::CommandFactory as _;

use crate::{
    cli::Cli,
    context::closest_name,
    error::{CliError, ErrorCode},
    exit::Exit,
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass help apply           show the flags of a command
  windlass help fleet delete    show the flags of a subcommand
  windlass help exit-codes      show the meaning of the exit codes

Topics: exit-codes, environment, output";

const TOPICS: [(&str, &str); 3] =
    [("exit-codes", EXIT_CODES), ("environment", ENVIRONMENT), ("output", OUTPUT)];

const EXIT_CODES: &str = "\
Exit codes

     0  success
     1  failure (all commands except `apply`, `run` and `attach`)
     2  usage error: invalid flags, or a confirmation is required and there is no terminal

`apply`, `run` and `attach` return the result of the run:

     0  the run succeeded
 1-199  exit code of the job
   200  failure without an exit code of a job: an invalid file, no capacity, no server
   201  the run was stopped
   202  the job exited with 200 or more
   203  the run reached a limit: max_duration, inactivity_duration, utilization_policy, the log quota

With several jobs, it is the first code that is not 0, in the order of the jobs.";

const ENVIRONMENT: &str = "\
Environment

  WINDLASS_URL, WINDLASS_TOKEN  server to use instead of that of `windlass login`
  WINDLASS_CERT                 certificate of an `https` server: PEM text or a file
  WINDLASS_PROJECT              project to use
  WINDLASS_PROFILE              profile with defaults for `apply`
  WINDLASS_HOME                 directory of all files of windlass; defaults to `~/.windlass`
  WINDLASS_GIT_TOKEN            token with which instances clone the repository
  WINDLASS_AGENT                path of `windlass-agent`; defaults to the directory of `windlass`
  WINDLASS_SERVER_…             flags of `windlass server`
  NO_COLOR, CLICOLOR=0          disable colours
  CLICOLOR_FORCE                enable colours even without a terminal

Flags take precedence over the environment, and the environment over the login.";

const OUTPUT: &str = "\
Output

Data is written to standard output, messages to standard error. `-o` selects the format of the data:

  table   for people; for an empty list, a hint on standard error
  wide    the same with all columns
  json    one document: {\"version\": 1, \"project\": …, \"runs\": […]}, or the resource itself with a version
  jsonl   one document per line
  yaml    the document of `json` as YAML
  name    names only, one per line, for `xargs`

`version` increases when a field is removed or changes its meaning. New fields may be added at any time.

Colours and progress displays appear only on terminals. To protect your terminal, escape sequences other than colours
in names, logs and messages are removed or shown as text, unless `--raw` is given or the output is not a terminal.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Command or topic
    #[arg(value_name = "COMMAND")]
    words: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if let [word] = args.words.as_slice()
        && let Some((_, text)) = TOPICS.iter().find(|(topic, _)| topic == word)
    {
        output::print_data(text);
        return Ok(Exit::Done);
    }
    let mut root = Cli::command();
    // Building sets the full name of each command.
    root.build();
    let mut command = &mut root;
    for word in &args.words {
        let names: Vec<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
        command = command.find_subcommand_mut(word).ok_or_else(|| unknown_topic(word, &names))?;
    }
    // A closed stdout is not an error.
    let _ = command.print_long_help();
    Ok(Exit::Done)
}

pub(crate) fn list_topics() -> impl Iterator<Item = &'static str> {
    TOPICS.iter().map(|(topic, _)| *topic)
}

fn unknown_topic(word: &str, names: &[String]) -> CliError {
    let problem = CliError::usage(format!("unknown command `{word}`")).code(ErrorCode::UnknownName);
    let mut all: Vec<&str> = names.iter().map(String::as_str).collect();
    list_topics().for_each(|topic| all.push(topic));
    match closest_name(word, all.into_iter()) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint("run `windlass help` to list the commands"),
    }
}
