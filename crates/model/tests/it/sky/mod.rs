//! Task files of managed jobs: what is read, what is refused and what becomes of it.

mod corpus;
mod overrides;
mod rules;
mod runs;

use windlass_model::{
    config,
    sky::{self, Given, Parsed, Secret},
};

fn given(envs: &[(&str, &str)]) -> Given {
    let envs = envs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Given { envs, ..Given::default() }
}

#[track_caller]
fn accept_with(text: &str, given: &Given) -> Parsed {
    match sky::parse(text, given) {
        Ok(parsed) => parsed,
        Err(problems) => panic!("{}", config::render(&problems, "task.yaml", text)),
    }
}

#[track_caller]
fn accept(text: &str) -> Parsed {
    accept_with(text, &Given::default())
}

/// `line: message` for each problem.
#[track_caller]
fn refuse(text: &str) -> Vec<String> {
    match sky::parse(text, &Given::default()) {
        Ok(parsed) => panic!("accepted: {:?}", parsed.plan),
        Err(problems) => problems.iter().map(|p| format!("{}: {}", p.span.start.line, p.message)).collect(),
    }
}

fn secret(value: &str) -> Secret {
    Secret(value.to_owned())
}
