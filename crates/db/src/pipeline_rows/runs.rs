//! Reads of the run pipeline, and its one write.

use windlass_engine::Lease;
use windlass_model::{
    decide::runs::{FleetUpdate, Plan},
    event::Event,
    id::SubmissionId,
    job, run,
};

use crate::{
    Db, DbError, Unit, Val, WriteOutcome,
    events::{self, EventContext, EventTarget},
    jobs::{self, Job, NewJob},
    params,
    record::statements,
    runs::Run,
};

statements! {
    LOAD = "SELECT {} FROM runs r WHERE r.id = $1 AND r.lock_token = $2", Run::columns("r");
    /// An abort replaces a stop in progress; otherwise the first reason stays.
    REQUEST_END = "UPDATE jobs SET end_asked = $2, end_message = $3, due_at = NULL \
               WHERE id = $1 AND NOT finished AND (end_asked IS NULL OR $2 = 'aborted_by_user')";
    /// After an acknowledged stop no submission may be made (R12): matches only if none was requested.
    UNLESS_STOPPED = "UPDATE runs SET deleted = deleted WHERE id = $1 AND stop_asked_at IS NULL";
    /// Only the deployment that was evaluated: one applied in the meantime is not undone.
    ROLL_BACK = "UPDATE runs SET spec = $4, deployment_num = deployment_num + 1, due_at = NULL \
                 WHERE id = $1 AND spec = $2 AND deployment_num = $3 AND stop_asked_at IS NULL";
}

/// The run, if the lease is still valid, and all its submissions.
pub async fn load(db: &Db, lease: &Lease) -> Result<Option<(Run, Vec<Job>)>, DbError> {
    let Some(row) = db.query_opt(LOAD.as_str(), params![lease.id, lease.token]).await? else {
        return Ok(None);
    };
    let run = Run::read(row)?;
    let jobs = jobs::list_by_runs(db, &[run.id], None).await?;
    Ok(Some((run, jobs)))
}

/// A request to end, stored on a submission.
#[derive(Clone, Debug)]
pub struct EndRequest {
    pub submission: SubmissionId,
    pub ending: job::Ending,
}

/// Everything that one pass writes about a run.
pub struct RunUpdate<'a> {
    pub plan: &'a Plan,
    /// State that the pipeline keeps, JSON.
    pub tracking: String,
    /// True if the specification becomes the one to roll back to.
    pub settles: bool,
    /// Specification that is restored.
    pub back: Option<String>,
    pub submissions: Vec<NewJob>,
    pub ends: Vec<EndRequest>,
    /// Event of the run, and those of its new submissions.
    pub events: Vec<(Event, String)>,
    pub due_in_us: Option<i64>,
    /// True if the managed job of which it is an attempt becomes due.
    pub marks_managed_due: bool,
}

pub async fn apply(
    db: &Db,
    lease: &Lease,
    run: &Run,
    outcome: RunUpdate<'_>,
) -> Result<WriteOutcome, DbError> {
    let plan = outcome.plan;
    let mut set = vec![
        ("status", plan.status.into()),
        ("finished", plan.status.is_final().into()),
        ("termination_reason", plan.ending.as_ref().map(|e| e.reason().as_str()).into()),
        ("termination_message", plan.ending.as_ref().map(run::Ending::message).into()),
        ("retry_count", plan.attempt.into()),
        ("next_triggered_at", plan.next_triggered_at.into()),
        ("tracking", outcome.tracking.into()),
    ];
    if outcome.settles {
        set.push(("settled_spec", run.spec.as_str().into()));
    }
    if plan.status == run::Status::Pending && run.status != run::Status::Pending {
        set.push(("retry_since", Val::Now));
    }
    if plan.status.is_final() {
        set.push(("finished_at", Val::Now));
    }
    if plan.fleet == FleetUpdate::Unset {
        set.push(("fleet_id", Val::Null));
    }
    let mut unit = Unit::apply("runs", lease.key(), outcome.due_in_us, set);
    if !outcome.submissions.is_empty() {
        unit = unit.expect_one(UNLESS_STOPPED.as_str(), params![lease.id]);
    }
    if let Some(back) = &outcome.back {
        let over = params![lease.id, run.spec.as_str(), run.deployment_num, back.as_str()];
        unit =
            unit.keep_deployment(run.id).expect_one(ROLL_BACK.as_str(), over).record_deployment(run.id, None);
    }
    for end in outcome.ends {
        let reason = end.ending.reason().as_str();
        unit = unit.exec(REQUEST_END.as_str(), params![end.submission, reason, end.ending.message()]);
    }
    unit = unit.and(outcome.submissions.into_iter().map(jobs::insert));
    if let Some(managed) = run.managed_job_id.filter(|_| outcome.marks_managed_due) {
        unit = unit.and([super::managed_jobs::mark_due(managed)]);
    }
    for (event, name) in &outcome.events {
        let target = EventTarget { entity: event.entity, id: event.id, name };
        let place = EventContext {
            project: Some(run.project_id),
            user: None,
            lock_token: Some(lease.token),
            targets: &[target],
        };
        unit = unit.and(events::append(db, event, &place)?);
    }
    db.write(unit).await
}
