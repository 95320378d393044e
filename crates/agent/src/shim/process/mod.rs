//! Tasks as plain processes, for hosts without a container engine.
//!
//! A task is an init (`runner::init`) in a separate session and control groups, and all its descendants. It is
//! independent of the shim: it survives the shim and is found again by its record (pid and start time), by its groups,
//! and last by marks in its environment. A process is never signalled on the basis of its pid alone.
//!
//! An init does nothing before it is recorded: it waits at a gate for its orders, and ends without them.
//!
//! A task is confined ([`crate::isolation`]) unless it requests the rights of the agent's user and the owner of the
//! host allows that. Network mode and privileges apply to containers and have no effect here. A task that names an
//! image is refused. Mounts are made in a separate mount namespace of the task.

mod confinement;
mod environment;
mod ports;
mod start;
mod state_file;
mod stop;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use rustix::process::Signal;

use windlass_api::agent::{
    RUNNER_PORT, SSH_PORT,
    shim::{ConfinementMethod, Port, ProcessIsolation, ProcessMode, PullProgress, TaskSpec},
};
use windlass_model::id::SubmissionId;

use super::runtime::{
    Exit, FoundState, FoundTask, Handle, LossReason, PreparedTask, ProgressCallback, RegistryAuth, Runtime,
    RuntimeError, RuntimeFuture, is_plain_process,
};
use crate::{
    cgroup::{Hierarchies, task::TaskGroups},
    digest::sha256_hex,
    isolation::{
        probe,
        user_ids::{DEFAULT_RANGE, UserIdRange},
    },
    proc::{self, ProcessHandle},
    task_dir::{EXIT_RECORD, ExitRecord, TaskDir},
};
use state_file::ProcessRecord;

/// Output of the task's first process itself, not of the job.
const OUTPUT_FILE: &str = "output.log";
/// Number of its lines that are reported at the end.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: u64 = 16 * 1024;
/// Maximum time for a runner to report the port of its SSH server.
const PORT_TIMEOUT: Duration = Duration::from_secs(15);
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Number of hexadecimal digits of the hash that identifies a shim's home.
const HOME_ID_LEN: usize = 12;
/// Prefix of the names of handles.
const NAME_PREFIX: &str = "windlass-";

/// Runtime of one shim.
#[derive(Clone, Debug)]
pub struct ProcessRuntime {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    home: PathBuf,
    /// Identifies `home` in names of groups and in marks.
    home_id: String,
    agent: PathBuf,
    groups: TaskGroups,
    /// True if the owner of the host chose to ignore images.
    ignores_images: bool,
    /// True if the shim's container belongs to one job: tasks have its variables, working directory and devices.
    in_own_container: bool,
    rules: ProcessRules,
    /// Available confinement method, or the reason why there is none. Determined on first use.
    confined_by: OnceLock<Result<ConfinementMethod, String>>,
    /// Serializes starts: the record shows whether a task was started before.
    starting: Mutex<()>,
}

/// Rules of the host's owner for plain processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRules {
    pub mode: ProcessMode,
    /// Range of the user ids of tasks.
    pub user_ids: UserIdRange,
    /// Accounts that a job may request.
    pub users: Vec<String>,
    /// Paths hidden from confined tasks, in addition to those that are always hidden.
    pub hidden: Vec<PathBuf>,
}

impl Default for ProcessRules {
    fn default() -> Self {
        let (users, hidden) = (Vec::new(), Vec::new());
        Self { mode: ProcessMode::default(), user_ids: DEFAULT_RANGE, users, hidden }
    }
}

impl ProcessRuntime {
    /// `home` is the shim's directory. Tasks of shims with other homes are not touched.
    pub fn new(home: PathBuf) -> Self {
        // The running binary, even after its file was replaced by a newer one.
        let agent = PathBuf::from("/proc/self/exe");
        let hierarchies = Hierarchies::mounted().unwrap_or_default();
        Self::with(home, agent, hierarchies)
    }

    /// Uses another binary for the runner, and only these control groups.
    pub fn with(home: PathBuf, agent: PathBuf, hierarchies: Hierarchies) -> Self {
        let real = home.canonicalize().unwrap_or_else(|_| home.clone());
        let mut home_id = sha256_hex(real.as_os_str().as_encoded_bytes());
        home_id.truncate(HOME_ID_LEN);
        let groups = TaskGroups::new(&home_id, hierarchies);
        let shared = Shared {
            home,
            home_id,
            agent,
            groups,
            ignores_images: false,
            in_own_container: false,
            rules: ProcessRules::default(),
            confined_by: OnceLock::new(),
            starting: Mutex::new(()),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Sets the rules of the host's owner.
    #[must_use]
    pub fn with_rules(mut self, rules: ProcessRules) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.rules = rules;
        }
        self
    }

    /// Sets the result of an earlier probe of this host.
    #[must_use]
    pub fn confined_by(self, found: Result<ConfinementMethod, String>) -> Self {
        let _ = self.shared.confined_by.set(found);
        self
    }

