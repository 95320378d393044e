//! Startup and shutdown of a shim, in order.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use windlass_api::agent::{events::ShimEventKind, shim::ProcessMode};

use super::{
    api::{self, Shim},
    cli::RuntimeName,
    disk_limit,
    docker::{self, DockerRuntime},
    enrolment::EnrolmentFile,
    events::EventLog,
    host_resources::HostResources,
    mixed_runtime::MixedRuntime,
    oci::{self, OciProgram, OciRuntime, OciSettings},
    output_watcher::OutputWatcher,
    policy::{Policy, PolicyError},
    process::ProcessRuntime,
    runtime::{Runtime, RuntimeError},
    tasks::{OpenError, Tasks, TasksSettings},
};
use crate::{
    host::{self, gpu, health::HealthInputs},
    http,
    isolation::probe,
};

/// Lock held for the lifetime of a shim: two shims on one home would both start its tasks.
const LOCK_FILE: &str = "lock";
/// Records the runtime with which the tasks of this home were started.
const RUNTIME_FILE: &str = "runtime";
const SOCKET_MODE: u32 = 0o660;
const HOME_MODE: u32 = 0o750;
/// Maximum time to wait for the engine: the shim's service may start before the engine does.
const ENGINE_START_TIMEOUT: Duration = Duration::from_secs(60);
const ENGINE_RETRY_DELAY: Duration = Duration::from_secs(1);
const ENGINE_RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the children of a killed shim to release its lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(10);
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Settings with which a shim is started.
#[derive(Clone, Debug)]
pub struct BootConfig {
    pub home: PathBuf,
    pub socket: PathBuf,
    /// `None` selects the runtime that suits the host.
    pub runtime: Option<RuntimeName>,
    pub docker_socket: Option<PathBuf>,
    /// Path of `crun` or `runc`; `None` searches for them.
    pub oci_program: Option<PathBuf>,
    /// SHA-256 of that program. Then it was brought along, and is used only where containers without an engine are chosen.
    pub oci_program_sha256: Option<String>,
    /// Directories with specifications of the Container Device Interface; empty: the usual ones.
    pub cdi_dirs: Vec<PathBuf>,
    /// Plain processes that are accepted, unless the policy specifies it.
    pub processes: ProcessMode,
    /// Directories that confined tasks must not see and that are never mounted into a task.
    pub hidden: Vec<PathBuf>,
    pub policy: PathBuf,
    pub compat_tcp: Option<SocketAddr>,
    /// Tasks run in the container of the shim, which belongs to one job.
    pub own_container: bool,
    #[cfg(feature = "testing")]
    pub simulated: SimulationConfig,
    pub write_host_info: bool,
}

/// Settings of the simulated runtime.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default)]
pub struct SimulationConfig {
    /// `None`: one host, with its socket at the usual path.
    pub hosts: Option<u32>,
    /// Behaviour of the simulated tasks.
    pub plan: super::simulated_runtime::SimulationPlan,
}

#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("{home} is in use by another shim, process {pid}")]
    Taken { home: PathBuf, pid: String },
    #[error("failed to load the policy")]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error("no OCI runtime found: install `crun` or `runc`, or set `--oci-program`")]
    NoOciProgram,
    #[cfg(feature = "testing")]
    #[error("`--hosts` requires `--runtime simulated`")]
    ManyHosts,
    #[error("failed to recover the tasks of {home}")]
    Tasks {
        home: PathBuf,
        #[source]
        source: OpenError,
    },
}

