//! Benchmarks: builds `windlass-bench` with optimisation and starts a private Postgres and container engine for it.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    args::Args,
    engine::{self, Engine},
    output,
    postgres::Postgres,
    process, setup, venv, web,
    workspace::Workspace,
};

const BINARY: &str = "windlass-bench";
const BENCHMARKS: &[&str] = &[
    "engine",
    "api",
    "cli",
    "agent",
    "containers",
    "runs",
    "cost",
    "isolation",
    "dispatch",
    "load",
    "jobs",
    "spot",
    "sharing",
    "reclaim",
    "growth",
    "proxy",
    "ui",
    "report",
    "all",
];
/// Benchmarks of the performance page, in this order. The last one writes the page.
const REPORT_BENCHMARKS: &[&str] = &[
    "api",
    "runs",
    "runs --peer dstack",
    "dispatch",
    "proxy",
    "load --db sqlite",
    "load --db postgres",
    "jobs",
    "growth",
    "report",
];

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let name = args
        .word()
        .with_context(|| format!("missing benchmark name: expected one of {}", BENCHMARKS.join(", ")))?;
    // Checked before a build of several minutes.
    ensure!(
        BENCHMARKS.contains(&name.as_str()),
        "unknown benchmark `{name}`: expected one of {}",
        BENCHMARKS.join(", ")
    );
    // `sim` is optimised too, and builds in a third of the time.
    let profile = args.value::<String>("--profile")?.unwrap_or_else(|| "release".to_owned());
    let rest = args.rest();
    if name == "ui" {
        ensure!(rest.is_empty(), "`bench ui` takes no arguments");
        return web::bench(workspace, &profile);
    }
    // Server and agent are measured as users run them: as separate binaries in separate processes.
    let mut build = workspace.cargo();
    build.args(["build", "--profile", &profile]);
    for (package, binary) in
        [("windlass-bench", BINARY), ("windlass-cli", "windlass"), ("windlass-agent", "windlass-agent")]
    {
        // Selected by name: linking dominates an optimised build, and the simulation would be linked too.
        build.args(["-p", package, "--bin", binary]);
    }
    process::run(&mut build)?;
    let program = workspace.built(&profile, BINARY)?;
    if name == "all" {
        return run_all(workspace, &program, &rest);
    }
    let words: Vec<String> = std::iter::once(name).chain(rest).collect();
    run_one(workspace, &program, &words)
}

/// Runs all benchmarks, each with a separate database. Failures are listed at the end and do not stop the others.
fn run_all(workspace: &Workspace, program: &Path, for_load: &[String]) -> Result<()> {
    let mut failed = Vec::new();
    for line in REPORT_BENCHMARKS {
        output::print_message(&format!("== {line}"));
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        if line.starts_with("load") {
            words.extend(for_load.iter().cloned());
        }
        if let Err(error) = run_one(workspace, program, &words) {
            output::print_message(&format!("error: {error:#}"));
            failed.push(*line);
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("failed benchmarks: {}", failed.join(", ")) }
}

fn run_one(workspace: &Workspace, program: &Path, words: &[String]) -> Result<()> {
    let has = |word: &str| words.iter().any(|given| given == word);
    let is = |name: &str| words.first().is_some_and(|first| first == name);
    if is("proxy") {
        setup::ensure_for_proxy()?;
    }
    let mut command = Command::new(program);
    command.current_dir(&workspace.root).args(words);
    command.env("WINDLASS_BENCH_RESULTS", workspace.target()?.join("bench"));
    // Held until the benchmark has ended: dropping it stops the database.
    let _postgres = match std::env::var_os("WINDLASS_BENCH_DATABASE_URL") {
        Some(_) => None,
        None if is("report")
            || is("spot")
            || is("sharing")
            || is("reclaim")
            || is("proxy")
            || has("--peer") =>
        {
            None
        }
        None => {
            let postgres = Postgres::start()?;
            output::print_message(&format!("started Postgres at {}", postgres.url));
            command.env("WINDLASS_BENCH_DATABASE_URL", &postgres.url);
            Some(postgres)
        }
    };
    if has("--peer") {
        let (variable, home) = venv::ensure_for_peer(workspace)?;
        command.env(variable, home);
    }
    // Held as well; only some benchmarks start containers.
    let _engine = match std::env::var_os(engine::SOCKET_VARIABLE) {
        None if is("agent") || is("containers") || (is("runs") && !has("--peer")) => {
            let engine = Engine::start()?;
            command.env(engine::SOCKET_VARIABLE, &engine.socket);
            Some(engine)
        }
        _ => None,
    };
    process::run(&mut command)
}
