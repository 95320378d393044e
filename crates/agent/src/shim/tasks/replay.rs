//! What a journal says of each task, and what to do with a task after a restart. Pure.

use std::collections::{BTreeMap, HashSet};

use windlass_api::agent::shim::TerminateRequest;
use windlass_model::{id::SubmissionId, job::Ending, task::Status};

use super::{
    ending, graves,
    task::{End, TaskState},
};
use crate::shim::{
    journal::{Damage, Kind, Record},
    runtime::FoundState,
};

/// A task as the journal tells it.
#[derive(Clone, Debug)]
pub(super) struct TaskHistory {
    pub(super) first_seq: u64,
    /// Its submission is in the journal.
    pub(super) submitted: bool,
    pub(super) state: TaskState,
    pub(super) ask: Option<TerminateRequest>,
}

#[derive(Debug, Default)]
pub(super) struct ReplayedJournal {
    pub(super) stories: BTreeMap<SubmissionId, TaskHistory>,
    /// Removed ids, the epoch and the moment.
    pub(super) graves: BTreeMap<SubmissionId, (i64, i64)>,
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
            // What was refused changed nothing.
        } else if record.kind == Kind::Withdrawn {
            self.stories.remove(&id);
        } else if record.kind == Kind::Removed {
            self.stories.remove(&id);
            self.graves.insert(id, (record.epoch, record.at));
        } else if !self.graves.contains_key(&id) {
            // A record after the removal can only be a last breath.
            let story = self.stories.entry(id).or_insert_with(|| TaskHistory {
                first_seq: record.seq,
                submitted: false,
                state: TaskState::new(record.epoch),
                ask: None,
            });
            story.state.epoch = story.state.epoch.max(record.epoch);
            story.take(&record.kind);
        }
    }
}

impl TaskHistory {
    fn take(&mut self, kind: &Kind) {
        let state = &mut self.state;
        match kind {
            Kind::Submitted => self.submitted = true,
            Kind::Admitted | Kind::RefusedEpoch { .. } | Kind::RefusedSpec { .. } => {}
            Kind::Moved { to } => state.status = state.status.max(*to),
            Kind::GpuAcquired { gpus } => {
                state.held.gpus.clone_from(gpus);
                state.gpus.clone_from(gpus);
            }
            Kind::GpuReleased { .. } => state.held.gpus.clear(),
            Kind::KeyAdded => state.held.keys = true,
            Kind::KeyRemoved => state.held.keys = false,
            Kind::Mounted => state.held.mounts = true,
            Kind::Unmounted => state.held.mounts = false,
            Kind::ContainerCreated { handle } => state.container.handle = Some(handle.clone()),
            Kind::ContainerStarting { boot } => state.container.starting = Some(boot.clone()),
            Kind::ContainerStarted { ports } => {
                state.container.started = true;
                state.ports = Some(ports.clone());
                state.status = state.status.max(Status::Running);
            }
            Kind::ContainerExited { .. } => state.container.exited = true,
            Kind::TerminateAsked { reason, message, timeout } => {
                self.ask.get_or_insert_with(|| TerminateRequest {
                    termination_reason: reason.clone(),
                    termination_message: message.clone(),
                    timeout: *timeout,
                });
            }
            Kind::Terminated { end } => {
                state.status = Status::Terminated;
                state.end = Some(end.clone());
            }
            Kind::Withdrawn | Kind::Removed => {}
        }
    }

    /// Whether records of this task may be among the lost ones.
    pub(super) fn may_be_incomplete(&self, damage: &[Damage]) -> bool {
        !self.submitted || damage.iter().any(|damage| damage.after_seq >= self.first_seq)
    }
}

/// What to do with a task after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is over; nothing to do.
    Keep,
    /// It is over, yet something of it runs.
    RemoveStray,
    /// Go on where it was: every step may be repeated.
    Resume,
    /// A container was started; waiting for it tells the rest.
    Watch(FoundState),
    /// It was started, or nobody can know that it was not, and there is nothing.
    Finish(End),
}

pub(super) fn verdict(
    state: &TaskState,
    found: Option<FoundState>,
    same_boot: bool,
    doubtful: bool,
) -> Verdict {
    if state.status.is_final() {
        return match found {
            Some(FoundState::Running) => Verdict::RemoveStray,
            Some(FoundState::Created | FoundState::Ended) | None => Verdict::Keep,
        };
    }
    match found {
        Some(found @ (FoundState::Running | FoundState::Ended)) => Verdict::Watch(found),
        Some(FoundState::Created) if !state.container.started => Verdict::Resume,
        None if state.container.starting.is_none() && !doubtful => Verdict::Resume,
        None if state.container.starting.is_none() => Verdict::Finish(ending::for_lost_journal()),
        Some(FoundState::Created) | None if same_boot => Verdict::Finish(ending::for_vanished()),
        Some(FoundState::Created) | None => Verdict::Finish(Ending::host_reboot().into()),
    }
}

/// Refusals that are kept when the journal is rewritten; they are for people and checkers.
const REFUSALS_KEPT_MAX: usize = 1000;

/// What a rewritten journal keeps: living tasks, graves that are not too old, the last refusals.
pub(super) fn retained_records(records: Vec<Record>, now_us: i64) -> Vec<Record> {
    let replayed = replay(&records);
    let mut refusals = 0;
    let mut graves = HashSet::new();
    // From the end: of several of a kind the last ones count.
    let mut kept: Vec<_> = records
        .into_iter()
        .rev()
        .filter(|record| {
            if record.kind.is_refusal() {
                refusals += 1;
                refusals <= REFUSALS_KEPT_MAX
            } else if record.kind == Kind::Removed {
                record.at >= now_us.saturating_sub(graves::AGE_US_MAX)
                    && graves.len() < graves::TOMBSTONES_MAX
                    && graves.insert(record.submission)
            } else {
                replayed.stories.contains_key(&record.submission)
            }
        })
        .collect();
    kept.reverse();
    kept
}
