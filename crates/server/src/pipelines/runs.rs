//! Pipeline `runs`: a run, followed through its jobs.
//!
//! Claims   runs in Pending, Submitted, Provisioning, Running, Terminating.
//! Owns     runs.status, runs.finished, runs.termination_reason, runs.termination_message,
//!          runs.retry_count, runs.retry_since, runs.next_triggered_at, runs.finished_at, runs.tracking,
//!          runs.settled_spec; jobs.end_asked, jobs.end_message.
//! Wakes    on hint (a job changed, a stop was requested), else after 5 to 10 s; after 5 min where only its jobs can
//!          change it, which make it due.
//! Why not  set jobs to terminating here? Their own pipelines may be processing them: a request on the row
//!          is honoured by the pipeline that holds it, and no two pipelines write one column.

mod service;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    config::Configuration,
    decide::{
        replicas,
        runs::{self as brain, Plan, ReplicaRole, RunView, ScheduleState, SubmissionState},
    },
    event::{self, Event},
    id::SubmissionId,
    job,
    retry::{self, FailureStreak},
    run,
    schedule::CronSchedule,
    time::{Span, Timestamp},
};

use self::service::ServiceNeeds;
use super::{PipelineContext, due_in, pipeline_cause};
use crate::{
    db::{
        WriteOutcome, gateways,
        jobs::{Job, NewJob},
        pipeline_rows::runs::{self as rows, EndRequest, RunUpdate},
        runs::Run,
        service_replicas as traffic,
    },
    hints::Hint,
    node_keys::NodeKey,
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    run_tracking::{RetryWait, RunTracking},
    services::runs::submit::PreemptionHistory,
};

pub(super) struct RunsPipeline(pub(super) PipelineContext);

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::Runs.as_str(),
    table: "runs",
    statuses: &["pending", "submitted", "provisioning", "running", "terminating"],
};

/// Interval at which the requests to a service are counted.
const SERVICE_POLL_INTERVAL: Span = Span::secs(10);

pub(crate) struct LoadedRun {
    run: Run,
    jobs: Vec<Job>,
    shape: Arc<ParsedRunSpec>,
    view: RunView,
    /// Desired state of a service; `None` for other runs.
    service: Option<ServiceNeeds>,
    /// The stored wait.
    retry: Option<RetryWait>,
}

impl Pipeline for RunsPipeline {
    type Row = LoadedRun;
    type Observation = ();
    /// An intermediate transition, if there is one, and the final plan.
    type Plan = (Option<Plan>, Plan);
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<LoadedRun>, PassError> {
        let Some((run, jobs)) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let shape = self.0.shapes.of(&run)?;
        let tracking = RunTracking::of(&run)?;
        let service = self.needs(lease, &run, &jobs, &shape, &tracking).await?;
        let stored = view(&run, &jobs, &shape, &tracking, service.as_ref())?;
        let has_gateway_failed = match run.gateway_id {
            Some(id) => gateways::find(&self.0.db, id).await?.is_none_or(|gateway| gateway.deleted),
            None => false,
        };
        let view = RunView { retry_delay: self.0.retry_delay, has_gateway_failed, ..stored };
        Ok(Some(LoadedRun { run, jobs, shape, view, service, retry: tracking.retry }))
    }

    /// Everything on which a run depends is in the database.
    async fn observe(&self, _lease: &Lease, _row: &LoadedRun) -> Result<(), PassError> {
        Ok(())
    }

    fn decide(row: &LoadedRun, (): (), now: DbTime) -> Self::Plan {
        let (before, mut plan) = brain::decide_to_end(&row.view, Timestamp(now));
        if let Some(needs) = &row.service {
            let poll_at = Timestamp(now) + SERVICE_POLL_INTERVAL;
            let poll_at = needs.evaluated.due_at.map_or(poll_at, |due| due.min(poll_at));
            plan.due_at = plan.due_at.map(|due| due.min(poll_at));
        }
        (before, plan)
    }

    async fn act(&self, _lease: &Lease, _row: &LoadedRun, _plan: &mut Self::Plan) -> Result<(), PassError> {
        Ok(())
    }

