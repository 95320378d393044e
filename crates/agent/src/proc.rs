//! Other processes, read from `/proc` and referenced by handle.
//!
//! A pid alone does not identify a process for long: the kernel reuses it once the process was reaped. Here a process
//! is identified by pid and start time, and a signal is sent through a handle that was checked against both.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    str::FromStr,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
};
use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

/// Maximum number of bytes of an environment that are searched.
const ENVIRONMENT_MAX: u64 = 1 << 20;

/// Identity of a process until the host reboots: the pid, and the start time in clock ticks since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: i32,
    pub start: u64,
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.pid, self.start)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid process identifier: expected `PID:START`")]
pub struct ParseProcessIdError;

impl FromStr for ProcessId {
    type Err = ParseProcessIdError;

    fn from_str(text: &str) -> Result<Self, ParseProcessIdError> {
        let (pid, start) = text.split_once(':').ok_or(ParseProcessIdError)?;
        Ok(Self {
            pid: pid.parse().map_err(|_| ParseProcessIdError)?,
            start: start.parse().map_err(|_| ParseProcessIdError)?,
        })
    }
}

/// Fields of `/proc/PID/stat` that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub name: ProcessId,
    pub parent: i32,
    pub state: ProcessState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    Alive,
    /// Exited; its parent has not reaped it yet.
    Zombie,
}

/// Reads the state of a process. Returns `None` if there is no such process.
pub fn stat(pid: i32) -> io::Result<Option<Stat>> {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => parse(&text)
            .map(Some)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("invalid /proc/{pid}/stat"))),
        Err(error) if is_no_process(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Parses `/proc/PID/stat`. The program's name is in parentheses and may itself contain parentheses, spaces and line
/// ends: the last `)` counts.
fn parse(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let pid = std::str::from_utf8(text.get(..open)?).ok()?.trim().parse().ok()?;
    let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Fields are counted from the state, which is the third field in `proc(5)`.
    let state = match *fields.first()? {
        "Z" | "X" | "x" => ProcessState::Zombie,
        _ => ProcessState::Alive,
    };
    let parent = fields.get(1)?.parse().ok()?;
    let start = fields.get(19)?.parse().ok()?;
    Some(Stat { name: ProcessId { pid, start }, parent, state })
}

fn is_no_process(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// Lists every visible process. One that exits meanwhile is left out.
pub fn list() -> io::Result<Vec<Stat>> {
    let mut seen = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Ok(Some(stat)) = stat(pid) {
            seen.push(stat);
        }
    }
    Ok(seen)
}

/// Lists all living descendants of `root`, children before grandchildren.
pub fn descendants(root: i32) -> io::Result<Vec<Stat>> {
    Ok(descendants_in(root, &list()?))
}

fn descendants_in(root: i32, all: &[Stat]) -> Vec<Stat> {
    let mut children: BTreeMap<i32, Vec<&Stat>> = BTreeMap::new();
    for stat in all {
        children.entry(stat.parent).or_default().push(stat);
    }
    let mut found = Vec::new();
    let mut visited = BTreeSet::from([root]);
    let mut next = vec![root];
    // The snapshot is not atomic, so a reused pid could form a cycle: each pid is visited once.
    while let Some(parent) = next.pop() {
        for stat in children.get(&parent).into_iter().flatten() {
            if visited.insert(stat.name.pid) {
                next.push(stat.name.pid);
                if stat.state == ProcessState::Alive {
                    found.push(**stat);
                }
            }
        }
    }
    found
}

/// Returns whether a process was started with these variables, each `NAME=VALUE`. False if its environment cannot be
/// read.
pub fn was_started_with(pid: i32, variables: &[&str]) -> bool {
    let environment = environment(pid);
    variables.iter().all(|wanted| environment.split(|&byte| byte == 0).any(|one| one == wanted.as_bytes()))
}

/// Returns the value that a variable had when the process was started.
pub fn environment_variable(pid: i32, name: &str) -> Option<String> {
    let environment = environment(pid);
    let mut all = environment.split(|&byte| byte == 0);
    all.find_map(|one| {
        std::str::from_utf8(one).ok()?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned)
    })
}

/// Returns whether a process ignores a signal. False if the process does not exist.
pub fn ignores_signal(pid: i32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal.as_raw() - 1)
        .is_ok_and(|bit| mask.checked_shr(bit).is_some_and(|mask| mask & 1 == 1))
}

fn environment(pid: i32) -> Vec<u8> {
    let mut environment = Vec::new();
    if let Ok(file) = fs::File::open(format!("/proc/{pid}/environ")) {
        let _ = file.take(ENVIRONMENT_MAX).read_to_end(&mut environment);
    }
    environment
}

