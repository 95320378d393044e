//! Tasks as containers of an engine with Docker's API: Docker itself, or Podman's service.
//!
//! Everything needed to find a container again is stored in its labels, so this module keeps nothing in memory that a
//! restart would lose. Calls are bounded: an engine that does not respond is `Away`, and repeated calls are idempotent.
//! The decisions are in `container`, `ending`, `failure`, `progress` and `reference`, which do no I/O.

pub(in crate::shim) mod agent_binary;
mod container;
mod container_ops;
mod control_group;
mod error_map;
mod exit_reason;
pub(in crate::shim) mod host_git;
pub(in crate::shim) mod host_probe;
mod network;
mod oom;
mod progress;
mod pull;
pub(in crate::shim) mod pull_access;
mod reference;
mod restricted_binds;

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bollard::{
    API_DEFAULT_VERSION, BollardRequest, Docker as Engine,
    errors::Error,
    models::{ContainerCreateBody, ImageInspect},
    query_parameters::CreateContainerOptionsBuilder,
};
use futures_util::{FutureExt, future::BoxFuture};
use hyper::header::HeaderValue;
use rustix::fs::{AtFlags, Mode, OFlags};

use windlass_api::agent::shim::{NetworkMode, Port, TaskSpec};
use windlass_model::id::SubmissionId;

pub(in crate::shim) use self::container::container_name;
use self::{
    agent_binary::AgentBinary,
    container::{EngineFacts, HostLookup},
    container_ops::InspectError,
    network::Bridge,
    pull::ImagePull,
    pull_access::PullAccessStore,
    reference::ImageReference,
    restricted_binds::RestrictedBinds,
};
pub(crate) use self::{
    container::{ContainerConfinement, container_confinement},
    network::{NETWORK, create_command, shield, shield_subnets},
};
use super::{
    disk_limit,
    oci::seccomp::write_profile,
    runtime::{
        Exit, FoundTask, Handle, PreparedTask, ProgressCallback, RegistryAuth, Runtime, RuntimeError,
        RuntimeFuture, is_plain_process,
    },
};
use crate::{
    digest::sha256_hex,
    task_dir::{self, ImageConfig, TaskDir},
};

/// Maximum time for the engine to respond to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for calls that read or write a record. Longer calls have separate limits.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Delay before a container in a transient state is inspected again.
const UNKNOWN_STATE_RETRY_DELAY: Duration = Duration::from_millis(20);
/// Timeout of the client: longer than all timeouts of this module, so that those apply.
const CLIENT_TIMEOUT_SECS: u64 = 24 * 60 * 60;
const PULL_STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Podman's limits: the one that it requests by default, and the one that its service sets for itself.
const PODMAN_NOFILE_MAX: i64 = 1_048_576;
const PODMAN_NPROC_MAX: i64 = 32_768;
/// Directories that are searched for the host's git if the agent has no `PATH`.
const HOST_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// First version of the API in which read-only mounts are recursive.
const RECURSIVE_READ_ONLY_VERSION: (usize, usize) = (1, 44);

/// Connection to an engine and contents of its containers.
#[derive(Clone, Debug)]
pub struct DockerSettings {
    pub socket: PathBuf,
    pub home: PathBuf,
    /// The agent's binary; a copy of it is mounted into every container.
    pub agent: PathBuf,
    /// Command that a container runs.
    pub entrypoint: Vec<String>,
    /// Maximum time of a pull without progress.
    pub stall: Duration,
}

impl DockerSettings {
    /// Settings of a shim at `home`: the current binary is the runner of its tasks.
    pub fn new(socket: PathBuf, home: PathBuf) -> io::Result<Self> {
        let runner = [task_dir::AGENT_IN_CONTAINER, "runner", "--dir", task_dir::RUN_DIR_IN_CONTAINER];
        let entrypoint = runner.map(str::to_owned).to_vec();
        Ok(Self { socket, home, agent: std::env::current_exe()?, entrypoint, stall: PULL_STALL_TIMEOUT })
    }
}

/// Runtime that uses a container engine.
#[derive(Clone)]
pub struct DockerRuntime {
    engine: Engine,
    socket: Arc<Path>,
    is_podman: bool,
    binary: Arc<AgentBinary>,
    proofs: Arc<PullAccessStore>,
    network: Arc<Bridge>,
    around: Arc<EngineFacts>,
    stall: Duration,
}

