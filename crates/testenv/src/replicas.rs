//! Several servers on one Postgres, with simulated hosts that all of them reach.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    server::{ApiResponse, Server, ServerOptions, binary_path, call_api, submission},
    test_hosts::{self, HostOptions, HostRuntime},
};
use windlass_testkit::{TempDir, postgres::Postgres, temp_dir};

const TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const FINAL_STATUSES: [&str; 3] = ["done", "failed", "terminated"];

/// Number and kind of servers and hosts.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaOptions<'a> {
    /// Unique within a process.
    pub name: &'a str,
    pub servers: usize,
    pub hosts: usize,
    /// Maximum number of jobs on one host.
    pub blocks: i64,
    pub runtime: HostRuntime,
}

pub struct Replicas {
    servers: Vec<Option<Server>>,
    hosts: Option<test_hosts::RunningHosts>,
    pub postgres: Postgres,
    /// Database URL of the servers.
    database: String,
    windlass: PathBuf,
    agent: PathBuf,
    /// Additional environment of every server.
    env: Vec<(&'static str, PathBuf)>,
    // Last: deleted after all processes that use it have ended.
    home: TempDir,
}

impl Replicas {
    pub async fn start(plan: ReplicaOptions<'_>) -> Result<Self> {
        let postgres = Postgres::start(&format!("pg-{}", plan.name)).await?;
        Self::start_on(postgres, plan).await
    }

    /// Starts servers with a lock timeout, after which the locks of a dead server expire.
    pub async fn start_with_lock_timeout(plan: ReplicaOptions<'_>, lock_timeout: &str) -> Result<Self> {
        let postgres = Postgres::start(&format!("pg-{}", plan.name)).await?;
        let env = vec![("WINDLASS_SERVER_LOCK_TIMEOUT", PathBuf::from(lock_timeout))];
        Self::start_as(postgres, plan, env).await
    }

    /// Starts on an existing cluster.
    pub async fn start_on(postgres: Postgres, plan: ReplicaOptions<'_>) -> Result<Self> {
        Self::start_as(postgres, plan, Vec::new()).await
    }

