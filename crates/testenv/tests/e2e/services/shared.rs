//! Several servers with the same services.

use std::time::{Duration, Instant};

use serde_json::json;
use windlass_testenv::{
    replicas::{ReplicaOptions, Replicas},
    services::{ConstantTraffic, ServiceCaller, TIMEOUT, free_port, probe_config, service_config},
    test_hosts::HostRuntime,
};

const PATH: &str = "/proxy/services/main/page/";

/// Waits until one of the servers returns this status.
async fn wait_for_answer(replicas: &Replicas, number: usize, status: u16) {
    let caller = ServiceCaller::new(replicas.server(number).unwrap().address());
    let start = Instant::now();
    loop {
        let got = caller.get(PATH);
        if got.as_ref().is_ok_and(|got| got.status == status) {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "server {number}: {got:?}\n{}", replicas.log_tail(number));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_postgres_replica_reaches_a_service_and_a_killed_one_does_not_block_its_stop() {
    let plan =
        ReplicaOptions { name: "services", servers: 2, hosts: 1, blocks: 2, runtime: HostRuntime::Process };
    let mut replicas = Replicas::start(plan).await.unwrap();
    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    replicas.apply(0, &page).await.unwrap();
    wait_for_answer(&replicas, 1, 200).await;
    wait_for_answer(&replicas, 0, 200).await;

    // Requests in progress on the killed server no longer count.
    replicas.kill(0);
    wait_for_answer(&replicas, 1, 200).await;
    let stop = json!({"runs_names": ["page"], "abort": false});
    replicas.post(1, "/api/project/main/runs/stop", &stop).await.unwrap();
    wait_for_answer(&replicas, 1, 404).await;
    replicas.reaches(1, "page", &["terminated"]).await.unwrap();
}

/// Waits until the given number of replicas of the service are ready.
async fn wait_until_ready(replicas: &Replicas, count: usize) {
    let caller = ServiceCaller::new(replicas.server(0).unwrap().address());
    let line = format!("windlass_service_replicas{{project=\"main\",run=\"page\"}} {count}\n");
    let start = Instant::now();
    while !caller.get("/metrics").is_ok_and(|got| got.body.contains(&line)) {
        assert!(start.elapsed() < TIMEOUT, "not {count} replicas\n{}", replicas.log_tail(0));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_of_a_postgres_server_scales_to_three_on_one_port_without_a_failed_request() {
    let plan =
        ReplicaOptions { name: "ports", servers: 1, hosts: 1, blocks: 4, runtime: HostRuntime::Process };
    let replicas = Replicas::start(plan).await.unwrap();
    // Every replica listens on this port.
    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    page["replicas"] = json!("1..3");
    page["scaling"] =
        json!({"metric": "rps", "target": 0.5, "window": 30, "scale_up_delay": 1, "scale_down_delay": 300});
    replicas.apply(0, &page).await.unwrap();
    wait_until_ready(&replicas, 1).await;

    let traffic = ConstantTraffic::start(&ServiceCaller::new(replicas.server(0).unwrap().address()), PATH);
    wait_until_ready(&replicas, 3).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", replicas.log_tail(0));
}
