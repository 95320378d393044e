//! Invariants of managed jobs: slots, attempts, order, counts, and legal ends.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use uuid::Uuid;
use windlass_model::{
    deadline_policy::MarketRule,
    id::SubmissionId,
    job,
    managed_job::{
        RecoverySource, Status,
        plan::{ManagedJobPlan, RecoveryStrategy, Shape},
        record::{TaskRecord, job_status},
    },
    run,
};

use super::{Event, History, RunRow, Violation, status_events, violation};
use crate::host::HostEffect;

/// A pass may already be in progress at the time of a cancel; a launch this long after it ignored the cancel.
const CANCEL_GRACE_US: i64 = 120_000_000;

/// The attempt that a run belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAttempt {
    pub job: Uuid,
    pub task: usize,
    pub number: u32,
    pub made_at: i64,
}

impl RunAttempt {
    /// Parses the name of a run, which ends with the numbers of the task and the attempt.
    pub fn read(job: Uuid, name: &str, made_at: i64) -> Result<Self> {
        let mut parts = name.rsplitn(3, '-');
        let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
        let (attempt, task) =
            number().zip(number()).with_context(|| format!("`{name}` is not the name of an attempt"))?;
        Ok(Self { job, task: usize::try_from(task)?, number: attempt, made_at })
    }
}

/// A managed job as stored.
#[derive(Clone, Debug, PartialEq)]
pub struct ManagedJobRow {
    pub id: Uuid,
    pub number: i64,
    pub plan: ManagedJobPlan,
    pub status: String,
    pub schedule: String,
    pub claimed: bool,
    pub finished: bool,
    pub cancel_asked_at: Option<i64>,
    pub tasks: Vec<TaskRow>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct TaskRow {
    pub id: Uuid,
    pub status: String,
    pub schedule: String,
    pub record: TaskRecord,
}

pub(super) fn check_always(h: &History) -> Vec<Violation> {
    let mut found: Vec<Violation> =
        h.watched.iter().map(|(id, what)| violation(id, format!("during a write: {what}"))).collect();
    // Most histories have none; skip the search through all their events.
    if h.managed.is_empty() {
        return found;
    }
    let newest = newest_attempts(h);
    for job in &h.managed {
        found.extend(r5_columns_agree_and_form_legal_pairs(job));
        found.extend(m2_nothing_is_launched_long_after_a_cancel(h, job));
        for index in 0..job.tasks.len() {
            let name = format!("task {index} of managed job {}", job.number);
            let run = newest.get(&(job.id, index)).copied();
            let done = run.is_some_and(|run| is_done(h, run));
            found.extend(check_task_ends(job, index, run, done).map(|v| with_name(&name, &v)));
            found.extend(check_restart_counts(job, index).map(|v| with_name(&name, &v)));
        }
    }
    found.extend(m6_attempts_never_overlap(h));
    found.extend(check_events(h));
    found
}

fn with_name(name: &str, found: &Violation) -> Violation {
    violation(found.id, format!("{name} {}", found.what))
}

/// Must hold after the faults have stopped and time has passed: no job is lost.
pub(super) fn check_after_faults(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for job in &h.managed {
        let (number, status, schedule) = (job.number, &job.status, &job.schedule);
        if !job.finished {
            found.push(violation("R2", format!("managed job {number} is still {status}, {schedule}")));
        } else if job.claimed || job.tasks.iter().any(|task| !task.record.status.is_final()) {
            found
                .push(violation("M5", format!("managed job {number} has ended, but keeps a slot or a task")));
        }
    }
    found
}

/// The newest attempt of each task.
fn newest_attempts(h: &History) -> BTreeMap<(Uuid, usize), &RunRow> {
    let mut newest: BTreeMap<(Uuid, usize), (u32, &RunRow)> = BTreeMap::new();
    for run in &h.runs {
        let Some(attempt) = run.attempt else { continue };
        let known = newest.entry((attempt.job, attempt.task)).or_insert((attempt.number, run));
        if attempt.number > known.0 {
            *known = (attempt.number, run);
        }
    }
    newest.into_iter().map(|(task, (_, run))| (task, run)).collect()
}

fn r5_columns_agree_and_form_legal_pairs(job: &ManagedJobRow) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, task) in job.tasks.iter().enumerate() {
        let record = &task.record;
        let name = format!("task {index} of managed job {}", job.number);
        if task.status != record.status.as_str() || task.schedule != record.schedule.as_str() {
            found.push(violation("R5", format!("{name}: its columns do not match its record")));
        }
        if !record.is_legal() {
            let (status, schedule, pending) = (record.status, record.schedule, record.pending);
            found.push(violation(
                "R5",
                format!("{name}: {status} ({pending:?}) is not legal with {schedule}"),
            ));
        }
    }
    let counted = job.tasks.iter().enumerate().filter(|(index, _)| is_primary(&job.plan, *index));
    let shown = job_status(counted.map(|(_, task)| task.record.status));
    if shown.as_str() != job.status {
        let what =
            format!("managed job {} shows {}, but its tasks result in {shown}", job.number, job.status);
        found.push(violation("R20", what));
    }
    found
}

