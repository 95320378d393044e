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

use serde_json::{Value, json};
use windlass_api::operations;
use windlass_testenv::{
    server::TOKEN,
    services::{ServiceCaller, free_port, read_until, service_config},
};
use windlass_testkit::cli_snapshot::run_command;

use super::dstack_user::DstackUser;
use crate::{
    services::wait_for_answer,
    test_env::{HostMode, TestEnv},
};

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/dstack");
const MISSING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api/missing.md");

/// Operations of dstack, as `POST /api/…`.
fn dstack_operations() -> BTreeSet<String> {
    let document: Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
    document["operations"].as_object().unwrap().keys().cloned().collect()
}

/// Operations of windlass, in the same format.
fn own_operations() -> BTreeSet<String> {
    operations::table().iter().map(|entry| format!("{} {}", entry.method.name(), entry.path)).collect()
}

fn path_of(operation: &str) -> &str {
    operation.split_once(' ').unwrap().1
}

/// Paths that are documented as missing, with the reasons.
fn documented_missing() -> BTreeMap<String, String> {
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
    let (theirs, ours, listed) = (dstack_operations(), own_operations(), documented_missing());
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
async fn dstack_validates_every_response_and_missing_operations_are_listed() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::new(&env);
    let mut walk = person.program("python");
    walk.arg(Path::new(HERE).join("walk.py")).args([person.url(), TOKEN]);
    let done = run_command(walk.arg(Path::new(HERE).join("openapi.json"))).ok();
    let report = done.json();
    let wrong: Vec<&str> =
        report["wrong"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), env.server_log());
    let both: BTreeSet<String> = own_operations().intersection(&dstack_operations()).cloned().collect();
    assert_eq!(strings(&report["walked"]), both, "these are walked, and these are there to be walked");
    let wrong = differences(&strings(&report["called"]));
    assert!(wrong.is_empty(), "{MISSING}:\n{}", wrong.join("\n"));
}

/// Paths of one table of the document, by the title of its section.
fn paths_under(title: &str) -> Vec<String> {
    let text = std::fs::read_to_string(MISSING).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with(title)).unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(path, _)| path.to_owned()).collect()
}

/// Every documented path is called on a server that has the service it names: a 404 is that of the path, not of its parameters.
#[tokio::test]
async fn documented_paths_respond_as_documented() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut chat = service_config("chat", free_port());
    chat["model"] = json!("tiny");
    env.apply(&chat).await;
    let caller = ServiceCaller::new(env.address());
    let ready = "windlass_service_replicas{project=\"main\",run=\"chat\"} 1";
    wait_for_answer(&mut env, &caller, "/metrics", 200, ready).await;
    let fill = |path: &str| {
        let names = [("{project_name}", "main"), ("{run_name}", "chat"), ("{path}", "a/b")];
        let others = [("{provider}", "github"), ("{backend_name}", "local")];
        names.iter().chain(&others).fold(path.to_owned(), |path, (name, value)| path.replace(name, value))
    };

    let missing = paths_under("Not implemented");
    assert!(!missing.is_empty());
    for path in missing {
        for method in ["GET", "POST"] {
            let got = caller.request(method, &fill(&path), b"{}").unwrap();
            assert_eq!(got.status, 404, "{method} {path}: {}", got.body);
        }
    }

    let served = paths_under("Served by the service proxy");
    assert_eq!(served.len(), 4, "{served:?}");
    for path in served {
        if path.ends_with("/chat/completions") {
            // The service holds the end of its response back until `/open` is called.
            let body = br#"{"model": "tiny", "messages": []}"#;
            let mut answer =
                caller.send("POST", &fill(&path), "Content-Type: application/json\r\n", body).unwrap();
            let head = read_until(&mut answer, "data: {}\n\n");
            assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
            assert_eq!(caller.get("/proxy/services/main/chat/open").unwrap().status, 200);
            continue;
        }
        let status = if path.ends_with("/{run_name}") { 308 } else { 200 };
        let got = caller.get(&fill(&path)).unwrap();
        assert_eq!(got.status, status, "{path}: {}", got.body);
    }
}
