//! Output and exit of the commands.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::runner::{Runner, RunnerSetup, job, script};

#[test]
fn the_final_state_matches_the_exit_of_the_commands() {
    let table = [
        ("exit 0", "done", "", 0),
        ("exit 3", "failed", "container_exited_with_error", 3),
        ("kill -9 $$", "failed", "container_exited_with_error", 137),
        ("kill -TERM $$", "failed", "container_exited_with_error", 143),
        ("exit 255", "failed", "container_exited_with_error", 255),
    ];
    for (text, state, reason, status) in table {
        let mut runner = Runner::start();
        let end = runner.run_to_end(&script(text));
        assert_eq!((end.state.as_str(), end.termination_reason.as_str()), (state, reason), "{text}");
        assert_eq!(end.exit_status, Some(status), "{text}");
        assert_eq!(end.detail, None, "{text}");
        assert_eq!(runner.exited(), status, "{text}: nothing was printed, so nobody is waited for");
    }
}

#[test]
fn commands_that_cannot_start_fail_with_the_cause() {
    let table = [
        (json!({ "commands": ["/does/not/exist"] }), "start `/does/not/exist`", true),
        (json!({ "commands": [] }), "the job has none", true),
        (json!({ "commands": ["sh"], "working_dir": "/proc/nowhere" }), "create /proc/nowhere", false),
        (
            json!({ "commands": ["sh"], "user": { "username": "no-such-user" } }),
            "user no-such-user does not",
            true,
        ),
        (
            json!({ "commands": ["sh"], "file_archives": [{ "id": "a", "path": "x" }] }),
            "was not uploaded",
            false,
        ),
    ];
    for (spec, why, is_permanent) in table {
        let runner = Runner::start();
        let end = runner.run_to_end(&job(spec.clone()));
        assert_eq!(
            (end.state.as_str(), end.termination_reason.as_str()),
            ("failed", "executor_error"),
            "{spec}"
        );
        assert!(end.termination_message.contains(why), "{spec}: {}", end.termination_message);
        assert_eq!(end.exit_status, None);
        assert_eq!(end.detail.as_deref(), is_permanent.then_some("setup_failed"), "{spec}");
    }
}

#[test]
fn without_commands_those_of_the_image_are_run() {
    let runner = Runner::start();
    let image = json!({ "entrypoint": ["/bin/sh", "-c"], "cmd": ["echo by the image"] });
    std::fs::write(runner.run_dir().join("image.json"), image.to_string()).unwrap();
    assert_eq!(runner.run_to_end(&job(json!({}))).state, "done");
    assert_eq!(runner.log_text(), "by the image\n");
}

#[test]
fn stdout_and_stderr_go_to_one_stream_byte_for_byte() {
    let runner = Runner::start();
    runner.run_to_end(&script(r"printf 'a\r\n\377\000b'; printf 'c' >&2; printf 'd'"));
    assert_eq!(runner.log(), b"a\r\n\xff\0bcd");
}

#[test]
fn o2_background_processes_do_not_delay_the_end_of_the_job() {
    let runner = Runner::start();
    let begun = Instant::now();
    let end = runner.run_to_end(&script("(sleep 0.2; echo late) & sleep 1000 & echo last; exit 9"));
    assert_eq!(end.exit_status, Some(9));
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(runner.log_text(), "last\nlate\n");
    assert_eq!(runner.others(), [0i32; 0]);
}

#[test]
fn o2_the_last_line_of_a_killed_job_is_kept() {
    let runner = Runner::start();
    let end = runner.run_to_end(&script("printf 'no line end'; kill -9 $$"));
    assert_eq!(end.exit_status, Some(137));
    assert_eq!(runner.log_text(), "no line end");
}

#[test]
fn o6_a_job_over_its_log_quota_fails_with_that_reason() {
    let runner = Runner::start();
    let mut submit = script("while :; do echo 0123456789; done");
    submit["log_quota_hour"] = json!(10_000);
    let end = runner.run_to_end(&submit);
    assert_eq!((end.state.as_str(), end.termination_reason.as_str()), ("failed", "log_quota_exceeded"));
    assert!(end.termination_message.contains("10000 bytes"), "{}", end.termination_message);
    assert_eq!(runner.log().len(), 10_000);
    assert_eq!(runner.others(), [0i32; 0]);
}

#[test]
fn o6_a_log_quota_exceeded_by_the_last_write_is_reported_too() {
    let runner = Runner::start();
    let mut submit = script("head -c 101 /dev/zero");
    submit["log_quota_hour"] = json!(100);
    assert_eq!(runner.run_to_end(&submit).termination_reason, "log_quota_exceeded");
    assert_eq!(runner.log().len(), 100);
}

