//! The managed job: the user-facing status of its tasks, and the schedule state of the job.
//!
//! These are two state machines on purpose. The status shows what the user's program is doing; the schedule state shows
//! which slots the job holds. They change in one transaction and must form a legal pair ([`is_legal`]).

pub mod plan;
pub mod reason;
pub mod record;

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// User-facing status of a task.
    pub enum Status: "managed job status" {
        /// queued, or waiting after a refused launch or a refused recovery: `PendingKind` shows which
        Pending = "PENDING",
        /// its nodes are being provisioned for the first time
        Starting = "STARTING",
        /// submitted to its nodes: setup and run
        Running = "RUNNING",
        /// its nodes are being provisioned again
        Recovering = "RECOVERING",
        /// its nodes are being released after a cancellation
        Cancelling = "CANCELLING",
        /// run ended with 0
        Succeeded = "SUCCEEDED",
        /// cancelled, nodes released
        Cancelled = "CANCELLED",
        /// the user's program failed
        Failed = "FAILED",
        /// the user's setup failed
        FailedSetup = "FAILED_SETUP",
        /// the request can never be met, or is invalid
        FailedPrechecks = "FAILED_PRECHECKS",
        /// gave up waiting for capacity
        FailedNoResource = "FAILED_NO_RESOURCE",
        /// internal error: may follow any status, even a final one, which stays in the reason
        FailedController = "FAILED_CONTROLLER",
    }

    /// Events of a task.
    pub enum Event: "managed job event" {
        /// a launch slot was granted
        SlotGranted = "slot-granted",
        /// a launch slot was granted while a recovery is open
        Rescheduled = "rescheduled",
        /// there is nothing to run: no nodes are used
        EmptyRun = "empty-run",
        /// no capacity: wait, then try again
        BackedOff = "backed-off",
        /// the task was submitted to its nodes
        Started = "started",
        /// nodes were lost, or the program failed and has a restart left
        Lost = "lost",
        /// the controller resumed and cannot re-attach, or had an internal error
        Interrupted = "interrupted",
        /// the task was submitted to its new nodes
        Recovered = "recovered",
        /// the program ended successfully
        Succeeded = "succeeded",
        /// the program failed, or its nodes were lost and the strategy is NONE
        Failed = "failed",
        /// the setup failed
        SetupFailed = "setup-failed",
        /// no candidate can ever fit, bad credentials, or an invalid spec
        PrechecksFailed = "prechecks-failed",
        /// the limit on waiting for capacity is reached
        GaveUp = "gave-up",
        /// a user cancels, an earlier task failed, or an auxiliary is stopped
        CancelRequested = "cancel-asked",
        /// cancelled before the first claim: nothing to release
        CancelledUnclaimed = "cancelled-unclaimed",
        /// the nodes of a cancelled task are released
        Released = "released",
        /// the limit of internal errors is reached, or a release cannot be confirmed
        ControllerFailed = "controller-failed",
    }

    /// Condition that a PENDING task waits for.
    pub enum PendingKind: "pending kind" {
        /// its first launch slot
        Queued = "queued",
        /// the timer after a launch was refused
        LaunchBackoff = "launch_backoff",
        /// the timer after a recovery was refused; the episode stays open
        RecoveryBackoff = "recovery_backoff",
    }

    /// Cause of a recovery.
    pub enum RecoverySource: "recovery source" {
        /// nodes lost, infrastructure error, or a restart after the user's error
        Failure = "failure",
        /// an internal error
        Emergency = "emergency",
        /// a server restart that could not re-attach
        Restart = "restart",
    }

    /// Schedule state of a job: the slots that it holds.
    pub enum ScheduleState: "schedule state" {
        /// the submission is incomplete
        Inactive = "INACTIVE",
        /// submitted, never claimed
        Waiting = "WAITING",
        /// provisioning: holds a launch slot and an alive slot
        Launching = "LAUNCHING",
        /// running, or between tasks: holds an alive slot
        Alive = "ALIVE",
        /// waits to launch again: holds an alive slot
        AliveWaiting = "ALIVE_WAITING",
        /// capacity was refused and the timer runs: holds an alive slot
        AliveBackoff = "ALIVE_BACKOFF",
        /// all tasks are final and all nodes released
        Done = "DONE",
    }

    /// Events of a job's schedule state.
    pub enum ScheduleEvent: "schedule event" {
        /// files and spec are complete
        Submitted = "submitted",
        /// the claim found the slots free
        Claimed = "claimed",
        /// the attempt is over, successful or not
        LaunchEnded = "launch-ended",
        /// no capacity: the launch slot is released
        CapacityRefused = "capacity-refused",
        /// the timer expired, or new capacity ended the wait early
        BackoffOver = "backoff-over",
        /// a recovery or the next task needs nodes
        WantsLaunch = "wants-launch",
        /// all tasks are final
        Finished = "finished",
        /// cancelled and released, or given up by its controller
        Stopped = "stopped",
    }
}

