//! Every file under `examples/` is valid and listed, and is run unless the list says what it needs.

use std::path::PathBuf;

use crate::{CommandOutput, TestHome, attach::require_agent, run_command};

fn examples_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

fn example_path(name: &str) -> String {
    examples_dir().join(name).to_str().unwrap().to_owned()
}

/// File names in order.
fn example_names() -> Vec<String> {
    let entries = std::fs::read_dir(examples_dir()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".yml")).collect();
    names.sort();
    names
}

#[test]
fn every_example_is_valid_and_listed() {
    let home = TestHome::new();
    let names = example_names();
    let paths: Vec<String> = names.iter().map(|name| example_path(name)).collect();
    let args: Vec<&str> = std::iter::once("check").chain(paths.iter().map(String::as_str)).collect();
    // A variable that each run requires.
    run_command(home.command(&args).env("LR", "0.1")).ok();
    let listed = std::fs::read_to_string(examples_dir().join("README.md")).unwrap();
    let linked: Vec<&str> = listed.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    for name in &names {
        assert!(linked.contains(&name.as_str()), "examples/README.md does not list {name}");
    }
    for name in &linked {
        assert!(
            names.iter().any(|other| other == name),
            "examples/README.md lists {name}, which is not there"
        );
    }
    assert!(names.len() >= 10);
}

/// Examples that `small_examples_run_on_this_machine` runs.
const RUN: &[&str] =
    &["args.yml", "code.yml", "count.yml", "hello.yml", "schedule.yml", "sweep.yml", "volume.yml"];

#[test]
fn every_example_is_tested_or_lists_its_requirements() {
    let listed = std::fs::read_to_string(examples_dir().join("README.md")).unwrap();
    let mut without_needs: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.strip_prefix("| [")?.strip_suffix("| |"))
        .filter_map(|row| row.split(']').next())
        .collect();
    without_needs.sort_unstable();
    assert_eq!(without_needs, RUN);
}

fn run_local(home: &TestHome, args: &[&str]) -> CommandOutput {
    run_command(home.command(args).env("WINDLASS_SERVER_LOCAL_RUNTIME", "process"))
}

fn apply(home: &TestHome, name: &str, more: &[&str]) -> String {
    let file = example_path(name);
    let args = [&["apply", "-f", &file, "-y"][..], more].concat();
    run_local(home, &args).ok().stdout.replace("\r\n", "\n")
}

#[test]
fn small_examples_run_on_this_machine() {
    require_agent();
    let home = TestHome::new();
    assert_eq!(apply(&home, "hello.yml", &[]), "hello from windlass\n");
    let words = apply(&home, "args.yml", &["-e", "GREETING=hi", "--", "one", "two three"]);
    assert_eq!(words, "hi, one\nhi, two three\n");
    for (name, rate) in [("sweep-lr-1", "0.1"), ("sweep-lr-01", "0.01")] {
        let variable = format!("LR={rate}");
        let message = apply(&home, "sweep.yml", &["-n", name, "-e", &variable]);
        assert_eq!(message, format!("training with a rate of {rate} and seed 7\n"));
    }
    assert_eq!(run_local(&home, &["ps", "-a", "-o", "name"]).ok().stdout.lines().count(), 4);

    // The files next to the configuration are uploaded.
    home.0.file("repo/train.py", "print(1)");
    let code = std::fs::read_to_string(example_path("code.yml")).unwrap();
    home.0.file("repo/code.yml", &code);
    let listed = run_local(&home, &["apply", "-f", "repo/code.yml", "-y"]).ok().stdout;
    assert!(listed.contains("train.py"), "{listed}");

    // The run waits for its schedule, and can be stopped before.
    let file = example_path("schedule.yml");
    run_local(&home, &["apply", "-f", &file, "-y", "-d"]).ok();
    let run = run_local(&home, &["ps", "-o", "json"]).ok().json();
    assert!(run["runs"][0]["next_triggered_at"].is_string(), "{run}");
    run_local(&home, &["stop", "-y", "--wait", "nightly"]).ok();

    // The run outlives the command, and ends when it is stopped.
    let file = example_path("count.yml");
    run_local(&home, &["apply", "-f", &file, "-y", "-d"]).ok();
    run_local(&home, &["stop", "-y", "--wait", "count"]).ok();
    let run = run_local(&home, &["ps", "-a", "-o", "json"]).ok().json();
    let count =
        run["runs"].as_array().unwrap().iter().find(|run| run["run_spec"]["run_name"] == "count").cloned();
    assert_eq!(count.as_ref().map(|run| &run["status"]), Some(&serde_json::json!("terminated")), "{run}");

    let file = example_path("volume.yml");
    run_local(&home, &["apply", "-f", &file, "-y"]).ok();
    let volumes = run_local(&home, &["volume", "list", "-o", "name"]).ok().stdout;
    assert_eq!(volumes, "checkpoints\n");
}
