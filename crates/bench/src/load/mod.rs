//! Full load: thousands of simulated hosts and active runs, held for minutes under a mixed open-loop load.
//!
//! Sequence: the hosts start, with 100,000 finished runs in the database; the population is submitted; then, for the
//! requested time, runs are submitted, read, listed and stopped at random times; finally half of the population is
//! cancelled at once. Only the server's responses and the kernel's counters are measured.

pub(crate) mod cluster;
mod traffic;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use tokio::task::JoinHandle;

use self::{
    cluster::{ClusterOptions, LoadCluster},
    traffic::LoadTraffic,
};
use super::{
    api, flags::Flags, open_loop::ConnectionPool, postgres_url, results::BenchResults, runs::Binaries,
};
use windlass_testenv::{process, simulated_hosts};
use windlass_testkit::temp_dir;

/// Sampling interval of the memory.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which idle hosts are measured.
const IDLE_TIME: Duration = Duration::from_secs(20);

pub struct LoadPlan {
    pub hosts: usize,
    pub runs: usize,
    pub hold: Duration,
    /// Submissions per second at full load; the other request rates are derived from it.
    pub per_second: f64,
    /// Submissions per second while the population is built up.
    pub fill_per_second: f64,
    /// Initial number of finished runs in the database.
    pub history: usize,
    pub cancel: usize,
    pub postgres: Option<String>,
}

impl LoadPlan {
    pub fn read(flags: &mut Flags, postgres: Option<String>) -> Result<Self> {
        let postgres = postgres_url(flags, postgres)?;
        let runs = flags.value("--runs")?.unwrap_or(10_000);
        let plan = Self {
            hosts: flags.value("--hosts")?.unwrap_or(2_000),
            runs,
            hold: Duration::from_secs_f64(flags.value::<f64>("--minutes")?.unwrap_or(10.0) * 60.0),
            per_second: flags.value("--rate")?.unwrap_or(50.0),
            fill_per_second: flags.value("--fill-rate")?.unwrap_or(200.0),
            history: flags.value("--history")?.unwrap_or(100_000),
            cancel: flags.value("--cancel")?.unwrap_or(runs / 2),
            postgres,
        };
        ensure!(plan.cancel <= plan.runs, "`--cancel` is larger than `--runs`");
        ensure!(
            plan.per_second > 0.0 && plan.fill_per_second > 0.0,
            "`--rate` and `--fill-rate` must be above 0"
        );
        Ok(plan)
    }
}

pub async fn run(binaries: &Binaries<'_>, plan: &LoadPlan) -> Result<()> {
    let database = if plan.postgres.is_some() { "postgres" } else { "sqlite" };
    let scratch = temp_dir("load")?;
    let mut sheet = BenchResults::new(&format!("load-{database}"))?;
    let opening =
        ClusterOptions { hosts: plan.hosts, history: plan.history, postgres: plan.postgres.as_deref() };
    let cluster = LoadCluster::open(binaries, scratch.path(), &opening).await?;
    let server = &cluster.server;
    sheet.say(&format!(
        "{} simulated hosts, {} active runs, {} finished, {database}",
        plan.hosts, plan.runs, plan.history
    ))?;
    sheet.put("hosts", plan.hosts as f64);
    sheet.put("runs", plan.runs as f64);
    sheet.put("minutes", plan.hold.as_secs_f64() / 60.0);
    sheet.put("rate_per_s", plan.per_second);
    sheet.figure("hosts_ready_s", "start until all hosts accept jobs", cluster.ready.as_secs_f64(), "s")?;
    measure_idle(&cluster, &mut sheet).await?;

    let pool = ConnectionPool::new(server.address());
    let traffic = Arc::new(LoadTraffic::new(pool, plan.runs));
    traffic.fill(plan, &mut sheet).await?;
    sheet.figure("full_resident_mb", "server memory, all runs active", server.resident_mb()?, "MB")?;
    measure_load(&cluster, &traffic, plan, &mut sheet).await?;
    traffic.cancel(plan.cancel, &mut sheet).await?;
    sheet.figure("end_resident_mb", "server memory, at the end", server.resident_mb()?, "MB")?;
    traffic.errors(&mut sheet)?;
    sheet.save()?;
    cluster.close()
}

