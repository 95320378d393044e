//! The whole API of dstack 0.22.5: each operation is answered according to its schema, or documented as missing.
//!
//! `openapi.json` is the relevant part of the document that the dstack server generates: the response schema of each
//! operation and the schemas that it references, without texts, defaults and the ban of additional fields (its clients
//! ignore unknown fields). `walk.py` sends the calls and validates the responses against it, and against the models
//! with which dstack's client parses responses.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::Value;
use windlass_api::operations;
use windlass_testenv::server::TOKEN;
use windlass_testkit::cli_snapshot::ran;

use super::dstack_user::DstackUser;
use crate::test_env::{HostMode, TestEnv};

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/dstack");
const MISSING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api/missing.md");

/// Operations of dstack, as `POST /api/…`.
fn theirs() -> BTreeSet<String> {
    let document: Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
    document["operations"].as_object().unwrap().keys().cloned().collect()
}

/// Operations of windlass, in the same format.
fn ours() -> BTreeSet<String> {
    operations::table().iter().map(|entry| format!("{} {}", entry.method.name(), entry.path)).collect()
}

fn path_of(operation: &str) -> &str {
    operation.split_once(' ').unwrap().1
}

/// Paths that are documented as missing, with the reasons.
fn listed() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(MISSING).unwrap();
    let rows = text.lines().filter_map(|line| {
        let (path, why) = line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")?;
        Some((path.to_owned(), why.to_owned()))
    });
    rows.collect()
}

fn strings(value: &Value) -> BTreeSet<String> {
    value.as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect()
}

/// Differences between the documented and the actual missing operations, in both directions.
fn differences(called: &BTreeSet<String>) -> Vec<String> {
    let (theirs, ours, listed) = (theirs(), ours(), listed());
    let known: BTreeSet<&str> = theirs.iter().map(|operation| path_of(operation)).collect();
    let answered: BTreeSet<&str> = ours.iter().map(|operation| path_of(operation)).collect();
    let mut wrong = Vec::new();
    for operation in &theirs {
        if !ours.contains(operation) && !listed.contains_key(path_of(operation)) {
            wrong.push(format!("{operation} is neither answered nor listed"));
        }
    }
    for path in called {
        if !answered.contains(path.as_str()) && !listed.contains_key(path) {
            wrong.push(format!("the client calls {path}, which is neither answered nor listed"));
        }
    }
    for (path, why) in &listed {
        if answered.contains(path.as_str()) {
            wrong.push(format!("{path} is listed as missing and answered"));
        }
        if !known.contains(path.as_str()) && !called.contains(path) {
            wrong.push(format!("{path} is listed and nobody's"));
        }
        if why.trim().is_empty() {
            wrong.push(format!("{path} is listed without a reason"));
        }
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_finds_every_answer_by_its_schema_and_what_is_missing_in_a_list() {
    let stage = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::new(&stage);
    let mut walk = person.program("python");
    walk.arg(Path::new(HERE).join("walk.py")).args([person.url(), TOKEN]);
    let done = ran(walk.arg(Path::new(HERE).join("openapi.json"))).ok();
    let report = done.json();
    let wrong: Vec<&str> =
        report["wrong"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), stage.server_log());
    let both: BTreeSet<String> = ours().intersection(&theirs()).cloned().collect();
    assert_eq!(strings(&report["walked"]), both, "these are walked, and these are there to be walked");
    let wrong = differences(&strings(&report["called"]));
    assert!(wrong.is_empty(), "{MISSING}:\n{}", wrong.join("\n"));
}
