//! Stored record of a task, and the effect of each event on it.
//!
//! One function applies an event: it steps the state machine, and writes what belongs to the transition. Times,
//! durations and counts are therefore the same for every caller, and after any restart.

use serde::{Deserialize, Serialize};

use super::{
    Event, PendingKind, RecoveryEpisode, RecoverySource, ScheduleEvent, ScheduleState, Status, step,
    step_schedule,
};
use crate::{
    deadline_policy::{Market, NodeTime},
    state_machine::{Step, words},
    time::{Span, Timestamp},
};

/// Maximum number of internal errors before a task fails.
pub const INTERNAL_ERRORS_MAX: u32 = 10;

words! {
    /// State of the newest attempt from the view of the task.
    pub enum AttemptPhase: "attempt phase" {
        /// its end was observed and handled, or there was none yet
        Resolved = "settled",
        /// it was launched, and counts
        Launched = "launched",
        /// it waited too long for nodes: once it is gone, its launch counts as refused
        Withdrawn = "withdrawn",
        /// it is no longer wanted, and must be gone before the next
        Superseded = "discarded",
    }
}

/// Location of an attempt, for avoiding or preferring it: the most exact part that is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeLocation {
    /// `backend/region/zone`, or a node pool if there are no zones.
    pub place: String,
    /// The instance itself.
    pub instance: Option<String>,
}

/// Stored state of one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskRecord {
    pub status: Status,
    pub schedule: ScheduleState,
    /// Condition that a PENDING task waits for.
    pub pending: Option<PendingKind>,
    /// Time of the first launch slot.
    pub submitted_at: Option<Stamp>,
    /// Time of the first RUNNING.
    pub start_at: Option<Stamp>,
    pub end_at: Option<Stamp>,
    pub last_recovered_at: Option<Stamp>,
    /// Microseconds in RUNNING, up to the last time it was left.
    pub job_duration: i64,
    pub recovery_count: u32,
    /// True if the open episode counts when it ends; `None`: no episode is open.
    pub episode: Option<bool>,
    pub restarts_on_errors: u32,
    pub failure_reason: Option<String>,
    /// Number of the newest attempt; 0 before the first.
    pub attempt: u32,
    /// Number of the newest attempt when the job was last resumed: later attempts belong to the resumed job.
    #[serde(default)]
    pub resumed_after: u32,
    #[serde(rename = "standing")]
    pub phase: AttemptPhase,
    /// Candidate that the newest attempt requests.
    pub candidate: u32,
    /// Candidates that were tried since the last wait, and those of them that nothing can ever fit.
    #[serde(default)]
    pub tried: Vec<u32>,
    #[serde(default)]
    pub ruled_out: Vec<u32>,
    /// Reason of the last failed launch, or of the last loss of nodes.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Location of the newest attempt, and its market.
    pub placement: Option<NodeLocation>,
    pub market: Option<Market>,
    /// Locations that the next launch avoids.
    pub blocked: Vec<NodeLocation>,
    /// Location that the next launch tries first.
    pub sought: Option<NodeLocation>,
    /// Failed launches in a row, and the time since which they fail.
    pub launch_tries: u32,
    pub waiting_since: Option<Stamp>,
    /// Attempts in a row that had running nodes and whose program could not be started there.
    #[serde(default)]
    pub failed_starts: u32,
    /// Attempts in a row whose program failed right after its start and was started again.
    #[serde(default)]
    pub early_failures: u32,
    pub next_retry_at: Option<Stamp>,
    /// Internal errors in a row, and the time of the last one.
    pub emergencies: u32,
    pub emergency_at: Option<Stamp>,
    /// Time on nodes, for the report of a task with a deadline.
    pub stretches: Vec<NodeTime>,
}

/// A time as stored: microseconds.
pub type Stamp = Timestamp;

/// An event that the state machine refuses. Nothing is written, and it is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot apply `{event}` to a task with status {status}: no such transition")]
pub struct TaskTransitionError {
    pub status: Status,
    pub event: Event,
}

impl Default for TaskRecord {
    fn default() -> Self {
        Self {
            status: Status::Pending,
            schedule: ScheduleState::Inactive,
            pending: Some(PendingKind::Queued),
            submitted_at: None,
            start_at: None,
            end_at: None,
            last_recovered_at: None,
            job_duration: 0,
            recovery_count: 0,
            episode: None,
            restarts_on_errors: 0,
            failure_reason: None,
            attempt: 0,
            resumed_after: 0,
            phase: AttemptPhase::Resolved,
            candidate: 0,
            tried: vec![],
            ruled_out: vec![],
            last_failure: None,
            placement: None,
            market: None,
            blocked: vec![],
            sought: None,
            launch_tries: 0,
            waiting_since: None,
            failed_starts: 0,
            early_failures: 0,
            next_retry_at: None,
            emergencies: 0,
            emergency_at: None,
            stretches: vec![],
        }
    }
}

impl TaskRecord {
    /// Number of the attempt before the newest, while that waits to be submitted or to start; `None` if there is none, or if
    /// the job was resumed since.
    pub fn attempt_before(&self) -> Option<u32> {
        let launches = self.schedule == ScheduleState::Launching && self.phase == AttemptPhase::Launched;
        let before = self.attempt.checked_sub(1)?;
        (launches && before > self.resumed_after).then_some(before)
    }

