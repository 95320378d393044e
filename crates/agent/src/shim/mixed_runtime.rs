//! Runtime with both containers and plain processes: a task runs in a container if it names an image, else as a plain
//! process.
//!
//! The choice follows from the specification alone, and from the handle once the task has one, so that a restarted shim
//! finds it in the right runtime.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use windlass_api::agent::shim::{Port, TaskSpec};

use super::{
    process::ProcessRuntime,
    runtime::{
        Exit, FoundTask, Handle, PreparedTask, ProgressCallback, RegistryAuth, Runtime, RuntimeFuture,
        is_plain_process,
    },
};
use crate::task_dir::TaskDir;

pub struct MixedRuntime {
    containers: Arc<dyn Runtime>,
    processes: ProcessRuntime,
}

impl MixedRuntime {
    pub fn new(containers: Arc<dyn Runtime>, processes: ProcessRuntime) -> Self {
        Self { containers, processes }
    }

    fn runtime_for_spec(&self, spec: &TaskSpec) -> &dyn Runtime {
        if is_plain_process(spec) { &self.processes } else { &*self.containers }
    }

    fn runtime_for_handle(&self, handle: &Handle) -> &dyn Runtime {
        if ProcessRuntime::made(handle) { &self.processes } else { &*self.containers }
    }
}

impl Runtime for MixedRuntime {
    fn name(&self) -> &'static str {
        "any"
    }

    fn name_for(&self, spec: &TaskSpec) -> &'static str {
        self.runtime_for_spec(spec).name()
    }

    fn refusal(&self, spec: &TaskSpec) -> Option<String> {
        self.runtime_for_spec(spec).refusal(spec)
    }

    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        self.runtime_for_spec(&task.spec).pull(task, auth, progress)
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        self.runtime_for_spec(&task.spec).create(task)
    }

    fn prepare_start<'a>(&'a self, task: &'a PreparedTask) -> BoxFuture<'a, ()> {
        self.runtime_for_spec(&task.spec).prepare_start(task)
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        self.runtime_for_spec(&task.spec).start(task, handle)
    }

    fn wait<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Exit> {
        self.runtime_for_spec(&task.spec).wait(task, handle)
    }

    fn goes_away<'a>(&'a self, spec: &'a TaskSpec) -> BoxFuture<'a, bool> {
        self.runtime_for_spec(spec).goes_away(spec)
    }

    fn stop<'a>(&'a self, task: &'a TaskDir, handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()> {
        self.runtime_for_handle(handle).stop(task, handle, grace)
    }

    fn disk_used<'a>(&'a self, task: &'a TaskDir, handle: &'a Handle) -> RuntimeFuture<'a, u64> {
        self.runtime_for_handle(handle).disk_used(task, handle)
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        if let Some(handle) = handle {
            return self.runtime_for_handle(handle).remove(task, Some(handle));
        }
        async move {
            self.processes.remove(task, None).await?;
            self.containers.remove(task, None).await
        }
        .boxed()
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        async move {
            let mut found = self.containers.found().await?;
            found.extend(self.processes.found().await?);
            Ok(found)
        }
        .boxed()
    }
}
