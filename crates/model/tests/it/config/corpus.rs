//! Configurations from other projects: each must get the verdict it got there.
//!
//! The files are outside of the repository. Without them the test prints a message and passes. What we refuse on
//! purpose is listed in `docs/deviations.md`, and checked in both directions.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::Value;
use windlass_model::config::{self, Configuration, error::Code, error::Diagnosis};

#[expect(clippy::disallowed_methods, reason = "the corpus is a folder of files")]
fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the first column of the table of deviations: what is refused, as `type: preset` or `field: router`.
fn listed_deviations() -> BTreeSet<String> {
    let text = read(&root().join("docs/deviations.md")).unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix("| `unsupported` | `"))
        .map(|rest| rest.split('`').next().unwrap_or_default().to_owned())
        .collect()
}

#[derive(Default)]
struct Counts {
    agreed: usize,
    deviating: usize,
    wrong: Vec<String>,
}

/// Returns the fields and lines that the other parser reported.
fn expected(entry: &Value) -> (Vec<String>, Vec<i64>) {
    let (mut fields, mut lines) = (Vec::new(), Vec::new());
    for error in entry["errors"].as_array().unwrap() {
        let named = error["loc"].as_array().unwrap().iter().rev().find_map(Value::as_str);
        let field = if error["code"] == "union_tag_not_found" { Some("type") } else { named };
        fields.extend(field.map(str::to_owned));
        lines.push(error["line"].as_i64().unwrap());
    }
    (fields, lines)
}

fn agrees_on_invalid(entry: &Value, problems: &[Diagnosis]) -> bool {
    let (fields, lines) = expected(entry);
    let names = problems
        .iter()
        .any(|problem| fields.iter().any(|field| problem.message.contains(&format!("`{field}`"))));
    let near =
        problems.iter().any(|p| lines.iter().any(|line| (i64::from(p.span.start.line) - line).abs() <= 1));
    names && near
}

fn survives_a_round_trip(configuration: &Configuration) -> bool {
    let json = serde_json::to_value(configuration).unwrap();
    let text = serde_json::to_string_pretty(&json).unwrap();
    // JSON is YAML: what we print is read back by the strict reader of files and by the lenient one of clients.
    config::parse(&text).is_ok_and(|again| again.configuration == *configuration)
        && Configuration::from_json(&json).is_ok_and(|again| again == *configuration)
}

#[test]
fn corpus_configurations_get_the_same_verdict_as_in_dstack() {
    let corpus = root().join("../shared/corpus/dstack");
    let Some(index) = read(&corpus.join("index.json")) else {
        println!("the corpus is absent ({}): nothing to compare with", corpus.display());
        return;
    };
    let index: Vec<Value> = serde_json::from_str(&index).unwrap();
    let mut tallies: BTreeMap<String, Counts> = BTreeMap::new();
    let mut occurred = BTreeSet::new();
    for entry in &index {
        let file = entry["file"].as_str().unwrap();
        let text = read(&corpus.join(file)).unwrap();
        let counts = tallies.entry(entry["type"].as_str().unwrap().to_owned()).or_default();
        match (config::parse(&text), entry["verdict"].as_str().unwrap()) {
            (Ok(parsed), "valid") if survives_a_round_trip(&parsed.configuration) => counts.agreed += 1,
            (Ok(_), "valid") => counts.wrong.push(format!("{file}: changes on a round trip")),
            (Ok(_), _) => counts.wrong.push(format!("{file}: accepted, should be refused")),
            (Err(problems), "valid") if problems.iter().all(|problem| problem.code == Code::Unsupported) => {
                counts.deviating += 1;
                occurred.extend(problems.iter().map(|problem| deviation(problem, &text)));
            }
            (Err(problems), "valid") => {
                counts.wrong.push(format!("{file}: refused\n{}", config::render(&problems, file, &text)));
            }
            (Err(problems), _) if agrees_on_invalid(entry, &problems) => counts.agreed += 1,
            (Err(problems), _) => {
                counts
                    .wrong
                    .push(format!("{file}: another reason\n{}", config::render(&problems, file, &text)));
            }
        }
    }
    for (kind, counts) in &tallies {
        println!(
            "{kind}: {} agreed, {} deviating, {} wrong",
            counts.agreed,
            counts.deviating,
            counts.wrong.len()
        );
    }
    let wrong: Vec<_> = tallies.into_values().flat_map(|counts| counts.wrong).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(occurred, listed_deviations(), "docs/deviations.md lists what is refused on purpose");
}

/// Returns the key and value of the line, such as `type: preset`.
fn deviation(problem: &Diagnosis, text: &str) -> String {
    let line = text.lines().nth(problem.span.start.line as usize - 1).unwrap();
    line.split('#').next().unwrap().trim().to_owned()
}
