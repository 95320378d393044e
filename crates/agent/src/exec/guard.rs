//! The guard: a small process between the executor and the program, which removes everything the program leaves behind.
//!
//! It holds one end of a pipe whose other end only the executor has. When the executor dies, for whatever reason, the
//! pipe closes, and the guard kills everything the program started, and removes its control group, its container and
//! its files. Orphans are reparented to it, so no process can escape by leaving its parent. It is in a separate process
//! group: a signal to the executor's whole group does not kill the process that cleans up after it.

use std::{
    fs, io,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use nix::sys::{
    signal::{SigSet, SigmaskHow, sigprocmask},
    signalfd::SignalFd,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{
        Pid, Signal, WaitStatus, kill_process_group, set_parent_process_death_signal, test_kill_process_group,
    },
};

use super::{
    container_group::{self, CGROUP_HOME},
    process_isolation::Isolation,
    work_dir::remove_files,
};
use crate::{
    cgroup::{
        Hierarchies,
        task::{TaskGroup, TaskGroups},
    },
    isolation::restrict::hide_memory,
    runner::init::{
        InitRequest, ReapOutcome, become_reaper, exit_code, kill_descendants, read_stop_signals, reap,
        reset_signals,
    },
};

/// File in which the guard reports to the executor why the program could not be started.
pub(super) const START_ERROR_FILE: &str = "not.started";
/// Directory that programs see as their root.
pub(super) const ROOT_DIR: &str = "root";
/// File with the program's environment, which the guard reads and removes.
pub(super) const ENVIRONMENT_FILE: &str = "environment.json";
const EXIT_CANNOT_START: u8 = 127;
/// Interval of checks for processes that outlive the program after a signal.
const GROUP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the attempt
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Remove the whole directory when the executor dies, and not only the program's root
    #[arg(long)]
    whole: bool,
    /// Name of the attempt's control group
    #[arg(long, value_name = "NAME")]
    group: String,
    /// Run the program as a plain process, which cannot gain privileges
    #[arg(long)]
    plain: bool,
    /// User and group id of a plain process
    #[arg(long, value_name = "NUMBER", requires = "apart")]
    user: Option<u32>,
    /// Parent directory of all attempts, in which that user sees only its own root
    #[arg(long, value_name = "DIR")]
    apart: Option<PathBuf>,
    /// Other paths that are hidden from that user
    #[arg(long, value_name = "PATH")]
    hide: Vec<PathBuf>,
    /// Command to run when the executor has died, word by word
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    after: Vec<String>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Control groups of attempts on this host.
pub(super) fn attempt_groups() -> io::Result<TaskGroups> {
    Ok(TaskGroups::new(CGROUP_HOME, Hierarchies::mounted()?))
}

pub fn main(args: &Args) -> ExitCode {
    // Other processes of the same user must not read what the program receives.
    let _ = hide_memory();
    match run(args) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // If the file cannot be written, the exit code still reports the failure.
            let _ = fs::write(args.dir.join(START_ERROR_FILE), error.to_string());
            ExitCode::from(EXIT_CANNOT_START)
        }
    }
}

enum GuardOutcome {
    ProgramExited(WaitStatus),
    /// The executor is dead, so the exit status cannot be reported.
    ExecutorGone,
}

fn run(args: &Args) -> io::Result<u8> {
    let environment = read_environment(args)?;
    let signals = become_reaper()?;
    let group = attempt_groups()?.find(&args.group);
    let isolation = match (args.plain, args.user, &args.apart) {
        (false, ..) => None,
        (true, Some(uid), Some(apart)) => {
            let made = Isolation::for_user(uid, &args.dir.join(ROOT_DIR), apart, &args.hide);
            Some(made.map_err(|error| isolation_error(&error))?)
        }
        (true, ..) => Some(Isolation::plain()),
    };
    let child = start(&args.command, &environment, &group, isolation)?;
    let end = wait_for_exit(child, &signals)?;
    group.kill();
    kill_descendants(&InitRequest::default(), &signals);
    match end {
        GuardOutcome::ProgramExited(status) => Ok(exit_code(status)),
        GuardOutcome::ExecutorGone => {
            clean_up(args, &environment, &group);
            Ok(0)
        }
    }
}

