//! The shim is killed in each state of a task, with a real runtime, and restarted; the runner is killed too. Afterwards
//! nothing may be left on the host.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_agent::shim::journal::JournalEvent;
use windlass_api::agent::shim::{TaskInfo, TaskStatus};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};

use crate::support::{
    leftover_check::{assert_clean, count_records},
    shim::{Setup, Shim},
};

/// Limit of F14 after the start of a shim.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns a job that prints, waits for the gate, prints again and ends with a distinct status.
fn job(gate: &str, before: &str) -> Value {
    let script =
        format!("{before}\necho first; while [ ! -e {gate} ]; do sleep 0.05; done; echo last; exit 7");
    json!({"run": {"id": "", "run_spec": {"run_name": "r", "configuration": {}}},
           "job_spec": {"commands": ["/bin/sh", "-c", script]}})
}

/// Returns a task in a separate network, since all tests share the ports of the host, and with a directory of the host.
fn spec(shim: &Shim) -> Value {
    let mut spec = shim.spec("train");
    spec["network_mode"] = json!("bridge");
    let (outside, inside) = (shim.scratch().join("outside"), shim.scratch().join("inside"));
    fs::create_dir_all(&inside).unwrap();
    spec["instance_mounts"] = json!([{"instance_path": outside, "path": inside}]);
    spec
}

/// A task with a job that waits for `finish`.
struct RunningJob {
    id: SubmissionId,
    gate: PathBuf,
}

impl RunningJob {
    async fn begin(shim: &Shim, id: SubmissionId, runtime: &str) -> Self {
        Self::start_with(shim, id, runtime, "").await
    }

    async fn start_with(shim: &Shim, id: SubmissionId, runtime: &str, before: &str) -> Self {
        let run = shim.home().join("tasks").join(id.to_string()).join("run");
        let gate = run.join("let-go");
        let inside = if matches!(runtime, "docker" | "oci") {
            "/windlass/run/let-go".to_owned()
        } else {
            gate.display().to_string()
        };
        shim.play(id, &job(&inside, before)).await;
        let playing = Self { id, gate };
        playing.output(shim, "first").await;
        playing
    }

    /// Returns the output on the shim's disk, once it has this line.
    async fn output(&self, shim: &Shim, line: &str) -> String {
        let path = format!("/api/tasks/{}/logs?stream=job&offset=0&limit=65536", self.id);
        eventually_ok_async(&format!("the line {line}"), async || {
            let text = String::from_utf8_lossy(&shim.client().get(&path).await.body).into_owned();
            if text.contains(line) { Ok(text) } else { Err(format!("{text}\n{}", shim.log())) }
        })
        .await
    }

    /// Lets the job end, and acknowledges all output to the runner.
    async fn finish(&self, shim: &Shim) {
        fs::write(&self.gate, "").unwrap();
        let read = self.output(shim, "last").await.len();
        let path = format!("/api/tasks/{}/runner/api/logs/read?stream=job&offset={read}", self.id);
        shim.client().epoch(1).post(&path, &json!({})).await.expect(200);
    }
}

async fn terminated_within(shim: &Shim, id: SubmissionId, within: Duration) -> TaskInfo {
    let began = Instant::now();
    let info = shim.wait_for(id, TaskStatus::Terminated).await;
    assert!(began.elapsed() < within, "{:?}", began.elapsed());
    info
}

/// Sets the policy that [`spec`] needs.
fn with_mounts(setup: Setup) -> Setup {
    setup.policy(&format!("mounts: [{}]\n", std::env::temp_dir().display()))
}

/// Checks that every acquired resource was released, once.
fn check_released(shim: &Shim, id: SubmissionId) {
    assert_eq!(count_records(&shim.home(), id, |kind| *kind == JournalEvent::Mounted), 1);
    assert_eq!(count_records(&shim.home(), id, |kind| *kind == JournalEvent::Unmounted), 1);
}

fn check_job_ended(info: &TaskInfo) {
    assert_eq!(info.termination_reason, "container_exited_with_error", "{info:?}");
    assert_eq!(info.exit_status, Some(7), "{info:?}");
}

