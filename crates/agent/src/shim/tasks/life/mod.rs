//! The life of one task: strictly by the machine in `windlass_model::task`, every step safe to repeat.
//!
//! Whatever happens, a life ends in `finish`: nothing of the task runs any more, then what it held is given back
//! once, then the end is written down, then it is told.

mod end;

use std::{future::pending, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tokio::time::{sleep, timeout};

use windlass_api::agent::SSH_PORT;
use windlass_model::{
    causes::chain,
    ledger::DeviceCount,
    machine::Step,
    task::{self as machine, Event, Status},
};

use super::{
    PauseAt, Storage, Tasks, ending, files,
    host::HostError,
    task::{Acceptance, Removal, StopRequest, Task, TaskEnd, TaskState},
};
use crate::{
    clock,
    shim::{
        journal::JournalEvent,
        runtime::{FoundState, Handle, PolicyLimits, PreparedTask, RuntimeError},
    },
};

/// Between two tries of something that may work later.
const RETRY_DELAYS: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// Where a life begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartFrom {
    /// Where it was; every step may be repeated.
    Resume,
    /// The container is there and was started before.
    Found(FoundState),
}

/// Why a task did not come to run.
enum StartAbort {
    StopRequested,
    Failed(TaskEnd),
}

type StartResult<T> = Result<T, StartAbort>;

struct TaskLifecycle {
    tasks: Arc<Tasks>,
    task: Arc<Task>,
}

/// Writes a new submission down; then it lives.
pub(super) async fn accept_and_run(tasks: Arc<Tasks>, task: Arc<Task>) {
    let life = TaskLifecycle { tasks, task };
    match life.accept().await {
        Ok(()) => {
            life.task.acceptance.send_replace(Acceptance::Accepted);
            life.tell();
            life.run(StartFrom::Resume).await;
        }
        Err(why) => {
            let (tasks, task) = (&life.tasks, &life.task);
            // Its place is free once its files are gone, or they would be those of the next try.
            life.run_on_disk(|task| files::remove(&task.dir)).await.unwrap_or_default();
            tasks.journal.append(task.id, 0, JournalEvent::Withdrawn);
            tasks.table.lock().tasks.remove(&task.id);
            task.acceptance.send_replace(Acceptance::Failed(why));
        }
    }
}

/// Goes on with a task that was found in the journal.
pub(super) async fn resume(tasks: Arc<Tasks>, task: Arc<Task>, from: StartFrom) {
    TaskLifecycle { tasks, task }.run(from).await;
}

/// A task whose container is known to be no more.
pub(super) async fn finish_lost(tasks: Arc<Tasks>, task: Arc<Task>, end: TaskEnd) {
    let life = TaskLifecycle { tasks, task };
    let end = match life.stop_request() {
        Some(ask) => ending::for_stop(&ask, None),
        None => end,
    };
    if life.task.state.lock().container.started {
        life.record_exited(None);
    }
    life.remove_container().await;
    life.finish(Event::Stopped, end).await;
}

/// Tries to write a removal down before the task's files are deleted all the same: what fills the disk may be them.
const REMOVAL_ATTEMPTS_MAX: usize = 3;

/// Forgets a terminated task. The grave is on disk first: a shim that is killed meanwhile sweeps the rest up.
/// On a full disk it comes last, and a shim that is killed before that has a terminated task without files.
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
    for wait in waits() {
        match life.run_on_disk(|task| files::remove(&task.dir)).await {
            Ok(()) => break,
            Err(error) => tracing::warn!(%error, id = %task.id, "delete the files of a task"),
        }
        sleep(wait).await;
    }
    life.sync_journal(seq, usize::MAX).await;
    {
        let mut table = tasks.table.lock();
        table.tasks.remove(&task.id);
        table.graves.insert(task.id, epoch, clock::now_us());
    }
    task.state.lock().removal = Removal::Done;
    task.changes.send_modify(|count| *count += 1);
    tasks.observer.removed(task.id);
    tasks.compact_if_long().await;
}

/// For ever, slower and slower.
fn waits() -> impl Iterator<Item = Duration> {
    RETRY_DELAYS.into_iter().chain(std::iter::repeat(RETRY_DELAYS[RETRY_DELAYS.len() - 1]))
}

impl TaskLifecycle {
    async fn accept(&self) -> Result<(), String> {
        let auth = self.task.auth.lock().clone();
        let written = self.run_on_disk(move |task| {
            files::write_submission(&task.dir, &files::StoredTask::of(task), &task.token, auth.as_ref())
        });
        written.await.map_err(|error| format!("write the task's files: {error}"))?;
        let seq = self.append_record(JournalEvent::Submitted);
        self.task.state.lock().epoch_seq = seq;
        self.tasks.journal.settle(seq).await.map_err(|error| chain(&error))
    }

