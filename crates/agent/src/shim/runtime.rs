//! Interface to the runtimes that start tasks: a container engine, plain processes, both by the task's choice, or a
//! simulation (`simulated`).
//!
//! The shim decides and a runtime executes. All arguments are already permitted, resolved and allocated. Every call is
//! idempotent, also when a shim that was killed during the first call repeats it.

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{Request, Response},
};
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use windlass_api::agent::shim::{Port, PullProgress, TaskSpec};
use windlass_model::{id::SubmissionId, plan::execution_mode::PLAIN_PROCESS_IMAGE};

use super::disk_limit;
use crate::{host::gpu::Gpu, task_dir::TaskDir};

/// A task, ready for a runtime.
#[derive(Clone, Debug)]
pub struct PreparedTask {
    pub spec: TaskSpec,
    pub dir: TaskDir,
    /// Exactly the GPUs that this task holds.
    pub gpus: Vec<Gpu>,
    /// Host paths, links resolved and allowed by policy.
    pub binds: Vec<BindMount>,
    /// Container ports to map to ports of the host's loopback, unless the task uses the host's network.
    pub publish: Vec<u16>,
    pub limits: PolicyLimits,
    /// Variables that every task on this host receives (proxies, for instance). Never secrets.
    pub env: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindMount {
    pub source: PathBuf,
    pub target: String,
    pub read_only: bool,
}

/// Permissions of the policy in addition to the specification.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyLimits {
    pub pids: i64,
    /// Programs in the task may gain rights by set-user-id files.
    pub new_privileges: bool,
    /// Capabilities kept; everything else is dropped. Ignored when privileged.
    pub capabilities: Vec<String>,
}

/// Identifies an object of a runtime: enough to find it again after a restart.
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
    /// Last lines that the container itself printed (not the job), oldest first.
    pub tail: Vec<String>,
    /// Set if the task did not end by itself: the engine restarted, the host rebooted.
    pub lost: Option<LossReason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReason {
    /// The container engine was restarted and ended its containers.
    EngineRestarted,
    HostRebooted,
    /// It disappeared without an exit status.
    Vanished,
}

/// An object with the shim's mark that the runtime found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTask {
    pub task: SubmissionId,
    pub handle: Handle,
    pub state: FoundState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundState {
    /// Created, never started.
    Created,
    Running,
    /// Ended, or not recoverable.
    Ended,
}

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("{what}: no such image")]
    NoImage { what: String },
    #[error("{what}: the registry denied access; check `registry_auth`")]
    Unauthorized { what: String },
    #[error("{what}: no data received for {secs} s")]
    Stalled { what: String, secs: u64 },
    #[error("{what}: no space left on the device")]
    NoDisk { what: String },
    /// The engine did not respond; the request may or may not have been executed. Can be retried.
    #[error("{what}: the container engine did not respond")]
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
    /// `docker`, `process`, `any` or `simulated`.
    fn name(&self) -> &'static str;

    /// Name of the runtime that starts such a task: `docker`, `process` or `simulated`.
    fn name_for(&self, _spec: &TaskSpec) -> &'static str {
        self.name()
    }

    /// Returns the reason why it cannot run such a task, if any. An image promises isolation, so it is never ignored
    /// silently.
    fn refusal(&self, _spec: &TaskSpec) -> Option<String> {
        None
    }

    /// Pulls the image. Dropping the future cancels the pull.
    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()>;

    /// Creates the container without starting it. Finds a container that was created for this task before.
    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle>;

    /// Prepares the start while the decision to start is written to disk. Nothing of the task may run before `start`, which
    /// works without this too, and reports what fails.
    fn prepare_start<'a>(&'a self, _task: &'a PreparedTask) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Starts the container unless it was started before, and returns its ports.
    fn start<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>>;

    /// Waits for the end, however the task was started; may be called repeatedly.
    fn wait<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Exit>;

    /// Called after an end by a signal that neither the shim nor the runner sent. Waits briefly and returns whether the
    /// engine is shutting down and ended the task for that reason.
    fn goes_away<'a>(&'a self, _spec: &'a TaskSpec) -> BoxFuture<'a, bool> {
        Box::pin(std::future::ready(false))
    }

    /// Sends SIGTERM, kills after `grace`, and returns when nothing of the task runs.
    fn stop<'a>(&'a self, task: &'a TaskDir, handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()>;

    /// Disk usage of the task, in bytes: its directory, and the data that it wrote to storage of its container.
    fn disk_used<'a>(&'a self, task: &'a TaskDir, _handle: &'a Handle) -> RuntimeFuture<'a, u64> {
        Box::pin(disk_limit::disk_usage(task.root().to_owned()))
    }

    /// Removes everything that the runtime created for the task, found by its mark when there is no handle.
    fn remove<'a>(&'a self, task: &'a TaskDir, handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()>;

    /// Lists everything on this host with the shim's mark, in any state.
    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>>;

    /// Answers a call to the task's runner if the runtime simulates the runner; `None`: there is a real one, forward
    /// the call. The path is that of the runner (`/api/run`, `/api/logs`), or [`JOB_RECORD_PATH`].
    fn play(&self, _task: SubmissionId, _call: Request<Bytes>) -> Option<BoxFuture<'_, Response<Body>>> {
        None
    }
}

/// Returns whether the task names no image.
pub fn is_plain_process(spec: &TaskSpec) -> bool {
    spec.image_name == PLAIN_PROCESS_IMAGE
}

/// Path of `GET /api/tasks/ID/job` for a runtime that simulates the runner: answered with a `JobRecord`.
pub const JOB_RECORD_PATH: &str = "/job";
