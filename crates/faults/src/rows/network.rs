//! The network between the server and its hosts.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::time::{Duration, Instant};

use serde_json::json;

use super::fixtures::{
    LabEnv, assert_counted, assert_single_attempt, counting_command, is_reachable, log_len, pids_matching,
    send_signal, wait_for_log_growth, with_retry,
};
use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::test_env::{host_of_job, newest_submission, small_task_config};
use windlass_testkit::wait::{eventually, eventually_ok_async};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F4",
        injection: "server–host partition: short, and longer than `lost_after`",
        expected: "short: the same container continues, log complete; long: job lost and replaced, old container \
                   removed on heal",
        bound: "heal to cleanup ≤ 15 s",
        proves: "R7 R15 G6",
        play: RowTest::OutsideCi("takes several minutes", |trial| Box::pin(partition(trial))),
    },
    FaultRow {
        id: "F5",
        injection: "one-way partition: server → host, or host → server",
        expected: "host reported as unreachable, job kept, no second start",
        bound: "detected ≤ 30 s",
        proves: "R7",
        play: RowTest::Now(|trial| Box::pin(one_way(trial))),
    },
    FaultRow {
        id: "F6",
        injection: "partition for longer than the job's `max_duration`",
        expected: "the agent ends the job by itself and reports it on heal",
        bound: "limit + 10 s",
        proves: "R16",
        play: RowTest::Now(|trial| Box::pin(outlived(trial))),
    },
    FaultRow {
        id: "F18",
        injection: "SSH: sessions dropped; sessions frozen; SSH server down for a while; host key changed",
        expected: "reconnected, log complete; changed key: reported, host not used",
        bound: "reconnected ≤ 10 s, freeze detected ≤ 30 s",
        proves: "X5 C9",
        play: RowTest::OutsideCi("takes several minutes", |trial| Box::pin(ssh(trial))),
    },
];

/// Bound of F4.
const CLEANUP_BOUND: Duration = Duration::from_secs(15);

async fn partition(trial: &mut Trial) {
    let lost_after = if trial.is_long { 120 } else { 10 };
    let mut ground = LabEnv::with_lost_after(trial, 2, lost_after).await;
    short_partition(trial, &mut ground, lost_after).await;
    long_partition(trial, &mut ground).await;
    ground.evaluate(trial).await;
}

async fn short_partition(trial: &mut Trial, ground: &mut LabEnv, lost_after: u64) {
    ground.env.apply(&small_task_config("short", &[&counting_command("/var/tmp/short")])).await;
    ground.env.says("short", "line 3").await;
    trial.pause(0, 500).await;
    let run = ground.env.run("short").await;
    let at = host_of_job(&ground.lab, &run, 0);
    ground.host(at).partition().unwrap();
    assert!(!is_reachable(ground.host(at)));
    trial.fired("short partition");
    trial.pause(lost_after * 100, lost_after * 500).await;
    let had = log_len(&mut ground.env, "short").await;
    ground.host(at).heal().unwrap();
    let took = wait_for_log_growth(&mut ground.env, "short", had).await;
    trial.within("heal to log", CLEANUP_BOUND, took);
    ground.host(at).run("touch /var/tmp/short").unwrap();
    let run = ground.env.reaches("short", &["done"]).await;
    assert_single_attempt(&run);
    assert_counted(&ground.env.log(&run).await);
}

async fn long_partition(trial: &mut Trial, ground: &mut LabEnv) {
    let job = with_retry(small_task_config(
        "long",
        &["echo up; until [ -e /var/tmp/long ]; do sleep 0.1; done; : marker-4711"],
    ));
    ground.env.apply(&job).await;
    ground.env.says("long", "up").await;
    let run = ground.env.run("long").await;
    let at = host_of_job(&ground.lab, &run, 0);
    trial.pause(0, 500).await;
    ground.host(at).partition().unwrap();
    assert!(!is_reachable(ground.host(at)));
    trial.fired("long partition");
    let replaced = ground.env.eventually_run("long", Duration::from_secs(600), |run| {
        run["jobs"][0]["job_submissions"].as_array().unwrap().len() == 2 && run["status"] == "running"
    });
    let run = replaced.await;
    assert_ne!(host_of_job(&ground.lab, &run, 0), at);
    let first = &run["jobs"][0]["job_submissions"][0];
    assert_eq!(first["termination_reason"], "instance_unreachable", "{first:#}");
    assert!(!pids_matching(ground.host(at), "marker-4711").is_empty(), "nobody could have ended it");
    ground.host(at).heal().unwrap();
    let healed = Instant::now();
    eventually("the old container is dead", || pids_matching(ground.host(at), "marker-4711").is_empty());
    ground.env.wait_for_hosts("lab", 1).await;
    trial.within("heal to cleanup", CLEANUP_BOUND, healed.elapsed());
    for host in ground.lab.hosts() {
        host.run("touch /var/tmp/long").unwrap();
    }
    ground.env.reaches("long", &["done"]).await;
}

