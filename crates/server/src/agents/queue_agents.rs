//! Instances that are a queue: jobs placed there become containers, which a dispatcher runs.
//!
//! To the pipelines such an instance behaves like any host. It accepts a job as a whole and reports the state of its
//! container; it lacks what only an agent can provide (ports, metrics, a shell). A stale holder of a job is detected by
//! the job's own row, which is in the same database as the queue.

use std::collections::HashMap;

use bytes::Bytes;
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use windlass_api::agent::{
    client::LogPart,
    runner::{JobRecord, JobStarted, JobState, Metrics},
    shim::{HostInfo, InstanceHealth, TaskInfo, TaskSpec, TaskStatus},
};
use windlass_backend::{AgentEndpoint, BackendInstance};
use windlass_model::{
    container::Status,
    error_chain::format_chain,
    id::{InstanceId, SubmissionId},
    job::TerminationReason,
    queue::{Container, change},
    time::Timestamp,
};

use super::{
    AgentApi, AgentError, AgentFuture, CallContext, HostReport, JobProgress, JobStart, QueueRequest,
};
use crate::{
    app::{App, WeakApp},
    db::{agents as rows, containers, documents::INSTANCE_PROVISIONING, jobs},
    inventory,
    services::queue::{self, Requester, execution, output, requests},
};

const MIB: u64 = 1 << 20;
/// Names of a job's logs, with the parts of a container's output that they contain.
const STREAMS: [(&str, &str); 2] = [("job", "stdout"), ("runner", "system")];

/// Maximum number of entries of the cache; then it is cleared. Only the server that ends an instance forgets it.
const KNOWN_MAX: usize = 16_384;

/// The queue as a host. Holds only a weak reference to the server.
pub(super) struct QueueAgents {
    app: WeakApp,
    /// Cache of whether an instance is a queue. That never changes.
    known: Mutex<HashMap<InstanceId, bool>>,
}

impl QueueAgents {
    pub(super) fn new(app: &App) -> Self {
        Self { app: app.downgrade(), known: Mutex::default() }
    }

    /// Returns whether jobs on this instance are containers.
    pub(super) async fn is_queue(&self, instance: InstanceId) -> Result<bool, AgentError> {
        if let Some(known) = self.known.lock().get(&instance) {
            return Ok(*known);
        }
        let app = self.app(instance)?;
        let found =
            rows::find_machine(app.db(), instance).await.map_err(|error| unreachable(instance, &error))?;
        let text = found.and_then(|(machine, _)| machine);
        let machine: Option<BackendInstance> = INSTANCE_PROVISIONING
            .decode_opt(instance, text.as_deref())
            .map_err(|error| unreachable(instance, &error))?;
        let Some(machine) = machine else { return Ok(false) };
        let is_queue = machine.reach == Some(AgentEndpoint::Queue);
        if machine.reach.is_some() {
            let mut known = self.known.lock();
            if known.len() >= KNOWN_MAX {
                known.clear();
            }
            known.insert(instance, is_queue);
        }
        Ok(is_queue)
    }

    /// Like [`Self::is_queue`], from the cache only.
    pub(super) fn is_known_queue(&self, instance: InstanceId) -> bool {
        self.known.lock().get(&instance).copied().unwrap_or(false)
    }

    fn app(&self, instance: InstanceId) -> Result<App, AgentError> {
        self.app.upgrade().ok_or_else(|| AgentError::silent(instance))
    }

    /// Container of a submission; `None` if it never got one.
    async fn container(&self, call: CallContext) -> Result<(App, Option<Container>), AgentError> {
        let app = self.app(call.instance)?;
        let failed = |error| unreachable(call.instance, &error);
        let requested =
            containers::requests(app.db(), &[request_uuid(call.submission)]).await.map_err(failed)?;
        let Some(uuid) = requested.into_iter().next().and_then(|kept| kept.doc.container_uuid) else {
            return Ok((app, None));
        };
        let found = containers::containers(app.db(), &[uuid]).await.map_err(failed)?;
        Ok((app, found.into_iter().next().map(|kept| kept.doc)))
    }

