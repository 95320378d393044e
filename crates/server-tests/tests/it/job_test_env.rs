//! A server with running pipelines and scripted hosts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_backend::Backends;
use windlass_server::{
    agents::AgentApi,
    config::SettingsSource,
    db::{Unit, Val},
    hints::Hint,
    params, running_pipelines,
};
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};

use crate::{
    http::{ServerFixture, TestServer},
    scripted_hosts::{HostScript, ScriptedHosts},
};

/// One server and its hosts.
pub(crate) struct JobTestEnv {
    pub(crate) server: TestServer,
    pub(crate) hosts: Arc<ScriptedHosts>,
    running: running_pipelines::RunningPipelines,
}

impl JobTestEnv {
    /// Starts a server with a fleet `hosts` of `machines` idle instances with 32 CPUs, 64 GB and 4 GPUs in `blocks`
    /// blocks.
    pub(crate) async fn new(ground: &ServerFixture, machines: usize, blocks: i64) -> Self {
        Self::with_settings(ground.given(), machines, blocks).await
    }

    /// The same with these settings.
    pub(crate) async fn with_settings(given: SettingsSource, machines: usize, blocks: i64) -> Self {
        let server = TestServer::start_with(given).await;
        let hosts = Arc::new(ScriptedHosts::default());
        let agents: Arc<dyn AgentApi> = Arc::clone(&hosts) as _;
        let running = running_pipelines::start(&server.app, agents, Backends::default()).unwrap();
        let env = Self { server, hosts, running };
        let spec = json!({"configuration": {"type": "fleet", "name": "hosts", "placement": "cluster",
            "env": {"OF_FLEET": "1", "BOTH": "fleet"},
            "ssh_config": {"user": "ubuntu", "port": 2222, "hosts": []}}, "profile": {"name": "default"}});
        env
            .write(
                "INSERT INTO fleets (id, project_id, name, spec, status, created_at, last_processed_at) \
                 SELECT new_uuid(), id, 'hosts', $1, 'active', now_us(), now_us() FROM projects WHERE name = 'main'",
                params![spec.to_string()],
            )
            .await;
        for num in 0..machines {
            env.machine(num, blocks).await;
        }
        env
    }

    async fn machine(&self, num: usize, blocks: i64) {
        let gpu = json!({"name": "A100", "memory_mib": 81_920, "vendor": "nvidia"});
        let kind = json!({"name": "big", "resources": {"cpus": 32, "memory_mib": 65_536, "spot": false,
            "cpu_arch": "x86", "disk": {"size_mib": 1_048_576}, "gpus": [gpu, gpu, gpu, gpu]}});
        let machine = json!({"id": format!("m-{num}"), "reach": null, "hostname": format!("host-{num}"),
            "internal_ip": format!("10.0.0.{num}"), "has": null, "agent_version": null, "memo": null});
        self.write(
            "INSERT INTO instances (id, project_id, fleet_id, name, instance_num, backend, region, hostname, price, \
             instance_type, provisioning, ssh, status, total_blocks, created_at, last_processed_at) \
             SELECT new_uuid(), f.project_id, f.id, 'hosts-' || $1, $2, 'remote', 'remote', 'host-' || $1, 0.5, \
             $3, $4, $5, 'idle', $6, now_us(), now_us() FROM fleets f WHERE f.name = 'hosts'",
            params![
                num.to_string(),
                i64::try_from(num).unwrap(),
                kind.to_string(),
                machine.to_string(),
                json!({"hostname": format!("host-{num}")}).to_string(),
                blocks
            ],
        )
        .await;
    }

    /// Changes rows directly in the database, and wakes the pipelines.
    pub(crate) async fn write(&self, sql: &str, params: Vec<Val>) {
        self.server.app.db().write(Unit::new().exec(sql.to_owned(), params)).await.unwrap().done().unwrap();
        self.wake_pipelines();
    }

    pub(crate) fn wake_pipelines(&self) {
        self.server.app.wake(&[
            Hint::Runs,
            Hint::JobsSubmitted,
            Hint::JobsRunning,
            Hint::JobsTerminating,
            Hint::Instances,
        ]);
    }

