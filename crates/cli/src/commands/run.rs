//! `windlass run -- CMD…`: a task without a file.

use std::path::PathBuf;

use serde_json::json;
use windlass_model::config::{Configuration, error, ports::PortMapping, shell};

use super::{
    apply::{self, parse_variable, submit, with_overrides},
    wants::Overrides,
};
use crate::{
    cli::{OutputArgs, ServerArgs},
    exit::Exit,
    problem::CliError,
};

/// What the run's configuration is called where a file is named.
const COMMAND_SOURCE: &str = "the command line";

const EXAMPLES: &str = "\
Examples:
  windlass run -y -- nvidia-smi                       run it, follow it, return what it returned
  windlass run -y --image python:3.12 --cpu 4 -- python -c 'print(1)'
  windlass run -y -d -n sweep -e LR=0.1 --gpu H100:1 -- python train.py
  windlass run -y -- 'make && make test'              one argument is a line of shell

What is typed reaches the program as it is. The exit codes are those of `windlass apply`.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Image to run it in; without one it runs as a task without `image` does, and the plan says how
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Return as soon as it is submitted
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Name of the run; generated if not given
    #[arg(short, long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Set a variable; `K` alone takes it from your environment
    #[arg(short, long = "env", value_name = "K[=V]", value_parser = variable)]
    pub(crate) env: Vec<(String, Option<String>)>,
    /// How many nodes run it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) nodes: Option<u16>,
    /// Forward a port of the job: `8000`, `LOCAL:8000` or `*:8000`
    #[arg(short, long = "port", value_name = "MAPPING", value_parser = PortMapping::parse)]
    pub(crate) port: Vec<PortMapping>,
    /// On a terminal, let the job's output drive it
    #[arg(long)]
    pub(crate) raw: bool,
    /// Take defaults from this profile of `.windlass/profiles.yml` or `.dstack/profiles.yml`
    #[arg(long, value_name = "NAME", env = "WINDLASS_PROFILE")]
    pub(crate) profile: Option<String>,
    #[command(flatten)]
    pub(crate) overrides: Overrides,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Whatever fails here is ours: codes below 200 belong to the job.
pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    start(args).map_err(CliError::ours)
}

fn start(args: &Args) -> Result<Exit, CliError> {
    let configuration = configuration(args)?;
    let applied = apply::Args {
        detach: args.detach,
        name: args.name.clone(),
        env: args.env.clone(),
        port: args.port.clone(),
        raw: args.raw,
        profile: args.profile.clone(),
        overrides: args.overrides.clone(),
        ..apply::Args::plain(args.at.clone(), args.output, args.yes)
    };
    let source = with_overrides(&applied, COMMAND_SOURCE.to_owned(), PathBuf::from("."), configuration)?;
    submit(&applied, &source)
}

fn configuration(args: &Args) -> Result<Configuration, CliError> {
    let mut document = json!({ "type": "task", "commands": [line(&args.command)] });
    if let Some(image) = &args.image {
        document["image"] = json!(image);
    }
    if let Some(nodes) = args.nodes {
        document["nodes"] = json!(nodes);
    }
    Configuration::from_json(&document)
        .map_err(|problems| CliError::usage("read the command").why(error::summary(&problems)))
}

/// One argument is a line of shell, several are a program and its arguments. Two dollars in a configuration stand for one:
/// what is typed has none of that.
fn line(command: &[String]) -> String {
    let line = match command {
        [only] => only.clone(),
        words => words.iter().map(|word| shell::quote(word)).collect::<Vec<_>>().join(" "),
    };
    line.replace('$', "$$")
}

#[cfg(test)]
mod tests {
    use windlass_model::config::resolve;

    use super::{Configuration, line};

    #[test]
    fn what_is_typed_reaches_the_program_as_it_is() {
        let command = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let document = serde_json::json!({ "type": "task", "commands": [line(&words)] });
            let mut task = Configuration::from_json(&document).unwrap();
            resolve::resolve_for_client(&mut task, &[], |_| None).unwrap();
            serde_json::to_value(&task).unwrap()["commands"][0].as_str().unwrap().to_owned()
        };
        assert_eq!(command(&["echo $$ $HOME && true"]), "echo $$ $HOME && true");
        assert_eq!(command(&["python", "-c", "print('a b')"]), r#"python -c 'print('"'"'a b'"'"')'"#);
    }
}
