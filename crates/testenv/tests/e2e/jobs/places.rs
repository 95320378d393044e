//! Placement of a job after its rented machine was preempted.

use std::path::Path;

use serde_json::{Value, json};

use super::{launch, runs, wait_until};
use crate::test_env::{self, HostMode, TestEnv};

/// The first is the cheaper one.
const CLOUD: &str = "runtime: process\noffers:\n\
    - {instance_type: small, region: east, price: 0.1, spot: true, cpus: 4, memory_gb: 16, disk_gb: 100}\n\
    - {instance_type: small, region: west, price: 0.2, spot: true, cpus: 4, memory_gb: 16, disk_gb: 100}\n";

async fn cloud() -> TestEnv {
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    let script = env.home().join("cloud.yml");
    std::fs::write(&script, CLOUD).unwrap();
    env = env.with_env("WINDLASS_MOCK_CLOUD", script).with_env("WINDLASS_SERVER_LOST_AFTER", "5s");
    env.start().await;
    // A backend that is added later belongs to no project until it is granted.
    env.post("/api/backends/grant", &json!({"project_name": "main", "backend": "mock"})).await;
    let fleet = json!({"type": "fleet", "name": "cloud", "backends": ["mock"], "spot_policy": "spot",
        "nodes": {"min": 0, "target": 0, "max": 8}});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    env.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
    env
}

/// Preempts the machine of a run.
async fn preempt_machine_of(env: &mut TestEnv, job: &Value) {
    let runs = job["tasks"][0]["runs"].as_array().unwrap();
    let run = env.run(runs.last().unwrap().as_str().unwrap()).await;
    let submission = run["jobs"][0]["job_submissions"].as_array().unwrap().last().unwrap().clone();
    let name = &submission["job_provisioning_data"]["instance_id"];
    let fleet = env.fleet("cloud").await;
    let instances = fleet["instances"].as_array().unwrap();
    let found =
        instances.iter().find(|one| one["name"] == *name).unwrap_or_else(|| panic!("{name}: {fleet:#}"));
    let id = found["id"].as_str().unwrap();
    let cloud_state = env.home().join("cloud.yml.d");
    test_env::preempt_machine(&cloud_state, id).unwrap();
}

async fn region_after_loss(env: &mut TestEnv, started: &Path, strategy: &str) -> (String, String) {
    let _ = std::fs::remove_file(started);
    let text = format!(
        "resources: {{use_spot: true, job_recovery: {strategy}}}\nrun: |\n  touch {}\n  sleep 600\n",
        started.display()
    );
    let id = launch(env, &text, json!({})).await;
    let first = runs(env, id).await;
    env.eventually("its program runs", || started.exists());
    preempt_machine_of(env, &first).await;
    let again = wait_until(env, id, "it runs again", |job| job["recovery_count"] == 1).await;
    assert_eq!(again["tasks"][0]["attempt"], 2, "{again:#}");
    let place = |job: &Value| job["tasks"][0]["placement"].as_str().unwrap().to_owned();
    let places = (place(&first), place(&again));
    env.project("jobs/cancel", &json!({"job_ids": [id]})).await;
    super::wait_until_done(env, id).await;
    places
}

#[tokio::test]
async fn eager_next_region_leaves_a_lost_region_and_failover_stays() {
    let mut env = cloud().await;
    let started = env.home().join("started");
    let (first, again) = region_after_loss(&mut env, &started, "EAGER_NEXT_REGION").await;
    assert_eq!((first.as_str(), again.as_str()), ("mock/east", "mock/west"));
    // The machine in the west still exists and is free: only its strategy keeps the next job in the east.
    let (first, again) = region_after_loss(&mut env, &started, "FAILOVER").await;
    assert_eq!(first, again);
}
