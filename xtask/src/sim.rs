//! Builds the simulation and passes the seeds on.

use std::process::Command;

use anyhow::{Context, Result};

use crate::{args::Args, process, workspace::Workspace};

const PACKAGE: &str = "windlass-sim";
const BINARY: &str = "windlass-sim";
const DEFAULT_SEEDS: u64 = 1_000;
/// Distance between the first seeds of two days.
const SEEDS_PER_DAY: u64 = 10_000;
const SECS_PER_DAY: u64 = 24 * 60 * 60;

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let mut play = SimOptions {
        seeds: args.value("--seeds")?.unwrap_or(DEFAULT_SEEDS),
        from: args.value("--from")?.unwrap_or(0),
        jobs: args.value("--jobs")?,
        keep: args.value("--keep")?,
        queue: args.take_flag("--queue"),
        shared: args.take_flag("--shared"),
    };
    args.finish()?;
    if let Ok(text) = std::env::var("SEED") {
        play.seeds = 1;
        play.from = text.parse().with_context(|| format!("invalid `SEED` value `{text}`"))?;
    }
    self::build_and_run(workspace, &play)
}

#[derive(Default)]
pub(crate) struct SimOptions {
    pub(crate) seeds: u64,
    pub(crate) from: u64,
    pub(crate) jobs: Option<usize>,
    /// Directory for the databases of seeds with violations.
    pub(crate) keep: Option<String>,
    /// Simulate the container queue and its dispatchers, instead of runs.
    pub(crate) queue: bool,
    /// Simulate several projects that share hosts.
    pub(crate) shared: bool,
}

/// Returns the first seed of the current day (UTC). Days are counted from 1970, so no two share a seed.
#[expect(clippy::disallowed_methods, reason = "the day is what is asked for")]
pub(crate) fn todays_first_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs()) / SECS_PER_DAY * SEEDS_PER_DAY
}

pub(crate) fn build_and_run(workspace: &Workspace, play: &SimOptions) -> Result<()> {
    process::run(workspace.cargo().args(["build", "-p", PACKAGE, "--bin", BINARY]))?;
    run_built(workspace, play, &process::Runner::Foreground)
}

/// Runs the simulation with the binary that was built for the tests.
pub(crate) fn run_built(workspace: &Workspace, play: &SimOptions, runner: &process::Runner) -> Result<()> {
    let jobs = match play.jobs {
        Some(jobs) => jobs,
        None => std::thread::available_parallelism().context("failed to count the cores")?.get(),
    };
    let mut command = Command::new(workspace.built("debug", BINARY)?);
    command.current_dir(&workspace.root);
    command.args(["--seeds", &play.seeds.to_string(), "--from", &play.from.to_string()]);
    command.args(["--jobs", &jobs.to_string()]);
    if let Some(folder) = &play.keep {
        command.args(["--keep", folder]);
    }
    if play.queue {
        command.arg("--queue");
    }
    if play.shared {
        command.arg("--shared");
    }
    runner.run(&mut command)
}
