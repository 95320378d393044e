//! Services: gateways, replicas, deployments, and the metrics used for scaling.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::{
    services::{
        ConstantTraffic, GatewayProcess, REPLICA_PROGRAM, ServiceCaller, TIMEOUT, free_port,
        gateway_process::{create_gateway, wait_until_running},
        probe_config, service_config, update_run, with_port,
    },
    test_env::{HostMode, TestEnv},
};
use windlass_testkit::lab::Lab;
use windlass_testkit::wait::eventually_ok;

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F21",
        injection: "gateway kill -9; its state file truncated; server down for 10 s (10 min with `--long`), gateway \
                    killed meanwhile",
        expected: "routes restored, requests served",
        bound: "≤ 2 s",
        proves: "S5",
        play: RowTest::Now(|trial| Box::pin(gateway_lost(trial))),
    },
    FaultRow {
        id: "F22",
        injection: "service replica killed under load",
        expected: "≤ 0.1 % errors",
        bound: "0 errors after 5 s",
        proves: "S3",
        play: RowTest::Now(|trial| Box::pin(replica_lost(trial))),
    },
    FaultRow {
        id: "F23",
        injection: "deployment under load whose replicas never become ready, or exit at once",
        expected: "old replicas stay, 0 errors, rolled back",
        bound: "`ready_within` + 15 s",
        proves: "S1 S2",
        play: RowTest::Now(|trial| Box::pin(bad_deployment(trial))),
    },
    FaultRow {
        id: "F24",
        injection: "no request metrics: the gateway that counts requests is killed",
        expected: "replicas kept; scaled down only when metrics show no requests",
        bound: "–",
        proves: "S4",
        play: RowTest::OutsideCi("takes two minutes", |trial| Box::pin(metrics_missing(trial))),
    },
];

/// Bound of F21.
const SERVE_BOUND: Duration = Duration::from_secs(2);

/// Waits until a request gets this status, and returns how long it took.
fn wait_until_answered(caller: &ServiceCaller, status: u16, message: impl Fn() -> String) -> Duration {
    let began = Instant::now();
    eventually_ok(&format!("the answer is {status}"), || match caller.get("/") {
        Ok(got) if got.status == status => Ok(()),
        got => Err(format!("{got:?}\n{}", message())),
    });
    began.elapsed()
}

/// Creates a gateway with one service that needs no token, and starts its process.
async fn publish_service(env: &mut TestEnv, more: &Value) -> (String, u16, GatewayProcess) {
    let token = create_gateway(env, "entry", 1).await;
    let port = free_port();
    let node = GatewayProcess::start(env, &env.url(), &token, "one", port);
    wait_until_running(env, 1).await;
    let mut open = service_config("open", free_port());
    open["auth"] = json!(false);
    for (name, value) in more.as_object().unwrap() {
        open[name] = value.clone();
    }
    env.apply(&open).await;
    (token, port, node)
}

async fn gateway_lost(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    let (token, port, mut node) = publish_service(&mut env, &json!({})).await;
    let url = env.url();
    let caller = node.caller("open.services.test").with_token(None);
    wait_until_answered(&caller, 200, || node.log_tail());

    trial.pause(0, 300).await;
    node.kill();
    trial.fired("gateway killed");
    node = GatewayProcess::start(&env, &url, &token, "one", port);
    let took = wait_until_answered(&caller, 200, || node.log_tail());
    trial.within("serves after a kill", SERVE_BOUND, took);

    // A truncated file, as after a power cut on a bad disk. The server has the complete routes.
    node.kill();
    let file = env.home().join("one/entry/routes");
    let whole = std::fs::read(&file).unwrap();
    let cut = usize::try_from(trial.rng.between(0, whole.len() as u64 - 1)).unwrap();
    std::fs::write(&file, &whole[..cut]).unwrap();
    trial.fired("state file truncated");
    node = GatewayProcess::start(&env, &url, &token, "one", port);
    let took = wait_until_answered(&caller, 200, || node.log_tail());
    trial.within("serves with a truncated file", SERVE_BOUND, took);

    env.kill();
    trial.fired("server killed");
    let traffic = ConstantTraffic::start(&caller, "/");
    let away = Duration::from_secs(if trial.is_long { 600 } else { 10 });
    tokio::time::sleep(away).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "S5: {failed:#?}\n{}", node.log_tail());
    node.kill();
    trial.fired("gateway killed while the server is down");
    node = GatewayProcess::start(&env, &url, &token, "one", port);
    let took = wait_until_answered(&caller, 200, || node.log_tail());
    trial.within("serves without a server", SERVE_BOUND, took);
}

