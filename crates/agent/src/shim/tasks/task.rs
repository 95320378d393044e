//! One task in the table: its specification, its state, and the requests to end it.

use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::Instant};

use windlass_api::agent::shim::{
    Port, PullProgress, TaskInfo, TaskItem, TaskSpec, TaskStatus, TerminateRequest,
};
use windlass_model::{id::SubmissionId, job::Ending, job::TerminationDetail, task::Status};

use crate::{
    shim::runtime::{Handle, RegistryAuth},
    task_dir::TaskDir,
};

/// End of a task. The reason is a job termination reason, or the text that the server sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEnd {
    pub reason: String,
    #[serde(default)]
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<TerminationDetail>,
}

impl From<Ending> for TaskEnd {
    fn from(ending: Ending) -> Self {
        Self {
            reason: ending.reason().as_str().to_owned(),
            message: ending.message().unwrap_or_default().to_owned(),
            exit_status: ending.exit_status(),
            detail: ending.detail(),
        }
    }
}

/// Request of the server to end the task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StopRequest {
    pub(super) reason: String,
    pub(super) message: String,
    /// End of the grace period. Later requests may only shorten it.
    pub(super) until: Instant,
}

impl StopRequest {
    pub(super) fn new(terminate: &TerminateRequest, now: Instant) -> Self {
        let grace = Duration::from_secs(terminate.timeout.min(GRACE_SECS_MAX));
        Self {
            reason: terminate.termination_reason.clone(),
            message: terminate.termination_message.clone(),
            until: now + grace,
        }
    }
}

/// No grace period is longer than a day; a larger number must not overflow the clock.
const GRACE_SECS_MAX: u64 = 24 * 3600;

/// Resources of the host that the task holds. Each is set before it is acquired and cleared after it was released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldResources {
    pub(super) gpus: Vec<String>,
    pub(super) keys: bool,
    pub(super) mounts: bool,
}

/// Progress of the container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ContainerProgress {
    pub(super) handle: Option<Handle>,
    /// Boot of the host in which the start was decided.
    pub(super) starting: Option<String>,
    pub(super) started: bool,
    pub(super) exited: bool,
}

#[derive(Clone, Debug)]
pub(super) struct TaskState {
    pub(super) status: Status,
    /// Highest epoch seen.
    pub(super) epoch: i64,
    /// Record that raised the epoch.
    pub(super) epoch_seq: u64,
    pub(super) held: HeldResources,
    pub(super) container: ContainerProgress,
    pub(super) ports: Option<Vec<Port>>,
    pub(super) progress: Option<PullProgress>,
    /// GPUs that the task holds or held.
    pub(super) gpus: Vec<String>,
    pub(super) end: Option<TaskEnd>,
    pub(super) removal: Removal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removal {
    NotRequested,
    InProgress,
    Done,
}

impl TaskState {
    pub(super) fn new(epoch: i64) -> Self {
        Self {
            status: Status::Pending,
            epoch,
            epoch_seq: 0,
            held: HeldResources::default(),
            container: ContainerProgress::default(),
            ports: None,
            progress: None,
            gpus: Vec::new(),
            end: None,
            removal: Removal::NotRequested,
        }
    }
}

/// State of the submission on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Acceptance {
    Pending,
    Accepted,
    Failed(String),
}

pub(super) struct Task {
    pub(super) id: SubmissionId,
    /// Without the registry's credential.
    pub(super) spec: TaskSpec,
    pub(super) dir: TaskDir,
    pub(super) token: String,
    pub(super) auth: Mutex<Option<RegistryAuth>>,
    pub(super) state: Mutex<TaskState>,
    pub(super) acceptance: watch::Sender<Acceptance>,
    pub(super) stop_request: watch::Sender<Option<StopRequest>>,
    /// Counts changes of the state, for callers that wait for one.
    pub(super) changes: watch::Sender<u64>,
}

impl Task {
    pub(super) fn new(
        spec: TaskSpec,
        auth: Option<RegistryAuth>,
        dir: TaskDir,
        token: String,
        state: TaskState,
    ) -> Self {
        Self {
            id: spec.id,
            spec,
            dir,
            token,
            auth: Mutex::new(auth),
            state: Mutex::new(state),
            acceptance: watch::Sender::new(Acceptance::Pending),
            stop_request: watch::Sender::new(None),
            changes: watch::Sender::new(0),
        }
    }

    pub(super) fn info(&self) -> TaskInfo {
        self.info_for_state(&self.state.lock())
    }

    pub(super) fn info_for_state(&self, state: &TaskState) -> TaskInfo {
        let end = state.end.as_ref();
        let handle = state.container.handle.as_ref();
        TaskInfo {
            id: self.id,
            status: to_wire_status(state.status),
            termination_reason: end.map(|end| end.reason.clone()).unwrap_or_default(),
            termination_message: end.map(|end| end.message.clone()).unwrap_or_default(),
            ports: state.ports.clone(),
            image_pull_progress: state.progress.clone(),
            container_name: handle.map(|handle| handle.name.clone()).unwrap_or_default(),
            container_id: handle.map(|handle| handle.id.clone()).unwrap_or_default(),
            gpus_ids: state.gpus.clone(),
            exit_status: end.and_then(|end| end.exit_status),
            detail: end.and_then(|end| end.detail).map(|detail| detail.as_str().to_owned()),
            epoch: state.epoch,
        }
    }

    pub(super) fn item(&self) -> TaskItem {
        TaskItem { id: self.id, status: to_wire_status(self.state.lock().status) }
    }
}

pub(super) const fn to_wire_status(status: Status) -> TaskStatus {
    match status {
        Status::Pending => TaskStatus::Pending,
        Status::Preparing => TaskStatus::Preparing,
        Status::Pulling => TaskStatus::Pulling,
        Status::Creating => TaskStatus::Creating,
        Status::Running => TaskStatus::Running,
        Status::Terminated => TaskStatus::Terminated,
    }
}
