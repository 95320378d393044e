//! Converts the replicas of a service to the inputs of the decision.

use serde_json::Value;
use windlass_model::{
    decide::{
        readiness,
        replicas::{
            self, GroupReplica, ReplicaGroupView, ReplicaPlan, ReplicaStage, Rollout, RolloutDecision,
            RolloutEvaluation, TrialReplica, rollout,
        },
        runs::{ReplicaRole, SubmissionState},
    },
    job::{Ending, TerminationReason},
    plan::diff,
    retry, run,
    time::Timestamp,
};

use super::{job_state, latest_submissions, to_u32};
use crate::{
    db::{
        DbError,
        documents::{JOB_PROBES, RUN_COMPLETE_SPEC, RUN_SPEC},
        jobs::Job,
        runs::Run,
    },
    job_spec_view,
    parsed_run_spec::{ParsedRunSpec, ReplicaGroupSpec},
    run_tracking::RunTracking,
};

/// Desired state of a service.
pub(super) struct ServiceNeeds {
    pub(super) wanted: ReplicaPlan,
    pub(super) evaluated: RolloutEvaluation,
    /// The specification before the deployment on trial; `None` without a trial.
    former: Option<String>,
}

impl ServiceNeeds {
    pub(super) fn evaluate(
        run: &Run,
        jobs: &[Job],
        shape: &ParsedRunSpec,
        tracking: &RunTracking,
        groups: Vec<ReplicaGroupView>,
        now: Timestamp,
    ) -> Result<Self, DbError> {
        let (before, pace) = (tracking.rollout.as_ref(), shape.pace());
        let mut wanted = replicas::decide(&groups, &tracking.groups, &pace, run.submitted_at, now);
        wanted.surplus.extend(orphaned_replicas(jobs, &groups));
        let is_evaluated = is_rollout_complete(run, before) || is_ending(run);
        let former = if is_evaluated { None } else { previous_spec(run)? };
        let trials = rollout_trials(run, jobs, shape)?;
        let evaluated = replicas::evaluate(
            run.deployment_num,
            (&groups, &wanted.scaling),
            &trials,
            &pace,
            former.is_some(),
            before,
            now,
        );
        if evaluated.decision == RolloutDecision::RollBack {
            // A configuration that is rolled back starts and stops no replicas.
            wanted.start.clear();
            wanted.surplus.clear();
        }
        Ok(Self { wanted, evaluated, former })
    }

    /// The specification to which the service is rolled back.
    pub(super) fn rollback_spec(&self) -> Option<&str> {
        self.former.as_deref().filter(|_| self.evaluated.decision == RolloutDecision::RollBack)
    }

    /// Returns whether the specification is to be stored as one to roll back to.
    pub(super) fn settles(&self, run: &Run) -> bool {
        self.evaluated.decision == RolloutDecision::Complete && run.settled_spec.as_ref() != Some(&run.spec)
    }

    /// Events of this pass, each as a fixed word for programs and a sentence for people.
    pub(super) fn reported(&self) -> impl Iterator<Item = (&str, &str)> {
        let scaled = self.wanted.reasons.iter().map(|why| ("scaled", why.as_str()));
        scaled.chain(self.evaluated.event.iter().map(|(word, text)| (*word, text.as_str())))
    }

    /// Effect of the end of a replica on the run.
    pub(super) fn weight(&self, run: &Run, newest: &Job, shape: &ParsedRunSpec) -> ReplicaRole {
        if !is_current(run, newest, shape) {
            return ReplicaRole::Gone;
        }
        match self.former.is_some() && newest.deployment_num == run.deployment_num {
            // A configuration that is rolled back is not retried.
            true if self.rollback_spec().is_some() => ReplicaRole::Gone,
            true => ReplicaRole::Trial,
            false => ReplicaRole::Full,
        }
    }
}

/// Returns whether the run is ending: it is not rolled back any more.
fn is_ending(run: &Run) -> bool {
    run.stop_asked_at.is_some() || run.finished || run.status == run::Status::Terminating
}

