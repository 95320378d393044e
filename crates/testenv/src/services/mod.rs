//! Services for tests, with clients and gateway processes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

pub mod caller;
pub mod gateway_process;
mod traffic;

use std::time::Duration;

use serde_json::{Value, json};

pub use self::{
    caller::{HttpResponse, ServiceCaller, read, read_until},
    gateway_process::GatewayProcess,
    traffic::ConstantTraffic,
};
use crate::{server::submission, test_env::TestEnv};

pub const TIMEOUT: Duration = Duration::from_secs(90);
/// Program of a replica.
pub const REPLICA_PROGRAM: &str = include_str!("page.py");

/// For replicas, which share the network of this machine.
pub use windlass_testkit::ports::reserve_free_port as free_port;

/// A service that runs [`PAGE`].
pub fn service_config(name: &str, port: u16) -> Value {
    json!({"type": "service", "name": name, "image": "none", "user": "root", "port": port,
        "env": {"PAGE": REPLICA_PROGRAM, "VERSION": "1"},
        "commands": [replica_command(port)],
        "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

fn replica_command(port: u16) -> String {
    format!("exec /usr/bin/python3 -c \"$PAGE\" {port}")
}

/// The same service on another port: two versions run on one machine for a while.
pub fn with_port(service: &Value, port: u16) -> Value {
    let mut moved = service.clone();
    moved["port"] = json!(port);
    moved["commands"] = json!([replica_command(port)]);
    moved
}

/// A probe after which a replica is ready when it has succeeded twice.
pub fn probe_config() -> Value {
    json!([{"type": "http", "url": "/health", "interval": 1, "timeout": 5, "ready_after": 2}])
}

/// Updates an active run.
pub async fn update_run(env: &mut TestEnv, configuration: &Value) -> Value {
    let mut requested = submission(configuration);
    requested["force"] = json!(true);
    env.project("runs/apply", &requested).await
}
