//! Detection of containers that ran out of memory.
//!
//! The engine's flag is not sufficient: Docker 20.10 on version 1 of control groups reports `OOMKilled: false` for
//! processes that the kernel killed for lack of memory. The kernel counts them in the container's control group. The
//! engine removes that group soon after the container's first process has ended, so the count is read at that moment.

use tokio::io::unix::AsyncFd;

use super::control_group::is_of_container;
use crate::{
    cgroup::Group,
    proc::{self, ProcessHandle},
};

/// Returns whether the kernel killed a process of the container for lack of memory, by the engine's flag or by the
/// kernel's count.
pub(super) fn is_oom(flag: Option<bool>, kills: u64) -> bool {
    flag == Some(true) || kills > 0
}

/// Kernel counter of a live container.
pub(super) struct KillCounter {
    first: AsyncFd<ProcessHandle>,
    group: Group,
}

impl KillCounter {
    /// Returns `None` if the process is not visible or does not belong to this container: the engine may report pids of
    /// a virtual machine, and a pid may have been reused.
    pub(super) fn open(pid: Option<i64>, container: &str) -> Option<Self> {
        let pid = pid.and_then(|pid| i32::try_from(pid).ok()).filter(|pid| *pid > 0)?;
        let first = ProcessHandle::open(proc::stat(pid).ok()??.name).ok()??;
        // Read while the process handle is open, so it is the group of the watched process.
        let group = Group::for_process(pid).ok().filter(|group| belongs_to_container(group, container))?;
        Some(Self { first: first.watch().ok()?, group })
    }

    /// Waits for the end of the first process and reads the count. Cancel-safe.
    pub(super) async fn kills_at_exit(&self) -> u64 {
        // If the process cannot be watched, the engine reports its end.
        match self.first.readable().await {
            Ok(mut ended) => ended.retain_ready(),
            Err(_) => std::future::pending().await,
        }
        self.kills()
    }

    /// Returns the current count; 0 once the group is removed.
    pub(super) fn kills(&self) -> u64 {
        self.group.oom_kills()
    }
}

/// Returns whether the group belongs to the container: engines name the group by the container's id.
fn belongs_to_container(group: &Group, container: &str) -> bool {
    let memory = group.v1_of("memory").or(group.v2.as_deref());
    memory.is_some_and(|path| is_of_container(path, container))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn an_oom_kill_is_detected_from_the_engine_or_the_kernel() {
        for (flag, kills, expected) in [
            (Some(true), 0, true),
            (Some(false), 1, true),
            (None, 2, true),
            (Some(false), 0, false),
            (None, 0, false),
        ] {
            assert_eq!(is_oom(flag, kills), expected, "{flag:?} {kills}");
        }
    }

    #[test]
    fn only_the_cgroup_of_the_container_is_read() {
        let id = "4f6a0c";
        let v2 = |path: &str| Group { v2: Some(PathBuf::from(path)), v1: Vec::new() };
        assert!(belongs_to_container(&v2("/sys/fs/cgroup/system.slice/docker-4f6a0c.scope"), id));
        assert!(belongs_to_container(&v2("/sys/fs/cgroup/machine.slice/libpod-4f6a0c.scope/container"), id));
        assert!(!belongs_to_container(&v2("/sys/fs/cgroup/system.slice/ssh.service"), id));
        assert!(!belongs_to_container(&v2("/sys/fs/cgroup/docker/4f6a0c"), ""));
        let v1 = |memory: &str| Group {
            v2: Some(PathBuf::from("/sys/fs/cgroup/unified")),
            v1: vec![("memory".to_owned(), PathBuf::from(memory))],
        };
        assert!(belongs_to_container(&v1("/sys/fs/cgroup/memory/docker/4f6a0c"), id));
        assert!(!belongs_to_container(&v1("/sys/fs/cgroup/memory"), id));
        assert!(!belongs_to_container(&Group::default(), id));
    }

    #[test]
    fn oom_kills_are_not_counted_for_a_process_outside_the_container() {
        assert!(KillCounter::open(Some(i64::from(std::process::id())), "4f6a0c").is_none());
        assert!(KillCounter::open(Some(0), "4f6a0c").is_none());
        assert!(KillCounter::open(None, "4f6a0c").is_none());
    }
}