    async fn apply(
        &self,
        lease: &Lease,
        row: LoadedRun,
        plan: Self::Plan,
    ) -> Result<ApplyOutcome, PassError> {
        let (before, plan) = &plan;
        let due_in_us = plan.due_at.map(|at| due_in(lease, at));
        let outcome = self.outcome(lease, &row, before.as_ref(), plan, due_in_us)?;
        let mut wake = pipelines_to_wake(&outcome);
        if outcome.back.is_some() {
            // The next pass uses the previous configuration.
            wake.push(QUEUE.pipeline);
        }
        if outcome.marks_managed_due {
            wake.push(super::managed_jobs::QUEUE.pipeline);
        }
        match rows::apply(&self.0.db, lease, &row.run, outcome).await? {
            WriteOutcome::Done { .. } => {
                if plan.status.is_final() {
                    self.0.shapes.forget(row.run.id);
                }
                Ok(ApplyOutcome::Written { due_in_us, wake })
            }
            WriteOutcome::Stale { at: None } => Ok(ApplyOutcome::LeaseLost),
            // A stop was requested during this pass: repeat it.
            WriteOutcome::Stale { at: Some(_) } => Ok(ApplyOutcome::RelatedBusy),
        }
    }
}

impl RunsPipeline {
    /// Determines the desired replicas of a service from its requests, and the state of its deployment.
    async fn needs(
        &self,
        lease: &Lease,
        run: &Run,
        jobs: &[Job],
        shape: &ParsedRunSpec,
        tracking: &RunTracking,
    ) -> Result<Option<ServiceNeeds>, PassError> {
        let Configuration::Service(_) = shape.configuration() else { return Ok(None) };
        let mut groups = Vec::new();
        for group in shape.groups()? {
            let traffic = match &group.scaling {
                Some(by) => traffic::traffic(&self.0.db, run.id, run.gateway_id, by.window).await?,
                None => None,
            };
            groups.push(replicas::ReplicaGroupView {
                traffic,
                ..service::build_group(run, jobs, shape, group)?
            });
        }
        Ok(Some(ServiceNeeds::evaluate(run, jobs, shape, tracking, groups, Timestamp(lease.now()))?))
    }