fn is_primary(plan: &ManagedJobPlan, task: usize) -> bool {
    u32::try_from(task).is_ok_and(|task| plan.is_primary(task))
}

fn m2_nothing_is_launched_long_after_a_cancel(h: &History, job: &ManagedJobRow) -> Vec<Violation> {
    let Some(requested) = job.cancel_asked_at else { return Vec::new() };
    let own = h.runs.iter().filter_map(|run| run.attempt).filter(|attempt| attempt.job == job.id);
    let late = own.filter(|attempt| attempt.made_at > requested + CANCEL_GRACE_US);
    late.map(|attempt| {
        let (number, of) = (job.number, attempt.number);
        violation("M2", format!("managed job {number} started attempt {of} long after its cancellation"))
    })
    .collect()
}

/// Returns whether all jobs of the run are done. A stop after that becomes the run's final status without changing
/// this; it may come from the managed job itself, whose other tasks have ended.
fn is_done(h: &History, run: &RunRow) -> bool {
    let mut jobs = h.jobs.iter().filter(|job| job.run_id == run.id).peekable();
    run.status == run::Status::Done.as_str()
        || run.status == run::Status::Terminated.as_str()
            && jobs.peek().is_some()
            && jobs.all(|job| job.status == job::Status::Done.as_str())
}

/// Checks that the end of a task follows from the result of its newest attempt, or from a request.
fn check_task_ends(
    job: &ManagedJobRow,
    index: usize,
    newest: Option<&RunRow>,
    done: bool,
) -> Option<Violation> {
    let (task, record) = (job.plan.tasks.get(index)?, &job.tasks.get(index)?.record);
    let status = newest.and_then(|run| run.status.parse::<run::Status>().ok());
    let over = status.is_none_or(|status| status.is_final());
    let recovery = &task.recovery;
    let why = match record.status {
        Status::Pending | Status::Starting | Status::Running | Status::Recovering | Status::Cancelling => {
            None
        }
        Status::Succeeded => {
            (!done && !task.body.is_empty()).then_some(("R20", "succeeded, but its run did not"))
        }
        Status::Failed | Status::FailedSetup if done => Some(("R20", "failed, but its run did not")),
        Status::Failed | Status::FailedSetup => {
            let final_by_itself = recovery.strategy == RecoveryStrategy::None || task.max_duration.is_some();
            let left = record.restarts_on_errors < recovery.max_restarts_on_errors;
            (left && !final_by_itself).then_some(("R20", "failed with restarts left"))
        }
        Status::FailedNoResource => {
            let bound = recovery.max_launch_tries.is_some() || recovery.max_launch_wait.is_some();
            (!bound).then_some(("R20", "gave up waiting, but no limit is configured"))
        }
        Status::FailedPrechecks => done.then_some(("R20", "failed its prechecks, but its run is done")),
        Status::Cancelled => {
            let stopped = newest.is_some_and(|run| run.stopped_at.is_some());
            (!stopped && !is_cancel_due(job, index)).then_some(("M2", "was cancelled without a request"))
        }
        Status::FailedController => Some(("M8", "ended as FAILED_CONTROLLER, but no fault causes that")),
    };
    let held = (record.status.is_final() && record.status != Status::FailedController && !over)
        .then_some(("M6", "has ended, but its run has not"));
    why.or(held).map(|(id, what)| violation(id, what))
}

/// Returns whether a user cancelled the task, or what it belongs to ended before it.
fn is_cancel_due(job: &ManagedJobRow, index: usize) -> bool {
    let status = |task: usize| job.tasks.get(task).map(|task| task.record.status);
    let after = job.plan.tasks.get(index).map(|task| task.after.clone()).unwrap_or_default();
    let failed = |task: &u32| {
        let status = usize::try_from(*task).ok().and_then(status);
        status.is_some_and(|status| status.is_final() && status != Status::Succeeded)
    };
    let in_group = match &job.plan.shape {
        Shape::Single | Shape::Pipeline | Shape::Dag => false,
        Shape::Group(_) => {
            let mut all = job.tasks.iter().enumerate();
            let aborted = all.clone().any(|(_, task)| {
                task.record.start_at.is_none()
                    && matches!(task.record.status, Status::FailedNoResource | Status::FailedPrechecks)
            });
            let ended = all.all(|(task, row)| !is_primary(&job.plan, task) || row.record.status.is_final());
            aborted || (ended && !is_primary(&job.plan, index))
        }
    };
    job.cancel_asked_at.is_some() || after.iter().any(failed) || in_group
}

