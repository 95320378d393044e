//! Processes of the job, and signals to all of them.
//!
//! The commands lead a separate session. A process may leave it, and one whose parent exited is adopted by the init
//! above the runner. So the job's processes are: its session, orphans adopted by that init, and all descendants of
//! these. Never the runner itself, and never SSH sessions.

use std::collections::BTreeSet;

use rustix::process::{Signal, getppid};

use crate::{isolation, proc};

/// Rounds of killing: each may find processes that were forked meanwhile. Processes that survive them end with the
/// init.
const KILL_ROUNDS: usize = 32;

/// Properties of a process that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessEntry {
    name: proc::ProcessId,
    parent: i32,
    session: i32,
}

/// Processes of one job.
#[derive(Clone, Copy, Debug)]
pub struct ProcessTree {
    session: i32,
    own: i32,
    /// Parent of the runner, if it is the init that adopts the orphans of this task.
    init: Option<i32>,
}

impl ProcessTree {
    pub fn new(session: i32) -> Self {
        let own = rustix::process::getpid().as_raw_pid();
        Self { session, own, init: init_parent() }
    }

    /// Sends a signal to the session, as a terminal would on Ctrl-C but to all of its groups. Returns the processes
    /// that it reached.
    pub fn signal_session(&self, signal: Signal) -> Vec<proc::ProcessId> {
        let members =
            list_processes().into_iter().filter(|one| one.session == self.session).map(|one| one.name);
        members.filter(|name| send_signal(*name, signal)).collect()
    }

    /// Returns whether the leader of the session is the only one of the signalled processes that still lives, and
    /// ignores the signal. A leader with a trap for it does not ignore it.
    pub fn is_ignored_by_leader(&self, signal: Signal, signalled: &[proc::ProcessId]) -> bool {
        let alive = list_processes();
        let mut left = signalled.iter().filter(|name| alive.iter().any(|one| one.name == **name));
        let only_leader = left.next().is_some_and(|name| name.pid == self.session) && left.next().is_none();
        only_leader && proc::ignores_signal(self.session, signal)
    }

    /// Sends SIGHUP to the leader. An interactive shell then exits, together with what it has started since.
    pub fn hang_up(&self) {
        let leader = list_processes().into_iter().find(|one| one.name.pid == self.session);
        leader.map(|leader| send_signal(leader.name, Signal::HUP));
    }

    /// Returns whether any process of the session lives.
    pub fn has_members(&self) -> bool {
        list_processes().iter().any(|one| one.session == self.session)
    }