/// Measures the cost of idle hosts.
async fn measure_idle(cluster: &LoadCluster, sheet: &mut BenchResults) -> Result<()> {
    let (server, hosts) = (cluster.server.pid(), cluster.hosts.pid());
    process::wait_until_idle(server).await?;
    let (before, before_hosts) = (process::cpu_secs(server)?, process::cpu_secs(hosts)?);
    tokio::time::sleep(IDLE_TIME).await;
    let share = |now: f64, before: f64| (now - before) / IDLE_TIME.as_secs_f64() * 1e3;
    let count = cluster.hosts.count as f64;
    let core = share(process::cpu_secs(server)?, before);
    let core_hosts = share(process::cpu_secs(hosts)?, before_hosts);
    sheet.figure("idle_resident_mb", "server memory, hosts idle", process::resident_mb(server)?, "MB")?;
    sheet.figure("idle_mcore", "server CPU, hosts idle", core, "mcore")?;
    sheet.figure("host_idle_kb", "memory per host", process::resident_mb(hosts)? * 1024.0 / count, "KiB")?;
    sheet.figure("host_idle_mcore", "CPU per host", core_hosts / count, "mcore")
}

async fn measure_load(
    cluster: &LoadCluster,
    traffic: &Arc<LoadTraffic>,
    plan: &LoadPlan,
    sheet: &mut BenchResults,
) -> Result<()> {
    let (server, hosts) = (cluster.server.pid(), cluster.hosts.pid());
    let (before, before_hosts) = (process::cpu_secs(server)?, process::cpu_secs(hosts)?);
    let resident = process::resident_mb(server)?;
    let peak = watch_memory(server);
    let began = Instant::now();
    traffic.hold(plan).await?;
    let wall = began.elapsed().as_secs_f64();
    let peak = peak.stop().await;
    let (cpu, cpu_hosts) = (process::cpu_secs(server)? - before, process::cpu_secs(hosts)? - before_hosts);
    sheet.say(&format!("full load for {:.1} minutes", wall / 60.0))?;
    sheet.figure("hold_cpu_cores", "server CPU", cpu / wall, "cores")?;
    sheet.figure("hold_hosts_cpu_cores", "CPU of all hosts", cpu_hosts / wall, "cores")?;
    sheet.figure("hold_resident_peak_mb", "server memory, peak", peak, "MB")?;
    let grown = process::resident_mb(server)? - resident;
    sheet.figure("hold_resident_grown_mb", "server memory, growth during the test", grown, "MB")?;
    let each = process::resident_mb(hosts)? * 1024.0 / cluster.hosts.count as f64;
    sheet.figure("host_full_kb", "memory per host", each, "KiB")?;
    traffic.report(sheet)?;
    let active = traffic.active().await?;
    sheet.figure("active_after_hold", "active runs afterwards", active as f64, "")?;
    ensure!(active >= plan.runs, "only {active} of {} runs are active after the test", plan.runs);
    Ok(())
}

/// Peak memory of a process during a measurement.
struct MemoryWatch {
    stop: tokio::sync::oneshot::Sender<()>,
    task: JoinHandle<f64>,
}

fn watch_memory(pid: u32) -> MemoryWatch {
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(async move {
        let mut most: f64 = 0.0;
        loop {
            most = most.max(process::resident_mb(pid).unwrap_or_default());
            if tokio::time::timeout(SAMPLE_INTERVAL, &mut stopped).await.is_ok() {
                return most;
            }
        }
    });
    MemoryWatch { stop, task }
}

impl MemoryWatch {
    async fn stop(self) -> f64 {
        let _ = self.stop.send(());
        self.task.await.unwrap_or_default()
    }
}

/// Inserts finished runs into the database before a server starts on it.
async fn create_history(data: &Path, opening: &ClusterOptions<'_>) -> Result<()> {
    let url = simulated_hosts::database_url(data, opening.postgres);
    if opening.history > 0 { api::insert_finished_runs(&url, opening.history).await } else { Ok(()) }
}

fn create_subdir(home: &Path, name: &str) -> Result<PathBuf> {
    let path = home.join(name);
    std::fs::create_dir_all(&path)?;
    Ok(path)
}
