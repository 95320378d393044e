//! `windlass-agent shim`: its flags, and the order in which a shim comes up.

use std::{path::PathBuf, process::ExitCode};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where tasks, journal and credentials are kept
    #[arg(long, value_name = "DIR", env = "WINDLASS_AGENT_HOME")]
    home: PathBuf,
    /// Unix socket to answer on [default: HOME/shim.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// What starts tasks [default: docker where an engine answers, else process]
    #[arg(long)]
    runtime: Option<RuntimeName>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum RuntimeName {
    Docker,
    Process,
    Hollow,
}

pub fn main(_args: &Args) -> ExitCode {
    ExitCode::from(2)
}
