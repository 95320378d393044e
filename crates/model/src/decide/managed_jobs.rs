//! Decision of managed jobs: the next steps of a job, from the state of its runs.
//!
//! A job is a row and each attempt of a task is a run. One pass evaluates every task once and returns, for each that
//! changes, what is written and the one action that is performed. The order guarantees:
//!
//! - an attempt is numbered before it is submitted, and submitting it again finds it: nothing is started twice;
//! - a new attempt is submitted only when the old one is over, that is removed from its hosts or fenced off them;
//! - a server that takes over reads the same record and the same runs, so it continues where the other stopped.
//!
//! Slots are not granted here: [`slots::grant`] is called in the transaction that counts them.

pub mod classify_end;
pub mod internal_error;
pub mod slots;
mod task;

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    deadline_policy::{Market, MarketRule},
    managed_job::{
        Event, RecoverySource, ScheduleState, Status,
        plan::{self, ManagedJobPlan, Shape},
        record::{NodeLocation, TaskRecord, job_status},
    },
    money::Price,
    time::{Span, Timestamp},
};

use self::{classify_end::NodeEnd, task::TaskPass};

/// Intervals after which a job is evaluated again if no hint arrives before.
const POLL_ACTIVE: Span = Span::secs(5);
const POLL_IDLE: Span = Span::secs(30);

/// A job as stored, with the observations of its tasks.
#[derive(Clone, Debug)]
pub struct ManagedJobView<'a> {
    pub plan: &'a ManagedJobPlan,
    pub cancel: Option<CancelRequest>,
    /// One for each task of the plan.
    pub tasks: Vec<TaskView>,
    /// Random number from 0 to 1, for jitter.
    pub jitter: f64,
}

/// Cancellation by a user; only a task that ended before it keeps its own final status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelRequest {
    /// Time for pending output to be written.
    pub grace: Option<Span>,
}

#[derive(Clone, Debug)]
pub struct TaskView {
    pub record: TaskRecord,
    pub observation: AttemptObservation,
    /// True if all nodes of the task are available on the spot market now.
    pub has_spot_capacity: bool,
    /// True if capacity appeared since the task began to wait for its next attempt.
    pub has_new_capacity: bool,
    /// Completed work, as the program reports it; otherwise the time in RUNNING counts.
    pub progress: Option<Span>,
    /// Time since which the nodes of the newest attempt are being released.
    pub releasing_since: Option<Timestamp>,
    /// True if other tasks wait for a launch slot.
    pub has_contended_slots: bool,
    /// Price per hour of a node of each candidate, if one is available now; empty if prices are not needed.
    pub prices: Vec<Option<Price>>,
}

/// Observed state of the run of the newest attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptObservation {
    /// There is no such run.
    Nothing,
    /// Waiting for nodes since then, with the reason.
    Queued { since: Timestamp, message: Option<String> },
    /// It has nodes, and they are being prepared.
    Provisioning,
    /// All its nodes accepted the task.
    Running { placement: Option<NodeLocation> },
    /// It is terminating, and not all its nodes are released.
    Ending,
    /// It is over: each of its nodes is released or fenced.
    Over { ends: Vec<NodeEnd>, placement: Option<NodeLocation> },
    /// It could not be read. Nothing is concluded from that.
    Unclear,
    /// It is in an invalid state.
    Impossible { what: String },
}

/// Result of the decision for the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Tasks that change or act, in order.
    pub tasks: Vec<TaskDecision>,
    /// Displayed state of the job afterwards.
    pub schedule: ScheduleState,
    pub status: Status,
    /// Tasks that wait for a launch slot afterwards: wake the pipeline that grants them.
    pub waiting_for_slot: Vec<u32>,
    /// `None`: no further pass.
    pub due_at: Option<Timestamp>,
}

/// Result of the decision for one task. Act first, then write `record` and the events in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskDecision {
    pub task: u32,
    pub record: TaskRecord,
    pub transitions: Vec<TaskTransition>,
    pub action: Option<AttemptAction>,
}

