//! Startup of the task table: reads the journal, finds what is alive, and continues.
//!
//! The table is available at once; the runtime may be unreachable for a while and is waited for in the background.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::PathBuf,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::time::{Duration, Instant, sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use windlass_api::agent::shim::{NetworkMode, ProcessIsolation, TaskSpec};
use windlass_model::{device_allocator::DeviceAllocator, error_chain::format_chain, id::SubmissionId};

use super::{
    Host, Observer, Storage, Table, Tasks, TasksSettings,
    journal_replay::{self, RecoveryAction, TaskHistory},
    lifecycle::{self, StartFrom},
    task::{Acceptance, StopRequest, Task},
    task_files,
    tombstones::Tombstones,
};
use crate::{
    clock,
    shim::{
        journal::{self, Journal, JournalContents, JournalEvent},
        runtime::{FoundTask, Runtime},
    },
    task_dir::TaskDir,
};

/// Delay between two attempts to list the containers of the runtime.
const FIND_RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("failed to open the shim's home `{path}`")]
    Home {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to read the tasks of this host")]
    Journal(#[from] journal::Error),
}

/// State of the tasks before the runtime was queried.
struct RecoveredState {
    journal: Journal,
    tasks: BTreeMap<SubmissionId, Arc<Task>>,
    doubtful: Vec<SubmissionId>,
    tombstones: Tombstones,
    /// Directories that no record mentions.
    unknown: Vec<TaskDir>,
    /// The journal lost records, so there may be tasks that it does not know.
    lossy: bool,
}

pub(super) async fn open(
    settings: TasksSettings,
    runtime: Arc<dyn Runtime>,
    host: Arc<dyn Host>,
    observer: Arc<dyn Observer>,
) -> Result<Arc<Tasks>, OpenError> {
    let remembered = match settings.keep {
        Storage::InMemory => RecoveredState::empty(Journal::in_memory()),
        Storage::OnDisk => read_recovered_state(&settings)?,
    };
    let ledger = rebuild_gpu_ledger(&settings, remembered.tasks.values());
    let tasks = Arc::new(Tasks {
        journal: remembered.journal,
        table: Mutex::new(Table {
            tasks: remembered.tasks.clone().into_iter().collect(),
            tombstones: remembered.tombstones,
        }),
        ledger: Mutex::new(ledger),
        late_readers: super::late_readers::LateReaders::default(),
        runtime,
        host,
        observer,
        settings,
        lifetimes: TaskTracker::new(),
        closed: CancellationToken::new(),
    });
    if tasks.settings.keep == Storage::OnDisk {
        if let Err(error) = tasks.compact().await {
            // The old file stays valid. On a full disk, the shim is needed to remove tasks.
            tracing::warn!(error = format_chain(&error), "failed to compact the journal");
        }
        let unknown = UnknownDirs { dirs: remembered.unknown, lossy: remembered.lossy };
        // Before the first call can arrive, so that new keys are not mistaken for old ones.
        tasks.sweep(remembered.tasks.values(), &unknown).await;
        let known = remembered.tasks.into_values().collect();
        tasks.spawn(recover_tasks(Arc::clone(&tasks), known, remembered.doubtful, unknown));
    }
    Ok(tasks)
}

impl RecoveredState {
    fn empty(journal: Journal) -> Self {
        Self {
            journal,
            tasks: BTreeMap::new(),
            doubtful: Vec::new(),
            tombstones: Tombstones::default(),
            unknown: Vec::new(),
            lossy: false,
        }
    }
}

fn read_recovered_state(settings: &TasksSettings) -> Result<RecoveredState, OpenError> {
    let home = &settings.home;
    let failed = |source| OpenError::Home { path: home.clone(), source };
    std::fs::create_dir_all(home.join("tasks")).map_err(failed)?;
    let path = home.join("journal");
    let (journal, reading) = Journal::open(&path)?;
    report_damage(&path, &reading);
    let replayed = journal_replay::replay(&reading.records);
    let mut remembered = RecoveredState::empty(journal);
    for (id, (epoch, at)) in replayed.tombstones {
        remembered.tombstones.insert(id, epoch, at);
    }
    let mut dirs: BTreeMap<_, _> =
        task_files::list_dirs(home).map_err(failed)?.into_iter().map(|dir| (dir.id, dir)).collect();
    for (id, transcript) in replayed.histories {
        let there = dirs.remove(&id).is_some();
        let doubtful = transcript.may_be_incomplete(&reading.damage);
        if doubtful && !there {
            // Its removal may be the lost record; an id is never used twice.
            remembered.tombstones.insert(id, transcript.state.epoch, clock::now_us());
            remembered.journal.append(id, transcript.state.epoch, JournalEvent::Removed);
            continue;
        }
        if doubtful {
            remembered.doubtful.push(id);
        }
        remembered.tasks.insert(id, Arc::new(restore_task(home, id, transcript)));
    }
    remembered.unknown = dirs.into_values().collect();
    remembered.lossy = reading.missing || !reading.damage.is_empty();
    Ok(remembered)
}

/// Logs damage as errors and keeps one copy of the damaged file for inspection.
fn report_damage(path: &std::path::Path, reading: &JournalContents) {
    if reading.torn_bytes > 0 {
        tracing::info!(bytes = reading.torn_bytes, "removed an incomplete record from the journal");
    }
    if reading.damage.is_empty() {
        return;
    }
    for damage in &reading.damage {
        tracing::error!(?damage, path = %path.display(), "journal damaged; records lost");
    }
    if let Err(error) = std::fs::copy(path, path.with_extension("damaged")) {
        tracing::warn!(%error, "failed to keep a copy of the damaged journal");
    }
}

/// Restores a task of the journal with its files.
fn restore_task(home: &std::path::Path, id: SubmissionId, transcript: TaskHistory) -> Task {
    let dir = TaskDir::new(home, id);
    let stored = task_files::read_task(&dir);
    let token = task_files::read_token(&dir).unwrap_or_else(|_| task_files::new_token());
    let auth = task_files::read_auth(&dir);
    let spec = stored.map(|stored| stored.spec).unwrap_or_else(|error| {
        if transcript.state.status.is_active() {
            tracing::error!(%error, %id, "failed to read task.json; the task cannot continue");
        }
        placeholder_spec(id)
    });
    let task = Task::new(spec, auth, dir, token, transcript.state);
    task.acceptance.send_replace(Acceptance::Accepted);
    task.stop_request.send_replace(
        transcript.stop_request.map(|stop_request| StopRequest::new(&stop_request, Instant::now())),
    );
    task
}

/// Placeholder for a lost specification: enough to end and to remove the task.
fn placeholder_spec(id: SubmissionId) -> TaskSpec {
    TaskSpec {
        id,
        name: String::new(),
        registry_username: String::new(),
        registry_password: String::new(),
        image_name: String::new(),
        container_user: String::new(),
        privileged: false,
        gpu: 0,
        cpu: 0.0,
        memory: 0,
        shm_size: 0,
        network_mode: NetworkMode::Host,
        volumes: Vec::new(),
        volume_mounts: Vec::new(),
        instance_mounts: Vec::new(),
        gpu_devices: Vec::new(),
        project: String::new(),
        host_ssh_user: String::new(),
        host_ssh_keys: Vec::new(),
        container_ssh_keys: Vec::new(),
        app_ports: Vec::new(),
        pids: 0,
        disk: 0,
        cluster: false,
        node_address: None,
        process_isolation: ProcessIsolation::Confined,
        claims: None,
    }
}

/// Rebuilds the ledger from the tasks that have not ended. Reports a device that no longer exists, or that two tasks
/// claim.
fn rebuild_gpu_ledger<'a>(
    settings: &TasksSettings,
    tasks: impl Iterator<Item = &'a Arc<Task>>,
) -> DeviceAllocator<String, SubmissionId> {
    let devices = || settings.gpus.iter().map(|gpu| gpu.id.clone());
    let mut live: Vec<(SubmissionId, Vec<String>)> = Vec::new();
    let mut taken = HashMap::new();
    for task in tasks {
        let mut state = task.state.lock();
        if state.status.is_final() {
            continue;
        }
        state.held.gpus.retain(|gpu| {
            let exists = devices().any(|device| device == *gpu);
            let free = exists && *taken.entry(gpu.clone()).or_insert(task.id) == task.id;
            if !free {
                tracing::error!(id = %task.id, gpu, exists, "task holds a missing or already allocated GPU");
            }
            free
        });
        live.push((task.id, state.held.gpus.clone()));
    }
    DeviceAllocator::rebuild(devices(), live).unwrap_or_else(|error| {
        tracing::error!(%error, "failed to rebuild the GPU ledger");
        DeviceAllocator::new(devices())
    })
}

