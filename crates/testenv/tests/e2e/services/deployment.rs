//! Failed deployments, and the progress messages of active ones.

use std::{
    fs::File,
    path::Path,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::services::{
    ConstantTraffic, REPLICA_PROGRAM, ServiceCaller, free_port, probe_config, service_config, update_run,
    with_port,
};
use windlass_testkit::lab::Lab;

use super::{TIMEOUT, wait_for_answer};
use crate::{
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

/// A `windlass apply` that follows the deployment.
struct ApplyFollower {
    child: Child,
    message: std::path::PathBuf,
}

impl ApplyFollower {
    fn start(env: &TestEnv, configuration: &Value) -> Self {
        let file = env.home().join("service.yml");
        // JSON is valid YAML.
        std::fs::write(&file, configuration.to_string()).unwrap();
        let message = env.home().join("onlooker.log");
        let log = File::create(&message).unwrap();
        let child = env
            .command(env.home(), &["apply", "-y", "-f", "service.yml"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, message }
    }

    fn wait_for_text(&self, words: &str) {
        let start = Instant::now();
        loop {
            let message = std::fs::read_to_string(&self.message).unwrap();
            if message.contains(words) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{words:?} is not in:\n{message}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for ApplyFollower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn why(env: &TestEnv, name: &str) -> String {
    let message = env.windlass(Path::new("/"), &["why", name]);
    String::from_utf8(message.stdout).unwrap()
}

async fn events(env: &mut TestEnv) -> String {
    env.post("/api/events/list", &json!({"limit": 100})).await.to_string()
}

fn is_rolled_back(num: u32) -> impl Fn(&Value) -> bool {
    move |run| run["deployment"]["rolled_back"]["num"] == num && run["deployment"]["state"] == "complete"
}

#[tokio::test]
async fn a_failed_deployment_is_rolled_back_under_traffic_and_the_reason_is_shown() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut first = service_config("page", free_port());
    first["probes"] = probe_config();
    first["deployment"] = json!({"ready_within": 3});
    env.apply(&first).await;
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/page/";
    let before = wait_for_answer(&mut env, &caller, path, 200, "version=1").await.body;
    env.eventually_run("page", TIMEOUT, |run| run["deployment"]["state"] == "complete").await;
    let traffic = ConstantTraffic::start(&caller, path);

    // The second version never becomes healthy. It uses a separate port, because both run on this machine.
    let mut second = with_port(&first, free_port());
    second["env"] = json!({"PAGE": REPLICA_PROGRAM, "VERSION": "2", "SICK": "1"});
    let onlooker = ApplyFollower::start(&env, &second);
    onlooker.wait_for_text("deployment 1: 0 of 1 new replicas ready, 1 old remaining");
    onlooker
        .wait_for_text("deployment 1 was rolled back: replica 1 is not ready after 3 s: probe GET /health");
    let run = env.eventually_run("page", TIMEOUT, is_rolled_back(1)).await;
    assert_eq!(run["run_spec"]["configuration"]["env"]["VERSION"], "1", "{run:#}");
    let message = why(&env, "page");
    assert!(message.contains("deployment 1 was rolled back: replica 1 is not ready"), "{message}");
    assert!(message.contains("it answered 500"), "{message}");

    // The next version exits immediately. Settings that are updated in place are kept.
    let mut third = first.clone();
    third["commands"] = json!(["exit 3"]);
    third["deployment"] = json!({"ready_within": 60});
    update_run(&mut env, &third).await;
    let run = env.eventually_run("page", TIMEOUT, is_rolled_back(3)).await;
    assert_eq!(run["status"], "running", "{run:#}");
    assert_eq!(run["run_spec"]["configuration"]["deployment"]["ready_within"], 60, "{run:#}");
    let why = run["deployment"]["rolled_back"]["message"].as_str().unwrap();
    assert_eq!(why, "replica 1 ended: container exited with error, exit code 3");

    let reported = events(&mut env).await;
    for word in [
        "deployment 1 started: 1 replica to replace",
        "deployment 3 failed: replica 1 ended",
        "rolling back to the previous configuration",
    ] {
        assert!(reported.contains(word), "{word} is not in {reported}");
    }
    // Request counts are available within some seconds.
    let start = Instant::now();
    loop {
        let message = env.windlass(Path::new("/"), &["metrics", "page", "--requests", "-o", "json"]);
        let seen: Value = serde_json::from_slice(&message.stdout).unwrap();
        let answered = seen["classes"][1].as_u64().unwrap_or_default();
        if answered > 20 && seen["requests_per_second"].as_f64() > Some(0.0) && seen["p99_ms"].is_number() {
            assert_eq!(seen["classes"][4], 0, "{seen}");
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "{message:?}");
    }
    // The previous replica has answered all the time.
    assert_eq!(caller.get(path).unwrap().body, before);
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", env.server_log());
}

#[tokio::test]
async fn a_failed_deployment_without_rollback_is_marked_failed_and_the_next_completes() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut first = service_config("page", free_port());
    first["probes"] = probe_config();
    first["deployment"] = json!({"ready_within": 2, "rollback": false});
    env.apply(&first).await;
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/page/";
    wait_for_answer(&mut env, &caller, path, 200, "version=1").await;
    env.eventually_run("page", TIMEOUT, |run| run["deployment"]["state"] == "complete").await;

    let mut second = first.clone();
    second["commands"] = json!(["exit 3"]);
    update_run(&mut env, &second).await;
    let run = env.eventually_run("page", TIMEOUT, |run| run["deployment"]["state"] == "failed").await;
    assert_eq!(run["status"], "running", "{run:#}");
    let message = why(&env, "page");
    assert!(
        message.contains("deployment 1 failed: replica 1 ended: container exited with error"),
        "{message}"
    );
    assert!(caller.get(path).unwrap().body.contains("version=1"));

    let mut third = with_port(&first, free_port());
    third["env"]["VERSION"] = json!("3");
    update_run(&mut env, &third).await;
    wait_for_answer(&mut env, &caller, path, 200, "version=3").await;
    env.eventually_run("page", TIMEOUT, |run| run["deployment"]["state"] == "complete").await;
    let reported = events(&mut env).await;
    assert!(reported.contains("not rolled back, the previous replicas are kept"), "{reported}");
    assert!(reported.contains("deployment 2 is complete: 1 of 1 replicas are ready"), "{reported}");
}

#[tokio::test]
async fn waiting_requests_add_a_replica_and_an_idle_service_reports_being_asleep() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let mut busy = service_config("busy", 8000);
    busy["replicas"] = json!("0..2");
    busy["max_concurrency"] = json!(1);
    busy["scaling"] = json!({"metric": "queue-depth", "target": 0.5, "window": 30, "scale_up_delay": 1,
        "scale_down_delay": 1});
    env.apply(&busy).await;
    let asleep = |run: &Value| {
        run["scaling"][0]["message"].as_str().is_some_and(|message| message.starts_with("0.00"))
    };
    env.eventually_run("busy", TIMEOUT, asleep).await;
    let message = why(&env, "busy");
    assert!(
        message.contains("scaled to zero: no recent requests; the next request starts a replica"),
        "{message}"
    );
    assert!(message.contains("scaling: group 0: 0 replicas desired; 0.00 requests waiting"), "{message}");

    // One replica handles one request at a time, and six arrive at once.
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/busy/nap";
    let traffic: Vec<ConstantTraffic> = (0..6).map(|_| ConstantTraffic::start(&caller, path)).collect();
    let two = "windlass_service_replicas{project=\"main\",run=\"busy\"} 2\n";
    wait_for_answer(&mut env, &caller, "/metrics", 200, two).await;
    for one in traffic {
        let (_, failed) = one.end();
        assert!(failed.is_empty(), "{failed:#?}\n{}", env.server_log());
    }
    // No request is waiting or active: it is scaled to zero again.
    env.eventually_run("busy", TIMEOUT, |run| run["status"] == "pending").await;
    let reported = events(&mut env).await;
    assert!(
        reported.contains("group 0: scaling from 0 to ") && reported.contains(" to 2 replicas: "),
        "{reported}"
    );
    assert!(reported.contains("requests waiting (target 0.5 per replica) and"), "{reported}");
}