final_statuses!(Status: Succeeded | Cancelled | Failed | FailedSetup | FailedPrechecks
        | FailedNoResource | FailedController;
    active: Pending | Starting | Running | Recovering | Cancelling);
final_statuses!(ScheduleState: Done;
    active: Inactive | Waiting | Launching | Alive | AliveWaiting | AliveBackoff);

/// State machine of a task's status.
#[derive(Clone, Copy, Debug)]
pub struct ManagedTaskLifecycle;

impl StateMachine for ManagedTaskLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "managed-job";
    const ABOUT: &'static str = "The user-facing status of one task of a managed job.";
    const START: &'static [Status] = &[Status::Pending];
    const STOP: &'static [Event] = &[Event::CancelRequested];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

pub fn step(status: Status, event: Event) -> Step<Status> {
    use Event as E;
    use Status::*;
    use Step::{Refuse, Stay, To};
    match status {
        Pending => match event {
            E::SlotGranted => To(Starting),
            E::Rescheduled | E::Interrupted => To(Recovering),
            E::EmptyRun => To(Running),
            E::CancelRequested => To(Cancelling),
            E::CancelledUnclaimed => To(Cancelled),
            E::ControllerFailed => To(FailedController),
            E::BackedOff | E::Started | E::Lost | E::Recovered | E::Released => Refuse,
            E::Succeeded | E::Failed | E::SetupFailed | E::PrechecksFailed | E::GaveUp => Refuse,
        },
        Starting => match event {
            E::BackedOff => To(Pending),
            E::Started => To(Running),
            E::Interrupted => To(Recovering),
            E::PrechecksFailed => To(FailedPrechecks),
            E::GaveUp => To(FailedNoResource),
            E::CancelRequested => To(Cancelling),
            E::ControllerFailed => To(FailedController),
            // A crash between launch and write: the launch is adopted by its key.
            E::SlotGranted => Stay,
            E::Rescheduled | E::EmptyRun | E::Lost | E::Recovered | E::Released => Refuse,
            E::Succeeded | E::Failed | E::SetupFailed | E::CancelledUnclaimed => Refuse,
        },
        Running => match event {
            E::Lost | E::Interrupted => To(Recovering),
            E::Succeeded => To(Succeeded),
            E::Failed => To(Failed),
            E::SetupFailed => To(FailedSetup),
            E::CancelRequested => To(Cancelling),
            E::ControllerFailed => To(FailedController),
            E::SlotGranted | E::Rescheduled | E::EmptyRun | E::BackedOff | E::Started => Refuse,
            E::Recovered | E::PrechecksFailed | E::GaveUp | E::CancelledUnclaimed | E::Released => Refuse,
        },
        Recovering => match event {
            E::BackedOff => To(Pending),
            E::Recovered => To(Running),
            E::PrechecksFailed => To(FailedPrechecks),
            E::GaveUp => To(FailedNoResource),
            E::CancelRequested => To(Cancelling),
            E::ControllerFailed => To(FailedController),
            E::Rescheduled | E::Lost | E::Interrupted => Stay,
            E::SlotGranted | E::EmptyRun | E::Started | E::Succeeded | E::Failed => Refuse,
            E::SetupFailed | E::CancelledUnclaimed | E::Released => Refuse,
        },
        Cancelling => step_cancelling(event),
        Succeeded | Cancelled | Failed | FailedSetup | FailedPrechecks | FailedNoResource => match event {
            E::ControllerFailed => To(FailedController),
            E::CancelRequested => Stay,
            E::SlotGranted | E::Rescheduled | E::EmptyRun | E::BackedOff | E::Started | E::Lost => Refuse,
            E::Interrupted | E::Recovered | E::Succeeded | E::Failed | E::SetupFailed => Refuse,
            E::PrechecksFailed | E::GaveUp | E::CancelledUnclaimed | E::Released => Refuse,
        },
        FailedController => match event {
            E::ControllerFailed | E::CancelRequested => Stay,
            E::SlotGranted | E::Rescheduled | E::EmptyRun | E::BackedOff | E::Started | E::Lost => Refuse,
            E::Interrupted | E::Recovered | E::Succeeded | E::Failed | E::SetupFailed => Refuse,
            E::PrechecksFailed | E::GaveUp | E::CancelledUnclaimed | E::Released => Refuse,
        },
    }
}

