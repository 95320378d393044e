//! The web UI: its files are built again and compared, and its pages are tried in a browser at a real server.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

use crate::{
    args::Args,
    process::{self, Runner},
    setup, venv,
    workspace::Workspace,
};

/// Variables that the scripts of `web` read.
const PROGRAM_VARIABLE: &str = "WINDLASS";
const PROFILE_VARIABLE: &str = "WINDLASS_BENCH_PROFILE";
const RESULTS_VARIABLE: &str = "WINDLASS_BENCH_RESULTS";
/// Hash of the lock file with which the packages were installed.
const INSTALLED_LOCK: &str = "node_modules/.windlass-lock";

/// `cargo xtask web [--check]`: builds `web/dist`, or checks it.
pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let check = args.take_flag("--check");
    args.finish()?;
    install(workspace)?;
    if check { run_script(workspace, "reproduce") } else { run_script(workspace, "build") }
}

/// Checks without a browser: types and rules, the contract with the API, unit tests, and the committed files.
const FILE_SCRIPTS: &[&str] = &["check", "contract", "unit", "reproduce", "budget"];

/// Everything that continuous integration checks.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    install(workspace)?;
    for script in FILE_SCRIPTS.iter().chain(&["pages"]) {
        run_script(workspace, script)?;
    }
    run_pages(workspace)
}

/// Everything that needs Node and no browser. The caller makes sure that Node is there.
pub(crate) fn check_files(workspace: &Workspace, runner: &Runner) -> Result<()> {
    install_packages(workspace, runner)?;
    FILE_SCRIPTS.iter().try_for_each(|script| runner.run(&mut script_command(workspace, script)))
}

/// Tries the pages in a browser at the server that was built last.
fn run_pages(workspace: &Workspace) -> Result<()> {
    let program = workspace.built("debug", "windlass")?;
    let (variable, provider) = venv::ensure_for_web(workspace)?;
    let mut command = npm(workspace);
    command.args(["run", "--silent", "real"]).env(PROGRAM_VARIABLE, program);
    process::run(command.env(variable, provider))
}

/// Measures the pages at an optimised server.
pub(crate) fn bench(workspace: &Workspace, profile: &str) -> Result<()> {
    install(workspace)?;
    let mut build = workspace.cargo();
    build.args(["build", "--profile", profile]);
    for (package, binary) in [("windlass-cli", "windlass"), ("windlass-agent", "windlass-agent")] {
        build.args(["-p", package, "--bin", binary]);
    }
    process::run(&mut build)?;
    let program = workspace.built(profile, "windlass")?;
    let mut command = npm(workspace);
    command.args(["run", "--silent", "bench"]).env(PROGRAM_VARIABLE, program).env(PROFILE_VARIABLE, profile);
    process::run(command.env(RESULTS_VARIABLE, workspace.root.join("docs/performance")))
}

/// Installs the browser and the packages of the lock file, unless they are there.
fn install(workspace: &Workspace) -> Result<()> {
    setup::ensure_for_web()?;
    install_packages(workspace, &Runner::Foreground)
}

/// Installs the packages of the lock file, unless they are there.
fn install_packages(workspace: &Workspace, runner: &Runner) -> Result<()> {
    let directory = directory(workspace);
    let lock = std::fs::read(directory.join("package-lock.json"))
        .context("failed to read `web/package-lock.json`")?;
    let hash = hex::encode(Sha256::digest(lock));
    let stamp = directory.join(INSTALLED_LOCK);
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == hash) {
        return Ok(());
    }
    runner.print_message("installing the packages of `web/package-lock.json`")?;
    runner.run(npm(workspace).args(["ci", "--prefer-offline", "--no-audit", "--no-fund"]))?;
    std::fs::write(&stamp, hash).with_context(|| format!("failed to write `{}`", stamp.display()))
}

fn run_script(workspace: &Workspace, name: &str) -> Result<()> {
    process::run(&mut script_command(workspace, name))
}

fn script_command(workspace: &Workspace, name: &str) -> Command {
    let mut command = npm(workspace);
    command.args(["run", "--silent", name]);
    command
}

fn npm(workspace: &Workspace) -> Command {
    let mut command = Command::new("npm");
    command.current_dir(directory(workspace));
    command
}

fn directory(workspace: &Workspace) -> PathBuf {
    workspace.root.join("web")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_of_the_level_exist() {
        let workspace = Workspace::find().unwrap();
        let package: serde_json::Value =
            serde_json::from_str(&workspace.read("web/package.json").unwrap()).unwrap();
        for script in FILE_SCRIPTS.iter().chain(&["build", "pages", "real", "bench"]) {
            assert!(package["scripts"][*script].is_string(), "`web/package.json` has no script `{script}`");
        }
    }

    #[test]
    fn the_lock_file_names_no_address() {
        let lock = Workspace::find().unwrap().read("web/package-lock.json").unwrap();
        assert!(
            !lock.contains("\"resolved\"") && !lock.contains("://registry"),
            "an address is in the lock file"
        );
    }
}
