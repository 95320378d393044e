//! Tasks of one host: from their acceptance to their removal.
//!
//! Owns      the table of tasks, the ledger of GPUs, the journal, and the shim's files of each task.
//! Drives    a [`Runtime`] and a [`Host`], which execute and never decide.
//! Notifies  an [`Observer`] of every change, after the journal has it.
//!
//! The lifecycle of each task is a separate tokio task (`life`), so a slow engine or a slow end of one task delays no
//! other. Calls never do the work themselves: they record the request, wake the lifecycle and wait briefly for it. A
//! caller that disconnects therefore changes nothing.

mod host;
mod journal_replay;
mod late_readers;
mod lifecycle;
mod recovery;
mod task;
mod task_end;
mod task_files;
#[cfg(test)]
mod tests;
mod tombstones;

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use windlass_api::agent::shim::{TaskInfo, TaskItem, TaskSpec, TerminateRequest};
use windlass_model::{
    device_allocator::DeviceAllocator,
    id::SubmissionId,
    state_machine::Step,
    task::{self as machine, Status},
};

use self::{
    task::{Acceptance, Removal, StopRequest, Task, TaskState},
    tombstones::Tombstones,
};
use super::{
    journal::{self, Journal, JournalEvent},
    runtime::{Handle, RegistryAuth, Runtime},
};
use crate::{host::gpu::Gpu, task_dir::TaskDir};

pub use host::{Host, HostError, HostFuture, NoObserver, Observer, PolicyGrant};
pub use recovery::OpenError;
pub use task::TaskEnd;

/// Clients time out after 9 s.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of tasks on one host; removed ones do not count.
const TASKS_MAX: usize = 10_000;

/// Disk limit of a running task.
#[derive(Clone, Debug)]
pub struct DiskLimit {
    pub dir: TaskDir,
    pub handle: Handle,
    pub bytes: u64,
}

/// Settings of the task table.
#[derive(Clone, Debug)]
pub struct TasksSettings {
    /// Directory of journal and tasks.
    pub home: PathBuf,
    pub keep: Storage,
    pub gpus: Vec<Gpu>,
    /// The runner of each task also listens on TCP, as a dstack server expects.
    pub compat_tcp: bool,
    /// Time that a runner waits for its job, and for the last reader of its logs.
    pub runner_wait_secs: u64,
    /// Maximum duration of an image pull, in seconds.
    pub pull_secs_max: u64,
    /// Time that a call waits for the lifecycle of a task before it returns the present state.
    pub answer_within: Duration,
    /// Identifies the present boot of the host.
    pub boot: String,
    /// Point at which every lifecycle pauses until the shim is killed; for tests.
    pub pause_at: Option<PauseAt>,
}

/// Storage of journal and task files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    OnDisk,
    /// No files, and nothing survives the process; for simulated hosts.
    InMemory,
}

/// A point in the lifecycle of a task where tests pause it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseAt {
    Status(Status),
    Terminating,
}

impl TasksSettings {
    /// Settings of a real host.
    pub fn on_disk(home: PathBuf, gpus: Vec<Gpu>) -> Self {
        Self {
            home,
            keep: Storage::OnDisk,
            gpus,
            compat_tcp: false,
            runner_wait_secs: 300,
            pull_secs_max: 20 * 60,
            answer_within: RESPONSE_TIMEOUT,
            boot: boot_id(),
            pause_at: pause_at(),
        }
    }

    /// Settings of a simulated host.
    pub fn in_memory(home: PathBuf, gpus: Vec<Gpu>) -> Self {
        Self { keep: Storage::InMemory, ..Self::on_disk(home, gpus) }
    }
}

/// Returns the boot id of the host; empty if the kernel does not provide it: then every boot has the same id.
pub fn boot_id() -> String {
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    read.map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// Reads the variable only in builds with the feature `testing`.
fn pause_at() -> Option<PauseAt> {
    if !cfg!(feature = "testing") {
        return None;
    }
    let word = std::env::var("WINDLASS_AGENT_PAUSE_AT").ok()?;
    if word == "terminating" {
        return Some(PauseAt::Terminating);
    }
    word.parse().ok().map(PauseAt::Status)
}

#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    #[error("task {id} not found")]
    NotFound { id: SubmissionId },
    #[error("task {id} was removed")]
    Gone { id: SubmissionId },
    #[error("task {id}: the epoch of the call is lower than {seen}")]
    Fenced { id: SubmissionId, seen: i64 },
    #[error("cannot remove task {id}: it is not terminated")]
    Alive { id: SubmissionId },
    /// The removal continues; the caller may repeat the call.
    #[error("the removal of task {id} is still in progress")]
    RemovalPending { id: SubmissionId },
    #[error("cannot accept task {id}: this host already has {max} tasks")]
    Full { id: SubmissionId, max: usize },
    #[error("cannot accept task {id}: {why}")]
    NotAccepted { id: SubmissionId, why: String },
    #[error("failed to record the request for task {id}")]
    Journal {
        id: SubmissionId,
        #[source]
        source: journal::Error,
    },
}

