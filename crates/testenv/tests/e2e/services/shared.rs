//! Several servers, one set of services.

use std::time::{Duration, Instant};

use serde_json::json;
use windlass_testenv::{
    hollow::Runtime,
    replicas::{Plan, Replicas},
    services::{Caller, PATIENCE, free_port, probe, service},
};

const PATH: &str = "/proxy/services/main/page/";

/// Waits until one of the servers answers so.
async fn answers(replicas: &Replicas, number: usize, status: u16) {
    let caller = Caller::new(replicas.server(number).unwrap().address());
    let asked = Instant::now();
    loop {
        let got = caller.get(PATH);
        if got.as_ref().is_ok_and(|got| got.status == status) {
            return;
        }
        assert!(asked.elapsed() < PATIENCE, "server {number}: {got:?}\n{}", replicas.said(number));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_postgres_replica_of_the_server_reaches_a_service_and_the_loss_of_one_keeps_no_replica_alive() {
    let plan = Plan { name: "services", servers: 2, hosts: 1, blocks: 2, runtime: Runtime::Process };
    let mut replicas = Replicas::start(plan).await.unwrap();
    let mut page = service("page", free_port());
    page["probes"] = probe();
    replicas.apply(0, &page).await.unwrap();
    answers(&replicas, 1, 200).await;
    answers(&replicas, 0, 200).await;

    // What the lost one had on its way is nobody's any more.
    replicas.kill(0);
    answers(&replicas, 1, 200).await;
    let stop = json!({"runs_names": ["page"], "abort": false});
    replicas.post(1, "/api/project/main/runs/stop", &stop).await.unwrap();
    answers(&replicas, 1, 404).await;
    replicas.reaches(1, "page", &["terminated"]).await.unwrap();
}
