//! `windlass-agent runner`: started by the shim as the first process of a task.

use std::{path::PathBuf, process::ExitCode};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The task's `run` directory
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Be the runner itself; without this, be the small parent that starts it and reaps what it leaves
    #[arg(long, hide = true)]
    inner: bool,
}

pub fn main(args: &Args) -> ExitCode {
    if args.inner {
        return super::inner(&args.dir);
    }
    super::init::main(&args.dir)
}
