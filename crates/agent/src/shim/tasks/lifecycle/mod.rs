//! Lifecycle of one task: follows the state machine in `windlass_model::task`; every step is idempotent.
//!
//! Every lifecycle ends in `finish`: first nothing of the task runs any more, then each resource is released once, then
//! the end is recorded, then it is reported.

mod end;

use std::{future::pending, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tokio::time::{sleep, timeout};

use windlass_api::agent::SSH_PORT;
use windlass_model::{
    device_allocator::DeviceCount,
    error_chain::format_chain,
    state_machine::Step,
    task::{self as machine, Event, Status},
};

use super::{
    PauseAt, Storage, Tasks,
    host::HostError,
    task::{Acceptance, Removal, StopRequest, Task, TaskEnd, TaskState},
    task_end, task_files,
};
use crate::{
    clock,
    shim::{
        journal::JournalEvent,
        runtime::{FoundState, Handle, PolicyLimits, PreparedTask, RuntimeError},
    },
};

/// Delays between attempts of an operation that may succeed later.
const RETRY_DELAYS: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// A pull that takes longer has something to do.
const SHORT_PULL: Duration = Duration::from_millis(50);

/// Starting point of a lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartFrom {
    /// The present status; every step may be repeated.
    Resume,
    /// The container exists and was started before.
    Found(FoundState),
}

/// Reason why a task was not started.
enum StartAbort {
    StopRequested,
    Failed(TaskEnd),
}

type StartResult<T> = Result<T, StartAbort>;

struct TaskLifecycle {
    tasks: Arc<Tasks>,
    task: Arc<Task>,
}

/// Records a new submission and runs its lifecycle.
pub(super) async fn accept_and_run(tasks: Arc<Tasks>, task: Arc<Task>) {
    let life = TaskLifecycle { tasks, task };
    match life.accept().await {
        Ok(()) => {
            life.task.acceptance.send_replace(Acceptance::Accepted);
            life.notify();
            life.run(StartFrom::Resume).await;
        }
        Err(why) => {
            let (tasks, task) = (&life.tasks, &life.task);
            // The id is released after its files are deleted; otherwise they would be mixed with those of the next
            // attempt.
            life.run_on_disk(|task| task_files::remove(&task.dir)).await.unwrap_or_default();
            tasks.journal.append(task.id, 0, JournalEvent::Withdrawn);
            tasks.table.lock().tasks.remove(&task.id);
            task.acceptance.send_replace(Acceptance::Failed(why));
        }
    }
}

/// Continues a task that was found in the journal.
pub(super) async fn resume(tasks: Arc<Tasks>, task: Arc<Task>, from: StartFrom) {
    TaskLifecycle { tasks, task }.run(from).await;
}

/// Ends a task whose container no longer exists.
pub(super) async fn finish_lost(tasks: Arc<Tasks>, task: Arc<Task>, end: TaskEnd) {
    let life = TaskLifecycle { tasks, task };
    let end = match life.stop_request() {
        Some(stop_request) => task_end::for_stop(&stop_request, None),
        None => end,
    };
    if life.task.state.lock().container.started {
        life.record_exited(None);
    }
    life.remove_container().await;
    life.finish(Event::Stopped, end).await;
}

/// Attempts to record a removal before the task's files are deleted anyway: they may be what fills the disk.
const REMOVAL_ATTEMPTS_MAX: usize = 3;

/// Removes a terminated task. Writes the tombstone first: a shim that is killed meanwhile removes the rest after its
/// restart. On a full disk the tombstone comes last, and a shim that is killed before that has a terminated task
/// without files.
pub(super) async fn remove_task(tasks: Arc<Tasks>, task: Arc<Task>) {
    let life = TaskLifecycle { tasks, task };
    let (tasks, task) = (&life.tasks, &life.task);
    let (seq, epoch) = {
        let state = task.state.lock();
        (tasks.journal.append(task.id, state.epoch, JournalEvent::Removed), state.epoch)
    };
    life.sync_journal(seq, REMOVAL_ATTEMPTS_MAX).await;
    life.release().await;
    life.remove_container().await;
    for wait in retry_delays() {
        match life.run_on_disk(|task| task_files::remove(&task.dir)).await {
            Ok(()) => break,
            Err(error) => tracing::warn!(%error, id = %task.id, "failed to delete the files of a task"),
        }
        sleep(wait).await;
    }
    life.sync_journal(seq, usize::MAX).await;
    {
        let mut table = tasks.table.lock();
        table.tasks.remove(&task.id);
        table.tombstones.insert(task.id, epoch, clock::now_us());
    }
    task.state.lock().removal = Removal::Done;
    task.changes.send_modify(|count| *count += 1);
    tasks.observer.removed(task.id);
    tasks.compact_if_long().await;
}

