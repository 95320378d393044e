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
    ledger::Want,
    machine::Step,
    task::{self as machine, Event, Status},
};

use super::{
    Keep, PauseAt, Tasks, ending, files,
    host::HostError,
    task::{Acceptance, Ask, End, Removal, State, Task},
};
use crate::{
    clock,
    shim::{
        journal::Kind,
        runtime::{FoundState, Handle, Limits, Prepared, RuntimeError},
    },
};

/// Between two tries of something that may work later.
const BACK_OFF: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// Where a life begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// Where it was; every step may be repeated.
    WhereItWas,
    /// The container is there and was started before.
    Found(FoundState),
}

/// Why a task did not come to run.
enum Cut {
    Asked,
    Failed(End),
}

type Way<T> = Result<T, Cut>;

struct Life {
    tasks: Arc<Tasks>,
    task: Arc<Task>,
}

/// Writes a new submission down; then it lives.
pub(super) async fn accept_and_live(tasks: Arc<Tasks>, task: Arc<Task>) {
    let life = Life { tasks, task };
    match life.accept().await {
        Ok(()) => {
            life.task.acceptance.send_replace(Acceptance::Accepted);
            life.tell();
            life.live(Begin::WhereItWas).await;
        }
        Err(why) => {
            let (tasks, task) = (&life.tasks, &life.task);
            // Its place is free once its files are gone, or they would be those of the next try.
            life.on_disk(|task| files::remove(&task.dir)).await.unwrap_or_default();
            tasks.journal.append(task.id, 0, Kind::Withdrawn);
            tasks.table.lock().tasks.remove(&task.id);
            task.acceptance.send_replace(Acceptance::Failed(why));
        }
    }
}

/// Goes on with a task that was found in the journal.
pub(super) async fn live_on(tasks: Arc<Tasks>, task: Arc<Task>, from: Begin) {
    Life { tasks, task }.live(from).await;
}

/// A task whose container is known to be no more.
pub(super) async fn end_lost(tasks: Arc<Tasks>, task: Arc<Task>, end: End) {
    let life = Life { tasks, task };
    let end = match life.asked() {
        Some(ask) => ending::stopped(&ask, None),
        None => end,
    };
    if life.task.state.lock().container.started {
        life.exited(None);
    }
    life.discard().await;
    life.finish(Event::Stopped, end).await;
}

/// Tries to write a removal down before the task's files are deleted all the same: what fills the disk may be them.
const GRAVE_TRIES_MAX: usize = 3;

/// Forgets a terminated task. The grave is on disk first: a shim that is killed meanwhile sweeps the rest up.
/// On a full disk it comes last, and a shim that is killed before that has a terminated task without files.
pub(super) async fn bury(tasks: Arc<Tasks>, task: Arc<Task>) {
    let life = Life { tasks, task };
    let (tasks, task) = (&life.tasks, &life.task);
    let (seq, epoch) = {
        let state = task.state.lock();
        (tasks.journal.append(task.id, state.epoch, Kind::Removed), state.epoch)
    };
    life.settle(seq, GRAVE_TRIES_MAX).await;
    life.release().await;
    life.discard().await;
    for wait in waits() {
        match life.on_disk(|task| files::remove(&task.dir)).await {
            Ok(()) => break,
            Err(error) => tracing::warn!(%error, id = %task.id, "delete the files of a task"),
        }
        sleep(wait).await;
    }
    life.settle(seq, usize::MAX).await;
    {
        let mut table = tasks.table.lock();
        table.tasks.remove(&task.id);
        table.graves.dig(task.id, epoch, clock::now_us());
    }
    task.state.lock().removal = Removal::Done;
    task.changes.send_modify(|count| *count += 1);
    tasks.observer.removed(task.id);
    tasks.compact_if_long().await;
}

/// For ever, slower and slower.
fn waits() -> impl Iterator<Item = Duration> {
    BACK_OFF.into_iter().chain(std::iter::repeat(BACK_OFF[BACK_OFF.len() - 1]))
}

impl Life {
    async fn accept(&self) -> Result<(), String> {
        let auth = self.task.auth.lock().clone();
        let written = self.on_disk(move |task| {
            files::write_submission(&task.dir, &files::Stored::of(task), &task.token, auth.as_ref())
        });
        written.await.map_err(|error| format!("write the task's files: {error}"))?;
        let seq = self.note(Kind::Submitted);
        self.task.state.lock().epoch_seq = seq;
        self.tasks.journal.settle(seq).await.map_err(|error| chain(&error))
    }

