//! What starts a task: a container engine, plain processes, either as the task asks, or nothing at all (`hollow`).
//!
//! The shim decides and a runtime obeys. Everything it is given is already allowed, resolved and allocated. Every
//! call may be repeated, also by a shim that was killed half way through the first: it has one effect.

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{Request, Response},
};
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use windlass_api::agent::shim::{Port, PullProgress, TaskSpec};
use windlass_model::{id::SubmissionId, plan::runs_in::PLAIN_PROCESS_IMAGE};

use super::disk;
use crate::{host::gpu::Gpu, taskdir::TaskDir};

/// A task, ready for a runtime.
#[derive(Clone, Debug)]
pub struct PreparedTask {
    pub spec: TaskSpec,
    pub dir: TaskDir,
    /// Exactly the GPUs this task holds.
    pub gpus: Vec<Gpu>,
    /// Host paths, links resolved and allowed by policy.
    pub binds: Vec<BindMount>,
    /// Container ports to map to ports of the host's loopback, where the network is not the host's own.
    pub publish: Vec<u16>,
    pub limits: PolicyLimits,
    /// Variables every task on this host gets (proxies, for instance). Never secrets.
    pub env: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindMount {
    pub source: PathBuf,
    pub target: String,
    pub read_only: bool,
}

/// What policy grants beside the specification.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyLimits {
    pub pids: i64,
    /// Programs in the task may gain rights by set-user-id files.
    pub new_privileges: bool,
    /// Capabilities kept; everything else is dropped. Ignored when privileged.
    pub capabilities: Vec<String>,
}

/// What a runtime calls the thing it made: enough to find it again after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    pub name: String,
    /// Container id, or `pid:start-time` of a process.
    pub id: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub code: Option<i32>,
    pub oom_killed: bool,
    /// The last lines of what the container itself printed (not the job), oldest first.
    pub tail: Vec<String>,
    /// Said when the end was not the task's own doing: the engine restarted, the host rebooted.
    pub lost: Option<LossReason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReason {
    /// The container engine was restarted and took its containers along.
    EngineRestarted,
    HostRebooted,
    /// It is gone and left no exit status.
    Vanished,
}

/// Something with our mark that the runtime found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTask {
    pub task: SubmissionId,
    pub handle: Handle,
    pub state: FoundState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundState {
    /// Made, never started.
    Created,
    Running,
    /// Ended, or beyond help.
    Ended,
}

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("{what}: no such image")]
    NoImage { what: String },
    #[error("{what}: the registry refuses the credentials")]
    Unauthorized { what: String },
    #[error("{what}: no byte came for {secs} s")]
    Stalled { what: String, secs: u64 },
    #[error("{what}: no space left on the device")]
    NoDisk { what: String },
    /// The engine does not answer; what was asked may or may not have happened. Worth trying again.
    #[error("{what}: the container engine does not answer")]
    Away {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{what}")]
    Failed {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{what}: {why}")]
    Refused { what: String, why: String },
}

pub type RuntimeFuture<'a, T> = BoxFuture<'a, Result<T, RuntimeError>>;
/// Called with each step of a pull.
pub type ProgressCallback = Arc<dyn Fn(PullProgress) + Send + Sync>;

#[derive(Clone)]
pub struct RegistryAuth {
    pub username: String,
    pub password: String,
}

pub trait Runtime: Send + Sync + 'static {
    /// `docker`, `process`, `any` or `hollow`.
    fn name(&self) -> &'static str;

    /// The runtime that such a task is started by: `docker`, `process` or `hollow`.
    fn name_for(&self, _spec: &TaskSpec) -> &'static str {
        self.name()
    }

    /// Why it cannot run such a task, if it cannot. An image is a promise of isolation, so none is left unused.
    fn refusal(&self, _spec: &TaskSpec) -> Option<String> {
        None
    }

    /// Brings the image. Dropping the future cancels it.
    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()>;

    /// Makes the container but does not start it. One made before for this task is found again.
    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle>;

    /// Starts it unless it was started before, and says which ports it got.
    fn start<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>>;

    /// Waits for the end, however it was started and however often this is asked.
    fn wait<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Exit>;

    /// Something ended by a signal that none of ours sent. Waits for a moment whether whatever runs the tasks is on
    /// its way down, and ended it for that.
    fn goes_away<'a>(&'a self, _spec: &'a TaskSpec) -> BoxFuture<'a, bool> {
        Box::pin(std::future::ready(false))
    }

    /// Asks politely, kills after `grace`, and returns when nothing of the task runs.
    fn stop<'a>(&'a self, task: &'a TaskDir, handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()>;

    /// What the task holds of the disk, in bytes: its directory, and what it wrote where only it can.
    fn disk_used<'a>(&'a self, task: &'a TaskDir, _handle: &'a Handle) -> RuntimeFuture<'a, u64> {
        Box::pin(disk::disk_usage(task.root().to_owned()))
    }

    /// Takes away everything the runtime made for the task, found by its mark when there is no handle.
    fn remove<'a>(&'a self, task: &'a TaskDir, handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()>;

    /// Everything here with our mark, in whatever state.
    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>>;

    /// Answers a call to the task's runner where the runtime plays the runner itself; `None`: there is a real
    /// one, forward the call. The path is the runner's own (`/api/run`, `/api/logs`), or [`JOB_RECORD_PATH`].
    fn play(&self, _task: SubmissionId, _call: Request<Bytes>) -> Option<BoxFuture<'_, Response<Body>>> {
        None
    }
}

/// Whether the task names no image to run in.
pub fn is_plain_process(spec: &TaskSpec) -> bool {
    spec.image_name == PLAIN_PROCESS_IMAGE
}

/// What `GET /api/tasks/ID/job` is for a runtime that plays the runner: answered with a `JobRecord`.
pub const JOB_RECORD_PATH: &str = "/job";
