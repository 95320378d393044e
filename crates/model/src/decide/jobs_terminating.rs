//! Decision of the `jobs_terminating` pipeline: the last steps of a job, in their required order.
//!
//! The job is unregistered from the proxy, stopped, its logs drained, its container removed and its volumes detached;
//! only then the instance is released and the final status written. The types enforce the order: the end is built from
//! the proofs of each step, and each proof from the previous one.
//!
//! A host that does not respond proves nothing. The job waits until the task is known to be gone or the host is given
//! up (`GIVE_UP_TIMEOUT`, or its instance ended). A host that returns later receives the list of dead submissions; its
//! agent rejects their old epochs and removes them before it accepts new tasks.

use crate::{
    decide::{change::Change, jobs_running::UNREACHABLE_GRACE},
    id::VolumeId,
    instance,
    job::{Ending, Event, TerminationReason},
    time::{Span, Timestamp},
};

/// Time for which logs may drain after the stop grace period.
pub const LOGS_GRACE: Span = Span::secs(30);
/// Time for which requests in flight may be answered before a replica is stopped.
pub const DRAIN_GRACE: Span = Span::secs(30);
/// State for which a step waits while the commands may use their grace period.
const JOB_STOP: &str = "the job to stop";
const DRAIN_POLL_INTERVAL: Span = Span::secs(1);
/// Interval between passes.
pub const POLL_INTERVAL: Span = Span::secs(2);
/// Time after a regular detach of a volume until it may be forced.
pub const FORCE_DETACH_AFTER: Span = Span::secs(60);
/// Default time for which a host that does not respond delays the end of its job.
pub const GIVE_UP_TIMEOUT: Span = Span::mins(5);

/// Returns that time for a server with this `lost_after`, in the same ratio as the defaults.
pub fn give_up_timeout(lost_after: Span) -> Span {
    Span::secs(lost_after.as_secs() * GIVE_UP_TIMEOUT.as_secs() / UNREACHABLE_GRACE.as_secs())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeAttachment {
    pub id: VolumeId,
    pub detach_requested_at: Option<Timestamp>,
    pub is_forced: bool,
    /// As reported by the backend.
    pub is_attached: bool,
}

/// Stored state of the submission.
#[derive(Clone, Debug, PartialEq)]
pub struct TerminatingJobView {
    pub ending: Ending,
    pub terminating_since: Timestamp,
    /// Registered with the proxy or a gateway.
    pub is_registered: bool,
    /// Requests may be in flight to it.
    pub has_open_requests: bool,
    /// True if it ever reached its runner: only then there are logs, and a runner to stop.
    pub has_run: bool,
    /// True if its task may be on the host: it was submitted, or a server failed while submitting it.
    pub is_task_submitted: bool,
    /// Time until which logs are drained; set by the first pass.
    pub deadline: Option<Timestamp>,
    pub stop_duration: Option<Span>,
    /// Grace period of its commands after the stop request.
    pub stop_grace: Span,
    pub volumes: Vec<VolumeAttachment>,
    pub instance: Option<HeldInstance>,
    /// Time for which a host that does not respond delays the end.
    pub give_up_after: Span,
}

/// Instance that the job occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldInstance {
    pub has_shim: bool,
    pub status: instance::Status,
    /// Other jobs that are not final.
    pub other_jobs: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDrain {
    NotRequested,
    Silent,
    More,
    Drained,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskPresence {
    NotRequested,
    Silent,
    /// The shim has the task, in any state.
    There,
    /// The shim responds and does not have the task.
    Gone,
}

/// Delivery of the request to stop the commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopDelivery {
    NotRequested,
    Received,
    /// The host does not respond.
    Silent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminatingJobObservation {
    pub stop: StopDelivery,
    pub logs: LogDrain,
    pub task: TaskPresence,
}

impl TerminatingJobObservation {
    pub const NOTHING: Self = Self {
        stop: StopDelivery::NotRequested,
        logs: LogDrain::NotRequested,
        task: TaskPresence::NotRequested,
    };
}

/// Next step of the controller; each is safe to repeat and carries the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TerminationStep {
    /// Remove it from the proxy's rotation.
    Unregister,
    /// If there is a `grace`, request the runner to stop, which kills the commands after that time. Store the deadline,
    /// unless the host did not respond.
    Stop {
        grace: Option<Span>,
        deadline: Timestamp,
    },
    /// Store the remaining logs of the runner.
    DrainLogs,
    /// Terminate the task without a grace period, and remove it.
    RemoveTask,
    Detach {
        volumes: Vec<VolumeId>,
        force: bool,
    },
    /// No action; check again.
    Wait,
}

/// Effect on the instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceRelease {
    /// The job had no instance.
    None,
    /// Other jobs are on it.
    StaysBusy,
    /// The last job ended.
    Freed,
    /// It accepts no other job.
    Ended,
    /// It is already terminating or terminated.
    Unchanged,
}

