//! Task files of managed jobs: what is accepted, what is refused, and the result.

mod corpus;
mod overrides;
mod rules;
mod runs;
mod services;

use windlass_model::{
    config,
    skypilot::{self, CommandLineValues, ParsedTaskFile, SecretValue},
};

fn given(envs: &[(&str, &str)]) -> CommandLineValues {
    let envs = envs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    CommandLineValues { envs, ..CommandLineValues::default() }
}

#[track_caller]
fn accept_with(text: &str, given: &CommandLineValues) -> ParsedTaskFile {
    match skypilot::parse_task_file(text, given) {
        Ok(parsed) => parsed,
        Err(problems) => panic!("{}", config::render(&problems, "task.yaml", text)),
    }
}

#[track_caller]
fn accept(text: &str) -> ParsedTaskFile {
    accept_with(text, &CommandLineValues::default())
}

/// Returns `line: message` for each problem.
#[track_caller]
fn refuse(text: &str) -> Vec<String> {
    match skypilot::parse_task_file(text, &CommandLineValues::default()) {
        Ok(parsed) => panic!("accepted: {:?}", parsed.plan),
        Err(problems) => problems.iter().map(|p| format!("{}: {}", p.span.start.line, p.message)).collect(),
    }
}

fn secret(value: &str) -> SecretValue {
    SecretValue(value.to_owned())
}
