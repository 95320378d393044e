//! Thousands of managed jobs on simulated hosts.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::json;
use windlass_api::managed_jobs::ManagedJob;
use windlass_model::time::Timestamp;

use super::{JobsClient, JobsPlan};
use crate::{
    load::cluster::{ClusterOptions, LoadCluster},
    open_loop::ConnectionPool,
    results::BenchResults,
    runs::Binaries,
};
use windlass_testenv::{process, simulated_hosts::BLOCKS};

/// Number of jobs with which SkyPilot was measured.
const PEER_BURST: usize = 100;
const SHORT_MS: u64 = 1_000;
const LONG_MS: u64 = 24 * 3600 * 1000;
/// Time limit until thousands of jobs run, or have ended.
const CROWD_TIMEOUT: Duration = Duration::from_secs(900);
/// Time for which the server is measured while its jobs only run.
const WATCH_TIME: Duration = Duration::from_secs(30);
const NOT_RUNNING_STATUSES: [&str; 3] = ["PENDING", "STARTING", "RECOVERING"];

pub(super) async fn run(
    binaries: &Binaries<'_>,
    home: &Path,
    plan: &JobsPlan,
    sheet: &mut BenchResults,
) -> Result<()> {
    // More capacity than needed, so that no job waits for a host.
    let blocks = usize::try_from(BLOCKS)?;
    let hosts = plan.most.max(plan.burst).max(PEER_BURST).div_ceil(blocks) + 16;
    let opening = ClusterOptions { hosts, history: 0, postgres: plan.postgres.as_deref() };
    let cluster = LoadCluster::open(binaries, home, &opening).await?;
    let jobs = JobsClient { pool: ConnectionPool::new(cluster.server.address()) };
    let database = if plan.postgres.is_some() { "Postgres" } else { "SQLite" };
    sheet.say(&format!("{hosts} simulated hosts, {database}"))?;
    sheet.about("crowd");
    sheet.put("hosts", hosts as f64);
    process::wait_until_idle(cluster.server.pid()).await?;
    sheet.figure("idle_resident_mb", "server memory, hosts idle", cluster.server.resident_mb()?, "MB")?;
    measure_single_jobs(&jobs, plan, sheet).await?;
    measure_burst(&jobs, "together", PEER_BURST, sheet).await?;
    measure_burst(&jobs, "burst", plan.burst, sheet).await?;
    measure_live_jobs(&cluster, &jobs, plan, sheet).await?;
    sheet.about("");
    cluster.close()
}

/// A job that does nothing for the given time.
fn task_file(run_ms: u64) -> String {
    format!(
        "envs: {{SIMULATED_RUN_MS: \"{run_ms}\", SIMULATED_LOG_LINES: \"1\"}}\nresources: {{cpus: 1+}}\nrun: 'true'\n"
    )
}

async fn measure_single_jobs(jobs: &JobsClient, plan: &JobsPlan, sheet: &mut BenchResults) -> Result<()> {
    let (mut running, mut ended) = (Vec::new(), Vec::new());
    for time in 0..=plan.times {
        let start = Instant::now();
        // Long enough to be observed as running.
        let id = *jobs.launch("alone", &task_file(50), 1).await?.first().context("no job")?;
        jobs.wait_until(id, "running", |job| matches!(job.status.as_str(), "RUNNING" | "SUCCEEDED")).await?;
        let ran = start.elapsed();
        jobs.wait_until(id, "over", |job| job.schedule_state == "DONE").await?;
        if time > 0 {
            running.push(ran);
            ended.push(start.elapsed());
        }
    }
    sheet.times("running", "launch to RUNNING, alone", &mut running)?;
    sheet.times("done", "launch to SUCCEEDED, 50 ms program", &mut ended)
}

/// Launches many jobs of one second in one call, and measures when each of them ran, and how many ran per minute.
async fn measure_burst(jobs: &JobsClient, name: &str, count: usize, sheet: &mut BenchResults) -> Result<()> {
    let start = Instant::now();
    jobs.launch(name, &task_file(SHORT_MS), count).await?;
    let answered = start.elapsed();
    jobs.wait_until_none(name, &[], CROWD_TIMEOUT).await?;
    let all = jobs.all(name).await?;
    anyhow::ensure!(all.len() == count, "found {} jobs, expected {count}", all.len());
    let bad = all.iter().find(|job| job.status != "SUCCEEDED" || job.recovery_count > 0);
    anyhow::ensure!(bad.is_none(), "a job failed or was recovered: {bad:?}");
    sheet.say(&format!("{count} one-second jobs, launched in one call"))?;
    sheet.figure(&format!("{name}_answered_ms"), "the call", answered.as_secs_f64() * 1e3, "ms")?;
    // Uses the times that the server recorded, so that polling does not distort them.
    let mut running: Vec<Duration> =
        all.iter().filter_map(|job| since_created(job, started_at(job))).collect();
    sheet.spread(&format!("{name}_running"), "launch to RUNNING", &mut running)?;
    let last = all.iter().filter_map(|job| since_created(job, job.end_at)).max().context("no end")?;
    sheet.figure(&format!("{name}_last_s"), "last job SUCCEEDED after", last.as_secs_f64(), "s")?;
    let rate = count as f64 / last.as_secs_f64() * 60.0;
    sheet.figure(&format!("{name}_per_min"), "jobs per minute, from launch to end", rate, "/min")
}

