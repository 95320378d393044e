//! Decision of the run pipeline: the next step of a run, from the state of its jobs.
//!
//! A run always ends in two steps: first it becomes terminating with a reason, then, when every job is final, it
//! receives the status that corresponds to the reason. A job's final status is never planned here: jobs are requested
//! to end, and the terminating-job pipeline finishes them.
//!
//! A replica that is retried ends and restarts as a whole: its next submissions are created only when all its jobs are
//! final, so that two submissions of one job are never alive together.

pub mod derive;

use std::collections::BTreeSet;

use derive::{DerivedRun, DerivedStatus, derive};

use crate::{
    decide::change::Change,
    job,
    retry::{self, Policy},
    run,
    schedule::{self, CronSchedule},
    time::{Span, Timestamp},
};

/// Intervals after which a run is evaluated again if no hint arrives before.
const POLL_CHANGING: Span = Span::secs(5);
const POLL_ACTIVE: Span = Span::secs(10);
/// Interval while a run can change only through its jobs, each of which wakes it in the transaction that changes it.
/// Thousands of runs are in this state at once.
const POLL_QUIET: Span = Span::mins(5);

const SIBLING_FAILED_MESSAGE: &str = "another job of its replica failed; the replica is retried as a whole";
const SCALED_DOWN_MESSAGE: &str = "the service needs fewer replicas";
const REPLACED_MESSAGE: &str = "replaced by a newer deployment";

/// A run as stored, with the latest submission of each of its jobs.
#[derive(Clone, Debug, PartialEq)]
pub struct RunView {
    pub status: run::Status,
    /// Set when the run became terminating.
    pub ending: Option<run::Ending>,
    /// Stop request of a user; overrides everything but a final status.
    pub requested_stop: Option<RequestedStop>,
    pub submitted_at: Timestamp,
    /// Number of times in a row that the run returned to pending for a retry.
    pub attempt: u32,
    /// Time at which the run last became pending; the retry delay counts from here.
    pub pending_since: Timestamp,
    /// Delay of the first retry; later delays grow from it.
    pub retry_delay: Span,
    pub schedule: Option<ScheduleState>,
    pub retry: Option<Policy>,
    pub stop_criteria: StopCriteria,
    /// The gateway of the service was deleted, so that the URL of the service no longer works.
    pub has_gateway_failed: bool,
    /// Replicas of this execution; while a scheduled run waits for its slot, those of the last one.
    pub replicas: Vec<ReplicaView>,
    /// Replicas that a start of this run submits now: for a task, all of them; for a service, those that the autoscaler
    /// requests, which may be none.
    pub start: Vec<ReplicaStart>,
    /// Replicas of a service that a scale-down or a rolling deployment removes now.
    pub surplus: Vec<u32>,
    /// The deployment on trial is rolled back now: the next pass uses the previous configuration.
    pub is_rolling_back: bool,
}

