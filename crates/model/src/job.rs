//! The job: one submission, from the queue to its end.
//!
//! Only the terminating-job pipeline writes a final status, and only through [`Ending`], which cannot be created
//! without a reason.

use serde::{Deserialize, Serialize};

use crate::{
    retry,
    state_machine::{StateMachine, Step, final_statuses, words},
};

words! {
    /// Status of one submission.
    pub enum Status: "job status" {
        /// waits for an instance
        Submitted = "submitted",
        /// has an instance; its agents do not respond yet
        Provisioning = "provisioning",
        /// the shim accepted the task and prepares its container
        Pulling = "pulling",
        /// the runner has the job and executes it
        Running = "running",
        /// has a reason to end; logs are drained, the container removed, the instance freed
        Terminating = "terminating",
        /// ended by a decision of a user or the server
        Terminated = "terminated",
        /// ended at once, without a grace period
        Aborted = "aborted",
        /// ended with a failure
        Failed = "failed",
        /// ended successfully
        Done = "done",
    }

    /// Events of a submission.
    pub enum Event: "job event" {
        /// an instance was assigned, or a new one is being created for it
        Placed = "placed",
        /// no fleet, no capacity, or a volume that cannot be used
        NotPlaced = "not-placed",
        /// the shim responds and accepted the task
        TaskAccepted = "task-taken",
        /// the runner responds and accepted the job
        Started = "started",
        /// an agent reports the end: exit, error, a limit of the agent, a task it refuses
        Exited = "exited",
        /// the agents were unreachable, or not ready, for longer than allowed
        Lost = "lost",
        /// utilization, inactivity or max_duration: the server ends it
        EndedByPolicy = "policy-ended",
        /// the run ends, the service scales down, or a sibling's failure retries the replica
        StopRequested = "stop-asked",
        /// all released after done_by_runner
        ReleasedDone = "released-done",
        /// all released after a failure's reason
        ReleasedFailed = "released-failed",
        /// all released after a decision's reason
        ReleasedTerminated = "released-terminated",
        /// all released after aborted_by_user
        ReleasedAborted = "released-aborted",
    }

    /// The final statuses only.
    pub enum FinalStatus: "final job status" {
        Terminated = "terminated",
        Aborted = "aborted",
        Failed = "failed",
        Done = "done",
    }

    /// Reason why a submission ends. Agents may send only these values.
    pub enum TerminationReason: "job termination reason" {
        /// no offer could be provisioned, or no instance was free
        FailedToStartDueToNoCapacity = "failed_to_start_due_to_no_capacity",
        /// the spot instance was reclaimed
        InterruptedByNoCapacity = "interrupted_by_no_capacity",
        /// the agents stayed unreachable
        InstanceUnreachable = "instance_unreachable",
        /// the fleet's export to this project was withdrawn
        InstanceAccessRevoked = "instance_access_revoked",
        /// the instance was not ready in time
        WaitingInstanceLimitExceeded = "waiting_instance_limit_exceeded",
        /// the runner was not ready in time
        WaitingRunnerLimitExceeded = "waiting_runner_limit_exceeded",
        /// a volume could not be attached
        VolumeError = "volume_error",
        /// no gateway replica accepted the job
        GatewayError = "gateway_error",
        /// the user's program exited with a code other than 0
        ContainerExitedWithError = "container_exited_with_error",
        /// a port is in use
        PortsBindingFailed = "ports_binding_failed",
        /// the image could not be pulled or the container not created
        CreatingContainerError = "creating_container_error",
        /// the agent could not prepare or run the program
        ExecutorError = "executor_error",
        /// more log in an hour than the quota
        LogQuotaExceeded = "log_quota_exceeded",
        /// a user stopped the run
        TerminatedByUser = "terminated_by_user",
        /// the run ended or retries this replica
        TerminatedByServer = "terminated_by_server",
        /// the service needs fewer replicas
        ScaledDown = "scaled_down",
        /// no connection for inactivity_duration
        InactivityDurationExceeded = "inactivity_duration_exceeded",
        /// a GPU was idle for the whole window of utilization_policy
        TerminatedDueToUtilizationPolicy = "terminated_due_to_utilization_policy",
        /// ran for max_duration
        MaxDurationExceeded = "max_duration_exceeded",
        /// the program ended successfully
        DoneByRunner = "done_by_runner",
        /// a user aborted the run
        AbortedByUser = "aborted_by_user",
    }

    /// Details of an ending, where the reason is too general. Shown next to the reason, never instead of it.
    pub enum TerminationDetail: "termination detail" {
        /// the kernel killed the program for its memory use
        OomKilled = "oom_killed",
        /// the host's disk is full
        NoDisk = "no_disk",
        /// it used more disk than it requested
        DiskLimitExceeded = "disk_limit_exceeded",
        /// the host rebooted while the container ran
        HostReboot = "host_reboot",
        /// the container engine restarted and ended the container
        HostRuntimeRestart = "host_runtime_restart",
        /// no fleet matched the run at all
        NoFleets = "no_fleets",
        /// it failed during its setup, before its program started
        SetupFailed = "setup_failed",
        /// no capacity for all its nodes in the chosen region; other regions are left to try
        RegionFull = "region_full",
        /// no instance that exists, or that could be created, fits the request
        NeverFits = "never_fits",
        /// ended by the scheduler, so that a job could start that comes first
        PreemptedByScheduler = "preempted_by_scheduler",
    }
}

