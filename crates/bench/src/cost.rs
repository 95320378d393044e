//! Cost of a run in the database: statements, rows, commits and time per finished run, while other jobs wait.
//!
//! Counts, not times: they are the same on a busy machine. Those of the server come from its own counters; on Postgres
//! `pg_stat_statements` shows the same from the other side, where it can be loaded.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_postgres::NoTls;
use windlass_testenv::{
    server::{Client, Server, TOKEN, submission},
    simulated_hosts::BLOCKS,
};
use windlass_testkit::temp_dir;

use super::{
    flags::Flags,
    results::BenchResults,
    runs::{Binaries, simulated},
};

/// Interval at which the last measured run is polled. A poll costs a few statements, so it is rare.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
const TIMEOUT: Duration = Duration::from_secs(600);

/// Size of the measurement.
pub struct CostPlan {
    runs: usize,
    waiting: Vec<usize>,
    postgres: Option<String>,
}

impl CostPlan {
    /// Reads `--runs N` and `--waiting N,M,…`.
    pub fn read(flags: &mut Flags, postgres: Option<String>) -> Result<Self> {
        let runs = flags.value::<usize>("--runs")?.unwrap_or(200);
        let waiting = flags.value::<String>("--waiting")?.unwrap_or_else(|| "0,10,300".to_owned());
        let waiting = waiting.split(',').map(|word| word.trim().parse().context("invalid `--waiting` value"));
        ensure!(runs > 0, "invalid `--runs` value `0`: expected at least one run");
        Ok(Self { runs, waiting: waiting.collect::<Result<_>>()?, postgres })
    }
}

pub async fn run(binaries: &Binaries<'_>, plan: &CostPlan) -> Result<()> {
    let mut sheet = BenchResults::new("cost")?;
    let scratch = temp_dir("cost")?;
    for waiting in &plan.waiting {
        let home = scratch.path().join(format!("sqlite-{waiting}"));
        measure(binaries, &home, None, plan.runs, *waiting, &mut sheet).await?;
    }
    match &plan.postgres {
        Some(url) => {
            for waiting in &plan.waiting {
                let home = scratch.path().join(format!("postgres-{waiting}"));
                let database = new_database(url, &format!("cost_{waiting}")).await?;
                measure(binaries, &home, Some(&database), plan.runs, *waiting, &mut sheet).await?;
            }
        }
        None => sheet.say("Postgres: not measured, WINDLASS_BENCH_DATABASE_URL is not set")?,
    }
    sheet.save()?;
    Ok(())
}