/// Runs a shim, from the first check to the last response.
pub async fn run(boot: BootConfig) -> Result<(), BootError> {
    let stop = stop_on_signals()?;
    create_home(&boot.home)?;
    let _lock = lock_home(&boot.home)?;
    let policy = Policy::load(&boot.policy)?;
    let chosen = select_runtime(&boot)?;
    let mut listeners = JoinSet::new();
    let mut hosts = Vec::new();
    match chosen {
        #[cfg(feature = "testing")]
        SelectedRuntime::Simulated => {
            for (home, socket) in simulated_homes(&boot)? {
                let shim = start_simulated_host(&home, boot.simulated.plan, policy.clone(), &stop).await?;
                // There is one port, and it belongs to the first host.
                let compat = boot.compat_tcp.filter(|_| hosts.is_empty());
                start_listeners(&mut listeners, &shim, &socket, compat).await?;
                hosts.push(shim);
            }
        }
        #[cfg(feature = "testing")]
        SelectedRuntime::Process
        | SelectedRuntime::Docker(_)
        | SelectedRuntime::Any(_)
        | SelectedRuntime::Oci
        | SelectedRuntime::AnyOci
            if boot.simulated.hosts.is_some() =>
        {
            return Err(BootError::ManyHosts);
        }
        SelectedRuntime::Process
        | SelectedRuntime::Docker(_)
        | SelectedRuntime::Any(_)
        | SelectedRuntime::Oci
        | SelectedRuntime::AnyOci => {
            let shim = start_host(&boot, &chosen, policy, &stop).await?;
            if boot.write_host_info {
                write_host_info(&shim).await?;
            }
            start_listeners(&mut listeners, &shim, &boot.socket, boot.compat_tcp).await?;
            tokio::spawn(watch_health(Arc::clone(&shim)));
            tokio::spawn(disk_limit::enforce_limits(Arc::clone(&shim)));
            hosts.push(shim);
        }
    }
    tracing::info!(home = %boot.home.display(), hosts = hosts.len(), "shim ready");
    while listeners.join_next().await.is_some() {}
    for shim in hosts {
        shim.tasks.close().await;
    }
    tracing::info!("shim stopped; tasks continue");
    Ok(())
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> BootError {
    let what = what.into();
    |source| BootError::Io { what, source }
}

/// Returns a token that SIGTERM and SIGINT cancel.
fn stop_on_signals() -> Result<CancellationToken, BootError> {
    let stop = CancellationToken::new();
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signals = signal(kind).map_err(io_error("failed to listen for signals"))?;
        let stop = stop.clone();
        tokio::spawn(async move {
            signals.recv().await;
            stop.cancel();
        });
    }
    Ok(stop)
}

/// Creates the home, accessible to its owner and group only.
pub(super) fn create_home(home: &Path) -> Result<(), BootError> {
    let what = || format!("failed to create {}", home.display());
    fs::DirBuilder::new().recursive(true).mode(HOME_MODE).create(home).map_err(io_error(what()))?;
    // Plain processes of other users may need to traverse the home to reach their files: that permission is kept.
    let passing = fs::metadata(home).map_err(io_error(what()))?.permissions().mode() & 0o001;
    fs::set_permissions(home, fs::Permissions::from_mode(HOME_MODE | passing)).map_err(io_error(what()))
}

/// Acquires the lock of the home. The kernel releases it when the process ends, for whatever reason.
fn lock_home(home: &Path) -> Result<fs::File, BootError> {
    let path = home.join(LOCK_FILE);
    let what = format!("failed to lock {}", path.display());
    let opened = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(io_error(&what))?;
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let pid = fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
                // A shim that was killed while it started a program: the child has the lock until it executes that.
                let is_over = !pid.is_empty() && !Path::new("/proc").join(&pid).exists();
                if !is_over || begun.elapsed() > LOCK_TIMEOUT {
                    return Err(BootError::Taken { home: home.to_owned(), pid });
                }
                std::thread::sleep(LOCK_RETRY_DELAY);
            }
            Err(error) => return Err(io_error(what)(error.into())),
        }
    }
    // Informational only. The write fails on a full disk, which is when a shim is needed most.
    if let Err(error) = fs::write(&path, format!("{}\n", std::process::id())) {
        tracing::warn!(%error, path = %path.display(), "failed to write the process id into the lock file");
    }
    Ok(file)
}

enum SelectedRuntime {
    #[cfg(feature = "testing")]
    Simulated,
    Process,
    /// Path of the engine's socket.
    Docker(PathBuf),
    /// Containers and plain processes; path of the engine's socket.
    Any(PathBuf),
    /// Containers without an engine.
    Oci,
    /// Containers without an engine, and plain processes.
    AnyOci,
}

impl SelectedRuntime {
    /// Name in [`RUNTIME_FILE`].
    fn note(&self) -> &'static str {
        match self {
            #[cfg(feature = "testing")]
            Self::Simulated => "simulated",
            Self::Process => "process",
            Self::Docker(_) => "docker",
            Self::Any(_) => "any",
            Self::Oci => "oci",
            Self::AnyOci => "any-oci",
        }
    }
}

