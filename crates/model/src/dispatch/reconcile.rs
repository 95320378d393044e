//! Reconciliation of containers that this dispatcher holds with the scheduler's jobs, including orphaned jobs.

use std::collections::BTreeMap;

use windlass_planted_bugs::{Bug, is_planted};

use super::{Attempt, ContainerView, QueueSnapshot, SchedulerJob, SchedulerJobState, SchedulerSnapshot};
use crate::{
    container::Status,
    time::{Span, Timestamp},
};

/// Default time that a lock may exist without a job before it is released: a submission whose response was lost must
/// have had the time to appear.
pub const LOCKED_WITHOUT_JOB_MAX: Span = Span::mins(1);
/// Minimum number of observations without a job before a running container is abandoned, regardless of the time: a
/// single truncated list must not end a job that ran for days.
pub const EMPTY_OBSERVATIONS_MIN: u32 = 2;

/// One action. Each may be repeated without harm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReconcileStep {
    /// Request the job to end; repeated every round until it is gone.
    Stop {
        attempt: Attempt,
        job: String,
    },
    /// The job belongs to no attempt that may run. Check the container again, then stop the job; never write.
    StopOrphan {
        attempt: Attempt,
        job: String,
    },
    Renice {
        attempt: Attempt,
        job: String,
        priority: u64,
    },
    /// The result is lost.
    Cancel {
        attempt: Attempt,
        why: ReleaseReason,
    },
    /// Return to the queue. `released`: nothing failed, and the attempt does not count.
    Unlock {
        attempt: Attempt,
        why: ReleaseReason,
        released: bool,
    },
}

/// Reason why an attempt of a container was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The job ended without a result.
    Crashed,
    /// The scheduler has no job for it.
    Abandoned,
    /// Its priority is 0.
    PriorityZero,
}

/// State of a dispatcher between rounds. It may be lost: everything is then found again, later.
#[derive(Clone, Debug)]
pub struct ReconcileState {
    /// Time that a lock may exist without a job.
    missing_timeout: Span,
    missing: BTreeMap<Attempt, MissingJob>,
}

impl ReconcileState {
    pub const fn new(missing_timeout: Span) -> Self {
        Self { missing_timeout, missing: BTreeMap::new() }
    }
}

impl Default for ReconcileState {
    fn default() -> Self {
        Self::new(LOCKED_WITHOUT_JOB_MAX)
    }
}

/// A held container without a job.
#[derive(Clone, Copy, Debug)]
struct MissingJob {
    status: Status,
    since: Timestamp,
    /// Observations of the scheduler that began after `since`.
    observations: u32,
}

pub fn reconcile(
    queue: &QueueSnapshot,
    lower: &SchedulerSnapshot,
    memory: &mut ReconcileState,
) -> Vec<ReconcileStep> {
    // Indexed by name, since there are thousands of both. Of two with the same name, the first counts.
    let seen = queue.containers.iter().rev().map(|container| (container.uuid.as_str(), container));
    let seen: BTreeMap<&str, &ContainerView> = seen.collect();
    let mine: BTreeMap<Attempt, &ContainerView> =
        seen.values().filter(|one| one.is_held()).map(|one| (one.attempt(), *one)).collect();
    let jobs: BTreeMap<&Attempt, &SchedulerJob> =
        lower.jobs.iter().rev().map(|job| (&job.attempt, job)).collect();
    memory.missing.retain(|attempt, missing| {
        let still = mine.get(attempt).is_some_and(|container| container.status == missing.status);
        still && !jobs.contains_key(attempt)
    });
    let held = mine.iter().filter_map(|(attempt, container)| match jobs.get(attempt) {
        Some(job) => reconcile_with_job(container, job, queue.requested_at),
        None => reconcile_without_job(container, lower, queue.requested_at, memory),
    });
    let mut steps: Vec<ReconcileStep> = held.collect();
    let find = |job: &SchedulerJob| seen.get(job.attempt.uuid.as_str()).copied();
    let orphans = lower.jobs.iter().filter(|job| is_orphan(find(job), job));
    steps.extend(
        orphans.map(|job| ReconcileStep::StopOrphan { attempt: job.attempt.clone(), job: job.id.clone() }),
    );
    steps
}

/// Returns whether a job runs for an attempt that is no longer current. An old snapshot of the queue must be refreshed
/// before the job is stopped: the attempt may have begun since.
pub fn is_orphan(container: Option<&ContainerView>, job: &SchedulerJob) -> bool {
    !job.state.is_ended() && !container.is_some_and(|container| container.is_current(&job.attempt))
}

fn reconcile_with_job(
    container: &ContainerView,
    job: &SchedulerJob,
    queue_requested_at: Timestamp,
) -> Option<ReconcileStep> {
    let attempt = container.attempt();
    match job.state {
        SchedulerJobState::Waiting | SchedulerJobState::Running if container.priority == 0 => {
            Some(ReconcileStep::Stop { attempt, job: job.id.clone() })
        }
        SchedulerJobState::Waiting | SchedulerJobState::Running => {
            let is_current = job.priority.is_none_or(|given| given == container.priority);
            let renice =
                || ReconcileStep::Renice { attempt, job: job.id.clone(), priority: container.priority };
            (!is_current).then(renice)
        }
        // The last report of the executor may lie between the snapshot of the queue and the end of the job.
        SchedulerJobState::Ended(at) if queue_requested_at <= at => None,
        SchedulerJobState::Ended(_) => Some(release_container(container, ReleaseReason::Crashed)),
        SchedulerJobState::Unknown => None,
    }
}