final_statuses!(Status: Terminated | Aborted | Failed | Done;
    active: Submitted | Provisioning | Pulling | Running | Terminating);

/// State machine of a job.
#[derive(Clone, Copy, Debug)]
pub struct JobLifecycle;

impl StateMachine for JobLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "job";
    const ABOUT: &'static str = "One submission of one job, from the queue to its end.";
    const START: &'static [Status] = &[Status::Submitted];
    const STOP: &'static [Event] = &[Event::StopRequested];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

pub fn step(status: Status, event: Event) -> Step<Status> {
    use Event::*;
    use Status::*;
    use Step::{Refuse, Stay, To};
    match status {
        Submitted => match event {
            Placed => To(Provisioning),
            NotPlaced | StopRequested => To(Terminating),
            TaskAccepted | Started | Exited | Lost | EndedByPolicy => Refuse,
            ReleasedDone | ReleasedFailed | ReleasedTerminated | ReleasedAborted => Refuse,
        },
        Provisioning => match event {
            TaskAccepted => To(Pulling),
            Started => To(Running),
            Exited | Lost | StopRequested => To(Terminating),
            Placed | NotPlaced | EndedByPolicy => Refuse,
            ReleasedDone | ReleasedFailed | ReleasedTerminated | ReleasedAborted => Refuse,
        },
        Pulling => match event {
            Started => To(Running),
            Exited | Lost | StopRequested => To(Terminating),
            TaskAccepted => Stay,
            Placed | NotPlaced | EndedByPolicy => Refuse,
            ReleasedDone | ReleasedFailed | ReleasedTerminated | ReleasedAborted => Refuse,
        },
        Running => match event {
            Exited | Lost | EndedByPolicy | StopRequested => To(Terminating),
            Started => Stay,
            Placed | NotPlaced | TaskAccepted => Refuse,
            ReleasedDone | ReleasedFailed | ReleasedTerminated | ReleasedAborted => Refuse,
        },
        Terminating => match event {
            ReleasedDone => To(Done),
            ReleasedFailed => To(Failed),
            ReleasedTerminated => To(Terminated),
            ReleasedAborted => To(Aborted),
            Exited | Lost | EndedByPolicy | StopRequested => Stay,
            Placed | NotPlaced | TaskAccepted | Started => Refuse,
        },
        Terminated | Aborted | Failed | Done => match event {
            StopRequested => Stay,
            Placed | NotPlaced | TaskAccepted | Started | Exited | Lost | EndedByPolicy => Refuse,
            ReleasedDone | ReleasedFailed | ReleasedTerminated | ReleasedAborted => Refuse,
        },
    }
}

impl FinalStatus {
    pub const fn status(self) -> Status {
        match self {
            Self::Terminated => Status::Terminated,
            Self::Aborted => Status::Aborted,
            Self::Failed => Status::Failed,
            Self::Done => Status::Done,
        }
    }

    /// Returns the event that leads from terminating to this status.
    pub const fn event(self) -> Event {
        match self {
            Self::Terminated => Event::ReleasedTerminated,
            Self::Aborted => Event::ReleasedAborted,
            Self::Failed => Event::ReleasedFailed,
            Self::Done => Event::ReleasedDone,
        }
    }
}

impl TerminationReason {
    pub const fn final_status(self) -> FinalStatus {
        match self {
            Self::FailedToStartDueToNoCapacity
            | Self::InterruptedByNoCapacity
            | Self::InstanceUnreachable
            | Self::InstanceAccessRevoked
            | Self::WaitingInstanceLimitExceeded
            | Self::WaitingRunnerLimitExceeded
            | Self::VolumeError
            | Self::GatewayError
            | Self::ContainerExitedWithError
            | Self::PortsBindingFailed
            | Self::CreatingContainerError
            | Self::ExecutorError
            | Self::LogQuotaExceeded => FinalStatus::Failed,
            Self::TerminatedByUser
            | Self::TerminatedByServer
            | Self::ScaledDown
            | Self::InactivityDurationExceeded
            | Self::TerminatedDueToUtilizationPolicy
            | Self::MaxDurationExceeded => FinalStatus::Terminated,
            Self::DoneByRunner => FinalStatus::Done,
            Self::AbortedByUser => FinalStatus::Aborted,
        }
    }