    fn outcome<'a>(
        &self,
        lease: &Lease,
        row: &LoadedRun,
        before: Option<&Plan>,
        plan: &'a Plan,
        due_in_us: Option<i64>,
    ) -> Result<RunUpdate<'a>, PassError> {
        let mut events = Vec::new();
        let mut status = row.run.status;
        for plan in before.into_iter().chain([plan]) {
            if plan.status != status
                && let Some(event) = plan.event
            {
                let reason = plan.ending.as_ref().map_or(event.as_str(), |e| e.reason().as_str());
                let why = pipeline_cause(event::Pipeline::Run, lease, reason, &plan.message);
                let moved = event::transition::<run::RunLifecycle>(lease.id, status, event, why)?;
                events.extend(moved.record.map(|record| (record, row.run.name.clone())));
            }
            status = plan.status;
        }
        let mut submissions = Vec::new();
        let mut keys = BTreeMap::new();
        for submit in &plan.submit {
            let new = self.submission(row, *submit, &mut keys)?;
            let why = pipeline_cause(
                event::Pipeline::Run,
                lease,
                "submitted",
                match submit.submission {
                    0 => "Job submitted".to_owned(),
                    again => format!("Job submitted again, attempt {}", again + 1),
                },
            );
            let mut created = Event::created::<job::JobLifecycle>(new.id, job::Status::Submitted, why);
            // The epoch is the run's; the submission has not been claimed yet.
            created.epoch = None;
            events.push((created, new.job_name.clone()));
            submissions.push(new);
        }
        let latest = latest_submissions(&row.jobs);
        let ends = plan.end.iter().filter_map(|end| {
            let job = latest.get(&(i64::from(end.replica), i64::from(end.job)))?;
            Some(EndRequest { submission: job.id, ending: end.ending.clone() })
        });
        for (reason, why) in row.service.iter().flat_map(ServiceNeeds::reported) {
            let why = pipeline_cause(event::Pipeline::Run, lease, reason, why);
            events.push((Event::note(event::Entity::Run, lease.id, why), row.run.name.clone()));
        }
        let service = row.service.as_ref();
        let tracking = build_tracking(row, plan);
        let settles = service.is_some_and(|needs| needs.settles(&row.run));
        let back = service.and_then(ServiceNeeds::rollback_spec).map(str::to_owned);
        let tracking = serde_json::to_string(&tracking).map_err(PassError::document)?;
        // With several nodes, one may have advanced without a change of the run.
        let has_news = plan.status != row.run.status || row.jobs.len() > 1;
        let marks_managed_due = row.run.managed_job_id.is_some() && has_news;
        Ok(RunUpdate {
            plan,
            tracking,
            settles,
            back,
            submissions,
            ends: ends.collect(),
            events,
            due_in_us,
            marks_managed_due,
        })
    }

    /// Builds a submission. `keys` holds the SSH key that the nodes of each replica share in this pass.
    fn submission(
        &self,
        row: &LoadedRun,
        submit: brain::NewSubmission,
        keys: &mut BTreeMap<u32, NodeKey>,
    ) -> Result<NewJob, PassError> {
        let before = row.jobs.iter().find(|job| to_u32(job.replica_num) == submit.replica);
        let previous = row
            .jobs
            .iter()
            .rev()
            .find(|job| to_u32(job.replica_num) == submit.replica && to_u32(job.job_num) == submit.job);
        let history = PreemptionHistory::after(previous);
        let group = row.service.as_ref().and_then(|needs| needs.wanted.groups.get(&submit.replica));
        let group = group.or_else(|| before.and_then(|job| job.replica_group.as_ref()));
        let (spec, job_spec) = row.shape.job(group.map(String::as_str), submit.replica, submit.job)?;
        let id = SubmissionId(self.0.db.new_id()?);
        let secrets_sealed = if spec.jobs_per_replica > 1 {
            let key = match keys.entry(submit.replica) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(none) => none.insert(NodeKey::draw()?),
            };
            Some(key.seal_for(&self.0.keys, id)?)
        } else {
            None
        };
        Ok(NewJob {
            id,
            run_id: row.run.id,
            project_id: row.run.project_id,
            job_name: spec.job_name,
            replica_num: submit.replica.into(),
            job_num: submit.job.into(),
            submission_num: submit.submission.into(),
            deployment_num: row.run.deployment_num,
            replica_group: Some(spec.replica_group),
            status: job::Status::Submitted,
            job_spec,
            secrets_sealed,
            priority: row.run.priority,
            preemptible: row.shape.preemptibility(row.run.managed_job_id.is_some()).as_str().to_owned(),
            preempted_before: history.count,
            queued_at: history.queued_at,
        })
    }
}

/// State that is kept until the next pass.
fn build_tracking(row: &LoadedRun, plan: &Plan) -> RunTracking {
    let service = row.service.as_ref();
    RunTracking {
        fired: plan.last_slot,
        groups: service.map(|needs| needs.wanted.scaling.clone()).unwrap_or_default(),
        rollout: service.map(|needs| needs.evaluated.rollout.clone()),
        retry: retry_wait(row, plan),
    }
}

/// The failure after which a pending run is retried: recorded when it becomes pending, and kept until it leaves that
/// status.
fn retry_wait(row: &LoadedRun, plan: &Plan) -> Option<RetryWait> {
    if plan.status != run::Status::Pending || plan.attempt == 0 {
        return None;
    }
    let cause = match row.run.status == run::Status::Pending {
        true => row.retry.as_ref()?.cause.clone(),
        false => plan.message.clone(),
    };
    // A service is due more often than it is retried.
    let at = plan.due_at.filter(|_| row.service.is_none());
    Some(RetryWait { failures: plan.attempt, cause, at })
}