/// Returns the requested runtime, else the one with which the tasks of this home were started, else the one that suits
/// the host.
fn select_runtime(boot: &BootConfig) -> Result<SelectedRuntime, BootError> {
    let note = boot.home.join(RUNTIME_FILE);
    let noted = fs::read_to_string(&note).unwrap_or_default();
    let socket = || find_docker_socket(boot.docker_socket.as_deref());
    let usual = || socket().unwrap_or_else(|| PathBuf::from("/run/docker.sock"));
    let chosen = match boot.runtime {
        #[cfg(feature = "testing")]
        Some(RuntimeName::Simulated) => SelectedRuntime::Simulated,
        Some(RuntimeName::Process) => SelectedRuntime::Process,
        Some(RuntimeName::Docker) => SelectedRuntime::Docker(usual()),
        Some(RuntimeName::Oci) => SelectedRuntime::Oci,
        Some(RuntimeName::AnyOci) => SelectedRuntime::AnyOci,
        Some(RuntimeName::Any) => SelectedRuntime::Any(usual()),
        // An engine that is not up yet still owns the containers of this home: a host that runs containers does not
        // stop being one by itself.
        None if matches!(noted.as_str(), "docker" | "any") => SelectedRuntime::Any(usual()),
        // An engine that was installed since does not know the containers of this home.
        None if matches!(noted.as_str(), "oci" | "any-oci") => SelectedRuntime::AnyOci,
        // A host that had no engine may have one now.
        None => match socket() {
            Some(socket) => SelectedRuntime::Any(socket),
            None if boot.oci_program.is_some() && boot.oci_program_sha256.is_none() => {
                SelectedRuntime::AnyOci
            }
            None => match oci::check_host(&boot.home, given_oci_program(boot).as_ref()) {
                Ok(()) => SelectedRuntime::AnyOci,
                Err(problem) => {
                    tracing::info!(problem, "neither a container engine nor containers without one");
                    SelectedRuntime::Process
                }
            },
        },
    };
    let name = chosen.note();
    // An unchanged file is not written again: on a full disk the write would leave it empty.
    if noted != name {
        fs::write(&note, name).map_err(io_error(format!("failed to write {}", note.display())))?;
    }
    Ok(chosen)
}

/// Returns the configured socket, else the first of the usual ones on which an engine answers.
fn find_docker_socket(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(named) = named {
        return Some(named.to_owned());
    }
    if let Ok(host) = std::env::var("DOCKER_HOST") {
        return host.strip_prefix("unix://").map(PathBuf::from);
    }
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let own = own.iter().flat_map(|dir| [dir.join("docker.sock"), dir.join("podman/podman.sock")]);
    let usual = ["/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock"].map(PathBuf::from);
    { usual.into_iter().chain(own) }.find(|path| std::os::unix::net::UnixStream::connect(path).is_ok())
}