    /// Applies an event at `now`. `source` is the cause of a recovery; it is ignored for other events.
    pub fn apply(
        &mut self,
        event: Event,
        source: RecoverySource,
        now: Timestamp,
    ) -> Result<Step<Status>, TaskTransitionError> {
        let before = self.status;
        let taken = step(before, event);
        let after = match taken {
            Step::Refuse => return Err(TaskTransitionError { status: before, event }),
            Step::Stay => before,
            Step::To(after) => after,
        };
        self.status = after;
        if before == Status::Running && after != Status::Running {
            self.leave_running(now);
        }
        match after {
            Status::Starting => {
                self.submitted_at = self.submitted_at.or(Some(now));
                self.pending = None;
                self.next_retry_at = None;
            }
            Status::Running if before != Status::Running => self.enter_running(now),
            Status::Running | Status::Cancelling => self.pending = None,
            Status::Recovering => self.enter_recovering(event, source),
            Status::Pending => self.enter_backoff(before, event),
            Status::Succeeded
            | Status::Cancelled
            | Status::Failed
            | Status::FailedSetup
            | Status::FailedPrechecks
            | Status::FailedNoResource
            | Status::FailedController => self.record_end(now),
        }
        Ok(taken)
    }

    fn leave_running(&mut self, now: Timestamp) {
        if let Some(since) = self.last_recovered_at {
            self.job_duration = self.job_duration.saturating_add(now.since(since).0.max(0));
            if let Some(market) = self.market {
                self.stretches.push(NodeTime { market, from: since, to: now });
            }
        }
    }

    fn enter_running(&mut self, now: Timestamp) {
        self.submitted_at = self.submitted_at.or(Some(now));
        self.start_at = self.start_at.or(Some(now));
        self.last_recovered_at = Some(now);
        self.pending = None;
        self.next_retry_at = None;
        self.launch_tries = 0;
        self.waiting_since = None;
        self.blocked.clear();
        self.sought = None;
        self.tried.clear();
        self.ruled_out.clear();
        if let Some(credit) = self.episode.take() {
            self.recovery_count += RecoveryEpisode::from_stored(credit).recovery_increment();
        }
    }

    fn enter_recovering(&mut self, event: Event, source: RecoverySource) {
        self.pending = None;
        self.next_retry_at = None;
        // Another slot is not a new cause.
        if event == Event::Rescheduled {
            self.episode = Some(self.episode.unwrap_or(false));
            return;
        }
        let episode = match self.episode {
            Some(credit) => RecoveryEpisode::from_stored(credit).merge(source),
            None => RecoveryEpisode::open(source),
        };
        self.episode = Some(episode.has_credit());
    }

    fn enter_backoff(&mut self, before: Status, event: Event) {
        if event != Event::BackedOff {
            return;
        }
        let recovering = before == Status::Recovering || self.episode.is_some();
        self.pending =
            Some(if recovering { PendingKind::RecoveryBackoff } else { PendingKind::LaunchBackoff });
    }

    /// Records the end. The first end time stays, also if an internal error follows.
    fn record_end(&mut self, now: Timestamp) {
        self.end_at = self.end_at.or(Some(now));
        self.pending = None;
        self.next_retry_at = None;
        self.episode = None;
    }

    /// Applies an event to the schedule state; returns `false` if it is not permitted.
    pub fn schedule(&mut self, event: ScheduleEvent) -> bool {
        match step_schedule(self.schedule, event).status_after(self.schedule) {
            Some(after) => {
                self.schedule = after;
                true
            }
            None => false,
        }
    }

    /// Returns the record with which a finished job is resumed. A task that succeeded keeps its state; every other one
    /// waits for its first launch slot again, with all its restarts. Attempts are counted on, so that their logs stay.
    #[must_use]
    pub fn resumed(&self) -> Self {
        let resumed_after = self.attempt;
        if self.status == Status::Succeeded {
            return Self { resumed_after, ..self.clone() };
        }
        Self {
            attempt: self.attempt,
            resumed_after,
            job_duration: self.job_duration,
            recovery_count: self.recovery_count,
            ..Self::default()
        }
    }

    /// Returns whether the task was launched since the job was launched or last resumed.
    pub fn has_launched(&self) -> bool {
        self.attempt > self.resumed_after
    }

    /// Returns the time from the first launch slot to the end, or to now.
    pub fn total_duration(&self, now: Timestamp) -> Option<Span> {
        self.submitted_at.map(|from| self.end_at.unwrap_or(now).since(from))
    }

    /// Returns the time in RUNNING: neither provisioning nor waiting nor recovery.
    pub fn job_duration(&self, now: Timestamp) -> Span {
        let running = match (self.status, self.last_recovered_at) {
            (Status::Running, Some(since)) => now.since(since).0.max(0),
            (_, _) => 0,
        };
        Span(self.job_duration.saturating_add(running))
    }

    /// Returns whether the two columns form a legal pair.
    pub fn is_legal(&self) -> bool {
        super::is_legal(self.schedule, self.status, self.pending)
    }
}

/// Times and counts of a job, from those of its tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobTotals {
    pub submitted_at: Option<Timestamp>,
    /// Time at which the last task ended, once all have.
    pub end_at: Option<Timestamp>,
    pub job_duration: Span,
    pub recovery_count: u32,
}

pub fn job_totals(tasks: &[TaskRecord], now: Timestamp) -> JobTotals {
    let ended = tasks.iter().all(|task| task.end_at.is_some());
    JobTotals {
        submitted_at: tasks.iter().filter_map(|task| task.submitted_at).min(),
        end_at: tasks.iter().filter_map(|task| task.end_at).max().filter(|_| ended),
        job_duration: Span(tasks.iter().map(|task| task.job_duration(now).0).sum()),
        recovery_count: tasks.iter().map(|task| task.recovery_count).sum(),
    }
}

/// Returns the displayed status of a job: the first status that is not SUCCEEDED, among those tasks that count.
pub fn job_status(tasks: impl IntoIterator<Item = Status>) -> Status {
    tasks.into_iter().find(|status| *status != Status::Succeeded).unwrap_or(Status::Succeeded)
}