    async fn known(&self, call: CallContext) -> Result<(App, Container), AgentError> {
        let (app, found) = self.container(call).await?;
        let container = found.ok_or(AgentError::UnknownTask { submission: call.submission })?;
        Ok((app, container))
    }

    /// Rejects a call of an earlier holder of the job.
    async fn check_epoch(&self, app: &App, call: CallContext) -> Result<(), AgentError> {
        let found = jobs::epoch(app.db(), call.submission).await;
        match found.map_err(|error| unreachable(call.instance, &error))? {
            Some(seen) if call.epoch < seen => Err(AgentError::Fenced { epoch: call.epoch, seen }),
            Some(_) | None => Ok(()),
        }
    }

    async fn enqueue_job(&self, call: CallContext, order: &QueueRequest) -> Result<(), AgentError> {
        let (app, found) = self.container(call).await?;
        self.check_epoch(&app, call).await?;
        match found {
            Some(container) if container.is_final() => Err(AgentError::Gone { submission: call.submission }),
            Some(_) => Ok(()),
            None => {
                let asker = Requester::for_user(order.user);
                let (uuid, job) = (request_uuid(call.submission), call.submission);
                let made = requests::create_for_job(&app, &asker, &uuid, job, &order.request).await;
                made.map(drop).map_err(|error| agent_error(call.instance, error))
            }
        }
    }

    /// Cancels a queued container; a running one is ended by the process that runs it, which leaves the program this
    /// number of seconds. `is_renewed`: also if an earlier call set another one.
    async fn stop(&self, call: CallContext, secs: u64, is_renewed: bool) -> Result<(), AgentError> {
        let (app, container) = self.known(call).await?;
        self.check_epoch(&app, call).await?;
        if container.is_final() {
            return Ok(());
        }
        let admin = Requester::server();
        let reported = |error| agent_error(call.instance, error);
        // First: the process reads it when it is signalled.
        if container.stop_duration.is_none_or(|known| is_renewed && known != secs) {
            execution::set_stop_duration(&app, &container.uuid, secs).await.map_err(reported)?;
        }
        let none = Map::from_iter([("priority".to_owned(), json!(0))]);
        requests::update(&app, &admin, &request_uuid(call.submission), &none).await.map_err(reported)?;
        let cancel = Map::from_iter([("state".to_owned(), json!("Cancelled"))]);
        match container.state {
            // If a dispatcher locks it first, the dispatcher finds that it is no longer requested.
            Status::Queued => {
                execution::update(&app, &admin, &container.uuid, &cancel).await.map(drop).or(Ok(()))
            }
            Status::Locked | Status::Running | Status::Complete | Status::Cancelled => Ok(()),
        }
    }

    async fn host_report(&self, instance: InstanceId) -> Result<HostReport, AgentError> {
        let app = self.app(instance)?;
        let found = crate::db::instances::find(app.db(), instance).await;
        let row = found
            .map_err(|error| unreachable(instance, &error))?
            .ok_or_else(|| AgentError::silent(instance))?;
        let host = inventory::offer(&row).map_err(|error| unreachable(instance, &error))?.host;
        let gpu = host.gpus.first();
        let info = HostInfo {
            gpu_vendor: gpu.map_or("none", |gpu| gpu.vendor.as_str()).to_owned(),
            gpu_name: gpu.map(|gpu| gpu.name.clone()).unwrap_or_default(),
            gpu_memory: gpu.map_or(0, |gpu| gpu.memory_mib),
            gpu_compute_capability: gpu.and_then(|gpu| gpu.compute_capability),
            gpu_count: u32::try_from(host.gpus.len()).unwrap_or(u32::MAX),
            addresses: Vec::new(),
            disk_size: host.disk_mib * MIB,
            cpus: host.cpus,
            memory: host.memory_mib * MIB,
            processes: None,
        };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(HostReport { version, info, health: InstanceHealth::default() })
    }

