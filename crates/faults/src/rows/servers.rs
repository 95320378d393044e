//! Servers: killed, frozen, replaced; one alone and several on one Postgres.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::submit_load::{self, SubmitLoad};
use crate::{AgentSite, FaultRow, RowTest, Trial};
use windlass_testenv::{
    replicas::{ReplicaOptions, Replicas},
    server::{TOKEN, binary_path},
    test_env::{HostMode, TestEnv, task_config},
    test_hosts::HostRuntime,
};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F1",
        injection: "server kill -9: idle, after a submit, while jobs write output, during its first start",
        expected: "jobs unaffected, no container started twice, logs byte-exact",
        bound: "ready ≤ 3 s, rows claimed again ≤ 35 s",
        proves: "R1 R7 L4 O1",
        play: RowTest::Now(|trial| Box::pin(killed(trial))),
    },
    FaultRow {
        id: "F2",
        injection: "one replica stopped with SIGSTOP for longer than its locks, then SIGCONT",
        expected: "the other replica takes over; late writes and calls of the first are rejected",
        bound: "takeover ≤ 5 s after the lock timeout",
        proves: "L1 L2 L9",
        play: RowTest::Now(|trial| Box::pin(frozen(trial))),
    },
    FaultRow {
        id: "F3",
        injection: "2 replicas killed, frozen and stopped at random during runs (50 times, 500 runs with `--long`)",
        expected: "all runs final, nothing left over",
        bound: "20 min",
        proves: "all",
        play: RowTest::OutsideCi("takes several minutes", |trial| Box::pin(cycles(trial))),
    },
    FaultRow {
        id: "F30",
        injection: "rolling upgrade of 2 replicas and back, with live runs (200 with `--long`)",
        expected: "no run lost, none started twice",
        bound: "–",
        proves: "A6 A7 R19",
        play: RowTest::Now(|trial| Box::pin(replaced(trial))),
    },
];

const READY_BOUND: Duration = Duration::from_secs(3);
const TAKEOVER_BOUND: Duration = Duration::from_secs(35);
/// Maximum polling interval.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(5);
const LINES: usize = 40;

/// A task that writes numbered lines for about two seconds.
fn counting_task(name: &str) -> Value {
    let say = format!("i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep 0.05; done");
    task_config(name, &[&say])
}

fn expected_lines() -> String {
    (0..LINES).map(|number| format!("line {number}\n")).collect()
}