struct UnknownDirs {
    dirs: Vec<TaskDir>,
    lossy: bool,
}

/// Queries the runtime and continues every task.
async fn recover_tasks(
    tasks: Arc<Tasks>,
    mut known: Vec<Arc<Task>>,
    mut doubtful: Vec<SubmissionId>,
    unknown: UnknownDirs,
) {
    let mut found: HashMap<_, _> =
        find_running(&tasks).await.into_iter().map(|found| (found.task, found)).collect();
    for dir in unknown.dirs {
        let removed = tasks.table.lock().tombstones.epoch(dir.id).is_some();
        let may_be_ours = !removed && (unknown.lossy || found.contains_key(&dir.id));
        match may_be_ours.then(|| task_files::read_task(&dir)) {
            Some(Ok(stored)) => {
                known.extend(tasks.register_found(&dir, stored));
                doubtful.push(dir.id);
            }
            // Never accepted, or already removed: anything that runs under its mark is removed below.
            Some(Err(_)) | None => {
                if let Err(error) = task_files::remove(&dir) {
                    tracing::warn!(%error, id = %dir.id, "failed to delete the files of an unknown task");
                }
            }
        }
    }
    for task in known {
        let found = found.remove(&task.id);
        tasks.recover_task(&task, found, doubtful.contains(&task.id));
    }
    for other in found.into_values() {
        // It may have been submitted just now.
        if tasks.find(other.task).is_none() {
            tasks.spawn(remove_orphan(Arc::clone(&tasks), other));
        }
    }
}