fn started_at(job: &ManagedJob) -> Option<Timestamp> {
    job.tasks.first().and_then(|task| task.start_at)
}

fn since_created(job: &ManagedJob, at: Option<Timestamp>) -> Option<Duration> {
    let micros = u64::try_from(at?.since(job.created_at).0).ok()?;
    Some(Duration::from_micros(micros))
}

/// Measures the cost of running jobs, and of their end.
async fn measure_live_jobs(
    cluster: &LoadCluster,
    jobs: &JobsClient,
    plan: &JobsPlan,
    sheet: &mut BenchResults,
) -> Result<()> {
    let server = &cluster.server;
    process::wait_until_idle(server.pid()).await?;
    let before = server.resident_mb()?;
    let each = |resident: f64, count: usize| (resident - before) * 1024.0 / count as f64;
    launch_and_wait(jobs, &[("few", plan.live)], "few", sheet).await?;
    process::wait_until_idle(server.pid()).await?;
    let resident = server.resident_mb()?;
    sheet.say(&format!("{} live jobs", plan.live))?;
    sheet.put("live", plan.live as f64);
    sheet.figure("live_resident_mb", "server memory", resident, "MB")?;
    sheet.figure("live_each_kib", "– per job", each(resident, plan.live), "KiB")?;
    let rest = plan.most - plan.live - plan.cancel;
    let more = [("rest", rest), ("cancelled", plan.cancel)];
    launch_and_wait(jobs, &more, "many", sheet).await?;
    process::wait_until_idle(server.pid()).await?;
    let resident = server.resident_mb()?;
    sheet.say(&format!("{} live jobs", plan.most))?;
    sheet.put("most", plan.most as f64);
    sheet.figure("most_resident_mb", "server memory", resident, "MB")?;
    sheet.figure("most_each_kib", "– per job", each(resident, plan.most), "KiB")?;
    let cpu = server.cpu_secs()?;
    tokio::time::sleep(WATCH_TIME).await;
    let cores = (server.cpu_secs()? - cpu) / WATCH_TIME.as_secs_f64();
    sheet.figure("most_cpu_cores", "server CPU, while they run", cores, "cores")?;
    let start = Instant::now();
    jobs.call("jobs/list", &json!({"limit": 1_000})).await?;
    sheet.figure(
        "list_ms",
        "list the first 1,000 of the queue",
        start.elapsed().as_secs_f64() * 1e3,
        "ms",
    )?;
    measure_cancel(jobs, plan, sheet).await
}

/// Launches jobs and waits until all of them run.
async fn launch_and_wait(
    jobs: &JobsClient,
    crowds: &[(&str, usize)],
    key: &str,
    sheet: &mut BenchResults,
) -> Result<()> {
    let began = Instant::now();
    let mut count = 0;
    for (name, copies) in crowds.iter().filter(|(_, copies)| *copies > 0) {
        jobs.launch(name, &task_file(LONG_MS), *copies).await?;
        count += copies;
    }
    for (name, _) in crowds {
        jobs.wait_until_none(name, &NOT_RUNNING_STATUSES, CROWD_TIMEOUT).await?;
    }
    let took = began.elapsed().as_secs_f64();
    sheet.figure(&format!("{key}_fill_s"), &format!("{count} more running after"), took, "s")?;
    sheet.figure(
        &format!("{key}_launches_per_min"),
        "launches per minute",
        count as f64 / took * 60.0,
        "/min",
    )
}

async fn measure_cancel(jobs: &JobsClient, plan: &JobsPlan, sheet: &mut BenchResults) -> Result<()> {
    if plan.cancel == 0 {
        return Ok(());
    }
    let start = Instant::now();
    jobs.cancel("cancelled").await?;
    let answered = start.elapsed();
    jobs.wait_until_none("cancelled", &[], CROWD_TIMEOUT).await?;
    let took = start.elapsed();
    let wrong = jobs.all("cancelled").await?.into_iter().find(|job| job.status != "CANCELLED");
    anyhow::ensure!(wrong.is_none(), "a cancelled job did not end as cancelled: {wrong:?}");
    sheet.say(&format!("{} jobs cancelled in one call", plan.cancel))?;
    sheet.put("cancelled", plan.cancel as f64);
    sheet.figure("cancel_answered_ms", "the call", answered.as_secs_f64() * 1e3, "ms")?;
    sheet.figure("cancel_s", "until all have ended and released their nodes", took.as_secs_f64(), "s")
}