    /// Changes columns that a pipeline writes, in all rows of a table that match, and wakes the pipelines. A pass in
    /// progress would overwrite them with what it had read, so the change is made while none of the rows is locked.
    pub(crate) async fn write_between_passes(&self, table: &str, set: &str, filter: &str) {
        let sql = format!(
            "UPDATE {table} SET {set} WHERE {filter} AND lock_token IS NULL \
             AND NOT EXISTS (SELECT 1 FROM {table} WHERE {filter} AND lock_token IS NOT NULL) RETURNING id"
        );
        eventually_async(&format!("no pass holds rows of {table} where {filter}"), async || {
            let unit = Unit::new().query(sql.clone(), vec![]);
            let (_, rows) = self.server.app.db().write(unit).await.unwrap().done().unwrap();
            rows.iter().any(|changed| !changed.is_empty()).then_some(())
        })
        .await;
        self.wake_pipelines();
    }

    /// Moves the time in a column of all unfinished jobs back by `secs`.
    pub(crate) async fn age(&self, column: &str, secs: i64) {
        let set = format!("{column} = {column} - {}, due_at = NULL", secs * 1_000_000);
        self.write_between_passes("jobs", &set, "NOT finished").await;
    }

    /// Makes all unfinished jobs due at once, as an event of a host does.
    pub(crate) async fn mark_due(&self) {
        self.write("UPDATE jobs SET due_at = NULL WHERE NOT finished", vec![]).await;
    }

    /// Moves the pending run to the end of its back-off. A pass in progress overwrites this with what it had read, so
    /// it is repeated until it takes effect.
    pub(crate) async fn skip_backoff(&self, name: &str) {
        let sql =
            "UPDATE runs SET retry_since = submitted_at - 20000000, due_at = NULL WHERE status = 'pending'";
        let start = Instant::now();
        while self.run(name).await["status"] == "pending" {
            assert!(start.elapsed() < TIMEOUT, "{name} stays pending");
            self.write(sql, vec![]).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the run's pipeline has left this request on the job.
    pub(crate) async fn wait_for_end_request(&self, reason: &str) {
        let sql = "SELECT end_asked FROM jobs WHERE NOT finished";
        eventually_async(&format!("the job is asked to end: {reason}"), async || {
            let rows = self.server.app.db().query(sql, vec![]).await.unwrap();
            rows.iter().any(|row| row.str(0).is_ok_and(|found| found == reason)).then_some(())
        })
        .await;
    }

    /// Waits until the job has been claimed `more` times.
    pub(crate) async fn passes(&self, more: i64) {
        let taken = async || {
            let rows = self.server.app.db().query("SELECT max(lock_epoch) FROM jobs", vec![]).await.unwrap();
            rows[0].int(0).unwrap()
        };
        let (before, requested) = (taken().await, Instant::now());
        while taken().await < before + more {
            assert!(requested.elapsed() < TIMEOUT, "the job was not taken up {more} times more");
            self.mark_due().await;
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn update_script(&self, change: impl FnOnce(&mut HostScript)) {
        change(&mut self.hosts.script.lock());
    }

    pub(crate) fn spec(name: &str, more: Value) -> Value {
        let mut configuration =
            json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"]});
        configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"run_name": name, "configuration": configuration, "profile": {"name": "default"}})
    }

    pub(crate) async fn apply(&self, name: &str, more: Value) -> Value {
        let plan = json!({"plan": {"run_spec": Self::spec(name, more)}, "force": true});
        self.server.admin("/api/project/main/runs/apply", plan).await
    }

    pub(crate) async fn stop_run(&self, name: &str, abort: bool) {
        let body = json!({"runs_names": [name], "abort": abort});
        self.server.admin("/api/project/main/runs/stop", body).await;
    }

    pub(crate) async fn run(&self, name: &str) -> Value {
        self.server.admin("/api/project/main/runs/get", json!({"run_name": name})).await
    }

    pub(crate) async fn until(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        eventually_ok_async(what, async || {
            let seen = self.run(name).await;
            if is_so(&seen) { Ok(seen) } else { Err(seen) }
        })
        .await
    }

    /// Waits for the run's status.
    pub(crate) async fn wait_for_run(&self, name: &str, status: &str) -> Value {
        self.until(name, status, |run| run["status"] == status).await
    }

    /// Waits until the latest submission has this status.
    pub(crate) async fn wait_for_job(&self, name: &str, status: &str) -> Value {
        let run = self.until(name, status, |run| run["latest_job_submission"]["status"] == status).await;
        run["latest_job_submission"].clone()
    }

    pub(crate) async fn end(self) {
        self.running.stop().await;
        self.server.stop().await;
    }
}