    async fn log_part(
        &self,
        call: CallContext,
        stream: &str,
        offset: u64,
        limit: usize,
    ) -> Result<LogPart, AgentError> {
        let (app, container) = self.known(call).await?;
        let failed = |error| unreachable(call.instance, &error);
        let is_complete = container.is_final();
        let Some((_, kept)) = STREAMS.iter().find(|(log, _)| *log == stream) else {
            return Ok(LogPart { bytes: Bytes::new(), end: 0, is_complete });
        };
        let end = output::end(app.db(), &container.uuid, kept).await.map_err(failed)?;
        let from = i64::try_from(offset).unwrap_or(i64::MAX);
        let mut bytes = output::page(app.db(), &container.uuid, kept, from).await.map_err(failed)?;
        bytes.truncate(limit);
        Ok(LogPart { bytes: bytes.into(), end, is_complete })
    }
}

/// Id of a submission's request in the queue: always the same, so that a repeat finds it.
fn request_uuid(submission: SubmissionId) -> String {
    queue::object_uuid("xvhdp", submission.0.as_bytes())
}

fn unreachable(instance: InstanceId, error: &dyn std::error::Error) -> AgentError {
    AgentError::Unreachable { instance, why: format_chain(error) }
}

fn agent_error(instance: InstanceId, error: queue::Error) -> AgentError {
    match error {
        queue::Error::Refused(refusal) => AgentError::Refused { reason: refusal.to_string() },
        error @ (queue::Error::Unauthenticated
        | queue::Error::Missing(_)
        | queue::Error::Busy
        | queue::Error::TooMany(_)
        | queue::Error::Inner(_)) => unreachable(instance, &error),
    }
}

impl AgentApi for QueueAgents {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        async move {
            let app = self.app(instance)?;
            let failed = |error| unreachable(instance, &error);
            let mut there = jobs::ids_on_instance(app.db(), instance).await.map_err(failed)?;
            let names: Vec<String> = there.iter().map(|job| request_uuid(*job)).collect();
            let requested = containers::requests(app.db(), &names).await.map_err(failed)?;
            there.retain(|job| requested.iter().any(|kept| kept.doc.uuid == request_uuid(*job)));
            Ok(there)
        }
        .boxed()
    }

    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        self.host_report(instance).boxed()
    }

    fn enqueue<'a>(&'a self, call: CallContext, order: &'a QueueRequest) -> AgentFuture<'a, ()> {
        self.enqueue_job(call, order).boxed()
    }

    fn submit_task<'a>(&'a self, _call: CallContext, _task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        refuse_partial().boxed()
    }

    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        async move { self.known(call).await.map(|(_, container)| task_info(call, &container)) }.boxed()
    }

    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        // The signal may be late, because dispatchers and clusters are: only an abort ends the time of an earlier stop.
        let is_abort = reason == TerminationReason::AbortedByUser.as_str();
        self.stop(call, u64::try_from(timeout_secs).unwrap_or_default(), is_abort).boxed()
    }

    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        async move {
            match self.container(call).await? {
                (_, Some(container)) if !container.is_final() => {
                    Err(AgentError::Conflict { reason: format!("its container is {}", container.state) })
                }
                (_, Some(_) | None) => Ok(()),
            }
        }
        .boxed()
    }

    fn start_job<'a>(
        &'a self,
        _call: CallContext,
        _job: &'a JobStart,
    ) -> AgentFuture<'a, Option<JobStarted>> {
        refuse_partial().boxed()
    }

    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        async move {
            let (app, container) = self.known(call).await?;
            let log_end = output::end(app.db(), &container.uuid, "stdout").await;
            let log_end = log_end.map_err(|error| unreachable(call.instance, &error))?;
            let record =
                JobRecord { states: job_states(&container), log_end, log_complete: container.is_final() };
            Ok(JobProgress { record, no_connections_secs: None })
        }
        .boxed()
    }

    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        self.log_part(call, stream, offset, limit).boxed()
    }

    fn metrics(&self, _call: CallContext) -> AgentFuture<'_, Metrics> {
        async {
            Err(AgentError::Refused {
                reason: "metrics are not collected for containers of the queue".to_owned(),
            })
        }
        .boxed()
    }

    fn stop_job(&self, call: CallContext, grace_secs: u64, _is_preempted: bool) -> AgentFuture<'_, ()> {
        self.stop(call, grace_secs, true).boxed()
    }

    fn is_listening(&self, _instance: InstanceId) -> bool {
        // Every change of a container makes its job due, in the same transaction.
        true
    }

    fn forget(&self, instance: InstanceId) {
        self.known.lock().remove(&instance);
    }
}

