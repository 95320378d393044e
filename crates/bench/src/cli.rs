//! Duration of whole commands, from the start of the process to its end.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::json;

use super::api;
use windlass_testenv::server::{Server, ServerOptions, TOKEN, submission};
use windlass_testenv::simulated_hosts;
use windlass_testkit::temp_dir;

/// Pending runs in addition to the finished ones: they wait for the first of January.
const WAITING_RUNS: usize = 100;
const REPEATS: usize = 30;

const COMMANDS: &[&[&str]] = &[
    &["--help"],
    &["ps"],
    &["ps", "-o", "json"],
    &["ps", "-n", "100"],
    &["ps", "-a"],
    &["ps", "-a", "-o", "name"],
    &["event"],
    &["cost"],
    &["instance"],
];

/// `windlass` is the binary of the server and of the command line.
pub async fn run(windlass: &Path) -> Result<()> {
    let scratch = temp_dir("cli")?;
    let options = ServerOptions {
        binary: windlass,
        data: scratch.path(),
        database: None,
        core: None,
        local: false,
        env: Vec::new(),
        log: None,
    };
    drop(Server::start(&options).await?);
    api::insert_finished_runs(&simulated_hosts::database_url(scratch.path(), None), api::RUNS).await?;
    let server = Server::start(&options).await?;
    let mut client = server.client().await?;
    for number in 0..WAITING_RUNS {
        let task = json!({"type": "task", "name": format!("later-{number}"), "commands": ["true"],
            "schedule": {"cron": "0 0 1 1 *"}});
        client.post("/api/project/main/runs/apply", &submission(&task)).await?;
    }
    let mut out = std::io::stdout();
    writeln!(out, "{} finished runs, {WAITING_RUNS} active", api::RUNS)?;
    for args in COMMANDS {
        let mut taken = Vec::with_capacity(REPEATS);
        for _ in 0..REPEATS {
            taken.push(time_command(windlass, &server, scratch.path(), args)?);
        }
        taken.sort();
        let ms = |part: f64| taken[((taken.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
        let line = format!("windlass {}", args.join(" "));
        writeln!(out, "{line:<26} p50 {:>8.1} ms   max {:>8.1} ms", ms(0.5), ms(1.0))?;
    }
    Ok(())
}

fn time_command(windlass: &Path, server: &Server, home: &Path, args: &[&str]) -> Result<Duration> {
    let started = Instant::now();
    let done = Command::new(windlass)
        .args(args)
        .env("WINDLASS_HOME", home.join("home"))
        .env("WINDLASS_URL", format!("http://{}", server.address()))
        .env("WINDLASS_TOKEN", TOKEN)
        .stdin(Stdio::null())
        .output()?;
    let took = started.elapsed();
    ensure!(done.status.success(), "{args:?} failed: {}", String::from_utf8_lossy(&done.stderr));
    Ok(took)
}
