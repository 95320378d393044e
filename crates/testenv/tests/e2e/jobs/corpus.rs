//! Task files of other projects, run for real: each ends as its author intended.
//!
//! The files are not part of the repository. Without them the test prints a notice, and runs only the built-in files,
//! which have the same shapes.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use windlass_model::managed_job::plan::Shape;

use super::{job, launch, nodes::with_lab, statuses, with_hosts};
use crate::test_env::TestEnv;

/// Longer than any job takes, even during other tests.
const TIMEOUT: Duration = Duration::from_secs(240);
/// Files with a longer duration have their sleeps shortened, except for those that are cancelled.
const LONG_SECS: i64 = 60;
/// Divisor of the shortened sleeps.
const SLEEP_DIVISOR: u32 = 100;

/// Built-in files in the format of the corpus index, with the file itself as `text`.
fn own_entries() -> Vec<Value> {
    let pipeline = "name: p\n---\nname: a\nrun: echo a\n---\nname: b\nsetup: exit 1\nrun: echo b\n---\nname: c\nrun: echo c\n";
    let group = "name: g\nexecution: parallel\nprimary_tasks: [a]\n---\nname: a\nrun: echo a\n---\nname: b\nrun: sleep 600\n";
    let retry = "resources:\n  job_recovery: {max_restarts_on_errors: 1}\nrun: exit 1\n";
    let long = "name: l\n---\nname: a\nrun: sleep 600\n---\nname: b\nrun: echo b\n";
    vec![
        json!({"file": "pipeline", "text": pipeline, "expected": ["SUCCEEDED", "FAILED_SETUP", "CANCELLED"],
            "expected_job": "FAILED_SETUP"}),
        json!({"file": "group", "text": group, "expected": ["SUCCEEDED", "CANCELLED"],
            "expected_job": "SUCCEEDED"}),
        json!({"file": "retry", "text": retry, "expected": ["FAILED"], "expected_job": "FAILED",
            "attempts": [2], "recovery_count": [1]}),
        json!({"file": "cancel", "text": long, "expected": ["CANCELLED", "CANCELLED"],
            "expected_job": "CANCELLED", "drive": "cancel-when-running"}),
    ]
}

/// Files of the corpus that can run on this machine, with their texts; empty if there is no corpus.
#[expect(clippy::print_stdout, reason = "what is not run is said")]
fn foreign_entries() -> Vec<Value> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/corpus/skypilot");
    let Ok(index) = fs::read(corpus.join("index.json")) else {
        println!("the corpus is absent ({}): only files of our own are run", corpus.display());
        return Vec::new();
    };
    let index: Vec<Value> = serde_json::from_slice(&index).unwrap();
    let mut files: Vec<Value> = index.into_iter().filter(|entry| entry["runnable_locally"] == true).collect();
    for entry in &mut files {
        let text = fs::read_to_string(corpus.join(entry["file"].as_str().unwrap())).unwrap();
        entry["text"] = text.into();
    }
    files
}

/// Returns whether a file needs machines with separate addresses: for several nodes, or tasks that find each other by
/// name.
fn wants_machines(entry: &Value) -> bool {
    entry["max_nodes"] != 1 || json_words(&entry["needs"]).contains(&"group-hostnames")
}

