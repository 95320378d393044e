//! Interface of a dispatcher to the scheduler that runs its containers.

use windlass_model::dispatch::{
    Attempt, ContainerNeeds, SchedulerSnapshot,
    capacity::{ClusterNode, NodeClass, node_classes},
    select::Capacity,
};

/// State of a job that ended because its node was lost.
pub const NODE_LOST: &str = "NODE_FAIL";
/// State of a job that ended because it used more memory than requested.
pub const OUT_OF_MEMORY: &str = "OUT_OF_MEMORY";
/// State of a job that ended because it exceeded its time limit.
pub const TIMED_OUT: &str = "TIMEOUT";

/// Container to be submitted.
#[derive(Clone)]
pub struct SubmitRequest {
    pub attempt: Attempt,
    pub priority: u64,
    pub needs: ContainerNeeds,
    /// Environment of the executor: the server's address, and how containers are run. Contains no secrets.
    pub environment: Vec<(String, String)>,
    /// The attempt's token, which the executor reads from its standard input.
    pub token: String,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The scheduler read the request and refused it.
    #[error("the scheduler refused the job: {why}")]
    Refused { why: String },
    /// The scheduler may have accepted it: only a search for its name can show that.
    #[error("failed to submit a container")]
    Unclear(#[source] SchedulerError),
}

/// The scheduler did not respond, or not meaningfully. Never equivalent to an empty result.
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    #[error("failed to start `{program}`")]
    Start {
        program: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("`{program}` did not respond within {} s", within.as_secs())]
    Late { program: &'static str, within: std::time::Duration },
    #[error("`{program}` failed: {message}")]
    Failed {
        program: &'static str,
        message: String,
        /// Exit code of the program, if it is one that exited by itself.
        code: Option<i32>,
    },
    #[error("unexpected output of `{program}`: `{line}`")]
    InvalidOutput { program: &'static str, line: String },
}

/// Method of stopping a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The executor is signalled, and captures the output that exists.
    Request,
    /// The scheduler kills the job.
    Force,
}

/// Scheduler of a dispatcher. All calls may be repeated.
pub trait Scheduler {
    type Room: Capacity + Send;

    fn snapshot(&self) -> impl Future<Output = Result<SchedulerSnapshot, SchedulerError>> + Send;
    fn room(
        &self,
        lower: &SchedulerSnapshot,
    ) -> impl Future<Output = Result<Self::Room, SchedulerError>> + Send;
    /// Submits a container and returns the scheduler's id of the job.
    fn submit(&self, order: &SubmitRequest) -> impl Future<Output = Result<String, SubmitError>> + Send;
    fn stop(&self, job: &str, pressure: StopMode) -> impl Future<Output = Result<(), SchedulerError>> + Send;
    fn renice(&self, job: &str, priority: u64) -> impl Future<Output = Result<(), SchedulerError>> + Send;

    /// Returns whether executors are processes of this host and user.
    fn is_here(&self) -> bool {
        false
    }

    /// Returns whether a refusal stands until something has changed.
    fn refuses_for_long(&self) -> bool {
        false
    }

    /// Waits until there is new capacity, if the scheduler is notified of it.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// Returns the nodes of the scheduler, for users who choose where to run something. Empty if they are not
    /// published.
    fn nodes(&self) -> impl Future<Output = Result<Vec<ClusterNode>, SchedulerError>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    fn kinds(&self) -> impl Future<Output = Result<Vec<NodeClass>, SchedulerError>> + Send
    where
        Self: Sync,
    {
        async { self.nodes().await.map(|nodes| node_classes(&nodes)) }
    }
}