async fn find_running(tasks: &Tasks) -> Vec<FoundTask> {
    loop {
        match tasks.runtime.found().await {
            Ok(found) => return found,
            Err(error) => {
                tracing::warn!(
                    error = format_chain(&error),
                    "failed to list the tasks of the runtime; retrying"
                );
            }
        }
        sleep(FIND_RETRY_DELAY).await;
    }
}

/// Removes an object with the shim's mark that belongs to no task: it must not run.
async fn remove_orphan(tasks: Arc<Tasks>, other: FoundTask) {
    let dir = TaskDir::new(&tasks.settings.home, other.task);
    tracing::warn!(id = %other.task, name = other.handle.name, "removing unknown container");
    while let Err(error) = tasks.runtime.remove(&dir, Some(&other.handle)).await {
        tracing::warn!(error = format_chain(&error), id = %other.task, "failed to remove unknown container");
        sleep(FIND_RETRY_DELAY).await;
    }
}

impl Tasks {
    /// Registers a task that the journal lost, from its own file and the runtime's state.
    fn register_found(&self, dir: &TaskDir, stored: task_files::StoredTask) -> Option<Arc<Task>> {
        let id = dir.id;
        let mut table = self.table.lock();
        if table.tasks.contains_key(&id) {
            return None;
        }
        tracing::warn!(%id, "adopted a task that is missing from the journal");
        let mut state = stored.state();
        state.held.keys = !stored.spec.host_ssh_keys.is_empty();
        state.held.mounts = !stored.spec.volume_mounts.is_empty() || !stored.spec.instance_mounts.is_empty();
        self.journal.append(id, state.epoch, JournalEvent::Submitted);
        if let Some(handle) = &state.container.handle {
            self.journal.append(id, state.epoch, JournalEvent::ContainerCreated { handle: handle.clone() });
        }
        self.journal.append(id, state.epoch, JournalEvent::Moved { to: state.status });
        let token = task_files::read_token(dir).unwrap_or_else(|_| task_files::new_token());
        let task = Task::new(stored.spec, task_files::read_auth(dir), dir.clone(), token, state);
        task.acceptance.send_replace(Acceptance::Accepted);
        let task = Arc::new(task);
        table.tasks.insert(id, Arc::clone(&task));
        Some(task)
    }

