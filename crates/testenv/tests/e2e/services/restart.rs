//! A server that restarts while clients send requests to its services through a gateway.

use windlass_testenv::services::{
    ConstantTraffic, GatewayProcess, ServiceCaller, free_port,
    gateway_process::{create_gateway, wait_until_running},
    probe_config, service_config, update_run,
};
use windlass_testkit::fault_proxy;

use super::TIMEOUT;
use crate::test_env::{HostMode, TestEnv};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_gateway_request_fails_while_the_server_is_stopped_killed_and_restarted() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    // A restarted server has another port; its gateway has one address.
    let mut front = fault_proxy::FaultProxy::tcp(env.address(), 1).await.unwrap();
    let address = front.address().to_owned();
    let token = create_gateway(&mut env, "entry", 1).await;
    let port = free_port();
    let node = GatewayProcess::start(&env, &format!("http://{address}"), &token, "one", port);
    wait_until_running(&mut env, 1).await;
    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    env.apply(&page).await;
    let caller = node.caller("page.services.test");
    let requested = std::time::Instant::now();
    while !caller.get("/").is_ok_and(|got| got.status == 200) {
        assert!(requested.elapsed() < TIMEOUT, "{}\n{}", node.log_tail(), env.server_log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let traffic = ConstantTraffic::start(&caller, "/");
    for is_killed in [false, true, false] {
        traffic.goes_on();
        if is_killed {
            env.kill();
        } else {
            env.stop_server();
        }
        traffic.goes_on();
        drop(front);
        env.start().await;
        front = fault_proxy::FaultProxy::tcp_at(&address, env.address(), 1).await.unwrap();
        traffic.goes_on();
    }
    // The gateway receives the state of the new server: nothing of the old one remains.
    let mut other = page.clone();
    other["auth"] = true.into();
    other["max_concurrency"] = 50.into();
    update_run(&mut env, &other).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", node.log_tail());
    env.stop("page", false).await;
    env.reaches("page", &["terminated"]).await;
    let nobody = ServiceCaller::new(&format!("127.0.0.1:{port}")).with_host("page.services.test");
    let requested = std::time::Instant::now();
    while !nobody.get("/").is_ok_and(|got| got.status == 404) {
        assert!(requested.elapsed() < TIMEOUT, "{}", node.log_tail());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
