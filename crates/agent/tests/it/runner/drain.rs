//! Readers that the runner waits for after the end of the job.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use windlass_testkit::wait::TIMEOUT;

use crate::support::runner::{Runner, RunnerSetup, script, signal};

/// Opens a WebSocket that follows the job's output.
pub(super) fn tail(runner: &Runner) -> UnixStream {
    let mut stream = UnixStream::connect(runner.run_dir().join("runner.sock")).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(
        stream,
        "GET /logs_ws HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a token for tests\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    stream
}

#[test]
fn o7_the_runner_exits_with_the_job_status_once_the_server_has_all_output() {
    let mut runner = Runner::start();
    runner.run_to_end(&script("echo hello; exit 6"));
    assert!(runner.is_alive(), "nobody has read yet");
    runner.post("/api/logs/read?stream=job&offset=3");
    assert!(runner.is_alive());
    runner.read_all();
    assert_eq!(runner.exited(), 6);
    let word = std::fs::read_to_string(runner.run_dir().join("exit.json")).unwrap();
    assert_eq!(word, r#"{"exit_status":6,"oom_killed":false}"#);
}

#[test]
fn o7_the_runner_exits_after_the_last_pull() {
    let mut runner = Runner::start();
    runner.run_to_end(&script("echo hello"));
    let pull = runner.get("/api/pull?timestamp=0").json();
    assert_eq!(pull["has_more"], false);
    let states: Vec<&str> =
        pull["job_states"].as_array().unwrap().iter().map(|s| s["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["running", "done"]);
    assert_eq!(runner.exited(), 0);
}

#[test]
fn o7_the_runner_waits_for_a_tailer() {
    let mut runner = Runner::start();
    let mut tail = tail(&runner);
    runner.run_to_end(&script("echo hello"));
    runner.read_all();
    let mut got = Vec::new();
    // The frame with the line, then the closing one; the reply to it ends the connection.
    while !got.windows(6).any(|six| six == b"hello\n") {
        let mut bytes = [0; 64];
        let count = tail.read(&mut bytes).unwrap();
        assert!(count > 0, "closed before the last byte");
        got.extend_from_slice(&bytes[..count]);
    }
    drop(tail);
    assert_eq!(runner.exited(), 0);
}

#[test]
fn o7_the_runner_waits_for_readers_at_most_until_the_timeout() {
    let mut runner = RunnerSetup::new().wait_secs(1).start();
    let begun = Instant::now();
    runner.run_to_end(&script("echo unread; exit 2"));
    assert_eq!(runner.exited(), 2);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(runner.log_text(), "unread\n");
}

#[test]
fn o7_after_sigterm_the_runner_waits_for_no_reader() {
    let mut runner = Runner::start();
    runner.run_to_end(&script("echo unread; exit 2"));
    signal(runner.init(), Signal::TERM);
    assert_eq!(runner.exited(), 2);
    assert_eq!(runner.states().last().unwrap().state, "failed", "the end was told before");
}

#[test]
fn a_runner_listens_within_milliseconds() {
    let quickest = (0..5).map(|_| {
        let begun = Instant::now();
        let runner = Runner::start();
        let took = begun.elapsed();
        drop(runner);
        took
    });
    let quickest = quickest.min().unwrap();
    assert!(quickest < Duration::from_millis(250), "{quickest:?}");
}
