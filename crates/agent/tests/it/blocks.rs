//! Plain processes under a dstack server: several blocks of a host at once.

use std::net::SocketAddr;

use serde_json::json;
use windlass_api::agent::{
    RUNNER_PORT, SSH_PORT,
    shim::{TaskInfo, TaskStatus},
};
use windlass_testkit::wait::eventually_ok_async;

use crate::support::{
    client::Client,
    shim::{Setup, Shim},
};

#[tokio::test]
async fn each_block_of_a_dstack_server_has_its_own_runner() {
    let shim = Shim::start(Setup::process().compat());
    let compat = shim.compat();
    let mut taken = Vec::new();
    for name in ["one", "two"] {
        let mut spec = shim.spec(name);
        spec.as_object_mut().unwrap().remove("claims");
        spec["network_mode"] = json!("bridge");
        compat.post("/api/tasks", &spec).await.expect(200);
        let path = format!("/api/tasks/{}", spec["id"].as_str().unwrap());
        let info = eventually_ok_async("the task runs", async || {
            let info: TaskInfo = compat.get(&path).await.json();
            assert_ne!(info.status, TaskStatus::Terminated, "{info:?}\n{}", shim.log());
            if info.status == TaskStatus::Running { Ok(info) } else { Err(format!("{info:?}")) }
        })
        .await;
        let ports = info.ports.unwrap();
        let port = |container| ports.iter().find(|port| port.container == container).unwrap().host;
        let runner = Client::tcp(SocketAddr::from(([127, 0, 0, 1], port(RUNNER_PORT))));
        let health = runner.get("/api/healthcheck").await.expect(200);
        assert!(health.text().contains("dstack-runner"), "{}", health.text());
        taken.extend([port(RUNNER_PORT), port(SSH_PORT)]);
    }
    let count = taken.len();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), count, "no port is shared: {taken:?}");
}
