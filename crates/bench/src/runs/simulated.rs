//! Runs on simulated hosts, which do everything but the work: measures only the control plane.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Binaries, has_active_run, measure_run, wait_for_hosts};
use crate::results::BenchResults;
use windlass_testenv::{
    server::{Client, Server, ServerOptions, submission},
    simulated_hosts::SimulatedHosts,
};

const HOSTS: usize = 200;
const REPEATS: usize = 20;
const AT_ONCE: usize = 16;
/// Number of whole lifecycles for the throughput.
const THROUGHPUT_RUNS: usize = 4_000;
const SUBMITTERS: usize = 32;
const TIMEOUT: Duration = Duration::from_secs(300);

/// Starts a server and this many simulated hosts, and waits until it has connected to them.
pub(crate) async fn start_with_hosts(
    binaries: &Binaries<'_>,
    home: &Path,
    postgres: Option<&str>,
    hosts: usize,
) -> Result<(Server, SimulatedHosts)> {
    let data = home.join("server");
    std::fs::create_dir_all(&data)?;
    let options = ServerOptions { database: postgres, ..binaries.server(&data) };
    // The first start creates the database and its keys.
    drop(Server::start(&options).await?);
    let simulated =
        SimulatedHosts::start(binaries.agent, &home.join("hosts"), &data, postgres, hosts).await?;
    let server = Server::start(&options).await?;
    wait_for_hosts(&server, "simulated", hosts).await?;
    Ok((server, simulated))
}

pub(super) async fn run(
    binaries: &Binaries<'_>,
    home: &Path,
    postgres: Option<&str>,
    sheet: &mut BenchResults,
) -> Result<()> {
    let (server, _hosts) = start_with_hosts(binaries, home, postgres, HOSTS).await?;
    let (name, key) = if postgres.is_some() { ("Postgres", "postgres") } else { ("SQLite", "sqlite") };
    sheet.say(&format!("simulated hosts: {HOSTS}, {name}"))?;
    sheet.about(key);
    measure_single_runs(&server, sheet).await?;
    measure_concurrent_runs(&server, sheet).await?;
    measure_throughput(&server, sheet).await
}

fn empty_job(name: &str) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"SIMULATED_RUN_MS": "0", "SIMULATED_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

async fn measure_single_runs(server: &Server, sheet: &mut BenchResults) -> Result<()> {
    let mut client = server.client().await?;
    let (mut running, mut ended) = (Vec::new(), Vec::new());
    for time in 0..=REPEATS {
        let mut job = empty_job(&format!("alone-{time}"));
        // Long enough to be observed as running.
        job["env"]["SIMULATED_RUN_MS"] = "30".into();
        let seen = measure_run(&mut client, &job).await?;
        let nothing = measure_run(&mut client, &empty_job(&format!("empty-{time}"))).await?;
        if time > 0 {
            running.extend(seen.running);
            ended.push(nothing.ended);
        }
    }
    if !running.is_empty() {
        sheet.times("running", "submit to running", &mut running)?;
    }
    sheet.times("done", "submit to done, empty job", &mut ended)
}

async fn measure_concurrent_runs(server: &Server, sheet: &mut BenchResults) -> Result<()> {
    let mut lifetimes = JoinSet::new();
    for n in 0..AT_ONCE {
        let mut client = server.client().await?;
        lifetimes.spawn(async move { measure_run(&mut client, &empty_job(&format!("together-{n}"))).await });
    }
    let mut ended = Vec::new();
    while let Some(life) = lifetimes.join_next().await {
        ended.push(life??.ended);
    }
    sheet.times("done_together", &format!("the same, {AT_ONCE} concurrent"), &mut ended)
}

async fn measure_throughput(server: &Server, sheet: &mut BenchResults) -> Result<()> {
    let before = claims_by_pipeline(&mut server.client().await?).await?;
    let (cpu, started) = (server.cpu_secs()?, Instant::now());
    let next = Arc::new(AtomicUsize::new(0));
    let mut submitters = JoinSet::new();
    for _ in 0..SUBMITTERS {
        let (mut client, next) = (server.client().await?, Arc::clone(&next));
        submitters.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= THROUGHPUT_RUNS {
                    return anyhow::Ok(());
                }
                let job = empty_job(&format!("many-{n}"));
                client.post("/api/project/main/runs/apply", &submission(&job)).await?;
            }
        });
    }
    while let Some(done) = submitters.join_next().await {
        done??;
    }
    let submitted = started.elapsed();
    // The first connection has been idle for longer than the server keeps such connections.
    let mut client = server.client().await?;
    while has_active_run(&mut client).await? {
        ensure!(started.elapsed() < TIMEOUT, "timed out waiting for {THROUGHPUT_RUNS} runs to end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = started.elapsed();
    let each = (server.cpu_secs()? - cpu) / THROUGHPUT_RUNS as f64;
    let rate = |took: Duration| THROUGHPUT_RUNS as f64 / took.as_secs_f64();
    sheet.figure("submits_per_s", "submits, while runs progress", rate(submitted), "/s")?;
    sheet.figure("lifecycles_per_s", &format!("lifecycles, {THROUGHPUT_RUNS} runs"), rate(took), "/s")?;
    sheet.figure("cpu_ms", "server CPU time per run", each * 1e3, "ms")?;
    sheet.figure("resident_mb", "server memory, afterwards", server.resident_mb()?, "MB")?;
    for (pipeline, count) in claims_by_pipeline(&mut client).await? {
        let each = (count - before.get(&pipeline).unwrap_or(&0.0)) / THROUGHPUT_RUNS as f64;
        if each >= 0.1 {
            sheet.figure(
                &format!("passes_{pipeline}"),
                &format!("passes of {pipeline} per run"),
                each,
                "",
            )?;
        }
    }
    Ok(())
}

/// Rows that each pipeline has claimed since the start of the server.
async fn claims_by_pipeline(client: &mut Client) -> Result<BTreeMap<String, f64>> {
    let pipelines = client.post("/api/server/pipelines", &json!({})).await?;
    let all = pipelines.as_array().context("the response is not a list of pipelines")?.iter();
    let counted = all.filter_map(|one| Some((one["name"].as_str()?.to_owned(), one["claimed"].as_f64()?)));
    Ok(counted.collect())
}
