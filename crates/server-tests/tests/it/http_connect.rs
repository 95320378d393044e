//! Access to connections to jobs, and errors before a connection.

use serde_json::json;
use windlass_api::{client::ApiClient, runs::ConnectRequest};
use windlass_server::{auth, error::Error, services::runs};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    only_the_owner_and_project_managers_can_connect_to_a_job_port
    a_demoted_manager_loses_access_to_an_open_connection
    a_waiting_job_shows_its_queue_position
}

async fn submit_run(server: &TestServer, name: &str, priority: i64) -> serde_json::Value {
    let run = json!({ "run_name": name,
        "configuration": { "type": "task", "commands": ["true"], "priority": priority } });
    let plan = json!({ "plan": { "run_spec": run }, "force": false });
    server.admin("/api/project/main/runs/apply", plan).await
}

async fn only_the_owner_and_project_managers_can_connect_to_a_job_port(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, "train-1", 0).await;
    let job_submission_id = run["latest_job_submission"]["id"].as_str().unwrap().parse().unwrap();
    let requested = ConnectRequest { run_name: "train-1".into(), job_submission_id, port: 8000 };
    let connect = |token: String, requested: ConnectRequest| {
        let client = ApiClient::new(&format!("http://{}", server.authority), Some(&token)).unwrap();
        async move { client.connect_job("main", &requested).await.unwrap_err().to_string() }
    };
    assert_eq!(
        connect(ADMIN_TOKEN.into(), requested.clone()).await,
        "the job is not running: it is submitted"
    );
    let elsewhere = ConnectRequest { run_name: "other".into(), ..requested.clone() };
    assert_eq!(connect(ADMIN_TOKEN.into(), elsewhere).await, "Job submission not found");
    let user = server.user("mel").await;
    assert_eq!(connect(user.clone(), requested.clone()).await, "Access denied", "no member");
    server.join("main", &[("mel", "user")]).await;
    let foreign = connect(user.clone(), requested.clone()).await;
    assert!(foreign.contains("run `train-1` belongs to another user"), "{foreign}");
    server.join("main", &[("mel", "manager")]).await;
    assert_eq!(connect(user, requested).await, "the job is not running: it is submitted");

    let path =
        format!("/api/project/main/runs/connect?run_name=train-1&job_submission_id={job_submission_id}");
    let (status, body) = server.get(ADMIN_TOKEN, &path).await;
    let body = String::from_utf8(body).unwrap();
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("Upgrade: tcp"), "{body}");
    server.stop().await;
}

async fn a_waiting_job_shows_its_queue_position(ground: &ServerFixture) {
    let server = ground.start().await;
    for (name, priority) in [("first", 0), ("second", 0), ("urgent", 5)] {
        submit_run(&server, name, priority).await;
    }
    for (name, position) in [("first", 1), ("second", 2), ("urgent", 0)] {
        let run = server.admin("/api/project/main/runs/get", json!({ "run_name": name })).await;
        assert_eq!(run["jobs"][0]["job_submissions"][0]["queue_position"], position, "{name}");
    }
    server.stop().await;
}

/// The check that is repeated while a stream is open.
async fn a_demoted_manager_loses_access_to_an_open_connection(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = submit_run(&server, "train-1", 0).await;
    let job_submission_id = run["latest_job_submission"]["id"].as_str().unwrap().parse().unwrap();
    let requested = ConnectRequest { run_name: "train-1".into(), job_submission_id, port: 8000 };
    let token = server.user("mel").await;
    let may = async || {
        let caller = auth::authenticate(&server.app, Some(&format!("Bearer {token}"))).await.unwrap();
        let scope = auth::project_scope(&server.app, caller, "main", Vec::new()).await.unwrap();
        runs::check_connect(&server.app, &scope, &requested).await
    };
    server.join("main", &[("mel", "manager")]).await;
    may().await.unwrap();
    server.join("main", &[("mel", "user")]).await;
    assert!(matches!(may().await, Err(Error::Denied { .. })));
    server.stop().await;
}