fn check_restart_counts(job: &ManagedJobRow, index: usize) -> Option<Violation> {
    let (task, record) = (job.plan.tasks.get(index)?, &job.tasks.get(index)?.record);
    let (count, most) = (record.restarts_on_errors, task.recovery.max_restarts_on_errors);
    (count > most).then(|| violation("R17", format!("was restarted {count} times; the limit is {most}")))
}

/// Containers of two attempts of one task never run at the same time, and two attempts are never active. Abandoned
/// hosts are excluded: they are fenced, and their state is unknown.
fn m6_attempts_never_overlap(h: &History) -> Vec<Violation> {
    let attempts: BTreeMap<Uuid, RunAttempt> =
        h.runs.iter().filter_map(|run| Some((run.id, run.attempt?))).collect();
    let mut found = Vec::new();
    let mut active = BTreeSet::new();
    for run in &h.runs {
        let Some(attempt) = run.attempt else { continue };
        let over = run.status.parse::<run::Status>().is_ok_and(|status| status.is_final());
        if !over && !active.insert((attempt.job, attempt.task)) {
            let what = format!("task {} of {} has two active attempts", attempt.task, attempt.job);
            found.push(violation("M6", what));
        }
    }
    let of: BTreeMap<SubmissionId, RunAttempt> = h
        .jobs
        .iter()
        .filter(|job| !job.host_lost)
        .filter_map(|job| Some((SubmissionId(job.id), *attempts.get(&job.run_id)?)))
        .collect();
    /// Start and end of a container, and its attempt.
    type ContainerLifetime = (i64, i64, u32);
    let mut lifetimes: BTreeMap<(Uuid, usize), BTreeMap<SubmissionId, ContainerLifetime>> = BTreeMap::new();
    for entry in &h.journal {
        let Some(attempt) = of.get(&entry.submission) else { continue };
        let lifetimes = lifetimes.entry((attempt.job, attempt.task)).or_default();
        match entry.kind {
            HostEffect::ContainerStarted => {
                lifetimes.insert(entry.submission, (entry.at, i64::MAX, attempt.number));
            }
            HostEffect::ContainerExited => {
                if let Some(life) = lifetimes.get_mut(&entry.submission) {
                    life.1 = entry.at;
                }
            }
            HostEffect::GpuAcquired(_)
            | HostEffect::GpuReleased(_)
            | HostEffect::RefusedEpoch
            | HostEffect::Removed => {}
        }
    }
    for ((job, task), lifetimes) in lifetimes {
        let mut lifetimes: Vec<_> = lifetimes.into_values().collect();
        lifetimes.sort_unstable_by_key(|(from, ..)| *from);
        let mut latest: Option<(i64, i64, u32)> = None;
        for life in lifetimes {
            if let Some(before) = latest
                && before.2 != life.2
                && before.1 > life.0
            {
                let (old, new) = (before.2, life.2);
                found.push(violation(
                    "M6",
                    format!("attempts {old} and {new} of task {task} of {job} ran at the same time"),
                ));
            }
            latest = latest.filter(|before| before.1 >= life.1).or(Some(life));
        }
    }
    found
}

/// State derived from the events of one task.
#[derive(Default)]
struct TaskHistory {
    recoveries: u32,
    /// True if the open recovery counts against the limit; `None` without one.
    episode: Option<bool>,
    /// Sequence numbers of its first start and of its success.
    began: Option<i64>,
    succeeded: Option<i64>,
}