    /// Returns the event of `retry.on_events` that covers this reason; `None`: never retried.
    pub const fn retry_event(self) -> Option<retry::Event> {
        match self {
            Self::FailedToStartDueToNoCapacity => Some(retry::Event::NoCapacity),
            Self::InterruptedByNoCapacity => Some(retry::Event::Interruption),
            Self::InstanceUnreachable
            | Self::InstanceAccessRevoked
            | Self::WaitingInstanceLimitExceeded
            | Self::WaitingRunnerLimitExceeded
            | Self::VolumeError
            | Self::GatewayError
            | Self::ContainerExitedWithError
            | Self::PortsBindingFailed
            | Self::CreatingContainerError
            | Self::ExecutorError
            | Self::LogQuotaExceeded => Some(retry::Event::Error),
            Self::TerminatedByUser
            | Self::TerminatedByServer
            | Self::ScaledDown
            | Self::InactivityDurationExceeded
            | Self::TerminatedDueToUtilizationPolicy
            | Self::MaxDurationExceeded
            | Self::DoneByRunner
            | Self::AbortedByUser => None,
        }
    }

    /// Returns the `error` text that clients show; `None` if the status is sufficient.
    pub const fn error(self) -> Option<&'static str> {
        match self {
            Self::FailedToStartDueToNoCapacity
            | Self::InterruptedByNoCapacity
            | Self::ContainerExitedWithError
            | Self::TerminatedByUser
            | Self::TerminatedByServer
            | Self::DoneByRunner
            | Self::AbortedByUser => None,
            Self::InstanceUnreachable => Some("instance unreachable"),
            Self::InstanceAccessRevoked => Some("instance access revoked"),
            Self::WaitingInstanceLimitExceeded => Some("waiting instance limit exceeded"),
            Self::WaitingRunnerLimitExceeded => Some("waiting runner limit exceeded"),
            Self::VolumeError => Some("volume error"),
            Self::GatewayError => Some("gateway error"),
            Self::PortsBindingFailed => Some("ports binding failed"),
            Self::CreatingContainerError => Some("runner error"),
            Self::ExecutorError => Some("executor error"),
            Self::LogQuotaExceeded => Some("log quota exceeded"),
            Self::ScaledDown => Some("scaled down"),
            Self::InactivityDurationExceeded => Some("inactivity duration exceeded"),
            Self::TerminatedDueToUtilizationPolicy => Some("utilization policy"),
            Self::MaxDurationExceeded => Some("max duration exceeded"),
        }
    }
}

/// Reason and details of the end of a submission: the only path to a final status. There is no ending without a reason,
/// and the final status follows from the reason alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    reason: TerminationReason,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    detail: Option<TerminationDetail>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exit_status: Option<i32>,
    #[serde(default, rename = "said", skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

impl Ending {
    pub const fn new(reason: TerminationReason) -> Self {
        Self { reason, detail: None, exit_status: None, message: None }
    }

    /// Returns the ending of a program that exited: 0 is done, anything else has failed.
    pub const fn exited(code: i32) -> Self {
        let reason = match code {
            0 => TerminationReason::DoneByRunner,
            _ => TerminationReason::ContainerExitedWithError,
        };
        Self { reason, detail: None, exit_status: Some(code), message: None }
    }

    pub fn no_capacity(message: impl Into<String>) -> Self {
        Self::new(TerminationReason::FailedToStartDueToNoCapacity).with_message(message)
    }

    /// Returns an ending without capacity, because no fleet matched at all.
    pub fn no_fleets(message: impl Into<String>) -> Self {
        Self::no_capacity(message).with_detail(TerminationDetail::NoFleets)
    }

    /// Returns an ending without capacity that waiting cannot resolve: no instance fits, and none can be created.
    pub fn never_fits(message: impl Into<String>) -> Self {
        Self::no_capacity(message).with_detail(TerminationDetail::NeverFits)
    }

    /// Returns the ending of a program that was killed for its memory use. Clients know it as
    /// `container_exited_with_error`.
    pub const fn oom_killed() -> Self {
        Self::exited(137).with_detail(TerminationDetail::OomKilled)
    }

    pub const fn no_disk() -> Self {
        Self::new(TerminationReason::ExecutorError).with_detail(TerminationDetail::NoDisk)
    }

    /// Returns the ending of a job that used more disk than it requested. Clients know it as `executor_error`.
    pub const fn disk_limit_exceeded() -> Self {
        Self::new(TerminationReason::ExecutorError).with_detail(TerminationDetail::DiskLimitExceeded)
    }

