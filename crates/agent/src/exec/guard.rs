//! The guard: a small process between the executor and the program, which leaves nothing of it behind.
//!
//! It holds one end of a pipe whose other end only the executor has. When the executor dies, however it dies, the
//! pipe ends, and the guard kills whatever the program started, removes its control group, its container and its
//! files. Orphans come to it, so nobody can get away by leaving their parent. It stands in a process group of its
//! own: who kills the executor's whole group does not kill the one who cleans up after it.

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
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, Signal, WaitStatus, kill_process_group, set_parent_process_death_signal},
};

use super::isolation::Isolation;
use crate::{
    cgroup::{
        Hierarchies,
        task::{TaskGroup, TaskGroups},
    },
    isolation::restrict::hide_memory,
    runner::init::{
        InitRequest, ReapOutcome, become_reaper, code, kill_descendants, read_stop_signals, reap,
        reset_signals,
    },
};

/// All groups of executors are below this name.
const CGROUP_HOME: &str = "exec";
/// Why the program could not be started, for the executor to find.
pub(super) const START_ERROR_FILE: &str = "not.started";
/// The directory that programs see as their root.
pub(super) const ROOT_DIR: &str = "root";
/// The program's environment, for the guard to take.
pub(super) const ENVIRONMENT_FILE: &str = "environment.json";
const EXIT_CANNOT_START: u8 = 127;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the attempt
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Whether that directory goes with the executor, and not only what the program saw of it
    #[arg(long)]
    whole: bool,
    /// Name of the attempt's control group
    #[arg(long, value_name = "NAME")]
    group: String,
    /// Whether the program is a plain process: then it gains no rights
    #[arg(long)]
    plain: bool,
    /// The user and group that a plain process has for itself
    #[arg(long, value_name = "NUMBER", requires = "apart")]
    user: Option<u32>,
    /// Directory that holds those of all attempts, of which that user sees its own root only
    #[arg(long, value_name = "DIR")]
    apart: Option<PathBuf>,
    /// What that user does not see either
    #[arg(long, value_name = "PATH")]
    hide: Vec<PathBuf>,
    /// What to run when the executor is gone, word by word
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    after: Vec<String>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The control groups of attempts on this machine.
pub(super) fn groups() -> io::Result<TaskGroups> {
    Ok(TaskGroups::new(CGROUP_HOME, Hierarchies::mounted()?))
}

pub fn main(args: &Args) -> ExitCode {
    // What the program is given is not for other processes of the same user.
    let _ = hide_memory();
    match run(args) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // What cannot be written down shows as the code.
            let _ = fs::write(args.dir.join(START_ERROR_FILE), error.to_string());
            ExitCode::from(EXIT_CANNOT_START)
        }
    }
}

enum GuardOutcome {
    ProgramExited(WaitStatus),
    /// Nobody is there any more to tell how it ended.
    ExecutorGone,
}

fn run(args: &Args) -> io::Result<u8> {
    let environment = read_environment(args)?;
    let signals = become_reaper()?;
    let group = groups()?.find(&args.group);
    let isolation = match (args.plain, args.user, &args.apart) {
        (false, ..) => None,
        (true, Some(uid), Some(apart)) => {
            let made = Isolation::for_user(uid, &args.dir.join(ROOT_DIR), apart, &args.hide);
            Some(made.map_err(|error| cannot_isolate(&error))?)
        }
        (true, ..) => Some(Isolation::plain()),
    };
    let child = start(&args.command, &environment, &group, isolation)?;
    let end = wait_for_exit(child, &signals)?;
    group.kill();
    kill_descendants(&InitRequest::default(), &signals);
    match end {
        GuardOutcome::ProgramExited(status) => Ok(code(status)),
        GuardOutcome::ExecutorGone => {
            clean_up(args, &environment, &group);
            Ok(0)
        }
    }
}

type Variables = Vec<(String, String)>;

/// What the executor left for the program. It is nobody's any more afterwards.
fn read_environment(args: &Args) -> io::Result<Variables> {
    let file = args.dir.join(ENVIRONMENT_FILE);
    let variables = serde_json::from_slice(&fs::read(&file)?)?;
    fs::remove_file(file)?;
    Ok(variables)
}

/// What the executor would have done at the end.
fn clean_up(args: &Args, environment: &Variables, group: &TaskGroup) {
    if let [program, rest @ ..] = &args.after[..] {
        // A child of ours, and all signals are blocked here: it gets them as they are meant.
        let mut command = Command::new(program);
        command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        let _ = command.status();
    }
    let _ = group.remove();
    let _ = fs::remove_dir_all(if args.whole { args.dir.clone() } else { args.dir.join(ROOT_DIR) });
}

fn cannot_isolate(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("give it a user of its own: {error}"))
}

#[expect(unsafe_code, reason = "what happens between fork and exec cannot be said otherwise")]
fn start(
    words: &[String],
    environment: &Variables,
    group: &TaskGroup,
    isolation: Option<Isolation>,
) -> io::Result<Pid> {
    // Opened here: what is written there between fork and exec is one call.
    let door = |group: &PathBuf| fs::File::options().write(true).open(group.join("cgroup.procs")).ok();
    let doors: Vec<fs::File> = group.directories().iter().filter_map(door).collect();
    let (program, rest) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).process_group(0);
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    // SAFETY: a few system calls, which allocate nothing and take no lock.
    unsafe {
        command.pre_exec(move || {
            for door in &doors {
                let _ = rustix::io::write(door, b"0");
            }
            if let Some(isolation) = &isolation {
                isolation.enter()?;
            }
            // A guard that is killed takes the program along: the executor sees to the rest. Another user forgets it.
            set_parent_process_death_signal(Some(Signal::KILL))?;
            reset_signals()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            Ok(())
        });
    }
    let child = command.spawn()?;
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reaps whatever ends, and passes signals on to the program and those it stands with.
fn wait_for_exit(child: Pid, signals: &SignalFd) -> io::Result<GuardOutcome> {
    let executor = io::stdin();
    loop {
        if let ReapOutcome::Runner(status) = reap(Some(child))? {
            return Ok(GuardOutcome::ProgramExited(status));
        }
        let mut both =
            [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN), PollFd::new(&executor, PollFlags::IN)];
        match poll(&mut both, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Nothing is ever written there: whatever happens means the end.
        if !both[1].revents().is_empty() {
            return Ok(GuardOutcome::ExecutorGone);
        }
        for asked in read_stop_signals(signals, Some(Duration::ZERO))? {
            // The program was not reaped, so its number is its own.
            let _ = kill_process_group(child, asked);
        }
    }
}
