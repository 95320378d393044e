//! Whole hosts: rebooted, lost, full.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    docker::{EngineEnv, env_without_engine, image_task, unique_layer},
    fixtures::{LabEnv, SmallDisk, agent_pid, end_detail, kill_agent, set_pause_at, start_agent, with_retry},
};
use crate::{AgentSite, FaultRow, RowTest, Trial};
use windlass_testenv::test_env::{HostMode, host_of_job, newest_submission, small_task_config, task_config};
use windlass_testkit::lab::{engine::EngineKind, registry::Registry};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F11",
        injection: "host disk full: while a job logs, before an image pull, and during one",
        expected: "the job fails with `no_disk`; the agent survives, removes the task and accepts the next one",
        bound: "≤ 30 s",
        proves: "G6 O2",
        play: RowTest::Now(|trial| Box::pin(disk_full(trial))),
    },
    FaultRow {
        id: "F15",
        injection: "host reboot: agent and jobs killed",
        expected: "the job ends as retryable with `host_reboot`, host idle again",
        bound: "≤ 60 s",
        proves: "R2 G6",
        play: RowTest::Now(|trial| Box::pin(rebooted(trial))),
    },
    FaultRow {
        id: "F25",
        injection: "node 2 of 4 lost while running, or while pulling",
        expected: "whole replica replaced, once",
        bound: "≤ 60 s",
        proves: "R9",
        play: RowTest::OutsideCi("takes several minutes", |trial| Box::pin(node_lost(trial))),
    },
];

async fn disk_full(trial: &mut Trial) {
    let env = trial.env(HostMode::Processes);
    // The agent reserves 64 MiB for itself.
    let _disk = SmallDisk::at(&env.home().join("server/local"), 64 + trial.rng.between(14, 24));
    let mut env = env;
    env.start().await;
    env.apply(&task_config("wordy", &["echo first; yes fills the disk"])).await;
    env.says("wordy", "first").await;
    let began = Instant::now();
    let run = env.reaches("wordy", &["failed"]).await;
    trial.within("reported", Duration::from_secs(30), began.elapsed());
    let detail = end_detail(&env, newest_submission(&run));
    assert_eq!(detail.as_deref(), Some("no_disk"), "{run:#}");
    trial.fired("disk full");
    assert!(env.log(&run).await.starts_with("first\nfills the disk\n"), "O2");
    // There is space again.
    let next = env.ends(&task_config("next", &["echo usable"])).await;
    assert_eq!(next["status"], "done", "{next:#}");
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
    full_by_a_pull(trial).await;
    full_without_engine(trial).await;
}

/// The same as by a pull of an engine, where the agent itself stores the images.
async fn full_without_engine(trial: &mut Trial) {
    let mut env = env_without_engine(trial, "oci");
    // The agent leaves 256 MiB for the containers.
    let images = env.home().join("server/local/oci");
    let _disk = SmallDisk::at(&images, 256 + trial.rng.between(50, 60));
    env.start().await;
    let registry = Registry::start().await;
    let filler = images.join("filler");
    fs::write(&filler, vec![1_u8; 100 << 20]).unwrap();
    for (name, size, what, when) in [
        ("little", 1 << 20, "disk full before a pull without an engine", "reported before the pull"),
        ("large", 40 << 20, "disk full during a pull without an engine", "reported during the pull"),
    ] {
        let (image, _) = registry.put(name, "1", unique_layer(size));
        let began = Instant::now();
        let run = env.ends(&image_task(name, &image)).await;
        trial.within(when, Duration::from_secs(30), began.elapsed());
        let detail = end_detail(&env, newest_submission(&run));
        assert_eq!(detail.as_deref(), Some("no_disk"), "{run:#}");
        trial.fired(what);
        let _ = fs::remove_file(&filler);
    }
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
}

/// The disk is full when the pull starts. Otherwise the image would fit.
async fn full_before_a_pull(trial: &mut Trial, machine: &mut EngineEnv, registry: &Registry) {
    machine.engine.fill().unwrap();
    let (little, _) = registry.put("little", "1", unique_layer(1 << 20));
    let began = Instant::now();
    let run = machine.env.ends(&image_task("little", &little)).await;
    trial.within("reported before the pull", Duration::from_secs(30), began.elapsed());
    let detail = end_detail(&machine.env, newest_submission(&run));
    assert_eq!(detail.as_deref(), Some("no_disk"), "{run:#}");
    trial.fired("disk full before a pull");
    machine.engine.free_disk().unwrap();
}

