//! Brain of `jobs_terminating`: the last steps, in the one order that is right.
//!
//! Unregistered from the proxy, asked to stop, logs drained, container gone, volumes detached, and only
//! then the instance is freed and the final status written. The order is in the types: the end is built
//! from the proofs of each step, and each proof from the one before.
//!
//! A silent host proves nothing. The job waits until the task is known gone or the host is given up
//! (`GIVE_UP_TIMEOUT`, or its instance ended). A host that returns later is told which submissions are
//! dead; its agent refuses their old epochs and removes them before it takes anything new.

use crate::{
    decide::{change::Change, jobs_running::UNREACHABLE_GRACE},
    id::VolumeId,
    instance,
    job::{Ending, Event, TerminationReason},
    time::{Span, Timestamp},
};

/// How long the logs of a job may take to drain once its time to stop is over.
pub const LOGS_GRACE: Span = Span::secs(30);
/// How long requests on their way to a replica may take to be answered before it is stopped.
pub const DRAIN_GRACE: Span = Span::secs(30);
const DRAIN_POLL_INTERVAL: Span = Span::secs(1);
/// Between two looks.
pub const POLL_INTERVAL: Span = Span::secs(2);
/// How long after the soft detach of a volume it may be forced.
pub const FORCE_DETACH_AFTER: Span = Span::secs(60);
/// How long a silent host keeps its job from ending, unless the server is told otherwise.
pub const GIVE_UP_TIMEOUT: Span = Span::mins(5);

/// How long that is on a server whose jobs are lost after this silence: as much longer as it is by default.
pub fn give_up_timeout(lost_after: Span) -> Span {
    Span::secs(lost_after.as_secs() * GIVE_UP_TIMEOUT.as_secs() / UNREACHABLE_GRACE.as_secs())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeAttachment {
    pub id: VolumeId,
    pub asked_at: Option<Timestamp>,
    pub forced: bool,
    /// As the backend says.
    pub attached: bool,
}

/// What is stored about the submission.
#[derive(Clone, Debug, PartialEq)]
pub struct TerminatingJobView {
    pub ending: Ending,
    pub terminating_since: Timestamp,
    /// Known to the proxy or a gateway.
    pub registered: bool,
    /// Requests may be on their way to it.
    pub in_use: bool,
    /// Whether it ever reached its runner: only then are there logs, and somebody to ask to stop.
    pub ran: bool,
    /// Whether its task may be on the host: it was handed over, or somebody died while doing so.
    pub handed_over: bool,
    /// Until when its logs are drained; set by the first pass.
    pub deadline: Option<Timestamp>,
    pub stop_duration: Option<Span>,
    /// How long its commands may take to end once they are asked to.
    pub stop_grace: Span,
    pub volumes: Vec<VolumeAttachment>,
    pub place: Option<HeldInstance>,
    /// How long a silent host keeps it from ending.
    pub give_up_after: Span,
}

/// The instance it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldInstance {
    pub has_shim: bool,
    pub status: instance::Status,
    /// Other jobs that are not final.
    pub other_jobs: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDrain {
    NotAsked,
    Silent,
    More,
    Drained,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskPresence {
    NotAsked,
    Silent,
    /// Known to the shim, in any state.
    There,
    /// The shim answers and does not know it.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminatingJobObservation {
    pub logs: LogDrain,
    pub task: TaskPresence,
}

impl TerminatingJobObservation {
    pub const NOTHING: Self = Self { logs: LogDrain::NotAsked, task: TaskPresence::NotAsked };
}

/// What the hands do next; each is safe to repeat and carries the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TerminationStep {
    /// Take it out of the proxy's rotation.
    Unregister,
    /// Store the deadline; ask the runner to stop where there is a `grace`, after which it kills the commands.
    Stop {
        grace: Option<Span>,
        deadline: Timestamp,
    },
    /// Store what the runner still has.
    DrainLogs,
    /// Terminate the task with no grace, and remove it.
    RemoveTask,
    Detach {
        volumes: Vec<VolumeId>,
        force: bool,
    },
    /// Nothing but to look again.
    Wait,
}

/// What becomes of the instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceRelease {
    /// It had none.
    None,
    /// Other jobs are on it.
    StaysBusy,
    /// The last job left.
    Freed,
    /// It takes no other job.
    Ended,
    /// It is ending or gone already.
    Unchanged,
}

