//! Gateways on the server, and their processes.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use windlass_testkit::wait::{eventually_ok, eventually_ok_async};

use super::ServiceCaller;
use crate::{server::binary_path, test_env::TestEnv};

/// A gateway process, which ends on drop.
pub struct GatewayProcess {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl GatewayProcess {
    /// Two processes with the same `name` share their state.
    pub fn start(env: &TestEnv, url: &str, token: &str, name: &str, port: u16) -> Self {
        Self::start_with(env, url, token, name, port, &[])
    }

    /// Starts a process with additional arguments.
    pub fn start_with(env: &TestEnv, url: &str, token: &str, name: &str, port: u16, more: &[String]) -> Self {
        let file = env.home().join("gateway.token");
        std::fs::write(&file, token).unwrap();
        let log = env.home().join(format!("{name}.log"));
        let log_tail = File::options().create(true).append(true).open(&log).unwrap();
        let child = Command::new(binary_path("windlass").unwrap())
            .args(["gateway", "serve", "entry", "--server", url, "--address", "127.0.0.1"])
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .args(more)
            .arg("--token-file")
            .arg(&file)
            .arg("--state-dir")
            .arg(env.home().join(name))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log_tail)
            .spawn()
            .unwrap();
        Self { child, port, log }
    }

    pub fn caller(&self, host: &str) -> ServiceCaller {
        ServiceCaller::new(&format!("127.0.0.1:{}", self.port)).with_host(host)
    }

    pub fn log_tail(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the process has ended by itself.
    pub fn ends(&mut self) {
        eventually_ok("the gateway ends", || self.child.try_wait().unwrap().ok_or_else(|| self.log_tail()));
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Creates a gateway with the given number of processes, and returns their token.
pub async fn create_gateway(env: &mut TestEnv, name: &str, replicas: u32) -> String {
    create_gateway_with(env, name, replicas, &Value::Null).await
}

pub async fn create_gateway_with(
    env: &mut TestEnv,
    name: &str,
    replicas: u32,
    certificate: &Value,
) -> String {
    let configuration = json!({"type": "gateway", "name": name, "backend": "remote", "region": "here",
        "domain": "Services.test", "certificate": certificate, "replicas": replicas});
    let spec = json!({"configuration": configuration});
    env.project("gateways/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
    let made = env.project("gateways/create_token", &json!({"name": name})).await;
    made["token"].as_str().unwrap().to_owned()
}

/// Waits until the gateway is running, with the given number of processes.
pub async fn wait_until_running(env: &mut TestEnv, nodes: usize) {
    eventually_ok_async("the gateway is in service", async || {
        let found = env.project("gateways/get", &json!({"name": "entry"})).await;
        let is_running = found["status"] == "running" && found["replicas"].as_array().unwrap().len() == nodes;
        if is_running { Ok(()) } else { Err(format!("{found:#}\n{}", env.server_log())) }
    })
    .await;
}