fn json_words(list: &Value) -> Vec<&str> {
    list.as_array().map(|list| list.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
}

/// Creates a directory with a `sleep` that waits for a hundredth of its argument.
fn short_sleep(home: &Path) -> PathBuf {
    let dir = home.join("bin");
    fs::create_dir(&dir).unwrap();
    let script = format!("#!/bin/sh\nexec /bin/sleep $(awk \"BEGIN {{ print $1 / {SLEEP_DIVISOR} }}\")\n");
    fs::write(dir.join("sleep"), script).unwrap();
    fs::set_permissions(dir.join("sleep"), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// One running file.
struct RunningEntry {
    entry: Value,
    id: i64,
    /// The test still has to perform its action on it.
    drive: bool,
}

async fn launch_entry(env: &mut TestEnv, entry: Value, short: &Path) -> RunningEntry {
    let drive = entry["drive"].is_string();
    let mut envs = serde_json::Map::new();
    for name in json_words(&entry["env_required"]) {
        envs.insert(name.to_owned(), "some-value".into());
    }
    if !drive && entry["seconds"].as_i64().is_some_and(|seconds| seconds > LONG_SECS) {
        let path = std::env::var("PATH").unwrap();
        envs.insert("PATH".to_owned(), format!("{}:{path}", short.display()).into());
    }
    let id = launch(env, entry["text"].as_str().unwrap(), json!({"envs": envs})).await;
    RunningEntry { entry, id, drive }
}

/// Returns the differences from the index, if any.
fn find_difference(entry: &Value, seen: &Value) -> Option<String> {
    let mut wrong = Vec::new();
    if seen["status"] != entry["expected_job"] {
        wrong.push(format!("the job is {}, should be {}", seen["status"], entry["expected_job"]));
    }
    let wanted = json_words(&entry["expected"]);
    let found = statuses(seen);
    let alike = found.len() == wanted.len()
        && found.iter().zip(&wanted).all(|(status, wanted)| wanted.split('|').any(|one| one == *status));
    if !alike {
        wrong.push(format!("tasks are {found:?}, should be {wanted:?}"));
    }
    for (key, of) in [("attempts", "attempt"), ("recovery_count", "recovery_count")] {
        let numbers: Vec<Value> =
            seen["tasks"].as_array().unwrap().iter().map(|task| task[of].clone()).collect();
        if entry[key].is_array() && json!(numbers) != entry[key] {
            wrong.push(format!("{key} are {numbers:?}, should be {}", entry[key]));
        }
    }
    (!wrong.is_empty()).then(|| format!("{}: {}\n{seen:#}", entry["file"], wrong.join("; ")))
}

/// Waits for all ends, and returns the unexpected ones.
async fn wait_for_ends(env: &mut TestEnv, mut open: Vec<RunningEntry>) -> Vec<String> {
    let (began, mut wrong) = (Instant::now(), Vec::new());
    while !open.is_empty() {
        let mut left = Vec::new();
        for mut one in open {
            let seen = job(env, one.id).await;
            if seen["schedule_state"] == "DONE" {
                wrong.extend(find_difference(&one.entry, &seen));
                continue;
            }
            if one.drive && seen["status"] == "RUNNING" {
                env.project("jobs/cancel", &json!({"job_ids": [one.id]})).await;
                one.drive = false;
            }
            left.push(one);
        }
        open = left;
        if began.elapsed() > TIMEOUT {
            let mut left = String::new();
            for one in &open {
                left += &format!("{}: {:#}\n", one.entry["file"], job(env, one.id).await);
            }
            panic!("these do not end: {left}\n{}", env.server_log());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    wrong
}

#[tokio::test]
async fn third_party_task_files_run_unchanged_and_end_as_expected() {
    let (mut env, _hosts) = with_hosts(8, 8).await;
    let (files, left_out): (Vec<Value>, Vec<Value>) =
        foreign_entries().into_iter().partition(|entry| !wants_machines(entry));
    let short = short_sleep(env.home());
    let mut open = Vec::new();
    for entry in files.into_iter().chain(own_entries()) {
        open.push(launch_entry(&mut env, entry, &short).await);
    }
    let count = open.len();
    let wrong = wait_for_ends(&mut env, open).await;
    println!("{count} files ran, {} were left out, {} ended otherwise", left_out.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Built-in files with several nodes: one node fails while the others work, in `run` and in `setup`.
fn own_multi_node_entries() -> Vec<Value> {
    let text = |phase: &str, variable: &str| {
        format!("num_nodes: 3\n{phase}: |\n  [ ${variable} != 1 ] || exit 3\n  sleep 600\n")
    };
    let run = text("run", "SKYPILOT_NODE_RANK");
    let setup = text("setup", "SKYPILOT_SETUP_NODE_RANK") + "run: echo never\n";
    vec![
        json!({"file": "a worker's run", "text": run, "expected": ["FAILED"], "expected_job": "FAILED"}),
        json!({"file": "a worker's setup", "text": setup, "expected": ["FAILED_SETUP"],
            "expected_job": "FAILED_SETUP"}),
    ]
}

/// Number of concurrent nodes of a file: all tasks of a group, or the largest task otherwise.
fn nodes_at_once(text: &str) -> usize {
    let plan = windlass_model::skypilot::parse_task_file(
        text,
        &windlass_model::skypilot::CommandLineValues::default(),
    )
    .unwrap()
    .plan;
    let nodes = plan.tasks.iter().map(|task| task.nodes as usize);
    match plan.shape {
        Shape::Group(_) => nodes.sum(),
        Shape::Single | Shape::Pipeline | Shape::Dag => nodes.max().unwrap_or_default(),
    }
}

/// Hosts with separate networks, one node each. Files that lose a node are tested separately, with a shorter file.
#[tokio::test]
async fn third_party_multi_node_task_files_run_on_as_many_hosts() {
    let fits = |entry: &Value| wants_machines(entry) && entry["drive"] != "lose-one-node-then-cancel";
    let files: Vec<Value> =
        foreign_entries().into_iter().filter(fits).chain(own_multi_node_entries()).collect();
    let hosts = files.iter().map(|entry| nodes_at_once(entry["text"].as_str().unwrap())).max().unwrap();
    let (mut env, _lab) = with_lab(hosts).await;
    let short = short_sleep(env.home());
    let (count, mut wrong) = (files.len(), Vec::new());
    // One after the other, so that each finds all hosts free.
    for entry in files {
        let one = launch_entry(&mut env, entry, &short).await;
        wrong.extend(wait_for_ends(&mut env, vec![one]).await);
    }
    println!("{count} files ran on {hosts} hosts, {} ended otherwise", wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
