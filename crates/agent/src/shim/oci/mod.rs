//! Tasks as containers without an engine: images of the store (`crate::image`), run by `crun` or `runc`.
//!
//! Each container has a monitor (`monitor`), a process that outlives the shim and knows how the container ended. What a
//! shim needs to find a container again is in the directory of its task (`record`); nothing is kept in memory. The
//! processes of a container are found by its control groups, `windlass/HOME/TASK`.

pub(crate) mod attempt;
mod capabilities;
mod cdi;
mod config;
mod devices;
pub mod foreground;
mod lifecycle;
pub mod monitor;
mod network;
mod nvidia;
mod program;
mod pull;
mod record;
mod root_files;
pub mod rootless;
pub(crate) mod seccomp;

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use parking_lot::Mutex;
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    thread::{UnshareFlags, unshare_unsafe},
};
use windlass_api::agent::shim::{NetworkMode, Port, TaskSpec};
use windlass_model::{error_chain::format_chain, id::SubmissionId};

use lifecycle::PreparedMonitor;
pub use program::OciProgram;
use rootless::Rootless;

use super::{
    docker::{agent_binary::AgentBinary, copy_host_git, host_git, pull_access::PullAccessStore},
    runtime::{
        Exit, FoundTask, Handle, PreparedTask, ProgressCallback, RegistryAuth, Runtime, RuntimeError,
        RuntimeFuture, is_plain_process,
    },
};
use crate::{
    cgroup::{Hierarchies, task::TaskGroups},
    digest::sha256_hex,
    image::{ImageStore, StoreSettings},
    spool::Watcher,
    task_dir::{self, TaskDir},
};

/// Number of hexadecimal digits of the hash that identifies a shim's home.
const HOME_ID_LEN: usize = 12;
/// Suffix of the group that holds the groups of containers: those of plain processes are in another one.
const GROUP_SUFFIX: &str = "-oci";
const START_LOCKS: usize = 64;
const COLLECTION_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// Settings of the runtime.
#[derive(Clone, Debug)]
pub struct OciSettings {
    pub home: PathBuf,
    pub program: OciProgram,
    /// The agent's binary; a copy of it is mounted into every container.
    pub agent: PathBuf,
    /// Command that a container runs.
    pub entrypoint: Vec<String>,
    pub store: StoreSettings,
    /// Directories with specifications of the Container Device Interface.
    pub cdi_dirs: Vec<PathBuf>,
}

impl OciSettings {
    /// Settings of a shim at `home`: the current binary is the runner of its tasks.
    pub fn new(home: PathBuf, program: OciProgram) -> io::Result<Self> {
        let runner = [task_dir::AGENT_IN_CONTAINER, "runner", "--dir", task_dir::RUN_DIR_IN_CONTAINER];
        let entrypoint = runner.map(str::to_owned).to_vec();
        let agent = std::env::current_exe()?;
        let cdi_dirs = cdi::SPEC_DIRS.map(PathBuf::from).to_vec();
        Ok(Self { home, program, agent, entrypoint, store: StoreSettings::default(), cdi_dirs })
    }
}

/// Runtime of one shim.
#[derive(Clone, Debug)]
pub struct OciRuntime {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    home: PathBuf,
    /// Identifies `home` in names of groups.
    home_id: String,
    program: OciProgram,
    binary: AgentBinary,
    entrypoint: Vec<String>,
    store: ImageStore,
    cdi_dirs: Vec<PathBuf>,
    proofs: PullAccessStore,
    groups: TaskGroups,
    has_cgroup_v2: bool,
    /// Directory with the host's git for images that have none.
    git: Option<PathBuf>,
    /// Set if the agent is not root.
    rootless: Option<Rootless>,
    /// Reason why containers cannot have a separate network.
    network_problem: Option<String>,
    /// Monitors that wait for the permission to start their container.
    prepared: Mutex<HashMap<SubmissionId, PreparedMonitor>>,
    /// Watches the directories of tasks that start.
    watcher: Watcher,
    /// Serialize starts of one task: the record shows whether it was started before.
    starting: [Mutex<()>; START_LOCKS],
}

