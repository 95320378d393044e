//! Several nodes at once on rented machines.

use std::time::Duration;

use serde_json::{Value, json};

use windlass_testenv::server::call_api_as;

use crate::test_env::{HostMode, TestEnv, small_task_config};

const TIMEOUT: Duration = Duration::from_secs(150);

/// The cheapest region has no machines, the next one has a single one, and the most expensive has enough.
const CLOUD: &str = "offers:\n\
    - {instance_type: one, region: east, price: 0.1, cpus: 4, memory_gb: 16, disk_gb: 100, no_capacity: -1}\n\
    - {instance_type: two, region: north, price: 0.2, cpus: 4, memory_gb: 16, disk_gb: 100, no_capacity: -1}\n\
    - {instance_type: three, region: west, price: 0.3, cpus: 4, memory_gb: 16, disk_gb: 100}\n";

fn regions(run: &Value) -> Vec<String> {
    let jobs = run["jobs"].as_array().unwrap().iter();
    let last = jobs.map(|job| job["job_submissions"].as_array().unwrap().last().unwrap());
    last.map(|one| one["job_provisioning_data"]["region"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test]
async fn multi_node_tasks_move_to_the_next_region_when_one_has_no_capacity() {
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    let script = env.home().join("cloud.yml");
    std::fs::write(&script, CLOUD).unwrap();
    env = env.with_env("WINDLASS_MOCK_CLOUD", script);
    env.start().await;
    // A backend that is added later belongs to no project until it is granted.
    env.post("/api/backends/grant", &json!({"project_name": "main", "backend": "mock"})).await;
    let fleet = json!({"type": "fleet", "name": "cloud", "backends": ["mock"], "placement": "cluster",
        "nodes": {"min": 0, "target": 0, "max": 8}});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    env.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
    let mut job = small_task_config("pair", &["sleep 600"]);
    job["nodes"] = json!(2);
    env.apply(&job).await;
    let run = env.eventually_run("pair", TIMEOUT, |run| regions(run) == ["west", "west"]).await;
    let tries = run["jobs"][0]["job_submissions"].as_array().unwrap().len();
    assert_eq!(tries, 3, "{run:#}");
    env.stop("pair", true).await;
    env.reaches("pair", &["terminated"]).await;

    // If every region is full, the run fails with that reason.
    let mut job = small_task_config("trio", &["true"]);
    job["nodes"] = json!(2);
    job["regions"] = json!(["east", "north"]);
    env.apply(&job).await;
    let run = env.reaches("trio", &["failed"]).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 3, "{run:#}");
    assert_eq!(run["termination_reason"], "job_failed", "{run:#}");
}

#[tokio::test]
async fn a_disk_of_another_project_is_registered_by_global_admins_alone() {
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    let script = env.home().join("cloud.yml");
    std::fs::write(&script, CLOUD).unwrap();
    env = env.with_env("WINDLASS_MOCK_CLOUD", script);
    env.start().await;
    let member = env.post("/api/users/create", &json!({"username": "mallory", "global_role": "user"})).await;
    let token = member["creds"]["token"].as_str().unwrap().to_owned();
    let created =
        call_api_as(env.address(), &token, "/api/projects/create", &json!({"project_name": "lab"})).await;
    created.unwrap().ok().unwrap();
    for project in ["main", "lab"] {
        env.post("/api/backends/grant", &json!({"project_name": project, "backend": "mock"})).await;
    }
    let volume = |name: &str, what: (&str, &str)| {
        let mut configuration = json!({"type": "volume", "name": name, "backend": "mock", "region": "west"});
        configuration[what.0] = json!(what.1);
        json!({ "configuration": configuration })
    };
    env.project("volumes/create", &volume("data", ("size", "1GB"))).await;
    let disk = env.eventually_volume("data", "active").await["volume_id"].as_str().unwrap().to_owned();
    let path = "/api/project/lab/volumes/create";
    let theirs = volume("theirs", ("volume_id", &disk));
    let refused = call_api_as(env.address(), &token, path, &theirs).await.unwrap();
    let message = refused.ok().unwrap_err().to_string();
    assert!(message.contains("may not be registered in this project"), "{message}");
    // In the project of the disk, and by a global admin elsewhere.
    env.project("volumes/create", &volume("again", ("volume_id", &disk))).await;
    env.post(path, &theirs).await;
}
