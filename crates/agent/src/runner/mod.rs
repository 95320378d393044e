//! The runner: the first process of a task. It takes one job through its steps.

pub mod api;
pub mod child;
pub mod cli;
pub mod cluster;
pub mod exec;
pub mod files;
pub mod init;
pub mod job;
pub mod metrics;
pub mod repo;
pub mod session;
pub mod site;
pub mod ssh;
pub mod unpack;
pub mod user;

use std::{path::Path, process::ExitCode};

/// The runner proper: takes one job through its steps and exits with the job's exit status.
fn inner(_dir: &Path) -> ExitCode {
    ExitCode::from(2)
}