impl OciRuntime {
    /// Opens the image store and removes what no task uses. Blocks.
    pub fn open(settings: OciSettings) -> Result<Self, RuntimeError> {
        let failed = |error| io_error("failed to open the image store", error);
        let home = fs::canonicalize(&settings.home).map_err(failed)?;
        let binary = AgentBinary::install(&home, &settings.agent).map_err(failed)?;
        // The copy, which stays the same when the agent is upgraded.
        let store = ImageStore::open(home.join("oci"), binary.path().to_owned(), settings.store);
        let store = store.map_err(failed)?;
        let mut home_id = sha256_hex(home.as_os_str().as_encoded_bytes());
        home_id.truncate(HOME_ID_LEN);
        home_id.push_str(GROUP_SUFFIX);
        let hierarchies = Hierarchies::mounted().unwrap_or_default();
        let has_cgroup_v2 = hierarchies.v1.is_empty() && hierarchies.v2.is_some();
        let groups = TaskGroups::new(&home_id, hierarchies);
        let proofs = PullAccessStore::new(home.join("images"));
        let git = copy_host_git(&home);
        let rootless = Rootless::find();
        if rootless.is_some() {
            rootless::check(binary.path(), &home)
                .map_err(|problem| refused("failed to prepare containers without root", problem))?;
        }
        let network_problem = match &rootless {
            Some(rootless) => rootless.network_problem(),
            None => network::Bridge::probe().err().map(|error| error.to_string()),
        };
        if let Some(problem) = &network_problem {
            tracing::warn!(problem, "containers cannot have a separate network");
        }
        let shared = Shared {
            home,
            home_id,
            program: settings.program,
            binary,
            entrypoint: settings.entrypoint,
            store,
            cdi_dirs: settings.cdi_dirs,
            proofs,
            groups,
            has_cgroup_v2,
            git,
            rootless,
            network_problem,
            prepared: Mutex::default(),
            watcher: Watcher::default(),
            starting: [const { Mutex::new(()) }; START_LOCKS],
        };
        let runtime = Self { shared: Arc::new(shared) };
        runtime.shared.remove_unused();
        runtime.shared.refresh_network();
        Ok(runtime)
    }

    /// Removes unused images now and then, for as long as the runtime exists.
    pub fn collect_garbage_periodically(&self) {
        let shared = Arc::downgrade(&self.shared);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(COLLECTION_INTERVAL).await;
                let Some(shared) = shared.upgrade() else { return };
                let repeat = move || {
                    shared.remove_unused();
                    shared.refresh_network();
                };
                let _ = tokio::task::spawn_blocking(repeat).await;
            }
        });
    }

    /// Removes images beyond the limits after a pull.
    fn remove_unused_in_background(&self) {
        let shared = Arc::clone(&self.shared);
        tokio::task::spawn_blocking(move || shared.remove_unused());
    }

    /// Directory with the images.
    pub fn data(&self) -> PathBuf {
        self.shared.home.join("oci")
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
}

impl Shared {
    /// Returns the layers that containers use; `None`, with a log message, if that is unknown.
    fn layers_in_use(&self) -> Option<BTreeSet<String>> {
        let mut layers = BTreeSet::new();
        for task in self.task_dirs() {
            match record::ContainerRecord::load(&task) {
                Ok(record) => layers.extend(record.into_iter().flat_map(|record| record.layers)),
                Err(error) => {
                    tracing::warn!(%error, task = %task.id, "failed to read the record of a container");
                    return None;
                }
            }
        }
        Some(layers)
    }