impl InstanceRelease {
    /// The event for its machine, if it is to move.
    pub const fn event(self) -> Option<instance::Event> {
        match self {
            Self::Freed => Some(instance::Event::LastJobFreed),
            Self::Ended => Some(instance::Event::JobFinished),
            Self::None | Self::StaysBusy | Self::Unchanged => None,
        }
    }
}

/// Everything is given back: the blocks are freed and the final status written, in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub struct FinalRelease {
    ending: Ending,
    instance: InstanceRelease,
    gave_up_host: bool,
    change: Change<Event>,
}

impl FinalRelease {
    pub const fn ending(&self) -> &Ending {
        &self.ending
    }
    pub const fn instance(&self) -> InstanceRelease {
        self.instance
    }
    /// The task may still be on a host that does not answer.
    pub const fn gave_up_host(&self) -> bool {
        self.gave_up_host
    }
    pub const fn change(&self) -> &Change<Event> {
        &self.change
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// One step; `due` is now where the next look may follow at once, in the same pass.
    Step {
        step: TerminationStep,
        waits_for: &'static str,
        due: Timestamp,
    },
    End(FinalRelease),
}

struct ProxyDrained;
struct LogsDrained(ProxyDrained);
struct ContainerRemoved {
    _after: LogsDrained,
    gave_up: bool,
}
struct VolumesDetached(ContainerRemoved);

pub fn decide(job: &TerminatingJobView, seen: TerminatingJobObservation, now: Timestamp) -> Plan {
    let detached = unregistered(job, now)
        .and_then(|unregistered| quiet(job, seen, unregistered, now))
        .and_then(|quiet| gone(job, seen, quiet, now))
        .and_then(|gone| detached(job, gone, now));
    match detached {
        Ok(detached) => Plan::End(final_release(job, &detached)),
        Err(step) => *step,
    }
}

/// A proof, or what to do for it.
type StepProof<T> = Result<T, Box<Plan>>;

fn step<T>(step: TerminationStep, waits_for: &'static str, due: Timestamp) -> StepProof<T> {
    Err(Box::new(Plan::Step { step, waits_for, due }))
}

/// Nobody sends it requests any more, and those on their way were answered. One that ended by itself answers nothing,
/// and an abort does not wait.
fn unregistered(job: &TerminatingJobView, now: Timestamp) -> StepProof<ProxyDrained> {
    if job.registered {
        return step(TerminationStep::Unregister, "the proxy to let go", now);
    }
    let drained_by = job.terminating_since + DRAIN_GRACE;
    if job.in_use && should_request_stop(job.ending.reason()) && now < drained_by {
        return step(
            TerminationStep::Wait,
            "requests on their way to it",
            (now + DRAIN_POLL_INTERVAL).min(drained_by),
        );
    }
    Ok(ProxyDrained)
}

/// The job had its grace and its logs are in, or its time is up.
fn quiet(
    job: &TerminatingJobView,
    seen: TerminatingJobObservation,
    before: ProxyDrained,
    now: Timestamp,
) -> StepProof<LogsDrained> {
    let reason = job.ending.reason();
    // A machine that is no more has nothing to say.
    let is_gone = job.place.is_none_or(|place| place.status == instance::Status::Terminated);
    if is_gone || !job.ran || reason == TerminationReason::AbortedByUser {
        return Ok(LogsDrained(before));
    }
    let Some(deadline) = job.deadline else {
        let grace = should_request_stop(reason).then_some(job.stop_grace);
        let deadline = now + grace.unwrap_or(Span::ZERO) + LOGS_GRACE;
        return step(TerminationStep::Stop { grace, deadline }, "the job to stop", now);
    };
    if now >= deadline {
        return Ok(LogsDrained(before));
    }
    match seen.logs {
        LogDrain::Drained => Ok(LogsDrained(before)),
        LogDrain::NotAsked => step(TerminationStep::DrainLogs, "its last output", now),
        LogDrain::More if should_request_stop(reason) => {
            step(TerminationStep::DrainLogs, "the job to stop", (now + POLL_INTERVAL).min(deadline))
        }
        LogDrain::More => {
            step(TerminationStep::DrainLogs, "its last output", (now + POLL_INTERVAL).min(deadline))
        }
        // Then it has proved as silent as a host may be.
        LogDrain::Silent if now >= job.terminating_since + job.give_up_after => Ok(LogsDrained(before)),
        LogDrain::Silent => {
            step(TerminationStep::DrainLogs, "the host to answer", (now + POLL_INTERVAL).min(deadline))
        }
    }
}

/// Whether the runner is asked: not where the job ended by itself, and not where nobody would answer.
const fn should_request_stop(reason: TerminationReason) -> bool {
    match reason {
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
        | TerminationReason::InterruptedByNoCapacity
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

/// The container is gone for sure, or nobody waits for that host any longer.
fn gone(
    job: &TerminatingJobView,
    seen: TerminatingJobObservation,
    before: LogsDrained,
    now: Timestamp,
) -> StepProof<ContainerRemoved> {
    let Some(place) = job.place else { return Ok(ContainerRemoved { _after: before, gave_up: false }) };
    match place.status {
        // The machine is no more, and the container with it.
        instance::Status::Terminated => return Ok(ContainerRemoved { _after: before, gave_up: false }),
        // Nor is there one yet: nobody hands a task to a machine that is only wished for.
        instance::Status::Pending => return Ok(ContainerRemoved { _after: before, gave_up: false }),
        // Nor was one that is not ready yet ever told of it.
        instance::Status::Provisioning if !job.handed_over => {
            return Ok(ContainerRemoved { _after: before, gave_up: false });
        }
        instance::Status::Provisioning
        | instance::Status::Idle
        | instance::Status::Busy
        | instance::Status::Terminating => {}
    }
    if !place.has_shim {
        // The container is the instance: it ends with it, which is what `Instance::Ended` asks for.
        return Ok(ContainerRemoved { _after: before, gave_up: false });
    }
    let give_up_at = job.terminating_since + job.give_up_after;
    match seen.task {
        TaskPresence::Gone => Ok(ContainerRemoved { _after: before, gave_up: false }),
        TaskPresence::NotAsked | TaskPresence::There => {
            step(TerminationStep::RemoveTask, "its container to go", retry_at(seen.task, now))
        }
        TaskPresence::Silent if now >= give_up_at => Ok(ContainerRemoved { _after: before, gave_up: true }),
        TaskPresence::Silent => {
            step(TerminationStep::Wait, "the host to answer", (now + POLL_INTERVAL).min(give_up_at))
        }
    }
}

fn retry_at(task: TaskPresence, now: Timestamp) -> Timestamp {
    match task {
        TaskPresence::NotAsked => now,
        TaskPresence::Silent | TaskPresence::There | TaskPresence::Gone => now + POLL_INTERVAL,
    }
}

fn detached(
    job: &TerminatingJobView,
    before: ContainerRemoved,
    now: Timestamp,
) -> StepProof<VolumesDetached> {
    let attached: Vec<&VolumeAttachment> = job.volumes.iter().filter(|volume| volume.attached).collect();
    if attached.is_empty() {
        return Ok(VolumesDetached(before));
    }
    let ids = |volumes: Vec<&VolumeAttachment>| volumes.iter().map(|volume| volume.id).collect();
    let unasked: Vec<&VolumeAttachment> =
        attached.iter().filter(|volume| volume.asked_at.is_none()).copied().collect();
    if !unasked.is_empty() {
        let soft = TerminationStep::Detach { volumes: ids(unasked), force: false };
        return step(soft, "its volumes to detach", now + POLL_INTERVAL);
    }
    let stop_over = job.stop_duration.is_some_and(|limit| now >= job.terminating_since + limit);
    let may_force = stop_over || before.gave_up || job.ending.reason() == TerminationReason::AbortedByUser;
    let ripe = |volume: &&&VolumeAttachment| {
        !volume.forced && volume.asked_at.is_some_and(|asked| now.since(asked) >= FORCE_DETACH_AFTER)
    };
    let ripe: Vec<&VolumeAttachment> = attached.iter().filter(ripe).copied().collect();
    if may_force && !ripe.is_empty() {
        let hard = TerminationStep::Detach { volumes: ids(ripe), force: true };
        return step(hard, "its volumes to detach", now + POLL_INTERVAL);
    }
    step(TerminationStep::Wait, "its volumes to detach", now + POLL_INTERVAL)
}

fn final_release(job: &TerminatingJobView, VolumesDetached(gone): &VolumesDetached) -> FinalRelease {
    let instance = match job.place {
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
    let reason = job.ending.reason().as_str();
    let message = match (job.ending.said(), gone.gave_up) {
        (Some(said), false) => said.to_owned(),
        (None, false) => "everything is released".to_owned(),
        (_, true) => format!(
            "the host stayed silent for {} s and was given up; its agent removes the task when it returns",
            job.give_up_after.as_secs()
        ),
    };
    let change = Change::why(job.ending.final_status().event(), reason, message);
    FinalRelease { ending: job.ending.clone(), instance, gave_up_host: gone.gave_up, change }
}
