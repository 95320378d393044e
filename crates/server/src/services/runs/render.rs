//! Conversion of runs and jobs to responses.

use std::collections::HashMap;

use serde::Deserialize;
use windlass_api::runs as wire;
use windlass_model::{
    id::RunId,
    job::{self, Ending},
    run::{self, JobSummary},
    time::Timestamp,
};

use super::end_reasons;
use crate::{
    db::{
        DbError,
        documents::{
            JOB_CONNECTION, JOB_PROBES, JOB_PROVISIONING, JOB_PULL_PROGRESS, JOB_RUNTIME, JOB_SHORTFALLS,
            JOB_SPEC, RUN_SERVICE, RUN_SPEC,
        },
        jobs::Job,
        runs::{NamedRun, Run},
    },
    error::Result,
    job_spec_view,
    run_tracking::{RetryWait, RunTracking},
    services::stored_document,
};

/// Jobs that a response includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum IncludedJobs {
    None,
    /// The newest submissions of each, up to this number; `None`: all.
    Newest(Option<i64>),
}

/// Converts runs. `jobs` is ordered by run, replica, job and submission.
pub(super) fn runs(rows: Vec<NamedRun>, jobs: Vec<Job>, wanted: IncludedJobs) -> Result<Vec<wire::Run>> {
    let mut of_run = HashMap::<RunId, Vec<Job>>::new();
    for job in jobs {
        of_run.entry(job.run_id).or_default().push(job);
    }
    let keep_none = matches!(wanted, IncludedJobs::Newest(Some(0)));
    rows.into_iter()
        .map(|row| {
            let jobs = of_run.remove(&row.run.id).unwrap_or_default();
            let mut shown = run(row, jobs)?;
            if keep_none {
                shown.jobs.iter_mut().for_each(|job| job.job_submissions.clear());
            }
            Ok(shown)
        })
        .collect()
}

fn run(row: NamedRun, rows: Vec<Job>) -> Result<wire::Run> {
    let NamedRun { run, project_name, user_name, fleet_name } = row;
    let reason: Option<run::TerminationReason> =
        run.termination_reason.as_deref().and_then(|word| word.parse().ok());
    let glances = latest_jobs(&rows);
    let cost = rows.iter().map(|job| cost(job, run.last_processed_at)).sum::<Result<_, _>>()?;
    let retry = retries_no_capacity(run.status, &glances, &rows)?;
    let (deployment, scaling, waits) = read_tracking(&run)?;
    let next_attempt = waits.as_ref().and_then(|wait| wait.at);
    let retrying = retry || next_attempt.is_some();
    let message = match (&run.status_message, retry, next_attempt) {
        (Some(text), _, _) => text.clone(),
        (None, _, Some(at)) => format!("retrying at {}", truncate_to_second(at)),
        (None, true, _) => "retrying".to_owned(),
        (None, false, _) => match next_start(&run) {
            Some(next) => next,
            None => run::status_message(run.status, &glances, None).to_owned(),
        },
    };
    let waits_because = waiting_reason(&run, &rows, &scaling, waits);
    let stopping = stopping_message(&rows);
    let jobs = grouped(rows)?;
    let latest = jobs
        .iter()
        .filter_map(|job| job.job_submissions.last())
        .reduce(|latest, other| if other.submitted_at > latest.submitted_at { other } else { latest })
        .cloned();
    let limit = end_reasons::exceeded_retry_limit(
        run.termination_reason.as_deref(),
        run.termination_message.as_deref(),
    );
    let is_ending = run.status == run::Status::Terminating;
    let name = run.name;
    let shown = wire::Run {
        id: run.id.0,
        project_name,
        user: user_name,
        fleet: run.fleet_id.zip(fleet_name).map(|(id, name)| wire::RunFleet { id: id.0, name }),
        submitted_at: run.submitted_at,
        last_processed_at: run.last_processed_at,
        status: run.status.as_str().to_owned(),
        status_message: message,
        error: reason.and_then(run::TerminationReason::error).map(str::to_owned),
        termination_reason: run.termination_reason,
        run_spec: stored_document(RUN_SPEC, run.id, run.spec)?,
        jobs,
        latest_job_submission: latest,
        cost,
        service: RUN_SERVICE.decode_opt(run.id, run.service.as_deref())?,
        deployment_num: run.deployment_num,
        deleted: Some(run.deleted),
        next_triggered_at: run.next_triggered_at,
        retrying,
        reason: waits_because,
        reasons: Vec::new(),
        hint: None,
        deployment,
        scaling,
        row: None,
        as_of: None,
    };
    let (reasons, hint) = (end_reasons::reasons(&shown, limit), end_reasons::hint(&shown, &name));
    let mut shown = wire::Run { reasons, hint, ..shown };
    if is_ending && let Some(stopping) = stopping {
        shown.reason = Some(format!("ending: {}; {stopping}", end_reasons::end_in_words(&shown)));
    }
    Ok(shown)
}

