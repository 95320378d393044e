//! Replicas in containers: each has its own port space.

use std::time::Duration;

use serde_json::{Value, json};
use windlass_testenv::services::{ConstantTraffic, ServiceCaller, update_run};

use super::wait_for_answer;
use crate::{
    containers::{IMAGE, image},
    test_env::{HostMode, TestEnv},
};

const TIMEOUT: Duration = Duration::from_secs(120);

/// A service with busybox's HTTP server.
fn page(version: &str) -> Value {
    let commands = [
        "/bin/busybox mkdir -p /www",
        "echo \"version=$VERSION\" > /www/index.html",
        "exec /bin/busybox httpd -f -p 8000 -h /www",
    ];
    json!({"type": "service", "name": "boxed", "image": IMAGE, "user": "root", "port": 8000, "replicas": 1,
        "env": {"VERSION": version}, "commands": commands,
        "probes": [{"type": "http", "url": "/", "interval": 1, "timeout": 5}],
        "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

#[tokio::test]
async fn a_docker_service_is_redeployed_on_one_port_without_a_failed_request() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    env.apply(&page("1")).await;
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/boxed/";
    wait_for_answer(&mut env, &caller, path, 200, "version=1").await;
    let is_complete = |run: &Value| run["deployment"]["state"] == "complete";
    env.eventually_run("boxed", TIMEOUT, is_complete).await;

    let traffic = ConstantTraffic::start(&caller, path);
    update_run(&mut env, &page("2")).await;
    wait_for_answer(&mut env, &caller, path, 200, "version=2").await;
    let run = env
        .eventually_run("boxed", TIMEOUT, |run| {
            run["deployment"]["num"] == 1 && is_complete(run) && run["deployment"]["old"] == 0
        })
        .await;
    assert_eq!(run["deployment"]["ready"], 1, "{run:#}");
    traffic.goes_on();
    let (_, failed) = traffic.end();
    let reported = env.post("/api/events/list", &json!({"limit": 100})).await;
    let reported: Vec<String> = reported
        .as_array()
        .unwrap()
        .iter()
        .map(|event| format!("{} {} {}", event["recorded_at"], event["targets"][0]["name"], event["message"]))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}\n{reported:#?}");
    env.stop("boxed", false).await;
    env.reaches("boxed", &["terminated"]).await;
}