async fn refuse_partial<T>() -> Result<T, AgentError> {
    Err(AgentError::Refused { reason: "a queue accepts only complete jobs".to_owned() })
}

fn task_info(call: CallContext, container: &Container) -> TaskInfo {
    let never_ran = container.started_at.is_none();
    let ended = container_end(container);
    let status = match container.state {
        Status::Queued | Status::Locked => TaskStatus::Queued,
        Status::Cancelled if never_ran => TaskStatus::Terminated,
        // Also for an ended container: the job states report how it ended.
        Status::Running | Status::Complete | Status::Cancelled => TaskStatus::Running,
    };
    let (termination_reason, termination_message) = match status {
        TaskStatus::Terminated => {
            ended.map_or_else(Default::default, |end| (end.reason.to_owned(), end.message))
        }
        TaskStatus::Queued => (String::new(), waiting_message(container)),
        TaskStatus::Pending
        | TaskStatus::Preparing
        | TaskStatus::Pulling
        | TaskStatus::Creating
        | TaskStatus::Running => Default::default(),
    };
    TaskInfo {
        id: call.submission,
        status,
        termination_reason,
        termination_message,
        ports: (status == TaskStatus::Running).then(Vec::new),
        image_pull_progress: None,
        container_name: container.uuid.clone(),
        container_id: container.uuid.clone(),
        gpus_ids: Vec::new(),
        exit_status: None,
        detail: None,
        epoch: call.epoch,
    }
}

/// Message for people: the report of the last dispatcher that released the container, or its state.
fn waiting_message(container: &Container) -> String {
    match (container.state, container.scheduling_status.as_str()) {
        (Status::Locked, _) => {
            let activity = container.runtime_status.get("activity").and_then(Value::as_str);
            let activity = activity.unwrap_or("is locked by a dispatcher and has not started");
            let failed =
                change::attempt_error(container).map(|error| format!("; {error}")).unwrap_or_default();
            format!("container {} {activity}{failed}", container.uuid)
        }
        (_, "") => format!("container {} is waiting for a dispatcher", container.uuid),
        (_, message) => format!("container {}: {message}", container.uuid),
    }
}

struct ContainerEnd {
    how: &'static str,
    /// One of the job termination reasons.
    reason: &'static str,
    message: String,
    detail: Option<&'static str>,
}

/// End of a container, translated to the terms of jobs.
fn container_end(container: &Container) -> Option<ContainerEnd> {
    let reported =
        |name: &str| container.runtime_status.get(name).and_then(Value::as_str).unwrap_or_default();
    let (reason, error) = (reported("reason"), reported("error"));
    let (how, word, detail) = match (container.state, reason) {
        (Status::Queued | Status::Locked | Status::Running, _) => return None,
        (Status::Complete, "") if container.exit_code == Some(0) => ("done", "", None),
        (Status::Complete | Status::Cancelled, "oom_killed") => {
            ("failed", "container_exited_with_error", Some("oom_killed"))
        }
        (Status::Complete | Status::Cancelled, "max_run_time") => {
            ("terminated", "max_duration_exceeded", None)
        }
        (Status::Cancelled, "crashed" | "abandoned") => ("failed", "instance_unreachable", None),
        (Status::Cancelled, "priority_zero" | "stopped") => ("terminated", "terminated_by_server", None),
        (Status::Cancelled, _) if container.started_at.is_none() => ("failed", "executor_error", None),
        // Stopped, and not by this server: the operator of the cluster reclaimed its node.
        (Status::Cancelled, "") => ("failed", "interrupted_by_no_capacity", None),
        (Status::Complete | Status::Cancelled, _) => ("failed", "container_exited_with_error", None),
    };
    let message = match (error, reason) {
        ("", "") => String::new(),
        ("", reason) => format!("container {}: {reason}", container.uuid),
        (error, _) => error.to_owned(),
    };
    Some(ContainerEnd { how, reason: word, message, detail })
}

