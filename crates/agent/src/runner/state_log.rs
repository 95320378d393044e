//! The job's states, stored in a file, one per line. The end is on disk before it is reported. The others are only written:
//! they matter to a shim after the end of the runner, but not after that of the host, which ends the job too.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};
use windlass_api::agent::runner::JobState;

use super::job_end::{JobEnd, JobStateName};
use crate::{spool::Timestamps, task_dir::STATES};

/// Bytes reserved for the few states of a job, so that they can be written to a full disk.
const RESERVE_BYTES: u64 = 32 * 1024;

/// States after which the job goes on.
const CONTINUES: [JobStateName; 2] = [JobStateName::Running, JobStateName::Ready];

#[derive(Debug)]
pub struct StateLog {
    inner: Mutex<Inner>,
    stamps: Arc<Timestamps>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    /// At most three: `running`, `ready` and an end.
    message: Vec<JobState>,
}

impl StateLog {
    pub fn open(run: &Path, stamps: Arc<Timestamps>) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(run.join(STATES))?;
        // A job may fill the disk, with its output for instance, and that is what must be reported then. If the file
        // system cannot reserve space, the state is available only while the runner lives.
        if let Err(error) = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, RESERVE_BYTES) {
            tracing::debug!(%error, "failed to reserve space for the job's states");
        }
        Ok(Self { inner: Mutex::new(Inner { file, message: Vec::new() }), stamps })
    }

    pub fn running(&self) {
        self.record_name(JobStateName::Running);
    }

    /// Records that the job is prepared and waits for its other nodes.
    pub fn ready(&self) {
        self.record_name(JobStateName::Ready);
    }

    fn record_name(&self, state: JobStateName) {
        let state = JobEnd { state, reason: "", message: String::new(), detail: None, exit_status: None };
        self.say(state);
    }

    /// Stores and reports a state. It is reported even if the disk refuses the write.
    pub fn say(&self, what: JobEnd) {
        let mut inner = self.inner.lock();
        // Held until the state is visible, so that no reader advances past its time.
        let issued = self.stamps.issue();
        let state = JobState {
            state: what.state.as_str().to_owned(),
            timestamp: issued.at(),
            termination_reason: what.reason.to_owned(),
            termination_message: what.message,
            detail: what.detail.map(str::to_owned),
            exit_status: what.exit_status,
        };
        let is_end = !CONTINUES.contains(&what.state);
        if let Err(error) = append(&mut inner.file, &state, is_end) {
            tracing::error!(%error, state = state.state, "failed to store a state of the job");
        }
        inner.message.push(state);
    }

    /// Returns all states, in order.
    pub fn all(&self) -> Vec<JobState> {
        self.inner.lock().message.clone()
    }

    /// Returns the last state, if it is an end.
    pub fn end(&self) -> Option<JobState> {
        let inner = self.inner.lock();
        let goes_on = CONTINUES.map(JobStateName::as_str);
        inner.message.last().filter(|state| !goes_on.contains(&state.state.as_str())).cloned()
    }
}

fn append(file: &mut File, state: &JobState, is_end: bool) -> io::Result<()> {
    let mut line = serde_json::to_vec(state)?;
    line.push(b'\n');
    file.write_all(&line)?;
    // The commands have been started, and their output waits for this.
    if is_end { file.sync_data() } else { Ok(()) }
}
