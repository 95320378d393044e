//! The brain of managed jobs: from what its runs do to what becomes of a job.
//!
//! A job is a row and each attempt of a task is a run. One pass looks at every task once and says, for each that
//! changes, what is written and the one thing that is done. The order keeps the promises:
//!
//! - an attempt is numbered before it is made, and making it again finds it: nothing is started twice;
//! - a new attempt is made only when the old one is over, that is gone from its hosts or fenced off them;
//! - whoever takes over sees the same record and the same runs, so it goes on where the other stopped.
//!
//! Slots are not given here: [`slots::grant`] is asked in the transaction that counts them.

pub mod emergency;
pub mod judge;
pub mod slots;
mod task;

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    managed_job::{
        Event, RecoverySource, Schedule, Status,
        plan::{self, ManagedJobPlan, Shape},
        record::{NodeLocation, TaskRecord, job_status},
    },
    money::Price,
    spot::Market,
    time::{Span, Timestamp},
};

use self::{judge::NodeEnd, task::TaskPass};

/// How soon a job is looked at again when no hint comes first.
const POLL_ACTIVE: Span = Span::secs(5);
const POLL_IDLE: Span = Span::secs(30);

/// A job as stored, with what was seen of its tasks.
#[derive(Clone, Debug)]
pub struct ManagedJobView<'a> {
    pub plan: &'a ManagedJobPlan,
    pub cancel: Option<CancelRequest>,
    /// One for each task of the plan.
    pub tasks: Vec<TaskView>,
    /// A random number from 0 to 1, for jitter.
    pub dice: f64,
}

/// A user's wish, which only an end that came before it outlives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelRequest {
    /// Let pending output be written, for so long.
    pub graceful: Option<Span>,
}

#[derive(Clone, Debug)]
pub struct TaskView {
    pub record: TaskRecord,
    pub seen: AttemptObservation,
    /// All nodes of the task could be had on the spot market now.
    pub spot_capacity: bool,
    /// Capacity appeared since the task began to wait for its next try.
    pub new_capacity: bool,
    /// Work that is done, as the program reports it; else the time in RUNNING counts.
    pub progress: Option<Span>,
    /// Since when the nodes of the newest attempt are being released.
    pub releasing_since: Option<Timestamp>,
    /// What a node of each candidate costs in an hour, where one could be had now; empty where nobody asks.
    pub prices: Vec<Option<Price>>,
}

/// What is known of the run of the newest attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptObservation {
    /// There is no such run.
    Nothing,
    /// It waits for nodes since then, and says why.
    Queued { since: Timestamp, said: Option<String> },
    /// It has nodes, and they are being prepared.
    Provisioning,
    /// All its nodes were handed the task.
    Running { placement: Option<NodeLocation> },
    /// It ends, and not all its nodes are released.
    Ending,
    /// It is over: every node of it is released or fenced.
    Over { ends: Vec<NodeEnd>, placement: Option<NodeLocation> },
    /// It could not be read. No verdict follows from that.
    Unclear,
    /// It is in a state that does not exist.
    Impossible { what: String },
}

/// What becomes of the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Tasks that change or act, in their order.
    pub tasks: Vec<TaskDecision>,
    /// What the job shows afterwards.
    pub schedule: Schedule,
    pub status: Status,
    /// Tasks that wait for a launch slot afterwards: wake whoever grants them.
    pub wants_slot: Vec<u32>,
    /// `None`: never again.
    pub due_at: Option<Timestamp>,
}

/// What becomes of one task. Act first, then write `record` and the events in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskDecision {
    pub task: u32,
    pub record: TaskRecord,
    pub moves: Vec<TaskTransition>,
    pub act: Option<AttemptAction>,
}

/// One transition for the event log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskTransition {
    pub from: Status,
    pub to: Status,
    pub event: Event,
    /// Of a recovery: who caused it.
    pub source: Option<RecoverySource>,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttemptAction {
    /// Make the run of this attempt, or find it where it was made before.
    Submit(SubmitAttempt),
    /// End the run of this attempt. May be repeated.
    Stop(StopAttempt),
}

