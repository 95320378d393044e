//! Rows of a new run: the run, the first submission of each of its jobs, and their events.
//!
//! Used both for runs that a user applies and for those that a managed job launches.

use windlass_model::{
    config::job_spec::JobSpec,
    event::{Actor, Entity, Event, EventCause},
    id::{ManagedJobId, ProjectId, RunId, SubmissionId, UserId},
    job, run,
    time::Timestamp,
};

use super::ResolvedRunSpec;
use crate::{
    db::{
        Change, Db, Unit,
        events::{self, EventContext, EventTarget},
        gateways,
        jobs::{self, Job, NewJob},
        repos,
        runs::{self, NewRun},
    },
    encryption::Keyring,
    error::{Error, Result},
    limits::{self, limit_hint},
    node_keys::NodeKey,
    services::service_domains::GatewayPublication,
};

/// Owner, project and cause of a new run.
pub(crate) struct RunRequest<'a> {
    pub(crate) project: ProjectId,
    pub(crate) project_name: &'a str,
    pub(crate) user: UserId,
    pub(crate) actor: Actor,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) idempotency_hash: Option<String>,
    /// Managed job of which it is an attempt.
    pub(crate) managed_job: Option<ManagedJobId>,
    /// JSON: the locations that it avoids or prefers.
    pub(crate) places: Option<String>,
    /// Gateway and domain that publish it.
    pub(crate) published: Option<GatewayPublication>,
    /// Maximum number of jobs with which it may start.
    pub(crate) jobs_max: usize,
    pub(crate) history: PreemptionHistory,
}

/// State that a new submission keeps of those before it: the number of preemptions, and the place in the queue.
#[derive(Clone, Copy, Default)]
pub(crate) struct PreemptionHistory {
    pub(crate) count: i64,
    pub(crate) queued_at: Option<Timestamp>,
}

impl PreemptionHistory {
    /// For the next submission of a job. It keeps its place if the last one was preempted.
    pub(crate) fn after(previous: Option<&Job>) -> Self {
        let Some(previous) = previous else { return Self::default() };
        let count = previous.preempted_before;
        match previous.ending().is_some_and(|ending| ending.is_preempted()) {
            true => Self {
                count: count + 1,
                queued_at: Some(previous.queued_at.unwrap_or(previous.submitted_at)),
            },
            false => Self { count, queued_at: None },
        }
    }

    /// For the next attempt of a managed job. An attempt that never ran was withdrawn and waits further.
    pub(crate) fn after_attempt<'a>(jobs: impl Iterator<Item = &'a Job> + Clone) -> Self {
        let is_preempted = |job: &Job| job.ending().is_some_and(|ending| ending.is_preempted());
        let keeps_place = jobs.clone().any(is_preempted) || jobs.clone().all(|job| job.running_at.is_none());
        let before = jobs.clone().map(|job| job.preempted_before).max().unwrap_or_default();
        Self {
            count: before + i64::from(jobs.clone().any(is_preempted)),
            queued_at: jobs
                .map(|job| job.queued_at.unwrap_or(job.submitted_at))
                .min()
                .filter(|_| keeps_place),
        }
    }
}