/// Steps a cancellation, which ends in CANCELLED, or in the final status that was reached before it took effect.
fn step_cancelling(event: Event) -> Step<Status> {
    use Event as E;
    use Step::{Refuse, Stay, To};
    match event {
        E::Released => To(Status::Cancelled),
        E::Succeeded => To(Status::Succeeded),
        E::Failed => To(Status::Failed),
        E::SetupFailed => To(Status::FailedSetup),
        E::PrechecksFailed => To(Status::FailedPrechecks),
        E::GaveUp => To(Status::FailedNoResource),
        E::ControllerFailed => To(Status::FailedController),
        E::CancelRequested | E::Interrupted | E::Lost => Stay,
        E::SlotGranted | E::Rescheduled | E::EmptyRun | E::BackedOff | E::Started => Refuse,
        E::Recovered | E::CancelledUnclaimed => Refuse,
    }
}

/// State machine of a job's schedule state.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleLifecycle;

impl StateMachine for ScheduleLifecycle {
    type Status = ScheduleState;
    type Event = ScheduleEvent;
    const NAME: &'static str = "managed-job-schedule";
    const ABOUT: &'static str = "The schedule state of a managed job: which slots it holds.";
    const START: &'static [ScheduleState] = &[ScheduleState::Inactive];
    const STOP: &'static [ScheduleEvent] = &[ScheduleEvent::Stopped];

    fn step(status: ScheduleState, event: ScheduleEvent) -> Step<ScheduleState> {
        step_schedule(status, event)
    }
}

pub fn step_schedule(state: ScheduleState, event: ScheduleEvent) -> Step<ScheduleState> {
    use ScheduleEvent as E;
    use ScheduleState::*;
    use Step::{Refuse, Stay, To};
    match state {
        Inactive => match event {
            E::Submitted => To(Waiting),
            E::Stopped => To(Done),
            E::Claimed | E::LaunchEnded | E::CapacityRefused => Refuse,
            E::BackoffOver | E::WantsLaunch | E::Finished => Refuse,
        },
        Waiting => match event {
            E::Claimed => To(Launching),
            E::Stopped => To(Done),
            E::Submitted => Stay,
            E::LaunchEnded | E::CapacityRefused => Refuse,
            E::BackoffOver | E::WantsLaunch | E::Finished => Refuse,
        },
        Launching => match event {
            E::LaunchEnded => To(Alive),
            E::CapacityRefused => To(AliveBackoff),
            E::Stopped => To(Done),
            E::Submitted | E::Claimed | E::BackoffOver | E::WantsLaunch | E::Finished => Refuse,
        },
        Alive => match event {
            E::WantsLaunch => To(AliveWaiting),
            E::Finished | E::Stopped => To(Done),
            E::Submitted | E::Claimed | E::LaunchEnded | E::CapacityRefused | E::BackoffOver => Refuse,
        },
        AliveWaiting => match event {
            E::Claimed => To(Launching),
            E::Stopped => To(Done),
            E::WantsLaunch | E::BackoffOver => Stay,
            E::Submitted | E::LaunchEnded | E::CapacityRefused | E::Finished => Refuse,
        },
        AliveBackoff => match event {
            E::BackoffOver => To(AliveWaiting),
            E::Stopped => To(Done),
            E::Submitted | E::Claimed | E::LaunchEnded => Refuse,
            E::CapacityRefused | E::WantsLaunch | E::Finished => Refuse,
        },
        Done => match event {
            E::Stopped => Stay,
            E::Submitted | E::Claimed | E::LaunchEnded | E::CapacityRefused => Refuse,
            E::BackoffOver | E::WantsLaunch | E::Finished => Refuse,
        },
    }
}