fn is_rollout_complete(run: &Run, before: Option<&Rollout>) -> bool {
    before.is_some_and(|one| one.num == run.deployment_num && one.state == rollout::RolloutState::Complete)
}

/// The specification for a rollback: replicas from the last complete deployment, everything else as it is now. `None`
/// if that makes no difference.
fn previous_spec(run: &Run) -> Result<Option<String>, DbError> {
    let Some(applied) = run.settled_spec.as_deref() else { return Ok(None) };
    let current: Value = RUN_SPEC.decode(run.id, &run.spec)?;
    let before: Value = RUN_COMPLETE_SPEC.decode(run.id, applied)?;
    let back = diff::roll_back_spec(&current, &before);
    if back == current {
        return Ok(None);
    }
    // Old and new parts may be incompatible; then the whole previous specification is used.
    let fits = ParsedRunSpec::read(&run.name, &back).is_ok();
    Ok(Some(if fits { back.to_string() } else { applied.to_owned() }))
}

/// The present replicas of one group. Replicas from before groups had names belong to the first.
pub(super) fn build_group(
    run: &Run,
    jobs: &[Job],
    shape: &ParsedRunSpec,
    group: ReplicaGroupSpec,
) -> Result<ReplicaGroupView, DbError> {
    let ReplicaGroupSpec { name, min, max, scaling } = group;
    let mut found = ReplicaGroupView {
        name,
        min,
        max,
        scaling,
        replicas: Vec::new(),
        free_nums: Vec::new(),
        leaving_nums: Vec::new(),
        traffic: None,
    };
    let mine = latest_submissions(jobs)
        .into_values()
        .filter(|job| job.replica_group.as_deref().unwrap_or("0") == found.name);
    for job in mine {
        let (num, current) = (to_u32(job.replica_num), is_current(run, job, shape));
        // A failed replica of a former configuration is not retried.
        let is_gone = |ending: &Ending| !current || ending.reason() == TerminationReason::ScaledDown;
        match job_state(job) {
            SubmissionState::Terminating(ending) if is_gone(&ending) => found.leaving_nums.push(num),
            SubmissionState::Final(ending) if is_gone(&ending) => found.free_nums.push(num),
            SubmissionState::Submitted
            | SubmissionState::Provisioning
            | SubmissionState::Pulling
            | SubmissionState::Running
            | SubmissionState::Terminating(_)
            | SubmissionState::Final(_) => {
                found.replicas.push(GroupReplica { num, is_current: current, stage: replica_stage(job)? })
            }
        }
    }
    Ok(found)
}

fn replica_stage(job: &Job) -> Result<ReplicaStage, DbError> {
    Ok(match job_state(job) {
        SubmissionState::Submitted => ReplicaStage::Waits,
        SubmissionState::Provisioning | SubmissionState::Pulling => ReplicaStage::Starting,
        SubmissionState::Running if job.replica_registered => ReplicaStage::Ready,
        SubmissionState::Running if was_ready(job)? => ReplicaStage::NoLongerReady,
        SubmissionState::Running => ReplicaStage::Runs,
        // It is retried, or the run ends with it.
        SubmissionState::Terminating(_) | SubmissionState::Final(_) => ReplicaStage::Waits,
    })
}

fn was_ready(job: &Job) -> Result<bool, DbError> {
    let states: Option<Vec<_>> = JOB_PROBES.decode_opt(job.id, job.probes.as_deref())?;
    Ok(states.is_some_and(|states| readiness::was_ready(&states)))
}