fn reconcile_without_job(
    container: &ContainerView,
    lower: &SchedulerSnapshot,
    queue_requested_at: Timestamp,
    memory: &mut ReconcileState,
) -> Option<ReconcileStep> {
    if !lower.is_complete && !is_planted(Bug::MissingJobsTreatedAsEnded) {
        return None;
    }
    let lost_after = memory.missing_timeout;
    let new = MissingJob { status: container.status, since: queue_requested_at, observations: 0 };
    let missing = memory.missing.entry(container.attempt()).or_insert(new);
    if lower.requested_at > missing.since {
        missing.observations += 1;
    }
    let is_late = lower.requested_at.since(missing.since) > lost_after;
    let is_lost = match container.status {
        Status::Running => {
            missing.observations >= EMPTY_OBSERVATIONS_MIN && (is_late || container.priority == 0)
        }
        Status::Locked if container.priority == 0 => missing.observations >= 1,
        Status::Locked => missing.observations >= 1 && is_late,
        Status::Queued | Status::Complete | Status::Cancelled => false,
    };
    is_lost.then(|| release_container(container, ReleaseReason::Abandoned))
}

fn release_container(container: &ContainerView, why: ReleaseReason) -> ReconcileStep {
    let attempt = container.attempt();
    match container.status {
        Status::Locked if container.priority == 0 => {
            ReconcileStep::Unlock { attempt, why: ReleaseReason::PriorityZero, released: true }
        }
        Status::Locked => ReconcileStep::Unlock { attempt, why, released: false },
        Status::Queued | Status::Running | Status::Complete | Status::Cancelled => ReconcileStep::Cancel {
            attempt,
            why: if container.priority == 0 { ReleaseReason::PriorityZero } else { why },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{super::ContainerNeeds, *};

    const fn at(second: i64) -> Timestamp {
        Timestamp(second * 1_000_000)
    }

    fn container(status: Status) -> ContainerView {
        ContainerView {
            uuid: "c".into(),
            status,
            priority: 500,
            attempt: 3,
            created_at: at(0),
            owner: "u".into(),
            is_locked_here: true,
            needs: ContainerNeeds::default(),
        }
    }

    fn job(life: SchedulerJobState) -> SchedulerJob {
        SchedulerJob {
            attempt: container(Status::Locked).attempt(),
            id: "71".into(),
            state: life,
            priority: Some(500),
            message: None,
        }
    }

    fn queue(container: ContainerView, requested: i64) -> QueueSnapshot {
        QueueSnapshot { containers: vec![container], requested_at: at(requested), ..QueueSnapshot::default() }
    }

    fn lower(jobs: Vec<SchedulerJob>, requested: i64) -> SchedulerSnapshot {
        SchedulerSnapshot { jobs, requested_at: at(requested), is_complete: true }
    }

    fn once(queue: &QueueSnapshot, lower: &SchedulerSnapshot) -> Vec<ReconcileStep> {
        reconcile(queue, lower, &mut ReconcileState::default())
    }

    #[test]
    fn a_live_job_of_a_held_container_needs_no_step() {
        for life in [SchedulerJobState::Waiting, SchedulerJobState::Running, SchedulerJobState::Unknown] {
            for status in [Status::Locked, Status::Running] {
                assert_eq!(once(&queue(container(status), 10), &lower(vec![job(life)], 11)), []);
            }
        }
    }

    #[test]
    fn a_job_end_is_a_crash_only_if_the_queue_was_read_after_it() {
        let ended = lower(vec![job(SchedulerJobState::Ended(at(10)))], 11);
        let attempt = container(Status::Running).attempt();
        assert_eq!(once(&queue(container(Status::Running), 10), &ended), []);
        let crashed = ReconcileStep::Cancel { attempt: attempt.clone(), why: ReleaseReason::Crashed };
        assert_eq!(once(&queue(container(Status::Running), 11), &ended), [crashed]);
        let back = ReconcileStep::Unlock { attempt, why: ReleaseReason::Crashed, released: false };
        assert_eq!(once(&queue(container(Status::Locked), 11), &ended), [back]);
    }

    #[test]
    fn r13_priority_zero_stops_the_job_and_releases_the_container_once_it_is_gone() {
        let unwanted = |status| ContainerView { priority: 0, ..container(status) };
        let attempt = container(Status::Locked).attempt();
        let stop = ReconcileStep::Stop { attempt: attempt.clone(), job: "71".into() };
        for life in [SchedulerJobState::Waiting, SchedulerJobState::Running] {
            for second in 0..3 {
                let seen = once(&queue(unwanted(Status::Locked), second), &lower(vec![job(life)], second));
                assert_eq!(seen, std::slice::from_ref(&stop));
            }
        }
        let back = ReconcileStep::Unlock {
            attempt: attempt.clone(),
            why: ReleaseReason::PriorityZero,
            released: true,
        };
        assert_eq!(once(&queue(unwanted(Status::Locked), 5), &lower(vec![], 6)), [back]);
        let over = ReconcileStep::Cancel { attempt, why: ReleaseReason::PriorityZero };
        let gone = lower(vec![job(SchedulerJobState::Ended(at(4)))], 6);
        assert_eq!(once(&queue(unwanted(Status::Running), 5), &gone), [over]);
    }

    #[test]
    fn a_changed_priority_is_passed_to_the_scheduler() {
        let raised = ContainerView { priority: 900, ..container(Status::Running) };
        let renice = ReconcileStep::Renice { attempt: raised.attempt(), job: "71".into(), priority: 900 };
        assert_eq!(
            once(&queue(raised.clone(), 1), &lower(vec![job(SchedulerJobState::Waiting)], 2)),
            [renice]
        );
        let unreadable = SchedulerJob { priority: None, ..job(SchedulerJobState::Waiting) };
        assert_eq!(once(&queue(raised, 1), &lower(vec![unreadable], 2)), []);
    }

    #[test]
    fn r15_an_incomplete_snapshot_does_not_prove_that_a_job_is_absent() {
        let mut memory = ReconcileState::default();
        let holes = |requested| SchedulerSnapshot { is_complete: false, ..lower(vec![], requested) };
        for second in 0..1_000 {
            let steps =
                reconcile(&queue(container(Status::Running), second), &holes(second + 1), &mut memory);
            assert_eq!(steps, []);
        }
    }

    #[test]
    fn a_running_container_is_abandoned_after_two_complete_snapshots_and_a_minute() {
        let mut memory = ReconcileState::default();
        let mut round = |second| {
            reconcile(&queue(container(Status::Running), second), &lower(vec![], second + 1), &mut memory)
        };
        for second in [10, 20, 30, 60] {
            assert_eq!(round(second), []);
        }
        let attempt = container(Status::Running).attempt();
        assert_eq!(round(71), [ReconcileStep::Cancel { attempt, why: ReleaseReason::Abandoned }]);
        // A single observation proves nothing, however late it is.
        let mut memory = ReconcileState::default();
        let late = reconcile(&queue(container(Status::Running), 10), &lower(vec![], 1_000), &mut memory);
        assert_eq!(late, []);
    }

    #[test]
    fn a_scheduler_snapshot_older_than_the_queue_snapshot_does_not_count() {
        let mut memory = ReconcileState::default();
        for _ in 0..10 {
            let steps = reconcile(&queue(container(Status::Running), 10), &lower(vec![], 9), &mut memory);
            assert_eq!(steps, []);
        }
    }

    #[test]
    fn a_job_that_reappears_resets_the_absence_count() {
        let mut memory = ReconcileState::default();
        let mut round = |second, jobs| {
            reconcile(&queue(container(Status::Running), second), &lower(jobs, second + 1), &mut memory)
        };
        assert_eq!(round(10, vec![]), []);
        assert_eq!(round(20, vec![job(SchedulerJobState::Running)]), []);
        assert_eq!(round(80, vec![]), []);
    }

    #[test]
    fn c7_a_lock_without_a_job_is_released_after_a_minute() {
        let mut memory = ReconcileState::default();
        let mut round = |second| {
            reconcile(&queue(container(Status::Locked), second), &lower(vec![], second + 1), &mut memory)
        };
        for second in [0, 20, 40] {
            assert_eq!(round(second), []);
        }
        let attempt = container(Status::Locked).attempt();
        assert_eq!(
            round(60),
            [ReconcileStep::Unlock { attempt, why: ReleaseReason::Abandoned, released: false }]
        );
    }

    #[test]
    fn an_orphaned_job_or_one_of_an_older_attempt_is_stopped_without_a_queue_write() {
        let orphan = |seen: Option<ContainerView>| {
            let queue = QueueSnapshot {
                containers: seen.into_iter().collect(),
                requested_at: at(1),
                ..QueueSnapshot::default()
            };
            once(&queue, &lower(vec![job(SchedulerJobState::Running)], 2))
        };
        let stop =
            ReconcileStep::StopOrphan { attempt: container(Status::Locked).attempt(), job: "71".into() };
        assert_eq!(orphan(None), std::slice::from_ref(&stop));
        for status in [Status::Queued, Status::Complete, Status::Cancelled] {
            assert_eq!(orphan(Some(container(status))), std::slice::from_ref(&stop), "{status:?}");
        }
        let foreign = ContainerView { is_locked_here: false, ..container(Status::Running) };
        assert_eq!(orphan(Some(foreign)), std::slice::from_ref(&stop));
        // The newer attempt waits for its own job.
        let newer = ContainerView { attempt: 4, ..container(Status::Locked) };
        assert_eq!(orphan(Some(newer)), [stop]);
    }
}
