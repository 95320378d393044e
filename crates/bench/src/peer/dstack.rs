//! The dstack server from PyPI, in a separate home directory.

use std::{
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::file_server::FileServer;
use windlass_testenv::server::{Client, TOKEN};

/// It searches for catalogues on the network while it starts.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) struct DstackServer {
    child: Child,
    pub(super) address: String,
    pub(super) ready: Duration,
    /// Serves the agent to hosts.
    _file_server: FileServer,
}

impl DstackServer {
    /// Hosts reach this machine at `here`, and get `agent` instead of dstack's.
    pub(super) async fn start(venv: &Path, home: &Path, agent: &Path, here: Ipv4Addr) -> Result<Self> {
        std::fs::create_dir_all(home)?;
        let file_server = FileServer::open(agent, here).await?;
        let port = windlass_testkit::ports::reserve_free_port();
        let log = std::fs::File::create(home.join("log"))?;
        let mut command = Command::new(venv.join("bin/dstack"));
        command.args(["server", "--host", "127.0.0.1", "--port", &port.to_string(), "--token", TOKEN, "-n"]);
        command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", home);
        command.env("DSTACK_SERVER_DIR", home.join("server"));
        // No settings of the user, and no prompt at the end of the start.
        command.env("DSTACK_SERVER_CONFIG_DISABLED", "1").env("DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT", "1");
        command.env("DSTACK_SERVER_LOG_LEVEL", "ERROR");
        command
            .env("DSTACK_SHIM_DOWNLOAD_URL", file_server.url())
            .env("DSTACK_RUNNER_DOWNLOAD_URL", file_server.url());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let started = Instant::now();
        let child = command.spawn().context("failed to start dstack's server")?;
        let address = format!("127.0.0.1:{port}");
        let mut server = Self { child, address, ready: Duration::ZERO, _file_server: file_server };
        while !server.is_answering().await {
            if let Some(status) = server.child.try_wait()? {
                let message = std::fs::read_to_string(home.join("log")).unwrap_or_default();
                bail!("dstack's server exited early: {status}: {message}");
            }
            ensure!(started.elapsed() < READY_TIMEOUT, "dstack's server did not become ready in time");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        server.ready = started.elapsed();
        Ok(server)
    }

    async fn is_answering(&self) -> bool {
        let Ok(mut client) = Client::connect(&self.address).await else { return false };
        client.post("/api/server/get_info", &serde_json::json!({})).await.is_ok()
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for DstackServer {
    fn drop(&mut self) {
        // Interrupted, so that it ends its SSH connections, which are separate processes.
        let _ = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status();
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < STOP_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