    pub const fn host_reboot() -> Self {
        Self::new(TerminationReason::InstanceUnreachable).with_detail(TerminationDetail::HostReboot)
    }

    pub const fn host_runtime_restart() -> Self {
        Self::exited(137).with_detail(TerminationDetail::HostRuntimeRestart)
    }

    /// Returns the ending of a job that the scheduler preempted. Clients know it as `interrupted_by_no_capacity`, and
    /// `retry` as an interruption.
    pub const fn preempted() -> Self {
        Self::new(TerminationReason::InterruptedByNoCapacity)
            .with_detail(TerminationDetail::PreemptedByScheduler)
    }

    #[must_use]
    pub const fn with_detail(mut self, detail: TerminationDetail) -> Self {
        self.detail = Some(detail);
        self
    }

    #[must_use]
    pub const fn with_exit_status(mut self, code: i32) -> Self {
        self.exit_status = Some(code);
        self
    }

    /// Adds a message: from an agent, or the shortfalls.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = Some(message.into());
        self
    }

    pub const fn reason(&self) -> TerminationReason {
        self.reason
    }
    pub const fn detail(&self) -> Option<TerminationDetail> {
        self.detail
    }
    pub const fn exit_status(&self) -> Option<i32> {
        self.exit_status
    }
    pub fn message(&self) -> Option<&str> {
        self.message.as_deref()
    }
    /// Returns whether the scheduler preempted the job.
    pub const fn is_preempted(&self) -> bool {
        matches!(self.detail, Some(TerminationDetail::PreemptedByScheduler))
    }
    /// Returns the word that events show as the reason.
    pub const fn event_reason(&self) -> &'static str {
        match self.is_preempted() {
            true => TerminationDetail::PreemptedByScheduler.as_str(),
            false => self.reason.as_str(),
        }
    }
    pub const fn final_status(&self) -> FinalStatus {
        self.reason.final_status()
    }
    pub const fn retry_event(&self) -> Option<retry::Event> {
        self.reason.retry_event()
    }
    pub const fn error(&self) -> Option<&'static str> {
        self.reason.error()
    }
}

/// Returns the text of `status_message`: the status, or the result of the ending.
pub fn status_message(status: Status, ending: Option<&Ending>) -> String {
    match (status, ending) {
        (Status::Done, _) => "exited (0)".to_owned(),
        (Status::Failed, Some(ending)) => failed_message(ending),
        (Status::Failed, None) => "error".to_owned(),
        (Status::Terminated, Some(ending)) if ending.reason == TerminationReason::TerminatedByUser => {
            "stopped".to_owned()
        }
        (status, _) => status.as_str().to_owned(),
    }
}

fn failed_message(ending: &Ending) -> String {
    match ending.reason {
        TerminationReason::ContainerExitedWithError => match ending.exit_status {
            Some(code) => format!("exited ({code})"),
            None => "error".to_owned(),
        },
        TerminationReason::FailedToStartDueToNoCapacity => match ending.detail {
            Some(TerminationDetail::NoFleets) => "no fleets".to_owned(),
            Some(
                TerminationDetail::OomKilled
                | TerminationDetail::NoDisk
                | TerminationDetail::DiskLimitExceeded
                | TerminationDetail::HostReboot
                | TerminationDetail::HostRuntimeRestart
                | TerminationDetail::SetupFailed
                | TerminationDetail::RegionFull
                | TerminationDetail::NeverFits
                | TerminationDetail::PreemptedByScheduler,
            )
            | None => "no capacity".to_owned(),
        },
        TerminationReason::InterruptedByNoCapacity if ending.is_preempted() => "preempted".to_owned(),
        TerminationReason::InterruptedByNoCapacity => "interrupted".to_owned(),
        TerminationReason::ExecutorError if ending.detail == Some(TerminationDetail::DiskLimitExceeded) => {
            "disk limit exceeded".to_owned()
        }
        TerminationReason::InstanceUnreachable
        | TerminationReason::InstanceAccessRevoked
        | TerminationReason::WaitingInstanceLimitExceeded
        | TerminationReason::WaitingRunnerLimitExceeded
        | TerminationReason::VolumeError
        | TerminationReason::GatewayError
        | TerminationReason::PortsBindingFailed
        | TerminationReason::CreatingContainerError
        | TerminationReason::ExecutorError
        | TerminationReason::LogQuotaExceeded
        | TerminationReason::TerminatedByUser
        | TerminationReason::TerminatedByServer
        | TerminationReason::ScaledDown
        | TerminationReason::InactivityDurationExceeded
        | TerminationReason::TerminatedDueToUtilizationPolicy
        | TerminationReason::MaxDurationExceeded
        | TerminationReason::DoneByRunner
        | TerminationReason::AbortedByUser => "error".to_owned(),
    }
}