    async fn run(&self, from: StartFrom) {
        self.pause(PauseAt::Status(self.status())).await;
        let (event, end) = match self.begin(from).await {
            Ok(prepared) => self.watch(&prepared).await,
            Err(cut) => {
                // Half-made things are of no use to anybody, and must not come to life later.
                if self.status() == Status::Creating {
                    self.remove_container().await;
                }
                match (cut, self.stop_request()) {
                    (StartAbort::StopRequested, Some(ask)) => (Event::Stopped, ending::for_stop(&ask, None)),
                    (StartAbort::StopRequested, None) => (Event::Stopped, ending::for_vanished()),
                    (StartAbort::Failed(end), _) => (Event::Failed, end),
                }
            }
        };
        self.finish(event, end).await;
    }

    /// From wherever it is to a container that was started.
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
            self.sync_journal(self.tasks.journal.last(), usize::MAX).await;
            self.pull(&prepared).await?;
        }
        self.run_on_disk(|task| files::delete_auth(&task.dir)).await.unwrap_or_else(|error| {
            tracing::warn!(%error, id = %self.task.id, "delete the registry's credential");
        });
        *self.task.auth.lock() = None;
        self.advance(Status::Pulling, Event::Pulled).await;
        self.check_stop_requested()?;
        let handle = self.create(&prepared).await?;
        self.check_stop_requested()?;
        self.start(&prepared, &handle).await?;
        Ok(prepared)
    }

    /// The container was started before this shim was. Nothing that fails here may end what runs.
    async fn start_from_found(&self, found: FoundState) -> StartResult<PreparedTask> {
        let prepared = match self.prepare().await {
            Ok(prepared) => prepared,
            Err(StartAbort::Failed(end)) => {
                tracing::warn!(id = %self.task.id, why = end.message, "prepare a found task again");
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
                self.retry_while_unavailable("ask for ports", || runtime.start(&prepared, &handle)).await?
            }
            FoundState::Created | FoundState::Ended => Vec::new(),
        };
        self.started(ports).await;
        Ok(prepared)
    }

    /// Takes everything the task needs. Not cut short by an ask: half-done mounts are hard to undo.
    async fn prepare(&self) -> StartResult<PreparedTask> {
        let (tasks, task) = (&self.tasks, &self.task);
        let failed = |error: HostError| StartAbort::Failed(ending::for_prepare_error(&error));
        let found = self.status() > Status::Pulling || task.state.lock().container.starting.is_some();
        // Whoever sent it: the policy may have changed, and a dstack server learns of a refusal by the end of its task.
        if let Some(why) = tasks.runtime.refusal(&task.spec) {
            return Err(failed(HostError::Refused { what: "start the task".to_owned(), why }));
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
                .run_on_disk(move |task| files::write_runner_config(&settings, task, runtime, &ids))
                .await;
            written
                .map_err(|source| failed(HostError::Io { what: "write runner.json".to_owned(), source }))?;
        }
        Ok(PreparedTask {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: tasks.settings.gpus.iter().filter(|gpu| gpus.contains(&gpu.id)).cloned().collect(),
            binds,
            publish: files::published_ports(&tasks.settings, &task.spec),
            limits: grant.limits,
            env: grant.env,
        })
    }

    /// Enough to wait for a container that runs.
    fn minimal_prepared(&self) -> PreparedTask {
        let (settings, task) = (&self.tasks.settings, &self.task);
        let held = task.state.lock().gpus.clone();
        PreparedTask {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: settings.gpus.iter().filter(|gpu| held.contains(&gpu.id)).cloned().collect(),
            binds: Vec::new(),
            publish: files::published_ports(settings, &task.spec),
            limits: PolicyLimits { pids: 0, new_privileges: false, capabilities: Vec::new() },
            env: Vec::new(),
        }
    }

    /// The order of records is the order of the ledger: both are written under its lock.
    fn acquire_gpus(&self) -> StartResult<Vec<String>> {
        let want = match self.task.spec.gpu {
            count if count < 0 => DeviceCount::All,
            count => DeviceCount::Count(usize::try_from(count).unwrap_or(usize::MAX)),
        };
        let mut ledger = self.tasks.ledger.lock();
        let mut state = self.task.state.lock();
        let known = !ledger.held_by(&self.task.id).is_empty();
        let gpus = ledger.acquire(&self.task.id, want);
        let gpus = gpus.map_err(|error| StartAbort::Failed(ending::for_prepare_error(&error)))?;
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

    /// Notes on disk that something is held, before it is taken.
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

    /// Brings the image; an ask cancels it.
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
        let mut ask = self.task.ask.subscribe();
        tokio::select! {
            biased;
            _ = ask.wait_for(Option::is_some) => Err(StartAbort::StopRequested),
            pulled = timeout(Duration::from_secs(secs_max), pull) => {
                pulled.unwrap_or_else(|_| Err(StartAbort::Failed(ending::for_pull_timeout(secs_max))))
            }
        }
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

    /// The decision to start is on disk first. Whoever finds it without a container never starts a second one.
    async fn start(&self, prepared: &PreparedTask, handle: &Handle) -> StartResult<()> {
        let boot = self.tasks.settings.boot.clone();
        let seq = {
            let mut state = self.task.state.lock();
            state.container.starting = Some(boot.clone());
            self.tasks.journal.append(self.task.id, state.epoch, JournalEvent::ContainerStarting { boot })
        };
        self.sync_journal(seq, usize::MAX).await;
        if self.task.spec.cluster {
            // Its other nodes come to exactly this port.
            self.tasks.late_readers.close_port(SSH_PORT).await;
        }
        let runtime = &self.tasks.runtime;
        let ports = match self
            .retry_while_unavailable("start the container", || runtime.start(prepared, handle))
            .await
        {
            // What ended at once has no ports to tell; how it ended says more than that.
            Err(StartAbort::Failed(_)) if self.has_ended().await => Vec::new(),
            ports => ports?,
        };
        self.started(ports).await;
        Ok(())
    }

    /// Whether the runtime has a container of this task that ran and ended.
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
        self.sync_journal(seq, usize::MAX).await;
        self.advance(Status::Creating, Event::Started).await;
        self.write_task_file().await;
    }

    /// Steps on if the task is at `at`; a life that goes on after a restart may be beyond.
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

    /// Repeats while the engine is away, until somebody wants the task to end.
    async fn retry_while_unavailable<'a, T>(
        &self,
        what: &str,
        mut call: impl FnMut() -> BoxFuture<'a, Result<T, RuntimeError>>,
    ) -> StartResult<T> {
        for wait in waits() {
            match call().await {
                Ok(done) => return Ok(done),
                Err(error @ RuntimeError::Away { .. }) => {
                    tracing::warn!(error = chain(&error), id = %self.task.id, "{what}");
                }
                Err(error) => return Err(StartAbort::Failed(ending::for_create_error(&error))),
            }
            let mut ask = self.task.ask.subscribe();
            if timeout(wait, ask.wait_for(Option::is_some)).await.is_ok() {
                return Err(StartAbort::StopRequested);
            }
        }
        Err(StartAbort::StopRequested)
    }

    fn status(&self) -> Status {
        self.task.state.lock().status
    }

    fn stop_request(&self) -> Option<StopRequest> {
        self.task.ask.borrow().clone()
    }

    fn check_stop_requested(&self) -> StartResult<()> {
        if self.task.ask.borrow().is_some() { Err(StartAbort::StopRequested) } else { Ok(()) }
    }

    fn append_record(&self, kind: JournalEvent) -> u64 {
        let state = self.task.state.lock();
        self.tasks.journal.append(self.task.id, state.epoch, kind)
    }

    /// Waits for the disk, up to so many tries.
    async fn sync_journal(&self, seq: u64, tries: usize) {
        for wait in waits().take(tries) {
            match self.tasks.journal.settle(seq).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(error = chain(&error), id = %self.task.id, "write the journal")
                }
            }
            sleep(wait).await;
        }
    }

    /// Tells who waits and who watches; called with the state locked, so that the order is that of the changes.
    fn notify_changed(&self, state: &TaskState) {
        self.task.changes.send_modify(|count| *count += 1);
        self.tasks.observer.changed(&self.task.info_for_state(state));
    }

    fn tell(&self) {
        self.notify_changed(&self.task.state.lock());
    }

    /// Keeps `task.json` near the truth; the journal is the truth.
    async fn write_task_file(&self) {
        if let Err(error) =
            self.run_on_disk(|task| files::write_task(&task.dir, &files::StoredTask::of(task))).await
        {
            tracing::warn!(%error, id = %self.task.id, "write task.json");
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
        let done = self.tasks.lives.spawn_blocking(move || work(&task)).await;
        done.unwrap_or_else(|panic| Err(std::io::Error::other(panic)))
    }
}
