//! The simulation: builds its program and passes the seeds on.

use std::process::Command;

use anyhow::{Context, Result};

use crate::{args::Args, process, workspace::Workspace};

const PACKAGE: &str = "windlass-sim";
const BINARY: &str = "windlass-sim";
const SEEDS: u64 = 1_000;
/// The simulation and the proof that it is not blind are one build, or every crate below would be compiled
/// twice: the planted bugs are in it and sleep until a test wakes one.
pub(crate) const BUILD: &[&str] =
    &["--profile", "sim", "-p", PACKAGE, "--features", "mutants", "--test", "it"];

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let mut play = Play {
        seeds: args.value("--seeds")?.unwrap_or(SEEDS),
        from: args.value("--from")?.unwrap_or(0),
        jobs: args.value("--jobs")?,
        keep: args.value("--keep")?,
        queue: args.flag("--queue"),
    };
    args.finish()?;
    if let Ok(text) = std::env::var("SEED") {
        play.seeds = 1;
        play.from = text.parse().with_context(|| format!("read SEED `{text}`"))?;
    }
    self::play(workspace, &play)
}

#[derive(Default)]
pub(crate) struct Play {
    pub(crate) seeds: u64,
    pub(crate) from: u64,
    pub(crate) jobs: Option<usize>,
    /// Where the databases of seeds with violations are kept.
    pub(crate) keep: Option<String>,
    /// The container queue and its dispatchers, not runs.
    pub(crate) queue: bool,
}

pub(crate) fn play(workspace: &Workspace, play: &Play) -> Result<()> {
    let jobs = match play.jobs {
        Some(jobs) => jobs,
        None => std::thread::available_parallelism().context("count the cores")?.get(),
    };
    process::run(workspace.cargo().arg("build").args(BUILD).args(["--bin", BINARY]))?;
    let mut command = Command::new(workspace.built("sim", BINARY)?);
    command.current_dir(&workspace.root);
    command.args(["--seeds", &play.seeds.to_string(), "--from", &play.from.to_string()]);
    command.args(["--jobs", &jobs.to_string()]);
    if let Some(folder) = &play.keep {
        command.args(["--keep", folder]);
    }
    if play.queue {
        command.arg("--queue");
    }
    process::run(&mut command)
}
