//! `windlass-agent runner`: started by the shim as the first process of a task.

use std::{path::PathBuf, process::ExitCode};

#[derive(Debug, clap::Args)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    part: Option<RunnerCommand>,
    /// The task's `run` directory
    #[arg(long, value_name = "DIR", required = true)]
    dir: Option<PathBuf>,
    /// Run the runner itself; without this, run the small parent process that starts it and reaps orphans
    #[arg(long, hide = true)]
    inner: bool,
}

/// Processes that the runner starts itself.
#[derive(Debug, clap::Subcommand)]
enum RunnerCommand {
    /// Serve SSH sessions without a job
    #[command(hide = true)]
    Ssh(super::ssh::cli::Args),
    /// Serve files on standard input and output
    #[command(hide = true)]
    Sftp,
}

pub fn main(args: &Args) -> ExitCode {
    match &args.part {
        Some(RunnerCommand::Ssh(args)) => return super::ssh::cli::main(args),
        Some(RunnerCommand::Sftp) => return super::ssh::cli::serve_sftp(),
        None => {}
    }
    let Some(dir) = &args.dir else { return ExitCode::from(2) };
    if args.inner {
        return super::serve::main(dir);
    }
    super::init::main(dir)
}