impl RunView {
    /// Returns when this execution started: for a scheduled run, the slot that fired.
    fn started_at(&self) -> Timestamp {
        self.schedule.as_ref().and_then(|schedule| schedule.last_slot).unwrap_or(self.submitted_at)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedStop {
    /// Kills the jobs at once, without a grace period.
    pub is_abort: bool,
}

impl RequestedStop {
    fn ending(self) -> run::Ending {
        if self.is_abort {
            run::Ending::new(run::TerminationReason::AbortedByUser, "aborted by a user")
        } else {
            run::Ending::new(run::TerminationReason::StoppedByUser, "stopped by a user")
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleState {
    pub crons: CronSchedule,
    /// Slot that the pending run waits for; `None` during an execution.
    pub next_slot: Option<Timestamp>,
    /// Slot that fired last.
    pub last_slot: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopCriteria {
    #[default]
    AllDone,
    MasterDone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaView {
    pub num: u32,
    pub role: ReplicaRole,
    pub jobs: Vec<JobView>,
}

/// Effect on the run when a replica ends by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaRole {
    /// It is retried, or the run fails with it.
    #[default]
    Full,
    /// Part of a deployment on trial: it is retried, or the others continue without it.
    Trial,
    /// Has a configuration that the run no longer has: it is removed, and its number is free.
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    pub num: u32,
    /// Number of its latest submission.
    pub submission: u32,
    pub state: SubmissionState,
    /// Submissions in this execution of the run, including the latest.
    pub attempts: u32,
    /// Number of submissions that failed in a row, up to the latest.
    pub failures: u32,
    /// Time at which the first of them that had an instance ended, or began to end.
    pub failing_since: Option<Timestamp>,
}

/// Status of a submission together with its ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmissionState {
    Submitted,
    Provisioning,
    Pulling,
    Running,
    Terminating(job::Ending),
    Final(job::Ending),
}

impl SubmissionState {
    /// Builds the state from the two columns. A row without its reason receives the most general one of its status.
    pub fn from_stored(status: job::Status, ending: Option<job::Ending>) -> Self {
        let or = |reason| ending.clone().unwrap_or(job::Ending::new(reason));
        match status {
            job::Status::Submitted => Self::Submitted,
            job::Status::Provisioning => Self::Provisioning,
            job::Status::Pulling => Self::Pulling,
            job::Status::Running => Self::Running,
            job::Status::Terminating => Self::Terminating(or(job::TerminationReason::TerminatedByServer)),
            job::Status::Terminated => Self::Final(or(job::TerminationReason::TerminatedByServer)),
            job::Status::Aborted => Self::Final(or(job::TerminationReason::AbortedByUser)),
            job::Status::Failed => Self::Final(or(job::TerminationReason::ExecutorError)),
            job::Status::Done => Self::Final(or(job::TerminationReason::DoneByRunner)),
        }
    }

    /// Returns whether it ended with a failure.
    fn has_failed(&self) -> bool {
        self.ending().is_some_and(|ending| ending.reason() != job::TerminationReason::DoneByRunner)
    }

    /// Returns whether it ended for a cause that the next submission avoids, or because of a sibling that did.
    fn is_retried_immediately(&self) -> bool {
        self.ending().is_some_and(|ending| {
            ending.detail() == Some(job::TerminationDetail::RegionFull)
                || ending.reason() == job::TerminationReason::TerminatedByServer
        })
    }

    pub const fn status(&self) -> job::Status {
        match self {
            Self::Submitted => job::Status::Submitted,
            Self::Provisioning => job::Status::Provisioning,
            Self::Pulling => job::Status::Pulling,
            Self::Running => job::Status::Running,
            Self::Terminating(_) => job::Status::Terminating,
            Self::Final(ending) => ending.final_status().status(),
        }
    }

    const fn ending(&self) -> Option<&job::Ending> {
        match self {
            Self::Submitted | Self::Provisioning | Self::Pulling | Self::Running => None,
            Self::Terminating(ending) | Self::Final(ending) => Some(ending),
        }
    }

    const fn is_final(&self) -> bool {
        match self {
            Self::Final(_) => true,
            Self::Submitted | Self::Provisioning | Self::Pulling | Self::Running | Self::Terminating(_) => {
                false
            }
        }
    }
}

/// A replica to start: its number and its number of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStart {
    pub replica: u32,
    pub jobs: u32,
}

/// Next step of the run. Plain fields are the values to store, whether they changed or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Event for the state machine of the run; `None`: no event.
    pub event: Option<run::Event>,
    pub status: run::Status,
    pub ending: Option<run::Ending>,
    pub attempt: u32,
    pub next_triggered_at: Option<Timestamp>,
    pub last_slot: Option<Timestamp>,
    /// A run that returns to pending may be placed in another fleet.
    pub fleet: FleetUpdate,
    pub submit: Vec<NewSubmission>,
    pub end: Vec<JobEnd>,
    /// `None`: no further pass.
    pub due_at: Option<Timestamp>,
    /// Message for the event.
    pub message: String,
}

impl Plan {
    /// Returns the change for the event log.
    pub fn change(&self) -> Option<Change<run::Event>> {
        let event = self.event?;
        let reason = match &self.ending {
            Some(ending) => ending.reason().as_str(),
            None => event.as_str(),
        };
        Some(Change::new(event, reason, self.message.clone()))
    }
}

impl JobEnd {
    /// Returns the change for the event log of the job.
    pub fn change(&self) -> Change<job::Event> {
        let message = self.ending.message().unwrap_or_default();
        Change::new(job::Event::StopRequested, self.ending.reason().as_str(), message)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetUpdate {
    Keep,
    Unset,
}

/// A submission to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NewSubmission {
    pub replica: u32,
    pub job: u32,
    pub submission: u32,
}

/// A job to set to terminating.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    pub replica: u32,
    pub job: u32,
    pub ending: job::Ending,
}

/// Returns the next step of a run.
pub fn decide(run: &RunView, now: Timestamp) -> Plan {
    if let Some(stop) = run.requested_stop
        && let Some(plan) = plan_stop(run, stop, now)
    {
        return plan;
    }
    match run.status {
        run::Status::Pending => plan_pending(run, now),
        run::Status::Submitted | run::Status::Provisioning | run::Status::Running => plan_active(run, now),
        run::Status::Terminating => plan_terminating(run, true, now),
        run::Status::Terminated | run::Status::Failed | run::Status::Done => {
            Plan { due_at: None, ..unchanged(run, now, "the run has ended") }
        }
    }
}

/// Returns the next steps of a run that can be decided at once: a run whose jobs are all final performs both steps of
/// its end together. There is always a last one.
pub fn decide_to_end(run: &RunView, now: Timestamp) -> (Option<Plan>, Plan) {
    let first = decide(run, now);
    let begins_end = run.status != run::Status::Terminating && first.status == run::Status::Terminating;
    if !begins_end || !are_all_final(run) {
        return (None, first);
    }
    let ending = RunView { status: first.status, ending: first.ending.clone(), ..run.clone() };
    let last = plan_terminating(&ending, true, now);
    (Some(first), last)
}

fn are_all_final(run: &RunView) -> bool {
    run.replicas.iter().flat_map(|r| &r.jobs).all(|job| job.state.is_final())
}

/// Plans a stop, which overrides everything but an end that has already begun; an abort also speeds up a stop.
fn plan_stop(run: &RunView, stop: RequestedStop, now: Timestamp) -> Option<Plan> {
    match run.status {
        run::Status::Pending | run::Status::Submitted | run::Status::Provisioning | run::Status::Running => {
            let plan = begin_termination(run, stop.ending(), now);
            Some(Plan { event: Some(run::Event::StopRequested), ..plan })
        }
        run::Status::Terminating => {
            let reason = run.ending.as_ref().map(run::Ending::reason);
            let hurries = stop.is_abort && reason == Some(run::TerminationReason::StoppedByUser);
            // A scheduled run between two executions must not start again either.
            let ends_schedule = run.schedule.is_some() && reason.is_some_and(|reason| !reason.is_by_user());
            if !hurries && !ends_schedule {
                return None;
            }
            Some(plan_terminating(&RunView { ending: Some(stop.ending()), ..run.clone() }, false, now))
        }
        run::Status::Terminated | run::Status::Failed | run::Status::Done => None,
    }
}

fn plan_active(run: &RunView, now: Timestamp) -> Plan {
    let DerivedRun { status: verdict, retries } = derive(run, now);
    match verdict {
        DerivedStatus::End(ending) => begin_termination(run, ending, now),
        DerivedStatus::Idle(why) => {
            let (attempt, wait) = if retries.is_empty() { (0, Span::ZERO) } else { next_retry(run, now) };
            Plan {
                event: Some(run::Event::JobsIdle),
                status: run::Status::Pending,
                attempt,
                fleet: FleetUpdate::Unset,
                end: end_siblings(&retries),
                due_at: Some(now + wait),
                ..unchanged(run, now, why)
            }
        }
        DerivedStatus::Waits => {
            let plan = continue_run(run, run::Event::Waits, &retries, now);
            // A retry policy may end the wait.
            let due =
                if run.retry.is_none() && has_no_job_changes(&plan) { POLL_QUIET } else { POLL_CHANGING };
            Plan { due_at: Some(now + due), ..plan }
        }
        DerivedStatus::Provisions => {
            Plan { attempt: 0, ..continue_run(run, run::Event::Provisions, &retries, now) }
        }
        DerivedStatus::Runs => {
            let plan = continue_run(run, run::Event::Runs, &retries, now);
            let due = if retries.is_empty() && has_no_job_changes(&plan) { POLL_QUIET } else { POLL_ACTIVE };
            Plan { attempt: 0, due_at: Some(now + due), ..plan }
        }
    }
}

/// Returns whether the plan changes no jobs.
fn has_no_job_changes(plan: &Plan) -> bool {
    plan.submit.is_empty() && plan.end.is_empty()
}

/// Keeps the run active; replicas to retry are ended, then resubmitted in the same run.
fn continue_run(run: &RunView, event: run::Event, retries: &[&ReplicaView], now: Timestamp) -> Plan {
    let status = run::step(run.status, event).status_after(run.status).unwrap_or(run.status);
    let again: Vec<_> = retries.iter().flat_map(|replica| resubmit(replica)).collect();
    let added = run.start.iter().filter(|start| is_inactive(run, start.replica));
    let added: Vec<_> = added.flat_map(|start| submit_replica(run, *start)).collect();
    let gone = run.replicas.iter().filter(|replica| run.surplus.contains(&replica.num));
    let gone: Vec<_> = gone
        .filter(|replica| retries.iter().all(|retry| retry.num != replica.num))
        .flat_map(|replica| {
            let message =
                if replica.role == ReplicaRole::Gone { REPLACED_MESSAGE } else { SCALED_DOWN_MESSAGE };
            end_live_jobs(replica, job::TerminationReason::ScaledDown, message)
        })
        .collect();

    let mut why = Vec::new();
    why.extend(format_replicas(again.iter().map(|submit| submit.replica), "resubmitted in place"));
    why.extend(format_replicas(added.iter().map(|submit| submit.replica), "added"));
    why.extend(format_replicas(gone.iter().map(|end| end.replica), "scaled down"));
    if why.is_empty() {
        why.push(status.to_string());
    }
    Plan {
        event: Some(event),
        status,
        submit: again.into_iter().chain(added).collect(),
        end: end_siblings(retries).into_iter().chain(gone).collect(),
        ..unchanged(run, now, why.join("; "))
    }
}

fn format_replicas(replicas: impl Iterator<Item = u32>, what: &str) -> Option<String> {
    let numbers: BTreeSet<_> = replicas.collect();
    let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
    match &numbers[..] {
        [] => None,
        [one] => Some(format!("{what}: replica {one}")),
        many => Some(format!("{what}: replicas {}", many.join(", "))),
    }
}

fn begin_termination(run: &RunView, ending: run::Ending, now: Timestamp) -> Plan {
    let end = end_jobs(run, &ending);
    Plan {
        event: Some(run::Event::EndDecided),
        status: run::Status::Terminating,
        due_at: Some(if are_all_final(run) { now } else { now + POLL_CHANGING }),
        message: ending.message().to_owned(),
        ending: Some(ending),
        end,
        ..unchanged(run, now, "")
    }
}

fn plan_pending(run: &RunView, now: Timestamp) -> Plan {
    if run.attempt > 0 {
        return plan_pending_retry(run, now);
    }
    let Some(scheduled) = &run.schedule else { return start_replicas(run, now, "requests arrived") };
    match scheduled.next_slot {
        Some(slot) if slot <= now => {
            let plan = start_replicas(run, now, "its cron slot was reached");
            match plan.event {
                Some(_) => Plan { last_slot: Some(slot), next_triggered_at: None, ..plan },
                None => plan,
            }
        }
        Some(slot) => Plan { due_at: Some(slot), ..unchanged(run, now, "waiting for its cron slot") },
        None => {
            let next = schedule::next_slot(&scheduled.crons, scheduled.last_slot, now);
            Plan { next_triggered_at: next, due_at: next, ..unchanged(run, now, "waiting for its cron slot") }
        }
    }
}

/// Returns the number of the next retry, counted from 1, and its delay.
fn next_retry(run: &RunView, at: Timestamp) -> (u32, Span) {
    let jobs = run.replicas.iter().flat_map(|replica| &replica.jobs);
    let failed = jobs.filter(|job| job.state.has_failed() && !job.state.is_retried_immediately());
    let worst = failed.max_by_key(|job| job.failures);
    let Some(worst) = worst else { return (1, Span::ZERO) };
    let failures = worst.failures.max(1);
    let since = worst.failing_since.unwrap_or_else(|| run.started_at());
    (failures, retry::next_delay(run.retry.as_ref(), run.retry_delay, failures, since, at))
}

/// Plans a retry, which was decided when the run became pending: the delay does not count against its time limit.
fn plan_pending_retry(run: &RunView, now: Timestamp) -> Plan {
    if let DerivedStatus::End(ending) = derive(run, run.pending_since.min(now)).status {
        return begin_termination(run, ending, now);
    }
    let ready_at = run.pending_since + next_retry(run, run.pending_since).1;
    if now < ready_at {
        let why = format!("waiting for the delay of retry {}", run.attempt);
        return Plan { due_at: Some(ready_at), ..unchanged(run, now, why) };
    }
    start_replicas(run, now, "the retry delay is over")
}

/// Creates the submissions of a start. A replica with a terminating job has to wait.
fn start_replicas(run: &RunView, now: Timestamp, why: &str) -> Plan {
    // Replicas that succeeded within this execution are not repeated; a new execution repeats everything.
    let repeats = run.attempt > 0;
    let wanted: Vec<_> = run.start.iter().filter(|start| !repeats || !is_done(run, start.replica)).collect();
    if wanted.is_empty() {
        return unchanged(run, now, "waiting for requests");
    }
    let submit: Vec<_> = wanted
        .iter()
        .filter(|start| !has_unfinished_jobs(run, start.replica))
        .flat_map(|start| submit_replica(run, **start))
        .collect();
    if submit.is_empty() {
        return Plan {
            due_at: Some(now + POLL_CHANGING),
            ..unchanged(run, now, "waiting for its previous jobs to end")
        };
    }
    Plan {
        event: Some(run::Event::Resubmitted),
        status: run::Status::Submitted,
        submit,
        due_at: Some(now + POLL_CHANGING),
        ..unchanged(run, now, why)
    }
}

/// Plans the end of the run. `is_told`: the reason was already recorded when the end was decided.
fn plan_terminating(run: &RunView, is_reported: bool, now: Timestamp) -> Plan {
    let ending = run.ending.clone().unwrap_or_else(|| {
        run::Ending::new(run::TerminationReason::ServerError, "the run ended without a reason")
    });
    if !are_all_final(run) {
        let end = end_jobs(run, &ending);
        return Plan {
            end,
            ending: Some(ending),
            due_at: Some(now + POLL_CHANGING),
            ..unchanged(run, now, "waiting for its jobs to end")
        };
    }
    let next = match &run.schedule {
        Some(scheduled) if !ending.reason().is_by_user() => {
            schedule::next_slot(&scheduled.crons, scheduled.last_slot, now)
        }
        Some(_) | None => None,
    };
    if let Some(slot) = next {
        return Plan {
            event: Some(run::Event::Rescheduled),
            status: run::Status::Pending,
            ending: None,
            attempt: 0,
            next_triggered_at: Some(slot),
            fleet: FleetUpdate::Unset,
            due_at: Some(slot),
            ..unchanged(run, now, format!("{}; the next execution is scheduled", ending.message()))
        };
    }
    let last = ending.final_status();
    Plan {
        event: Some(last.event()),
        status: last.status(),
        next_triggered_at: None,
        due_at: None,
        message: if is_reported {
            format!("the run is {}", last.status())
        } else {
            ending.message().to_owned()
        },
        ending: Some(ending),
        ..unchanged(run, now, "")
    }
}

/// Returns a plan that changes nothing.
fn unchanged(run: &RunView, now: Timestamp, why: impl Into<String>) -> Plan {
    Plan {
        event: None,
        status: run.status,
        ending: run.ending.clone(),
        attempt: run.attempt,
        next_triggered_at: run.schedule.as_ref().and_then(|s| s.next_slot),
        last_slot: run.schedule.as_ref().and_then(|s| s.last_slot),
        fleet: FleetUpdate::Keep,
        submit: Vec::new(),
        end: Vec::new(),
        due_at: Some(now + POLL_ACTIVE),
        message: why.into(),
    }
}

/// Returns the unfinished jobs of an ending run, with the reason that follows from the run's.
fn end_jobs(run: &RunView, ending: &run::Ending) -> Vec<JobEnd> {
    let reason = ending.reason().job_reason();
    let wants_end = |job: &JobView| match &job.state {
        SubmissionState::Submitted
        | SubmissionState::Provisioning
        | SubmissionState::Pulling
        | SubmissionState::Running => true,
        // An abort after a stop ends the grace period of its jobs.
        SubmissionState::Terminating(before) => {
            reason == job::TerminationReason::AbortedByUser
                && before.reason() == job::TerminationReason::TerminatedByUser
        }
        SubmissionState::Final(_) => false,
    };
    let mut end = Vec::new();
    for replica in &run.replicas {
        for job in replica.jobs.iter().filter(|job| wants_end(job)) {
            let ending = job::Ending::new(reason).with_message(ending.message());
            end.push(JobEnd { replica: replica.num, job: job.num, ending });
        }
    }
    end
}

/// Ends the siblings of failed jobs: a replica is retried as a whole.
fn end_siblings(retries: &[&ReplicaView]) -> Vec<JobEnd> {
    let reason = job::TerminationReason::TerminatedByServer;
    retries.iter().flat_map(|replica| end_live_jobs(replica, reason, SIBLING_FAILED_MESSAGE)).collect()
}

fn end_live_jobs(replica: &ReplicaView, reason: job::TerminationReason, message: &str) -> Vec<JobEnd> {
    let is_live = |job: &&JobView| job.state.ending().is_none();
    let end = |job: &JobView| JobEnd {
        replica: replica.num,
        job: job.num,
        ending: job::Ending::new(reason).with_message(message),
    };
    replica.jobs.iter().filter(is_live).map(end).collect()
}

/// Returns the next submissions of a replica, once all its jobs are final.
fn resubmit(replica: &ReplicaView) -> Vec<NewSubmission> {
    if !replica.jobs.iter().all(|job| job.state.is_final()) {
        return Vec::new();
    }
    let next =
        |job: &JobView| NewSubmission { replica: replica.num, job: job.num, submission: job.submission + 1 };
    replica.jobs.iter().map(next).collect()
}

fn submit_replica(run: &RunView, start: ReplicaStart) -> Vec<NewSubmission> {
    let before = run.replicas.iter().find(|replica| replica.num == start.replica);
    let submission = |num| {
        let job = before.and_then(|replica| replica.jobs.iter().find(|job| job.num == num));
        job.map_or(0, |job| job.submission + 1)
    };
    (0..start.jobs)
        .map(|num| NewSubmission { replica: start.replica, job: num, submission: submission(num) })
        .collect()
}

fn is_done(run: &RunView, replica: u32) -> bool {
    let is_done = |job: &JobView| job.state.status() == job::Status::Done;
    run.replicas.iter().any(|r| r.num == replica && r.jobs.iter().all(is_done))
}

/// Returns whether a replica of an active service does not exist: never submitted, or scaled down and final.
fn is_inactive(run: &RunView, replica: u32) -> bool {
    let is_scaled_down =
        |job: &JobView| job.state.ending().is_some_and(|e| e.reason() == job::TerminationReason::ScaledDown);
    match run.replicas.iter().find(|r| r.num == replica) {
        Some(replica) => {
            let is_gone = replica.role == ReplicaRole::Gone || replica.jobs.iter().any(is_scaled_down);
            is_gone && replica.jobs.iter().all(|job| job.state.is_final())
        }
        None => true,
    }
}

fn has_unfinished_jobs(run: &RunView, replica: u32) -> bool {
    run.replicas.iter().any(|r| r.num == replica && r.jobs.iter().any(|job| !job.state.is_final()))
}
