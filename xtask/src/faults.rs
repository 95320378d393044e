//! The fault matrix: builds server, agent and `windlass-faults`, and gives it an engine of its own. Rows that
//! want a Postgres start one themselves.

use std::{path::Path, process::Command};

use anyhow::Result;

use crate::{
    args::Args,
    engine::{self, Engine},
    process,
    workspace::Workspace,
};

const BINARY: &str = "windlass-faults";
/// The same ways each time: whoever changes something must not fail for a way that nobody tried before.
const SEED: &str = "7";
/// Of each bound, in continuous integration: its two cores do everything at once, and a bound is not a race.
const BOUND_FACTOR: &str = "3";
/// These only look; nothing has to run for them.
const QUERY_FLAGS: [&str; 1] = ["--list"];

/// Builds with the feature `testing`: only they know the places at which an agent can be paused.
pub(crate) fn run(workspace: &Workspace, args: Args) -> Result<()> {
    let packages = ["-p", "windlass-faults", "-p", "windlass-cli", "-p", "windlass-agent"];
    process::run(workspace.cargo().args(["build", "--quiet", "--bins"]).args(packages))?;
    run_matrix(workspace, &args.rest())
}

/// Each row once, but for those that say why not; with the programs and the engine of the tests.
pub(crate) fn run_each_once(workspace: &Workspace, engine: &Path) -> Result<()> {
    let args = ["--daily", "--slack", BOUND_FACTOR, "--seed", SEED].map(str::to_owned);
    process::run(faults_command(workspace, &args)?.env(engine::SOCKET_VARIABLE, engine))
}

/// Every row five times, each with other seeds and in its long form.
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
    // Kept until the last row has ended: dropping it stops the engine.
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
