//! `windlass-agent runner`: started by the shim as the first process of a task.

use std::{path::PathBuf, process::ExitCode};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The task's `run` directory
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

pub fn main(_args: &Args) -> ExitCode {
    ExitCode::from(2)
}
