//! Runs system programs for a lab.

use std::{
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a program to its end, with any result.
pub(super) fn try_run(program: &str, args: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    command.output().with_context(|| format!("run {program}"))
}

/// Runs a program that must succeed.
pub(super) fn run(program: &str, args: &[&str]) -> Result<()> {
    run_for_stdout(program, args).map(drop)
}

/// Runs a program that must succeed, and returns its output.
pub(super) fn run_for_stdout(program: &str, args: &[&str]) -> Result<String> {
    let output = try_run(program, args)?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("`{program} {}` failed with {}: {}", args.join(" "), output.status, message.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Polls until the condition holds, and returns whether it did in time.
pub(super) fn wait_until(within: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let mut waited = Duration::ZERO;
    loop {
        if is_so() {
            return true;
        }
        if waited >= within {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
        waited += POLL_INTERVAL;
    }
}