async fn killed(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    killed_during_migration(trial, &mut env).await;
    let moments: &[(&'static str, u64)] =
        &[("killed idle", 0), ("killed after a submit", 1), ("killed while jobs write", 1500)];
    for (round, (what, after)) in moments.iter().enumerate() {
        let name = format!("run-{round}");
        if *what != "killed idle" {
            env.apply(&counting_task(&name)).await;
        }
        trial.pause(*after, after + 300).await;
        env.kill();
        trial.fired(what);
        let began = Instant::now();
        env.start().await;
        trial.within("ready", READY_BOUND, began.elapsed());
        if *what == "killed idle" {
            continue;
        }
        let run = env.reaches(&name, &["done"]).await;
        assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 1, "R7: {run:#}");
        assert_eq!(env.log(&run).await, expected_lines(), "O1");
    }
    // Another run starts immediately: nothing is still locked.
    let began = Instant::now();
    env.ends(&task_config("last", &["true"])).await;
    trial.within("work continues", TAKEOVER_BOUND, began.elapsed());
    let sites = [AgentSite::local(&env, None)];
    trial.evaluate(&mut env, &sites).await;
}

/// Kills the server repeatedly while it creates its tables, until one start succeeds.
async fn killed_during_migration(trial: &mut Trial, env: &mut TestEnv) {
    let data = env.home().join("server");
    for _ in 0..3 {
        let mut child = Command::new(binary_path("windlass").unwrap())
            .args(["server", "--port", "0", "--no-local", "--admin-token", TOKEN, "--data-dir"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while !data.join("windlass.db").exists() && began.elapsed() < READY_BOUND {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        trial.pause(0, 60).await;
        let was_ready = data.join("running.json").exists();
        child.kill().unwrap();
        child.wait().unwrap();
        let _ = std::fs::remove_file(data.join("running.json"));
        if !was_ready {
            trial.fired("killed during its first start");
        }
    }
    let began = Instant::now();
    env.start().await;
    trial.within("ready", READY_BOUND, began.elapsed());
}

/// Two servers and two hosts whose jobs are processes.
pub(super) async fn start_pair(trial: &Trial, row: &str) -> Replicas {
    let name = format!("{row}-{}", trial.seed);
    let plan = ReplicaOptions { name: &name, servers: 2, hosts: 2, blocks: 4, runtime: HostRuntime::Process };
    Replicas::start(plan).await.unwrap()
}

fn agent_sites(replicas: &Replicas, hosts: usize) -> Vec<AgentSite> {
    let site = |number| {
        let home = replicas.host_home(number);
        AgentSite { label: home.clone(), home, keys: Vec::new(), engine: None, is_damaged: false }
    };
    (1..=hosts).map(site).collect()
}

/// Stops all servers cleanly and runs the checkers.
pub(super) async fn stop_and_check(trial: &mut Trial, replicas: &mut Replicas, hosts: usize) {
    for number in 0..2 {
        if replicas.server(number).is_ok() {
            replicas.stop(number).await.unwrap();
        }
    }
    let url = replicas.postgres.url().parse().unwrap();
    trial.check_database(&url, &agent_sites(replicas, hosts)).await;
}

async fn frozen(trial: &mut Trial) {
    let (locks, long) = if trial.is_long { (30, 60) } else { (10, 18) };
    let name = format!("f2-{}", trial.seed);
    let plan = ReplicaOptions { name: &name, servers: 2, hosts: 2, blocks: 4, runtime: HostRuntime::Process };
    let mut replicas = Replicas::start_with_lock_timeout(plan, &format!("{locks}s")).await.unwrap();
    let taken_over = Duration::from_secs(locks) + POLL_INTERVAL_MAX;
    // Frozen hosts, so that passes hold their rows during a call. A server hints its own pipelines first.
    replicas.freeze_hosts().unwrap();
    for number in 0..6 {
        replicas.apply(0, &small_task(&format!("run-{number}"))).await.unwrap();
    }
    replicas.wait_for_call_to_host(0).await.unwrap();
    replicas.freeze(0).unwrap();
    trial.fired("replica frozen during a pass");
    let froze = Instant::now();
    let tokens = submit_load::held_lock_tokens(&replicas.postgres).await;
    replicas.thaw_hosts().unwrap();
    while submit_load::held_lock_tokens(&replicas.postgres).await.intersection(&tokens).count() > 0 {
        assert!(froze.elapsed() < taken_over * 2, "the rows stay with the frozen server");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    trial.within("other replica holds all rows", taken_over, froze.elapsed());
    replicas.wait_until_no_active_runs(Duration::from_secs(90)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(long).saturating_sub(froze.elapsed())).await;
    replicas.thaw(0).unwrap();
    let refused = async |what: &'static str| replicas.total(0, what).await.unwrap();
    let began = Instant::now();
    while refused("lost").await + refused("stale").await == 0 {
        assert!(began.elapsed() < TAKEOVER_BOUND, "L9: the first server noticed nothing");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    trial.fired("late passes rejected");
    stop_and_check(trial, &mut replicas, 2).await;
}

/// A task that needs only a part of a host.
pub(super) fn small_task(name: &str) -> Value {
    let mut job = task_config(name, &["echo one", "echo two"]);
    job["resources"] = json!({"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null});
    job
}

async fn cycles(trial: &mut Trial) {
    let (rounds, runs) = if trial.is_long { (50, 500) } else { (6, 40) };
    let began = Instant::now();
    let mut replicas = start_pair(trial, "f3").await;
    let load = SubmitLoad::start(replicas.addresses(), runs, small_task);
    for _ in 0..rounds {
        trial.pause(200, 2000).await;
        let number = trial.choose(&[0, 1]);
        match trial.choose(&["kill", "freeze", "stop"]) {
            "kill" => {
                replicas.kill(number);
                trial.fired("killed");
            }
            "stop" => {
                replicas.stop(number).await.unwrap();
                trial.fired("stopped");
            }
            _ => {
                replicas.freeze(number).unwrap();
                trial.fired("frozen");
                trial.pause(500, 6000).await;
                replicas.thaw(number).unwrap();
                continue;
            }
        }
        load.use_addresses(replicas.addresses());
        trial.pause(0, 3000).await;
        replicas.raise(number).await.unwrap();
        load.use_addresses(replicas.addresses());
    }
    let acknowledged = load.end().await;
    replicas.wait_until_no_active_runs(Duration::from_secs(120)).await.unwrap();
    check_all_done(trial, &replicas, &acknowledged).await;
    trial.within("all final", Duration::from_secs(1200), began.elapsed());
    stop_and_check(trial, &mut replicas, 2).await;
}

pub(super) async fn check_all_done(trial: &mut Trial, replicas: &Replicas, acknowledged: &BTreeSet<String>) {
    let done = submit_load::done_runs(&replicas.postgres).await;
    let lost: Vec<_> = acknowledged.difference(&done).collect();
    if !lost.is_empty() {
        let ended = "SELECT concat_ws(' ', r.name, r.status, j.status, j.termination_reason, j.termination_message) \
                     FROM runs r LEFT JOIN jobs j ON j.run_id = r.id \
                     WHERE r.status <> 'done' AND r.name LIKE 'load-%'";
        let ended: Vec<_> = replicas.postgres.run(ended).await.unwrap().into_iter().flatten().collect();
        trial.violation(&format!("R1: acknowledged and not done: {lost:?}: {ended:?}"));
    }
}

/// The same binary with an appended byte counts as a different version.
async fn replaced(trial: &mut Trial) {
    let mut replicas = start_pair(trial, "f30").await;
    let runs = if trial.is_long { 200 } else { 30 };
    let load = SubmitLoad::start(replicas.addresses(), runs, small_task);
    let (old, new) = (binary_path("windlass").unwrap(), write_next_version(trial));
    for program in [&new, &old] {
        for number in 0..2 {
            trial.pause(100, 800).await;
            replicas.stop(number).await.unwrap();
            load.use_addresses(replicas.addresses());
            replicas.use_program(program.clone());
            replicas.raise(number).await.unwrap();
            load.use_addresses(replicas.addresses());
            trial.fired(if program == &new { "upgraded" } else { "downgraded" });
        }
    }
    let acknowledged = load.end().await;
    replicas.wait_until_no_active_runs(Duration::from_secs(120)).await.unwrap();
    check_all_done(trial, &replicas, &acknowledged).await;
    stop_and_check(trial, &mut replicas, 2).await;
}

fn write_next_version(trial: &Trial) -> PathBuf {
    let copy = trial.dir().join("windlass-next");
    let mut bytes = std::fs::read(binary_path("windlass").unwrap()).unwrap();
    bytes.push(0);
    std::fs::write(&copy, bytes).unwrap();
    std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    copy
}