impl DockerRuntime {
    /// Connects to the engine and negotiates a version. `Away` if it does not respond.
    pub async fn connect(settings: DockerSettings) -> Result<Self, RuntimeError> {
        let what = format!("failed to connect to the container engine at {}", settings.socket.display());
        let away = |error: Error| RuntimeError::Away { what: what.clone(), source: Box::new(error) };
        let path = settings.socket.to_string_lossy();
        let engine =
            Engine::connect_with_unix(&path, CLIENT_TIMEOUT_SECS, API_DEFAULT_VERSION).map_err(away)?;
        let engine = engine.with_request_modifier(url_safe_credentials);
        let greeting = async {
            let engine = engine.negotiate_version().await?;
            let version = engine.version().await?;
            Ok((engine, version))
        };
        let greeted = tokio::time::timeout(PING_TIMEOUT, greeting).await;
        let (engine, version) = greeted.map_err(|_| error_map::timed_out(what.clone()))?.map_err(away)?;
        let parts = version.components.unwrap_or_default();
        let is_podman = parts.iter().any(|part| part.name.contains("Podman"));

        let (home, agent, socket) = (settings.home.clone(), settings.agent.clone(), settings.socket.clone());
        let installed = tokio::task::spawn_blocking(move || {
            let home = std::fs::canonicalize(&home)?;
            let binary = AgentBinary::install(&home, &agent)?;
            let binds = prepare_restricted_binds(&home, &socket, is_podman);
            Ok::<_, io::Error>((copy_host_git(&home), home, binary, binds))
        });
        let failed = |source| error_map::from_io_error("failed to copy the agent for tasks", source);
        let (git, home, binary, restricted_binds) =
            installed.await.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)?;
        let facts = gather_facts(&engine, is_podman, &home, settings.entrypoint);
        let around = EngineFacts { git, restricted_binds, ..facts };
        let docker = Self {
            engine,
            socket: settings.socket.into(),
            is_podman,
            binary: Arc::new(binary),
            proofs: Arc::new(PullAccessStore::new(home.join("images"))),
            network: Arc::default(),
            around: Arc::new(around),
            stall: settings.stall,
        };
        // A copy that is not known to be unused stays; the next start tries again.
        if let Ok(used) = docker.mounted_sources().await {
            docker.binary.remove_unused(&used);
            if let Some(git) = &docker.around.git {
                host_git::remove_unused(git, &used);
            }
        }
        Ok(docker)
    }

    /// Returns the directory where the engine stores images, if it is a directory of this host.
    pub async fn data(&self) -> Option<PathBuf> {
        let info = tokio::time::timeout(PING_TIMEOUT, self.engine.info()).await.ok()?.ok()?;
        info.docker_root_dir.map(PathBuf::from).filter(|path| path.is_dir())
    }

    async fn create_container(&self, task: &PreparedTask) -> Result<Handle, RuntimeError> {
        let name = container::container_name(&task.spec.name, task.spec.id);
        let what = || format!("failed to create container {name}");
        let network = match task.spec.network_mode {
            NetworkMode::Bridge => Some(self.network.ensure(&self.engine, self.is_podman).await?),
            NetworkMode::Host => None,
        };
        let shielded = async {
            if let Some(network) = network {
                network.block_metadata().await;
            }
        };
        if self.is_podman && !task.spec.privileged {
            write_profile(&container::filter_file(&task.dir), &task.limits.capabilities)
                .map_err(|source| error_map::from_io_error(what(), source))?;
        }
        self.with_restricted_binds(what(), task, |binds, task| {
            binds.create_mount_points(task.spec.id, &task.binds)
        })
        .await?;
        let body = self.body(task);
        let image = ImageReference::parse(&task.spec.image_name).full();
        // The image is inspected and the firewall configured while the engine creates the container; none waits for the
        // others. All of it completes before the container is started.
        let described = call_with_timeout(what(), self.engine.inspect_image(&image)).boxed();
        let (made, described, ()) =
            tokio::join!(self.create_or_find(task, &name, body), described, shielded.boxed());
        let handle = made?;
        let described = described?.map_err(|error| error_map::from_call_error(what(), error))?;
        write_image_config(&task.dir, &image_config(described))
            .map_err(|source| error_map::from_io_error(what(), source))?;
        Ok(handle)
    }

    /// Does nothing for a task without binds, or where the agent may not mount for the engine.
    async fn with_restricted_binds(
        &self,
        what: String,
        task: &PreparedTask,
        action: impl FnOnce(&RestrictedBinds, &PreparedTask) -> io::Result<()> + Send + 'static,
    ) -> Result<(), RuntimeError> {
        let Some(binds) = self.around.restricted_binds.clone().filter(|_| !task.binds.is_empty()) else {
            return Ok(());
        };
        let task = task.clone();
        let done = tokio::task::spawn_blocking(move || action(&binds, &task)).await;
        done.unwrap_or_else(|error| Err(io::Error::other(error)))
            .map_err(|source| error_map::from_io_error(what, source))
    }

    fn body(&self, task: &PreparedTask) -> ContainerCreateBody {
        let mounts = host_probe::MountTable::read();
        let lookup =
            HostLookup { is_shared: &|path| mounts.is_shared(path), group: &host_probe::device_group };
        container::create_body(task, self.binary.path(), &self.around, &lookup)
    }

    async fn create_or_find(
        &self,
        task: &PreparedTask,
        name: &str,
        body: ContainerCreateBody,
    ) -> Result<Handle, RuntimeError> {
        let what = || format!("failed to create container {name}");
        let options = CreateContainerOptionsBuilder::default().name(name).build();
        let made =
            call_with_timeout(what(), self.engine.create_container(Some(options), body)).boxed().await?;
        match made {
            Ok(made) => Ok(Handle { name: name.to_owned(), id: made.id }),
            Err(error) if is_name_taken(&error) => self.find_existing(task, name).await,
            Err(error) if is_image_missing(&error) => {
                Err(RuntimeError::NoImage { what: task.spec.image_name.clone() })
            }
            Err(error) => Err(error_map::from_call_error(what(), error)),
        }
    }

    /// Handles a name that is in use: by an earlier attempt of this shim, or by a container that must not be touched.
    async fn find_existing(&self, task: &PreparedTask, name: &str) -> Result<Handle, RuntimeError> {
        let refused = |why: &str| RuntimeError::Refused {
            what: format!("failed to create container {name}"),
            why: why.to_owned(),
        };
        let seen = match container_ops::inspect(&self.engine, name).await {
            Ok(seen) => seen,
            Err(InspectError::NotFound) => return Err(refused("its name was in use until just now")),
            Err(InspectError::Failed(error)) => return Err(error),
        };
        let labels = seen.config.and_then(|config| config.labels).unwrap_or_default();
        let is = |label: &str, value: &str| labels.get(label).is_some_and(|found| found == value);
        if !is(container::TASK_ID_LABEL, &task.spec.id.to_string())
            || !is(container::HOME_LABEL, &self.around.home)
        {
            return Err(refused("its name is in use by another container"));
        }
        let id = seen.id.ok_or_else(|| refused("the engine returned no id"))?;
        Ok(Handle { name: name.to_owned(), id })
    }
}

