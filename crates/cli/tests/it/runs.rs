//! Transcripts of runs on a server without instances.

use windlass_testkit::wait::eventually_ok;

use crate::{cli_env::CliEnv, snapshot::CliSnapshot};

const TASK: &str = "type: task\nname: job\ncommands: [echo hi]\nmax_duration: 2h\nresources: {cpu: 8.., memory: 16GB..}\n\
                    retry: {on_events: [no-capacity], duration: 1h}\n";

/// Waits until the scheduler has found no capacity for the run.
#[track_caller]
fn wait_until_no_capacity(stage: &CliEnv) {
    eventually_ok("the run is pending", || {
        let why = stage.windlass(&["why", "job", "-o", "json"]).ok();
        if why.json()["status"] == "pending" { Ok(()) } else { Err(why.stdout) }
    });
}

#[test]
fn a_waiting_run_can_be_listed_explained_changed_and_stopped() {
    let stage = CliEnv::new();
    stage.file("job.yml", TASK);
    let mut story = CliSnapshot::new("runs", &stage);
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    wait_until_no_capacity(&stage);
    story.run(&["ps", "-o", "name"]);
    let why = stage.windlass(&["why", "job"]).ok().stdout;
    assert!(why.contains("  to make it fit:\n    on fleets: create a fleet\n"), "{why}");
    assert!(why.contains(" failed: job 0 of replica 0 ended: ") && why.contains(" begins at "), "{why}");
    assert_eq!(why.matches("no fleet exists").count(), 1, "the nearest miss is printed once: {why}");
    assert!(!why.contains("fits now"), "no count beside the list of what does not fit: {why}");
    story.run(&["logs", "job"]);
    story.run(&["logs", "jbo"]);
    stage.file("job.yml", &(TASK.replace("echo hi", "echo ho") + "env: {A: '1'}\n"));
    story.run(&["apply", "-f", "job.yml"]);
    story.run(&["stop", "job"]);
    story.run(&["stop", "-x", "-y", "--wait", "job"]);
    story.run(&["stop", "-y", "job"]);
    story.run(&["attach", "job"]);
    story.run(&["ps"]);
    story.run(&["logs", "-f", "--until", "1h", "job"]);
    story.run(&["apply", "-f", "job.yml", "-y", "-o", "json"]);
    story.end();
}

#[test]
fn apply_shows_an_update_field_by_field() {
    let stage = CliEnv::new();
    stage.file("job.yml", TASK);
    stage.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    stage.file("job.yml", &TASK.replace("echo hi", "echo ho").replace("cpu: 8..", "cpu: 4.."));
    let applied = stage.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    applied.says("`job` is active and must be stopped first, because `configuration.");
    applied.says("  ~ commands[0]: \"echo hi\" → \"echo ho\"\n");
    applied.says("  ~ resources.cpu.count.min: 8 → 4\n");
    stage.windlass(&["stop", "-x", "-y", "--wait", "job"]).ok();
}