async fn one_way(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    ground.env.apply(&small_task_config("kept", &[&counting_command("/var/tmp/go")])).await;
    ground.env.says("kept", "line 3").await;
    let (what, rule) =
        trial.choose(&[("server to host dropped", "INPUT -s"), ("host to server dropped", "OUTPUT -d")]);
    let rule = format!("{rule} {} -j DROP", ground.lab.gateway());
    trial.pause(0, 1000).await;
    let put = ground.host(1).run(&format!("iptables -A {rule}")).unwrap();
    assert!(put.status.success(), "{put:?}");
    assert!(!is_reachable(ground.host(1)));
    let cut = Instant::now();
    trial.fired(what);
    eventually_ok_async("the host is unreachable", async || {
        let fleet = ground.env.fleet("lab").await;
        if fleet["instances"][0]["unreachable"] == true { Ok(()) } else { Err(fleet) }
    })
    .await;
    trial.within("detected", Duration::from_secs(30), cut.elapsed());
    assert_eq!(ground.env.run("kept").await["status"], "running");
    let had = log_len(&mut ground.env, "kept").await;
    ground.host(1).run(&format!("iptables -D {rule}")).unwrap();
    let took = wait_for_log_growth(&mut ground.env, "kept", had).await;
    trial.within("heal to log", CLEANUP_BOUND, took);
    ground.host(1).run("touch /var/tmp/go").unwrap();
    let run = ground.env.reaches("kept", &["done"]).await;
    assert_single_attempt(&run);
    assert_counted(&ground.env.log(&run).await);
    ground.evaluate(trial).await;
}

async fn outlived(trial: &mut Trial) {
    const LIMIT: u64 = 6;
    let mut ground = LabEnv::new(trial, 1).await;
    let mut job = small_task_config("limited", &["echo up; sleep 4711"]);
    job["max_duration"] = json!(LIMIT);
    ground.env.apply(&job).await;
    ground.env.says("limited", "up").await;
    let began = Instant::now();
    trial.pause(0, 1500).await;
    ground.host(1).partition().unwrap();
    assert!(!is_reachable(ground.host(1)));
    trial.fired("partition");
    eventually("the agent ended it by itself", || pids_matching(ground.host(1), "sleep 4711").is_empty());
    trial.within("ended", Duration::from_secs(LIMIT + 10), began.elapsed());
    trial.pause(0, 2000).await;
    ground.host(1).heal().unwrap();
    let healed = Instant::now();
    let run = ground.env.reaches("limited", &["failed", "terminated"]).await;
    trial.within("heal to report", CLEANUP_BOUND, healed.elapsed());
    assert_eq!(newest_submission(&run)["termination_reason"], "max_duration_exceeded", "{run:#}");
    assert_eq!(ground.env.log(&run).await, "up\n");
    ground.evaluate(trial).await;
}

async fn ssh(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    ground.env.apply(&small_task_config("kept", &[&counting_command("/var/tmp/go")])).await;
    ground.env.says("kept", "line 3").await;
    // All processes except the listener.
    let sessions = |ground: &LabEnv| pids_matching(ground.host(1), "sshd: root");
    // Dropped: the processes of all sessions end at once.
    trial.pause(0, 1000).await;
    for pid in sessions(&ground) {
        // The end of one process may end another.
        let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).output();
    }
    trial.fired("sessions dropped");
    let had = log_len(&mut ground.env, "kept").await;
    let took = wait_for_log_growth(&mut ground.env, "kept", had).await;
    trial.within("reconnected", Duration::from_secs(10), took);
    // Frozen: connected and logged in, without a response.
    trial.pause(0, 1000).await;
    let frozen = sessions(&ground);
    assert!(!frozen.is_empty());
    frozen.iter().for_each(|pid| send_signal(*pid, "STOP"));
    trial.fired("sessions frozen");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let had = log_len(&mut ground.env, "kept").await;
    let took = wait_for_log_growth(&mut ground.env, "kept", had).await;
    trial.within("freeze detected", Duration::from_secs(30), took);
    frozen.iter().for_each(|pid| {
        let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).output();
    });
    ground.host(1).run("touch /var/tmp/go").unwrap();
    let run = ground.env.reaches("kept", &["done"]).await;
    assert_single_attempt(&run);
    assert_counted(&ground.env.log(&run).await);
    // Another machine uses the address.
    ground.host(1).change_host_key().unwrap();
    trial.fired("host key changed");
    let began = Instant::now();
    eventually_ok_async("the changed key is reported", async || {
        let message = ground.env.fleet("lab").await["instances"][0].to_string();
        if message.contains("key") && message.contains("changed") { Ok(()) } else { Err(message) }
    })
    .await;
    trial.within("key change detected", Duration::from_secs(30), began.elapsed());
    let there = pids_matching(ground.host(1), "windlass");
    assert!(there.is_empty(), "C9: something of ours was started on a stranger: {there:?}");
    ground.evaluate(trial).await;
}
