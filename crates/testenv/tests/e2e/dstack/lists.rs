//! Lists and plans: projects, repositories, offers, fleets, volumes, gateways, secrets.

use std::process::Command;

use windlass_testenv::server::TOKEN;
use windlass_testkit::cli_snapshot::{CliSnapshot, SnapshotEnv as _, run_command};

use super::dstack_user::{DstackUser, SMALL};
use crate::test_env::{HostMode, TestEnv};

/// Runs git without user settings.
fn git(person: &DstackUser, args: &[&str]) {
    let mut command: Command = person.program("git");
    command.args([
        "-c",
        "user.name=Ann",
        "-c",
        "user.email=ann@example.com",
        "-c",
        "init.defaultBranch=main",
    ]);
    let done = command.args(args).output().unwrap();
    assert!(done.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Creates a repository whose remote has a public host name and is a directory of this test.
fn repository(person: &DstackUser) {
    git(person, &["init", "--quiet", "--bare", "origin.git"]);
    git(person, &["init", "--quiet", "work"]);
    git(person, &["-C", "work", "commit", "--quiet", "--allow-empty", "-m", "first"]);
    git(person, &["-C", "work", "remote", "add", "origin", "https://git.example.com/team/work.git"]);
    let there = person.home().join("origin.git").display().to_string();
    git(person, &["-C", "work", "push", "--quiet", &there, "main"]);
    // The client needs a branch that tracks one of the remote.
    git(person, &["-C", "work", "update-ref", "refs/remotes/origin/main", "main"]);
    git(person, &["-C", "work", "branch", "--quiet", "--set-upstream-to", "origin/main"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_registers_its_project_and_repository() {
    let env = TestEnv::new(HostMode::None).await;
    let person = DstackUser::new(&env);
    let mut transcript = CliSnapshot::new("dstack-project", &person);
    transcript.run(&["--version"]);
    transcript.run(&["ps"]);
    let url = person.url().to_owned();
    transcript.run(&["project", "add", "--name", "main", "--url", &url, "--token", "wrong", "-y"]);
    transcript.run(&["project", "add", "--name", "main", "--url", &url, "--token", TOKEN, "-y"]);
    transcript.run(&["project", "list", "-v"]);

    repository(&person);
    let mut init = person.command(&["init", "-P", "work"]);
    // Requests to the remote are redirected to the directory.
    init.env("GIT_CONFIG_COUNT", "1");
    init.env("GIT_CONFIG_KEY_0", format!("url.{}.insteadOf", person.home().join("origin.git").display()));
    init.env("GIT_CONFIG_VALUE_0", "https://git.example.com/team/work.git");
    transcript.add(&["init", "-P", "work"], &run_command(&mut init));
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_sets_reads_and_deletes_secrets() {
    let env = TestEnv::new(HostMode::None).await;
    let person = DstackUser::with_project(&env);
    let mut transcript = CliSnapshot::new("dstack-secret", &person);
    transcript.run(&["secret"]);
    transcript.run(&["secret", "set", "token", "hunter2"]);
    transcript.run(&["secret"]);
    transcript.run(&["secret", "get", "token"]);
    transcript.run(&["secret", "delete", "token", "-y"]);
    transcript.run(&["secret", "get", "token"]);
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_lists_runs_fleets_volumes_and_gateways() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-lists", &person);
    transcript.run(&["ps"]);
    transcript.run(&["fleet"]);
    transcript.run(&["fleet", "get", "nowhere", "--json"]);
    transcript.run(&["volume"]);
    transcript.run(&["gateway"]);
    transcript.run(&["export"]);
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_shows_offers_and_run_plans() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-plans", &person);
    transcript.run(&["offer"]);
    transcript.run(&["offer", "--gpu", "H100:8"]);
    let kinds = [
        ("task", "commands: [sleep 60]\nports: [8000]\nmax_duration: 2h\n"),
        ("dev-environment", "ide: vscode\ninactivity_duration: 1h\n"),
        ("service", "commands: [sleep 60]\nport: 8000\n"),
    ];
    for (kind, more) in kinds {
        let file = format!("{kind}.yml");
        person.file(&file, &format!("type: {kind}\nname: planned\nimage: none\n{more}{SMALL}"));
        let args = ["apply", "-f", &file];
        // The user answers the prompt with no.
        let done = person.run_with_input("n\n", &args);
        transcript.add(&args, &done);
    }
    transcript.end();
}