    async fn start_as(
        postgres: Postgres,
        plan: ReplicaOptions<'_>,
        env: Vec<(&'static str, PathBuf)>,
    ) -> Result<Self> {
        let url = postgres.url();
        let mut replicas = Self {
            servers: (0..plan.servers).map(|_| None).collect(),
            hosts: None,
            postgres,
            database: url,
            windlass: binary_path("windlass")?,
            agent: binary_path("windlass-agent")?,
            env,
            home: temp_dir(plan.name)?,
        };
        // The first start creates the tables and the keys.
        replicas.raise(0).await?;
        let home = replicas.home.path().join("hosts");
        let hosts = HostOptions {
            agent: &replicas.agent,
            home: &home,
            count: plan.hosts,
            blocks: plan.blocks,
            runtime: plan.runtime,
        };
        let hosts = hosts.start(&replicas.database, &replicas.key_file()).await?;
        replicas.hosts = Some(hosts);
        for number in 1..plan.servers {
            replicas.raise(number).await?;
        }
        replicas.wait_for_hosts(plan.hosts).await?;
        Ok(replicas)
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// The same for every replica.
    pub fn key_file(&self) -> PathBuf {
        self.home.path().join("master")
    }

    /// Sets the database URL of servers that are started later.
    pub fn use_database(&mut self, url: String) {
        self.database = url;
    }

    /// Sets the binary of servers that are started later.
    pub fn use_program(&mut self, windlass: PathBuf) {
        self.windlass = windlass;
    }

    /// Starts a server that is not running, and waits until it responds.
    pub async fn raise(&mut self, number: usize) -> Result<()> {
        self.start_server_with(number, Vec::new()).await
    }

    /// Starts a server with additional environment variables.
    pub async fn start_server_with(
        &mut self,
        number: usize,
        more: Vec<(&'static str, PathBuf)>,
    ) -> Result<()> {
        let home = self.home.path();
        let (data, logs) = (home.join(format!("server-{number}")), home.join("logs"));
        std::fs::create_dir_all(&data)?;
        std::fs::create_dir_all(&logs)?;
        let mut env = vec![
            ("WINDLASS_AGENT", self.agent.clone()),
            ("WINDLASS_SERVER_KEY_FILE", self.key_file()),
            ("WINDLASS_SERVER_LOG_STORE", PathBuf::from(format!("dir:{}", logs.display()))),
            ("WINDLASS_LOG", PathBuf::from("warn")),
        ];
        env.extend(self.env.iter().cloned());
        env.extend(more);
        let options = ServerOptions {
            binary: &self.windlass,
            data: &data,
            database: Some(&self.database),
            core: None,
            local: false,
            env,
            log: Some(&self.log_path(number)),
        };
        let server = Server::start(&options).await.with_context(|| self.log_tail(number))?;
        self.servers[number] = Some(server);
        Ok(())
    }

    fn log_path(&self, number: usize) -> PathBuf {
        self.home.path().join(format!("server-{number}.log"))
    }

    /// The end of a server's log.
    pub fn log_tail(&self, number: usize) -> String {
        let text = std::fs::read_to_string(self.log_path(number)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// The complete log of a server.
    pub fn log(&self, number: usize) -> String {
        std::fs::read_to_string(self.log_path(number)).unwrap_or_default()
    }

    pub fn server(&self, number: usize) -> Result<&Server> {
        self.servers[number].as_ref().with_context(|| format!("server {number} does not run"))
    }

    /// Addresses of the running servers.
    pub fn addresses(&self) -> Vec<String> {
        self.servers.iter().flatten().map(|server| server.address().to_owned()).collect()
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, number: usize) {
        self.servers[number] = None;
    }

    /// Stops a server as an operator does; returns after its end.
    pub async fn stop(&mut self, number: usize) -> Result<()> {
        let server = self.servers[number].take().context("it does not run")?;
        // Does not block the runtime: other servers and clients of this test continue.
        tokio::task::spawn_blocking(move || server.stop()).await?
    }

    /// Stops the process with SIGSTOP: it neither responds nor ends.
    pub fn freeze(&self, number: usize) -> Result<()> {
        signal(self.server(number)?.pid(), "-STOP")
    }

    pub fn thaw(&self, number: usize) -> Result<()> {
        signal(self.server(number)?.pid(), "-CONT")
    }

    pub fn freeze_hosts(&self) -> Result<()> {
        self.signal_hosts("-STOP")
    }

    pub fn thaw_hosts(&self) -> Result<()> {
        self.signal_hosts("-CONT")
    }

    fn signal_hosts(&self, which: &str) -> Result<()> {
        let hosts = self.hosts.as_ref().context("no hosts")?;
        hosts.pids().into_iter().try_for_each(|pid| signal(pid, which))
    }

    /// Directory of a host; hosts are counted from 1.
    pub fn host_home(&self, number: usize) -> PathBuf {
        test_hosts::host_home(&self.home.path().join("hosts"), number)
    }

    /// Calls one of the servers and returns any response.
    pub async fn request(&self, number: usize, path: &str, body: &Value) -> Result<ApiResponse> {
        call_api(self.server(number)?.address(), path, body).await
    }

    /// Calls one of the servers; the call must succeed.
    pub async fn post(&self, number: usize, path: &str, body: &Value) -> Result<Value> {
        self.request(number, path, body).await?.ok().with_context(|| self.log_tail(number))
    }

    pub async fn apply(&self, number: usize, configuration: &Value) -> Result<Value> {
        self.post(number, "/api/project/main/runs/apply", &submission(configuration)).await
    }

    pub async fn run(&self, number: usize, name: &str) -> Result<Value> {
        self.post(number, "/api/project/main/runs/get", &json!({"run_name": name})).await
    }

    /// Pipeline counters of a server since its start: `claimed`, `lost`, `in_work`, …
    pub async fn pipelines(&self, number: usize) -> Result<Vec<Value>> {
        let all = self.post(number, "/api/server/pipelines", &json!({})).await?;
        Ok(all.as_array().context("no list of pipelines")?.clone())
    }

    /// Sum of one counter over all pipelines.
    pub async fn total(&self, number: usize, figure: &str) -> Result<u64> {
        Ok(self.pipelines(number).await?.iter().filter_map(|one| one[figure].as_u64()).sum())
    }

    /// Waits until a server has a pass in progress that calls a host. On frozen hosts it stays in progress, with its row
    /// locked.
    pub async fn wait_for_call_to_host(&self, number: usize) -> Result<()> {
        let began = Instant::now();
        loop {
            let all = self.pipelines(number).await?;
            let mut calls = all.iter().filter(|one| one["name"] == "jobs_running");
            if calls.any(|one| one["in_work"].as_u64().is_some_and(|passes| passes > 0)) {
                return Ok(());
            }
            ensure!(began.elapsed() < TIMEOUT, "server {number} calls no host\n{}", self.log_tail(number));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn wait_for_hosts(&self, hosts: usize) -> Result<()> {
        let began = Instant::now();
        loop {
            let fleet =
                self.post(0, "/api/project/main/fleets/get", &json!({"name": test_hosts::FLEET})).await?;
            let instances = fleet["instances"].as_array().context("no instances")?.iter();
            let ready = instances.filter(|i| i["status"] == "idle" && i["unreachable"] != true).count();
            if ready >= hosts {
                return Ok(());
            }
            ensure!(began.elapsed() < TIMEOUT, "{ready} of {hosts} hosts are ready\n{}", self.log_tail(0));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until a run has one of these statuses; any other final status is an error.
    pub async fn reaches(&self, number: usize, name: &str, statuses: &[&str]) -> Result<Value> {
        let began = Instant::now();
        loop {
            let run = self.run(number, name).await?;
            let status = run["status"].as_str().unwrap_or_default();
            if statuses.contains(&status) {
                return Ok(run);
            }
            ensure!(!FINAL_STATUSES.contains(&status), "{name} ended otherwise: {run:#}");
            ensure!(began.elapsed() < TIMEOUT, "{name} takes too long: {run:#}\n{}", self.log_tail(number));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until all runs are final.
    pub async fn wait_until_no_active_runs(&self, within: Duration) -> Result<()> {
        let sql = "SELECT count(*) FROM runs WHERE status NOT IN ('done', 'failed', 'terminated')";
        let began = Instant::now();
        loop {
            let left = self.postgres.count(sql).await?;
            if left == 0 {
                return Ok(());
            }
            if began.elapsed() > within {
                let rows = "SELECT r.status, j.status, r.lock_owner, j.lock_owner, r.due_at, j.due_at \
                            FROM runs r LEFT JOIN jobs j ON j.run_id = r.id \
                            WHERE r.status NOT IN ('done', 'failed', 'terminated') LIMIT 5";
                let rows = self.postgres.run(rows).await?;
                let log_tail: Vec<String> =
                    (0..self.servers.len()).map(|number| self.log_tail(number)).collect();
                anyhow::bail!("{left} runs are not over: {rows:?}\n{}", log_tail.join("\n---\n"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        // Also kills a frozen server; the hosts must not outlive their directory.
        self.servers.clear();
        self.hosts = None;
    }
}

/// Sends a signal to a process by its ID.
pub fn signal(pid: u32, which: &str) -> Result<()> {
    let reported = Command::new("kill").args([which, &pid.to_string()]).status().context("run kill")?;
    ensure!(reported.success(), "signal {pid}");
    Ok(())
}
