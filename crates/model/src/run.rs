//! The run: an applied configuration and its jobs.
//!
//! A run's status is derived from its latest submissions (`decide/runs.rs`); only the run pipeline writes a final one,
//! through [`Ending`].

use crate::{
    job, retry,
    state_machine::{StateMachine, Step, final_statuses, words},
};

words! {
    /// Status of a run.
    pub enum Status: "run status" {
        /// has no jobs to wait for: until a cron slot, a retry delay or a request
        Pending = "pending",
        /// its jobs wait for instances
        Submitted = "submitted",
        /// a job has an instance that is being prepared
        Provisioning = "provisioning",
        /// a job is running
        Running = "running",
        /// has a reason to end; its jobs are terminating
        Terminating = "terminating",
        /// a user ended it
        Terminated = "terminated",
        /// ended with a failure
        Failed = "failed",
        /// ended successfully
        Done = "done",
    }

    /// Events of a run.
    pub enum Event: "run event" {
        /// new submissions were created: the delay is over, the cron slot came, or requests arrived
        Resubmitted = "resubmitted",
        /// no job is past submitted
        Waits = "waits",
        /// a job is provisioning or pulling, none runs
        Provisions = "provisions",
        /// a job runs
        Runs = "runs",
        /// only replicas to retry are left, or the service is at zero
        JobsIdle = "idles",
        /// a user stopped or aborted it
        StopRequested = "stop-asked",
        /// a failure, the end of all jobs, or a gateway error is a reason to end
        EndDecided = "end-decided",
        /// all jobs are final and the schedule continues: it waits for the next slot
        Rescheduled = "rescheduled",
        /// all jobs are final, after all_jobs_done
        FinishedDone = "finished-done",
        /// all jobs are final, after a failure's reason
        FinishedFailed = "finished-failed",
        /// all jobs are final, after a user's decision
        FinishedTerminated = "finished-terminated",
    }

    /// The final statuses only.
    pub enum FinalStatus: "final run status" {
        Terminated = "terminated",
        Failed = "failed",
        Done = "done",
    }

    /// Reason why a run ends.
    pub enum TerminationReason: "run termination reason" {
        /// every job ended successfully
        AllJobsDone = "all_jobs_done",
        /// a job failed and may not be retried
        JobFailed = "job_failed",
        /// a job failed and its retries are exhausted
        RetryLimitExceeded = "retry_limit_exceeded",
        /// a user stopped it
        StoppedByUser = "stopped_by_user",
        /// a user aborted it
        AbortedByUser = "aborted_by_user",
        /// the server could not process it
        ServerError = "server_error",
        /// the gateway of the service was deleted
        GatewayError = "gateway_error",
    }
}

final_statuses!(Status: Terminated | Failed | Done;
    active: Pending | Submitted | Provisioning | Running | Terminating);

/// State machine of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunLifecycle;

