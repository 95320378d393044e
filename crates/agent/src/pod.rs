//! `windlass-agent pod` and `windlass-agent install`: the agent in a pod of Kubernetes.
//!
//! The container of a pod runs the image of one job. An init container copies this program into a directory that both
//! share, and the container starts it from there instead of the image's program.

use std::{
    fs, io,
    io::Write,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::mpsc,
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};

use crate::shim::cli::{EnrolArgs, write_enrolment};

/// Name of the installed program.
const PROGRAM: &str = "agent";
const PROGRAM_MODE: u32 = 0o755;
const FIRST_PID: u32 = 1;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    enrolment: EnrolArgs,
}

#[derive(Debug, clap::Args)]
pub struct InstallArgs {
    /// Directory to copy this program into, as `agent`
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub fn install(args: &InstallArgs) -> ExitCode {
    match copy_program(&args.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_failure(&format!("failed to install the agent in {}: {error}", args.dir.display()))
        }
    }
}

/// Copies this program; its final name appears once it is complete.
fn copy_program(dir: &Path) -> io::Result<()> {
    let part = dir.join(format!("{PROGRAM}.part"));
    fs::copy("/proc/self/exe", &part)?;
    fs::set_permissions(&part, fs::Permissions::from_mode(PROGRAM_MODE))?;
    fs::rename(&part, dir.join(PROGRAM))
}

pub fn main(args: &Args) -> ExitCode {
    if let Err(error) = write_enrolment(&args.enrolment) {
        return report_failure(&error);
    }
    match supervise(&args.enrolment.home) {
        Ok(code) => ExitCode::from(code),
        Err(error) => report_failure(&format!("failed to run the shim: {error}")),
    }
}

/// Runs the shim, and reaps every process of the container. Ends when the shim ends, or after a request to terminate
/// when no process is left: the pod is being deleted, evicted or its node drained.
fn supervise(home: &Path) -> io::Result<u8> {
    let is_first = std::process::id() == FIRST_PID;
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    let mut command = Command::new("/proc/self/exe");
    command.arg0("windlass-agent").args(["shim", "--home"]).arg(home);
    command.args(["--runtime", "process", "--processes", "own", "--own-container"]);
    // The child inherits the mask, so the signals are blocked only afterwards.
    let shim = Pid::from_raw(i32::try_from(command.spawn()?.id()).map_err(io::Error::other)?);
    signals.thread_block()?;
    let (terminated, is_terminated) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        while signals.wait().is_ok() {
            let _ = terminated.send(());
            // Only the first process of a container has no other processes than its own in reach.
            let target = if is_first { Pid::from_raw(-1) } else { shim };
            let _ = kill(target, Signal::SIGTERM);
        }
    })?;
    let mut result = 0;
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == shim => result = u8::try_from(code).unwrap_or(1),
            Ok(WaitStatus::Signaled(pid, ..)) if pid == shim => result = 1,
            Ok(_) => continue,
            Err(Errno::EINTR) => continue,
            Err(Errno::ECHILD) => return Ok(result),
            Err(error) => return Err(error.into()),
        }
        if is_terminated.try_recv().is_err() {
            // The shim crashed. The restart of the container would lose the job's processes, so it ends with them.
            return Ok(result.max(1));
        }
    }
}

fn report_failure(text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {text}");
    ExitCode::FAILURE
}
