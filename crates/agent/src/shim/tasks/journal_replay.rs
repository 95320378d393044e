//! Reconstruction of each task from the journal, and the decision how to continue it after a restart. Pure.

use std::collections::{BTreeMap, HashSet};

use windlass_api::agent::shim::TerminateRequest;
use windlass_model::{id::SubmissionId, job::Ending, task::Status};

use super::{
    task::{TaskEnd, TaskState},
    task_end, tombstones,
};
use crate::shim::{
    journal::{Damage, JournalEvent, Record},
    runtime::FoundState,
};

/// A task as reconstructed from the journal.
#[derive(Clone, Debug)]
pub(super) struct TaskHistory {
    pub(super) first_seq: u64,
    /// Its submission is in the journal.
    pub(super) submitted: bool,
    pub(super) state: TaskState,
    pub(super) stop_request: Option<TerminateRequest>,
}

#[derive(Debug, Default)]
pub(super) struct ReplayedJournal {
    pub(super) histories: BTreeMap<SubmissionId, TaskHistory>,
    /// Removed ids, with epoch and time of the removal.
    pub(super) tombstones: BTreeMap<SubmissionId, (i64, i64)>,
}

pub(super) fn replay(records: &[Record]) -> ReplayedJournal {
    let mut replayed = ReplayedJournal::default();
    for record in records {
        replayed.take(record);
    }
    replayed
}

impl ReplayedJournal {
    fn take(&mut self, record: &Record) {
        let id = record.submission;
        if record.kind.is_refusal() {
            // A refusal changed nothing.
        } else if record.kind == JournalEvent::Withdrawn {
            self.histories.remove(&id);
        } else if record.kind == JournalEvent::Removed {
            self.histories.remove(&id);
            self.tombstones.insert(id, (record.epoch, record.at));
        } else if !self.tombstones.contains_key(&id) {
            // Records after the removal are ignored.
            let transcript = self.histories.entry(id).or_insert_with(|| TaskHistory {
                first_seq: record.seq,
                submitted: false,
                state: TaskState::new(record.epoch),
                stop_request: None,
            });
            transcript.state.epoch = transcript.state.epoch.max(record.epoch);
            transcript.take(&record.kind);
        }
    }
}

impl TaskHistory {
    fn take(&mut self, kind: &JournalEvent) {
        let state = &mut self.state;
        match kind {
            JournalEvent::Submitted => self.submitted = true,
            JournalEvent::Admitted | JournalEvent::RefusedEpoch { .. } | JournalEvent::RefusedSpec { .. } => {
            }
            JournalEvent::Moved { to } => state.status = state.status.max(*to),
            JournalEvent::GpuAcquired { gpus } => {
                state.held.gpus.clone_from(gpus);
                state.gpus.clone_from(gpus);
            }
            JournalEvent::GpuReleased { .. } => state.held.gpus.clear(),
            JournalEvent::KeyAdded => state.held.keys = true,
            JournalEvent::KeyRemoved => state.held.keys = false,
            JournalEvent::Mounted => state.held.mounts = true,
            JournalEvent::Unmounted => state.held.mounts = false,
            JournalEvent::ContainerCreated { handle } => state.container.handle = Some(handle.clone()),
            JournalEvent::ContainerStarting { boot } => state.container.starting = Some(boot.clone()),
            JournalEvent::ContainerStarted { ports } => {
                state.container.started = true;
                state.ports = Some(ports.clone());
                state.status = state.status.max(Status::Running);
            }
            JournalEvent::ContainerExited { .. } => state.container.exited = true,
            JournalEvent::TerminateRequested { reason, message, timeout } => {
                self.stop_request.get_or_insert_with(|| TerminateRequest {
                    termination_reason: reason.clone(),
                    termination_message: message.clone(),
                    timeout: *timeout,
                });
            }
            JournalEvent::Terminated { end } => {
                state.status = Status::Terminated;
                state.end = Some(end.clone());
            }
            JournalEvent::Withdrawn | JournalEvent::Removed => {}
        }
    }

    /// Returns whether records of this task may be among the lost ones.
    pub(super) fn may_be_incomplete(&self, damage: &[Damage]) -> bool {
        !self.submitted || damage.iter().any(|damage| damage.after_seq >= self.first_seq)
    }
}

/// Action for a task after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RecoveryAction {
    /// It has ended; nothing to do.
    Keep,
    /// It has ended, but something of it still runs.
    RemoveOrphan,
    /// Continue at the present status: every step may be repeated.
    Resume,
    /// A container was started; waiting for it determines the rest.
    Watch(FoundState),
    /// It was started, or may have been, and nothing of it exists.
    Finish(TaskEnd),
}

pub(super) fn recovery_action(
    state: &TaskState,
    found: Option<FoundState>,
    same_boot: bool,
    doubtful: bool,
) -> RecoveryAction {
    if state.status.is_final() {
        return match found {
            Some(FoundState::Running) => RecoveryAction::RemoveOrphan,
            Some(FoundState::Created | FoundState::Ended) | None => RecoveryAction::Keep,
        };
    }
    match found {
        Some(found @ (FoundState::Running | FoundState::Ended)) => RecoveryAction::Watch(found),
        Some(FoundState::Created) if !state.container.started => RecoveryAction::Resume,
        None if state.container.starting.is_none() && !doubtful => RecoveryAction::Resume,
        None if state.container.starting.is_none() => RecoveryAction::Finish(task_end::for_lost_journal()),
        Some(FoundState::Created) | None if same_boot => RecoveryAction::Finish(task_end::for_vanished()),
        Some(FoundState::Created) | None => RecoveryAction::Finish(Ending::host_reboot().into()),
    }
}

/// Maximum number of refusals kept when the journal is compacted; they are informational.
const REFUSALS_KEPT_MAX: usize = 1000;

/// Returns the records that a compacted journal keeps: existing tasks, tombstones that are not too old, the last
/// refusals.
pub(super) fn retained_records(records: Vec<Record>, now_us: i64) -> Vec<Record> {
    let replayed = replay(&records);
    let mut refusals = 0;
    let mut tombstones = HashSet::new();
    // From the end: of several records of a kind the last ones count.
    let mut kept: Vec<_> = records
        .into_iter()
        .rev()
        .filter(|record| {
            if record.kind.is_refusal() {
                refusals += 1;
                refusals <= REFUSALS_KEPT_MAX
            } else if record.kind == JournalEvent::Removed {
                record.at >= now_us.saturating_sub(tombstones::AGE_US_MAX)
                    && tombstones.len() < tombstones::TOMBSTONES_MAX
                    && tombstones.insert(record.submission)
            } else {
                replayed.histories.contains_key(&record.submission)
            }
        })
        .collect();
    kept.reverse();
    kept
}