impl StateMachine for RunLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "run";
    const ABOUT: &'static str = "A run, whose status follows from its jobs.";
    const START: &'static [Status] = &[Status::Submitted, Status::Pending];
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
        Pending => match event {
            Resubmitted => To(Submitted),
            StopRequested | EndDecided => To(Terminating),
            JobsIdle => Stay,
            Waits | Provisions | Runs => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Submitted => match event {
            Waits => Stay,
            Provisions => To(Provisioning),
            Runs => To(Running),
            JobsIdle => To(Pending),
            StopRequested | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Provisioning => match event {
            Waits => To(Submitted),
            Provisions => Stay,
            Runs => To(Running),
            JobsIdle => To(Pending),
            StopRequested | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Running => match event {
            Waits => To(Submitted),
            Provisions => To(Provisioning),
            Runs => Stay,
            JobsIdle => To(Pending),
            StopRequested | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Terminating => match event {
            Rescheduled => To(Pending),
            FinishedDone => To(Done),
            FinishedFailed => To(Failed),
            FinishedTerminated => To(Terminated),
            StopRequested | EndDecided => Stay,
            Resubmitted | Waits | Provisions | Runs | JobsIdle => Refuse,
        },
        Terminated | Failed | Done => match event {
            StopRequested => Stay,
            Resubmitted | Waits | Provisions | Runs | JobsIdle | EndDecided => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
    }
}

impl FinalStatus {
    pub const fn status(self) -> Status {
        match self {
            Self::Terminated => Status::Terminated,
            Self::Failed => Status::Failed,
            Self::Done => Status::Done,
        }
    }

    /// Returns the event that leads from terminating to this status.
    pub const fn event(self) -> Event {
        match self {
            Self::Terminated => Event::FinishedTerminated,
            Self::Failed => Event::FinishedFailed,
            Self::Done => Event::FinishedDone,
        }
    }
}

impl TerminationReason {
    pub const fn final_status(self) -> FinalStatus {
        match self {
            Self::AllJobsDone => FinalStatus::Done,
            Self::JobFailed | Self::RetryLimitExceeded | Self::ServerError | Self::GatewayError => {
                FinalStatus::Failed
            }
            Self::StoppedByUser | Self::AbortedByUser => FinalStatus::Terminated,
        }
    }

    /// Returns the termination reason of its unfinished jobs.
    pub const fn job_reason(self) -> job::TerminationReason {
        match self {
            Self::AllJobsDone => job::TerminationReason::DoneByRunner,
            Self::JobFailed | Self::RetryLimitExceeded | Self::ServerError | Self::GatewayError => {
                job::TerminationReason::TerminatedByServer
            }
            Self::StoppedByUser => job::TerminationReason::TerminatedByUser,
            Self::AbortedByUser => job::TerminationReason::AbortedByUser,
        }
    }

    /// Returns the `error` text that clients show; `None` if the status is sufficient.
    pub const fn error(self) -> Option<&'static str> {
        match self {
            Self::RetryLimitExceeded => Some("retry limit exceeded"),
            Self::ServerError => Some("server error"),
            Self::GatewayError => Some("gateway error"),
            Self::AllJobsDone | Self::JobFailed | Self::StoppedByUser | Self::AbortedByUser => None,
        }
    }

    /// Returns whether a user ended the run: then no schedule starts it again.
    pub const fn is_by_user(self) -> bool {
        match self {
            Self::StoppedByUser | Self::AbortedByUser => true,
            Self::AllJobsDone
            | Self::JobFailed
            | Self::RetryLimitExceeded
            | Self::ServerError
            | Self::GatewayError => false,
        }
    }
}

/// Reason and message of the end of a run, both required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    reason: TerminationReason,
    message: String,
}

impl Ending {
    pub fn new(reason: TerminationReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
    pub const fn reason(&self) -> TerminationReason {
        self.reason
    }
    pub fn message(&self) -> &str {
        &self.message
    }
    pub const fn final_status(&self) -> FinalStatus {
        self.reason.final_status()
    }
}

/// State of one job for `status_message`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSummary {
    /// Status of its latest submission.
    pub status: job::Status,
    /// Termination reason of the last submission that ended.
    pub last_ended: Option<job::TerminationReason>,
}

/// Returns the text of `status_message`: the status, or a more specific text.
pub fn status_message(status: Status, jobs: &[JobSummary], retry: Option<&retry::Policy>) -> &'static str {
    if !jobs.is_empty() && jobs.iter().all(|job| job.status == job::Status::Pulling) {
        return "pulling";
    }
    let waits = match status {
        Status::Pending | Status::Submitted => true,
        Status::Provisioning | Status::Running | Status::Terminating => false,
        Status::Terminated | Status::Failed | Status::Done => false,
    };
    let retries = retry.is_some_and(|policy| policy.covers(retry::Event::NoCapacity));
    let lacked =
        |job: &JobSummary| job.last_ended == Some(job::TerminationReason::FailedToStartDueToNoCapacity);
    if waits && retries && jobs.iter().any(lacked) {
        return "retrying";
    }
    status.as_str()
}
