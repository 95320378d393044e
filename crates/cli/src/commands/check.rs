//! `windlass check FILE…`: every problem of every file, without a server.

use std::{io::Read as _, path::Path};

use serde_json::{Value, json};
use windlass_model::config::{self, error::Diagnosis};

use crate::{
    cli::{CheckArgs, CheckOutput},
    exit::Exit,
    output,
};

/// What became of one file.
enum Checked {
    Valid { kind: &'static str },
    Invalid { source: String, problems: Vec<Diagnosis> },
    Unreadable { problem: String },
}

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<Exit> {
    let checked: Vec<(String, Checked)> =
        args.files.iter().map(|file| (file.display().to_string(), check(file))).collect();
    match args.output {
        CheckOutput::Text => checked.iter().for_each(|(file, checked)| tell(file, checked)),
        CheckOutput::Json => {
            let all: Vec<Value> = checked.iter().map(|(file, checked)| document(file, checked)).collect();
            output::data(&format!("{:#}", Value::Array(all)));
        }
    }
    let fine = checked.iter().all(|(_, checked)| matches!(checked, Checked::Valid { .. }));
    Ok(if fine { Exit::Done } else { Exit::Failed })
}

fn check(file: &Path) -> Checked {
    let source = match read(file) {
        Ok(source) => source,
        Err(error) => return Checked::Unreadable { problem: error.to_string() },
    };
    // Profiles are a dialect of their own, known by the name of their file.
    let profiles = file.file_stem().is_some_and(|stem| stem == "profiles");
    let read = if profiles {
        config::parse_profiles(&source).map(|_| "profiles")
    } else {
        config::parse(&source).map(|parsed| parsed.configuration.kind())
    };
    match read {
        Ok(kind) => Checked::Valid { kind },
        Err(problems) => Checked::Invalid { source, problems },
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
        Checked::Valid { kind } => output::say(&output::printable(&format!("{file}: valid {kind}"))),
        Checked::Invalid { source, problems } => {
            output::say(output::printable(&config::render(problems, file, source)).trim_end());
        }
        Checked::Unreadable { problem } => {
            output::say(&output::printable(&format!("error: read `{file}`: {problem}")));
        }
    }
}

fn document(file: &str, checked: &Checked) -> Value {
    match checked {
        Checked::Valid { kind } => json!({ "file": file, "valid": true, "type": kind, "problems": [] }),
        Checked::Invalid { problems, .. } => json!({ "file": file, "valid": false, "problems": problems }),
        Checked::Unreadable { problem } => {
            json!({ "file": file, "valid": false, "problems": [{ "message": format!("read the file: {problem}") }] })
        }
    }
}
