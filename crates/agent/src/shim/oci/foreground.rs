//! A container in the foreground: it has the output of its caller, and ends with it.
//!
//! Two processes: one on the host (`main`), which prepares and starts the container and passes on signals, and the first
//! process of the container (`init_main`), which starts the program and reaps orphans.

use std::{
    fs, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
};

use nix::sys::{
    signal::{SigSet, SigmaskHow, sigprocmask},
    signalfd::SignalFd,
};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};

use super::{
    config::Bundle,
    monitor::{StartError, StartRequest, failed, first_process, prepare, run_program, start_error},
    record::read_file,
};
use crate::runner::init::{ReapOutcome, become_reaper, exit_code, read_stop_signals, reap};

/// File with the request, in the directory of the container.
pub(super) const REQUEST_FILE: &str = "request.json";
/// Exit status that a shell returns if it could not start a program.
const EXIT_CANNOT_START: u8 = 127;
const EXIT_CANNOT_EXECUTE: u8 = 126;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the container
    #[arg(long)]
    bundle: PathBuf,
    /// File for the reason why the container could not be started
    #[arg(long)]
    errors: PathBuf,
}

/// Runs the container to its end, and exits with the status of its first process.
pub fn main(args: &Args) -> ExitCode {
    match run(&Bundle::at(args.bundle.clone())) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // If the file cannot be written, the exit code still reports the failure.
            let _ = fs::write(&args.errors, error.to_string());
            ExitCode::from(EXIT_CANNOT_START)
        }
    }
}

fn run(bundle: &Bundle) -> Result<u8, StartError> {
    let signals = become_reaper().map_err(failed("failed to set up signals"))?;
    let request: Option<StartRequest> = read_file(&bundle.root().join(REQUEST_FILE))
        .map_err(failed("failed to read the request of the executor"))?;
    let missing = || io::Error::from(io::ErrorKind::InvalidData);
    let request =
        request.ok_or_else(missing).map_err(failed("failed to read the request of the executor"))?;
    let prepared = prepare(bundle, &request)?;
    let output =
        |own: io::Result<OwnedFd>| own.map(Stdio::from).map_err(failed("failed to pass on the output"));
    let stdout = output(io::stdout().as_fd().try_clone_to_owned())?;
    let stderr = output(io::stderr().as_fd().try_clone_to_owned())?;
    run_program(bundle, &request, [stdout, stderr], prepared.network.as_ref())
        .map_err(|error| start_error(bundle, error))?;
    let first = first_process(bundle)?.pid;
    let first = Pid::from_raw(first).ok_or_else(missing).map_err(failed("no such process"))?;
    wait(first, &signals, |signal| {
        let _ = kill_process(first, signal);
    })
    .map_err(failed("failed to wait for the container"))
}

/// Waits for the end of a child, reaps all others meanwhile, and passes on the signals that request a stop.
fn wait(child: Pid, signals: &SignalFd, pass_on: impl Fn(Signal)) -> io::Result<u8> {
    loop {
        if let ReapOutcome::Runner(status) = reap(Some(child))? {
            return Ok(exit_code(status));
        }
        // The child was not reaped, so its pid is still valid.
        read_stop_signals(signals, None)?.into_iter().for_each(&pass_on);
    }
}

#[derive(Debug, clap::Args)]
pub struct InitArgs {
    /// Pass signals on to all processes of the container
    #[arg(long)]
    all: bool,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// First process of a container: runs the program, reaps orphans, and exits with the status of the program.
pub fn init_main(args: &InitArgs) -> ExitCode {
    match run_init(args) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let program = args.command.first().map_or("", String::as_str);
            let _ = io::Write::write_all(&mut io::stderr(), format!("{program}: {error}\n").as_bytes());
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            ExitCode::from(if is_missing { EXIT_CANNOT_START } else { EXIT_CANNOT_EXECUTE })
        }
    }
}

fn run_init(args: &InitArgs) -> io::Result<u8> {
    let signals = become_reaper()?;
    let (program, rest) = args.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    // Apart from this process: a signal for the group of the program is not for its init.
    command.args(rest).process_group(0);
    #[expect(unsafe_code, reason = "signals of the child are set between fork and exec")]
    // SAFETY: the closure makes one system call; it neither allocates nor acquires a lock.
    unsafe {
        command.pre_exec(|| Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?));
    }
    let child = command.spawn()?;
    let child = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let is_first = getpid().is_init();
    wait(child, &signals, |signal| {
        let _ = if args.all && is_first {
            // All processes of the namespace but this one.
            kill_process_group(Pid::INIT, signal)
        } else {
            kill_process(child, signal)
        };
    })
}