/// Returns delays without limit, increasing to a maximum.
fn retry_delays() -> impl Iterator<Item = Duration> {
    RETRY_DELAYS.into_iter().chain(std::iter::repeat(RETRY_DELAYS[RETRY_DELAYS.len() - 1]))
}

impl TaskLifecycle {
    async fn accept(&self) -> Result<(), String> {
        let auth = self.task.auth.lock().clone();
        let written = self.run_on_disk(move |task| {
            task_files::write_submission(
                &task.dir,
                &task_files::StoredTask::of(task),
                &task.token,
                auth.as_ref(),
            )
        });
        written.await.map_err(|error| format!("cannot write the task's files: {error}"))?;
        let seq = self.append_record(JournalEvent::Submitted);
        self.task.state.lock().epoch_seq = seq;
        self.tasks.journal.flush(seq).await.map_err(|error| format_chain(&error))
    }

    async fn run(&self, from: StartFrom) {
        self.pause(PauseAt::Status(self.status())).await;
        let (event, end) = match self.begin(from).await {
            Ok(prepared) => self.watch(&prepared).await,
            Err(cut) => {
                // Incomplete containers are useless, and must not be started later.
                if self.status() == Status::Creating {
                    self.remove_container().await;
                }
                match (cut, self.stop_request()) {
                    (StartAbort::StopRequested, Some(stop_request)) => {
                        (Event::Stopped, task_end::for_stop(&stop_request, None))
                    }
                    (StartAbort::StopRequested, None) => (Event::Stopped, task_end::for_vanished()),
                    (StartAbort::Failed(end), _) => (Event::Failed, end),
                }
            }
        };
        self.finish(event, end).await;
    }

    /// Advances the task from its present status to a started container.
    async fn begin(&self, from: StartFrom) -> StartResult<PreparedTask> {
        if let StartFrom::Found(found) = from {
            return self.start_from_found(found).await;
        }
        self.check_stop_requested()?;
        self.advance(Status::Pending, Event::Begun).await;
        let prepared = self.prepare().await?;
        self.check_stop_requested()?;
        if self.status() <= Status::Pulling {
            self.advance(Status::Preparing, Event::Prepared).await;
            self.pull(&prepared).await?;
        }
        let had_auth = self.task.auth.lock().take().is_some();
        if had_auth {
            self.run_on_disk(|task| task_files::delete_auth(&task.dir)).await.unwrap_or_else(|error| {
                tracing::warn!(%error, id = %self.task.id, "failed to delete the registry credential");
            });
        }
        self.advance(Status::Pulling, Event::Pulled).await;
        self.check_stop_requested()?;
        let handle = self.create(&prepared).await?;
        self.check_stop_requested()?;
        self.start(&prepared, &handle).await?;
        Ok(prepared)
    }

    /// Continues with a container that was started before this shim. A failure here must not end it.
    async fn start_from_found(&self, found: FoundState) -> StartResult<PreparedTask> {
        let prepared = match self.prepare().await {
            Ok(prepared) => prepared,
            Err(StartAbort::Failed(end)) => {
                tracing::warn!(id = %self.task.id, why = end.message, "failed to prepare adopted task");
                self.minimal_prepared()
            }
            Err(StartAbort::StopRequested) => self.minimal_prepared(),
        };
        let handle = self.task.state.lock().container.handle.clone();
        let Some(handle) = handle else { return Ok(prepared) };
        if self.status() == Status::Running {
            return Ok(prepared);
        }
        let ports = match found {
            FoundState::Running => {
                let runtime = &self.tasks.runtime;
                self.retry_while_unavailable("read the ports", || runtime.start(&prepared, &handle)).await?
            }
            FoundState::Created | FoundState::Ended => Vec::new(),
        };
        self.started(ports).await;
        Ok(prepared)
    }