async fn replica_lost(trial: &mut Trial) {
    let lab = Lab::start(2).unwrap();
    let mut env = trial.env(HostMode::None);
    env.start().await;
    env.create_lab_fleet(&lab, lab.hosts(), 1).await;
    let mut pair = service_config("pair", 8000);
    pair["replicas"] = json!(2);
    pair["retry"] = json!(true);
    pair["probes"] = probe_config();
    env.apply(&pair).await;
    let caller = ServiceCaller::new(env.address());
    let ready = |run: &Value| run["deployment"]["state"] == "complete";
    env.eventually_run("pair", TIMEOUT, ready).await;
    let path = "/proxy/services/main/pair/";
    let traffic: Vec<ConstantTraffic> = (0..4).map(|_| ConstantTraffic::start(&caller, path)).collect();
    trial.pause(500, 2_000).await;
    let host = trial.choose(&[1, 2]);
    let killed = lab.host(host).run("kill -9 $(pgrep -f 'python3 -c' | head -n 1)").unwrap();
    assert!(killed.status.success(), "{killed:?}");
    trial.fired("replica killed");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (mut all, mut bad) = (0, Vec::new());
    for one in traffic {
        let (answered, failed) = one.end();
        all += answered;
        bad.extend(failed);
    }
    assert!(bad.len() as f64 <= all as f64 / 1_000.0, "S3: {} of {all}: {bad:#?}", bad.len());
    let after = ConstantTraffic::start(&caller, path);
    after.goes_on();
    let (_, failed) = after.end();
    assert!(failed.is_empty(), "S3: {failed:#?}\n{}", env.server_log());
}

async fn bad_deployment(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    let ready_within = 3;
    let mut first = service_config("page", free_port());
    first["probes"] = probe_config();
    first["deployment"] = json!({"ready_within": ready_within});
    env.apply(&first).await;
    env.eventually_run("page", TIMEOUT, |run| run["deployment"]["state"] == "complete").await;
    let caller = ServiceCaller::new(env.address());
    let traffic = ConstantTraffic::start(&caller, "/proxy/services/main/page/");
    traffic.goes_on();
    let mut bad = with_port(&first, free_port());
    let what = trial.choose(&["never ready", "exits at once"]);
    if what == "never ready" {
        bad["env"] = json!({"PAGE": REPLICA_PROGRAM, "VERSION": "2", "SICK": "1"});
    } else {
        bad["commands"] = json!(["exit 7"]);
    }
    let began = Instant::now();
    update_run(&mut env, &bad).await;
    let back = |run: &Value| {
        run["deployment"]["rolled_back"]["num"] == 1 && run["deployment"]["state"] == "complete"
    };
    env.eventually_run("page", TIMEOUT, back).await;
    trial.fired(what);
    trial.within("rolled back", Duration::from_secs(ready_within + 15), began.elapsed());
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "S1: {failed:#?}\n{}", env.server_log());
    let got = caller.get("/proxy/services/main/page/").unwrap();
    assert!(got.body.contains("version=1"), "S2: {got:?}");
}

async fn metrics_missing(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    let scaling = json!({"replicas": "0..1", "scaling": {"metric": "rps", "target": 10, "window": 30,
        "scale_up_delay": 1, "scale_down_delay": 1}});
    let (token, port, mut node) = publish_service(&mut env, &scaling).await;
    let caller = node.caller("open.services.test").with_token(None);
    wait_until_answered(&caller, 200, || node.log_tail());
    trial.pause(0, 2_000).await;
    node.kill();
    trial.fired("gateway killed");
    let silent = |run: &Value| {
        run["scaling"][0]["message"]
            .as_str()
            .is_some_and(|message| message.starts_with("no request metrics received"))
    };
    env.eventually_run("open", TIMEOUT, silent).await;
    // Longer than the window: by the counts alone it would be scaled to zero now.
    let until = Instant::now() + Duration::from_secs(45);
    while Instant::now() < until {
        let run = env.run("open").await;
        assert!(run["status"] == "running" && run["scaling"][0]["desired"] == 1, "S4: {run:#}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Requests are counted again, and there are none.
    node = GatewayProcess::start(&env, &env.url(), &token, "one", port);
    env.eventually_run("open", TIMEOUT, |run| run["status"] == "pending").await;
    assert!(!node.log_tail().contains("panicked"), "{}", node.log_tail());
}
