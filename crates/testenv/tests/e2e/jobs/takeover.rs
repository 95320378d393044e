//! Managed jobs of a dead server are taken over by another, in any state.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use windlass_testenv::{
    replicas::{ReplicaOptions, Replicas},
    test_hosts::HostRuntime,
};

use super::{FINAL_STATUSES, count_starts};

/// Time after which the locks of a dead server expire.
const LOCK_TIMEOUT: &str = "10s";
const TIMEOUT: Duration = Duration::from_secs(90);

async fn launch(replicas: &Replicas, server: usize, text: &str) -> i64 {
    let launched = replicas.post(server, "/api/project/main/jobs/launch", &json!({"text": text})).await;
    launched.unwrap()["jobs"][0]["job_id"].as_i64().unwrap()
}

async fn wait_until(replicas: &Replicas, id: i64, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let seen = replicas.post(1, "/api/project/main/jobs/get", &json!({"job_id": id})).await.unwrap();
        if holds(&seen) {
            return seen;
        }
        assert!(began.elapsed() < TIMEOUT, "not so: {what}\n{seen:#}\n{}", replicas.log_tail(1));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that a job was not disturbed.
fn is_untouched(seen: &Value) {
    assert_eq!((&seen["status"], &seen["recovery_count"]), (&json!("SUCCEEDED"), &json!(0)), "{seen:#}");
    assert_eq!(seen["tasks"][0]["attempt"], 1, "{seen:#}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_another_postgres_replica_takes_over_jobs_and_starts_nothing_twice() {
    let plan =
        ReplicaOptions { name: "jobs", servers: 2, hosts: 2, blocks: 4, runtime: HostRuntime::Process };
    let mut replicas = Replicas::start_with_lock_timeout(plan, LOCK_TIMEOUT).await.unwrap();
    let path = |name: &str| replicas.home().join(name);
    let (running, starting, go) = (path("running"), path("starting"), path("go"));
    let text = |count: &std::path::Path| {
        format!(
            "run: |\n  echo start >> {}\n  until [ -e {} ]; do sleep 0.05; done\n",
            count.display(),
            go.display()
        )
    };
    let first = launch(&replicas, 0, &text(&running)).await;
    wait_until(&replicas, first, "it runs", |job| job["status"] == "RUNNING" && count_starts(&running) == 1)
        .await;
    // No host responds from here on: later launches stay in progress.
    replicas.freeze_hosts().unwrap();
    let second = launch(&replicas, 0, &text(&starting)).await;
    let is_arriving = |job: &Value| job["status"] == "STARTING" && job["tasks"][0]["attempt"] == 1;
    let seen = wait_until(&replicas, second, "it starts", is_arriving).await;
    let run = seen["tasks"][0]["runs"][0].as_str().unwrap().to_owned();
    // The number of an attempt is written before its run is created.
    let request = json!({"run_name": run});
    while replicas.request(1, "/api/project/main/runs/get", &request).await.unwrap().status != 200 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    replicas.reaches(1, &run, &["provisioning"]).await.unwrap();
    replicas.kill(0);
    replicas.thaw_hosts().unwrap();
    let seen = wait_until(&replicas, second, "it runs", |job| job["status"] == "RUNNING").await;
    assert_eq!(seen["tasks"][0]["attempt"], 1, "{seen:#}");
    let seen = wait_until(&replicas, first, "it runs on", |job| job["status"].is_string()).await;
    assert!(!FINAL_STATUSES.contains(&seen["status"].as_str().unwrap()), "{seen:#}");
    std::fs::write(&go, "").unwrap();
    for (id, count) in [(first, &running), (second, &starting)] {
        is_untouched(&wait_until(&replicas, id, "it ends", |job| job["schedule_state"] == "DONE").await);
        assert_eq!(count_starts(count), 1);
    }
}