/// One transition for the event log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskTransition {
    pub from: Status,
    pub to: Status,
    pub event: Event,
    /// Cause of a recovery.
    pub source: Option<RecoverySource>,
    /// Rule of the deadline that required it.
    pub rule: Option<MarketRule>,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttemptAction {
    /// Submit the run of this attempt, or find it if it was submitted before.
    Submit(SubmitAttempt),
    /// Stop the run of this attempt. May be repeated.
    Stop(StopAttempt),
}

#[derive(Clone, Debug, PartialEq)]
pub struct SubmitAttempt {
    pub attempt: u32,
    pub candidate: u32,
    /// Market chosen by the deadline policy; `None`: as the task requests.
    pub market: Option<Market>,
    /// Locations to avoid.
    pub avoid: Vec<NodeLocation>,
    /// Location to try first; an instance there is reused if it still exists.
    pub prefer: Option<NodeLocation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopAttempt {
    pub attempt: u32,
    /// Time for pending output; `None`: as the run is configured.
    pub grace: Option<Span>,
}

/// Returns the next steps of the job at `now`.
pub fn decide(view: &ManagedJobView<'_>, now: Timestamp) -> Decision {
    let mut records: Vec<TaskRecord> = view.tasks.iter().map(|task| task.record.clone()).collect();
    let mut tasks = Vec::new();
    let mut due: Option<Timestamp> = None;
    for (index, seen) in view.tasks.iter().enumerate() {
        let Some(plan) = view.plan.tasks.get(index) else { continue };
        // Earlier tasks of this pass count: what depends on a failure is cancelled in the same pass.
        let permission = task_permission(view, &records, index, now);
        let mut pass = TaskPass::new(plan, seen, view.jitter, now);
        pass.run(permission);
        let (record, decision, next) = pass.finish(index);
        records[index] = record;
        tasks.extend(decision);
        due = earliest(due, next);
    }
    let (schedule, wants_slot) = schedule_summary(view.plan, &records, view.cancel.is_some(), now);
    let counts = |index: usize| u32::try_from(index).is_ok_and(|task| view.plan.is_primary(task));
    let counted = records.iter().enumerate().filter(|(index, _)| counts(*index));
    let status = job_status(counted.map(|(_, record)| record.status));
    let rest = if tasks.is_empty() { POLL_IDLE } else { POLL_ACTIVE };
    let due_at = (schedule != ScheduleState::Done).then(|| earliest(due, Some(now + rest))).flatten();
    Decision { tasks, schedule, status, waiting_for_slot: wants_slot, due_at }
}

fn earliest(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Permission of a task to start, or the instruction to wait or end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskPermission {
    /// It may run.
    Run,
    /// Other tasks must end first.
    Wait,
    /// It must not start, or must end. `unclaimed`: no task of the job was ever launched.
    End { why: String, graceful: Option<Span>, unclaimed: bool },
    /// It may continue until then.
    RunUntil(Timestamp),
}

fn task_permission(
    view: &ManagedJobView<'_>,
    records: &[TaskRecord],
    index: usize,
    now: Timestamp,
) -> TaskPermission {
    let unclaimed = !has_launched(records);
    if let Some(cancel) = view.cancel {
        return TaskPermission::End {
            why: "a user cancelled the job".to_owned(),
            graceful: cancel.grace,
            unclaimed,
        };
    }
    let end = |why: String| TaskPermission::End { why, graceful: None, unclaimed: false };
    match &view.plan.shape {
        Shape::Group(_) => group_permission(view, records, index, now),
        Shape::Single | Shape::Pipeline | Shape::Dag => {
            let before = &view.plan.tasks[index].after;
            for &task in before {
                let Some(record) = usize::try_from(task).ok().and_then(|task| records.get(task)) else {
                    continue;
                };
                if record.status.is_final() && !has_succeeded(record) {
                    return end(format!(
                        "task {} ended with status {}",
                        view.plan.task_name(task),
                        record.status
                    ));
                }
            }
            let ready = are_dependencies_met(view.plan, records, index);
            if ready { TaskPermission::Run } else { TaskPermission::Wait }
        }
    }
}

fn are_dependencies_met(plan: &ManagedJobPlan, records: &[TaskRecord], index: usize) -> bool {
    plan.tasks[index].after.iter().all(|task| {
        let record = usize::try_from(*task).ok().and_then(|task| records.get(task));
        record.is_some_and(has_succeeded)
    })
}

/// Returns whether tasks that depend on this one may start.
fn has_succeeded(record: &TaskRecord) -> bool {
    let anyhow = is_planted(Bug::StartAfterFailedTask) && record.status.is_final();
    record.status == Status::Succeeded || anyhow
}

/// Returns the permission of a group member: a group starts as a whole, and ends with its primaries.
fn group_permission(
    view: &ManagedJobView<'_>,
    records: &[TaskRecord],
    index: usize,
    now: Timestamp,
) -> TaskPermission {
    let Shape::Group(group) = &view.plan.shape else { return TaskPermission::Run };
    let end = |why: String| TaskPermission::End { why, graceful: None, unclaimed: false };
    let never_began = records.iter().enumerate().find(|(other, record)| {
        *other != index
            && record.start_at.is_none()
            && matches!(record.status, Status::FailedNoResource | Status::FailedPrechecks)
    });
    if let Some((other, record)) = never_began {
        let name = u32::try_from(other).map(|task| view.plan.task_name(task)).unwrap_or_default();
        return end(format!("task {name} of its group could not be launched: {}", record.status));
    }
    let is_primary = |task: usize| u32::try_from(task).is_ok_and(|task| group.is_primary(task));
    if is_primary(index) {
        return TaskPermission::Run;
    }
    let primaries: Vec<&TaskRecord> =
        records.iter().enumerate().filter(|(task, _)| is_primary(*task)).map(|(_, record)| record).collect();
    if !primaries.iter().all(|record| record.status.is_final()) {
        return TaskPermission::Run;
    }
    let well = primaries.iter().all(|record| record.status == Status::Succeeded);
    let delay = if well { group.termination_delay.get(index).copied().unwrap_or(0) } else { 0 };
    let last = primaries.iter().filter_map(|record| record.end_at).max().unwrap_or(now);
    let until = last + Span::secs(delay);
    if now >= until {
        end("the primary tasks of its group ended".to_owned())
    } else {
        TaskPermission::RunUntil(until)
    }
}

/// Returns whether a task needs a launch slot as soon as its job exists: it has no dependencies, and something to run.
pub fn is_initially_ready(task: &plan::TaskPlan) -> bool {
    task.after.is_empty() && !task.body.is_empty()
}

/// Returns whether any task of the job was launched, so that it holds an alive slot until it is done.
pub fn has_launched(records: &[TaskRecord]) -> bool {
    records.iter().any(|record| record.has_launched() || record.schedule.holds_alive_slot())
}

/// Returns the displayed state of the job, and the tasks that need a slot.
fn schedule_summary(
    plan: &ManagedJobPlan,
    records: &[TaskRecord],
    cancelled: bool,
    now: Timestamp,
) -> (ScheduleState, Vec<u32>) {
    let mut lanes = Vec::with_capacity(records.len());
    let mut wants_slot = Vec::new();
    for (index, record) in records.iter().enumerate() {
        let first = record.schedule == ScheduleState::Waiting
            && !cancelled
            && are_dependencies_met(plan, records, index);
        let again = record.schedule == ScheduleState::AliveWaiting && !record.status.is_final();
        let due = record.next_retry_at.is_none_or(|at| at <= now);
        let waits = matches!(record.status, Status::Pending | Status::Recovering);
        if (first || again) && due && waits {
            wants_slot.extend(u32::try_from(index));
        }
        lanes.push((record.schedule, first));
    }
    (slots::job_schedule(&lanes, has_launched(records)), wants_slot)
}