async fn measure(
    binaries: &Binaries<'_>,
    home: &Path,
    postgres: Option<&str>,
    runs: usize,
    waiting: usize,
    sheet: &mut BenchResults,
) -> Result<()> {
    let (server, _hosts) = simulated::start_with_hosts(binaries, home, postgres, 1).await?;
    let (name, key) = if postgres.is_some() { ("Postgres", "postgres") } else { ("SQLite", "sqlite") };
    sheet.say(&format!("{name}, {runs} runs on one host, {BLOCKS} at a time, {waiting} others wait"))?;
    sheet.about(&format!("{key}.{waiting}"));
    let mut client = server.client().await?;
    // They hold the host until everything is in the queue.
    let holders: Vec<String> = (0..BLOCKS).map(|number| format!("holds-{number}")).collect();
    for holder in &holders {
        submit(&mut client, holder, 3_600_000).await?;
        wait_for(&mut client, holder, "running").await?;
    }
    for number in 0..runs + waiting {
        submit(&mut client, &format!("run-{number:06}"), 0).await?;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let statistics = StatementStatistics::start(postgres).await;
    let (before, cpu) = (read_counters(&server).await?, server.cpu_secs()?);
    client.post("/api/project/main/runs/stop", &json!({"runs_names": holders, "abort": true})).await?;
    wait_for(&mut client, &format!("run-{:06}", runs - 1), "done").await?;
    let (after, each) = (read_counters(&server).await?, runs as f64);
    let cpu = (server.cpu_secs()? - cpu) / each;
    report_counters(&before, &after, each, postgres.is_some(), sheet)?;
    sheet.figure("cpu_ms", "server CPU time", cpu * 1e3, "ms")?;
    if let Some(statistics) = statistics {
        statistics.report(each, sheet).await?;
    }
    server.stop()
}

type Counters = BTreeMap<String, f64>;

/// Prints the counters per run: those of the database, and the claims of each pipeline.
fn report_counters(
    before: &Counters,
    after: &Counters,
    runs: f64,
    is_postgres: bool,
    sheet: &mut BenchResults,
) -> Result<()> {
    let per_run = |name: &str| (after.get(name).unwrap_or(&0.0) - before.get(name).unwrap_or(&0.0)) / runs;
    for (counter, what) in COUNTERS {
        let value = per_run(&format!("windlass_database_{counter}_total"));
        match *counter {
            // Postgres has its own statistics of time.
            "busy_seconds" if is_postgres => {}
            "busy_seconds" => sheet.figure("busy_ms", what, value * 1e3, "ms")?,
            _ => sheet.figure(counter, what, value, "")?,
        }
    }
    for name in after.keys() {
        let Some(pipeline) = name.strip_prefix("windlass_pipeline_claimed_total{pipeline=\"") else {
            continue;
        };
        let (pipeline, claimed) = (pipeline.trim_end_matches("\"}"), per_run(name));
        if claimed >= 0.1 {
            sheet.figure(&format!("claimed_{pipeline}"), &format!("claimed by {pipeline}"), claimed, "")?;
        }
    }
    Ok(())
}

/// Counters of the server, and how they are printed.
const COUNTERS: &[(&str, &str)] = &[
    ("statements", "statements per run"),
    ("rows", "rows returned"),
    ("commits", "commits of the writer"),
    ("polls", "polls for rows that are due"),
    ("claimed_rows", "rows claimed"),
    ("notifications", "notifications"),
    ("busy_seconds", "time of SQLite's threads"),
];

async fn submit(client: &mut Client, name: &str, run_ms: u64) -> Result<()> {
    let job = json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"SIMULATED_RUN_MS": run_ms.to_string(), "SIMULATED_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}});
    client.post("/api/project/main/runs/apply", &submission(&job)).await?;
    Ok(())
}

async fn wait_for(client: &mut Client, name: &str, status: &str) -> Result<Value> {
    let start = Instant::now();
    loop {
        let run = client.post("/api/project/main/runs/get", &json!({"run_name": name})).await?;
        if run["status"] == status {
            return Ok(run);
        }
        ensure!(start.elapsed() < TIMEOUT, "{name} is still {} after {TIMEOUT:?}", run["status"]);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// All lines of `GET /metrics`: name with labels, and value.
async fn read_counters(server: &Server) -> Result<Counters> {
    let mut stream = TcpStream::connect(server.address()).await.context("connect")?;
    let request = format!(
        "GET /metrics HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    ensure!(text.starts_with("HTTP/1.1 200"), "no metrics: {}", text.lines().next().unwrap_or_default());
    let lines = text.lines().filter(|line| line.starts_with("windlass_"));
    let pairs = lines.filter_map(|line| line.rsplit_once(' '));
    Ok(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
}

/// Creates an empty database next to the one of the URL, and returns its URL.
async fn new_database(url: &str, name: &str) -> Result<String> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(&format!("DROP DATABASE IF EXISTS {name}; ")).await?;
    client.batch_execute(&format!("CREATE DATABASE {name}")).await?;
    let (start, _) = url.rsplit_once('/').context("the database URL has no name")?;
    Ok(format!("{start}/{name}"))
}

/// Statistics of a Postgres server about the statements of one database.
struct StatementStatistics {
    client: tokio_postgres::Client,
    wal_before: f64,
}

/// Bytes of the write-ahead log so far.
const WAL_BYTES: &str = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::FLOAT8";
const TOTALS: &str = "SELECT sum(calls)::FLOAT8, sum(total_exec_time)::FLOAT8, sum(rows)::FLOAT8 \
                      FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid \
                      WHERE d.datname = current_database()";
const MOST_EXPENSIVE: &str = "SELECT s.calls::FLOAT8, s.total_exec_time, \
                       left(regexp_replace(s.query, '\\s+', ' ', 'g'), 90) \
                       FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid \
                       WHERE d.datname = current_database() ORDER BY s.total_exec_time DESC LIMIT 8";

impl StatementStatistics {
    /// `None` on SQLite, and on a Postgres that did not load the extension.
    async fn start(postgres: Option<&str>) -> Option<Self> {
        let (client, connection) = tokio_postgres::connect(postgres?, NoTls).await.ok()?;
        tokio::spawn(connection);
        client.batch_execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").await.ok()?;
        client.batch_execute("SELECT pg_stat_statements_reset()").await.ok()?;
        let wal_before = client.query_one(WAL_BYTES, &[]).await.ok()?.get(0);
        Some(Self { client, wal_before })
    }

    async fn report(self, runs: f64, sheet: &mut BenchResults) -> Result<()> {
        let totals = self.client.query_one(TOTALS, &[]).await?;
        let wal: f64 = self.client.query_one(WAL_BYTES, &[]).await?.get(0);
        let total = |at: usize| totals.get::<_, Option<f64>>(at).unwrap_or_default() / runs;
        sheet.figure("pg_statements", "statements, as Postgres counts them", total(0), "")?;
        sheet.figure("pg_ms", "execution time in Postgres", total(1), "ms")?;
        sheet.figure("pg_rows", "rows read or changed", total(2), "")?;
        sheet.figure("wal_bytes", "write-ahead log", (wal - self.wal_before) / runs, "bytes")?;
        for row in self.client.query(MOST_EXPENSIVE, &[]).await? {
            let (calls, ms): (f64, f64) = (row.get(0), row.get(1));
            let query: String = row.get(2);
            sheet.say(&format!("    {:>7.2} calls {:>8.3} ms  {query}", calls / runs, ms / runs))?;
        }
        Ok(())
    }
}
