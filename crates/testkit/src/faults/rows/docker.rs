//! The container engine of a host.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::ground::{assert_once, counting_until, detail_of, eventually};
use crate::{
    faults::{Play, Row, Site, Trial},
    lab::engine::{Engine, Kind},
    stage::{IMAGE, Machines, Stage, busybox, submission_of, task},
};

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "F12",
        injection: "dockerd restart, live-restore on and off, killed and stopped",
        expected: "on: job unaffected; off: told as `host_runtime_restart`, 137, retryable",
        bound: "≤ 30 s",
        proves: "R2",
        play: Play::Now(|trial| Box::pin(restarted(trial))),
    },
    Row {
        id: "F13",
        injection: "dockerd SIGSTOP during terminate",
        expected: "calls time out, a repeat is harmless, agent alive",
        bound: "≤ 15 s after CONT",
        proves: "A2",
        play: Play::Now(|trial| Box::pin(frozen(trial))),
    },
];

/// A machine with an engine of its own, and the server on it.
struct Machine {
    stage: Stage,
    engine: Engine,
}

impl Machine {
    async fn new(trial: &Trial, name: &str, kind: Kind) -> Self {
        let engine = Engine::start(kind).unwrap();
        busybox(&engine.socket());
        let stage = Stage::at(trial.dir().join(name), Machines::Containers);
        let mut stage = stage.with_engine(engine.socket());
        stage.start().await;
        Self { stage, engine }
    }

    async fn judge(&mut self, trial: &mut Trial) {
        let site = Site::local(&self.stage, Some(self.engine.socket()));
        trial.judge(&mut self.stage, &[site]).await;
    }
}

/// In a container.
pub(super) fn contained(name: &str, commands: &[&str]) -> Value {
    let mut job = task(name, commands);
    job["image"] = json!(IMAGE);
    job
}

async fn restarted(trial: &mut Trial) {
    let is_kept = trial.rng.chance(50);
    let kind = if is_kept { Kind::LiveRestore } else { Kind::Plain };
    let mut machine = Machine::new(trial, "stage", kind).await;
    machine.stage.apply(&contained("job", &[&counting_until(100)])).await;
    machine.stage.says("job", "line 3").await;
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
        let run = machine.stage.reaches("job", &["done"]).await;
        assert_once(&run);
        super::ground::assert_counted(&machine.stage.log(&run).await);
    } else {
        let run = machine.stage.reaches("job", &["failed"]).await;
        trial.within("told", Duration::from_secs(30), up.elapsed());
        let detail = detail_of(&machine.stage, submission_of(&run));
        assert_eq!(detail.as_deref(), Some("host_runtime_restart"), "{run:#}");
        assert!(machine.stage.log(&run).await.contains("line 3"), "O2");
    }
    // The engine is as good as before.
    let run = machine.stage.ends(&contained("next", &["echo usable"])).await;
    assert_eq!(run["status"], "done", "{run:#}");
    trial.within("usable", Duration::from_secs(60), up.elapsed());
    machine.judge(trial).await;
}

async fn frozen(trial: &mut Trial) {
    let mut machine = Machine::new(trial, "stage", Kind::Plain).await;
    machine.stage.apply(&contained("job", &["echo up; sleep 4714"])).await;
    machine.stage.says("job", "up").await;
    let stop_first = trial.rng.chance(50);
    if stop_first {
        machine.stage.stop("job", true).await;
        trial.pause(0, 100).await;
    }
    machine.engine.freeze().unwrap();
    trial.fired("frozen");
    if !stop_first {
        machine.stage.stop("job", true).await;
    }
    let secs = if trial.is_long { 120 } else { trial.rng.between(8, 14) };
    tokio::time::sleep(Duration::from_secs(secs)).await;
    machine.engine.thaw().unwrap();
    let thawed = Instant::now();
    let run = machine.stage.reaches("job", &["terminated"]).await;
    trial.within("ended", Duration::from_secs(15), thawed.elapsed());
    assert_eq!(submission_of(&run)["termination_reason"], "aborted_by_user", "{run:#}");
    let gone = || machine.engine.docker(&["ps", "--all", "--quiet"]).is_ok_and(|ids| ids.is_empty());
    eventually("no container is left", gone);
    machine.judge(trial).await;
}
