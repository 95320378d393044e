//! Transcripts of runs on a server without instances.

use windlass_testkit::wait::eventually_ok;

use crate::{cli_env::CliEnv, snapshot::CliSnapshot};

const TASK: &str = "type: task\nname: job\ncommands: [echo hi]\nmax_duration: 2h\nresources: {cpu: 8.., memory: 16GB..}\n\
                    retry: {on_events: [no-capacity], duration: 1h}\n";

/// Waits until the scheduler has found no capacity for the run.
#[track_caller]
fn wait_until_no_capacity(env: &CliEnv) {
    eventually_ok("the run is pending", || {
        let why = env.windlass(&["why", "job", "-o", "json"]).ok();
        if why.json()["status"] == "pending" { Ok(()) } else { Err(why.stdout) }
    });
}

#[test]
fn a_waiting_run_can_be_listed_explained_changed_and_stopped() {
    let env = CliEnv::new();
    env.file("job.yml", TASK);
    let mut transcript = CliSnapshot::new("runs", &env);
    transcript.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    wait_until_no_capacity(&env);
    transcript.run(&["ps", "-o", "name"]);
    let why = env.windlass(&["why", "job"]).ok().stdout;
    assert!(why.contains("  to make it fit:\n    create a fleet\n"), "{why}");
    assert!(why.contains(" failed: no capacity; attempt ") && why.contains(" begins at "), "{why}");
    assert_eq!(why.matches("no fleet exists").count(), 1, "the nearest miss is printed once: {why}");
    assert!(!why.contains("fits now"), "no count beside the list of what does not fit: {why}");
    transcript.run(&["logs", "job"]);
    transcript.run(&["logs", "jbo"]);
    env.file("job.yml", &(TASK.replace("echo hi", "echo ho") + "env: {A: '1'}\n"));
    transcript.run(&["apply", "-f", "job.yml"]);
    transcript.run(&["stop", "job"]);
    transcript.run(&["stop", "-x", "-y", "--wait", "job"]);
    transcript.run(&["stop", "-y", "job"]);
    transcript.run(&["attach", "job"]);
    transcript.run(&["ps"]);
    transcript.run(&["logs", "-f", "--until", "1h", "job"]);
    transcript.run(&["apply", "-f", "job.yml", "-y", "-o", "json"]);
    transcript.end();
}

#[test]
fn apply_shows_an_update_field_by_field() {
    let env = CliEnv::new();
    env.file("job.yml", TASK);
    env.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    env.file("job.yml", &TASK.replace("echo hi", "echo ho").replace("cpu: 8..", "cpu: 4.."));
    let applied = env.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    applied.says("`job` is active and must be stopped first, because `configuration.");
    applied.says("  ~ commands[0]: \"echo hi\" → \"echo ho\"\n");
    applied.says("  ~ resources.cpu.count.min: 8 → 4\n");
    env.windlass(&["stop", "-x", "-y", "--wait", "job"]).ok();
}