const ASLEEP_MESSAGE: &str = "scaled to zero: no recent requests; the next request starts a replica";

fn truncate_to_second(at: Timestamp) -> Timestamp {
    Timestamp::from_secs(at.0.div_euclid(1_000_000))
}

/// Message of a run that waits for its schedule.
fn next_start(run: &Run) -> Option<String> {
    let next = run.next_triggered_at.filter(|_| run.status == run::Status::Pending)?;
    Some(format!("next start at {}", truncate_to_second(next)))
}

/// Message of the job that failed last by itself.
fn failure_message(jobs: &[Job]) -> Option<String> {
    let is_caused_by_others = |job: &&Job| {
        matches!(
            job.termination_reason.as_deref(),
            Some("terminated_by_server" | "done_by_runner" | "scaled_down")
        )
    };
    let ended = jobs.iter().filter(|job| job.finished && !is_caused_by_others(job));
    let last = ended.max_by_key(|job| job.finished_at)?;
    let line = last.termination_message.as_deref()?.lines().next().filter(|line| !line.trim().is_empty())?;
    let no_capacity = job::TerminationReason::FailedToStartDueToNoCapacity.as_str();
    let lacked = last.termination_reason.as_deref() == Some(no_capacity);
    Some(if lacked { format!("no capacity: {line}") } else { line.to_owned() })
}

/// Message of the job that may stop last, which says until when it may.
fn stopping_message(jobs: &[Job]) -> Option<String> {
    let stopping = jobs.iter().filter(|job| job.status == job::Status::Terminating);
    stopping.max_by_key(|job| job.stop_deadline_at)?.status_message.clone()
}

/// Reason why a run that has not started, or does not continue, waits. `None` if it does not.
fn waiting_reason(
    run: &Run,
    jobs: &[Job],
    scaling: &[wire::GroupScaling],
    retry: Option<RetryWait>,
) -> Option<String> {
    match run.status {
        run::Status::Pending => {
            if let Some(RetryWait { failures, cause, at }) = retry {
                let next =
                    at.map(|at| format!("; attempt {} begins at {}", failures + 1, truncate_to_second(at)));
                let cause = failure_message(jobs).unwrap_or(cause);
                return Some(format!("attempt {failures} failed: {cause}{}", next.unwrap_or_default()));
            }
            let is_asleep = !scaling.is_empty() && scaling.iter().all(|group| group.desired == 0);
            let asleep = is_asleep.then(|| ASLEEP_MESSAGE.to_owned());
            next_start(run).or(asleep)
        }
        run::Status::Submitted => {
            let waiting = jobs.iter().rev().filter(|job| job.status == job::Status::Submitted);
            let message = waiting.filter_map(|job| job.status_message.as_deref()).next();
            Some(message.map_or("waiting for its turn".to_owned(), |message| {
                format!("no instance for it yet: {message}")
            }))
        }
        run::Status::Provisioning | run::Status::Running | run::Status::Terminating => None,
        run::Status::Terminated | run::Status::Failed | run::Status::Done => None,
    }
}

/// State of a service's deployment, reasons for the number of replicas of each group, and the failure after which a
/// pending run waits.
fn read_tracking(
    run: &Run,
) -> Result<(Option<wire::Deployment>, Vec<wire::GroupScaling>, Option<RetryWait>)> {
    let is_telling = run.service.is_some() || run.status == run::Status::Pending;
    let tracking = if is_telling { RunTracking::of(run)? } else { RunTracking::default() };
    let deployment = tracking.rollout.map(|one| wire::Deployment {
        num: one.num,
        state: one.state.as_str().to_owned(),
        ready: one.ready,
        wanted: one.wanted,
        old: one.old,
        message: one.message,
        rolled_back: one.undid.map(|undid| wire::RolledBackDeployment { num: undid.num, message: undid.why }),
    });
    let group = |(name, one): (String, windlass_model::decide::replicas::ScalingState)| wire::GroupScaling {
        group: name,
        desired: one.desired,
        message: one.message,
    };
    let retry = tracking.retry.filter(|_| run.status == run::Status::Pending);
    Ok((deployment, tracking.groups.into_iter().map(group).collect(), retry))
}

/// Each job once: its latest status, and the reason of its latest ended submission.
fn latest_jobs(rows: &[Job]) -> Vec<JobSummary> {
    rows.chunk_by(|a, b| (a.replica_num, a.job_num) == (b.replica_num, b.job_num))
        .filter_map(|submissions| {
            let latest = submissions.last()?;
            let ended = submissions.iter().rev().find(|job| job.finished);
            Some(JobSummary {
                status: latest.status,
                last_ended: ended.and_then(|job| job.termination_reason.as_deref()?.parse().ok()),
            })
        })
        .collect()
}