async fn start_host(
    boot: &BootConfig,
    chosen: &SelectedRuntime,
    policy: Policy,
    stop: &CancellationToken,
) -> Result<Arc<Shim>, BootError> {
    let engine_socket = match chosen {
        SelectedRuntime::Docker(socket) | SelectedRuntime::Any(socket) => Some(socket.clone()),
        #[cfg(feature = "testing")]
        SelectedRuntime::Simulated => None,
        SelectedRuntime::Process | SelectedRuntime::Oci | SelectedRuntime::AnyOci => None,
    };
    let hidden = boot.hidden.iter().cloned().chain([boot.socket.clone()]).chain(engine_socket);
    let rules = policy.processes(boot.processes, hidden.collect());
    let mode = rules.mode;
    let inspected =
        tokio::task::spawn_blocking(move || probe::probe(Path::new("/proc/self/exe"), mode)).await;
    let processes_info =
        inspected.map_err(|error| io_error("failed to probe plain processes")(io::Error::other(error)))?;
    if let Some(problem) = &processes_info.problem {
        tracing::warn!(problem, ?mode, "confinement of plain processes is incomplete or unavailable");
    }
    let processes = || {
        let found =
            processes_info.confined_by.ok_or_else(|| processes_info.problem.clone().unwrap_or_default());
        {
            let runtime = ProcessRuntime::new(boot.home.clone()).with_rules(rules.clone()).confined_by(found);
            if boot.own_container { runtime.in_own_container() } else { runtime }
        }
    };
    let (runtime, engine, data): (Arc<dyn Runtime>, _, _) = match chosen {
        SelectedRuntime::Docker(socket) => {
            let docker = connect_engine(socket, &boot.home).await?;
            let data = docker.data().await;
            (Arc::new(docker), Some(socket.clone()), data)
        }
        SelectedRuntime::Any(socket) => {
            let docker = connect_engine(socket, &boot.home).await?;
            let data = docker.data().await;
            (Arc::new(MixedRuntime::new(Arc::new(docker), processes())), Some(socket.clone()), data)
        }
        SelectedRuntime::Oci => {
            let containers = open_oci(boot, &policy).await?;
            let data = containers.data();
            (Arc::new(containers), None, Some(data))
        }
        SelectedRuntime::AnyOci => {
            let containers = open_oci(boot, &policy).await?;
            let data = containers.data();
            (Arc::new(MixedRuntime::new(Arc::new(containers), processes())), None, Some(data))
        }
        // A dstack server names an image for every task. A user who opens the port for it and selects processes wants
        // the images ignored.
        SelectedRuntime::Process
            if boot.compat_tcp.is_some() && boot.runtime == Some(RuntimeName::Process) =>
        {
            (Arc::new(processes().ignoring_images()), None, None)
        }
        #[cfg(feature = "testing")]
        SelectedRuntime::Simulated => (Arc::new(processes()), None, None),
        SelectedRuntime::Process => (Arc::new(processes()), None, None),
    };
    let own = [boot.home.clone()].into_iter().chain(boot.hidden.iter().cloned());
    let policy = policy.with_agent_dirs(own).with_sensitive_paths(engine);
    let gpus = gpu::discover().await;
    let events = EventLog::new(random_boot_id());
    let host_resources = HostResources::new(&boot.home, &boot.socket, policy);
    let keys = host_resources.clone();
    let growth = OutputWatcher::new(&boot.home, events.clone(), move |info| keys.narrow_keys(info));
    let mut settings = TasksSettings::on_disk(boot.home.clone(), gpus.gpus.clone());
    settings.compat_tcp = boot.compat_tcp.is_some();
    let host = Arc::new(host_resources.clone());
    let tasks = Tasks::open(settings, Arc::clone(&runtime), host, Arc::new(growth.clone()))
        .await
        .map_err(|source| BootError::Tasks { home: boot.home.clone(), source })?;
    growth.watch_existing(&tasks.infos());
    Ok(Arc::new(Shim {
        home: boot.home.clone(),
        tasks,
        runtime,
        enrolment: EnrolmentFile::new(&boot.home),
        host_resources: Some(host_resources),
        events,
        growth,
        gpus,
        processes: processes_info.clone(),
        data: data.unwrap_or_else(|| boot.home.clone()),
        problems: Mutex::new(Vec::new()),
        stop: stop.clone(),
    }))
}

/// Opens the runtime of containers without an engine.
async fn open_oci(boot: &BootConfig, policy: &Policy) -> Result<OciRuntime, BootError> {
    let program = given_oci_program(boot).or_else(OciProgram::find);
    let program = program.ok_or(BootError::NoOciProgram)?;
    let mut settings = OciSettings::new(boot.home.clone(), program)
        .map_err(io_error("failed to find the agent's binary"))?;
    settings.store.apply(policy);
    if !boot.cdi_dirs.is_empty() {
        settings.cdi_dirs.clone_from(&boot.cdi_dirs);
    }
    let opened = tokio::task::spawn_blocking(move || OciRuntime::open(settings)).await;
    let runtime = opened.map_err(|error| io_error("failed to open images")(io::Error::other(error)))??;
    runtime.collect_garbage_periodically();
    Ok(runtime)
}

fn given_oci_program(boot: &BootConfig) -> Option<OciProgram> {
    Some(OciProgram::given(boot.oci_program.clone()?, boot.oci_program_sha256.clone()))
}