/// Identifier that changes with every boot of the host.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Process handle. A signal reaches exactly this process or none.
#[derive(Debug)]
pub struct ProcessHandle {
    name: ProcessId,
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Opens a handle. Returns `None` if that process has ended, also if another process has its pid now.
    pub fn open(name: ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = Pid::from_raw(name.pid) else { return Ok(None) };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The handle refers to the process that had the pid when it was opened; from here on that cannot change.
        Ok(stat(name.pid)?.filter(|stat| stat.name == name).map(|_| Self { name, fd }))
    }

    pub fn name(&self) -> ProcessId {
        self.name
    }

    /// Sends a signal. Returns `false` if the process had already ended.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(&self.fd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether the process has ended, waiting at most `patience`. A zombie has ended.
    pub fn ended(&self, time_limit: Duration) -> io::Result<bool> {
        let timeout = Timespec::try_from(time_limit).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Registers the handle with the reactor, where it becomes readable once the process has ended.
    #[expect(unsafe_code, reason = "the reactor keeps a file descriptor and must be sure that it stays open")]
    pub fn watch(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: `Held` owns its descriptor, never changes it and closes it only when dropped.
        Ok(unsafe { AsyncFd::register_with_interest(self, Interest::READABLE) }?)
    }

    /// Returns the exit status if this process is our child and exited. `None` if it was killed by a signal.
    pub fn reap(&self) -> Option<i32> {
        let id = WaitId::PidFd(self.fd.as_fd());
        waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok()??.exit_status()
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl std::os::fd::AsRawFd for ProcessHandle {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ProcessId {
        stat(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap().name
    }

    #[test]
    fn a_program_name_with_parentheses_and_spaces_is_parsed_correctly() {
        let line = b"71 (a) R 1 (b) S 42 71 71 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 1 0 98765 1 2 3";
        let read = parse(line).unwrap();
        assert_eq!(read.name, ProcessId { pid: 71, start: 98765 });
        assert_eq!((read.parent, read.state), (42, ProcessState::Alive));
        assert!(parse(b"71 (a) Z 42 71").is_none());
    }

    #[test]
    fn f33_a_reused_pid_is_not_mistaken_for_the_old_process() {
        let own = own();
        assert!(ProcessHandle::open(own).unwrap().is_some());
        let reused = ProcessId { start: own.start - 1, ..own };
        assert!(ProcessHandle::open(reused).unwrap().is_none());
    }

    #[test]
    fn a_process_that_ended_is_neither_signalled_nor_awaited() {
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let name = stat(i32::try_from(child.id()).unwrap()).unwrap().unwrap().name;
        let held = ProcessHandle::open(name).unwrap().unwrap();
        assert!(held.ended(Duration::from_secs(10)).unwrap());
        child.wait().unwrap();
        assert!(!held.signal(Signal::TERM).unwrap());
        assert!(ProcessHandle::open(name).unwrap().is_none());
    }

    /// On a full disk the exit status of the init process is the only record of a job that was killed.
    #[test]
    fn f11_exit_status_137_is_distinguished_from_a_kill_by_signal() {
        for (command, message) in [("exit 137", Some(137)), ("kill -9 $$", None)] {
            let mut child = std::process::Command::new("/bin/sh").args(["-c", command]).spawn().unwrap();
            let name = stat(i32::try_from(child.id()).unwrap()).unwrap().unwrap().name;
            let held = ProcessHandle::open(name).unwrap().unwrap();
            assert!(held.ended(Duration::from_secs(10)).unwrap());
            assert_eq!(held.reap(), message, "{command}");
            child.wait().unwrap_err();
        }
    }

    #[test]
    fn a_process_id_round_trips_through_text() {
        let name = ProcessId { pid: 12, start: 99 };
        assert_eq!(name.to_string().parse(), Ok(name));
        assert_eq!("12".parse::<ProcessId>(), Err(ParseProcessIdError));
    }

    #[test]
    fn descendants_are_found_across_generations_and_cycles_terminate() {
        let stat =
            |pid, parent| Stat { name: ProcessId { pid, start: 1 }, parent, state: ProcessState::Alive };
        let all = [stat(2, 1), stat(3, 2), stat(4, 3), stat(9, 1), stat(1, 4)];
        let mut found: Vec<i32> = descendants_in(2, &all).iter().map(|stat| stat.name.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [1, 3, 4, 9], "the odd parent of 1 brings in its other child, once");
    }

    #[test]
    fn processes_are_matched_by_their_environment_variables() {
        let own = own().pid;
        let path = format!("PATH={}", std::env::var("PATH").unwrap());
        assert!(was_started_with(own, &[&path]));
        assert!(!was_started_with(own, &[&path, "WINDLASS_TASK_ID=none"]));
    }
}
