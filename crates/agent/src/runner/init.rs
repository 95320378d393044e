//! The first process of a task: it starts the runner, reaps orphans, and leaves no process running when it exits.
//!
//! It must be small and outlive everything else in the task, so there is one thread, no async runtime, and it waits for
//! nothing but signals. Signals are blocked and read, never handled: the kernel keeps a blocked signal even for the
//! first process of a namespace, which receives no other signal by default.
//!
//! In a container it starts at once. A shim without containers starts it *gated*: then its standard input is a socket,
//! and it sends nothing and starts nothing until [`Orders`] arrive. So a shim that is killed after the start, and
//! before it has recorded the process, leaves nothing behind.
//!
//! A confined task has two such processes: the one that the shim knows stays on the host and writes the exit record,
//! the other is the first process of the task's namespaces and does the rest ([`crate::isolation`]).

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use nix::sys::{
    signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, OwnedFd},
    fs::{AtFlags, Mode, OFlags, openat, renameat, unlinkat},
    io::Errno,
    process::{Pid, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait},
};
use serde::{Deserialize, Serialize};

use crate::{
    cgroup::Group,
    isolation::{
        self, Confinement,
        namespaces::{ForkSide, SetUpError, fork_into_namespaces, restrict_mount, set_up},
        restrict,
    },
    proc::{self, ProcessHandle},
    task_dir::{EXIT_RECORD, ExitRecord},
};

/// Environment variable that, set to `1`, makes init wait for [`Orders`] on its standard input.
pub const GATE_VARIABLE: &str = "WINDLASS_INIT_GATE";
/// File in the `run` directory, written by a gated init whose shim exited before it sent orders.
pub const NEVER_STARTED_FILE: &str = "never.started";
/// Variable with a shell command to run instead of the runner, for tests. Not in a release build.
pub const DEBUG_COMMAND: &str = "WINDLASS_DEBUG_INNER";

/// Maximum size in bytes of orders.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Maximum time that descendants which survive a kill delay the exit record.
const REAP_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of checks for processes that appeared while others were killed.
const REAP_INTERVAL: Duration = Duration::from_millis(20);
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
const OOM_SCORE_LAST: &str = "-900";
/// Exit status that a shell returns if it could not start a program.
const EXIT_CANNOT_START: u8 = 127;

