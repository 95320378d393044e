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
  windlass help apply           the flags of a command
  windlass help fleet delete    of one below it
  windlass help exit-codes      what the exit codes mean

Topics: exit-codes, environment, output";

const TOPICS: [(&str, &str); 3] =
    [("exit-codes", EXIT_CODES), ("environment", ENVIRONMENT), ("output", OUTPUT)];

const EXIT_CODES: &str = "\
Exit codes

     0  done
     1  refused or failed (all commands but `apply` and `attach`)
     2  misuse: flags, or a question that nobody is there to answer

`apply`, `attach` and whoever else waits for a run return its fate:

     0  the run is done
 1-199  what the job itself returned
   200  it failed, and not by a job's exit code: an invalid file, no capacity, no server
   201  somebody stopped the run
   202  the job returned 200 or more
   203  a limit of the run ended it: max_duration, inactivity_duration, utilization_policy, the log quota

With several jobs it is the code of the first, in their order, that is not 0.";

const ENVIRONMENT: &str = "\
Environment

  WINDLASS_URL, WINDLASS_TOKEN  the server, instead of the one that `windlass login` chose
  WINDLASS_CERT                 the certificate that an `https` server is known by, as PEM or as a file
  WINDLASS_PROJECT              the project to work in
  WINDLASS_PROFILE              the profile that `apply` takes defaults from
  WINDLASS_HOME                 where every file of windlass is; `~/.windlass` if not set
  WINDLASS_GIT_TOKEN            the token with which hosts clone the repository
  WINDLASS_AGENT                the program `windlass-agent`, if it is not beside `windlass`
  WINDLASS_SERVER_…             every flag of `windlass server`
  NO_COLOR, CLICOLOR=0          no colours
  CLICOLOR_FORCE                colours where no terminal is, too

A flag wins over the environment, the environment over the login.";

const OUTPUT: &str = "\
Output

Data goes to standard output, talk to standard error. `-o` chooses the form of data:

  table   for people; an empty list says on standard error what makes one
  wide    the same with every column
  json    one document: {\"version\": 1, \"project\": …, \"runs\": […]}, or the thing itself with a version
  jsonl   one document per line
  name    names alone, one per line, for `xargs`

`version` grows when a field goes away or changes its meaning. New fields may appear at any time.

Colours and movement are for terminals. What others wrote (names, logs, messages) cannot drive yours: escape
sequences other than colours are taken out or shown, unless the command has `--raw` or its output is no terminal.";

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
        output::data(text);
        return Ok(Exit::Done);
    }
    let mut root = Cli::command();
    // Building sets the full name of each command.
    root.build();
    let mut command = &mut root;
    for word in &args.words {
        let names: Vec<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
        command = command.find_subcommand_mut(word).ok_or_else(|| unknown(word, &names))?;
    }
    // A closed stdout is not an error.
    let _ = command.print_long_help();
    Ok(Exit::Done)
}

pub(crate) fn list_topics() -> impl Iterator<Item = &'static str> {
    TOPICS.iter().map(|(topic, _)| *topic)
}

fn unknown(word: &str, names: &[String]) -> CliError {
    let problem = CliError::usage(format!("there is no command `{word}`")).code(ErrorCode::UnknownName);
    let mut all: Vec<&str> = names.iter().map(String::as_str).collect();
    list_topics().for_each(|topic| all.push(topic));
    match closest_name(word, all.into_iter()) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint("`windlass help` lists the commands"),
    }
}
