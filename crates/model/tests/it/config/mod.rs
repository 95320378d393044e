//! Configurations: what is accepted, what is refused, and the messages.

mod corpus;
mod fleet_limits;
mod hostile;
mod interpolation;
mod job_spec_builder;
mod properties;
mod render;
mod rules;
mod schema;
mod syntax;
mod unsupported;

use windlass_model::config::{self, Configuration};

/// Parses a file that must be valid.
#[track_caller]
fn accept(text: &str) -> Configuration {
    match config::parse(text) {
        Ok(parsed) => parsed.configuration,
        Err(problems) => panic!("{}", config::render(&problems, "test.yml", text)),
    }
}

/// Parses a file that must be invalid: returns `code path` for each problem, in source order.
#[track_caller]
fn refuse(text: &str) -> Vec<String> {
    match config::parse(text) {
        Ok(parsed) => panic!("accepted: {:?}", parsed.configuration),
        Err(problems) => {
            problems.iter().map(|problem| format!("{} {}", problem.code.id(), problem.path)).collect()
        }
    }
}

/// Returns the JSON without nulls.
fn trimmed(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Object(map) => {
            map.into_iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k, trimmed(v))).collect()
        }
        Value::Array(items) => items.into_iter().map(trimmed).collect(),
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => other,
    }
}