    /// Kills every process of the job and returns when none is left, or after some rounds.
    pub fn kill(&self) {
        for _ in 0..KILL_ROUNDS {
            let killed = self
                .select(&list_processes())
                .into_iter()
                .filter(|name| send_signal(*name, Signal::KILL))
                .count();
            if killed == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Returns the processes of the job, parents before their children: a shell that outlives its child reports how the
    /// child ended.
    fn select(&self, all: &[ProcessEntry]) -> Vec<proc::ProcessId> {
        let is_root = |one: &ProcessEntry| one.session == self.session || Some(one.parent) == self.init;
        // SSH sessions are also descendants of the runner: it is not a root here, whatever its session.
        let others = || all.iter().filter(|one| one.name.pid != self.own);
        let mut chosen: BTreeSet<i32> = others().filter(|one| is_root(one)).map(|one| one.name.pid).collect();
        loop {
            let is_new =
                |one: &&ProcessEntry| chosen.contains(&one.parent) && !chosen.contains(&one.name.pid);
            let more: Vec<i32> = others().filter(is_new).map(|one| one.name.pid).collect();
            if more.is_empty() {
                break;
            }
            chosen.extend(more);
        }
        let mut ordered = Vec::with_capacity(chosen.len());
        while !chosen.is_empty() {
            let is_next =
                |one: &&ProcessEntry| chosen.contains(&one.name.pid) && !chosen.contains(&one.parent);
            let generation: Vec<proc::ProcessId> = others().filter(is_next).map(|one| one.name).collect();
            if generation.is_empty() {
                // Processes that name each other as parents: pids were reused while the list was read.
                ordered.extend(others().filter(|one| chosen.contains(&one.name.pid)).map(|one| one.name));
                break;
            }
            generation.iter().for_each(|name| {
                chosen.remove(&name.pid);
            });
            ordered.extend(generation);
        }
        ordered
    }
}

/// Returns the parent process if it is the same program: then it is the init, and all its other children are orphans of
/// this task.
fn init_parent() -> Option<i32> {
    use std::os::unix::fs::MetadataExt;
    let parent = getppid()?.as_raw_pid();
    if parent == 1 && std::env::var_os(isolation::CONFINED_VARIABLE).is_some() {
        // The first process of these namespaces, which other processes cannot inspect.
        return Some(parent);
    }
    let file =
        |pid: &str| std::fs::metadata(format!("/proc/{pid}/exe")).ok().map(|meta| (meta.dev(), meta.ino()));
    (file("self")? == file(&parent.to_string())?).then_some(parent)
}

fn list_processes() -> Vec<ProcessEntry> {
    let all = proc::list().unwrap_or_default();
    let alive = all.into_iter().filter(|stat| stat.state == proc::ProcessState::Alive);
    alive
        .filter_map(|stat| {
            // Not rustix's function: it does not accept session 0, which kernel threads have.
            let pid = nix::unistd::Pid::from_raw(stat.name.pid);
            let session = nix::unistd::getsid(Some(pid)).ok()?.as_raw();
            Some(ProcessEntry { name: stat.name, parent: stat.parent, session })
        })
        .collect()
}

/// Returns whether the signal was delivered.
fn send_signal(name: proc::ProcessId, signal: Signal) -> bool {
    match proc::ProcessHandle::open(name) {
        Ok(Some(held)) => held.signal(signal).unwrap_or(false),
        Ok(None) | Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process_entry(pid: i32, parent: i32, session: i32) -> ProcessEntry {
        ProcessEntry { name: proc::ProcessId { pid, start: 1 }, parent, session }
    }

    #[test]
    fn the_processes_of_a_job_are_its_session_the_orphans_and_their_descendants() {
        let tree = ProcessTree { session: 20, own: 11, init: Some(10) };
        let all = [
            process_entry(1, 0, 1),
            process_entry(10, 1, 10),
            process_entry(11, 10, 10),
            // The job: a shell, a child in the session, one that left it, and its child.
            process_entry(20, 11, 20),
            process_entry(21, 20, 20),
            process_entry(22, 21, 22),
            process_entry(23, 22, 23),
            // Forked twice and adopted by the init.
            process_entry(30, 10, 30),
            process_entry(31, 30, 30),
            // The shell of an SSH session, and other processes of the host.
            process_entry(40, 11, 40),
            process_entry(41, 40, 40),
            process_entry(50, 1, 50),
        ];
        let chosen: Vec<i32> = tree.select(&all).into_iter().map(|name| name.pid).collect();
        assert_eq!(chosen, [20, 30, 21, 31, 22, 23]);
        let without_init = ProcessTree { init: None, ..tree };
        let chosen: Vec<i32> = without_init.select(&all).into_iter().map(|name| name.pid).collect();
        assert_eq!(chosen, [20, 21, 22, 23]);
    }

    #[test]
    fn parents_come_before_their_children_whatever_their_pids() {
        let tree = ProcessTree { session: 20, own: 11, init: None };
        let all = [
            process_entry(2, 3, 20),
            process_entry(3, 20, 20),
            process_entry(11, 1, 11),
            process_entry(20, 11, 20),
            // Two entries read at different times.
            process_entry(60, 61, 20),
            process_entry(61, 60, 20),
        ];
        let chosen: Vec<i32> = tree.select(&all).into_iter().map(|name| name.pid).collect();
        assert_eq!(chosen, [20, 3, 2, 60, 61]);
    }

    #[test]
    fn a_parent_that_runs_another_program_is_not_the_init_process() {
        assert_eq!(init_parent(), None, "the parent of a test is its runner");
    }
}