pub struct Tasks {
    settings: TasksSettings,
    runtime: Arc<dyn Runtime>,
    host: Arc<dyn Host>,
    observer: Arc<dyn Observer>,
    journal: Journal,
    table: Mutex<Table>,
    ledger: Mutex<DeviceAllocator<String, SubmissionId>>,
    late_readers: late_readers::LateReaders,
    lifetimes: TaskTracker,
    closed: CancellationToken,
}

#[derive(Default)]
struct Table {
    tasks: HashMap<SubmissionId, Arc<Task>>,
    tombstones: Tombstones,
}

enum TaskLookup {
    Present(Arc<Task>),
    /// Removed, with the epoch of the removal.
    Removed(i64),
    Unknown,
}

impl Tasks {
    /// Reads the journal, finds what is alive and continues with it. Does not wait for the runtime.
    pub async fn open(
        settings: TasksSettings,
        runtime: Arc<dyn Runtime>,
        host: Arc<dyn Host>,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>, OpenError> {
        recovery::open(settings, runtime, host, observer).await
    }

    /// Stops all lifecycles where they are, as a kill would: containers continue to run.
    pub async fn close(&self) {
        self.closed.cancel();
        self.lifetimes.close();
        self.lifetimes.wait().await;
        self.journal.close().await;
    }

    /// Accepts a task that the policy allows, and starts it. Idempotent.
    pub async fn submit(self: &Arc<Self>, spec: TaskSpec, epoch: Option<i64>) -> Result<(), TaskError> {
        let id = spec.id;
        let (task, fresh) = self.register(spec, epoch)?;
        if fresh {
            self.spawn(lifecycle::accept_and_run(Arc::clone(self), Arc::clone(&task)));
        } else {
            self.raise_epoch(&task, epoch).await?;
        }
        wait_accepted(id, &task).await
    }

    fn register(&self, mut spec: TaskSpec, epoch: Option<i64>) -> Result<(Arc<Task>, bool), TaskError> {
        let id = spec.id;
        let mut table = self.table.lock();
        if table.tombstones.epoch(id).is_some() {
            return Err(TaskError::Gone { id });
        }
        if let Some(task) = table.tasks.get(&id) {
            return match task.state.lock().removal {
                Removal::NotRequested => Ok((Arc::clone(task), false)),
                Removal::InProgress | Removal::Done => Err(TaskError::Gone { id }),
            };
        }
        if table.tasks.len() >= TASKS_MAX {
            return Err(TaskError::Full { id, max: TASKS_MAX });
        }
        let username = std::mem::take(&mut spec.registry_username);
        let password = std::mem::take(&mut spec.registry_password);
        let auth =
            (!username.is_empty() || !password.is_empty()).then_some(RegistryAuth { username, password });
        let dir = TaskDir::new(&self.settings.home, id);
        let task =
            Arc::new(Task::new(spec, auth, dir, task_files::new_token(), TaskState::new(epoch.unwrap_or(0))));
        table.tasks.insert(id, Arc::clone(&task));
        Ok((task, true))
    }

    /// Ends a task. The first reason is kept; a repeated call may only shorten the grace period. Returns the end if it
    /// comes soon, else the present state; the termination continues.
    pub async fn terminate(
        self: &Arc<Self>,
        id: SubmissionId,
        terminate: TerminateRequest,
        epoch: Option<i64>,
    ) -> Result<TaskInfo, TaskError> {
        let TaskLookup::Present(task) = self.known(id) else { return Err(TaskError::NotFound { id }) };
        wait_accepted(id, &task).await?;
        self.raise_epoch(&task, epoch).await?;
        if let Some(seq) = self.stop_request(&task, &terminate) {
            self.journal.flush(seq).await.map_err(|source| TaskError::Journal { id, source })?;
        }
        self.wait_for(&task, |state| state.status == Status::Terminated).await;
        Ok(task.info())
    }

    /// Registers the request; the record of the first request must be on disk before the call is answered.
    fn stop_request(&self, task: &Task, terminate: &TerminateRequest) -> Option<u64> {
        let state = task.state.lock();
        if state.status.is_final() {
            return None;
        }
        let stop_request = StopRequest::new(terminate, Instant::now());
        let mut seq = None;
        task.stop_request.send_if_modified(|requested| match requested {
            None => {
                let kind = JournalEvent::TerminateRequested {
                    reason: stop_request.reason.clone(),
                    message: stop_request.message.clone(),
                    timeout: terminate.timeout,
                };
                seq = Some(self.journal.append(task.id, state.epoch, kind));
                *requested = Some(stop_request);
                true
            }
            Some(first) if stop_request.until < first.until => {
                first.until = stop_request.until;
                true
            }
            Some(_) => false,
        });
        seq
    }

    /// Removes a terminated task and deletes all that is left of it. Its id can never be used again.
    pub async fn remove(self: &Arc<Self>, id: SubmissionId, epoch: Option<i64>) -> Result<(), TaskError> {
        match self.known(id) {
            TaskLookup::Present(task) => {
                wait_accepted(id, &task).await?;
                self.raise_epoch(&task, epoch).await?;
                self.begin_removal(&task)?;
                if self.wait_for(&task, |state| state.removal == Removal::Done).await {
                    Ok(())
                } else {
                    Err(TaskError::RemovalPending { id })
                }
            }
            TaskLookup::Removed(seen) => match epoch {
                Some(epoch) if epoch < seen => Err(self.refuse_epoch(id, epoch, seen).await),
                Some(_) | None => Ok(()),
            },
            TaskLookup::Unknown => self.tombstone_unknown(id, epoch).await,
        }
    }

    fn begin_removal(self: &Arc<Self>, task: &Arc<Task>) -> Result<(), TaskError> {
        let mut state = task.state.lock();
        match machine::step(state.status, machine::Event::RemoveRequested) {
            Step::Refuse => return Err(TaskError::Alive { id: task.id }),
            Step::Stay | Step::To(_) => {}
        }
        if state.removal == Removal::NotRequested {
            state.removal = Removal::InProgress;
            self.spawn(lifecycle::remove_task(Arc::clone(self), Arc::clone(task)));
        }
        Ok(())
    }

    /// Adds a tombstone for an unknown id: the server expects that a late submission may still arrive.
    async fn tombstone_unknown(&self, id: SubmissionId, epoch: Option<i64>) -> Result<(), TaskError> {
        let Some(epoch) = epoch else { return Err(TaskError::NotFound { id }) };
        let seq = {
            let mut table = self.table.lock();
            if table.tasks.contains_key(&id) {
                // It arrived just now; the caller retries.
                return Err(TaskError::Alive { id });
            }
            table.tombstones.insert(id, epoch, crate::clock::now_us());
            self.journal.append(id, epoch, JournalEvent::Removed)
        };
        self.journal.flush(seq).await.map_err(|source| TaskError::Journal { id, source })
    }

    /// Checks the epoch of any other call for a task, and stores a higher one.
    pub async fn admit(&self, id: SubmissionId, epoch: Option<i64>) -> Result<(), TaskError> {
        match self.known(id) {
            TaskLookup::Present(task) => {
                wait_accepted(id, &task).await?;
                self.raise_epoch(&task, epoch).await
            }
            TaskLookup::Removed(_) | TaskLookup::Unknown => Err(TaskError::NotFound { id }),
        }
    }

    /// Records that a specification was refused: signature, claims or policy.
    pub async fn record_refused_spec(&self, id: SubmissionId, epoch: Option<i64>, why: &str) {
        let why = why.chars().take(1000).collect();
        let seq = self.journal.append(id, epoch.unwrap_or(0), JournalEvent::RefusedSpec { why });
        if let Err(error) = self.journal.flush(seq).await {
            tracing::error!(%error, %id, "failed to record a refusal");
        }
        self.compact_if_long().await;
    }

    /// Sorted by id, so that two lists can be compared.
    pub fn list(&self) -> Vec<TaskItem> {
        let mut items: Vec<_> = self.table.lock().tasks.values().map(|task| task.item()).collect();
        items.sort_by_key(|item| item.id);
        items
    }

    pub fn infos(&self) -> Vec<TaskInfo> {
        let tasks: Vec<_> = self.table.lock().tasks.values().cloned().collect();
        tasks.iter().map(|task| task.info()).collect()
    }

    pub fn info(&self, id: SubmissionId) -> Option<TaskInfo> {
        self.find(id).map(|task| task.info())
    }

    pub fn dir(&self, id: SubmissionId) -> Option<TaskDir> {
        self.find(id).map(|task| task.dir.clone())
    }

    /// Token that the shim presents to the runner of this task.
    pub fn runner_token(&self, id: SubmissionId) -> Option<String> {
        self.find(id).map(|task| task.token.clone())
    }

    /// Returns the running tasks that have a disk limit.
    pub fn disk_limits(&self) -> Vec<DiskLimit> {
        let table = self.table.lock();
        let limit = |task: &Arc<Task>| {
            let bytes = u64::try_from(task.spec.disk).ok().filter(|bytes| *bytes > 0)?;
            let state = task.state.lock();
            let handle = state.container.handle.clone().filter(|_| state.status == Status::Running)?;
            // A task that is already ending is skipped.
            task.stop_request.borrow().is_none().then(|| DiskLimit { dir: task.dir.clone(), handle, bytes })
        };
        table.tasks.values().filter_map(limit).collect()
    }

    pub fn free_gpu_count(&self) -> usize {
        self.ledger.lock().free()
    }

    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    fn find(&self, id: SubmissionId) -> Option<Arc<Task>> {
        self.table.lock().tasks.get(&id).cloned()
    }

    fn known(&self, id: SubmissionId) -> TaskLookup {
        let table = self.table.lock();
        if let Some(task) = table.tasks.get(&id) {
            return TaskLookup::Present(Arc::clone(task));
        }
        table.tombstones.epoch(id).map_or(TaskLookup::Unknown, TaskLookup::Removed)
    }

    /// Refuses an older epoch; a newer one is on disk before this returns.
    async fn raise_epoch(&self, task: &Task, epoch: Option<i64>) -> Result<(), TaskError> {
        let Some(epoch) = epoch else { return Ok(()) };
        let (seq, seen) = {
            let mut state = task.state.lock();
            if epoch < state.epoch {
                (None, state.epoch)
            } else {
                if epoch > state.epoch {
                    state.epoch = epoch;
                    state.epoch_seq = self.journal.append(task.id, epoch, JournalEvent::Admitted);
                }
                (Some(state.epoch_seq), epoch)
            }
        };
        match seq {
            None => Err(self.refuse_epoch(task.id, epoch, seen).await),
            Some(seq) => {
                let flushed = self.journal.flush(seq).await;
                flushed.map_err(|source| TaskError::Journal { id: task.id, source })
            }
        }
    }

    async fn refuse_epoch(&self, id: SubmissionId, epoch: i64, seen: i64) -> TaskError {
        let seq = self.journal.append(id, epoch, JournalEvent::RefusedEpoch { seen });
        if let Err(source) = self.journal.flush(seq).await {
            return TaskError::Journal { id, source };
        }
        self.compact_if_long().await;
        TaskError::Fenced { id, seen }
    }

    /// Returns whether the state met the condition within the time limit of a call.
    async fn wait_for(&self, task: &Task, is_so: impl Fn(&TaskState) -> bool) -> bool {
        let mut changes = task.changes.subscribe();
        let reached = async {
            while !is_so(&task.state.lock()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(self.settings.answer_within, reached).await;
        is_so(&task.state.lock())
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closed = self.closed.clone();
        self.lifetimes.spawn(async move {
            closed.run_until_cancelled(work).await;
        });
    }
}

/// Waits until the submission is on disk, or failed to be written.
async fn wait_accepted(id: SubmissionId, task: &Task) -> Result<(), TaskError> {
    let mut acceptance = task.acceptance.subscribe();
    let answer = match acceptance.wait_for(|state| *state != Acceptance::Pending).await {
        Ok(answer) => answer.clone(),
        Err(_) => Acceptance::Failed("the shim is shutting down".to_owned()),
    };
    match answer {
        Acceptance::Failed(why) => Err(TaskError::NotAccepted { id, why }),
        Acceptance::Accepted | Acceptance::Pending => Ok(()),
    }
}