/// Replicas that the newest deployment created and still needs.
fn rollout_trials(run: &Run, jobs: &[Job], shape: &ParsedRunSpec) -> Result<Vec<TrialReplica>, DbError> {
    let of_now = |job: &&Job| job.deployment_num == run.deployment_num;
    let mut trials = Vec::new();
    // A replica that was requested to end is not waited for.
    for job in latest_submissions(jobs).into_values().filter(of_now).filter(|job| job.end_asked.is_none()) {
        let mine = jobs.iter().filter(of_now).filter(|other| other.replica_num == job.replica_num);
        let ends: Vec<Ending> = mine.filter_map(unrequested_end).collect();
        let is_retried = |ending: &Ending| {
            let event = ending.reason().retry_event();
            shape.retry().is_some_and(|policy| event.is_some_and(|event| policy.covers(event)))
        };
        // With retries, lost instances and missing capacity do not count as failures of the deployment.
        let is_fault = |ending: &&Ending| {
            !is_retried(ending) || ending.reason().retry_event() == Some(retry::Event::Error)
        };
        trials.push(TrialReplica {
            num: to_u32(job.replica_num),
            stage: replica_stage(job)?,
            since: job.terminating_at.or(job.running_at),
            failures: u32::try_from(ends.iter().filter(is_fault).count()).unwrap_or(u32::MAX),
            is_retried: ends.iter().all(is_retried),
            message: trial_message(job, ends.last())?,
        });
    }
    Ok(trials)
}

/// The ending of a submission, if it was not requested.
fn unrequested_end(job: &Job) -> Option<Ending> {
    let ending = job.ending().filter(|_| job.end_asked.is_none())?;
    match ending.reason() {
        TerminationReason::ScaledDown
        | TerminationReason::TerminatedByServer
        | TerminationReason::TerminatedByUser
        | TerminationReason::AbortedByUser => None,
        TerminationReason::FailedToStartDueToNoCapacity
        | TerminationReason::InterruptedByNoCapacity
        | TerminationReason::InstanceUnreachable
        | TerminationReason::InstanceAccessRevoked
        | TerminationReason::WaitingInstanceLimitExceeded
        | TerminationReason::WaitingRunnerLimitExceeded
        | TerminationReason::VolumeError
        | TerminationReason::GatewayError
        | TerminationReason::ContainerExitedWithError
        | TerminationReason::PortsBindingFailed
        | TerminationReason::CreatingContainerError
        | TerminationReason::ExecutorError
        | TerminationReason::LogQuotaExceeded
        | TerminationReason::InactivityDurationExceeded
        | TerminationReason::TerminatedDueToUtilizationPolicy
        | TerminationReason::MaxDurationExceeded
        | TerminationReason::DoneByRunner => Some(ending),
    }
}

/// The reason why a replica waits, or its last ending.
fn trial_message(job: &Job, ended: Option<&Ending>) -> Result<Option<String>, DbError> {
    if job.ending().is_none() && job.running_at.is_some() && !job.replica_registered {
        return job_spec_view::readiness_wait(job);
    }
    let Some(ending) = ended else { return Ok(None) };
    let mut text = ending.reason().as_str().replace('_', " ");
    if let Some(code) = ending.exit_status() {
        text.push_str(&format!(", exit code {code}"));
    }
    Ok(Some(text))
}

/// Returns whether a submission equals what the run would submit now. A change that does not affect a replica does not
/// replace it, and neither does a change that was reverted.
fn is_current(run: &Run, job: &Job, shape: &ParsedRunSpec) -> bool {
    job.deployment_num == run.deployment_num
        || shape
            .job(job.replica_group.as_deref(), to_u32(job.replica_num), to_u32(job.job_num))
            .is_ok_and(|(_, document)| document == job.job_spec)
}

/// Replicas of groups that the service no longer has.
fn orphaned_replicas(jobs: &[Job], groups: &[ReplicaGroupView]) -> Vec<u32> {
    let has_place = |job: &Job| {
        let group = job.replica_group.as_deref().unwrap_or("0");
        groups.iter().any(|known| known.name == group)
    };
    let live = latest_submissions(jobs).into_values().filter(|job| !job.finished);
    live.filter(|job| !has_place(job)).map(|job| to_u32(job.replica_num)).collect()
}