    async fn live(&self, from: Begin) {
        self.pause(PauseAt::Status(self.status())).await;
        let (event, end) = match self.begin(from).await {
            Ok(prepared) => self.watch(&prepared).await,
            Err(cut) => {
                // Half-made things are of no use to anybody, and must not come to life later.
                if self.status() == Status::Creating {
                    self.discard().await;
                }
                match (cut, self.asked()) {
                    (Cut::Asked, Some(ask)) => (Event::Stopped, ending::stopped(&ask, None)),
                    (Cut::Asked, None) => (Event::Stopped, ending::vanished()),
                    (Cut::Failed(end), _) => (Event::Failed, end),
                }
            }
        };
        self.finish(event, end).await;
    }

    /// From wherever it is to a container that was started.
    async fn begin(&self, from: Begin) -> Way<Prepared> {
        if let Begin::Found(found) = from {
            return self.begin_found(found).await;
        }
        self.unless_asked()?;
        self.advance(Status::Pending, Event::Begun).await;
        let prepared = self.prepare().await?;
        self.unless_asked()?;
        if self.status() <= Status::Pulling {
            self.advance(Status::Preparing, Event::Prepared).await;
            self.settle(self.tasks.journal.last(), usize::MAX).await;
            self.pull(&prepared).await?;
        }
        self.on_disk(|task| files::forget_auth(&task.dir)).await.unwrap_or_else(|error| {
            tracing::warn!(%error, id = %self.task.id, "delete the registry's credential");
        });
        *self.task.auth.lock() = None;
        self.advance(Status::Pulling, Event::Pulled).await;
        self.unless_asked()?;
        let handle = self.create(&prepared).await?;
        self.unless_asked()?;
        self.start(&prepared, &handle).await?;
        Ok(prepared)
    }

    /// The container was started before this shim was. Nothing that fails here may end what runs.
    async fn begin_found(&self, found: FoundState) -> Way<Prepared> {
        let prepared = match self.prepare().await {
            Ok(prepared) => prepared,
            Err(Cut::Failed(end)) => {
                tracing::warn!(id = %self.task.id, why = end.message, "prepare a found task again");
                self.without_surroundings()
            }
            Err(Cut::Asked) => self.without_surroundings(),
        };
        let handle = self.task.state.lock().container.handle.clone();
        let Some(handle) = handle else { return Ok(prepared) };
        if self.status() == Status::Running {
            return Ok(prepared);
        }
        let ports = match found {
            FoundState::Running => {
                let runtime = &self.tasks.runtime;
                self.patiently("ask for ports", || runtime.start(&prepared, &handle)).await?
            }
            FoundState::Created | FoundState::Ended => Vec::new(),
        };
        self.started(ports).await;
        Ok(prepared)
    }

    /// Takes everything the task needs. Not cut short by an ask: half-done mounts are hard to undo.
    async fn prepare(&self) -> Way<Prepared> {
        let (tasks, task) = (&self.tasks, &self.task);
        let failed = |error: HostError| Cut::Failed(ending::unprepared(&error));
        let found = self.status() > Status::Pulling || task.state.lock().container.starting.is_some();
        // Whoever sent it: the policy may have changed, and a dstack server learns of a refusal by the end of its task.
        if let Some(why) = tasks.runtime.refusal(&task.spec) {
            return Err(failed(HostError::Refused { what: "start the task".to_owned(), why }));
        }
        tasks.host.allow(&task.spec).await.map_err(failed)?;
        let grant = tasks.host.grant(&task.spec).map_err(failed)?;
        let gpus = self.acquire_gpus()?;
        if !task.spec.host_ssh_keys.is_empty() {
            self.hold(Kind::KeyAdded, |state| &mut state.held.keys).await;
            tasks.host.add_keys(&task.spec).await.map_err(failed)?;
        }
        let mut binds = Vec::new();
        if !task.spec.volume_mounts.is_empty() || !task.spec.instance_mounts.is_empty() {
            self.hold(Kind::Mounted, |state| &mut state.held.mounts).await;
            binds = tasks.host.mount(&task.spec).await.map_err(failed)?;
        }
        if !found {
            let runtime = tasks.runtime.name_for(&task.spec);
            let (settings, ids) = (tasks.settings.clone(), gpus.clone());
            let written =
                self.on_disk(move |task| files::write_runner_config(&settings, task, runtime, &ids)).await;
            written
                .map_err(|source| failed(HostError::Io { what: "write runner.json".to_owned(), source }))?;
        }
        Ok(Prepared {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: tasks.settings.gpus.iter().filter(|gpu| gpus.contains(&gpu.id)).cloned().collect(),
            binds,
            publish: files::publish(&tasks.settings, &task.spec),
            limits: grant.limits,
            env: grant.env,
        })
    }

