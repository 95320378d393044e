//! Routing of agent calls: to the agents of hosts, or to the container queue where it stands in for a host.

use std::sync::Arc;

use futures_util::FutureExt as _;
use windlass_api::agent::{
    client::LogPart,
    runner::{GroupHosts, JobStarted, Metrics},
    shim::{TaskInfo, TaskSpec},
};
use windlass_model::id::{InstanceId, SubmissionId};

use super::{
    AgentApi, AgentError, AgentFuture, CallContext, HostReport, HttpAgents, JobProgress, JobStart,
    PortStream, QueueRequest, queue_agents::QueueAgents,
};
use crate::app::App;

/// Forwards each call to the implementation that serves its instance.
pub struct AgentRouter {
    wire: Arc<HttpAgents>,
    queue: QueueAgents,
}

impl AgentRouter {
    pub fn new(app: &App, wire: Arc<HttpAgents>) -> Self {
        Self { wire, queue: QueueAgents::new(app) }
    }

    async fn agents_for(&self, instance: InstanceId) -> Result<&dyn AgentApi, AgentError> {
        Ok(if self.queue.is_queue(instance).await? { &self.queue } else { &*self.wire })
    }
}

/// Forwards one call: finds the agents of the instance, and calls them.
macro_rules! passed_on {
    ($self:ident, $instance:expr, $call:ident($($argument:expr),*)) => {
        async move { $self.agents_for($instance).await?.$call($($argument),*).await }.boxed()
    };
}

impl AgentApi for AgentRouter {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        passed_on!(self, instance, tasks(instance))
    }
    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        passed_on!(self, instance, host(instance))
    }
    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        passed_on!(self, call.instance, submit_task(call, task))
    }
    fn enqueue<'a>(&'a self, call: CallContext, order: &'a QueueRequest) -> AgentFuture<'a, ()> {
        passed_on!(self, call.instance, enqueue(call, order))
    }
    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        passed_on!(self, call.instance, task(call))
    }
    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        passed_on!(self, call.instance, terminate_task(call, reason, timeout_secs))
    }
    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        passed_on!(self, call.instance, remove_task(call))
    }
    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>> {
        passed_on!(self, call.instance, start_job(call, job))
    }
    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        passed_on!(self, call.instance, pull(call))
    }
    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        passed_on!(self, call.instance, log(call, stream, offset, limit))
    }
    fn log_was_read<'a>(&'a self, call: CallContext, stream: &'a str, offset: u64) -> AgentFuture<'a, ()> {
        passed_on!(self, call.instance, log_was_read(call, stream, offset))
    }
    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics> {
        passed_on!(self, call.instance, metrics(call))
    }
    fn stop_job(&self, call: CallContext, grace_secs: u64, is_preempted: bool) -> AgentFuture<'_, ()> {
        passed_on!(self, call.instance, stop_job(call, grace_secs, is_preempted))
    }
    fn open_gate(&self, call: CallContext) -> AgentFuture<'_, ()> {
        passed_on!(self, call.instance, open_gate(call))
    }
    fn send_hosts<'a>(&'a self, call: CallContext, hosts: &'a GroupHosts) -> AgentFuture<'a, ()> {
        passed_on!(self, call.instance, send_hosts(call, hosts))
    }
    fn connect(&self, call: CallContext, port: u16) -> AgentFuture<'_, PortStream> {
        passed_on!(self, call.instance, connect(call, port))
    }
    fn is_listening(&self, instance: InstanceId) -> bool {
        self.queue.is_known_queue(instance) || self.wire.is_listening(instance)
    }
    fn forget(&self, instance: InstanceId) {
        self.queue.forget(instance);
        self.wire.forget(instance);
    }
}
