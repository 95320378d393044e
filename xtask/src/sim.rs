//! The simulation: builds the testkit's program and passes the seeds on.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{args::Args, process, workspace::Workspace};

pub(crate) const BINARY: &str = "windlass-sim";
const SEEDS: u64 = 1_000;

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let seeds = args.value("--seeds")?.unwrap_or(SEEDS);
    let from = args.value("--from")?.unwrap_or(0);
    let jobs = args.value("--jobs")?;
    args.finish()?;
    match std::env::var("SEED") {
        Ok(text) => {
            let seed = text.parse().with_context(|| format!("read SEED `{text}`"))?;
            self::seeds(workspace, 1, seed, jobs)
        }
        Err(_) => self::seeds(workspace, seeds, from, jobs),
    }
}

pub(crate) fn seeds(workspace: &Workspace, count: u64, from: u64, jobs: Option<usize>) -> Result<()> {
    ensure!(workspace.testkit_has(BINARY)?, "windlass-testkit has no binary `{BINARY}` yet");
    let jobs = match jobs {
        Some(jobs) => jobs,
        None => std::thread::available_parallelism().context("count the cores")?.get(),
    };
    let build = ["build", "--profile", "sim", "-p", "windlass-testkit", "--bin", BINARY];
    process::run(workspace.cargo().args(build))?;
    let mut command = Command::new(workspace.built("sim", BINARY)?);
    command.current_dir(&workspace.root);
    command.args(["--seeds", &count.to_string(), "--from", &from.to_string(), "--jobs", &jobs.to_string()]);
    process::run(&mut command)
}