/// Returns whether a lack of capacity is retried. The policy is inside the job's spec, which is parsed only if a job
/// lacked capacity.
fn retries_no_capacity(status: run::Status, glances: &[JobSummary], rows: &[Job]) -> Result<bool, DbError> {
    #[derive(Deserialize)]
    struct Spec {
        retry: Option<Retry>,
    }
    #[derive(Deserialize)]
    struct Retry {
        on_events: Vec<String>,
    }
    let lacked =
        |glance: &JobSummary| glance.last_ended == Some(job::TerminationReason::FailedToStartDueToNoCapacity);
    let waits = matches!(status, run::Status::Pending | run::Status::Submitted);
    if !waits || !glances.iter().any(lacked) {
        return Ok(false);
    }
    for job in rows {
        let Spec { retry } = JOB_SPEC.decode(job.id, &job.job_spec)?;
        if retry.is_some_and(|retry| retry.on_events.iter().any(|event| event == "no-capacity")) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn grouped(rows: Vec<Job>) -> Result<Vec<wire::Job>> {
    let mut jobs: Vec<((i64, i64), wire::Job)> = Vec::new();
    for mut row in rows {
        let key = (row.replica_num, row.job_num);
        let readiness = Readiness::of(&row)?;
        let spec = stored_document(JOB_SPEC, row.id, std::mem::take(&mut row.job_spec))?;
        let connection = JOB_CONNECTION.decode_opt(row.id, row.connection_info.as_deref())?;
        let submission = submission(row, readiness)?;
        match jobs.last_mut() {
            // The newest submission has the current spec of the job.
            Some((last, job)) if *last == key => {
                job.job_spec = spec;
                job.job_connection_info = connection;
                job.job_submissions.push(submission);
            }
            _ => jobs.push((
                key,
                wire::Job {
                    job_spec: spec,
                    job_submissions: vec![submission],
                    job_connection_info: connection,
                },
            )),
        }
    }
    Ok(jobs.into_iter().map(|(_, job)| job).collect())
}

fn submission(row: Job, readiness: Readiness) -> Result<wire::JobSubmission> {
    let ending = row.ending();
    let computed = || readiness.message.unwrap_or_else(|| job::status_message(row.status, ending.as_ref()));
    let inactive = row.inactive_since.map(|since| row.last_processed_at.since(since).as_secs().max(0));
    Ok(wire::JobSubmission {
        id: row.id.0,
        submission_num: row.submission_num,
        deployment_num: row.deployment_num,
        submitted_at: row.submitted_at,
        last_processed_at: row.last_processed_at,
        finished_at: row.finished_at,
        inactivity_secs: inactive,
        status: row.status.as_str().to_owned(),
        status_message: row.status_message.unwrap_or_else(computed),
        error: ending.as_ref().and_then(Ending::error).map(str::to_owned),
        termination_reason: row.termination_reason,
        termination_reason_message: row.termination_message,
        exit_status: row.exit_status,
        job_provisioning_data: JOB_PROVISIONING.decode_opt(row.id, row.provisioning.as_deref())?,
        job_runtime_data: JOB_RUNTIME.decode_opt(row.id, row.runtime.as_deref())?,
        image_pull_progress: JOB_PULL_PROGRESS.decode_opt(row.id, row.pull_progress.as_deref())?,
        ready: readiness.ready,
        queue_position: None,
        why: JOB_SHORTFALLS.decode_opt(row.id, row.shortfalls.as_deref())?,
        probes: JOB_PROBES.decode_opt(row.id, row.probes.as_deref())?.unwrap_or_default(),
    })
}

/// State of a running replica with probes: if it receives requests, and the probe for which it waits.
#[derive(Default)]
struct Readiness {
    ready: Option<bool>,
    message: Option<String>,
}

impl Readiness {
    fn of(row: &Job) -> Result<Self> {
        // Most jobs have no probes, and lists of jobs are long: their specifications are not parsed for this.
        let has_probes = row.job_spec.contains("\"probes\":[{");
        if row.status != job::Status::Running || !has_probes {
            return Ok(Self::default());
        }
        let waits = if row.replica_registered { None } else { job_spec_view::readiness_wait(row)? };
        let message = waits.map(|what| format!("not ready: {what}"));
        Ok(Self { ready: Some(row.replica_registered), message })
    }
}

/// Cost of the instance while the submission had it. Only for submissions that the response includes.
fn cost(job: &Job, now: Timestamp) -> Result<f64, DbError> {
    #[derive(Deserialize)]
    struct PricedInstance {
        #[serde(default)]
        price: f64,
    }
    let priced = JOB_PROVISIONING.decode_opt(job.id, job.provisioning.as_deref())?;
    let Some(PricedInstance { price }) = priced else { return Ok(0.0) };
    let from = job.provisioned_at.unwrap_or(job.submitted_at);
    let until = job.finished_at.unwrap_or_else(|| now.max(job.last_processed_at));
    #[expect(clippy::cast_precision_loss, reason = "money is shown to cents, hours are small")]
    let hours = until.since(from).0.max(0) as f64 / 3.6e9;
    Ok(price * hours)
}