fn job_states(container: &Container) -> Vec<JobState> {
    let Some(started) = container.started_at else { return Vec::new() };
    let state = |state: &str, at: Timestamp| JobState {
        state: state.to_owned(),
        timestamp: at.0 / 1000,
        termination_reason: String::new(),
        termination_message: String::new(),
        detail: None,
        exit_status: None,
    };
    let mut states = vec![state("running", started)];
    if let Some(end) = container_end(container) {
        states.push(JobState {
            termination_reason: end.reason.to_owned(),
            termination_message: end.message,
            detail: end.detail.map(str::to_owned),
            exit_status: container.exit_code.and_then(|code| i32::try_from(code).ok()),
            ..state(end.how, container.finished_at.unwrap_or(started))
        });
    }
    states
}

#[cfg(test)]
mod tests {
    use windlass_model::queue::ContainerSpec;

    use super::*;

    fn container(state: Status, change: impl FnOnce(&mut Container)) -> Container {
        let mut one = Container::new("c".into(), ContainerSpec::default(), "u", Timestamp(1));
        one.state = state;
        change(&mut one);
        one
    }

    fn observed_status(container: &Container) -> (TaskStatus, Option<(String, String)>) {
        let call = CallContext {
            instance: InstanceId(uuid::Uuid::nil()),
            submission: SubmissionId(uuid::Uuid::nil()),
            epoch: 1,
        };
        let last = job_states(container).pop().map(|state| (state.state, state.termination_reason));
        (task_info(call, container).status, last)
    }

    fn expected_end(state: &str, reason: &str) -> Option<(String, String)> {
        Some((state.to_owned(), reason.to_owned()))
    }

    #[test]
    fn the_error_of_the_last_attempt_is_reported_while_the_next_one_prepares() {
        let pull = "failed to prepare the container: failed to pull `r.example/a`: connection refused";
        let locked = container(Status::Locked, |one| {
            one.runtime_status.insert("warning".into(), format!("attempt 1 failed: {pull}").into());
        });
        let message =
            format!("container c is locked by a dispatcher and has not started; attempt 1 failed: {pull}");
        assert_eq!(waiting_message(&locked), message);
        let queued = container(Status::Queued, |one| one.scheduling_status = pull.into());
        assert_eq!(waiting_message(&queued), format!("container c: {pull}"));
    }

    #[test]
    fn container_state_maps_to_task_status() {
        let ran = |one: &mut Container| one.started_at = Some(Timestamp(2));
        assert_eq!(observed_status(&container(Status::Queued, |_| {})), (TaskStatus::Queued, None));
        assert_eq!(observed_status(&container(Status::Locked, |_| {})), (TaskStatus::Queued, None));
        assert_eq!(
            observed_status(&container(Status::Running, ran)),
            (TaskStatus::Running, expected_end("running", ""))
        );
        let done = container(Status::Complete, |one| {
            ran(one);
            one.exit_code = Some(0);
        });
        assert_eq!(
            observed_status(&done),
            (TaskStatus::Running, expected_end("done", "")),
            "it is not over before that is told"
        );
        assert_eq!(observed_status(&container(Status::Cancelled, |_| {})).0, TaskStatus::Terminated);
    }

    #[test]
    fn container_end_reasons_map_to_termination_reasons() {
        for (state, reason, expect) in [
            (Status::Complete, "", ("failed", "container_exited_with_error")),
            (Status::Complete, "oom_killed", ("failed", "container_exited_with_error")),
            (Status::Cancelled, "max_run_time", ("terminated", "max_duration_exceeded")),
            (Status::Cancelled, "crashed", ("failed", "instance_unreachable")),
            (Status::Cancelled, "abandoned", ("failed", "instance_unreachable")),
            (Status::Cancelled, "", ("failed", "interrupted_by_no_capacity")),
            (Status::Cancelled, "priority_zero", ("terminated", "terminated_by_server")),
        ] {
            let one = container(state, |one| {
                one.started_at = Some(Timestamp(2));
                one.exit_code = Some(3);
                if !reason.is_empty() {
                    one.runtime_status.insert("reason".into(), reason.into());
                }
            });
            assert_eq!(observed_status(&one).1, expected_end(expect.0, expect.1), "{state} {reason}");
        }
    }
}
