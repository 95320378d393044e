//! `windlass check FILE…`: every problem of every file, without a server.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use windlass_model::config::{
    self,
    env::EnvValue,
    error::{Code, Diagnosis},
    resolve, unsupported,
};

use crate::{
    cli::{Format, Output},
    exit::Exit,
    output,
    problem::{self, Problem},
};

const EXAMPLES: &str = "\
Examples:
  windlass check windlass.yml                  every problem, each with its line
  windlass check examples/*.yml -o name        only the names of files that are not valid
  windlass check -e TOKEN=x train.yml -o json  for an editor or a pipeline

The exit code is 0 when all files are valid, else 1.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
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

/// What became of one file.
enum Checked {
    /// Variables in `unset` are taken from where `apply` runs, and are not set here.
    Valid {
        kind: &'static str,
        unset: Vec<String>,
    },
    Invalid {
        source: String,
        problems: Vec<Diagnosis>,
    },
    Unreadable {
        problem: String,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    let checked: Vec<(String, Checked)> =
        args.files.iter().map(|file| (file.display().to_string(), check(file, &args.env))).collect();
    let documents = || checked.iter().map(|(file, checked)| document(file, checked)).collect::<Vec<_>>();
    match args.output.format {
        Format::Table | Format::Wide => checked.iter().for_each(|(file, checked)| tell(file, checked)),
        Format::Json => output::json_array(&documents())?,
        Format::Jsonl => output::jsonl(&documents())?,
        // The names of files that are no good, for `xargs`.
        Format::Name => checked
            .iter()
            .filter(|(_, checked)| !matches!(checked, Checked::Valid { .. }))
            .for_each(|(file, _)| output::data(file)),
    }
    let fine = checked.iter().all(|(_, checked)| matches!(checked, Checked::Valid { .. }));
    Ok(if fine { Exit::Done } else { Exit::Failed })
}

fn check(file: &Path, env: &[(String, String)]) -> Checked {
    let source = match read(file) {
        Ok(source) => source,
        Err(error) => return Checked::Unreadable { problem: error.to_string() },
    };
    // Profiles are a dialect of their own, known by the name of their file.
    let profiles = file.file_stem().is_some_and(|stem| stem == "profiles");
    let read = if profiles {
        config::parse_profiles(&source).map(|_| ("profiles", Vec::new()))
    } else {
        config::parse(&source).and_then(|parsed| resolved(parsed, env))
    };
    match read {
        Ok((kind, unset)) => Checked::Valid { kind, unset },
        Err(problems) => Checked::Invalid { source, problems },
    }
}

/// What `apply` would do with references and variables. A variable that is taken from the environment need
/// not be set where a file is only checked.
fn resolved(
    mut parsed: config::Parsed,
    env: &[(String, String)],
) -> Result<(&'static str, Vec<String>), Vec<Diagnosis>> {
    let context = unsupported::Context { node: Some(&parsed.node), ..unsupported::Context::default() };
    let review = unsupported::review(&parsed.configuration, context);
    if !review.refusals.is_empty() {
        return Err(review.refusals);
    }
    let configuration = &mut parsed.configuration;
    let kind = configuration.kind();
    let mut unset = Vec::new();
    if let Some(run) = configuration.run_mut() {
        for (name, value) in env {
            run.env.0.insert(name.clone(), EnvValue::Value(value.clone()));
        }
    }
    let environment = |name: &str| {
        Some(std::env::var(name).unwrap_or_else(|_| {
            unset.push(name.to_owned());
            String::new()
        }))
    };
    match resolve::for_client(configuration, &[], environment) {
        Ok(()) => Ok((kind, unset)),
        Err(error) => Err(vec![Diagnosis::new(Code::Interpolation, parsed.node.span, error.to_string())]),
    }
}

fn read(file: &Path) -> std::io::Result<String> {
    if file.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(file)
}

fn tell(file: &str, checked: &Checked) {
    match checked {
        Checked::Valid { kind, unset } => {
            output::say(&output::printable(&format!("{file}: valid {kind}")));
            if !unset.is_empty() {
                let names = unset.join(", ");
                let note =
                    format!("  note: `apply` takes from its environment, and here is not set: {names}");
                output::say(&output::printable(&note));
            }
        }
        Checked::Invalid { source, problems } => {
            output::say(output::printable(&config::render(problems, file, source)).trim_end());
        }
        Checked::Unreadable { problem } => {
            output::say(&Problem::new(format!("read `{file}`")).why(problem).text());
        }
    }
}

fn document(file: &str, checked: &Checked) -> Value {
    match checked {
        Checked::Valid { kind, unset } => {
            json!({ "file": file, "valid": true, "type": kind, "problems": [], "unset": unset })
        }
        Checked::Invalid { problems, .. } => json!({ "file": file, "valid": false, "problems": problems }),
        Checked::Unreadable { problem } => {
            json!({ "file": file, "valid": false, "problems": [{ "code": problem::Code::Failed.id(), "message": format!("read the file: {problem}") }] })
        }
    }
}
