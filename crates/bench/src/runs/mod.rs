//! Whole runs through the real server: on simulated hosts, as processes of this machine, in containers.
//!
//! Figures that are compared are measured in one run: simulated hosts on SQLite and on Postgres, containers and `docker
//! run`.

mod real;
pub(crate) mod simulated;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::results::BenchResults;
use windlass_testenv::server::{Client, Server, ServerOptions, submission};
use windlass_testkit::temp_dir;

/// A run that takes longer is a failure, not a figure.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Polling interval of a run. Each poll costs the server about 50 µs.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Polling interval of a whole fleet, whose response contains every host.
const HOSTS_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The measured binaries.
pub struct Binaries<'a> {
    pub windlass: &'a Path,
    pub agent: &'a Path,
}

impl Binaries<'_> {
    /// A server with SQLite that does not run jobs itself.
    pub(crate) fn server<'a>(&'a self, data: &'a Path) -> ServerOptions<'a> {
        ServerOptions {
            binary: self.windlass,
            data,
            database: None,
            core: None,
            local: false,
            env: vec![("WINDLASS_AGENT", self.agent.to_owned())],
            log: None,
        }
    }
}

/// `postgres` is the URL of an empty database.
pub async fn run(binaries: &Binaries<'_>, postgres: Option<String>) -> Result<()> {
    let scratch = temp_dir("runs")?;
    let mut sheet = BenchResults::new("runs")?;
    simulated::run(binaries, &scratch.path().join("sqlite"), None, &mut sheet).await?;
    match &postgres {
        Some(url) => {
            simulated::run(binaries, &scratch.path().join("postgres"), Some(url), &mut sheet).await?;
        }
        None => sheet.say("Postgres: not measured, WINDLASS_BENCH_DATABASE_URL is not set")?,
    }
    real::run(binaries, &scratch.path().join("real"), &mut sheet).await?;
    sheet.save()?;
    Ok(())
}

/// Measures the cost of confining plain processes.
pub async fn measure_isolation(binaries: &Binaries<'_>) -> Result<()> {
    let scratch = temp_dir("isolation")?;
    let mut sheet = BenchResults::new("isolation")?;
    real::measure_isolation(binaries, scratch.path(), &mut sheet).await?;
    sheet.save()?;
    Ok(())
}

/// Times after its submission at which a run was observed in each state.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunTimes {
    pub(super) running: Option<Duration>,
    pub(super) ended: Duration,
}

/// Submits a run and follows it to its end.
pub(super) async fn measure_run(client: &mut Client, configuration: &Value) -> Result<RunTimes> {
    let name = configuration["name"].as_str().context("the configuration has no name")?.to_owned();
    let start = Instant::now();
    client.post("/api/project/main/runs/apply", &submission(configuration)).await?;
    let mut running = None;
    loop {
        let run = client.post("/api/project/main/runs/get", &json!({"run_name": name})).await?;
        let seen = start.elapsed();
        match run["status"].as_str().unwrap_or_default() {
            "running" => running = running.or(Some(seen)),
            "done" => return Ok(RunTimes { running, ended: seen }),
            "failed" | "terminated" => {
                bail!("{name} ended as {}: {}", run["status"], run["jobs"][0]["job_submissions"][0])
            }
            _ => {}
        }
        ensure!(seen < TIMEOUT, "{name} is still {} after {seen:?}", run["status"]);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns whether the project has an active run. Requests one run, because the cost of a list depends on its length.
async fn has_active_run(client: &mut Client) -> Result<bool> {
    let body = json!({"project_name": "main", "only_active": true, "limit": 1, "job_submissions_limit": 1});
    let list = client.post("/api/runs/list", &body).await?;
    Ok(!list.as_array().context("no list")?.is_empty())
}

fn median(taken: &mut [Duration]) -> Duration {
    taken.sort();
    taken[taken.len() / 2]
}

/// Waits until the project's fleet has the given number of hosts that accept jobs.
pub(super) async fn wait_for_hosts(server: &Server, fleet: &str, hosts: usize) -> Result<()> {
    let mut client = server.client().await?;
    let started = Instant::now();
    loop {
        let found = client.post("/api/project/main/fleets/get", &json!({"name": fleet})).await?;
        let instances = found["instances"].as_array().cloned().unwrap_or_default();
        let ready =
            instances.iter().filter(|i| matches!(i["status"].as_str(), Some("idle" | "busy"))).count();
        if ready >= hosts {
            return Ok(());
        }
        let last = instances.last().cloned().unwrap_or_default();
        ensure!(started.elapsed() < TIMEOUT, "only {ready} of {hosts} hosts are ready, the last: {last}");
        tokio::time::sleep(HOSTS_POLL_INTERVAL).await;
    }
}
