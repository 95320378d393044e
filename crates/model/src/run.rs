//! The run: what a user applied, followed through its jobs.
//!
//! A run's status is derived from its latest submissions (`decide/runs.rs`); only the run pipeline
//! writes a final one, by way of [`Ending`].

use crate::{
    job,
    machine::{StateMachine, Step, final_statuses, words},
    retry,
};

words! {
    /// The status of a run.
    pub enum Status: "run status" {
        /// has no jobs to wait for: until a cron slot, a retry's delay or a request
        Pending = "pending",
        /// its jobs wait for instances
        Submitted = "submitted",
        /// a job has an instance that is getting ready
        Provisioning = "provisioning",
        /// a job is running
        Running = "running",
        /// has a reason to end; its jobs are ending
        Terminating = "terminating",
        /// a user ended it
        Terminated = "terminated",
        /// ended badly
        Failed = "failed",
        /// ended well
        Done = "done",
    }

    /// What can happen to a run.
    pub enum Event: "run event" {
        /// new submissions were made: the delay is over, the cron slot came, or requests arrived
        Resubmitted = "resubmitted",
        /// no job is further than submitted
        Waits = "waits",
        /// a job provisions or pulls, none runs
        Provisions = "provisions",
        /// a job runs
        Runs = "runs",
        /// only replicas to retry are left, or the service is at zero
        JobsIdle = "idles",
        /// a user stopped or aborted it
        StopAsked = "stop-asked",
        /// a failure, the end of all jobs, or a gateway's error gave it a reason to end
        EndDecided = "end-decided",
        /// all jobs are final and the schedule goes on: it waits for the next slot
        Rescheduled = "rescheduled",
        /// all jobs are final, after all_jobs_done
        FinishedDone = "finished-done",
        /// all jobs are final, after a failure's reason
        FinishedFailed = "finished-failed",
        /// all jobs are final, after a user's decision
        FinishedTerminated = "finished-terminated",
    }

    /// The final statuses alone.
    pub enum FinalStatus: "final run status" {
        Terminated = "terminated",
        Failed = "failed",
        Done = "done",
    }

    /// Why a run ends.
    pub enum TerminationReason: "run termination reason" {
        /// every job ended well
        AllJobsDone = "all_jobs_done",
        /// a job failed and may not be retried
        JobFailed = "job_failed",
        /// a job failed and its retries are spent
        RetryLimitExceeded = "retry_limit_exceeded",
        /// a user stopped it
        StoppedByUser = "stopped_by_user",
        /// a user aborted it
        AbortedByUser = "aborted_by_user",
        /// the server could not process it
        ServerError = "server_error",
        /// no replica of the gateway accepted the service
        GatewayError = "gateway_error",
    }
}

final_statuses!(Status: Terminated | Failed | Done;
    active: Pending | Submitted | Provisioning | Running | Terminating);

/// The run's machine.
#[derive(Clone, Copy, Debug)]
pub struct RunLifecycle;

impl StateMachine for RunLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "run";
    const ABOUT: &'static str = "A run, followed through its jobs.";
    const START: &'static [Status] = &[Status::Submitted, Status::Pending];
    const STOP: &'static [Event] = &[Event::StopAsked];

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
            StopAsked | EndDecided => To(Terminating),
            JobsIdle => Stay,
            Waits | Provisions | Runs => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Submitted => match event {
            Waits => Stay,
            Provisions => To(Provisioning),
            Runs => To(Running),
            JobsIdle => To(Pending),
            StopAsked | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Provisioning => match event {
            Waits => To(Submitted),
            Provisions => Stay,
            Runs => To(Running),
            JobsIdle => To(Pending),
            StopAsked | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Running => match event {
            Waits => To(Submitted),
            Provisions => To(Provisioning),
            Runs => Stay,
            JobsIdle => To(Pending),
            StopAsked | EndDecided => To(Terminating),
            Resubmitted => Refuse,
            Rescheduled | FinishedDone | FinishedFailed | FinishedTerminated => Refuse,
        },
        Terminating => match event {
            Rescheduled => To(Pending),
            FinishedDone => To(Done),
            FinishedFailed => To(Failed),
            FinishedTerminated => To(Terminated),
            StopAsked | EndDecided => Stay,
            Resubmitted | Waits | Provisions | Runs | JobsIdle => Refuse,
        },
        Terminated | Failed | Done => match event {
            StopAsked => Stay,
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

    /// The event that moves a terminating run here.
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

    /// The reason its unfinished jobs end with.
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

    /// The `error` text clients show; `None` where the status says it all.
    pub const fn error(self) -> Option<&'static str> {
        match self {
            Self::RetryLimitExceeded => Some("retry limit exceeded"),
            Self::ServerError => Some("server error"),
            Self::GatewayError => Some("gateway error"),
            Self::AllJobsDone | Self::JobFailed | Self::StoppedByUser | Self::AbortedByUser => None,
        }
    }

    /// Whether a user wanted the run gone: then no schedule brings it back.
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

/// Why a run ends, and in a sentence: no run turns to its end without both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    reason: TerminationReason,
    said: String,
}

impl Ending {
    pub fn new(reason: TerminationReason, said: impl Into<String>) -> Self {
        Self { reason, said: said.into() }
    }
    pub const fn reason(&self) -> TerminationReason {
        self.reason
    }
    pub fn said(&self) -> &str {
        &self.said
    }
    pub const fn final_status(&self) -> FinalStatus {
        self.reason.final_status()
    }
}

/// What `status_message` needs to know of one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSummary {
    /// The status of its latest submission.
    pub status: job::Status,
    /// Why its latest submission that ended has ended.
    pub last_ended: Option<job::TerminationReason>,
}

/// The text of `status_message`: the status, or what it comes to.
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
