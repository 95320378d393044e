//! What a dispatcher asks of whatever runs its containers.

use windlass_model::dispatch::{
    Attempt, ContainerNeeds, SchedulerSnapshot,
    choose::Capacity,
    room::{ClusterNode, NodeClass, kinds},
};

/// How a scheduler calls the end of a job whose node is gone.
pub const NODE_LOST: &str = "NODE_FAIL";
/// The end of one that used more memory than it asked for.
pub const OUT_OF_MEMORY: &str = "OUT_OF_MEMORY";
/// The end of one that ran longer than it may.
pub const TIMED_OUT: &str = "TIMEOUT";

/// A container to be handed over.
#[derive(Clone)]
pub struct SubmitRequest {
    pub attempt: Attempt,
    pub priority: u64,
    pub needs: ContainerNeeds,
    /// Environment of the executor: where the server is, and how containers are run. Nothing of it is secret.
    pub environment: Vec<(String, String)>,
    /// The attempt's token, which the executor reads from its standard input.
    pub token: String,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The scheduler took the request and said no.
    #[error("scheduler refuses: {why}")]
    Refused { why: String },
    /// It may have been taken: only a look for its name can tell.
    #[error("hand a container over")]
    Unclear(#[source] SchedulerError),
}

/// The scheduler did not answer, or not in a way that means anything. Never the same as "nothing there".
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    #[error("start `{program}`")]
    Start {
        program: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("`{program}` did not answer within {} s", within.as_secs())]
    Late { program: &'static str, within: std::time::Duration },
    #[error("`{program}` failed: {said}")]
    Failed { program: &'static str, said: String },
    #[error("read what `{program}` said: `{line}`")]
    InvalidOutput { program: &'static str, line: String },
}

/// How much a job is pressed to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The executor is told, and captures what there is.
    Ask,
    /// The scheduler ends it by its own means.
    Force,
}

/// All calls may be repeated.
pub trait Scheduler {
    type Room: Capacity + Send;

    fn look(&self) -> impl Future<Output = Result<SchedulerSnapshot, SchedulerError>> + Send;
    fn room(
        &self,
        lower: &SchedulerSnapshot,
    ) -> impl Future<Output = Result<Self::Room, SchedulerError>> + Send;
    /// How the scheduler calls the job.
    fn submit(&self, order: &SubmitRequest) -> impl Future<Output = Result<String, SubmitError>> + Send;
    fn stop(&self, job: &str, pressure: StopMode) -> impl Future<Output = Result<(), SchedulerError>> + Send;
    fn renice(&self, job: &str, priority: u64) -> impl Future<Output = Result<(), SchedulerError>> + Send;

    /// Whether executors are processes of this machine and user.
    fn is_here(&self) -> bool {
        false
    }

    /// Whether what it refused once it refuses until something has changed.
    fn refuses_for_long(&self) -> bool {
        false
    }

    /// Until there is room that was not there before, where the scheduler is told so.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// The machines behind it, for people who choose where to run something. None where that is nobody's business.
    fn nodes(&self) -> impl Future<Output = Result<Vec<ClusterNode>, SchedulerError>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    fn kinds(&self) -> impl Future<Output = Result<Vec<NodeClass>, SchedulerError>> + Send
    where
        Self: Sync,
    {
        async { self.nodes().await.map(|nodes| kinds(&nodes)) }
    }
}
