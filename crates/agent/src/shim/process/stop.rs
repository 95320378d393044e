//! End of a task: stop, kill and removal.

use std::{
    collections::BTreeSet,
    fs, io,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use windlass_model::id::SubmissionId;

use super::{
    OUTPUT_FILE, RuntimeError, Shared, TaskDir, environment, first_process, runtime_error,
    state_file::{ProcessRecord, ignore_not_found},
};
use crate::proc::{self, ProcessHandle, ProcessId, ProcessState};

/// Time for an init to reap its killed job and to write the exit record.
const EXIT_RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// A process that still exists this long after it was killed is stuck in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);
const KILL_RETRY_DELAY: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error)]
#[error("{count} processes were killed but did not end, the first is {first}")]
struct UnkillableProcesses {
    count: usize,
    first: ProcessId,
}

impl Shared {
    /// Kills the job first, so that init can record its exit, and then everything that remains.
    pub(super) fn kill(&self, dir: &TaskDir) -> Result<(), RuntimeError> {
        if let Some(init) =
            first_process(dir).map_err(|error| runtime_error("cannot find the task's process", error))?
            && !init.ended(Duration::ZERO).unwrap_or(true)
        {
            self.kill_job(dir, &init);
            has_ended_within(&init, EXIT_RECORD_TIMEOUT);
        }
        self.end(dir)
    }

    fn kill_job(&self, dir: &TaskDir, init: &ProcessHandle) {
        let group = self.groups.find(&dir.id.to_string());
        if let Some(job) = group.group.v2.as_ref().map(|v2| v2.join("job/cgroup.kill")) {
            let _ = fs::write(job, "1");
        }
        for below in proc::descendants(init.name().pid).unwrap_or_default() {
            if let Ok(Some(held)) = ProcessHandle::open(below.name) {
                let _ = held.signal(Signal::KILL);
            }
        }
    }

    /// Kills the processes of the task until none remains.
    pub(super) fn end(&self, dir: &TaskDir) -> Result<(), RuntimeError> {
        let begun = Instant::now();
        loop {
            let remaining = self
                .remaining(dir)
                .map_err(|error| runtime_error("cannot list the task's processes", error))?;
            let Some(&first) = remaining.first() else { return Ok(()) };
            if begun.elapsed() > KILL_TIMEOUT {
                let source = Box::new(UnkillableProcesses { count: remaining.len(), first });
                return Err(RuntimeError::Failed { what: "failed to kill the task".to_owned(), source });
            }
            self.groups.find(&dir.id.to_string()).kill();
            for name in remaining {
                if let Ok(Some(held)) = ProcessHandle::open(name) {
                    let _ = held.signal(Signal::KILL);
                    held.reap();
                }
            }
            std::thread::sleep(KILL_RETRY_DELAY);
        }
    }

    /// Returns all live processes of the task: init and its descendants, members of its groups, and processes with its
    /// marks.
    pub(super) fn remaining(&self, dir: &TaskDir) -> io::Result<BTreeSet<ProcessId>> {
        let all = proc::list()?;
        let mut found = BTreeSet::new();
        if let Some(init) = first_process(dir)? {
            init.reap();
            if !init.ended(Duration::ZERO)? {
                found.insert(init.name());
                found.extend(proc::descendants(init.name().pid)?.iter().map(|stat| stat.name));
            }
        }
        let members = self.groups.find(&dir.id.to_string()).members();
        let marks =
            environment::task_marks(&self.home_id, dir.id).map(|(name, value)| format!("{name}={value}"));
        let marks = marks.each_ref().map(String::as_str);
        let alive = all.iter().filter(|stat| stat.state == ProcessState::Alive).map(|stat| stat.name);
        found.extend(
            alive.filter(|name| members.contains(&name.pid) || proc::was_started_with(name.pid, &marks)),
        );
        Ok(found)
    }

    /// Returns the tasks of this shim whose marks any process has.
    pub(super) fn marked_tasks(&self) -> io::Result<BTreeSet<SubmissionId>> {
        let home = format!("WINDLASS_HOME_ID={}", self.home_id);
        let alive = proc::list()?.into_iter().filter(|stat| stat.state == ProcessState::Alive);
        Ok(alive
            .filter(|stat| proc::was_started_with(stat.name.pid, &[&home]))
            .filter_map(|stat| proc::environment_variable(stat.name.pid, "WINDLASS_TASK_ID")?.parse().ok())
            .collect())
    }

    pub(super) fn remove(&self, dir: &TaskDir) -> Result<(), RuntimeError> {
        self.end(dir)?;
        self.groups
            .find(&dir.id.to_string())
            .remove()
            .map_err(|error| runtime_error("failed to remove the task's control groups", error))?;
        let record =
            ProcessRecord::load(dir).map_err(|error| runtime_error("cannot read the task record", error))?;
        for made in record.iter().flat_map(|record| record.made.iter().rev()) {
            // Removing a directory detaches the mounts of other tasks on it.
            if !ProcessRecord::is_used_by_others(&self.home, dir, made) {
                let _ = fs::remove_dir(made).or_else(|_| remove_empty_file(made));
            }
        }
        ignore_not_found(fs::remove_dir_all(dir.scratch()))
            .and_then(|()| ignore_not_found(fs::remove_dir_all(dir.private())))
            .and_then(|()| ignore_not_found(fs::remove_file(dir.root().join(OUTPUT_FILE))))
            .and_then(|()| self.release_user(dir, record.and_then(|record| record.user)))
            .and_then(|()| ProcessRecord::delete(dir))
            .map_err(|error| runtime_error("failed to remove the task's files", error))
    }
}

fn remove_empty_file(path: &std::path::Path) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    if metadata.is_file() && metadata.len() == 0 {
        return fs::remove_file(path);
    }
    Ok(())
}

fn has_ended_within(held: &ProcessHandle, timeout: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let left = timeout.saturating_sub(begun.elapsed());
        match held.ended(left) {
            Ok(true) => return true,
            Ok(false) if begun.elapsed() < timeout => {}
            Ok(false) | Err(_) => return false,
        }
    }
}
