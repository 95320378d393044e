//! Scaling of figures with the number of runs in the database and with the number of hosts.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    api,
    plot::{self, Panel, PlotLine},
    results::BenchResults,
    runs::{Binaries, measure_run, wait_for_hosts},
};
use windlass_testenv::server::Server;
use windlass_testenv::{
    process,
    simulated_hosts::{self, SimulatedHosts},
};
use windlass_testkit::temp_dir;

const RUNS: [usize; 4] = [100, 1_000, 10_000, 100_000];
const HOSTS: [usize; 5] = [1, 10, 100, 1_000, 2_000];
/// Number of hosts while the number of runs grows.
const FEW_HOSTS: usize = 20;
const REPEATS: usize = 20;
const LIST_DURATION: Duration = Duration::from_secs(3);
/// Time for which an idle server is measured.
const IDLE_TIME: Duration = Duration::from_secs(10);

pub async fn run(binaries: &Binaries<'_>) -> Result<()> {
    let mut sheet = BenchResults::new("growth")?;
    sheet.say("runs in the database: list 100 p50, p99 (ms), submit to done (ms), memory (MB)")?;
    for count in RUNS {
        measure_by_runs(binaries, count, &mut sheet).await?;
    }
    sheet.say("hosts: submit to running (ms), memory (MB), idle (mcore), all ready (s)")?;
    for count in HOSTS {
        measure_by_hosts(binaries, count, &mut sheet).await?;
    }
    sheet.save()?;
    Ok(())
}

/// A server with finished runs and hosts.
struct ServerWithHistory {
    server: Server,
    _hosts: SimulatedHosts,
    _scratch: windlass_testkit::TempDir,
    ready: Duration,
}

impl ServerWithHistory {
    async fn set(binaries: &Binaries<'_>, finished: usize, count: usize) -> Result<Self> {
        let scratch = temp_dir(&format!("growth-{finished}-{count}"))?;
        let data: PathBuf = scratch.path().join("server");
        std::fs::create_dir_all(&data)?;
        let options = binaries.server(&data);
        Server::start(&options).await?.stop()?;
        api::insert_finished_runs(&simulated_hosts::database_url(&data, None), finished).await?;
        let hosts =
            SimulatedHosts::start(binaries.agent, &scratch.path().join("hosts"), &data, None, count).await?;
        let started = std::time::Instant::now();
        let server = Server::start(&options).await?;
        wait_for_hosts(&server, "simulated", count).await?;
        let ready = started.elapsed();
        process::wait_until_idle(server.pid()).await?;
        Ok(Self { server, _hosts: hosts, _scratch: scratch, ready })
    }

    /// Returns the medians of submission to running and submission to done, in milliseconds.
    async fn measure_lifecycles(&self) -> Result<(f64, f64)> {
        let mut client = self.server.client().await?;
        let (mut running, mut done) = (Vec::new(), Vec::new());
        for time in 0..=REPEATS {
            // Long enough to be observed as running.
            let seen = measure_run(&mut client, &job(&format!("seen-{time}"), 50)).await?;
            let life = measure_run(&mut client, &job(&format!("empty-{time}"), 0)).await?;
            if time > 0 {
                running.extend(seen.running);
                done.push(life.ended);
            }
        }
        Ok((median_ms(&mut running), median_ms(&mut done)))
    }
}

fn median_ms(taken: &mut [Duration]) -> f64 {
    taken.sort();
    taken.get(taken.len() / 2).map_or(0.0, |middle| middle.as_secs_f64() * 1e3)
}

fn job(name: &str, run_ms: u64) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"SIMULATED_RUN_MS": run_ms.to_string(), "SIMULATED_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

async fn measure_by_runs(binaries: &Binaries<'_>, count: usize, sheet: &mut BenchResults) -> Result<()> {
    let env = ServerWithHistory::set(binaries, count, FEW_HOSTS).await?;
    let (_, done) = env.measure_lifecycles().await?;
    let body =
        json!({"project_name": "main", "only_active": false, "limit": 100, "job_submissions_limit": 1});
    let list = env.server.load("/api/runs/list", &body.to_string(), 1, LIST_DURATION, |_, _| None).await?;
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let resident = env.server.resident_mb()?;
    let x = count as f64;
    sheet.point("runs.list_p50_ms", x, ms(list.p50));
    sheet.point("runs.list_p99_ms", x, ms(list.p99));
    sheet.point("runs.done_ms", x, done);
    sheet.point("runs.resident_mb", x, resident);
    sheet.say(&format!("{count:>9} {:>9.2} {:>9.2} {done:>9.1} {resident:>9.1}", ms(list.p50), ms(list.p99)))
}

async fn measure_by_hosts(binaries: &Binaries<'_>, count: usize, sheet: &mut BenchResults) -> Result<()> {
    let env = ServerWithHistory::set(binaries, 0, count).await?;
    let (running, _) = env.measure_lifecycles().await?;
    let pid = env.server.pid();
    let before = process::cpu_secs(pid)?;
    tokio::time::sleep(IDLE_TIME).await;
    let mcore = (process::cpu_secs(pid)? - before) / IDLE_TIME.as_secs_f64() * 1e3;
    let (resident, ready) = (process::resident_mb(pid)?, env.ready.as_secs_f64());
    let x = count as f64;
    sheet.point("hosts.running_ms", x, running);
    sheet.point("hosts.resident_mb", x, resident);
    sheet.point("hosts.idle_mcore", x, mcore);
    sheet.point("hosts.ready_s", x, ready);
    sheet.say(&format!("{count:>9} {running:>9.1} {resident:>9.1} {mcore:>9.1} {ready:>9.2}"))
}

/// Draws both charts of a stored result into a directory.
pub fn draw_pictures(record: &Value, place: &Path) -> Result<()> {
    let points = |key: &str| -> Result<Vec<(f64, f64)>> {
        let points = record["series"][key].as_array().with_context(|| format!("no curve `{key}`"))?.iter();
        points.map(|point| point[0].as_f64().zip(point[1].as_f64()).context("no point")).collect()
    };
    let line =
        |name: &'static str, key: &str| Ok::<_, anyhow::Error>(PlotLine { name, points: points(key)? });
    let runs = [
        Panel {
            title: "List 100 runs",
            unit: "ms, one connection",
            lines: vec![line("p99", "runs.list_p99_ms")?, line("p50", "runs.list_p50_ms")?],
        },
        Panel { title: "Submit to done", unit: "ms, median", lines: vec![line("", "runs.done_ms")?] },
        Panel {
            title: "Server memory",
            unit: "MB, after lists and runs",
            lines: vec![line("", "runs.resident_mb")?],
        },
    ];
    let hosts = [
        Panel { title: "Submit to running", unit: "ms, median", lines: vec![line("", "hosts.running_ms")?] },
        Panel { title: "Server memory", unit: "MB", lines: vec![line("", "hosts.resident_mb")?] },
        Panel {
            title: "Server CPU, hosts idle",
            unit: "thousandths of a core",
            lines: vec![line("", "hosts.idle_mcore")?],
        },
    ];
    std::fs::create_dir_all(place)?;
    let across = "finished runs in the database";
    std::fs::write(
        place.join("growth-runs.svg"),
        plot::render_svg("From 100 to 100,000 runs", across, &runs),
    )?;
    std::fs::write(
        place.join("growth-hosts.svg"),
        plot::render_svg("From 1 to 2,000 hosts", "hosts", &hosts),
    )?;
    Ok(())
}