fn pipelines_to_wake(outcome: &RunUpdate<'_>) -> Vec<&'static str> {
    let mut wake = Vec::new();
    if !outcome.submissions.is_empty() {
        wake.push(super::jobs_submitted::QUEUE.pipeline);
    }
    if !outcome.ends.is_empty() {
        wake.extend([
            super::jobs_submitted::QUEUE.pipeline,
            super::jobs_running::QUEUE.pipeline,
            super::jobs_terminating::QUEUE.pipeline,
            Hint::Routes.as_str(),
        ]);
    }
    wake
}

/// The newest submission of each job.
fn latest_submissions(jobs: &[Job]) -> BTreeMap<(i64, i64), &Job> {
    // Ordered by submission, so the last one stays.
    jobs.iter().map(|job| ((job.replica_num, job.job_num), job)).collect()
}

fn view(
    run: &Run,
    jobs: &[Job],
    shape: &ParsedRunSpec,
    tracking: &RunTracking,
    service: Option<&ServiceNeeds>,
) -> Result<RunView, PassError> {
    let began = tracking.fired.unwrap_or(run.submitted_at);
    let mut replicas: Vec<brain::ReplicaView> = Vec::new();
    for ((replica, job_num), newest) in latest_submissions(jobs) {
        let of_execution = jobs
            .iter()
            .filter(|j| j.replica_num == replica && j.job_num == job_num && j.submitted_at >= began);
        let tries = of_execution.clone().count();
        let mut streak = FailureStreak::default();
        for one in of_execution {
            let Some(ended) = one.terminating_at else { continue };
            if one.termination_detail.as_deref() == Some(job::TerminationDetail::RegionFull.as_str()) {
                continue;
            }
            let ran = one.running_at.map(|began| ended.since(began));
            streak.record_failure(shape.retry(), ended, one.provisioned_at.is_some(), ran);
        }
        let job = brain::JobView {
            num: to_u32(job_num),
            submission: to_u32(newest.submission_num),
            state: job_state(newest),
            attempts: u32::try_from(tries).unwrap_or(u32::MAX),
            failures: streak.failures,
            failing_since: streak.since,
        };
        match replicas.last_mut().filter(|r| r.num == to_u32(replica)) {
            Some(known) => known.jobs.push(job),
            None => {
                let weight = service.map_or(ReplicaRole::Full, |needs| needs.weight(run, newest, shape));
                replicas.push(brain::ReplicaView { num: to_u32(replica), role: weight, jobs: vec![job] });
            }
        }
    }
    let schedule = shape.crons().map(|crons: &CronSchedule| ScheduleState {
        crons: crons.clone(),
        next_slot: run.next_triggered_at,
        last_slot: tracking.fired,
    });
    Ok(RunView {
        status: run.status,
        ending: run_ending(run),
        requested_stop: run.stop_asked_at.map(|_| brain::RequestedStop { is_abort: run.abort_asked }),
        submitted_at: run.submitted_at,
        attempt: to_u32(run.retry_count),
        pending_since: run.retry_since.unwrap_or(run.submitted_at),
        retry_delay: retry::DELAY_FIRST,
        schedule,
        retry: shape.retry().cloned(),
        stop_criteria: shape.stop_criteria(),
        has_gateway_failed: false,
        surplus: service.map(|needs| needs.wanted.surplus.clone()).unwrap_or_default(),
        is_rolling_back: service.is_some_and(|needs| needs.rollback_spec().is_some()),
        replicas,
        start: match service {
            Some(needs) => needs.wanted.start.clone(),
            None => shape.starts()?,
        },
    })
}

/// State of a submission. One that was requested to end counts as terminating before its own pipeline sets that status.
fn job_state(job: &Job) -> SubmissionState {
    let over = job.status.is_final() || job.status == job::Status::Terminating;
    match job.end_asked().filter(|_| !over) {
        Some(ending) => SubmissionState::Terminating(ending),
        None => SubmissionState::from_stored(job.status, job.ending()),
    }
}

fn run_ending(run: &Run) -> Option<run::Ending> {
    let reason = run.termination_reason.as_deref()?.parse().ok()?;
    Some(run::Ending::new(reason, run.termination_message.clone().unwrap_or_default()))
}

fn to_u32(n: i64) -> u32 {
    u32::try_from(n).unwrap_or_default()
}
