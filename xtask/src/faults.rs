//! The fault matrix: builds server, agent and `windlass-faults`, and starts a private container engine. Rows that need
//! a Postgres start one themselves.

use std::{path::Path, process::Command};

use anyhow::Result;

use crate::{
    args::Args,
    engine::{self, Engine},
    process,
    workspace::Workspace,
};

const BINARY: &str = "windlass-faults";
/// Fixed seed, so that a change does not fail because of a variant that was never tried before.
const SEED: &str = "7";
/// Multiplier of all bounds in continuous integration: its two cores are shared, and bounds do not measure speed.
const BOUND_FACTOR: &str = "3";
/// Flags that only print; nothing is started for them.
const QUERY_FLAGS: [&str; 1] = ["--list"];

/// Builds with the feature `testing`, which contains the points at which an agent can be paused.
pub(crate) fn run(workspace: &Workspace, args: Args) -> Result<()> {
    let packages = ["-p", "windlass-faults", "-p", "windlass-cli", "-p", "windlass-agent"];
    process::run(workspace.cargo().args(["build", "--quiet", "--bins"]).args(packages))?;
    run_matrix(workspace, &args.rest())
}

/// Runs each row once, except those that state a reason why not, with the binaries and the engine of the tests.
pub(crate) fn run_each_once(workspace: &Workspace, engine: &Path) -> Result<()> {
    let args = ["--daily", "--slack", BOUND_FACTOR, "--seed", SEED].map(str::to_owned);
    process::run(faults_command(workspace, &args)?.env(engine::SOCKET_VARIABLE, engine))
}

/// Runs every row five times, with different seeds and in its long form.
pub(crate) fn run_five_times(workspace: &Workspace, engine: &Path) -> Result<()> {
    let args = ["--times", "5", "--long", "--slack", BOUND_FACTOR].map(str::to_owned);
    process::run(faults_command(workspace, &args)?.env(engine::SOCKET_VARIABLE, engine))
}

fn faults_command(workspace: &Workspace, args: &[String]) -> Result<Command> {
    let mut command = Command::new(workspace.built("debug", BINARY)?);
    command.current_dir(&workspace.root).args(args);
    Ok(command)
}

fn run_matrix(workspace: &Workspace, args: &[String]) -> Result<()> {
    let mut command = faults_command(workspace, args)?;
    let is_idle = args.iter().any(|arg| QUERY_FLAGS.contains(&arg.as_str()));
    // Held until the last row has ended: dropping it stops the engine.
    let _engine = match std::env::var_os(engine::SOCKET_VARIABLE) {
        None if !is_idle => {
            let engine = Engine::start()?;
            command.env(engine::SOCKET_VARIABLE, &engine.socket);
            Some(engine)
        }
        _ => None,
    };
    process::run(&mut command)
}