/// The engine's disk is smaller than the image.
async fn full_by_a_pull(trial: &mut Trial) {
    let size = trial.rng.between(20, 30);
    let mut machine = EngineEnv::new(trial, "pull", EngineKind::SmallDisk(size)).await;
    let registry = Registry::start().await;
    full_before_a_pull(trial, &mut machine, &registry).await;
    let (large, _) = registry.put("large", "1", unique_layer(40 << 20));
    let began = Instant::now();
    let run = machine.env.ends(&image_task("large", &large)).await;
    trial.within("reported during the pull", Duration::from_secs(30), began.elapsed());
    let detail = end_detail(&machine.env, newest_submission(&run));
    assert_eq!(detail.as_deref(), Some("no_disk"), "{run:#}");
    trial.fired("disk full during a pull");
    machine.evaluate(trial).await;
}

async fn rebooted(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    let once = "if [ -e /var/tmp/tried ]; then exit 0; fi; touch /var/tmp/tried; echo up; sleep 4715";
    ground.env.apply(&with_retry(small_task_config("job", &[once]))).await;
    ground.env.says("job", "up").await;
    trial.pause(0, 1000).await;
    let before = agent_pid(ground.host(1));
    ground.host(1).reboot().unwrap();
    assert_ne!(agent_pid(ground.host(1)), before);
    trial.fired("reboot");
    let up = Instant::now();
    let run = ground.env.reaches("job", &["done"]).await;
    let submissions = run["jobs"][0]["job_submissions"].as_array().unwrap();
    assert_eq!(submissions.len(), 2, "{run:#}");
    let detail = end_detail(&ground.env, &submissions[0]);
    assert_eq!(detail.as_deref(), Some("host_reboot"), "{run:#}");
    ground.env.wait_for_hosts("lab", 1).await;
    trial.within("idle again", Duration::from_secs(60), up.elapsed());
    ground.evaluate(trial).await;
}

async fn node_lost(trial: &mut Trial) {
    const NODES: usize = 4;
    let mut ground = LabEnv::with_lost_after(trial, NODES + 1, 8).await;
    let mut job =
        with_retry(small_task_config("four", &["echo up; until [ -e /var/tmp/go ]; do sleep 0.1; done"]));
    job["nodes"] = json!(NODES);
    let is_pulling = trial.rng.chance(50);
    if is_pulling {
        // The lost node has not started its container yet.
        for host in ground.lab.hosts() {
            set_pause_at(host, Some("pulling"));
            kill_agent(host);
            start_agent(host);
        }
    }
    ground.env.apply(&job).await;
    let run = if is_pulling {
        let pulling = |run: &serde_json::Value| {
            let jobs = run["jobs"].as_array().unwrap().iter();
            jobs.filter(|job| job["job_submissions"][0]["status"] == "pulling").count() == NODES
        };
        ground.env.eventually_run("four", Duration::from_secs(60), pulling).await
    } else {
        ground.env.says("four", "up").await;
        ground.env.reaches("four", &["running"]).await
    };
    let lost = host_of_job(&ground.lab, &run, 1);
    trial.pause(0, 1000).await;
    ground.host(lost).power_off().unwrap();
    trial.fired(if is_pulling { "lost while pulling" } else { "lost while running" });
    let cut = Instant::now();
    if is_pulling {
        // The others paused only so that the one could be lost meanwhile.
        let others = ground.lab.hosts().iter().filter(|host| host.name() != ground.host(lost).name());
        for host in others {
            set_pause_at(host, None);
            kill_agent(host);
            start_agent(host);
        }
    }
    let again = ground.env.eventually_run("four", Duration::from_secs(240), |run| {
        let jobs = run["jobs"].as_array().unwrap();
        let twice = |job: &serde_json::Value| job["job_submissions"].as_array().unwrap().len() == 2;
        jobs.iter().all(twice) && run["status"] == "running"
    });
    let again = again.await;
    trial.within("replaced", Duration::from_secs(60), cut.elapsed());
    for node in 0..NODES {
        assert_ne!(host_of_job(&ground.lab, &again, node), lost);
    }
    // The host returns with its old task, and removes it.
    set_pause_at(ground.host(lost), None);
    ground.host(lost).power_on().unwrap();
    for host in ground.lab.hosts() {
        host.run("touch /var/tmp/go").unwrap();
    }
    let run = ground.env.reaches("four", &["done"]).await;
    for job in run["jobs"].as_array().unwrap() {
        assert_eq!(job["job_submissions"].as_array().unwrap().len(), 2, "R9: {run:#}");
    }
    ground.evaluate(trial).await;
}