/// Copies the host's git. Without it, repositories need an image that has git.
pub(in crate::shim) fn copy_host_git(home: &Path) -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_else(|| HOST_PATH.into());
    host_git::install(home, &search).unwrap_or_else(|error| {
        tracing::warn!(%error, "failed to copy the host's git for images without git");
        None
    })
}

/// Limits of containers of Podman, which raises them by default and fails where it lacks permission. These are the limits
/// that it can grant; its service lowers the second one for itself.
pub(crate) fn podman_ulimits() -> Vec<(&'static str, i64)> {
    let own = |which, most: i64| {
        let limit = rustix::process::getrlimit(which).maximum;
        limit.and_then(|limit| i64::try_from(limit).ok()).map_or(most, |limit| limit.min(most))
    };
    vec![
        ("nofile", own(rustix::process::Resource::Nofile, PODMAN_NOFILE_MAX)),
        ("nproc", own(rustix::process::Resource::Nproc, PODMAN_NPROC_MAX)),
    ]
}

/// Unmounts what a killed agent left for tasks that no longer exist. `None` if the agent may not mount for the engine.
fn prepare_restricted_binds(home: &Path, socket: &Path, is_podman: bool) -> Option<RestrictedBinds> {
    let prepared = RestrictedBinds::probe(home, socket, is_podman).and_then(|binds| {
        let exists = |id: SubmissionId| TaskDir::new(home, id).root().exists();
        binds.unmount_unused(|task| task.parse().is_ok_and(exists))?;
        Ok(binds)
    });
    prepared
        .inspect_err(|error| {
            tracing::warn!(%error, "cannot mount directories of the host with `nosuid` and `nodev` for containers");
        })
        .ok()
}

fn gather_facts(engine: &Engine, is_podman: bool, home: &Path, entrypoint: Vec<String>) -> EngineFacts {
    let version = engine.client_version();
    EngineFacts {
        home: sha256_hex(home.as_os_str().as_encoded_bytes()).chars().take(16).collect(),
        entrypoint,
        recursive_read_only: (version.major_version, version.minor_version) >= RECURSIVE_READ_ONLY_VERSION,
        ulimits: if is_podman { podman_ulimits() } else { Vec::new() },
        has_infiniband: Path::new("/dev/infiniband").is_dir(),
        git: None,
        restricted_binds: None,
        is_podman,
        has_nvidia: Path::new("/proc/driver/nvidia").exists() || Path::new("/dev/nvidiactl").exists(),
    }
}