/// Builds the unit with all rows of the run. `next` is its first slot, if it has a schedule.
pub(crate) fn unit(
    db: &Db,
    keys: &Keyring,
    requested: RunRequest<'_>,
    spec: &ResolvedRunSpec,
    next: Option<Timestamp>,
) -> Result<(RunId, Unit)> {
    let name = spec.name().unwrap_or_default();
    let id = RunId(db.new_id()?);
    let specs = if next.is_some() { Vec::new() } else { spec.jobs()? };
    if specs.len() > requested.jobs_max {
        let (jobs, most, more) = (specs.len(), requested.jobs_max, limit_hint(limits::RUN_JOBS_MAX));
        return Err(Error::refused(format!(
            "the run starts with {jobs} jobs, but at most {most} are allowed; {more}"
        )));
    }
    // Scheduled, or a service at zero replicas: nothing runs yet.
    let status = if specs.is_empty() { run::Status::Pending } else { run::Status::Submitted };
    let replicas = specs.iter().map(|spec| i64::from(spec.replica_num) + 1).max().unwrap_or(0);
    let RunRequest { project, user, actor, .. } = requested;
    let row = NewRun {
        id,
        project_id: project,
        user_id: user,
        repo_id: spec.repo_id().map(str::to_owned),
        name: name.to_owned(),
        spec: spec.value.to_string(),
        service: spec
            .service(requested.project_name, name, requested.published.as_ref())
            .map(|service| service.to_string()),
        gateway_id: requested.published.as_ref().map(|at| at.gateway),
        status,
        desired_replicas: replicas,
        priority: spec.rank(),
        next_triggered_at: next,
        idempotency_key: requested.idempotency_key,
        idempotency_hash: requested.idempotency_hash,
        managed_job_id: requested.managed_job,
        places: requested.places,
    };
    let because = |message: &str| EventCause { actor, reason: "submitted".into(), message: message.into() };
    let reported = |event: &Event, entity, id, name: &str| {
        let by = match actor {
            Actor::User(user) => Some(user),
            Actor::Pipeline { .. } | Actor::Server => None,
        };
        let targets = [EventTarget { entity, id, name }];
        let place = EventContext { project: Some(project), user: by, lock_token: None, targets: &targets };
        events::append(db, event, &place)
    };
    let mut created = Event::created::<run::RunLifecycle>(id.0, status, because("Run submitted"));
    // An epoch would be that of another row's lock; the locks of these rows have not been claimed yet.
    created.epoch = None;
    let mut unit = Unit::new().and([runs::insert(row)]).and(reported(&created, Entity::Run, id.0, name)?);
    if let Some(at) = &requested.published {
        unit = unit.and(gateways::claim_domain(&at.domain, id));
    }
    unit = unit.and(mark_uploads_used(project, spec));
    for (job, sealed) in submissions(db, keys, project, spec, id, &specs)? {
        let mut created =
            Event::created::<job::JobLifecycle>(job.id.0, job::Status::Submitted, because("Job submitted"));
        created.epoch = None;
        let reported = reported(&created, Entity::Job, job.id.0, &job.job_name)?;
        let preemptible = spec.preemptibility(requested.managed_job.is_some()).as_str().to_owned();
        let PreemptionHistory { count: preempted_before, queued_at } = requested.history;
        let row = NewJob { secrets_sealed: sealed, preemptible, preempted_before, queued_at, ..job };
        unit = unit.and([jobs::insert(row)]).and(reported);
    }
    Ok((id, unit))
}

/// Marks the uploads of the run as used, so that they are kept with it.
fn mark_uploads_used(project: ProjectId, spec: &ResolvedRunSpec) -> Vec<Change> {
    let archives: Vec<uuid::Uuid> = spec.shape.file_archives().iter().map(|archive| archive.id).collect();
    let code = spec.value["repo_code_hash"].as_str().zip(spec.repo_id());
    let code = code.map(|(hash, repo)| repos::mark_code_used(project, repo, hash));
    let archives = (!archives.is_empty()).then(|| repos::mark_archives_used(&archives));
    code.into_iter().chain(archives).collect()
}

/// First submission of each job. Jobs of one replica reach each other with a separate key, which no response ever
/// shows.
fn submissions(
    db: &Db,
    keys: &Keyring,
    project: ProjectId,
    spec: &ResolvedRunSpec,
    run: RunId,
    specs: &[JobSpec],
) -> Result<Vec<(NewJob, Option<Vec<u8>>)>> {
    let mut all = Vec::with_capacity(specs.len());
    for replica in specs.chunk_by(|a, b| a.replica_num == b.replica_num) {
        let key = if replica.len() > 1 { Some(NodeKey::draw()?) } else { None };
        for job in replica {
            let id = SubmissionId(db.new_id()?);
            let sealed = key.as_ref().map(|key| key.seal_for(keys, id)).transpose()?;
            let row = NewJob {
                id,
                run_id: run,
                project_id: project,
                job_name: job.job_name.clone(),
                replica_num: job.replica_num.into(),
                job_num: job.job_num.into(),
                submission_num: 0,
                deployment_num: 0,
                replica_group: Some(job.replica_group.clone()),
                status: job::Status::Submitted,
                job_spec: spec.shape.document(job).map_err(|error| Error::refused(error.to_string()))?,
                secrets_sealed: None,
                priority: spec.rank(),
                preemptible: windlass_model::plan::preemption::Preemptibility::Never.as_str().to_owned(),
                preempted_before: 0,
                queued_at: None,
            };
            all.push((row, sealed));
        }
    }
    Ok(all)
}
