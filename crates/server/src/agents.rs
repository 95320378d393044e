//! The server's reach onto hosts: what it asks of a shim and of the runner inside a task.
//!
//! Every call names the submission and carries the epoch of the lock it is made under; the agent
//! refuses a lower one than it has seen, so a stale holder cannot touch the host. All calls may be
//! repeated: a repeat has the effect of one.

use futures_util::future::BoxFuture;
use windlass_model::id::{InstanceId, SubmissionId};

/// Who is asked, about which submission, under which take of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub instance: InstanceId,
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// What the shim needs to start a container for a submission.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub name: String,
    pub image: String,
    pub gpus: u32,
    pub network: NetworkMode,
    /// The job specification for the runner, as it travels on the wire.
    pub job_spec: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkMode {
    Host,
    Bridge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskStatus {
    Pending,
    Preparing,
    Pulling,
    Creating,
    Running,
    Terminated,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskInfo {
    pub status: TaskStatus,
    /// One of the job termination reasons, when terminated.
    pub reason: Option<String>,
    pub message: Option<String>,
    /// Host port by container port, once the container runs.
    pub ports: Option<Vec<(u16, u16)>>,
}

/// What the runner says about the commands it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The last state, if any was reached since the commands were started.
    pub state: Option<RunnerState>,
    /// More output may come.
    pub has_more: bool,
    /// Seconds without a connection from a person.
    pub no_connections_secs: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunnerState {
    /// `running`, `done`, `failed` or `terminated`.
    pub state: String,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub exit_status: Option<i32>,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No answer, or none in time. What was asked may or may not have happened.
    #[error("agent of instance {instance} does not answer")]
    Unreachable { instance: InstanceId },
    /// The agent has seen a later holder of this submission.
    #[error("agent refuses epoch {epoch}, it has seen {seen}")]
    Fenced { epoch: i64, seen: i64 },
    #[error("agent knows no task {submission}")]
    UnknownTask { submission: SubmissionId },
    /// The agent understood and will not: the reason is for people.
    #[error("agent refuses: {reason}")]
    Refused { reason: String },
}

/// Ends a task and removes it. One the host does not know is removed all the same: that settles that no late
/// copy of it starts.
pub async fn discard(agents: &dyn Agents, call: Call, reason: &str) -> Result<(), AgentError> {
    match agents.terminate_task(call, reason, 0).await {
        Ok(()) | Err(AgentError::UnknownTask { .. }) => {}
        Err(error) => return Err(error),
    }
    agents.remove_task(call).await
}

/// No hosts are connected: nobody answers.
#[derive(Debug)]
pub struct Nobody;

pub type Answer<'a, T> = BoxFuture<'a, Result<T, AgentError>>;

/// One implementation speaks HTTP to real agents; the simulation's speaks to simulated hosts.
pub trait Agents: Send + Sync + 'static {
    /// Is the host's shim there, and which tasks does it keep?
    fn tasks(&self, instance: InstanceId) -> Answer<'_, Vec<SubmissionId>>;

    fn submit_task<'a>(&'a self, call: Call, task: &'a Task) -> Answer<'a, ()>;
    fn task(&self, call: Call) -> Answer<'_, TaskInfo>;
    fn terminate_task<'a>(&'a self, call: Call, reason: &'a str, timeout_secs: i64) -> Answer<'a, ()>;
    fn remove_task(&self, call: Call) -> Answer<'_, ()>;

    /// Hands the job to the runner and starts its commands.
    fn start_job<'a>(&'a self, call: Call, job_spec: &'a str) -> Answer<'a, ()>;
    fn pull(&self, call: Call) -> Answer<'_, Pulled>;
    /// Asks the commands to end; the runner kills them after its own grace.
    fn stop_job(&self, call: Call) -> Answer<'_, ()>;
}

impl Agents for Nobody {
    fn tasks(&self, instance: InstanceId) -> Answer<'_, Vec<SubmissionId>> {
        silence(instance)
    }
    fn submit_task<'a>(&'a self, call: Call, _task: &'a Task) -> Answer<'a, ()> {
        silence(call.instance)
    }
    fn task(&self, call: Call) -> Answer<'_, TaskInfo> {
        silence(call.instance)
    }
    fn terminate_task<'a>(&'a self, call: Call, _reason: &'a str, _timeout_secs: i64) -> Answer<'a, ()> {
        silence(call.instance)
    }
    fn remove_task(&self, call: Call) -> Answer<'_, ()> {
        silence(call.instance)
    }
    fn start_job<'a>(&'a self, call: Call, _job_spec: &'a str) -> Answer<'a, ()> {
        silence(call.instance)
    }
    fn pull(&self, call: Call) -> Answer<'_, Pulled> {
        silence(call.instance)
    }
    fn stop_job(&self, call: Call) -> Answer<'_, ()> {
        silence(call.instance)
    }
}

fn silence<'a, T: Send + 'a>(instance: InstanceId) -> Answer<'a, T> {
    Box::pin(async move { Err(AgentError::Unreachable { instance }) })
}