/// Orders that a gated init carries out before it starts the runner. The reply is `ok` or an error message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitRequest {
    /// Directories of control groups to enter.
    pub enter: Vec<PathBuf>,
    /// Version 2 group for the runner and its descendants, which can be killed without killing init.
    pub job_group: Option<PathBuf>,
    /// Mounts for this task only; they disappear with its last process.
    pub binds: Vec<BindRequest>,
    /// Messages that the runner writes to its log.
    pub notices: Vec<String>,
    /// Confinement of the task; if absent, it has the rights of the agent's user.
    #[serde(default)]
    pub confinement: Option<Confinement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindRequest {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// Reply to orders that were carried out.
pub const REQUEST_DONE: &str = "ok";
/// Variable with the messages that the runner writes to its log, one per line.
pub const NOTICES_VARIABLE: &str = "WINDLASS_NOTICES";

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error("failed to open the run directory {dir}")]
    Directory {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to set up signals and process reaping")]
    Signals(#[source] io::Error),
    #[error("failed to read the request of the shim")]
    Orders(#[source] io::Error),
    #[error("failed to mount {} at {}", bind.source.display(), bind.target.display())]
    Mount {
        bind: BindRequest,
        #[source]
        source: io::Error,
    },
    #[error("failed to create namespaces for the task")]
    Namespaces(#[source] io::Error),
    #[error(transparent)]
    Confine(#[from] SetUpError),
    #[error("failed to drop privileges")]
    Restrict(#[source] io::Error),
    #[error("failed to start the runner")]
    Start(#[source] io::Error),
    #[error("failed to record the end of the task")]
    LastWord(#[source] io::Error),
}

/// Runs until the runner and all its descendants have ended; exits with the status of the runner.
pub fn main(dir: &Path) -> ExitCode {
    match run(dir) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            print_error(&error);
            ExitCode::from(EXIT_CANNOT_START)
        }
    }
}

fn run(dir: &Path) -> Result<u8, InitError> {
    // The handle is opened before anything else runs here, so that no other process can substitute the directory.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let home = rustix::fs::open(dir, flags, Mode::empty())
        .map_err(|error| InitError::Directory { dir: dir.to_owned(), source: error.into() })?;
    let signals = become_reaper().map_err(InitError::Signals)?;
    let Some((orders, gate)) = receive_request(&home)? else { return Ok(EXIT_CANNOT_START) };
    let group = Group::own().unwrap_or_default();
    let kills_before = group.oom_kills();
    let job = open_job_group(&orders);
    let status = match &orders.confinement {
        None => {
            gate.answer(&Ok(()));
            supervise(start_runner(dir, &orders, job), &orders, &signals)?
        }
        Some(task) => match fork_into_namespaces(task.user.is_none()).map_err(InitError::Namespaces) {
            Ok(ForkSide::Inner) => {
                // The handle refers to a directory of the host: it would allow an escape.
                drop(home);
                return run_in_namespaces(task, &orders, job, gate, &signals);
            }
            Ok(ForkSide::Outer(inner)) => {
                drop((gate, job));
                let _ = fs::write(OOM_SCORE, OOM_SCORE_LAST);
                supervise(Ok(inner), &orders, &signals)?
            }
            Err(error) => {
                let refused = Err(error);
                gate.answer(&refused);
                return refused.map(|()| EXIT_CANNOT_START);
            }
        },
    };
    let word =
        ExitRecord { exit_status: Some(i32::from(status)), oom_killed: group.oom_kills() > kills_before };
    if let Err(error) = write_exit_record(&home, &word) {
        // A full disk does not change how the job ended.
        print_error(&InitError::LastWord(error));
    }
    Ok(status)
}

/// Runs the first process of the namespaces of a confined task. The other half writes the exit record.
fn run_in_namespaces(
    task: &Confinement,
    orders: &InitRequest,
    job: Option<fs::File>,
    gate: ReplySocket,
    signals: &SignalFd,
) -> Result<u8, InitError> {
    let ready = set_up(task, &orders.binds).map_err(InitError::from).and_then(|()| {
        if task.user.is_some() {
            return Ok(());
        }
        // All processes in the namespaces have the same user. Other processes must not read the memory of this one.
        restrict::restrict_self().and_then(|()| restrict::hide_memory()).map_err(InitError::Restrict)
    });
    gate.answer(&ready);
    ready?;
    supervise(start_runner(&task.place.join("run"), orders, job), orders, signals)
}

/// Waits for the exit of the started process and kills its remaining descendants. Returns its exit status.
fn supervise(started: io::Result<Pid>, orders: &InitRequest, signals: &SignalFd) -> Result<u8, InitError> {
    match started {
        Ok(pid) => {
            let status = wait_for_runner(pid, signals).map_err(InitError::Signals)?;
            kill_descendants(orders, signals);
            Ok(exit_code(status))
        }
        Err(error) => {
            print_error(&InitError::Start(error));
            Ok(EXIT_CANNOT_START)
        }
    }
}

/// Socket on which the shim waits for the reply to its orders. If it is closed without a reply, the shim reports a
/// failure.
struct ReplySocket(Option<UnixStream>);

impl ReplySocket {
    fn answer(mut self, result: &Result<(), InitError>) {
        let Some(mut socket) = self.0.take() else { return };
        let answer = result.as_ref().map_or_else(error_text, |()| REQUEST_DONE.to_owned());
        // The shim may have exited by now; its orders remain valid.
        let _ = socket.write_all(answer.as_bytes());
        let _ = socket.shutdown(Shutdown::Both);
    }
}

/// Prints to standard error: there is no log here, and the shim shows its last lines.
fn print_error(error: &InitError) {
    let _ = io::stderr().write_all(format!("init: {}\n", error_text(error)).as_bytes());
}

fn error_text(error: &InitError) -> String {
    super::job::error_chain(error)
}

/// Becomes the reaper of orphans. Every signal that can be blocked is read from the returned file.
pub(crate) fn become_reaper() -> io::Result<SignalFd> {
    set_child_subreaper(Some(getpid()))?;
    reset_signals()?;
    let mut blocked = SigSet::all();
    // These signals are raised by a fault of this process: blocking them would only hide it.
    for fault in
        [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGILL, Signal::SIGFPE, Signal::SIGSYS, Signal::SIGABRT]
    {
        blocked.remove(fault);
    }
    blocked.thread_block()?;
    Ok(SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Resets signals to their default. The parent may have been started by `nohup`: ignored signals are inherited, by the
/// job as well.
#[expect(unsafe_code, reason = "changing what a signal does is a raw call")]
pub(crate) fn reset_signals() -> io::Result<()> {
    for one in Signal::iterator().filter(|one| ![Signal::SIGKILL, Signal::SIGSTOP].contains(one)) {
        // SAFETY: the default action runs no code of ours. Also sound between fork and exec: no memory is allocated and
        // no lock is acquired.
        unsafe { signal(one, SigHandler::SigDfl) }?;
    }
    Ok(())
}

/// Waits for orders if there is a gate, and carries out those for this process. Returns `None` if the shim exited
/// without sending them.
fn receive_request(home: &OwnedFd) -> Result<Option<(InitRequest, ReplySocket)>, InitError> {
    if std::env::var_os(GATE_VARIABLE).as_deref() != Some(OsStr::new("1")) {
        return Ok(Some((InitRequest::default(), ReplySocket(None))));
    }
    // In a separate session: signals for the shim's terminal or process group must not reach this process.
    rustix::process::setsid().map_err(|error| InitError::Orders(error.into()))?;
    let socket =
        rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3).map_err(|error| InitError::Orders(error.into()))?;
    let socket = UnixStream::from(socket);
    let mut text = Vec::new();
    (&socket).take(REQUEST_BYTES_MAX).read_to_end(&mut text).map_err(InitError::Orders)?;
    // Incomplete orders are ignored: nothing was done, and the shim that wrote them has exited.
    let Ok(mut orders) = serde_json::from_slice::<InitRequest>(&text) else {
        write_file(home, NEVER_STARTED_FILE, b"").map_err(InitError::LastWord)?;
        return Ok(None);
    };
    let gate = ReplySocket(Some(socket));
    let result = apply_request(&mut orders);
    if result.is_err() {
        gate.answer(&result);
        return result.map(|()| None);
    }
    Ok(Some((orders, gate)))
}

fn apply_request(orders: &mut InitRequest) -> Result<(), InitError> {
    for group in &orders.enter {
        // A job without a limit is better than none, as long as the log reports it.
        if let Err(error) = fs::write(group.join("cgroup.procs"), "0") {
            let group = group.display();
            orders
                .notices
                .push(format!("the limits of {group} are not enforced: failed to join the group: {error}"));
        }
    }
    // Mounts of a confined task are made in its namespaces.
    let Some(first) = orders.binds.first().filter(|_| orders.confinement.is_none()) else { return Ok(()) };
    unshare_mounts().map_err(|source| InitError::Mount { bind: first.clone(), source })?;
    for bind in &orders.binds {
        bind_mount(bind).map_err(|source| InitError::Mount { bind: bind.clone(), source })?;
    }
    Ok(())
}

/// Makes later mounts visible to this task only; unmounts of the host still propagate here.
#[expect(unsafe_code, reason = "the call that separates mounts can do unsafe things with other flags")]
fn unshare_mounts() -> io::Result<()> {
    use rustix::{
        mount::{MountPropagationFlags, mount_change},
        thread::{UnshareFlags, unshare_unsafe},
    };
    // SAFETY: file descriptors stay shared; only mounts are separated, and there is one thread.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

fn bind_mount(bind: &BindRequest) -> io::Result<()> {
    rustix::mount::mount_bind_recursive(&bind.source, &bind.target)?;
    restrict_mount(&bind.target, bind.read_only)
}

fn open_job_group(orders: &InitRequest) -> Option<fs::File> {
    let procs = orders.job_group.as_ref()?.join("cgroup.procs");
    fs::OpenOptions::new().write(true).open(procs).ok()
}

/// Starts the runner: this program again, with default signals and no standard input.
#[expect(unsafe_code, reason = "signals of the child are set between fork and exec")]
fn start_runner(dir: &Path, orders: &InitRequest, job: Option<fs::File>) -> io::Result<Pid> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("windlass-agent").args(["runner", "--inner", "--dir"]).arg(dir);
    #[cfg(feature = "testing")]
    if let Some(script) = std::env::var_os(DEBUG_COMMAND) {
        command = Command::new("/bin/sh");
        command.arg("-c").arg(script);
    }
    command.stdin(Stdio::null()).env_remove(GATE_VARIABLE).env_remove(DEBUG_COMMAND);
    if !orders.notices.is_empty() {
        command.env(NOTICES_VARIABLE, orders.notices.join("\n"));
    }
    if let Some(task) = &orders.confinement {
        command.env(isolation::CONFINED_VARIABLE, serde_json::to_string(&task.inside())?);
    }
    // Init should be killed last when memory runs out. Setting the score needs privileges, and the runner resets it.
    let score = fs::read(OOM_SCORE).ok().filter(|_| fs::write(OOM_SCORE, OOM_SCORE_LAST).is_ok());
    // SAFETY: everything in here is a plain system call on what was prepared above.
    unsafe {
        command.pre_exec(move || {
            if let Some(job) = &job {
                // Failure is tolerated: members are also found one by one.
                let _ = rustix::io::write(job, b"0");
            }
            if let Some(score) = &score {
                let file = rustix::fs::open(OOM_SCORE, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
                rustix::io::write(file, score)?;
            }
            reset_signals()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            Ok(())
        });
    }
    let child = command.spawn()?;
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reaps every process that exits and forwards TERM and INT, until the runner itself has exited.
fn wait_for_runner(runner: Pid, signals: &SignalFd) -> io::Result<WaitStatus> {
    loop {
        if let ReapOutcome::Runner(status) = reap(Some(runner))? {
            return Ok(status);
        }
        for requested in read_stop_signals(signals, None)? {
            // The runner was not reaped, so its pid is still valid.
            let _ = kill_process(runner, requested);
        }
    }
}

/// Waits for any signal and returns those of TERM and INT that arrived.
pub(crate) fn read_stop_signals(
    signals: &SignalFd,
    time_limit: Option<Duration>,
) -> io::Result<Vec<rustix::process::Signal>> {
    let timeout = time_limit.and_then(|time_limit| Timespec::try_from(time_limit).ok());
    match poll(&mut [PollFd::new(&signals.as_fd(), PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let mut requested = Vec::new();
    while let Some(info) = signals.read_signal()? {
        if info.ssi_signo == Signal::SIGTERM as u32 {
            requested.push(rustix::process::Signal::TERM);
        } else if info.ssi_signo == Signal::SIGINT as u32 {
            requested.push(rustix::process::Signal::INT);
        }
    }
    Ok(requested)
}

pub(crate) enum ReapOutcome {
    Runner(WaitStatus),
    /// Other children may still run.
    ChildrenLeft,
    /// There is no child left.
    NoChildren,
}

pub(crate) fn reap(runner: Option<Pid>) -> io::Result<ReapOutcome> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if Some(pid) == runner => return Ok(ReapOutcome::Runner(status)),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return Ok(ReapOutcome::ChildrenLeft),
            Err(Errno::CHILD) => return Ok(ReapOutcome::NoChildren),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Kills all descendants until none is left, or until `REAP_TIMEOUT`.
pub(crate) fn kill_descendants(orders: &InitRequest, signals: &SignalFd) {
    let begun = Instant::now();
    while begun.elapsed() < REAP_TIMEOUT {
        if let Some(group) = &orders.job_group {
            let _ = fs::write(group.join("cgroup.kill"), "1");
        }
        if getpid().is_init() {
            // As the first process of the namespace: this reaches all processes in it at once, and none outside.
            let _ = rustix::process::kill_process_group(Pid::INIT, rustix::process::Signal::KILL);
        }
        // Both may have missed some processes or be unavailable. A process killed here may have just forked.
        for below in proc::descendants(getpid().as_raw_nonzero().get()).unwrap_or_default() {
            if let Ok(Some(held)) = ProcessHandle::open(below.name) {
                let _ = held.signal(rustix::process::Signal::KILL);
            }
        }
        match reap(None) {
            Ok(ReapOutcome::NoChildren) | Err(_) => return,
            Ok(ReapOutcome::ChildrenLeft | ReapOutcome::Runner(_)) => {}
        }
        let _ = read_stop_signals(signals, Some(REAP_INTERVAL));
    }
}

/// Returns the exit code as a shell reports it.
pub(crate) fn exit_code(status: WaitStatus) -> u8 {
    let code = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => i32::from(EXIT_CANNOT_START),
    };
    u8::try_from(code).unwrap_or(u8::MAX)
}

fn write_exit_record(home: &OwnedFd, word: &ExitRecord) -> io::Result<()> {
    write_file(home, EXIT_RECORD, &serde_json::to_vec(word)?)
}

/// Writes a file atomically. An entry that the job created under these names is replaced, never written through.
fn write_file(home: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = format!(".{name}.{}", getpid().as_raw_nonzero());
    remove_entry(home, &fresh);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file =
        fs::File::from(openat(home, &fresh, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)?);
    file.write_all(bytes)?;
    file.sync_all()?;
    if renameat(home, &fresh, home, name).is_err() {
        // A directory has that name. Only an empty one can be removed; any other is moved aside.
        let _ = unlinkat(home, name, AtFlags::REMOVEDIR);
        let _ = renameat(home, name, home, format!("{fresh}.aside"));
        renameat(home, &fresh, home, name)?;
    }
    Ok(rustix::fs::fsync(home)?)
}

fn remove_entry(home: &OwnedFd, name: &str) {
    let _ = unlinkat(home, name, AtFlags::empty());
    let _ = unlinkat(home, name, AtFlags::REMOVEDIR);
}