#[test]
fn large_output_uses_little_memory() {
    const SIZE: usize = 64 << 20;
    let runner = Runner::start();
    let begun = Instant::now();
    runner.run_to_end(&script(&format!("head -c {SIZE} /dev/zero")));
    let took = begun.elapsed();
    assert_eq!(runner.log().len(), SIZE);
    let status = std::fs::read_to_string(format!("/proc/{}/status", runner.inner())).unwrap();
    let peak: u64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB")?.parse().ok())
        .unwrap();
    // Much of it is the unoptimised program itself.
    assert!(peak < 64 * 1024, "{peak} kB");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_terminal_is_provided_on_request_and_does_not_alter_the_output() {
    let request = "test -t 0 && test -t 1 && test -t 2 && echo terminal || echo pipe; printf 'a\\nb\\n'";
    let table = [
        (json!({ "tty": true, "commands": ["/bin/sh", "-c", request] }), "terminal\na\nb\n"),
        (json!({ "tty": false, "commands": ["/bin/sh", "-c", request] }), "pipe\na\nb\n"),
        (json!({ "commands": ["/bin/sh", "-c", request] }), "pipe\na\nb\n"),
        (json!({ "commands": ["/bin/sh", "-i", "-c", request] }), "terminal\na\nb\n"),
        (
            json!({ "tty": true, "commands": ["/bin/sh", "-c", "echo x > /dev/tty; stty size"] }),
            "x\n40 120\n",
        ),
    ];
    for (spec, expected) in table {
        let runner = Runner::start();
        assert_eq!(runner.run_to_end(&job(spec.clone())).state, "done", "{spec}");
        assert_eq!(runner.log_text(), expected, "{spec}");
    }
}

#[test]
fn a_job_on_a_terminal_can_be_stopped() {
    let runner = Runner::start();
    runner.go(&job(json!({ "commands": ["/bin/sh", "-i", "-c", "echo ready; sleep 1000; echo not here"] })));
    runner.wait_printed("ready");
    runner.post("/api/stop");
    let begun = Instant::now();
    let end = runner.ended();
    assert_eq!(end.state, "terminated");
    assert!(begun.elapsed() < Duration::from_secs(8), "the shell waited at its prompt to be killed");
    assert!(!runner.log_text().contains("not here"), "{}", runner.log_text());
}

#[test]
fn the_job_inherits_no_open_files_or_signal_settings_of_the_runner() {
    let mut setting = RunnerSetup::new();
    setting.wrapper = Some("trap '' INT HUP QUIT PIPE TERM; exec 9</etc/hostname; exec \"$@\"".to_owned());
    let runner = setting.start();
    // Neither a pipe nor a redirection, whose ends the shell holds for a moment, nor a last command that replaces the
    // shell.
    runner.run_to_end(&script("grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/$$/fd; :"));
    let log = runner.log_text();
    let mut lines = log.lines();
    for name in ["SigBlk:", "SigIgn:"] {
        let set = lines.next().unwrap().strip_prefix(name).unwrap();
        // The first two of the real-time signals belong to the C library, which does not let programs change them.
        let set = u64::from_str_radix(set.trim(), 16).unwrap() & 0x7fff_ffff;
        assert_eq!(set, 0, "{name} {set:x}");
    }
    assert_eq!(lines.collect::<Vec<_>>(), ["0", "1", "2"]);
}

#[test]
fn timestamps_increase_across_output_and_states() {
    let runner = Runner::start();
    // Output within 10 ms is one piece, and so is output that is read at once: the second waits for both.
    runner.go(&script("echo one; until [ -e go ]; do sleep 0.01; done; sleep 0.05; echo two"));
    runner.wait_printed("one");
    std::fs::write(runner.work().join("go"), "").unwrap();
    runner.ended();
    let pull = runner.get("/api/pull?timestamp=0").json();
    let times = |list: &str| -> Vec<i64> {
        pull[list].as_array().unwrap().iter().map(|one| one["timestamp"].as_i64().unwrap()).collect()
    };
    let (states, logs) = (times("job_states"), times("job_logs"));
    let all: Vec<i64> = [&states[..1], &logs[..], &states[1..]].concat();
    assert!(logs.len() >= 2, "{logs:?}");
    assert!(all.is_sorted_by(|a, b| a < b), "running, output, end: {all:?}");
    assert_eq!(pull["last_updated"], *all.last().unwrap());
}

/// A control group with little memory, removed at the end.
struct SmallMemoryGroup(std::path::PathBuf);

impl SmallMemoryGroup {
    fn new(bytes: u64) -> Self {
        let own = windlass_agent::cgroup::Group::own().unwrap();
        let name = format!("windlass-oom-{}", std::process::id());
        let (dir, limit) = match (own.v1_of("memory"), &own.v2) {
            (Some(v1), _) => (v1.join(name), "memory.limit_in_bytes"),
            (None, Some(v2)) => (v2.join(name), "memory.max"),
            (None, None) => panic!("this machine has no control groups"),
        };
        std::fs::create_dir(&dir).unwrap();
        let small = Self(dir);
        std::fs::write(small.0.join(limit), bytes.to_string()).unwrap();
        small
    }
}

impl Drop for SmallMemoryGroup {
    fn drop(&mut self) {
        // A killed process may need a moment to leave.
        let end = Instant::now() + Duration::from_secs(5);
        while std::fs::remove_dir(&self.0).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn f16_a_job_out_of_memory_is_reported_as_oom_killed() {
    let small = SmallMemoryGroup::new(96 << 20);
    let mut setting = RunnerSetup::new();
    setting.wrapper = Some(format!("echo $$ > {}/cgroup.procs; exec \"$@\"", small.0.display()));
    let runner = setting.start();
    let hungry = "echo before; exec tail /dev/zero";
    let end = runner.run_to_end(&script(hungry));
    assert_eq!((end.exit_status, end.detail.as_deref()), (Some(137), Some("oom_killed")), "{end:?}");
    assert_eq!(runner.log_text(), "before\n", "O2: the last line is there");
    drop(runner);
    drop(small);
}

#[test]
fn a_failure_message_ends_with_the_last_lines_of_the_output() {
    let runner = Runner::start();
    let end = runner.run_to_end(&script(
        "for i in 1 2 3 4 5 6; do echo line $i; done; printf '\\033[31mKeyError\\033[0m: x\\n' >&2; exit 3",
    ));
    assert_eq!(
        end.termination_message,
        "the commands exited with status 3\nline 3\nline 4\nline 5\nline 6\nKeyError: x"
    );
    let runner = Runner::start();
    assert_eq!(runner.run_to_end(&script("echo all is well")).termination_message, "");
}
