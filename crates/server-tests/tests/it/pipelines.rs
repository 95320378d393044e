//! The real server with running pipelines: the progress of a run without further requests.

use serde_json::{Value, json};
use windlass_server::config::{Settings, SettingsSource};
use windlass_testkit::wait::eventually_ok_async;

use crate::http::{ServerFixture, TestServer, on_both};

on_both! {
    a_run_that_no_fleet_can_take_fails_with_the_reason
    a_run_that_waits_for_its_retry_is_stopped_at_once
    an_admin_can_read_pipeline_statistics
}

async fn start_with_pipelines(ground: &ServerFixture) -> TestServer {
    let given = SettingsSource { port: Some(0), ..ground.given() };
    TestServer::start_with_settings(Settings::new(given, None).unwrap()).await
}

async fn apply_run(server: &TestServer, name: &str, more: Value) -> Value {
    let mut configuration =
        json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"]});
    configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let spec = json!({"run_name": name, "configuration": configuration, "profile": {"name": "default"}});
    server.admin("/api/project/main/runs/apply", json!({"plan": {"run_spec": spec}, "force": false})).await
}

async fn wait_for_status(server: &TestServer, run: &str, wanted: &str) -> Value {
    eventually_ok_async(wanted, async || {
        let seen = server.admin("/api/project/main/runs/get", json!({"run_name": run})).await;
        if seen["status"] == wanted { Ok(seen) } else { Err(seen) }
    })
    .await
}

async fn a_run_that_no_fleet_can_take_fails_with_the_reason(ground: &ServerFixture) {
    let server = start_with_pipelines(ground).await;
    apply_run(&server, "lonely", json!({})).await;
    let run = wait_for_status(&server, "lonely", "failed").await;
    assert_eq!(run["termination_reason"], "job_failed");
    let submission = &run["latest_job_submission"];
    assert_eq!(submission["status"], "failed");
    assert_eq!(submission["termination_reason"], "failed_to_start_due_to_no_capacity");
    assert!(submission["termination_reason_message"].as_str().unwrap().contains("no fleet"), "{submission}");
    server.stop().await;
}

async fn a_run_that_waits_for_its_retry_is_stopped_at_once(ground: &ServerFixture) {
    let server = start_with_pipelines(ground).await;
    apply_run(&server, "patient", json!({"retry": {"on_events": ["no-capacity"], "duration": 3600}})).await;
    wait_for_status(&server, "patient", "pending").await;
    server.admin("/api/project/main/runs/stop", json!({"runs_names": ["patient"], "abort": false})).await;
    let run = wait_for_status(&server, "patient", "terminated").await;
    assert_eq!(run["termination_reason"], "stopped_by_user");
    server.stop().await;
}

async fn an_admin_can_read_pipeline_statistics(ground: &ServerFixture) {
    let server = start_with_pipelines(ground).await;
    apply_run(&server, "seen", json!({})).await;
    wait_for_status(&server, "seen", "failed").await;
    let pipelines = server.admin("/api/server/pipelines", json!({})).await;
    let names: Vec<_> = pipelines.as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    let jobs = ["runs", "jobs_submitted", "jobs_running", "jobs_terminating", "managed_jobs"];
    assert_eq!(names, [&jobs[..], &["instances", "fleets", "volumes"]].concat());
    assert!(pipelines[0]["applied"].as_u64().unwrap() > 0, "{pipelines}");
    server.stop().await;
}
