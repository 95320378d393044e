//! Converts the rows of an attempt to the inputs of the decision.

use windlass_model::{
    backend_kind::BackendKind,
    decide::managed_jobs::{AttemptObservation, classify_end::NodeEnd},
    job::{self, TerminationDetail, TerminationReason},
    managed_job::record::NodeLocation,
    run,
    skypilot::Phase,
    time::{Span, Timestamp},
};

use crate::db::{instances::Instance, jobs::Job, pipeline_rows::managed_jobs::AttemptRun};

/// An instance whose loss was recorded within this time after the end of a job counts as lost before it.
const LOSS_TOLERANCE: Span = Span::secs(5);

/// A run for which others were preempted waits for their end: its blocks are kept.
pub(super) fn attempt_observation(attempt: Option<&AttemptRun>, now: Timestamp) -> AttemptObservation {
    let Some(AttemptRun { run, jobs }) = attempt else { return AttemptObservation::Nothing };
    match run.status {
        run::Status::Pending | run::Status::Submitted => {
            let promised = jobs.iter().filter_map(|(job, _)| job.promised_until).max();
            if jobs.iter().any(|(job, _)| job.instance_id.is_some())
                || promised.is_some_and(|until| until > now)
            {
                AttemptObservation::Provisioning
            } else {
                let message = jobs.iter().find_map(|(job, _)| job.status_message.clone());
                let since = promised.map_or(run.submitted_at, |until| until.max(run.submitted_at));
                AttemptObservation::Queued { since, message }
            }
        }
        run::Status::Provisioning => AttemptObservation::Provisioning,
        run::Status::Running if jobs.iter().all(|(job, _)| job.running_at.is_some()) => {
            AttemptObservation::Running { placement: first_placement(jobs) }
        }
        run::Status::Running => AttemptObservation::Provisioning,
        run::Status::Terminating => AttemptObservation::Ending,
        run::Status::Terminated | run::Status::Failed | run::Status::Done => ended_observation(jobs),
    }
}

/// A finished run with only finished nodes. Any other combination is reported as impossible.
fn ended_observation(jobs: &[(Job, Option<Instance>)]) -> AttemptObservation {
    if let Some((job, _)) = jobs.iter().find(|(job, _)| !job.status.is_final()) {
        let what = format!("the run has ended, but its node {} is {}", job.job_num, job.status);
        return AttemptObservation::Impossible { what };
    }
    AttemptObservation::Over { ends: jobs.iter().map(node_end).collect(), placement: first_placement(jobs) }
}

/// Time since which the nodes are being released; `None` if they are released or were not requested to end.
pub(super) fn releasing_since(attempt: &AttemptRun) -> Option<Timestamp> {
    let held = attempt.jobs.iter().filter(|(job, _)| !job.finished);
    held.filter_map(|(job, _)| job.terminating_at).min()
}

fn node_end((job, instance): &(Job, Option<Instance>)) -> NodeEnd {
    let ending = job.ending().unwrap_or(job::Ending::new(TerminationReason::TerminatedByServer));
    let detail = ending.detail();
    let phase = if detail == Some(TerminationDetail::SetupFailed) { Phase::Setup } else { Phase::Run };
    NodeEnd {
        reason: ending.reason(),
        detail,
        exit_code: ending.exit_status(),
        phase: job.running_at.map(|_| phase),
        is_preempted: instance.as_ref().is_some_and(|instance| was_preempted(instance, job)),
        location: instance.as_ref().map(instance_placement),
        message: ending.message().map(str::to_owned),
    }
}

/// Returns whether the instance was lost, or its end was announced, before or around the end of the job.
fn was_preempted(instance: &Instance, job: &Job) -> bool {
    let Some(ended) = job.terminating_at.or(job.finished_at) else { return false };
    let around = |at: Option<Timestamp>| at.is_some_and(|at| at <= ended + LOSS_TOLERANCE);
    (instance.unreachable && around(instance.unreachable_since))
        || around(instance.termination_asked_at)
        || around(instance.finished_at)
}

/// Location of the first node with an instance.
fn first_placement(jobs: &[(Job, Option<Instance>)]) -> Option<NodeLocation> {
    jobs.iter().find_map(|(_, instance)| instance.as_ref()).map(instance_placement)
}

/// Location of an instance. Each SSH or local instance is a separate location.
fn instance_placement(instance: &Instance) -> NodeLocation {
    let backend = instance.backend.as_deref().unwrap_or("?");
    let parts = [instance.region.as_deref(), instance.availability_zone.as_deref()];
    let parts: Vec<&str> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
    let place = if BackendKind::of(backend).has_permanent_instances() {
        format!("{backend}/{}", instance.name)
    } else {
        std::iter::once(backend).chain(parts).collect::<Vec<_>>().join("/")
    };
    NodeLocation { place, instance: Some(instance.id.to_string()) }
}