    /// Removes keys and mounts of tasks that have ended or are unknown.
    async fn sweep(&self, known: impl Iterator<Item = &Arc<Task>>, unknown: &UnknownDirs) {
        let known: Vec<_> = known.filter(|task| task.state.lock().status.is_active()).collect();
        for task in known.iter().filter(|task| task.state.lock().held.mounts) {
            // The host must know all users of a mount before it removes the unused ones.
            if let Err(error) = self.host.mount(&task.spec).await {
                tracing::warn!(error = format_chain(&error), id = %task.id, "failed to mount the volumes of a task");
            }
        }
        let mut living: Vec<_> = known.iter().map(|task| task.id).collect();
        {
            // An interrupted removal left its directory, and may have left more.
            let table = self.table.lock();
            let unknown = unknown.dirs.iter().map(|dir| dir.id);
            living.extend(unknown.filter(|id| table.tombstones.epoch(*id).is_none()));
        }
        if let Err(error) = self.host.sweep(&living).await {
            tracing::warn!(error = format_chain(&error), "failed to remove unused keys and mounts");
        }
    }

    fn recover_task(self: &Arc<Self>, task: &Arc<Task>, found: Option<FoundTask>, doubtful: bool) {
        let verdict = {
            let mut state = task.state.lock();
            let same_boot = state.container.starting.as_ref().is_none_or(|boot| *boot == self.settings.boot);
            if let Some(found) =
                found.as_ref().filter(|found| state.container.handle.as_ref() != Some(&found.handle))
            {
                let handle = found.handle.clone();
                self.journal.append(
                    task.id,
                    state.epoch,
                    JournalEvent::ContainerCreated { handle: handle.clone() },
                );
                state.container.handle = Some(handle);
                self.observer.changed(&task.info_for_state(&state));
            }
            let doubtful = doubtful || task.spec.image_name.is_empty();
            journal_replay::recovery_action(
                &state,
                found.as_ref().map(|found| found.state),
                same_boot,
                doubtful,
            )
        };
        tracing::info!(id = %task.id, ?verdict, "task adopted");
        let (tasks, task) = (Arc::clone(self), Arc::clone(task));
        match verdict {
            RecoveryAction::Keep => {}
            RecoveryAction::RemoveOrphan => {
                if let Some(found) = found {
                    self.spawn(remove_orphan(tasks, found));
                }
            }
            RecoveryAction::Resume => self.spawn(lifecycle::resume(tasks, task, StartFrom::Resume)),
            RecoveryAction::Watch(state) => {
                self.spawn(lifecycle::resume(tasks, task, StartFrom::Found(state)))
            }
            RecoveryAction::Finish(end) => self.spawn(lifecycle::finish_lost(tasks, task, end)),
        }
    }

    async fn compact(&self) -> Result<(), journal::Error> {
        let now = clock::now_us();
        self.journal.compact(move |records| journal_replay::retained_records(records, now)).await
    }

    pub(super) async fn compact_if_long(&self) {
        let now = clock::now_us();
        let rewritten =
            self.journal.compact_if_long(move |records| journal_replay::retained_records(records, now));
        if let Err(error) = rewritten.await {
            tracing::warn!(error = format_chain(&error), "failed to compact the journal");
        }
    }
}