/// Killed before the container runs: the task continues, runs its job once and leaves nothing.
async fn check_killed_before_running(setup: Setup, runtime: &str, status: &str) {
    let mut shim = Shim::start(setup.env("WINDLASS_AGENT_PAUSE_AT", status));
    let requested = spec(&shim);
    let id = shim.submit(&requested, 1).await;
    let paused_at: TaskStatus = serde_json::from_value(json!(status)).unwrap();
    shim.wait_for(id, paused_at).await;
    shim.kill();
    shim.without_env("WINDLASS_AGENT_PAUSE_AT");
    shim.restart();
    let began = Instant::now();
    shim.wait_for(id, TaskStatus::Running).await;
    assert!(began.elapsed() < RECOVERY_TIMEOUT, "{:?}", began.elapsed());
    let playing = RunningJob::begin(&shim, id, runtime).await;
    playing.finish(&shim).await;
    check_job_ended(&shim.wait_for(id, TaskStatus::Terminated).await);
    assert_eq!(playing.output(&shim, "last").await, "first\nlast\n");
    assert_eq!(
        count_records(&shim.home(), id, |kind| matches!(kind, JournalEvent::ContainerStarted { .. })),
        1
    );
    // The submission is repeated: one effect.
    shim.submit(&requested, 1).await;
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

/// Killed while the job runs: it continues, and the next shim reports its output and exit status.
async fn check_killed_while_running(setup: Setup, runtime: &str) {
    let mut shim = Shim::start(setup);
    let id = shim.submit(&spec(&shim), 1).await;
    let before = shim.wait_for(id, TaskStatus::Running).await;
    let playing = RunningJob::begin(&shim, id, runtime).await;
    shim.kill();
    shim.restart();
    let after = shim.wait_for(id, TaskStatus::Running).await;
    // The progress of a completed pull is not stored.
    let before = TaskInfo { image_pull_progress: None, ..before };
    assert_eq!(after, before, "the same container, the same ports");
    playing.finish(&shim).await;
    check_job_ended(&terminated_within(&shim, id, RECOVERY_TIMEOUT).await);
    assert_eq!(playing.output(&shim, "last").await, "first\nlast\n");
    assert_eq!(
        count_records(&shim.home(), id, |kind| matches!(kind, JournalEvent::ContainerStarted { .. })),
        1
    );
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

/// The job ends while the shim is down.
async fn check_ended_while_down(setup: Setup, runtime: &str) {
    let mut shim = Shim::start(setup);
    let id = shim.submit(&spec(&shim), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let playing = RunningJob::begin(&shim, id, runtime).await;
    // The output was read as far as there was any; the rest is on disk.
    shim.kill();
    fs::write(&playing.gate, "").unwrap();
    shim.restart();
    let text = playing.output(&shim, "last").await;
    assert_eq!(text, "first\nlast\n");
    playing.finish(&shim).await;
    check_job_ended(&terminated_within(&shim, id, RECOVERY_TIMEOUT).await);
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

async fn check_killed_while_terminating(setup: Setup, runtime: &str) {
    let mut shim = Shim::start(setup.env("WINDLASS_AGENT_PAUSE_AT", "terminating"));
    let id = shim.submit(&spec(&shim), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let playing = RunningJob::begin(&shim, id, runtime).await;
    let request =
        json!({"termination_reason": "terminated_by_user", "termination_message": "enough", "timeout": 0});
    let requested =
        shim.client().epoch(1).post(&format!("/api/tasks/{id}/terminate"), &request).await.expect(200);
    assert_eq!(requested.json::<TaskInfo>().status, TaskStatus::Running);
    shim.kill();
    shim.without_env("WINDLASS_AGENT_PAUSE_AT");
    shim.restart();
    let info = terminated_within(&shim, id, RECOVERY_TIMEOUT).await;
    assert_eq!(
        (info.termination_reason.as_str(), info.termination_message.as_str()),
        ("terminated_by_user", "enough")
    );
    assert_eq!(playing.output(&shim, "first").await, "first\n");
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

/// The runner is killed during its job: the task ends, nothing of it continues, its output stays readable.
async fn check_runner_killed(setup: Setup, runtime: &str) {
    let shim = Shim::start(setup);
    let id = shim.submit(&spec(&shim), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let playing = RunningJob::begin(&shim, id, runtime).await;
    let runner = runner_pid(id);
    rustix::process::kill_process(runner, rustix::process::Signal::KILL).unwrap();
    let info = terminated_within(&shim, id, TIMEOUT).await;
    assert_eq!(
        (info.termination_reason.as_str(), info.exit_status),
        ("container_exited_with_error", Some(137))
    );
    assert_eq!(playing.output(&shim, "first").await, "first\n");
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

/// Returns the runner itself, found by its command line and its task's mark.
fn runner_pid(id: SubmissionId) -> rustix::process::Pid {
    let mark = format!("WINDLASS_TASK_ID={id}");
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let has =
            |bytes: &[u8], what: &str| bytes.split(|byte| *byte == 0).any(|word| word == what.as_bytes());
        if has(&read("cmdline"), "--inner") && has(&read("environ"), &mark) {
            let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
            return rustix::process::Pid::from_raw(pid.unwrap()).unwrap();
        }
    }
    panic!("no runner of {id}")
}

macro_rules! matrix {
    ($runtime:ident) => {
        mod $runtime {
            use super::*;

            const NAME: &str = stringify!($runtime);

            #[tokio::test]
            async fn f14_a_task_continues_after_the_shim_is_killed_while_pending() {
                check_killed_before_running(with_mounts(Setup::$runtime()), NAME, "pending").await;
            }

            #[tokio::test]
            async fn f14_a_task_continues_after_the_shim_is_killed_while_preparing() {
                check_killed_before_running(with_mounts(Setup::$runtime()), NAME, "preparing").await;
            }

            #[tokio::test]
            async fn f14_a_task_continues_after_the_shim_is_killed_while_pulling() {
                check_killed_before_running(with_mounts(Setup::$runtime()), NAME, "pulling").await;
            }

            #[tokio::test]
            async fn f14_a_task_continues_after_the_shim_is_killed_while_creating() {
                check_killed_before_running(with_mounts(Setup::$runtime()), NAME, "creating").await;
            }

            #[tokio::test]
            async fn f14_o2_a_running_job_continues_and_its_end_is_reported_after_the_shim_is_killed() {
                check_killed_while_running(with_mounts(Setup::$runtime()), NAME).await;
            }

            #[tokio::test]
            async fn f14_o2_a_job_end_while_the_shim_is_down_is_reported() {
                check_ended_while_down(with_mounts(Setup::$runtime()), NAME).await;
            }

            #[tokio::test]
            async fn f14_a_terminating_task_still_ends_after_the_shim_is_killed() {
                check_killed_while_terminating(with_mounts(Setup::$runtime()), NAME).await;
            }

            #[tokio::test]
            async fn f16_o2_a_killed_runner_ends_its_task_and_keeps_its_output() {
                check_runner_killed(with_mounts(Setup::$runtime()), NAME).await;
            }
        }
    };
}

matrix!(docker);
matrix!(oci);
matrix!(process);

/// A job that tries to escape: it forks twice into a separate session. Its shim is killed meanwhile.
#[tokio::test]
async fn f33_a_detached_process_ends_with_its_process_task() {
    let mut shim = Shim::start(with_mounts(Setup::process()));
    let id = shim.submit(&spec(&shim), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let beat = shim.scratch().join("beat");
    let away = format!("(setsid sh -c 'while :; do date >> {}; sleep 0.05; done' &) &", beat.display());
    let playing = RunningJob::start_with(&shim, id, "process", &away).await;
    eventually_async("it ran away", async || beat.exists().then_some(())).await;
    shim.kill();
    shim.restart();
    shim.wait_for(id, TaskStatus::Running).await;
    shim.terminate(id, 1, 0).await;
    let beats = fs::read(&beat).unwrap();
    assert_eq!(playing.output(&shim, "first").await, "first\n");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(fs::read(&beat).unwrap(), beats, "it still runs");
    check_released(&shim, id);
    shim.remove(id, 1).await;
    assert_clean(&shim.home(), &[id]).await;
}

/// Two shims on one home would start everything twice.
#[tokio::test]
async fn r7_a_second_shim_on_the_same_home_does_not_start() {
    let shim = Shim::start(Setup::process());
    let second = shim.command().stderr(std::process::Stdio::null()).status().unwrap();
    assert!(!second.success());
    assert!(shim.client().get("/api/tasks").await.status.is_success());
}