impl Status {
    /// Returns the exit code of a command that follows a job; 102 is for a job that does not exist.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Succeeded => 0,
            Self::Failed
            | Self::FailedSetup
            | Self::FailedPrechecks
            | Self::FailedNoResource
            | Self::FailedController => 100,
            Self::Pending | Self::Starting | Self::Running | Self::Recovering | Self::Cancelling => 101,
            Self::Cancelled => 103,
        }
    }
}

impl ScheduleState {
    pub const fn holds_launch_slot(self) -> bool {
        match self {
            Self::Launching => true,
            Self::Inactive
            | Self::Waiting
            | Self::Alive
            | Self::AliveWaiting
            | Self::AliveBackoff
            | Self::Done => false,
        }
    }

    pub const fn holds_alive_slot(self) -> bool {
        match self {
            Self::Launching | Self::Alive | Self::AliveWaiting | Self::AliveBackoff => true,
            Self::Inactive | Self::Waiting | Self::Done => false,
        }
    }
}

/// Returns whether a job may be in `state` while its current task is in `status`. `pending` is what a PENDING task
/// waits for. Between two tasks the job is ALIVE and its next task PENDING and queued.
pub fn is_legal(state: ScheduleState, status: Status, pending: Option<PendingKind>) -> bool {
    use PendingKind::*;
    match state {
        ScheduleState::Inactive | ScheduleState::Waiting => {
            status == Status::Pending && pending == Some(Queued)
        }
        ScheduleState::Launching => match status {
            Status::Starting | Status::Recovering | Status::Cancelling => true,
            Status::Pending | Status::Running => false,
            Status::Succeeded | Status::Cancelled | Status::Failed | Status::FailedSetup => false,
            Status::FailedPrechecks | Status::FailedNoResource | Status::FailedController => false,
        },
        ScheduleState::Alive => match status {
            Status::Pending => pending == Some(Queued),
            Status::Running | Status::Cancelling => true,
            Status::Starting | Status::Recovering => false,
            Status::Succeeded | Status::Cancelled | Status::Failed | Status::FailedSetup => true,
            Status::FailedPrechecks | Status::FailedNoResource | Status::FailedController => true,
        },
        ScheduleState::AliveWaiting => match status {
            Status::Pending | Status::Recovering | Status::Cancelling => true,
            Status::Starting | Status::Running => false,
            Status::Succeeded | Status::Cancelled | Status::Failed | Status::FailedSetup => false,
            Status::FailedPrechecks | Status::FailedNoResource => false,
            // An internal error may occur at any time, and its nodes are still to be released.
            Status::FailedController => true,
        },
        ScheduleState::AliveBackoff => match status {
            Status::Pending => pending.is_some_and(|kind| kind != Queued),
            Status::Cancelling => true,
            Status::Starting | Status::Running | Status::Recovering => false,
            Status::Succeeded | Status::Cancelled | Status::Failed | Status::FailedSetup => false,
            Status::FailedPrechecks | Status::FailedNoResource => false,
            // An internal error may occur at any time, and its nodes are still to be released.
            Status::FailedController => true,
        },
        ScheduleState::Done => status.is_final(),
    }
}

/// A recovery in progress: from the first RECOVERING to the next RUNNING, across back-offs and restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryEpisode {
    credit: bool,
}

impl RecoveryEpisode {
    pub const fn open(source: RecoverySource) -> Self {
        Self { credit: has_credit(source) }
    }

    /// Adds another RECOVERING event of the same episode. Credit, once set, is never removed.
    #[must_use]
    pub const fn merge(self, source: RecoverySource) -> Self {
        Self { credit: self.credit || has_credit(source) }
    }

    /// Returns what the end of the episode, RUNNING again, adds to `recovery_count`.
    pub const fn recovery_increment(self) -> u32 {
        self.credit as u32
    }

    /// Returns the stored value.
    pub const fn has_credit(self) -> bool {
        self.credit
    }
    pub const fn from_stored(credit: bool) -> Self {
        Self { credit }
    }
}

const fn has_credit(source: RecoverySource) -> bool {
    match source {
        RecoverySource::Failure => true,
        RecoverySource::Emergency | RecoverySource::Restart => false,
    }
}