    /// Enough to wait for a container that runs.
    fn without_surroundings(&self) -> Prepared {
        let (settings, task) = (&self.tasks.settings, &self.task);
        let held = task.state.lock().gpus.clone();
        Prepared {
            spec: task.spec.clone(),
            dir: task.dir.clone(),
            gpus: settings.gpus.iter().filter(|gpu| held.contains(&gpu.id)).cloned().collect(),
            binds: Vec::new(),
            publish: files::publish(settings, &task.spec),
            limits: Limits { pids: 0, new_privileges: false, capabilities: Vec::new() },
            env: Vec::new(),
        }
    }

    /// The order of records is the order of the ledger: both are written under its lock.
    fn acquire_gpus(&self) -> Way<Vec<String>> {
        let want = match self.task.spec.gpu {
            count if count < 0 => Want::All,
            count => Want::Count(usize::try_from(count).unwrap_or(usize::MAX)),
        };
        let mut ledger = self.tasks.ledger.lock();
        let mut state = self.task.state.lock();
        let known = !ledger.held_by(&self.task.id).is_empty();
        let gpus = ledger.acquire(&self.task.id, want);
        let gpus = gpus.map_err(|error| Cut::Failed(ending::unprepared(&error)))?;
        if !known && !gpus.is_empty() {
            self.tasks.journal.append(self.task.id, state.epoch, Kind::GpuAcquired { gpus: gpus.clone() });
        }
        state.held.gpus.clone_from(&gpus);
        state.gpus.clone_from(&gpus);
        Ok(gpus)
    }

    /// Notes on disk that something is held, before it is taken.
    async fn hold(&self, kind: Kind, what: fn(&mut State) -> &mut bool) {
        let seq = {
            let mut state = self.task.state.lock();
            if std::mem::replace(what(&mut state), true) {
                return;
            }
            self.tasks.journal.append(self.task.id, state.epoch, kind)
        };
        self.settle(seq, usize::MAX).await;
    }

    /// Brings the image; an ask cancels it.
    async fn pull(&self, prepared: &Prepared) -> Way<()> {
        let secs_max = self.tasks.settings.pull_secs_max;
        let auth = self.task.auth.lock().clone();
        let (task, runtime) = (Arc::downgrade(&self.task), &self.tasks.runtime);
        let progress = Arc::new(move |progress| {
            if let Some(task) = task.upgrade() {
                task.state.lock().progress = Some(progress);
            }
        });
        let pull = self.patiently("pull the image", || {
            runtime.pull(prepared, auth.as_ref(), Arc::clone(&progress) as _)
        });
        let mut ask = self.task.ask.subscribe();
        tokio::select! {
            biased;
            _ = ask.wait_for(Option::is_some) => Err(Cut::Asked),
            pulled = timeout(Duration::from_secs(secs_max), pull) => {
                pulled.unwrap_or_else(|_| Err(Cut::Failed(ending::pull_took_too_long(secs_max))))
            }
        }
    }

    async fn create(&self, prepared: &Prepared) -> Way<Handle> {
        let runtime = &self.tasks.runtime;
        let handle = self.patiently("create the container", || runtime.create(prepared)).await?;
        let mut state = self.task.state.lock();
        if state.container.handle.as_ref() != Some(&handle) {
            state.container.handle = Some(handle.clone());
            let kind = Kind::ContainerCreated { handle: handle.clone() };
            self.tasks.journal.append(self.task.id, state.epoch, kind);
        }
        Ok(handle)
    }

