//! Containers through dispatchers: on this machine, on Slurm, and the same Slurm without windlass for comparison.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use windlass_sim::invariants::containers::is_final;
use windlass_testkit::slurm::{NodeSize, SlurmCluster};

use super::results::BenchResults;
use windlass_testenv::queue_env::QueueEnv;

/// Number of containers that wait when the clock starts.
const CROWD_SIZE: usize = 200;
/// Number of containers run one after the other.
const ALONE_REPEATS: usize = 20;
const SIZE: NodeSize = NodeSize { cpus: 4, memory_mib: 4000, gpus: 0, gpu_type: None };
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const CROWD_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub async fn run() -> Result<()> {
    let mut sheet = BenchResults::new("dispatch")?;
    sheet.put("crowd", CROWD_SIZE as f64);
    let cluster = SlurmCluster::start(&[SIZE, SIZE]);
    sheet.say("Slurm alone, one `sbatch` after the other")?;
    sheet.about("sbatch");
    measure_plain_slurm(&cluster, &mut sheet).await?;
    sheet.say("Slurm, through the queue")?;
    sheet.about("slurm");
    measure_dispatcher(&mut sheet, Some(&cluster)).await?;
    sheet.say("this machine, through the queue")?;
    sheet.about("local");
    measure_dispatcher(&mut sheet, None).await?;
    sheet.about("");
    sheet.save()?;
    Ok(())
}

fn record_figures(sheet: &mut BenchResults, crowd: Duration, alone: &mut [Duration]) -> Result<()> {
    sheet.figure(
        "per_s",
        "containers, all queued at the start",
        CROWD_SIZE as f64 / crowd.as_secs_f64(),
        "/s",
    )?;
    sheet.times("first", "request → first instruction, alone", alone)
}

/// Waits until the program has written its file.
async fn wait_for_file(file: &Path, requested: Instant) -> Result<Duration> {
    while !file.exists() {
        ensure!(requested.elapsed() < TIMEOUT, "{} was never written", file.display());
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(requested.elapsed())
}

fn write_script(path: &Path, text: &str) -> Result<String> {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path.display().to_string())
}

fn submit(cluster: &SlurmCluster, script: &str, file: &Path) -> Result<()> {
    let file = file.display().to_string();
    let args = ["--parsable", "--mem=50", "--cpus-per-task=1", "--output=/dev/null", script, &file];
    let message = cluster.say("sbatch", &args);
    ensure!(message.trim().parse::<u64>().is_ok(), "sbatch printed `{message}`");
    Ok(())
}

async fn measure_plain_slurm(cluster: &SlurmCluster, sheet: &mut BenchResults) -> Result<()> {
    let dir = cluster.dir().join("raw");
    std::fs::create_dir_all(&dir)?;
    let program = write_script(&dir.join("program"), r#"echo > "$1""#)?;
    let mut alone = Vec::new();
    for number in 0..ALONE_REPEATS {
        let (file, requested) = (dir.join(format!("alone-{number}")), Instant::now());
        submit(cluster, &program, &file)?;
        alone.push(wait_for_file(&file, requested).await?);
        wait_until_idle(cluster).await?;
    }
    let begun = Instant::now();
    for number in 0..CROWD_SIZE {
        submit(cluster, &program, &dir.join(format!("crowd-{number}")))?;
    }
    wait_until_idle(cluster).await?;
    record_figures(sheet, begun.elapsed(), &mut alone)
}

async fn wait_until_idle(cluster: &SlurmCluster) -> Result<()> {
    let since = Instant::now();
    while !cluster.say("squeue", &["-h"]).is_empty() {
        ensure!(since.elapsed() < TIMEOUT, "timed out waiting for the jobs to end");
        tokio::time::sleep(CROWD_POLL_INTERVAL).await;
    }
    Ok(())
}

async fn measure_dispatcher(sheet: &mut BenchResults, cluster: Option<&SlurmCluster>) -> Result<()> {
    let mut ground = QueueEnv::start(if cluster.is_some() { "bench-slurm" } else { "bench-local" }).await;
    let token = ground.token("token").await;
    let config = cluster.map(SlurmCluster::config);
    let start = |ground: &mut QueueEnv| match &config {
        Some(config) => ground.start_slurm_dispatcher(&token, config, &["--tag", "windlass:bench"]),
        None => ground.dispatch(&token, "attempts"),
    };
    start(&mut ground);
    let mut alone = Vec::new();
    for number in 0..ALONE_REPEATS {
        let file = ground.dir.join(format!("alone-{number}"));
        let started_at = Instant::now();
        let uuid = request_container(&ground, &file).await;
        alone.push(wait_for_file(&file, started_at).await?);
        ground.ended(&uuid).await;
    }
    ground.kill_dispatchers();
    let mut crowd: Vec<PathBuf> = Vec::new();
    for number in 0..CROWD_SIZE {
        crowd.push(ground.dir.join(format!("crowd-{number}")));
        request_container(&ground, crowd.last().context("just pushed")?).await;
    }
    let begun = Instant::now();
    start(&mut ground);
    // All have run before their ends are polled, because polling costs the server time.
    for file in &crowd {
        wait_for_file(file, begun).await?;
    }
    while !ground.containers().await.values().all(is_final) {
        ensure!(begun.elapsed() < TIMEOUT, "timed out waiting for the containers to end");
        tokio::time::sleep(CROWD_POLL_INTERVAL).await;
    }
    let taken = begun.elapsed();
    let lost = ground.containers().await.values().filter(|one| one["exit_code"] != 0).count();
    ensure!(lost == 0, "{lost} containers failed\n{}", ground.dispatcher_log());
    record_figures(sheet, taken, &mut alone)
}

async fn request_container(ground: &QueueEnv, file: &Path) -> String {
    let program = format!("echo > {}", file.display());
    ground
        .submit(&["sh", "-c", &program], json!({ "runtime_constraints": { "vcpus": 1, "ram": 50 << 20 } }))
        .await
}
