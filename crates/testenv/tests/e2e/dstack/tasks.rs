//! Runs on this machine from submission to end: attached and detached, followed, stopped, aborted, changed, refused.

use std::fs;

use windlass_testkit::cli_snapshot::{CliSnapshot, SnapshotEnv as _};

use super::dstack_user::{DstackUser, RunningCommand, SMALL};
use crate::{
    containers::{IMAGE, image},
    test_env::{HostMode, TestEnv},
};

/// Writes a task that prints `up`, waits for a file, and exits with a code.
fn write_waiting_task(person: &DstackUser, name: &str, more: &str, code: u8) {
    let go = person.home().join(format!("{name}.go"));
    let wait = format!("until [ -e {} ]; do sleep 0.1; done", go.display());
    let text = format!(
        "type: task\nname: {name}\n{more}commands:\n  - echo up\n  - {wait}\n  - echo down\n  - exit {code}\n{SMALL}"
    );
    person.file(&format!("{name}.yml"), &text);
}

fn release_task(person: &DstackUser, name: &str) {
    fs::write(person.home().join(format!("{name}.go")), "").unwrap();
}

/// Records an attached `apply` from the submission to the last output of the job.
fn record_attached_apply(transcript: &mut CliSnapshot<'_, DstackUser>, person: &DstackUser, name: &str) {
    let file = format!("{name}.yml");
    let args = ["apply", "-f", &file, "-y"];
    let going = person.start(&args);
    going.says("up\n");
    release_task(person, name);
    transcript.add(&args, &going.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_follows_a_task_to_its_end() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-attached", &person);
    write_waiting_task(&person, "good", "image: none\n", 0);
    record_attached_apply(&mut transcript, &person, "good");
    write_waiting_task(&person, "bad", "image: none\n", 3);
    record_attached_apply(&mut transcript, &person, "bad");
    transcript.run(&["ps", "-a", "-v"]);
    transcript.run(&["logs", "good"]);
    transcript.run(&["logs", "ugly"]);
    transcript.run(&["attach", "bad"]);
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_prints_the_output_of_a_task_that_is_done_before_it_attaches() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let text = format!("type: task\nname: short\nimage: none\ncommands:\n  - echo over at once\n{SMALL}");
    person.file("short.yml", &text);
    let ran = person.run(&["apply", "-f", "short.yml", "-y"]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    assert!(ran.stdout.contains("over at once\n"), "{ran:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_lists_replaces_and_attaches_to_a_running_task() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-detached", &person);
    write_waiting_task(&person, "job", "image: none\n", 0);
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    env.says("job", "up").await;
    transcript.run(&["ps"]);
    transcript.run(&["ps", "-v"]);
    let shown = person.run(&["run", "get", "job", "--json"]).ok().json();
    assert_eq!((&shown["status"], &shown["id"]), (&"running".into(), &env.run("job").await["id"]));
    let listed = person.run(&["ps", "--json"]).ok().json();
    assert_eq!(listed["runs"][0]["id"], shown["id"]);
    transcript.run(&["logs", "job"]);

    // First without a change; then with a change that requires stopping the run.
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    write_waiting_task(&person, "job", "image: none\nenv: [LEVEL=2]\n", 0);
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    env.says("job", "up").await;

    let args = ["attach", "job", "--logs"];
    let going = person.start(&args);
    going.says("up\n");
    release_task(&person, "job");
    transcript.add(&args, &going.end());
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_stops_and_aborts_running_tasks() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-stop", &person);
    write_waiting_task(&person, "job", "image: none\n", 0);
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    env.says("job", "up").await;
    transcript.run(&["stop", "job", "-y"]);
    env.reaches("job", &["terminated"]).await;
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    env.says("job", "up").await;
    transcript.run(&["stop", "job", "-x", "-y"]);
    env.reaches("job", &["terminated"]).await;
    transcript.run(&["stop", "nothing", "-y"]);
    transcript.run(&["ps", "-n", "1"]);
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_opens_a_dev_environment_and_lists_its_events() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-dev", &person);
    person.file("dev.yml", &format!("type: dev-environment\nname: dev\nimage: none\nide: vscode\n{SMALL}"));
    let args = ["apply", "-f", "dev.yml", "-y"];
    // With the dstack server the job prints its link. The windlass server returns it to the client, which shows it if
    // configured.
    let mut apply = person.command(&args);
    let going = RunningCommand::new(apply.env("DSTACK_FF_CLI_PRINT_JOB_CONNECTION_INFO", "1"));
    going.says("The dev environment is ready.\n");
    going.interrupt();
    transcript.add(&args, &going.end());
    env.reaches("dev", &["running"]).await;
    let metrics = person.until(&["metrics", "dev"], |ran| ran.stdout.contains("cpu"));
    assert!(metrics.stdout.contains("MEMORY") && metrics.code == Some(0), "{metrics:#?}");
    transcript.run(&["stop", "dev", "-y"]);
    env.reaches("dev", &["terminated"]).await;
    // The order of events that pipelines record in between is not deterministic.
    for args in [["event", "--target-run", "dev"], ["event", "--within-run", "dev"]] {
        let mut reported = person.run(&args);
        assert!(reported.stdout.contains("running"), "{reported:#?}");
        reported.stdout = reported.stdout.split_inclusive('\n').filter(|line| line.contains('👤')).collect();
        transcript.add(&args, &reported);
    }
    transcript.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_follows_a_docker_task_to_its_end() {
    image();
    let env = TestEnv::new(HostMode::Containers).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    let mut transcript = CliSnapshot::new("dstack-docker", &person);
    // Released through the attached connection: the container does not see files of this machine.
    let text = format!(
        "type: task\nname: boxed\nimage: {IMAGE}\nports: [7007]\ncommands:\n  - echo up\n  \
         - busybox mkdir -p /tmp/page && echo pong > /tmp/page/index.html\n  \
         - busybox httpd -p 127.0.0.1:7007 -h /tmp/page\n  \
         - until [ -e /tmp/go ]; do sleep 0.1; done\n  - echo down\n{SMALL}"
    );
    person.file("boxed.yml", &text);
    let args = ["apply", "-f", "boxed.yml", "-y"];
    let going = person.start(&args);
    going.says("up\n");
    let shell = person.shell("boxed", "cat /tmp/page/index.html");
    assert_eq!((shell.stdout.as_str(), shell.code), ("pong\n", Some(0)), "{shell:?}");
    // The job may end before this connection does.
    person.shell("boxed", "busybox touch /tmp/go");
    transcript.add(&args, &going.end());
    transcript.run(&["logs", "boxed"]);
    transcript.end();
}
