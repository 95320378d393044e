//! The container engine of a host.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fixtures::{assert_single_attempt, counting_command_until, end_detail};
use crate::{AgentSite, FaultRow, RowTest, Trial};
use windlass_testenv::test_env::{
    HostMode, IMAGE, TestEnv, load_busybox_image, newest_submission, task_config,
};
use windlass_testkit::lab::{
    engine::{Engine, EngineKind},
    registry::{LayerDelivery, Registry},
};
use windlass_testkit::wait::eventually;

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F12",
        injection: "dockerd restart: with and without live-restore, killed and stopped",
        expected: "with: job unaffected; without: reported as `host_runtime_restart`, exit status 137, retryable",
        bound: "≤ 30 s",
        proves: "R2",
        play: RowTest::Now(|trial| Box::pin(restarted(trial))),
    },
    FaultRow {
        id: "F13",
        injection: "dockerd SIGSTOP while a task is terminated",
        expected: "calls time out, repeated calls are harmless, agent alive",
        bound: "≤ 15 s after SIGCONT",
        proves: "A2",
        play: RowTest::Now(|trial| Box::pin(frozen(trial))),
    },
    FaultRow {
        id: "F17",
        injection: "image pull: 404, 401, corrupt layer, slow and cancelled; stalled at 50 % (`--long`)",
        expected: "distinct reasons; a stall is 120 s without a byte",
        bound: "cancelled ≤ 2 s",
        proves: "R24",
        play: RowTest::Now(|trial| Box::pin(pulls(trial))),
    },
];

/// A machine with a private engine, and a server on it.
pub(super) struct EngineEnv {
    pub(super) env: TestEnv,
    pub(super) engine: Engine,
}

impl EngineEnv {
    pub(super) async fn new(trial: &Trial, name: &str, kind: EngineKind) -> Self {
        let engine = Engine::start(kind).unwrap();
        if !matches!(kind, EngineKind::SmallDisk(_)) {
            load_busybox_image(&engine.socket());
        }
        let env = TestEnv::at(trial.dir().join(name), HostMode::Containers);
        let mut env = env.with_engine(engine.socket());
        env.start().await;
        Self { env, engine }
    }

    pub(super) async fn evaluate(&mut self, trial: &mut Trial) {
        let site = AgentSite::local(&self.env, Some(self.engine.socket()));
        trial.evaluate(&mut self.env, &[site]).await;
    }
}

/// A server on a machine whose agent runs containers without an engine; not yet started.
pub(super) fn env_without_engine(trial: &Trial, name: &str) -> TestEnv {
    TestEnv::at(trial.dir().join(name), HostMode::Processes)
        .with_env("WINDLASS_SERVER_LOCAL_RUNTIME", "any-oci")
}

/// A task in a container.
pub(super) fn container_task(name: &str, commands: &[&str]) -> Value {
    let mut job = task_config(name, commands);
    job["image"] = json!(IMAGE);
    job
}

async fn restarted(trial: &mut Trial) {
    let is_kept = trial.rng.chance(50);
    let kind = if is_kept { EngineKind::LiveRestore } else { EngineKind::Plain };
    let mut machine = EngineEnv::new(trial, "stage", kind).await;
    machine.env.apply(&container_task("job", &[&counting_command_until(100)])).await;
    machine.env.says("job", "line 3").await;
    trial.pause(0, 500).await;
    if trial.rng.chance(50) {
        machine.engine.kill_dockerd().unwrap();
        trial.fired(if is_kept { "killed, live-restore" } else { "killed" });
    } else {
        machine.engine.stop_dockerd().unwrap();
        trial.fired(if is_kept { "stopped, live-restore" } else { "stopped" });
    }
    trial.pause(0, 1500).await;
    machine.engine.start_dockerd().unwrap();
    let up = Instant::now();
    if is_kept {
        let run = machine.env.reaches("job", &["done"]).await;
        assert_single_attempt(&run);
        super::fixtures::assert_counted(&machine.env.log(&run).await);
    } else {
        let run = machine.env.reaches("job", &["failed"]).await;
        trial.within("reported", Duration::from_secs(30), up.elapsed());
        let detail = end_detail(&machine.env, newest_submission(&run));
        assert_eq!(detail.as_deref(), Some("host_runtime_restart"), "{run:#}");
        assert!(machine.env.log(&run).await.contains("line 3"), "O2");
    }
    // The engine is usable again.
    let run = machine.env.ends(&container_task("next", &["echo usable"])).await;
    assert_eq!(run["status"], "done", "{run:#}");
    trial.within("usable", Duration::from_secs(60), up.elapsed());
    machine.evaluate(trial).await;
}

