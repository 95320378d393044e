//! No silent request field: every field of every operation has an effect that a test shows. The table of them is
//! `docs/reference/api-fields.md`.
//!
//! `api_fields.txt` is maintained manually: `# OPERATION[, OPERATION]` begins a part, and a line is
//! `FIELD [FIELD …] | EFFECT | TEST`; `?FIELD` is a query parameter. A field without a line fails, and so does a line
//! without a field. `-` is a field that no test covers; their number may only decrease.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde_json::Value;
use windlass_api::openapi;

const UNTESTED: &str = "-";

struct Entry {
    operations: Vec<&'static str>,
    fields: Vec<&'static str>,
    effect: &'static str,
    test: &'static str,
}

fn entries() -> Vec<Entry> {
    let (mut all, mut operations) = (Vec::new(), Vec::new());
    for line in include_str!("api_fields.txt").lines() {
        if let Some(head) = line.strip_prefix("# ") {
            operations = head.split(", ").collect();
            continue;
        }
        let columns: Vec<&str> = line.split(" | ").collect();
        let [fields, effect, test] = columns[..] else { panic!("not three columns: {line}") };
        all.push(Entry { operations: operations.clone(), fields: fields.split(' ').collect(), effect, test });
    }
    all
}

/// Collects the names of properties in a schema and in its parts.
fn properties(schema: &Value, above: &str, found: &mut BTreeSet<String>) {
    for word in ["anyOf", "oneOf", "allOf"] {
        schema[word].as_array().into_iter().flatten().for_each(|one| properties(one, above, found));
    }
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        properties(inner, &path, found);
        found.insert(path);
    }
    if schema["items"].is_object() {
        properties(&schema["items"], above, found);
    }
}

/// Returns every request field, such as `stop_runs abort`.
fn known_fields() -> BTreeSet<String> {
    let document: Value = serde_json::from_str(&openapi::render()).unwrap();
    let mut all = BTreeSet::new();
    let paths = document["paths"].as_object().unwrap();
    for operation in paths.values().flat_map(|methods| methods.as_object().unwrap().values()) {
        let mut found = BTreeSet::new();
        for content in
            operation["requestBody"]["content"].as_object().into_iter().flat_map(|all| all.values())
        {
            properties(&content["schema"], "", &mut found);
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            if parameter["in"] == "query" {
                found.insert(format!("?{}", parameter["name"].as_str().unwrap()));
            }
        }
        let id = operation["operationId"].as_str().unwrap();
        all.extend(found.into_iter().map(|field| format!("{id} {field}")));
    }
    all
}

#[test]
fn every_request_field_has_an_entry_and_every_entry_a_field() {
    let (mut listed, mut untested) = (BTreeSet::new(), 0);
    for entry in entries() {
        for operation in &entry.operations {
            for field in &entry.fields {
                let key = format!("{operation} {field}");
                untested += usize::from(entry.test == UNTESTED);
                assert!(listed.insert(key.clone()), "{key} is there twice");
            }
        }
    }
    let known = known_fields();
    let silent: Vec<&String> = known.difference(&listed).collect();
    assert!(silent.is_empty(), "these request fields have no entry in api_fields.txt: {silent:#?}");
    let gone: Vec<&String> = listed.difference(&known).collect();
    assert!(gone.is_empty(), "these entries of api_fields.txt are about no field: {gone:#?}");
    assert_eq!(untested, 0, "fields without a test");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(dir: &Path, all: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_of_a_request_field_exists() {
    let mut text = String::new();
    sources(&root().join("crates"), &mut text);
    let is_missing = |test: &&str| *test != UNTESTED && !text.contains(&format!("fn {test}("));
    let missing: BTreeSet<&str> = entries().iter().map(|entry| entry.test).filter(is_missing).collect();
    assert!(missing.is_empty(), "tests that api_fields.txt names and that do not exist: {missing:#?}");
}

fn rendered() -> String {
    let mut out = "# Request fields\n\n\
        Every field of the requests of [the API](../api/openapi.json), its effect, and the test that shows it. `?name` is \
        a query parameter. The fields of configurations are in [fields.md](fields.md). This page is generated from \
        `crates/server-tests/tests/it/api_fields.txt`.\n\n\
        | operations | field | effect | test |\n| --- | --- | --- | --- |\n"
        .to_owned();
    let quoted = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    for Entry { operations, fields, effect, test } in entries() {
        let test = if test == UNTESTED { "none yet".to_owned() } else { format!("`{test}`") };
        let _ = writeln!(out, "| {} | {} | {effect} | {test} |", quoted(&operations), quoted(&fields));
    }
    out
}

#[test]
fn the_committed_request_field_reference_matches_the_generated_one() {
    let path = root().join("docs/reference/api-fields.md");
    let text = rendered();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "docs/reference/api-fields.md is stale: run the tests with UPDATE=1");
}