    /// Runs tasks with images as plain processes too: for servers that always name an image, if the host's owner wants
    /// that.
    pub fn ignoring_images(mut self) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.ignores_images = true;
        }
        self
    }

    /// Runs tasks in the container of the shim, with its variables, working directory and devices.
    #[must_use]
    pub fn in_own_container(mut self) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.in_own_container = true;
        }
        self
    }

    /// Returns whether this runtime made the handle.
    pub(super) fn made(handle: &Handle) -> bool {
        handle.name == format!("{NAME_PREFIX}{}", handle.id)
    }

    /// Runs blocking work outside the runtime's threads.
    async fn run_blocking<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(&Shared) -> Result<T, RuntimeError> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let shared = Arc::clone(&self.shared);
        match tokio::task::spawn_blocking(move || work(&shared)).await {
            Ok(result) => result,
            Err(error) => Err(RuntimeError::Failed { what, source: Box::new(error) }),
        }
    }

    /// Returns the ports of the SSH server and, if it chose any free port, of the HTTP API, once the runner reports
    /// them. Empty if none was requested, or if the task ended first.
    async fn ports(&self, dir: &TaskDir) -> Result<Vec<Port>, RuntimeError> {
        let Some(config) = dir.runner_config().filter(|config| config.ssh_listen.is_some()) else {
            return Ok(Vec::new());
        };
        let deadline = tokio::time::Instant::now() + PORT_TIMEOUT;
        loop {
            let http = dir.http_port().filter(|_| config.has_any_http_port());
            if let Some(host) = dir.ssh_port().filter(|_| http.is_some() || !config.has_any_http_port()) {
                let ssh = Port { host, container: SSH_PORT };
                let http = http.map(|host| Port { host, container: RUNNER_PORT });
                return Ok([ssh].into_iter().chain(http).collect());
            }
            let held = first_process(dir)
                .map_err(|source| runtime_error("cannot find the task's process", source))?;
            if held.is_none_or(|held| held.ended(Duration::ZERO).unwrap_or(false)) {
                return Ok(Vec::new());
            }
            if tokio::time::Instant::now() >= deadline {
                tracing::warn!(task = %dir.id, "runner did not report the port of its SSH server");
                return Ok(Vec::new());
            }
            tokio::time::sleep(PORT_POLL_INTERVAL).await;
        }
    }

    async fn wait_process_end(&self, dir: &TaskDir) -> Result<Exit, RuntimeError> {
        let init =
            first_process(dir).map_err(|source| runtime_error("cannot find the task's process", source))?;
        let reaped = match init {
            // The exit record of the init takes precedence; an init that was killed could not write one.
            Some(init) => ended(init).await?.reap(),
            None => None,
        };
        // An init that was killed has left its task running.
        let leftover = dir.clone();
        self.run_blocking("failed to end the task".to_owned(), move |shared| shared.end(&leftover)).await?;
        let group = self.shared.groups.find(&dir.id.to_string());
        let word = read_exit_record(dir);
        let boot = ProcessRecord::load(dir).ok().flatten().map(|record| record.boot);
        let code = word.as_ref().and_then(|word| word.exit_status).or(reaped);
        let lost = match (code, boot, proc::boot_id().ok()) {
            (Some(_), _, _) => None,
            (None, Some(then), Some(now)) if then != now => Some(LossReason::HostRebooted),
            (None, _, _) => Some(LossReason::Vanished),
        };
        let oom_killed = word.is_some_and(|word| word.oom_killed) || group.group.oom_kills() > 0;
        Ok(Exit { code, oom_killed, tail: output_tail(dir), lost })
    }
}

/// Returns when the process has ended.
async fn ended(held: ProcessHandle) -> Result<ProcessHandle, RuntimeError> {
    let watched = held.watch().map_err(|error| runtime_error("cannot watch the task", error))?;
    watched.readable().await.map_err(|error| runtime_error("cannot watch the task", error))?.retain_ready();
    Ok(watched.into_inner())
}

/// Returns the task's first process, if it is still the one that was started and has not been reaped.
fn first_process(dir: &TaskDir) -> io::Result<Option<ProcessHandle>> {
    let Some(record) = ProcessRecord::load(dir)? else { return Ok(None) };
    let Some(name) = record.process.filter(|_| proc::boot_id().is_ok_and(|boot| boot == record.boot)) else {
        return Ok(None);
    };
    ProcessHandle::open(name)
}

fn read_exit_record(dir: &TaskDir) -> Option<ExitRecord> {
    serde_json::from_str(&dir.read_small_file(EXIT_RECORD)?).ok()
}

fn output_tail(dir: &TaskDir) -> Vec<String> {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> io::Result<Vec<u8>> {
        let mut file = std::fs::File::open(dir.root().join(OUTPUT_FILE))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let text = read().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).map(|&line| line.to_owned()).collect()
}

fn runtime_error(what: &str, source: io::Error) -> RuntimeError {
    let what = what.to_owned();
    if source.kind() == io::ErrorKind::StorageFull {
        return RuntimeError::NoDisk { what };
    }
    RuntimeError::Failed { what, source: Box::new(source) }
}