    /// Removes unused images until another one of this size fits.
    fn make_space(&self, bytes: u64) -> Result<(), RuntimeError> {
        let removed = self.store.make_space(bytes, || self.layers_in_use());
        let removed = removed.map_err(|error| io_error("failed to remove unused images", error))?;
        tracing::info!(images = removed.images, bytes = removed.bytes, "removed images for another one");
        Ok(())
    }

    /// Removes images and copies of the agent that no container uses. Failures are logged: the next time tries again.
    fn remove_unused(&self) {
        let Some(layers) = self.layers_in_use() else { return };
        let (mut copies, mut gits) = (Vec::new(), Vec::new());
        for task in self.task_dirs() {
            copies.extend(lifecycle::mounted_path(&task, task_dir::AGENT_IN_CONTAINER));
            gits.extend(lifecycle::mounted_path(&task, task_dir::GIT_IN_CONTAINER));
        }
        self.binary.remove_unused(&copies);
        if let Some(git) = &self.git {
            host_git::remove_unused(git, &gits);
        }
        match self.store.collect_garbage(&layers) {
            Ok(removed) if removed.layers > 0 => {
                tracing::info!(images = removed.images, bytes = removed.bytes, "removed unused images");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "failed to remove unused images"),
        }
    }

    /// Restores the bridge if this host has one: another program may have removed its rules.
    fn refresh_network(&self) {
        if self.rootless.is_none()
            && network::Bridge::exists()
            && let Err(error) = network::Bridge::refresh()
        {
            tracing::warn!(%error, "failed to restore the network of containers");
        }
    }

    fn task_dirs(&self) -> Vec<TaskDir> {
        let entries = fs::read_dir(self.home.join("tasks")).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        ids.map(|id| TaskDir::new(&self.home, id)).collect()
    }
}

/// Returns whether the host whose files are at `root` has a container engine, whether or not it responds.
pub(crate) fn is_engine_installed(root: &Path) -> bool {
    const SIGNS: [&str; 8] = [
        "run/docker.sock",
        "run/podman/podman.sock",
        "usr/bin/dockerd",
        "usr/sbin/dockerd",
        "usr/local/bin/dockerd",
        "usr/local/sbin/dockerd",
        "snap/bin/docker",
        "lib/systemd/system/docker.service",
    ];
    std::env::var_os("DOCKER_HOST").is_some_and(|host| !host.is_empty())
        || SIGNS.iter().any(|sign| root.join(sign).symlink_metadata().is_ok())
}

/// Checks whether this process should run containers without an engine, with its files in `home`: there is no engine, and
/// everything that they need, with `program` if one was brought along. Blocks.
pub fn check_host(home: &Path, program: Option<&OciProgram>) -> Result<(), String> {
    // One that does not respond yet would own the containers of this host later.
    if is_engine_installed(Path::new("/")) {
        return Err("a container engine is installed".to_owned());
    }
    match program {
        Some(program) => program.verify().map_err(|error| error.to_string())?,
        None => drop(OciProgram::find().ok_or("neither `crun` nor `runc` is installed")?),
    }
    if !rustix::process::geteuid().is_root() {
        return rootless::check(Path::new("/proc/self/exe"), home);
    }
    check_overlay(home)
        .map_err(|error| format!("failed to mount an overlay in {}: {error}", home.display()))?;
    network::Bridge::probe().map_err(|error| error.to_string())
}

/// Mounts layers as a container does, in a mount namespace of a thread. Not every file system can hold them.
fn check_overlay(home: &Path) -> io::Result<()> {
    let mut random = [0; 6];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let scratch = home.join(format!(".overlay-{}", hex::encode(random)));
    for name in ["lower", "upper", "work", "merged"] {
        fs::create_dir_all(scratch.join(name))?;
    }
    let dir = scratch.clone();
    let attempt = move || -> io::Result<()> {
        #[expect(unsafe_code, reason = "a mount namespace affects one thread")]
        // SAFETY: this thread ends afterwards; other threads keep their mounts and working directory.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        std::env::set_current_dir(&dir)?;
        let options = c"lowerdir=lower,upperdir=upper,workdir=work";
        Ok(mount("overlay", "merged", "overlay", MountFlags::empty(), options)?)
    };
    let tried = std::thread::spawn(attempt).join();
    let removed = fs::remove_dir_all(&scratch);
    tried.unwrap_or_else(|_| Err(io::Error::other("failed to run a thread")))?;
    removed
}