/// Replays the history of each task: sources of recoveries, their counts, and the order of tasks.
fn check_events(h: &History) -> Vec<Violation> {
    let plans: BTreeMap<Uuid, (&ManagedJobRow, usize)> = h
        .managed
        .iter()
        .flat_map(|job| job.tasks.iter().enumerate().map(move |(index, task)| (task.id, (job, index))))
        .collect();
    let mut reported: BTreeMap<Uuid, TaskHistory> = BTreeMap::new();
    let mut found = Vec::new();
    for event in h.events.iter().filter(|event| event.entity == "managed-job") {
        let Some((job, index)) = plans.get(&event.entity_id) else { continue };
        let deadline = job.plan.tasks.get(*index).is_some_and(|task| task.deadline.is_some());
        let violation = reported.entry(event.entity_id).or_default().apply_event(event, deadline);
        let name = format!("task {index} of managed job {}", job.number);
        found.extend(violation.map(|violation| with_name(&name, &violation)));
    }
    for job in &h.managed {
        for (index, task) in job.tasks.iter().enumerate() {
            let received = reported.get(&task.id);
            let (counted, reported_for) =
                (task.record.recovery_count, received.map_or(0, |reported| reported.recoveries));
            if counted != reported_for {
                let what = format!(
                    "task {index} of managed job {} counts {counted} recoveries, its events {reported_for}",
                    job.number
                );
                found.push(violation("R17", what));
            }
            let Some(began) = received.and_then(|reported| reported.began) else { continue };
            let after = job.plan.tasks.get(index).map(|task| task.after.as_slice()).unwrap_or_default();
            for before in after.iter().filter_map(|before| job.tasks.get(usize::try_from(*before).ok()?)) {
                if reported
                    .get(&before.id)
                    .and_then(|reported| reported.succeeded)
                    .is_none_or(|at| at > began)
                {
                    let what = format!(
                        "task {index} of managed job {} started before a task that it depends on succeeded",
                        job.number
                    );
                    found.push(violation("M7", what));
                }
            }
        }
    }
    found
}

/// Returns the source of recoveries with this reason. A task that moves to spot nodes is restarted.
fn recovery_source(reason: &str) -> Option<RecoverySource> {
    if reason == MarketRule::MoveToSpot.as_str() {
        return Some(RecoverySource::Restart);
    }
    reason.parse().ok()
}

impl TaskHistory {
    fn apply_event(&mut self, event: &Event, has_deadline: bool) -> Option<Violation> {
        let source = recovery_source(&event.reason);
        if event.kind != "status" {
            // A cause that joins an open recovery changes no status.
            if let (Some(credit), Some(RecoverySource::Failure)) = (&mut self.episode, source) {
                *credit = true;
            }
            return None;
        }
        let to = event.to.as_deref()?.parse::<Status>().ok()?;
        let from = event.from.as_deref().and_then(|from| from.parse::<Status>().ok());
        match to {
            Status::Starting | Status::Running => {
                self.began = self.began.or(Some(event.seq));
                if to == Status::Running && self.episode.take() == Some(true) {
                    self.recoveries += 1;
                }
                None
            }
            Status::Recovering => self.apply_recovery(from, &event.reason, source, has_deadline),
            Status::Pending | Status::Cancelling => None,
            Status::Succeeded => {
                self.succeeded = Some(event.seq);
                self.episode = None;
                None
            }
            Status::Cancelled
            | Status::Failed
            | Status::FailedSetup
            | Status::FailedPrechecks
            | Status::FailedNoResource
            | Status::FailedController => {
                self.episode = None;
                None
            }
        }
    }

    fn apply_recovery(
        &mut self,
        from: Option<Status>,
        reason: &str,
        source: Option<RecoverySource>,
        has_deadline: bool,
    ) -> Option<Violation> {
        let credit = self.episode.unwrap_or(false);
        let Some(source) = source else {
            // A slot for a recovery that was waiting: no new cause.
            let waited = from == Some(Status::Pending) && reason == "rescheduled";
            return (!waited).then(|| {
                violation("M3", format!("recovers because of `{reason}`, which is not a recovery source"))
            });
        };
        self.episode = Some(credit || source == RecoverySource::Failure);
        match source {
            RecoverySource::Failure => None,
            RecoverySource::Emergency => {
                Some(violation("M1", "recovers from an internal error, but no fault causes one"))
            }
            // A move to cheaper nodes is voluntary, and recorded as a restart.
            RecoverySource::Restart if has_deadline => None,
            RecoverySource::Restart => {
                Some(violation("M4", "was launched again, but its attempt could be adopted"))
            }
        }
    }
}

/// Number of tasks by their end, and of recoveries, to verify that they occurred at all.
pub fn count_outcomes(h: &History) -> BTreeMap<String, u64> {
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    for record in h.managed.iter().flat_map(|job| &job.tasks).map(|task| &task.record) {
        *outcomes.entry(record.status.to_string()).or_default() += 1;
        *outcomes.entry("recovered".to_owned()).or_default() += u64::from(record.recovery_count);
    }
    let backed_off = status_events(&h.events)
        .filter(|event| event.entity == "managed-job" && event.reason == "backed-off")
        .count();
    *outcomes.entry("backed off".to_owned()).or_default() += backed_off as u64;
    outcomes
}
