//! Ends that the job did not choose.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use windlass_testkit::wait::eventually;

use crate::support::runner::{Runner, job, script, signal};

fn job_with_stop(text: &str, secs: i64) -> serde_json::Value {
    job(json!({ "commands": ["/bin/sh", "-c", text], "stop_duration": secs }))
}

/// Returns the output of the job, without the shell's message about the `sleep` that the signal ended as well.
fn job_output(runner: &Runner) -> String {
    let log = runner.log_text();
    let lines = log.lines().filter(|line| !line.is_empty() && *line != "Terminated");
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn o2_a_stop_interrupts_the_job_and_keeps_its_last_line() {
    let runner = Runner::start();
    runner.go(&script("trap 'echo interrupted; exit 7' INT; echo ready; while :; do sleep 0.02; done"));
    runner.wait_printed("ready");
    runner.post("/api/stop");
    let end = runner.ended();
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", Some(7)));
    assert_eq!(end.termination_reason, "terminated_by_server");
    assert_eq!(job_output(&runner), "ready\ninterrupted\n");
}

#[test]
fn a_job_with_a_stop_duration_is_stopped_with_sigterm() {
    let runner = Runner::start();
    runner.go(&job_with_stop("trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.02; done", 20));
    runner.wait_printed("ready");
    runner.post("/api/stop");
    let end = runner.ended();
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", Some(0)));
    assert_eq!(job_output(&runner), "ready\nasked\n");
}

#[test]
fn o2_a_job_that_ignores_the_stop_is_killed_after_its_grace_period() {
    let runner = Runner::start();
    runner.go(&job_with_stop("trap '' TERM INT; echo ready; while :; do sleep 0.02; done", 1));
    runner.wait_printed("ready");
    let begun = Instant::now();
    runner.post("/api/stop");
    let end = runner.ended();
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", Some(137)));
    assert_eq!(job_output(&runner), "ready\n");
    assert_eq!(runner.others(), [0i32; 0]);
}

#[test]
fn a_stop_call_may_set_the_grace_period_and_a_kill_is_reported() {
    let runner = Runner::start();
    runner.go(&job_with_stop("trap '' TERM INT; echo ready; while :; do sleep 0.02; done", 600));
    runner.wait_printed("ready");
    runner.post("/api/stop?grace_secs=1");
    let end = runner.ended();
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", Some(137)));
    let reported = "it was still running 1 s after the stop request (`stop_duration`) and was killed";
    assert_eq!(end.termination_message, reported);
}

/// A shell of a task is interactive, and as such ignores the signal.
#[test]
fn a_stop_ends_a_shell_that_continues_after_its_command_ended() {
    for (text, last) in [
        ("echo ready; while :; do sleep 600; done", ""),
        ("echo ready; sleep 600; echo more; sleep 600; sleep 600", ""),
        ("trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 600; done", "saved\n"),
    ] {
        let runner = Runner::start();
        runner.go(&job(json!({ "commands": ["/bin/bash", "-i", "-c", text], "stop_duration": 600 })));
        runner.wait_printed("ready");
        runner.post("/api/stop");
        let end = runner.ended();
        assert_eq!((end.state.as_str(), end.termination_message.as_str()), ("terminated", ""), "{text}");
        assert_eq!(job_output(&runner).replace("more\n", ""), format!("ready\n{last}"), "{text}");
    }
}

#[test]
fn child_processes_of_the_shell_also_get_the_grace_period() {
    let runner = Runner::start();
    // The signal kills the shell at once; the process that it waits for saves its work.
    let inner = "trap \"sleep 0.3; echo saved; exit 0\" TERM; echo ready; while :; do sleep 0.02; done";
    runner.go(&job_with_stop(&format!("/bin/sh -c '{inner}' & wait"), 20));
    runner.wait_printed("ready");
    runner.post("/api/stop");
    assert_eq!(runner.ended().state, "terminated");
    assert_eq!(job_output(&runner), "ready\nsaved\n");
}

#[test]
fn r16_a_job_ends_at_its_max_duration_without_the_server() {
    let runner = Runner::start();
    let begun = Instant::now();
    let end = runner.run_to_end(&job(
        json!({ "commands": ["/bin/sh", "-c", "echo on; exec sleep 100"], "max_duration": 1 }),
    ));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(
        (end.state.as_str(), end.termination_reason.as_str()),
        ("terminated", "max_duration_exceeded")
    );
    assert_eq!(end.exit_status, Some(130));
    assert_eq!(job_output(&runner), "on\n");
}

#[test]
fn on_sigterm_the_runner_stops_the_job_and_reports_it() {
    let mut runner = Runner::start();
    runner.go(&job_with_stop("trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.02; done", 20));
    runner.wait_printed("ready");
    signal(runner.init(), Signal::TERM);
    assert_eq!(runner.exited(), 5);
    let end = runner.states().pop().unwrap();
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", Some(5)));
    assert_eq!(job_output(&runner), "ready\nasked\n");
}

#[test]
fn on_sigterm_before_any_job_the_runner_exits() {
    let mut runner = Runner::start();
    signal(runner.init(), Signal::TERM);
    assert_eq!(runner.exited(), 1);
    assert_eq!(runner.states().pop().unwrap().state, "terminated");
}

#[test]
fn f33_processes_that_left_the_session_end_with_the_job() {
    let runner = Runner::start();
    let end = runner.run_to_end(&script(
        "setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 &) ; echo started; sleep 0.1",
    ));
    assert_eq!((end.state.as_str(), end.exit_status), ("done", Some(0)));
    assert_eq!(job_output(&runner), "started\n");
    eventually("nothing of the job lives", || runner.others().is_empty());
}

#[test]
fn f16_a_killed_runner_ends_its_job_and_the_output_is_kept() {
    let mut runner = Runner::start();
    runner.go(&script("setsid sleep 1000 & echo kept; exec sleep 1000"));
    runner.wait_printed("kept");
    let others = runner.others();
    assert!(others.len() >= 2, "{others:?}");
    signal(runner.inner(), Signal::KILL);
    assert_eq!(runner.exited(), 137);
    let alive = |pid: &i32| {
        windlass_agent::proc::stat(*pid)
            .unwrap()
            .is_some_and(|one| one.state == windlass_agent::proc::ProcessState::Alive)
    };
    assert!(!others.iter().any(alive));
    assert_eq!(job_output(&runner), "kept\n");
    assert_eq!(runner.states().last().unwrap().state, "running", "nobody lived to say more");
}
