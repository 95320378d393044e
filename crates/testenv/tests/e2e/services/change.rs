//! Changes under traffic: readiness, the number of replicas, the version.

use std::time::Duration;

use serde_json::{Value, json};
use windlass_testenv::services::{
    ConstantTraffic, ServiceCaller, free_port, probe_config, read, service_config, update_run,
};
use windlass_testkit::lab::Lab;

use super::wait_for_answer;
use crate::{
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

const TIMEOUT: Duration = Duration::from_secs(120);

fn replicas(name: &str, count: usize) -> String {
    format!("windlass_service_replicas{{project=\"main\",run=\"{name}\"}} {count}\n")
}

/// Status message of a job's newest submission.
fn status_message(run: &Value, job: usize) -> &str {
    run["jobs"][job]["job_submissions"].as_array().unwrap().last().unwrap()["status_message"]
        .as_str()
        .unwrap()
}

#[tokio::test]
async fn a_replica_gets_requests_only_while_probes_succeed_and_reports_why_not() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let port = free_port();
    let mut ill = service_config("ill", port);
    ill["probes"] = probe_config();
    ill["env"]["SICK"] = json!("1");
    env.apply(&ill).await;
    let run = env
        .eventually_run("ill", TIMEOUT, |run| {
            status_message(run, 0).contains("it answered 500 Internal Server Error")
        })
        .await;
    assert_eq!(run["status"], "running");
    assert!(
        status_message(&run, 0).starts_with("not ready: probe GET /health: 0 of 2 successes in a row"),
        "{run:#}"
    );
    let caller = ServiceCaller::new(env.address());
    assert!(caller.get("/metrics").unwrap().body.contains(&replicas("ill", 0)));

    // It is made healthy from outside: the server sends it no requests. A pending request waits.
    let waiting = caller.send("GET", "/proxy/services/main/ill/", "Connection: close\r\n", b"").unwrap();
    let itself = ServiceCaller::new(&format!("127.0.0.1:{port}")).with_token(None);
    assert_eq!(itself.get("/well").unwrap().status, 200);
    let got = read(waiting).unwrap();
    assert!(got.status == 200 && got.body.contains("version=1"), "{got:?}\n{}", env.server_log());
    let run = env.run("ill").await;
    assert_eq!(status_message(&run, 0), "running", "{run:#}");
    assert!(
        run["jobs"][0]["job_submissions"][0]["probes"][0]["success_streak"].as_i64() >= Some(2),
        "{run:#}"
    );

    assert_eq!(caller.get("/proxy/services/main/ill/sick").unwrap().status, 200);
    wait_for_answer(&mut env, &caller, "/metrics", 200, &replicas("ill", 0)).await;
    assert_eq!(itself.get("/well").unwrap().status, 200);
    wait_for_answer(&mut env, &caller, "/metrics", 200, &replicas("ill", 1)).await;
    let events = env.post("/api/events/list", &json!({"limit": 100})).await.to_string();
    assert!(events.contains("it no longer receives requests: probe GET /health"), "{events}");
}

#[tokio::test]
async fn a_service_scales_from_zero_with_its_traffic_and_back_to_zero() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let mut elastic = service_config("elastic", 8000);
    elastic["replicas"] = json!("0..2");
    elastic["scaling"] =
        json!({"metric": "rps", "target": 0.5, "window": 30, "scale_up_delay": 1, "scale_down_delay": 1});
    env.apply(&elastic).await;
    assert_eq!(env.run("elastic").await["status"], "pending");
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/elastic/";
    // A request without a token does not scale it up.
    assert_eq!(caller.with_token(None).get(path).unwrap().status, 401);

    let traffic = ConstantTraffic::start(&caller, path);
    wait_for_answer(&mut env, &caller, "/metrics", 200, &replicas("elastic", 1)).await;
    wait_for_answer(&mut env, &caller, "/metrics", 200, &replicas("elastic", 2)).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", env.server_log());

    let run = env.eventually_run("elastic", TIMEOUT, |run| run["status"] == "pending").await;
    assert_eq!(run["termination_reason"], Value::Null, "{run:#}");
    wait_for_answer(&mut env, &caller, "/metrics", 200, &replicas("elastic", 0)).await;
    // Its previous replicas may still be ending, and the hosts are full until then: the request waits for that.
    assert_eq!(caller.get(path).unwrap().status, 200, "{}", env.server_log());
    let events = env.post("/api/events/list", &json!({"limit": 100})).await.to_string();
    for word in ["group 0: scaling from 0 to 1 replicas", "to 2 replicas: ", "to 0 replicas: 0.00"] {
        assert!(events.contains(word), "{word} is not in {events}");
    }
}

#[tokio::test]
async fn a_rolling_deployment_fails_no_request_and_a_bad_version_keeps_the_old_one() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let mut first = service_config("rolling", 8000);
    first["probes"] = probe_config();
    env.apply(&first).await;
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/rolling/";
    wait_for_answer(&mut env, &caller, path, 200, "version=1").await;

    let traffic = ConstantTraffic::start(&caller, path);
    let mut second = first.clone();
    second["env"]["VERSION"] = json!("2");
    update_run(&mut env, &second).await;
    wait_for_answer(&mut env, &caller, path, 200, "version=2").await;
    let over = |run: &Value| {
        let alive = run["jobs"].as_array().unwrap().iter().filter(|job| {
            let last = job["job_submissions"].as_array().unwrap().last().unwrap().clone();
            last["finished_at"].is_null()
        });
        alive.count() == 1
    };
    env.eventually_run("rolling", TIMEOUT, over).await;

    // The third version never becomes healthy.
    let mut third = second.clone();
    third["env"]["VERSION"] = json!("3");
    third["env"]["SICK"] = json!("1");
    update_run(&mut env, &third).await;
    let is_ill = |run: &Value| {
        let jobs = run["jobs"].as_array().unwrap().len();
        (0..jobs).any(|job| status_message(run, job).contains("it answered 500"))
    };
    let run = env.eventually_run("rolling", TIMEOUT, is_ill).await;
    assert_eq!(run["status"], "running");
    for _ in 0..20 {
        assert!(caller.get(path).unwrap().body.contains("version=2"));
    }
    // Back to the version that still runs: none of its replicas is restarted.
    let before = caller.get(path).unwrap().body;
    update_run(&mut env, &second).await;
    env.eventually_run("rolling", TIMEOUT, over).await;
    assert_eq!(caller.get(path).unwrap().body, before);
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", env.server_log());
}
