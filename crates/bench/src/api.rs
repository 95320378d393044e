//! Benchmark of the API: the real server on one core, a load generator on the other.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use serde_json::json;
use windlass_server::db::{Change, DatabaseUrl, Db, Unit, Val};

use super::results::BenchResults;
use windlass_testenv::server::{Server, ServerOptions, submission_bytes};
use windlass_testenv::{closed_loop::LoadFigures, simulated_hosts};
use windlass_testkit::temp_dir;

pub(super) const RUNS: usize = 100_000;
/// Number of rows per transaction.
const ROWS_PER_TRANSACTION: usize = 1_000;
const DURATION: Duration = Duration::from_secs(6);

/// `server` is the `windlass` binary.
pub async fn run(server: &Path) -> Result<()> {
    let scratch = temp_dir("api")?;
    let options = ServerOptions {
        binary: server,
        data: scratch.path(),
        database: None,
        core: Some(0),
        local: false,
        env: Vec::new(),
        log: None,
    };
    let first = Server::start(&options).await?;
    let idle = first.resident_mb()?;
    drop(first);
    insert_finished_runs(&simulated_hosts::database_url(scratch.path(), None), RUNS).await?;
    let server = Server::start(&options).await?;
    let mut sheet = BenchResults::new("api")?;
    sheet.say("the server on one core, SQLite")?;
    sheet.figure("ready_ms", "ready after start", server.ready.as_secs_f64() * 1e3, "ms")?;
    sheet.figure("idle_resident_mb", "resident memory, idle", idle, "MB")?;

    let body = json!({"run_name": "run-50000"}).to_string();
    let get = server.load("/api/project/main/runs/get", &body, 16, DURATION, |_, _| None).await?;
    print_figures(&mut sheet, "get", "get a run of 100,000, 16 connections", get)?;
    let body =
        json!({"project_name": "main", "only_active": false, "limit": 100, "job_submissions_limit": 1});
    let list = server.load("/api/runs/list", &body.to_string(), 4, DURATION, |_, _| None).await?;
    print_figures(&mut sheet, "list", "list 100 of 100,000, 4 connections", list)?;
    let submit = server
        .load("/api/project/main/runs/apply", "{}", 64, DURATION, |n, repeat| Some(submission(n, repeat)))
        .await?;
    print_figures(&mut sheet, "submit", "submit, durable, 64 connections", submit)?;
    sheet.figure("end_resident_mb", "resident memory, at the end", server.resident_mb()?, "MB")?;
    sheet.save()?;
    Ok(())
}

fn print_figures(sheet: &mut BenchResults, key: &str, what: &str, figures: LoadFigures) -> Result<()> {
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    sheet.put(&format!("{key}_per_s"), figures.per_second);
    sheet.put(&format!("{key}_p50_ms"), ms(figures.p50));
    sheet.put(&format!("{key}_p99_ms"), ms(figures.p99));
    sheet.say(&format!(
        "  {what:<38} {:>9.0} /s   p50 {:>7.2} ms   p99 {:>7.2} ms   ({} requests)",
        figures.per_second,
        ms(figures.p50),
        ms(figures.p99),
        figures.count
    ))
}

fn submission(connection: usize, repeat: usize) -> Vec<u8> {
    submission_bytes(&json!({"type": "task", "name": format!("s-{connection}-{repeat}"), "image": "busybox",
        "user": "root", "commands": ["true"], "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}}}))
}

/// Inserts finished runs with one job each directly into the database.
pub(super) async fn insert_finished_runs(url: &str, runs: usize) -> Result<()> {
    let db = Db::open(&url.parse::<DatabaseUrl>()?).await?;
    let one = db.query("SELECT p.id, p.owner_id FROM projects p WHERE p.name = 'main'", Vec::new()).await?;
    let row = one.first().context("project `main` does not exist")?;
    let (project, user) = (row.uuid(0)?, row.uuid(1)?);
    let spec = json!({"run_name": "x", "repo_id": "none", "repo_data": {"repo_type": "virtual"},
        "configuration": {"type": "task", "image": "busybox", "commands": ["true"], "nodes": 1, "priority": 0},
        "profile": {"name": "default"}, "ssh_key_pub": "ssh-ed25519 AAAA"});
    let job = json!({"job_num": 0, "replica_num": 0, "job_name": "x-0-0", "jobs_per_replica": 1, "app_specs": [],
        "commands": ["/bin/sh", "-i", "-c", "true"], "env": {}, "image_name": "busybox",
        "requirements": {"resources": {"cpu": {"count": {"min": 2}}, "memory": {"min": 8.0}}}});
    for from in (0..runs).step_by(ROWS_PER_TRANSACTION) {
        let mut unit = Unit::new();
        for n in from..runs.min(from + ROWS_PER_TRANSACTION) {
            let (run, submission) = (db.new_id()?, db.new_id()?);
            let at = Val::NowPlus(i64::try_from(n)? - i64::try_from(runs)?);
            let common = |status: &str| {
                vec![
                    ("status", status.into()),
                    ("finished", true.into()),
                    ("submitted_at", at.clone()),
                    ("last_processed_at", Val::Now),
                    ("finished_at", Val::Now),
                ]
            };
            let mut values = common("done");
            values.extend([
                ("id", run.into()),
                ("project_id", project.into()),
                ("user_id", user.into()),
                ("name", format!("run-{n}").into()),
                ("spec", spec.to_string().into()),
                ("termination_reason", "all_jobs_done".into()),
            ]);
            unit = unit.and([Change::Insert { table: "runs", values }]);
            let mut values = common("done");
            values.extend([
                ("id", submission.into()),
                ("run_id", run.into()),
                ("project_id", project.into()),
                ("job_name", format!("run-{n}-0-0").into()),
                ("replica_num", 0_i64.into()),
                ("job_num", 0_i64.into()),
                ("submission_num", 0_i64.into()),
                ("job_spec", job.to_string().into()),
                ("termination_reason", "done_by_runner".into()),
            ]);
            unit = unit.and([Change::Insert { table: "jobs", values }]);
        }
        db.write(unit).await?.done()?;
    }
    db.close().await;
    Ok(())
}