    /// The decision to start is on disk first. Whoever finds it without a container never starts a second one.
    async fn start(&self, prepared: &Prepared, handle: &Handle) -> Way<()> {
        let boot = self.tasks.settings.boot.clone();
        let seq = {
            let mut state = self.task.state.lock();
            state.container.starting = Some(boot.clone());
            self.tasks.journal.append(self.task.id, state.epoch, Kind::ContainerStarting { boot })
        };
        self.settle(seq, usize::MAX).await;
        if self.task.spec.cluster {
            // Its other nodes come to exactly this port.
            self.tasks.late_readers.give_up(SSH_PORT).await;
        }
        let runtime = &self.tasks.runtime;
        let ports = match self.patiently("start the container", || runtime.start(prepared, handle)).await {
            // What ended at once has no ports to tell; how it ended says more than that.
            Err(Cut::Failed(_)) if self.has_ended().await => Vec::new(),
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
            self.tasks.journal.append(self.task.id, state.epoch, Kind::ContainerStarted { ports })
        };
        self.settle(seq, usize::MAX).await;
        self.advance(Status::Creating, Event::Started).await;
        self.store().await;
    }

    /// Steps on if the task is at `at`; a life that goes on after a restart may be beyond.
    async fn advance(&self, at: Status, event: Event) {
        let moved = {
            let mut state = self.task.state.lock();
            match machine::step(state.status, event) {
                Step::To(to) if state.status == at => {
                    if to != Status::Running {
                        self.tasks.journal.append(self.task.id, state.epoch, Kind::Moved { to });
                    }
                    state.status = to;
                    self.changed(&state);
                    Some(to)
                }
                Step::To(_) | Step::Stay | Step::Refuse => None,
            }
        };
        if let Some(to) = moved {
            if self.tasks.settings.pause_at == Some(PauseAt::Status(to)) {
                self.settle(self.tasks.journal.last(), usize::MAX).await;
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
    async fn patiently<'a, T>(
        &self,
        what: &str,
        mut call: impl FnMut() -> BoxFuture<'a, Result<T, RuntimeError>>,
    ) -> Way<T> {
        for wait in waits() {
            match call().await {
                Ok(done) => return Ok(done),
                Err(error @ RuntimeError::Away { .. }) => {
                    tracing::warn!(error = chain(&error), id = %self.task.id, "{what}");
                }
                Err(error) => return Err(Cut::Failed(ending::uncreated(&error))),
            }
            let mut ask = self.task.ask.subscribe();
            if timeout(wait, ask.wait_for(Option::is_some)).await.is_ok() {
                return Err(Cut::Asked);
            }
        }
        Err(Cut::Asked)
    }

    fn status(&self) -> Status {
        self.task.state.lock().status
    }

    fn asked(&self) -> Option<Ask> {
        self.task.ask.borrow().clone()
    }

    fn unless_asked(&self) -> Way<()> {
        if self.task.ask.borrow().is_some() { Err(Cut::Asked) } else { Ok(()) }
    }

    fn note(&self, kind: Kind) -> u64 {
        let state = self.task.state.lock();
        self.tasks.journal.append(self.task.id, state.epoch, kind)
    }

    /// Waits for the disk, up to so many tries.
    async fn settle(&self, seq: u64, tries: usize) {
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
    fn changed(&self, state: &State) {
        self.task.changes.send_modify(|count| *count += 1);
        self.tasks.observer.changed(&self.task.info_of(state));
    }

    fn tell(&self) {
        self.changed(&self.task.state.lock());
    }

    /// Keeps `task.json` near the truth; the journal is the truth.
    async fn store(&self) {
        if let Err(error) = self.on_disk(|task| files::write_task(&task.dir, &files::Stored::of(task))).await
        {
            tracing::warn!(%error, id = %self.task.id, "write task.json");
        }
    }

    async fn on_disk(
        &self,
        work: impl FnOnce(&Task) -> std::io::Result<()> + Send + 'static,
    ) -> std::io::Result<()> {
        if self.tasks.settings.keep == Keep::InMemory {
            return Ok(());
        }
        let task = Arc::clone(&self.task);
        let done = self.tasks.lives.spawn_blocking(move || work(&task)).await;
        done.unwrap_or_else(|panic| Err(std::io::Error::other(panic)))
    }
}