/// Connects to the engine; waits one minute for an engine that does not answer yet.
async fn connect_engine(socket: &Path, home: &Path) -> Result<DockerRuntime, BootError> {
    let until = tokio::time::Instant::now() + ENGINE_START_TIMEOUT;
    let settings = docker::DockerSettings::new(socket.to_owned(), home.to_owned())
        .map_err(io_error("failed to find the agent's binary"))?;
    loop {
        match DockerRuntime::connect(settings.clone()).await {
            Err(RuntimeError::Away { what, .. }) if tokio::time::Instant::now() < until => {
                tracing::warn!(what, "container engine did not answer; retrying");
                tokio::time::sleep(ENGINE_RETRY_DELAY).await;
            }
            reached => return Ok(reached?),
        }
    }
}

/// Returns the home and socket of each simulated host: the home itself, or the requested number of homes below it.
#[cfg(feature = "testing")]
fn simulated_homes(boot: &BootConfig) -> Result<Vec<(PathBuf, PathBuf)>, BootError> {
    let Some(count) = boot.simulated.hosts else { return Ok(vec![(boot.home.clone(), boot.socket.clone())]) };
    let homes = (1..=count).map(|number| {
        let home = boot.home.join(format!("host-{number:04}"));
        create_home(&home)?;
        let socket = home.join("shim.sock");
        Ok((home, socket))
    });
    homes.collect()
}

#[cfg(feature = "testing")]
async fn start_simulated_host(
    home: &Path,
    plan: super::simulated_runtime::SimulationPlan,
    policy: Policy,
    stop: &CancellationToken,
) -> Result<Arc<Shim>, BootError> {
    let events = EventLog::new(random_boot_id());
    let runtime: Arc<dyn Runtime> =
        Arc::new(super::simulated_runtime::SimulatedRuntime::new(plan, events.clone()));
    let growth = OutputWatcher::new(home, events.clone(), |_| {});
    let settings = TasksSettings::in_memory(home.to_owned(), Vec::new());
    let host = Arc::new(super::host_resources::NoHostResources { policy });
    let tasks = Tasks::open(settings, Arc::clone(&runtime), host, Arc::new(growth.clone()))
        .await
        .map_err(|source| BootError::Tasks { home: home.to_owned(), source })?;
    Ok(Arc::new(Shim {
        home: home.to_owned(),
        tasks,
        runtime,
        enrolment: EnrolmentFile::new(home),
        host_resources: None,
        events,
        growth,
        gpus: gpu::Inventory::default(),
        processes: windlass_api::agent::shim::ProcessesInfo {
            mode: ProcessMode::Own,
            confined_by: Some(windlass_api::agent::shim::ConfinementMethod::Users),
            problem: None,
        },
        data: home.to_owned(),
        problems: Mutex::new(Vec::new()),
        stop: stop.clone(),
    }))
}

/// Returns a random id for this start of the shim.
fn random_boot_id() -> String {
    let mut random = [0u8; 8];
    if getrandom::fill(&mut random).is_err() {
        // Early in the boot of a host there may be no entropy; the clock is unique enough for an id.
        random = crate::clock::now_us().to_ne_bytes();
    }
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn start_listeners(
    listeners: &mut JoinSet<()>,
    shim: &Arc<Shim>,
    socket: &Path,
    compat: Option<SocketAddr>,
) -> Result<(), BootError> {
    let what = format!("failed to listen on {}", socket.display());
    if let Some(parent) = socket.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.exists())
    {
        fs::DirBuilder::new().recursive(true).mode(HOME_MODE).create(parent).map_err(io_error(&what))?;
    }
    let listener = http::bind_unix(socket, SOCKET_MODE).map_err(io_error(what))?;
    listeners.spawn(http::serve(listener, api::socket_router(Arc::clone(shim)), shim.stop.clone()));
    if let Some(address) = compat {
        let listener =
            TcpListener::bind(address).await.map_err(io_error(format!("cannot bind {address}")))?;
        listeners.spawn(http::serve(listener, api::compat_router(Arc::clone(shim)), shim.stop.clone()));
    }
    Ok(())
}

async fn write_host_info(shim: &Arc<Shim>) -> Result<(), BootError> {
    let shim = Arc::clone(shim);
    let written = tokio::task::spawn_blocking(move || {
        let info = host::info::gather(&shim.data, &shim.gpus, shim.processes.clone())?;
        host::info::write_once(&shim.home, &info)
    });
    let written = written.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    written.map_err(io_error("failed to write host_info.json"))
}