    /// Acquires all resources of the task. Not interrupted by a stop request: partial mounts are hard to undo.
    async fn prepare(&self) -> StartResult<PreparedTask> {
        let (tasks, task) = (&self.tasks, &self.task);
        let failed = |error: HostError| StartAbort::Failed(task_end::for_prepare_error(&error));
        let found = self.status() > Status::Pulling || task.state.lock().container.starting.is_some();
        // Checked for every sender: the policy may have changed, and a dstack server learns of a refusal by the end of
        // its task.
        if let Some(why) = tasks.runtime.refusal(&task.spec) {
            return Err(failed(HostError::Refused { what: "failed to start the task".to_owned(), why }));
        }
        tasks.host.allow(&task.spec).await.map_err(failed)?;
        let grant = tasks.host.grant(&task.spec).map_err(failed)?;
        let gpus = self.acquire_gpus()?;
        if !task.spec.host_ssh_keys.is_empty() {
            self.record_held(JournalEvent::KeyAdded, |state| &mut state.held.keys).await;
            tasks.host.add_keys(&task.spec).await.map_err(failed)?;
        }
        let mut binds = Vec::new();
        if !task.spec.volume_mounts.is_empty() || !task.spec.instance_mounts.is_empty() {
            self.record_held(JournalEvent::Mounted, |state| &mut state.held.mounts).await;
            binds = tasks.host.mount(&task.spec).await.map_err(failed)?;
        }
        if !found {
            let runtime = tasks.runtime.name_for(&task.spec);
            let (settings, ids) = (tasks.settings.clone(), gpus.clone());
            let written = self
                .run_on_disk(move |task| task_files::write_runner_config(&settings, task, runtime, &ids))
                .await;
            written
                .map_err(|source| failed(HostError::Io { what: "writing runner.json".to_owned(), source }))?;
        }
        Ok(PreparedTask {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: tasks.settings.gpus.iter().filter(|gpu| gpus.contains(&gpu.id)).cloned().collect(),
            binds,
            publish: task_files::published_ports(&tasks.settings, &task.spec),
            limits: grant.limits,
            env: grant.env,
        })
    }

    /// Returns what is needed to wait for a running container.
    fn minimal_prepared(&self) -> PreparedTask {
        let (settings, task) = (&self.tasks.settings, &self.task);
        let held = task.state.lock().gpus.clone();
        PreparedTask {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: settings.gpus.iter().filter(|gpu| held.contains(&gpu.id)).cloned().collect(),
            binds: Vec::new(),
            publish: task_files::published_ports(settings, &task.spec),
            limits: PolicyLimits { pids: 0, new_privileges: false, capabilities: Vec::new() },
            env: Vec::new(),
        }
    }

    /// The records have the order of the ledger: both are written under its lock.
    fn acquire_gpus(&self) -> StartResult<Vec<String>> {
        let want = match self.task.spec.gpu {
            count if count < 0 => DeviceCount::All,
            count => DeviceCount::Count(usize::try_from(count).unwrap_or(usize::MAX)),
        };
        let mut ledger = self.tasks.ledger.lock();
        let mut state = self.task.state.lock();
        let known = !ledger.held_by(&self.task.id).is_empty();
        let gpus = ledger.acquire(&self.task.id, want);
        let gpus = gpus.map_err(|error| StartAbort::Failed(task_end::for_prepare_error(&error)))?;
        if !known && !gpus.is_empty() {
            self.tasks.journal.append(
                self.task.id,
                state.epoch,
                JournalEvent::GpuAcquired { gpus: gpus.clone() },
            );
        }
        state.held.gpus.clone_from(&gpus);
        state.gpus.clone_from(&gpus);
        Ok(gpus)
    }

    /// Records on disk that a resource is held, before it is acquired.
    async fn record_held(&self, kind: JournalEvent, what: fn(&mut TaskState) -> &mut bool) {
        let seq = {
            let mut state = self.task.state.lock();
            if std::mem::replace(what(&mut state), true) {
                return;
            }
            self.tasks.journal.append(self.task.id, state.epoch, kind)
        };
        self.sync_journal(seq, usize::MAX).await;
    }