async fn frozen(trial: &mut Trial) {
    let mut machine = EngineEnv::new(trial, "stage", EngineKind::Plain).await;
    machine.env.apply(&container_task("job", &["echo up; sleep 4714"])).await;
    machine.env.says("job", "up").await;
    let stop_first = trial.rng.chance(50);
    if stop_first {
        machine.env.stop("job", true).await;
        trial.pause(0, 100).await;
    }
    machine.engine.freeze().unwrap();
    trial.fired("frozen");
    if !stop_first {
        machine.env.stop("job", true).await;
    }
    let secs = if trial.is_long { 120 } else { trial.rng.between(8, 14) };
    tokio::time::sleep(Duration::from_secs(secs)).await;
    machine.engine.thaw().unwrap();
    let thawed = Instant::now();
    let run = machine.env.reaches("job", &["terminated"]).await;
    trial.within("ended", Duration::from_secs(15), thawed.elapsed());
    assert_eq!(newest_submission(&run)["termination_reason"], "aborted_by_user", "{run:#}");
    let gone = || machine.engine.docker(&["ps", "--all", "--quiet"]).is_ok_and(|ids| ids.is_empty());
    eventually("no container is left", gone);
    machine.evaluate(trial).await;
}

/// Creates a layer that no registry had before, so that each pull transfers it: an archive with one file.
pub(super) fn unique_layer(size: usize) -> Vec<u8> {
    let mut bytes = vec![0; 512 + size.next_multiple_of(512) + 1024];
    let mut put = |at: usize, text: &str| bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, "much");
    put(100, "0000644");
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{size:011o}"));
    put(136, "00000000000");
    put(148, "        0");
    put(257, "ustar\u{0}00");
    let sum: u32 = bytes[..512].iter().map(|byte| u32::from(*byte)).sum();
    bytes[148..155].copy_from_slice(format!("{sum:06o}\u{0}").as_bytes());
    getrandom::fill(&mut bytes[512..512 + size]).unwrap();
    bytes
}

/// A task with an image of the registry.
pub(super) fn image_task(name: &str, image: &str) -> Value {
    let mut job = task_config(name, &["true"]);
    job["image"] = json!(image);
    job
}

/// Waits for the failure of a job whose image is unavailable, and returns its message.
async fn wait_for_pull_failure(env: &mut TestEnv, job: &Value) -> String {
    let run = env.ends(job).await;
    let ended = newest_submission(&run);
    assert_eq!(ended["termination_reason"], "creating_container_error", "R24: {run:#}");
    ended["termination_reason_message"].as_str().unwrap_or_default().to_owned()
}

async fn pulls(trial: &mut Trial) {
    let mut machine = EngineEnv::new(trial, "stage", EngineKind::Plain).await;
    check_pulls(trial, &mut machine.env).await;
    machine.evaluate(trial).await;
    let mut env = env_without_engine(trial, "oci");
    env.start().await;
    check_pulls(trial, &mut env).await;
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
    trial.fired("all without an engine");
}

async fn check_pulls(trial: &mut Trial, env: &mut TestEnv) {
    let registry = Registry::start().await;
    let mut message = vec![wait_for_pull_failure(env, &image_task("absent", &registry.name("none:1"))).await];
    trial.fired("404");
    let (corrupt, _) = registry.put("corrupt", "1", unique_layer(100_000));
    registry.set_layers(LayerDelivery::Corrupt);
    message.push(wait_for_pull_failure(env, &image_task("corrupt", &corrupt)).await);
    trial.fired("corrupt layer");
    if trial.is_long {
        let (stalled, _) = registry.put("stalled", "1", unique_layer(1 << 20));
        registry.set_layers(LayerDelivery::Stall);
        let began = Instant::now();
        message.push(
            wait_for_pull_failure_within(env, &image_task("stalled", &stalled), Duration::from_secs(300))
                .await,
        );
        trial.fired("stall");
        trial.within("stall detected", Duration::from_secs(150), began.elapsed());
    }
    check_pull_cancelled(trial, env, &registry).await;
    registry.set_layers(LayerDelivery::Fast);
    registry.set_password("ann", "secret");
    let (closed, _) = registry.put("closed", "1", unique_layer(1000));
    message.push(wait_for_pull_failure(env, &image_task("closed", &closed)).await);
    trial.fired("401");
    message.sort();
    message.dedup();
    let kinds = if trial.is_long { 4 } else { 3 };
    assert_eq!(message.len(), kinds, "R24: reasons are not distinct: {message:#?}");
}

/// Waits for a failure that takes longer.
async fn wait_for_pull_failure_within(env: &mut TestEnv, job: &Value, timeout: Duration) -> String {
    env.apply(job).await;
    let run = env.wait_for_status_within(job["name"].as_str().unwrap(), &["failed"], timeout).await;
    newest_submission(&run)["termination_reason_message"].as_str().unwrap_or_default().to_owned()
}

/// A slow pull is cancelled immediately when its run is stopped.
async fn check_pull_cancelled(trial: &mut Trial, env: &mut TestEnv, registry: &Registry) {
    let (slow, _) = registry.put("slow", "1", unique_layer(8 << 20));
    registry.set_layers(LayerDelivery::Slow(Duration::from_millis(1600)));
    env.apply(&image_task("slow", &slow)).await;
    eventually("a layer comes", || registry.open() > 0);
    trial.pause(0, 2000).await;
    env.stop("slow", true).await;
    let start = Instant::now();
    trial.fired("slow pull cancelled");
    eventually("nothing comes any more", || registry.open() == 0);
    trial.within("cancelled", Duration::from_secs(2), start.elapsed());
    env.reaches("slow", &["terminated"]).await;
}