#[derive(Clone, Debug, PartialEq)]
pub struct SubmitAttempt {
    pub attempt: u32,
    pub candidate: u32,
    /// What the deadline's policy chose; `None`: as the task asks.
    pub market: Option<Market>,
    /// Places to stay away from.
    pub avoid: Vec<NodeLocation>,
    /// The place to try first; a machine of it is reused where it is still there.
    pub prefer: Option<NodeLocation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopAttempt {
    pub attempt: u32,
    /// How long pending output may take; `None`: as the run itself says.
    pub graceful: Option<Span>,
}

/// What becomes of the job at `now`.
pub fn decide(view: &ManagedJobView<'_>, now: Timestamp) -> Decision {
    let mut records: Vec<TaskRecord> = view.tasks.iter().map(|task| task.record.clone()).collect();
    let mut tasks = Vec::new();
    let mut due: Option<Timestamp> = None;
    for (index, seen) in view.tasks.iter().enumerate() {
        let Some(plan) = view.plan.tasks.get(index) else { continue };
        // Earlier tasks of this pass count: what follows a failure is cancelled in the same breath.
        let turn = turn(view, &records, index, now);
        let mut pass = TaskPass::new(plan, seen, view.dice, now);
        pass.run(turn);
        let (record, decision, next) = pass.finish(index);
        records[index] = record;
        tasks.extend(decision);
        due = earlier(due, next);
    }
    let (schedule, wants_slot) = schedule_summary(view.plan, &records, view.cancel.is_some(), now);
    let counts = |index: usize| u32::try_from(index).is_ok_and(|task| view.plan.is_primary(task));
    let counted = records.iter().enumerate().filter(|(index, _)| counts(*index));
    let status = job_status(counted.map(|(_, record)| record.status));
    let rest = if tasks.is_empty() { POLL_IDLE } else { POLL_ACTIVE };
    let due_at = (schedule != Schedule::Done).then(|| earlier(due, Some(now + rest))).flatten();
    Decision { tasks, schedule, status, wants_slot, due_at }
}

fn earlier(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Whether a task may begin, must wait, or must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskPermission {
    /// It may run.
    Run,
    /// Others come first.
    Wait,
    /// It must not begin, or must end. `unclaimed`: nothing of the job was ever launched.
    End { why: String, graceful: Option<Span>, unclaimed: bool },
    /// It may go on until then.
    RunUntil(Timestamp),
}

fn turn(view: &ManagedJobView<'_>, records: &[TaskRecord], index: usize, now: Timestamp) -> TaskPermission {
    let unclaimed = !has_launched(records);
    if let Some(cancel) = view.cancel {
        return TaskPermission::End {
            why: "a user cancelled the job".to_owned(),
            graceful: cancel.graceful,
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
                    return end(format!("task {} ended as {}", view.plan.task_name(task), record.status));
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

/// Whoever follows this task may begin.
fn has_succeeded(record: &TaskRecord) -> bool {
    let anyhow = is_planted(Bug::StartAfterFailedTask) && record.status.is_final();
    record.status == Status::Succeeded || anyhow
}

/// A group begins as a whole, and ends with its primaries.
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

/// Whether a task wants a launch slot from the moment its job is there: it follows nobody, and has something to run.
pub fn is_initially_ready(task: &plan::TaskPlan) -> bool {
    task.after.is_empty() && !task.body.is_empty()
}

/// Something of the job was launched once, so it holds an alive slot until it is done.
pub fn has_launched(records: &[TaskRecord]) -> bool {
    records.iter().any(|record| record.attempt > 0 || record.schedule.holds_alive_slot())
}

/// What the job shows, and which of its tasks want a slot.
fn schedule_summary(
    plan: &ManagedJobPlan,
    records: &[TaskRecord],
    cancelled: bool,
    now: Timestamp,
) -> (Schedule, Vec<u32>) {
    let mut lanes = Vec::with_capacity(records.len());
    let mut wants_slot = Vec::new();
    for (index, record) in records.iter().enumerate() {
        let first =
            record.schedule == Schedule::Waiting && !cancelled && are_dependencies_met(plan, records, index);
        let again = record.schedule == Schedule::AliveWaiting && !record.status.is_final();
        let due = record.next_retry_at.is_none_or(|at| at <= now);
        let waits = matches!(record.status, Status::Pending | Status::Recovering);
        if (first || again) && due && waits {
            wants_slot.extend(u32::try_from(index));
        }
        lanes.push((record.schedule, first));
    }
    (slots::shown(&lanes, has_launched(records)), wants_slot)
}