/// Makes a bounded call. The outer error means that the engine did not respond in time.
async fn call_with_timeout<T>(
    what: impl Into<String>,
    requested: impl Future<Output = Result<T, Error>>,
) -> Result<Result<T, Error>, RuntimeError> {
    tokio::time::timeout(CALL_TIMEOUT, requested).await.map_err(|_| error_map::timed_out(what))
}

/// Makes a bounded call and repeats it while the response contains a state that the client does not know: Podman has
/// additional ones (`stopped`, `initialized`), in which a container remains only for moments.
async fn call_until_known_state<T, F: Future<Output = Result<T, Error>>>(
    what: impl Into<String>,
    mut question: impl FnMut() -> F,
) -> Result<Result<T, Error>, RuntimeError> {
    let flushed = async {
        loop {
            match question().await {
                Err(Error::JsonDataError { message, .. }) if message.contains("unknown variant") => {
                    tokio::time::sleep(UNKNOWN_STATE_RETRY_DELAY).await;
                }
                other => return other,
            }
        }
    };
    call_with_timeout(what, flushed).await
}

/// Rewrites credentials as URL-safe base64. The client sends plain base64, which engines treat as no credentials at
/// all: a password with an inconvenient `?` or `~` would be refused.
fn url_safe_credentials(mut request: BollardRequest) -> BollardRequest {
    if let Some(value) = request.headers_mut().get_mut("x-registry-auth")
        && let Ok(text) = value.to_str()
        && let Ok(mut safe) = HeaderValue::from_str(&text.replace('+', "-").replace('/', "_"))
    {
        safe.set_sensitive(true);
        *value = safe;
    }
    request
}

/// Returns whether the name is in use. Podman has no separate status for that.
fn is_name_taken(error: &Error) -> bool {
    match error_map::error_status(error) {
        Some(409) => true,
        Some(500) => error_map::engine_message(error).contains("already in use"),
        Some(_) | None => false,
    }
}

fn is_image_missing(error: &Error) -> bool {
    let message = error_map::engine_message(error).to_lowercase();
    error_map::error_status(error) == Some(404)
        && (message.contains("no such image") || message.contains("image not known"))
}

fn image_config(image: ImageInspect) -> ImageConfig {
    let config = image.config.unwrap_or_default();
    ImageConfig {
        entrypoint: config.entrypoint.unwrap_or_default(),
        cmd: config.cmd.unwrap_or_default(),
        workdir: config.working_dir.unwrap_or_default(),
        user: config.user.unwrap_or_default(),
    }
}

/// Writes the command of the image for the runner. The job may own the directory by now, so the file is created under a
/// directory handle and then renamed: links made by the job are not followed.
pub(in crate::shim) fn write_image_config(task: &TaskDir, config: &ImageConfig) -> io::Result<()> {
    let half = ".image.json";
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(task.run(), flags | OFlags::RDONLY, Mode::empty())?;
    match rustix::fs::unlinkat(&dir, half, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&dir, half, flags, Mode::from(0o644))?;
    io::Write::write_all(&mut std::fs::File::from(file), &serde_json::to_vec(config)?)?;
    Ok(rustix::fs::renameat(&dir, half, &dir, task_dir::IMAGE_CONFIG)?)
}

impl Runtime for DockerRuntime {
    fn name(&self) -> &'static str {
        "docker"
    }

    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        let image = ImageReference::parse(&task.spec.image_name);
        ImagePull { engine: &self.engine, proofs: &self.proofs, stall: self.stall, image, auth, progress }
            .run()
            .boxed()
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        self.create_container(task).boxed()
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        self.start_once(task, handle).boxed()
    }

    fn wait<'a>(&'a self, _task: &'a PreparedTask, handle: &'a Handle) -> RuntimeFuture<'a, Exit> {
        self.wait_for_end(handle).boxed()
    }

    fn refusal(&self, spec: &TaskSpec) -> Option<String> {
        is_plain_process(spec).then(|| "this host runs containers only, no plain processes".to_owned())
    }

    fn goes_away<'a>(&'a self, _spec: &'a TaskSpec) -> BoxFuture<'a, bool> {
        self.is_engine_shutting_down().boxed()
    }

    fn stop<'a>(&'a self, _task: &'a TaskDir, handle: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()> {
        self.stop_within(handle, grace).boxed()
    }

    fn disk_used<'a>(&'a self, task: &'a TaskDir, handle: &'a Handle) -> RuntimeFuture<'a, u64> {
        async move {
            let below = disk_limit::disk_usage(task.root().to_owned()).await?;
            Ok(below.saturating_add(container_ops::written_bytes(&self.engine, &handle.id).await?))
        }
        .boxed()
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        self.remove_all(task, handle).boxed()
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        self.find_containers().boxed()
    }
}