    /// Pulls the image; a stop request cancels the pull.
    async fn pull(&self, prepared: &PreparedTask) -> StartResult<()> {
        let secs_max = self.tasks.settings.pull_secs_max;
        let auth = self.task.auth.lock().clone();
        let (task, runtime) = (Arc::downgrade(&self.task), &self.tasks.runtime);
        let progress = Arc::new(move |progress| {
            if let Some(task) = task.upgrade() {
                task.state.lock().progress = Some(progress);
            }
        });
        let pull = self.retry_while_unavailable("pull the image", || {
            runtime.pull(prepared, auth.as_ref(), Arc::clone(&progress) as _)
        });
        let mut stop_request = self.task.stop_request.subscribe();
        tokio::select! {
            biased;
            _ = stop_request.wait_for(Option::is_some) => Err(StartAbort::StopRequested),
            pulled = timeout(Duration::from_secs(secs_max), pull) => {
                pulled.unwrap_or_else(|_| Err(StartAbort::Failed(task_end::for_pull_timeout(secs_max))))
            }
            never = self.sync_during_pull() => match never {},
        }
    }

    /// Stores what was recorded so far if a pull takes time. One that has nothing to do does not wait for the disk: the
    /// records are stored before the container is started.
    async fn sync_during_pull(&self) -> std::convert::Infallible {
        sleep(SHORT_PULL).await;
        self.sync_journal(self.tasks.journal.last(), usize::MAX).await;
        pending().await
    }

    async fn create(&self, prepared: &PreparedTask) -> StartResult<Handle> {
        let runtime = &self.tasks.runtime;
        let handle =
            self.retry_while_unavailable("create the container", || runtime.create(prepared)).await?;
        let mut state = self.task.state.lock();
        if state.container.handle.as_ref() != Some(&handle) {
            state.container.handle = Some(handle.clone());
            let kind = JournalEvent::ContainerCreated { handle: handle.clone() };
            self.tasks.journal.append(self.task.id, state.epoch, kind);
        }
        Ok(handle)
    }

    /// Starts the container. The decision is recorded on disk first: if it is found without a container, no second one
    /// is started.
    async fn start(&self, prepared: &PreparedTask, handle: &Handle) -> StartResult<()> {
        let boot = self.tasks.settings.boot.clone();
        let seq = {
            let mut state = self.task.state.lock();
            state.container.starting = Some(boot.clone());
            self.tasks.journal.append(self.task.id, state.epoch, JournalEvent::ContainerStarting { boot })
        };
        tokio::join!(self.sync_journal(seq, usize::MAX), self.tasks.runtime.prepare_start(prepared));
        if self.task.spec.cluster {
            // The other nodes connect to exactly this port.
            self.tasks.late_readers.close_port(SSH_PORT).await;
        }
        let runtime = &self.tasks.runtime;
        let ports = match self
            .retry_while_unavailable("start the container", || runtime.start(prepared, handle))
            .await
        {
            // A container that ended at once has no ports; its exit is more informative than this error.
            Err(StartAbort::Failed(_)) if self.has_ended().await => Vec::new(),
            ports => ports?,
        };
        self.started(ports).await;
        Ok(())
    }

    /// Returns whether the runtime has a container of this task that ran and ended.
    async fn has_ended(&self) -> bool {
        let found = self.tasks.runtime.found().await.unwrap_or_default();
        found.iter().any(|found| found.task == self.task.id && found.state == FoundState::Ended)
    }

    async fn started(&self, ports: Vec<windlass_api::agent::shim::Port>) {
        let seq = {
            let mut state = self.task.state.lock();
            state.container.started = true;
            state.ports = Some(ports.clone());
            self.tasks.journal.append(self.task.id, state.epoch, JournalEvent::ContainerStarted { ports })
        };
        // Not waited for until it is on disk: if the host fails, the container is gone too, and that it may have been
        // started is on disk since before its start.
        self.write_journal(seq).await;
        self.advance(Status::Creating, Event::Started).await;
        self.write_task_file().await;
    }