fn io_error(what: impl Into<String>, source: io::Error) -> RuntimeError {
    let what = what.into();
    if source.kind() == io::ErrorKind::StorageFull {
        return RuntimeError::NoDisk { what };
    }
    RuntimeError::Failed { what, source: Box::new(source) }
}

fn refused(what: impl Into<String>, why: impl Into<String>) -> RuntimeError {
    RuntimeError::Refused { what: what.into(), why: why.into() }
}

impl Runtime for OciRuntime {
    fn name(&self) -> &'static str {
        "oci"
    }

    fn refusal(&self, spec: &TaskSpec) -> Option<String> {
        if is_plain_process(spec) {
            return Some("this host runs containers only, no plain processes".to_owned());
        }
        let problem =
            self.shared.network_problem.as_ref().filter(|_| spec.network_mode == NetworkMode::Bridge)?;
        Some(format!(
            "this host cannot give a container a separate network ({problem}): use the whole host, or have its \
             owner install Docker or Podman"
        ))
    }

    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        self.pull_image(&task.spec.image_name, auth, progress).boxed()
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        let task = task.clone();
        self.run_blocking("failed to create a container".to_owned(), move |shared| shared.create(&task))
            .boxed()
    }

    fn prepare_start<'a>(&'a self, task: &'a PreparedTask) -> BoxFuture<'a, ()> {
        let prepared = task.clone();
        let what = "failed to prepare the start of a container".to_owned();
        async move {
            if let Err(error) = self.run_blocking(what, move |shared| shared.prepare_start(&prepared)).await {
                tracing::debug!(error = format_chain(&error), task = %task.spec.id, "start not prepared");
            }
        }
        .boxed()
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, _handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        async move {
            let prepared = task.clone();
            let what = "failed to start a container".to_owned();
            self.run_blocking(what, move |shared| shared.start(&prepared)).await?;
            match task.spec.network_mode {
                NetworkMode::Host => self.host_network_ports(&task.dir).await,
                NetworkMode::Bridge => Self::published_ports(&task.dir),
            }
        }
        .boxed()
    }

    fn wait<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Exit> {
        self.wait_for_end(&task.dir, handle).boxed()
    }

    fn stop<'a>(&'a self, task: &'a TaskDir, _handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()> {
        self.stop_within(task, grace).boxed()
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, _handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        let dir = task.clone();
        self.run_blocking("failed to remove a container".to_owned(), move |shared| shared.remove(&dir))
            .boxed()
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        self.run_blocking("failed to list containers".to_owned(), |shared| {
            shared.found().map_err(|error| io_error("failed to list containers", error))
        })
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_is_installed_counts_although_it_does_not_respond() {
        let dir = windlass_testkit::temp_dir("signs").unwrap();
        let is_installed = || is_engine_installed(dir.path());
        if std::env::var_os("DOCKER_HOST").is_some() {
            return;
        }
        assert!(!is_installed());
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        fs::write(dir.path().join("usr/bin/podman"), "").unwrap();
        assert!(!is_installed(), "without its socket, Podman is no engine that runs");
        fs::write(dir.path().join("usr/bin/dockerd"), "").unwrap();
        assert!(is_installed());
        fs::remove_file(dir.path().join("usr/bin/dockerd")).unwrap();
        fs::create_dir_all(dir.path().join("run")).unwrap();
        std::os::unix::fs::symlink("/nowhere", dir.path().join("run/docker.sock")).unwrap();
        assert!(is_installed());
    }
}
