//! The server's reach onto hosts: what it asks of a shim and of the runner inside a task.
//!
//! Every call names the submission and carries the epoch of the lock it is made under; the agent
//! refuses a lower one than it has seen, so a stale holder cannot touch the host. All calls may be
//! repeated: a repeat has the effect of one.

mod crew;
mod ear;
pub mod enrol;
mod fit;
mod lines;
mod ports;
mod queue;
pub mod site;
mod wire;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use windlass_api::agent::{
    client::LogPart,
    runner::{GroupHosts, JobRecord, JobStarted, Metrics, SubmitBody},
    shim::{HostInfo, InstanceHealth, TaskInfo, TaskSpec},
};
use windlass_model::id::{InstanceId, SubmissionId};

use crate::job_orders::queued::QueueRequest;

pub use self::{
    crew::AgentRouter,
    ports::PortStream,
    wire::{CALL_TIMEOUT, HttpAgents},
};

/// Who is asked, about which submission, under which take of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallContext {
    pub instance: InstanceId,
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// Everything a runner needs to begin: its orders, and the files that go with them. Holds secrets: never log one.
#[derive(Clone)]
pub struct JobStart {
    pub submit: SubmitBody,
    /// A git diff or a tar, as the job's repository says.
    pub code: Option<Arc<[u8]>>,
    /// Archive id and tar.
    pub archives: Vec<(String, Arc<[u8]>)>,
}

/// What is known of the commands a runner runs, also after its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    pub record: JobRecord,
    /// Seconds without a connection from a person, where the runner lives and can tell.
    pub no_connections_secs: Option<i64>,
}

/// A host, as its shim describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct HostReport {
    pub version: String,
    pub info: HostInfo,
    pub health: InstanceHealth,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No answer, or none in time. What was asked may or may not have happened.
    #[error("agent of instance {instance} does not answer: {why}")]
    Unreachable { instance: InstanceId, why: String },
    /// Nothing goes to this host before a person has looked: it shows another host key than it did, lets nobody
    /// in with our SSH keys, or its shim does not take our credential.
    #[error("agent of instance {instance} cannot be trusted: {why}")]
    Barred { instance: InstanceId, why: String },
    /// The agent has seen a later holder of this submission.
    #[error("agent refuses epoch {epoch}, it has seen {seen}")]
    Fenced { epoch: i64, seen: i64 },
    #[error("agent knows no task {submission}")]
    UnknownTask { submission: SubmissionId },
    /// The submission was there and was removed: it starts never again.
    #[error("agent has removed task {submission} for good")]
    Gone { submission: SubmissionId },
    /// Not in the state the task is in; a later try may do.
    #[error("agent cannot do that now: {reason}")]
    Conflict { reason: String },
    /// The agent understood and will not: the reason is for people.
    #[error("agent refuses: {reason}")]
    Refused { reason: String },
}

impl AgentError {
    /// Somebody who is asked and says nothing.
    pub fn silent(instance: InstanceId) -> Self {
        Self::Unreachable { instance, why: "it says nothing".into() }
    }
}

/// Ends a task and removes it. One the host does not know is removed all the same: that settles that no late
/// copy of it starts.
pub async fn discard(agents: &dyn AgentApi, call: CallContext, reason: &str) -> Result<(), AgentError> {
    match agents.terminate_task(call, reason, 0).await {
        Ok(()) | Err(AgentError::UnknownTask { .. } | AgentError::Gone { .. }) => {}
        Err(error) => return Err(error),
    }
    agents.remove_task(call).await
}

/// No hosts are connected: nobody answers.
#[derive(Debug)]
pub struct NoAgents;

pub type AgentFuture<'a, T> = BoxFuture<'a, Result<T, AgentError>>;

/// One implementation speaks HTTP to real agents; the simulation's speaks to simulated hosts.
pub trait AgentApi: Send + Sync + 'static {
    /// Is the host's shim there, and which tasks does it keep?
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>>;
    /// What the host has and how it is.
    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport>;

    /// The claims of the specification are filled in from the call, and the whole is signed.
    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()>;
    /// The same for a job as a whole, where the host is a queue.
    fn enqueue<'a>(&'a self, call: CallContext, _order: &'a QueueRequest) -> AgentFuture<'a, ()> {
        no_agent(call.instance)
    }
    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo>;
    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        timeout_secs: i64,
    ) -> AgentFuture<'a, ()>;
    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()>;

    /// Hands the job and its files to the runner and starts its commands.
    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>>;
    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress>;
    /// Bytes of a log (`job` or `runner`) from an offset on; what is there, without waiting.
    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart>;
    /// All before `offset` is kept elsewhere. A runner whose job is over waits a while for this before it goes.
    fn log_was_read<'a>(&'a self, _call: CallContext, _stream: &'a str, _offset: u64) -> AgentFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics>;
    /// Asks the commands to end; the runner kills them after so many seconds.
    fn stop_job(&self, call: CallContext, grace_secs: u64) -> AgentFuture<'_, ()>;

    /// Its other nodes are prepared too: the commands go on.
    fn open_gate(&self, _call: CallContext) -> AgentFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// What the other tasks of its group are called, and where they are now. May be repeated.
    fn tell_hosts<'a>(&'a self, _call: CallContext, _hosts: &'a GroupHosts) -> AgentFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// A stream to a port of the task, for people; 0 is its SSH server. The epoch plays no part.
    fn connect(&self, call: CallContext, _port: u16) -> AgentFuture<'_, PortStream> {
        no_agent(call.instance)
    }

    /// Whether whatever happens there is told without being asked. When that ends, its jobs are made due.
    fn hears(&self, _instance: InstanceId) -> bool {
        false
    }

    /// The instance is over: its connection is let go.
    fn forget(&self, instance: InstanceId);
}

impl AgentApi for NoAgents {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        no_agent(instance)
    }
    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        no_agent(instance)
    }
    fn submit_task<'a>(&'a self, call: CallContext, _task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        no_agent(call.instance)
    }
    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        no_agent(call.instance)
    }
    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        _reason: &'a str,
        _timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        no_agent(call.instance)
    }
    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        no_agent(call.instance)
    }
    fn start_job<'a>(&'a self, call: CallContext, _job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>> {
        no_agent(call.instance)
    }
    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        no_agent(call.instance)
    }
    fn log<'a>(
        &'a self,
        call: CallContext,
        _stream: &'a str,
        _offset: u64,
        _limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        no_agent(call.instance)
    }
    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics> {
        no_agent(call.instance)
    }
    fn stop_job(&self, call: CallContext, _grace_secs: u64) -> AgentFuture<'_, ()> {
        no_agent(call.instance)
    }
    fn forget(&self, _instance: InstanceId) {}
}

fn no_agent<'a, T: Send + 'a>(instance: InstanceId) -> AgentFuture<'a, T> {
    Box::pin(async move { Err(AgentError::silent(instance)) })
}