fn handle_for(task: SubmissionId) -> Handle {
    Handle { name: format!("{NAME_PREFIX}{task}"), id: task.to_string() }
}

impl Runtime for ProcessRuntime {
    fn name(&self) -> &'static str {
        "process"
    }

    fn refusal(&self, spec: &TaskSpec) -> Option<String> {
        if !is_plain_process(spec) && !self.shared.ignores_images {
            let image = &spec.image_name;
            return Some(format!(
                "cannot run image {image}: this host has no container engine, only plain processes"
            ));
        }
        self.shared.refusal(spec.process_isolation)
    }

    fn pull<'a>(
        &'a self,
        _task: &'a PreparedTask,
        _auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        progress(PullProgress { is_total_bytes_final: true, ..PullProgress::default() });
        Box::pin(async { Ok(()) })
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        Box::pin(async move {
            let task = task.clone();
            self.run_blocking("cannot create the task".to_owned(), move |shared| shared.create(&task)).await
        })
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, _handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        Box::pin(async move {
            let prepared = task.clone();
            self.run_blocking("task start failed".to_owned(), move |shared| shared.start(&prepared)).await?;
            self.ports(&task.dir).await
        })
    }

    fn wait<'a>(&'a self, task: &'a PreparedTask, _handle: &'a Handle) -> RuntimeFuture<'a, Exit> {
        Box::pin(self.wait_process_end(&task.dir))
    }

    fn stop<'a>(&'a self, task: &'a TaskDir, _handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()> {
        Box::pin(async move {
            let init = first_process(task)
                .map_err(|source| runtime_error("cannot find the task's process", source))?;
            let requested = init.as_ref().is_some_and(|init| init.signal(Signal::TERM).unwrap_or(false));
            if let Some(init) = init.filter(|_| requested) {
                let _ = tokio::time::timeout(grace, ended(init)).await;
            }
            let dir = task.clone();
            self.run_blocking("failed to stop the task".to_owned(), move |shared| shared.kill(&dir)).await
        })
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, _handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        Box::pin(async move {
            let dir = task.clone();
            self.run_blocking("failed to remove the task".to_owned(), move |shared| shared.remove(&dir)).await
        })
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        Box::pin(async move {
            self.run_blocking("failed to list tasks".to_owned(), |shared| {
                shared.found().map_err(|source| runtime_error("failed to list tasks", source))
            })
            .await
        })
    }
}

/// Returns whether the path is absolute and has no `..`: it must be unambiguous in the task's namespace.
fn is_plain_path(path: &Path) -> bool {
    use std::path::Component;
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

impl Shared {
    fn confined_by(&self) -> Result<ConfinementMethod, &str> {
        let found = self.confined_by.get_or_init(|| probe::detect_confinement(&self.agent));
        found.as_ref().copied().map_err(String::as_str)
    }

    /// Returns the reason why this host refuses such a plain process, and the change that would allow it.
    fn refusal(&self, isolation: ProcessIsolation) -> Option<String> {
        match (self.rules.mode, isolation) {
            (ProcessMode::Refused, _) => Some(
                "this host does not accept plain processes: set an image, or have the owner of the host set \
                 `processes: confined` in its policy"
                    .to_owned(),
            ),
            (ProcessMode::Confined, ProcessIsolation::Own) => Some(
                "this host confines plain processes and does not run them as the agent's user: have \
                 the owner of the host set `processes: own` in its policy"
                    .to_owned(),
            ),
            (ProcessMode::Own, ProcessIsolation::Own) => None,
            (ProcessMode::Confined | ProcessMode::Own, ProcessIsolation::Confined) => {
                let why = self.confined_by().err()?;
                Some(format!("this host cannot confine plain processes: {why}"))
            }
        }
    }

    fn found(&self) -> io::Result<Vec<FoundTask>> {
        let mut ids = std::collections::BTreeSet::new();
        match std::fs::read_dir(self.home.join("tasks")) {
            Ok(entries) => {
                let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
                let recorded = |id: &SubmissionId| {
                    ProcessRecord::load(&TaskDir::new(&self.home, *id)).is_ok_and(|record| record.is_some())
                };
                ids.extend(names.filter(recorded));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        ids.extend(self.groups.names().iter().filter_map(|name| name.parse::<SubmissionId>().ok()));
        ids.extend(self.marked_tasks()?);
        ids.into_iter()
            .map(|task| {
                let state = self.state(&TaskDir::new(&self.home, task))?;
                Ok(FoundTask { task, handle: handle_for(task), state })
            })
            .collect()
    }

    fn state(&self, dir: &TaskDir) -> io::Result<FoundState> {
        let record = ProcessRecord::load(dir)?;
        let alive = match first_process(dir)? {
            Some(held) => !held.ended(Duration::ZERO)?,
            None => false,
        };
        if alive || !self.remaining(dir)?.is_empty() {
            return Ok(FoundState::Running);
        }
        let never = match &record {
            Some(record) => record.process.is_none() || start::was_never_started(dir),
            None => false,
        };
        Ok(if never { FoundState::Created } else { FoundState::Ended })
    }
}