    /// Advances the status if it is `at`; a lifecycle that continues after a restart may be further.
    async fn advance(&self, at: Status, event: Event) {
        let moved = {
            let mut state = self.task.state.lock();
            match machine::step(state.status, event) {
                Step::To(to) if state.status == at => {
                    if to != Status::Running {
                        self.tasks.journal.append(self.task.id, state.epoch, JournalEvent::Moved { to });
                    }
                    state.status = to;
                    self.notify_changed(&state);
                    Some(to)
                }
                Step::To(_) | Step::Stay | Step::Refuse => None,
            }
        };
        if let Some(to) = moved {
            if self.tasks.settings.pause_at == Some(PauseAt::Status(to)) {
                self.sync_journal(self.tasks.journal.last(), usize::MAX).await;
            }
            self.pause(PauseAt::Status(to)).await;
        }
    }

    async fn pause(&self, at: PauseAt) {
        if self.tasks.settings.pause_at == Some(at) {
            pending::<()>().await;
        }
    }

    /// Repeats the call while the engine is unreachable, until the task is requested to end.
    async fn retry_while_unavailable<'a, T>(
        &self,
        what: &str,
        mut call: impl FnMut() -> BoxFuture<'a, Result<T, RuntimeError>>,
    ) -> StartResult<T> {
        for wait in retry_delays() {
            match call().await {
                Ok(done) => return Ok(done),
                Err(error @ RuntimeError::Away { .. }) => {
                    tracing::warn!(error = format_chain(&error), id = %self.task.id, "failed to {what}; retrying");
                }
                Err(error) => return Err(StartAbort::Failed(task_end::for_create_error(&error))),
            }
            let mut stop_request = self.task.stop_request.subscribe();
            if timeout(wait, stop_request.wait_for(Option::is_some)).await.is_ok() {
                return Err(StartAbort::StopRequested);
            }
        }
        Err(StartAbort::StopRequested)
    }

    fn status(&self) -> Status {
        self.task.state.lock().status
    }

    fn stop_request(&self) -> Option<StopRequest> {
        self.task.stop_request.borrow().clone()
    }

    fn check_stop_requested(&self) -> StartResult<()> {
        if self.task.stop_request.borrow().is_some() { Err(StartAbort::StopRequested) } else { Ok(()) }
    }

    fn append_record(&self, kind: JournalEvent) -> u64 {
        let state = self.task.state.lock();
        self.tasks.journal.append(self.task.id, state.epoch, kind)
    }

    /// Waits until the journal is on disk, up to the number of attempts.
    async fn sync_journal(&self, seq: u64, tries: usize) {
        for wait in retry_delays().take(tries) {
            match self.tasks.journal.flush(seq).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(error = format_chain(&error), id = %self.task.id, "failed to write the journal")
                }
            }
            sleep(wait).await;
        }
    }

    /// Waits until the journal is written, but not until it is on disk: the records survive this process, not the host.
    async fn write_journal(&self, seq: u64) {
        if let Err(error) = self.tasks.journal.write(seq).await {
            tracing::error!(error = format_chain(&error), id = %self.task.id, "failed to write the journal");
            self.sync_journal(seq, usize::MAX).await;
        }
    }

    /// Notifies waiting calls and the observer; called with the state locked, so that the order is that of the changes.
    fn notify_changed(&self, state: &TaskState) {
        self.task.changes.send_modify(|count| *count += 1);
        self.tasks.observer.changed(&self.task.info_for_state(state));
    }

    fn notify(&self) {
        self.notify_changed(&self.task.state.lock());
    }

    /// Updates `task.json`, which may lag behind; the journal is authoritative.
    async fn write_task_file(&self) {
        if let Err(error) = self
            .run_on_disk(|task| task_files::write_task(&task.dir, &task_files::StoredTask::of(task)))
            .await
        {
            tracing::warn!(%error, id = %self.task.id, "failed to write task.json");
        }
    }

    async fn run_on_disk(
        &self,
        work: impl FnOnce(&Task) -> std::io::Result<()> + Send + 'static,
    ) -> std::io::Result<()> {
        if self.tasks.settings.keep == Storage::InMemory {
            return Ok(());
        }
        let task = Arc::clone(&self.task);
        let done = self.tasks.lifetimes.spawn_blocking(move || work(&task)).await;
        done.unwrap_or_else(|panic| Err(std::io::Error::other(panic)))
    }
}