impl InstanceRelease {
    /// Returns the event for its state machine, if its status changes.
    pub const fn event(self) -> Option<instance::Event> {
        match self {
            Self::Freed => Some(instance::Event::LastJobFreed),
            Self::Ended => Some(instance::Event::JobFinished),
            Self::None | Self::StaysBusy | Self::Unchanged => None,
        }
    }
}

/// All resources are released: the blocks are freed and the final status is written, in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub struct FinalRelease {
    ending: Ending,
    instance: InstanceRelease,
    has_given_up_host: bool,
    change: Change<Event>,
}

impl FinalRelease {
    pub const fn ending(&self) -> &Ending {
        &self.ending
    }
    pub const fn instance(&self) -> InstanceRelease {
        self.instance
    }
    /// Returns whether the task may still be on a host that does not respond.
    pub const fn gave_up_host(&self) -> bool {
        self.has_given_up_host
    }
    pub const fn change(&self) -> &Change<Event> {
        &self.change
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// One step; `due` is now if the next observation may follow at once, in the same pass.
    Step {
        step: TerminationStep,
        waits_for: &'static str,
        due: Timestamp,
    },
    End(FinalRelease),
}

impl Plan {
    /// Returns the message while the step waits. It says until when a job that was asked to stop may run.
    pub fn status_message(job: &TerminatingJobView, waits_for: &str, deadline: Option<Timestamp>) -> String {
        match deadline {
            Some(deadline) if waits_for == JOB_STOP && should_request_stop(&job.ending) => {
                let killed_at = Timestamp::from_secs((deadline - LOGS_GRACE).0.div_euclid(1_000_000));
                format!("waiting for {waits_for}, which is killed at {killed_at} at the latest")
            }
            Some(_) | None => format!("waiting for {waits_for}"),
        }
    }
}

struct ProxyDrained;
struct LogsDrained(ProxyDrained);
struct ContainerRemoved {
    _logs: LogsDrained,
    has_given_up: bool,
}
struct VolumesDetached(ContainerRemoved);

pub fn decide(job: &TerminatingJobView, seen: TerminatingJobObservation, now: Timestamp) -> Plan {
    let detached = check_proxy_drained(job, now)
        .and_then(|unregistered| check_logs_drained(job, seen, unregistered, now))
        .and_then(|quiet| check_container_removed(job, seen, quiet, now))
        .and_then(|gone| check_volumes_detached(job, gone, now));
    match detached {
        Ok(detached) => Plan::End(final_release(job, &detached)),
        Err(step) => *step,
    }
}

/// A proof, or the step that leads to it.
type StepProof<T> = Result<T, Box<Plan>>;

fn step<T>(step: TerminationStep, waits_for: &'static str, due: Timestamp) -> StepProof<T> {
    Err(Box::new(Plan::Step { step, waits_for, due }))
}

/// Proves that the replica receives no more requests and that those in flight were answered. One that ended by itself
/// answers none, and an abort does not wait.
fn check_proxy_drained(job: &TerminatingJobView, now: Timestamp) -> StepProof<ProxyDrained> {
    if job.is_registered {
        return step(TerminationStep::Unregister, "the proxy to unregister it", now);
    }
    let drained_by = job.terminating_since + DRAIN_GRACE;
    if job.has_open_requests && should_request_stop(&job.ending) && now < drained_by {
        return step(
            TerminationStep::Wait,
            "requests in flight",
            (now + DRAIN_POLL_INTERVAL).min(drained_by),
        );
    }
    Ok(ProxyDrained)
}

/// Proves that the grace period is over and the logs are stored, or that the time limit passed.
fn check_logs_drained(
    job: &TerminatingJobView,
    seen: TerminatingJobObservation,
    before: ProxyDrained,
    now: Timestamp,
) -> StepProof<LogsDrained> {
    let reason = job.ending.reason();
    // A terminated instance has no logs.
    let is_gone = job.instance.is_none_or(|place| place.status == instance::Status::Terminated);
    if is_gone || !job.has_run || reason == TerminationReason::AbortedByUser {
        return Ok(LogsDrained(before));
    }
    let Some(deadline) = job.deadline else {
        let grace = should_request_stop(&job.ending).then_some(job.stop_grace);
        let deadline = now + grace.unwrap_or(Span::ZERO) + LOGS_GRACE;
        let request = TerminationStep::Stop { grace, deadline };
        // The grace period begins when the commands learn of it: a host that is cut off for a moment gets all of it.
        return match seen.stop {
            StopDelivery::Silent if now >= job.terminating_since + job.give_up_after => {
                Ok(LogsDrained(before))
            }
            StopDelivery::Silent => step(request, "the host to respond", now + POLL_INTERVAL),
            StopDelivery::NotRequested | StopDelivery::Received => step(request, JOB_STOP, now),
        };
    };
    if now >= deadline {
        return Ok(LogsDrained(before));
    }
    match seen.logs {
        LogDrain::Drained => Ok(LogsDrained(before)),
        LogDrain::NotRequested => step(TerminationStep::DrainLogs, "its last output", now),
        LogDrain::More if should_request_stop(&job.ending) => {
            step(TerminationStep::DrainLogs, JOB_STOP, (now + POLL_INTERVAL).min(deadline))
        }
        LogDrain::More => {
            step(TerminationStep::DrainLogs, "its last output", (now + POLL_INTERVAL).min(deadline))
        }
        // The host has been unreachable for as long as permitted.
        LogDrain::Silent if now >= job.terminating_since + job.give_up_after => Ok(LogsDrained(before)),
        LogDrain::Silent => {
            step(TerminationStep::DrainLogs, "the host to respond", (now + POLL_INTERVAL).min(deadline))
        }
    }
}

/// Returns whether to request a stop: not if the job ended by itself, and not if no runner would respond.
const fn should_request_stop(ending: &Ending) -> bool {
    match ending.reason() {
        TerminationReason::InterruptedByNoCapacity => ending.is_preempted(),
        TerminationReason::TerminatedByUser
        | TerminationReason::TerminatedByServer
        | TerminationReason::ScaledDown
        | TerminationReason::InactivityDurationExceeded
        | TerminationReason::TerminatedDueToUtilizationPolicy
        | TerminationReason::MaxDurationExceeded
        | TerminationReason::GatewayError
        | TerminationReason::VolumeError
        | TerminationReason::InstanceAccessRevoked => true,
        TerminationReason::FailedToStartDueToNoCapacity
        | TerminationReason::InstanceUnreachable
        | TerminationReason::WaitingInstanceLimitExceeded
        | TerminationReason::WaitingRunnerLimitExceeded
        | TerminationReason::ContainerExitedWithError
        | TerminationReason::PortsBindingFailed
        | TerminationReason::CreatingContainerError
        | TerminationReason::ExecutorError
        | TerminationReason::LogQuotaExceeded
        | TerminationReason::DoneByRunner
        | TerminationReason::AbortedByUser => false,
    }
}

/// Proves that the container is gone, or that the wait for the host was abandoned.
fn check_container_removed(
    job: &TerminatingJobView,
    seen: TerminatingJobObservation,
    before: LogsDrained,
    now: Timestamp,
) -> StepProof<ContainerRemoved> {
    let Some(place) = job.instance else {
        return Ok(ContainerRemoved { _logs: before, has_given_up: false });
    };
    match place.status {
        // The instance is terminated, and the container with it.
        instance::Status::Terminated => return Ok(ContainerRemoved { _logs: before, has_given_up: false }),
        // The instance does not exist yet: no task is submitted to a pending instance.
        instance::Status::Pending => return Ok(ContainerRemoved { _logs: before, has_given_up: false }),
        // The task was never submitted to an instance that is not ready yet.
        instance::Status::Provisioning if !job.is_task_submitted => {
            return Ok(ContainerRemoved { _logs: before, has_given_up: false });
        }
        instance::Status::Provisioning
        | instance::Status::Idle
        | instance::Status::Busy
        | instance::Status::Terminating => {}
    }
    if !place.has_shim {
        // The container is the instance: it ends with it, which `Instance::Ended` requests.
        return Ok(ContainerRemoved { _logs: before, has_given_up: false });
    }
    let give_up_at = job.terminating_since + job.give_up_after;
    match seen.task {
        TaskPresence::Gone => Ok(ContainerRemoved { _logs: before, has_given_up: false }),
        TaskPresence::NotRequested | TaskPresence::There => {
            step(TerminationStep::RemoveTask, "its container to be removed", retry_at(seen.task, now))
        }
        TaskPresence::Silent if now >= give_up_at => {
            Ok(ContainerRemoved { _logs: before, has_given_up: true })
        }
        TaskPresence::Silent => {
            step(TerminationStep::Wait, "the host to respond", (now + POLL_INTERVAL).min(give_up_at))
        }
    }
}

fn retry_at(task: TaskPresence, now: Timestamp) -> Timestamp {
    match task {
        TaskPresence::NotRequested => now,
        TaskPresence::Silent | TaskPresence::There | TaskPresence::Gone => now + POLL_INTERVAL,
    }
}

fn check_volumes_detached(
    job: &TerminatingJobView,
    before: ContainerRemoved,
    now: Timestamp,
) -> StepProof<VolumesDetached> {
    let attached: Vec<&VolumeAttachment> = job.volumes.iter().filter(|volume| volume.is_attached).collect();
    if attached.is_empty() {
        return Ok(VolumesDetached(before));
    }
    let ids = |volumes: Vec<&VolumeAttachment>| volumes.iter().map(|volume| volume.id).collect();
    let unasked: Vec<&VolumeAttachment> =
        attached.iter().filter(|volume| volume.detach_requested_at.is_none()).copied().collect();
    if !unasked.is_empty() {
        let soft = TerminationStep::Detach { volumes: ids(unasked), force: false };
        return step(soft, "its volumes to detach", now + POLL_INTERVAL);
    }
    let stop_over = job.stop_duration.is_some_and(|limit| now >= job.terminating_since + limit);
    let may_force =
        stop_over || before.has_given_up || job.ending.reason() == TerminationReason::AbortedByUser;
    let ripe = |volume: &&&VolumeAttachment| {
        !volume.is_forced
            && volume.detach_requested_at.is_some_and(|requested| now.since(requested) >= FORCE_DETACH_AFTER)
    };
    let ripe: Vec<&VolumeAttachment> = attached.iter().filter(ripe).copied().collect();
    if may_force && !ripe.is_empty() {
        let hard = TerminationStep::Detach { volumes: ids(ripe), force: true };
        return step(hard, "its volumes to detach", now + POLL_INTERVAL);
    }
    step(TerminationStep::Wait, "its volumes to detach", now + POLL_INTERVAL)
}

fn final_release(job: &TerminatingJobView, VolumesDetached(gone): &VolumesDetached) -> FinalRelease {
    let instance = match job.instance {
        None => InstanceRelease::None,
        Some(place) => match place.status {
            instance::Status::Terminating | instance::Status::Terminated => InstanceRelease::Unchanged,
            instance::Status::Pending
            | instance::Status::Provisioning
            | instance::Status::Idle
            | instance::Status::Busy
                if place.other_jobs > 0 =>
            {
                InstanceRelease::StaysBusy
            }
            instance::Status::Pending => InstanceRelease::Unchanged,
            instance::Status::Provisioning => InstanceRelease::Ended,
            instance::Status::Idle | instance::Status::Busy if !place.has_shim => InstanceRelease::Ended,
            instance::Status::Idle | instance::Status::Busy => InstanceRelease::Freed,
        },
    };
    let reason = job.ending.event_reason();
    let message = match (job.ending.message(), gone.has_given_up) {
        (Some(text), false) => text.to_owned(),
        (None, false) => "all resources are released".to_owned(),
        (_, true) => format!(
            "gave up on the host after {} s without a response; its agent removes the task when it is back",
            job.give_up_after.as_secs()
        ),
    };
    let change = Change::new(job.ending.final_status().event(), reason, message);
    FinalRelease { ending: job.ending.clone(), instance, has_given_up_host: gone.has_given_up, change }
}
