//! No silent field: every field of the configuration, of task files and of container requests has an effect that a test
//! shows, is refused, or produces a warning. `docs/reference/fields.md` is the table of them.
//!
//! The tables are maintained manually in `fields/*.txt`: `# TITLE: DEFINITIONS` begins a part, and a line is
//! `FIELD [FIELD …] | EFFECT | TEST`. A field without a line fails, and so does a line without a field or without a
//! test.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde_json::Value;
use windlass_model::{config, queue, skypilot};

struct Entry {
    fields: Vec<&'static str>,
    effect: &'static str,
    test: &'static str,
}

struct Part {
    title: &'static str,
    /// Definitions of the schema; empty if the fields are whole paths.
    definitions: Vec<&'static str>,
    entries: Vec<Entry>,
}

fn parts(text: &'static str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for line in text.lines() {
        if let Some(head) = line.strip_prefix("# ") {
            let (title, definitions) = head.split_once(": ").unwrap_or((head, ""));
            let definitions = definitions.split(", ").filter(|name| !name.is_empty()).collect();
            parts.push(Part { title, definitions, entries: Vec::new() });
            continue;
        }
        let columns: Vec<&str> = line.split(" | ").collect();
        let [fields, effect, test] = columns[..] else { panic!("not three columns: {line}") };
        let entry = Entry { fields: fields.split(' ').collect(), effect, test };
        let Some(part) = parts.last_mut() else { panic!("no title before: {line}") };
        part.entries.push(entry);
    }
    parts
}

fn configuration() -> Vec<Part> {
    parts(include_str!("fields/configuration.txt"))
}

fn tasks() -> Vec<Part> {
    parts(include_str!("fields/tasks.txt"))
}

fn containers() -> Vec<Part> {
    parts(include_str!("fields/containers.txt"))
}

/// Collects the names of properties in a schema and in its parts, but not in other definitions.
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

/// Returns every field of every definition, such as `Task.image`.
fn fields_of_the_schema() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (root, whole) in [("", config::schema()), ("profiles.yml", config::profiles_schema())] {
        let mut definitions: BTreeMap<String, Value> = BTreeMap::new();
        for (name, schema) in whole["definitions"].as_object().unwrap() {
            definitions.insert(name.clone(), schema.clone());
        }
        definitions.insert(root.to_owned(), whole);
        for (name, schema) in definitions {
            let mut found = BTreeSet::new();
            properties(&schema, "", &mut found);
            all.extend(found.into_iter().map(|field| format!("{name}.{field}")));
        }
    }
    all
}

/// Returns the fields of all entries, and fails on duplicates.
fn described_fields(parts: &[Part]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for part in parts {
        for field in part.entries.iter().flat_map(|entry| &entry.fields) {
            if part.definitions.is_empty() {
                assert!(all.insert((*field).to_owned()), "{field} is there twice");
            }
            for definition in &part.definitions {
                let path = format!("{definition}.{field}");
                assert!(all.insert(path.clone()), "{path} is there twice");
            }
        }
    }
    all
}

fn compare(what: &str, known: &BTreeSet<String>, parts: &[Part]) {
    let reported = described_fields(parts);
    let silent: Vec<&String> = known.difference(&reported).collect();
    assert!(silent.is_empty(), "{what}: these fields have no entry in tests/it/fields: {silent:?}");
    let gone: Vec<&String> = reported.difference(known).collect();
    assert!(gone.is_empty(), "{what}: these entries are about no field: {gone:?}");
}

#[test]
fn every_field_has_an_entry_and_every_entry_a_field() {
    compare("configuration", &fields_of_the_schema(), &configuration());
    compare("task files", &skypilot::known_fields().into_iter().collect(), &tasks());
    compare("containers", &queue::request::known_fields().into_iter().collect(), &containers());
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[expect(clippy::disallowed_methods, reason = "tests are looked for in the sources")]
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
fn every_named_test_exists() {
    let mut text = String::new();
    sources(&root().join("crates"), &mut text);
    let missing: BTreeSet<&str> = [configuration(), tasks(), containers()]
        .iter()
        .flatten()
        .flat_map(|part| &part.entries)
        .map(|entry| entry.test)
        .filter(|test| !text.contains(&format!("fn {test}(")))
        .collect();
    assert!(missing.is_empty(), "tests that are named in tests/it/fields and are not there: {missing:?}");
}

fn rendered() -> String {
    let mut out = "# Fields\n\n\
        Every field, its effect, and the test that shows it. *refused*: the field is rejected with the reason and an \
        alternative. *warning*: the field is accepted, has no effect, and produces a warning before the confirmation \
        prompt. This page is generated from `crates/model/tests/it/fields`.\n"
        .to_owned();
    let chapters = [
        ("Configuration", "Fields that several types share are in one table.", configuration()),
        ("Task files of managed jobs", "Fields of the files that `windlass jobs launch` accepts.", tasks()),
        ("Containers", "Fields that clients of the container queue send.", containers()),
    ];
    for (title, about, parts) in chapters {
        let _ = write!(out, "\n## {title}\n\n{about}\n");
        for part in parts {
            let _ = write!(out, "\n### {}\n\n| field | effect | test |\n| --- | --- | --- |\n", part.title);
            for Entry { fields, effect, test } in part.entries {
                let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
                let _ = writeln!(out, "| {} | {effect} | `{test}` |", fields.join(", "));
            }
        }
    }
    out
}

#[test]
#[expect(clippy::disallowed_methods, reason = "`UPDATE=1` writes the file anew")]
fn the_committed_field_reference_matches_the_generated_one() {
    let path = root().join("docs/reference/fields.md");
    let text = rendered();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "docs/reference/fields.md is stale: run the tests with UPDATE=1");
}