/// Returns the reason why the container engine does not answer, if there is an engine and it does not.
pub(super) async fn engine_problem(shim: &Shim) -> Option<String> {
    if !matches!(shim.runtime.name(), "docker" | "any") {
        return None;
    }
    match tokio::time::timeout(ENGINE_RESPONSE_TIMEOUT, shim.runtime.found()).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("no response within {} s", ENGINE_RESPONSE_TIMEOUT.as_secs())),
    }
}

/// Checks the host periodically and reports changes.
async fn watch_health(shim: Arc<Shim>) {
    loop {
        let engine = engine_problem(&shim).await;
        let watched = HealthInputs {
            home: &shim.home,
            data: Some(&shim.data),
            engine: engine.as_deref(),
            gpus: &shim.gpus.gpus,
        };
        let mut problems = host::health::find_problems(&watched).await;
        problems.extend(shim.gpus.problems.iter().cloned());
        let changed = {
            let mut known = shim.problems.lock();
            let changed = *known != problems;
            known.clone_from(&problems);
            changed
        };
        if changed {
            shim.events.publish(ShimEventKind::Health { problems });
        }
        tokio::select! {
            () = tokio::time::sleep(HEALTH_CHECK_INTERVAL) => {}
            () = shim.stop.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot_config(home: &Path, socket: Option<&str>) -> BootConfig {
        BootConfig {
            home: home.to_owned(),
            socket: home.join("shim.sock"),
            runtime: None,
            docker_socket: socket.map(PathBuf::from),
            oci_program: None,
            oci_program_sha256: None,
            cdi_dirs: Vec::new(),
            processes: ProcessMode::default(),
            hidden: Vec::new(),
            policy: home.join("policy.yml"),
            compat_tcp: None,
            own_container: false,
            #[cfg(feature = "testing")]
            simulated: SimulationConfig::default(),
            write_host_info: false,
        }
    }

    #[test]
    fn the_lock_of_a_killed_shim_is_awaited_and_that_of_a_running_one_is_not() {
        let dir = windlass_testkit::temp_dir("lock").unwrap();
        let path = dir.path().join(LOCK_FILE);
        let held = fs::File::create(&path).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        fs::write(&path, format!("{}\n", std::process::id())).unwrap();
        assert!(matches!(lock_home(dir.path()), Err(BootError::Taken { .. })));
        // No process has this number.
        fs::write(&path, "4194305\n").unwrap();
        let home = dir.path().to_owned();
        let waiting = std::thread::spawn(move || lock_home(&home).is_ok());
        drop(held);
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn a_container_host_stays_one_and_a_process_host_becomes_one_when_an_engine_appears() {
        let dir = windlass_testkit::temp_dir("choose").unwrap();
        let note = dir.path().join(RUNTIME_FILE);
        for noted in ["docker", "any"] {
            fs::write(&note, noted).unwrap();
            let chosen = select_runtime(&boot_config(dir.path(), None)).unwrap();
            assert!(matches!(chosen, SelectedRuntime::Any(_)), "no engine answers, and {noted} was noted");
        }
        fs::write(&note, "process").unwrap();
        assert!(matches!(
            select_runtime(&boot_config(dir.path(), Some("/engine.sock"))).unwrap(),
            SelectedRuntime::Any(_)
        ));
        assert_eq!(fs::read_to_string(&note).unwrap(), "any");
        for noted in ["oci", "any-oci"] {
            fs::write(&note, noted).unwrap();
            let chosen = select_runtime(&boot_config(dir.path(), Some("/engine.sock"))).unwrap();
            assert!(matches!(chosen, SelectedRuntime::AnyOci), "its containers are not known to an engine");
        }
        fs::remove_file(&note).unwrap();
        let with_program =
            BootConfig { oci_program: Some("/opt/crun".into()), ..boot_config(dir.path(), None) };
        if find_docker_socket(None).is_none() {
            assert!(matches!(select_runtime(&with_program).unwrap(), SelectedRuntime::AnyOci));
        }
        let requested = BootConfig {
            runtime: Some(RuntimeName::Process),
            ..boot_config(dir.path(), Some("/engine.sock"))
        };
        assert!(
            matches!(select_runtime(&requested).unwrap(), SelectedRuntime::Process),
            "who asks for processes gets them"
        );
    }
}
