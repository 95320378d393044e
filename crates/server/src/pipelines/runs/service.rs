//! The replicas of a service, as its brain sees them.

use windlass_model::{
    decide::{
        replicas::{Group, Replica, Stage},
        runs::State,
    },
    job::TerminationReason,
};

use super::{latest, number, state};
use crate::{
    db::{jobs::Job, runs::Run},
    run_shape::{GroupShape, RunShape},
};

/// What is there of one group. Who came before groups had names is of the first.
pub(super) fn group(run: &Run, jobs: &[Job], shape: &RunShape, group: GroupShape) -> Group {
    let GroupShape { name, min, max, scaling } = group;
    let mut found = Group {
        name,
        min,
        max,
        scaling,
        replicas: Vec::new(),
        free: Vec::new(),
        leaving: Vec::new(),
        requests: None,
    };
    let mine =
        latest(jobs).into_values().filter(|job| job.replica_group.as_deref().unwrap_or("0") == found.name);
    for job in mine {
        let num = number(job.replica_num);
        let stage = match state(job) {
            State::Submitted => Stage::Waits,
            State::Provisioning | State::Pulling => Stage::Starts,
            State::Running if job.replica_registered => Stage::Ready,
            State::Running => Stage::Runs,
            State::Terminating(ending) if ending.reason() == TerminationReason::ScaledDown => {
                found.leaving.push(num);
                continue;
            }
            State::Final(ending) if ending.reason() == TerminationReason::ScaledDown => {
                found.free.push(num);
                continue;
            }
            // It is tried again, or the run ends with it.
            State::Terminating(_) | State::Final(_) => Stage::Waits,
        };
        found.replicas.push(Replica { num, current: is_current(run, job, shape), stage });
    }
    found
}

/// Whether a submission is what the run would submit now. A change that makes no difference to a replica leaves it
/// alone, and so does a change back.
fn is_current(run: &Run, job: &Job, shape: &RunShape) -> bool {
    job.deployment_num == run.deployment_num
        || shape
            .job(job.replica_group.as_deref(), number(job.replica_num), number(job.job_num))
            .is_ok_and(|(_, document)| document == job.job_spec)
}

/// Replicas of groups that the service no longer has.
pub(super) fn homeless(jobs: &[Job], groups: &[Group]) -> Vec<u32> {
    let has_place = |job: &Job| {
        let group = job.replica_group.as_deref().unwrap_or("0");
        groups.iter().any(|known| known.name == group)
    };
    let live = latest(jobs).into_values().filter(|job| !job.finished);
    live.filter(|job| !has_place(job)).map(|job| number(job.replica_num)).collect()
}