type Variables = Vec<(String, String)>;

/// Reads the program's environment that the executor wrote, and removes the file.
fn read_environment(args: &Args) -> io::Result<Variables> {
    let file = args.dir.join(ENVIRONMENT_FILE);
    let variables = serde_json::from_slice(&fs::read(&file)?)?;
    fs::remove_file(file)?;
    Ok(variables)
}

/// Number of times that the engine is asked to remove the container. It refuses while it is starting it.
const REMOVALS_MAX: u32 = 10;
const REMOVAL_INTERVAL: Duration = Duration::from_secs(1);

/// Performs the cleanup that the executor would have done at the end.
fn clean_up(args: &Args, environment: &Variables, group: &TaskGroup) {
    let mut is_removed = remove_container(args, environment);
    let _ = group.remove();
    remove_files(&args.dir, args.whole);
    for _ in 1..REMOVALS_MAX {
        if is_removed {
            break;
        }
        std::thread::sleep(REMOVAL_INTERVAL);
        is_removed = remove_container(args, environment);
    }
    container_group::remove(&args.group);
}

/// Returns whether the command that removes the container succeeded, or there is none.
fn remove_container(args: &Args, environment: &Variables) -> bool {
    let [program, rest @ ..] = &args.after[..] else { return true };
    // The child inherits the signal mask of this process, in which all signals are blocked.
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    command.status().is_ok_and(|status| status.success())
}

fn isolation_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("failed to isolate the program: {error}"))
}

#[expect(unsafe_code, reason = "what happens between fork and exec cannot be said otherwise")]
fn start(
    words: &[String],
    environment: &Variables,
    group: &TaskGroup,
    isolation: Option<Isolation>,
) -> io::Result<Pid> {
    // Opened here, so that between fork and exec a single write suffices.
    let listener = |group: &PathBuf| fs::File::options().write(true).open(group.join("cgroup.procs")).ok();
    let listeners: Vec<fs::File> = group.directories().iter().filter_map(listener).collect();
    let (program, rest) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).process_group(0);
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    // SAFETY: a few system calls, which allocate nothing and acquire no lock.
    unsafe {
        command.pre_exec(move || {
            for listener in &listeners {
                let _ = rustix::io::write(listener, b"0");
            }
            if let Some(isolation) = &isolation {
                isolation.enter()?;
            }
            // If the guard is killed, the program dies with it, and the executor does the rest. Set here because
            // changing the user clears it.
            set_parent_process_death_signal(Some(Signal::KILL))?;
            reset_signals()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            Ok(())
        });
    }
    let child = command.spawn()?;
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reaps every process that exits, and forwards signals to the program's process group. After such a signal, the
/// program has exited when nothing of its group is left: a shell exits before the program that it runs.
fn wait_for_exit(child: Pid, signals: &SignalFd) -> io::Result<GuardOutcome> {
    let executor = io::stdin();
    let (mut was_signalled, mut exited) = (false, None);
    loop {
        match reap(Some(child).filter(|_| exited.is_none()))? {
            ReapOutcome::Runner(status) if was_signalled => exited = Some(status),
            ReapOutcome::Runner(status) => return Ok(GuardOutcome::ProgramExited(status)),
            ReapOutcome::ChildrenLeft | ReapOutcome::NoChildren => {}
        }
        let interval = match exited {
            Some(status) if test_kill_process_group(child).is_err() => {
                return Ok(GuardOutcome::ProgramExited(status));
            }
            // The exit of a process whose parent is not this one is not signalled.
            Some(_) => Timespec::try_from(GROUP_CHECK_INTERVAL).ok(),
            None => None,
        };
        let mut both =
            [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN), PollFd::new(&executor, PollFlags::IN)];
        match poll(&mut both, interval.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Nothing is ever written there: any event means that the executor has died.
        if !both[1].revents().is_empty() {
            return Ok(GuardOutcome::ExecutorGone);
        }
        for requested in read_stop_signals(signals, Some(Duration::ZERO))? {
            // The group has the program or others of its members, so its id is still valid.
            let _ = kill_process_group(child, requested);
            was_signalled = true;
        }
    }
}
