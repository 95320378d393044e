//! Names of the pipelines and listeners that a hint wakes. A hint carries no data: it only says that there may be work.

use windlass_model::job;

/// A pipeline, or a task that waits for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hint {
    Runs,
    JobsSubmitted,
    JobsRunning,
    JobsTerminating,
    ManagedJobs,
    Instances,
    Fleets,
    Volumes,
    /// The routes of services may have changed.
    Routes,
    /// A run will be due shortly: its pipeline would find nothing yet.
    RunsDueSoon,
    /// The same of an instance.
    InstancesDueSoon,
}

impl Hint {
    /// Name between servers, and of the pipeline.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::JobsSubmitted => "jobs_submitted",
            Self::JobsRunning => "jobs_running",
            Self::JobsTerminating => "jobs_terminating",
            Self::ManagedJobs => "managed_jobs",
            Self::Instances => "instances",
            Self::Fleets => "fleets",
            Self::Volumes => "volumes",
            Self::Routes => "routes",
            Self::RunsDueSoon => "runs_due_soon",
            Self::InstancesDueSoon => "instances_due_soon",
        }
    }

    /// The pipeline that processes a placed job in this status.
    pub const fn for_placed_job(status: job::Status) -> Self {
        match status {
            job::Status::Terminating => Self::JobsTerminating,
            job::Status::Submitted
            | job::Status::Provisioning
            | job::Status::Pulling
            | job::Status::Running
            | job::Status::Terminated
            | job::Status::Aborted
            | job::Status::Failed
            | job::Status::Done => Self::JobsRunning,
        }
    }
}
