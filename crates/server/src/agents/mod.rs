//! Calls from the server to hosts: to a shim, and to the runner inside a task.
//!
//! Every call names the submission and carries the epoch of the lock under which it is made; the agent rejects an epoch
//! lower than the highest it has seen, so a stale holder cannot change the host. All calls are idempotent.

mod connection_pool;
pub mod enrolment;
mod event_listener;
mod http_agents;
mod ports;
mod queue_agents;
mod router;
mod sanitize;
pub mod ssh_target;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value};
use windlass_api::agent::{
    client::LogPart,
    runner::{GroupHosts, JobRecord, JobStarted, Metrics, SubmitBody},
    shim::{HostInfo, InstanceHealth, TaskInfo, TaskSpec},
};
use windlass_model::id::{InstanceId, SubmissionId, UserId};

pub use self::{
    http_agents::{CALL_TIMEOUT, HttpAgents},
    ports::PortStream,
    router::AgentRouter,
};

/// Instance, submission and lock epoch of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallContext {
    pub instance: InstanceId,
    pub submission: SubmissionId,
    pub epoch: i64,
}

/// Everything that a runner needs to start: its job, and the files of the job. Contains secrets: never log one.
#[derive(Clone)]
pub struct JobStart {
    pub submit: SubmitBody,
    /// Git diff or tar, depending on the job's repository.
    pub code: Option<Arc<[u8]>>,
    /// Archive ids and tars.
    pub archives: Vec<(String, Arc<[u8]>)>,
}

/// Progress of the commands of a runner, also after its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    pub record: JobRecord,
    /// Seconds without a user connection, if the runner is alive and reports it.
    pub no_connections_secs: Option<i64>,
}

/// State of a host, as its shim reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct HostReport {
    pub version: String,
    pub info: HostInfo,
    pub health: InstanceHealth,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No answer, or none in time. The request may or may not have been executed.
    #[error("agent of instance {instance} is unreachable: {why}")]
    Unreachable { instance: InstanceId, why: String },
    /// No call is made to this host before a person has intervened: its host key changed, it rejects our SSH keys, or
    /// its shim rejects our credential.
    #[error("agent of instance {instance} cannot be trusted: {why}")]
    Barred { instance: InstanceId, why: String },
    /// The agent has seen a later holder of this submission.
    #[error("agent rejected epoch {epoch}: it has seen {seen}")]
    Fenced { epoch: i64, seen: i64 },
    #[error("agent has no task for this job")]
    UnknownTask { submission: SubmissionId },
    /// The submission existed and was removed: it never starts again.
    #[error("agent has already removed the task of this job")]
    Gone { submission: SubmissionId },
    /// Not possible in the current state of the task; a later attempt may succeed.
    #[error("agent cannot do that now: {reason}")]
    Conflict { reason: String },
    /// The server could not sign the task, because it could not read its clock or its key. Nothing was sent, and a
    /// later attempt may succeed.
    #[error("failed to sign the task: {why}")]
    Unsigned { why: String },
    /// The agent understood the request and rejects it; the reason is for people.
    #[error("agent rejected the request: {reason}")]
    Refused { reason: String },
}

impl AgentError {
    /// Error for an instance that does not respond.
    pub fn silent(instance: InstanceId) -> Self {
        Self::Unreachable { instance, why: "no response".into() }
    }
}

/// Ends a task and removes it. A task that the host does not know is removed as well, so that no late copy of it can
/// start.
pub async fn discard(agents: &dyn AgentApi, call: CallContext, reason: &str) -> Result<(), AgentError> {
    match agents.terminate_task(call, reason, 0).await {
        Ok(()) | Err(AgentError::UnknownTask { .. } | AgentError::Gone { .. }) => {}
        Err(error) => return Err(error),
    }
    agents.remove_task(call).await
}

/// Implementation without hosts: every call fails.
#[derive(Debug)]
pub struct NoAgents;

pub type AgentFuture<'a, T> = BoxFuture<'a, Result<T, AgentError>>;

/// A request for a container. Contains secrets: never log one.
#[derive(Clone)]
pub struct QueueRequest {
    pub submission: SubmissionId,
    pub user: UserId,
    /// Request in the form of the queue's API.
    pub request: Map<String, Value>,
}

/// Calls to agents. One implementation uses HTTP to real agents; the simulation's uses simulated hosts.
pub trait AgentApi: Send + Sync + 'static {
    /// Returns the tasks that the host's shim keeps. Fails if the shim does not answer.
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>>;
    /// Resources and health of the host.
    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport>;

    /// Submits a task. The claims of the specification are filled in from the call, and the result is signed.
    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()>;
    /// Submits a job as a whole, where the host is a queue.
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

    /// Sends the job and its files to the runner and starts its commands.
    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>>;
    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress>;
    /// Returns bytes of a log (`job` or `runner`) from an offset on, as far as available, without waiting.
    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart>;
    /// Confirms that all bytes before `offset` are stored elsewhere. The runner of an ended job waits a while for this
    /// before it exits.
    fn log_was_read<'a>(&'a self, _call: CallContext, _stream: &'a str, _offset: u64) -> AgentFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics>;
    /// Requests the end of the commands; the runner kills them after the grace period. A job that was preempted also finds
    /// a notice in a file.
    fn stop_job(&self, call: CallContext, grace_secs: u64, is_preempted: bool) -> AgentFuture<'_, ()>;

    /// Lets the commands continue: the other nodes are prepared too.
    fn open_gate(&self, _call: CallContext) -> AgentFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Sends the names and current addresses of the other tasks of the group. May be repeated.
    fn send_hosts<'a>(&'a self, _call: CallContext, _hosts: &'a GroupHosts) -> AgentFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Opens a stream to a port of the task, for users; 0 is its SSH server. Does not check the epoch.
    fn connect(&self, call: CallContext, _port: u16) -> AgentFuture<'_, PortStream> {
        no_agent(call.instance)
    }

    /// Returns whether the agent pushes all changes there. When that ends, the instance's jobs become due.
    fn is_listening(&self, _instance: InstanceId) -> bool {
        false
    }

    /// Closes the connection of an ended instance.
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
    fn stop_job(&self, call: CallContext, _grace_secs: u64, _is_preempted: bool) -> AgentFuture<'_, ()> {
        no_agent(call.instance)
    }
    fn forget(&self, _instance: InstanceId) {}
}

fn no_agent<'a, T: Send + 'a>(instance: InstanceId) -> AgentFuture<'a, T> {
    Box::pin(async move { Err(AgentError::silent(instance)) })
}
