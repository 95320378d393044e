//! Containers of executors of the queue on hosts without an engine: the same images, networks and confinement as those of
//! tasks. They run in the foreground (`foreground`), below the guard of the attempt, and end with it.
//!
//! All executors of a user share one image store. They exclude each other by locks of files, since each is a process.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Write as _},
    net::IpAddr,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustix::{
    fs::{FlockOperation, flock},
    process::geteuid,
};
use serde_json::{Value, json};
use windlass_api::agent::shim::{NetworkMode, TaskSpec};
use windlass_registry::{Credentials, ImageName};

use super::{
    OciProgram, cdi, check_overlay,
    config::{Bundle, ContainerInputs, RootlessInputs, container_config},
    devices,
    foreground::REQUEST_FILE,
    io_error,
    lifecycle::{CONFIG_FILE, create_directories, find_account, open_files_max},
    monitor::StartRequest,
    network::{Bridge, NetworkRequest, UserNetworkRequest},
    pull::{ImageSource, pull_error},
    record::write_file,
    root_files,
    rootless::{self, Rootless},
};
use crate::{
    cgroup::Hierarchies,
    host::gpu::Gpu,
    image::{ImageStore, PullError, StoreSettings, StoredImage},
    shim::{
        docker::host_probe::MountTable,
        policy::Policy,
        runtime::{BindMount, PolicyLimits, PreparedTask, ProgressCallback, RuntimeError},
    },
    task_dir::{self, TaskDir},
};

/// Directory of the container, in that of the attempt.
pub(crate) const CONTAINER_DIR: &str = "container";
/// Group of the container below the one that the executor gives it.
pub(crate) const CONTAINER_GROUP: &str = "container";
const STORE_OF_ROOT: &str = "/var/lib/windlass/images";
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(20);
const HOSTNAME_LEN_MAX: usize = 63;
/// Key of Docker's registry in files with credentials.
const DOCKER_HUB: (&str, &str) = ("docker.io", "https://index.docker.io/v1/");

/// Directory of the images of this user's executors. On a disk of this host: overlay mounts need one.
pub(crate) fn default_store() -> PathBuf {
    let user = geteuid();
    if user.is_root() {
        return PathBuf::from(STORE_OF_ROOT);
    }
    PathBuf::from(format!("/var/tmp/windlass-images-{}", user.as_raw()))
}

/// Container of one attempt.
pub(crate) struct AttemptContainer<'a> {
    /// Directory of the attempt.
    pub(crate) dir: &'a Path,
    /// Unique on this host.
    pub(crate) name: &'a str,
    pub(crate) image: &'a str,
    pub(crate) command: &'a [String],
    /// `true` if every process gets the signal to stop, and not only the first one.
    pub(crate) stops_all: bool,
    /// Empty for that of the image.
    pub(crate) cwd: &'a str,
    pub(crate) binds: Vec<(PathBuf, String)>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) memory: Option<u64>,
    pub(crate) cpus: Option<u64>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) limits: PolicyLimits,
    pub(crate) network: NetworkMode,
    /// Control group below which that of the container is created.
    pub(crate) group: &'a str,
}

/// Means of this host to run containers of executors.
pub(crate) struct AttemptRuntime {
    program: OciProgram,
    rootless: Option<Rootless>,
    store: PathBuf,
    agent: PathBuf,
}

/// An image, whose layers stay in the store while this value lives.
pub(crate) struct ImageClaim {
    image: StoredImage,
    /// Directories of the layers, base layer first.
    layers: Vec<PathBuf>,
    path: PathBuf,
    _lock: File,
}

impl Drop for ImageClaim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl AttemptRuntime {
    /// Finds what containers need on this host, or the reason why it cannot run any with files in `dir`. Blocks.
    pub(crate) fn find(store: &Path, dir: &Path) -> Result<Self, String> {
        let program = OciProgram::find().ok_or("neither `crun` nor `runc` is installed")?;
        let agent = std::env::current_exe().map_err(|error| error.to_string())?;
        let rootless = Rootless::find();
        match &rootless {
            Some(_) => rootless::check(Path::new("/proc/self/exe"), dir)?,
            None => check_overlay(dir)
                .map_err(|error| format!("failed to mount an overlay in {}: {error}", dir.display()))?,
        }
        Ok(Self { program, rootless, store: store.to_owned(), agent })
    }

    /// Returns the network that a container can have: without root, a separate one needs a program.
    pub(crate) fn network(requested: NetworkMode) -> NetworkMode {
        match Rootless::find() {
            Some(own) if own.network_problem().is_some() => NetworkMode::Host,
            Some(_) | None => requested,
        }
    }

    /// Returns the address by which containers reach this host. Blocks.
    pub(crate) fn gateway(&self, network: NetworkMode) -> io::Result<Option<IpAddr>> {
        if network == NetworkMode::Host || self.rootless.is_some() {
            return Ok(None);
        }
        Ok(Some(IpAddr::V4(Bridge::ensure()?.gateway())))
    }

    /// Pulls an image unless it is here, and keeps it until the claim is dropped.
    pub(crate) async fn claim_image(
        &self,
        image: &str,
        attempt: &str,
        policy: &Policy,
    ) -> Result<ImageClaim, RuntimeError> {
        let failed = |error| io_error("failed to open the image store", error);
        let uses = self.store.join("uses");
        open_store(&self.store).and_then(|()| private_dir(&uses)).map_err(failed)?;
        let _alone = lock(&self.store.join("lock")).await.map_err(failed)?;
        let mut settings = StoreSettings::default();
        settings.apply(policy);
        let store = ImageStore::open(self.store.clone(), self.agent.clone(), settings).map_err(failed)?;
        let store = Arc::new(store);
        let source = ImageSource::parse(image)?;
        let here = match &source {
            // It may have changed.
            ImageSource::Local(_) => None,
            ImageSource::Registry(_) => store.find(&source.full()).map_err(failed)?,
        };
        let stored = match here {
            Some(here) => Ok(here),
            None => fetch_with_space(&store, &source, &uses).await.map_err(failed)?,
        };
        let stored = stored.map_err(|error| pull_error(image, error))?;
        store.touch(&stored).map_err(failed)?;
        let claim = claim(&store, &uses, attempt, stored).map_err(failed)?;
        let in_use = used_layers(&uses).map_err(failed)?;
        // A failure is not that of this container.
        if let Err(error) = store.collect_garbage(&in_use) {
            tracing::warn!(%error, "failed to remove unused images");
        }
        Ok(claim)
    }

    /// Writes the files of a container and returns the command that runs it. Its start errors go to `errors`. Blocks.
    pub(crate) fn prepare(
        &self,
        given: AttemptContainer<'_>,
        claim: &ImageClaim,
        errors: &Path,
    ) -> Result<Vec<String>, RuntimeError> {
        let failed = |error| io_error("failed to prepare a container", error);
        let config = &claim.image.config;
        let bundle = Bundle::at(given.dir.join(CONTAINER_DIR));
        create_directories(&bundle, &claim.layers).map_err(failed)?;
        let hostname = match given.network {
            NetworkMode::Host => root_files::hostname(),
            NetworkMode::Bridge => container_hostname(given.name),
        };
        root_files::write_network_files(&bundle, &hostname, given.network).map_err(failed)?;
        let account = find_account(&config.user, &claim.layers, self.rootless.as_ref())?;
        let mut entrypoint =
            [task_dir::AGENT_IN_CONTAINER, "child", "container-init"].map(str::to_owned).to_vec();
        entrypoint.extend(given.stops_all.then(|| "--all".to_owned()));
        entrypoint.push("--".to_owned());
        entrypoint.extend(given.command.iter().cloned());
        let agent = self.readable_agent(&bundle).map_err(failed)?;
        let name = given.name.to_owned();
        let cgroup = format!("{}/{CONTAINER_GROUP}", given.group);
        let cwd = if given.cwd.is_empty() { config.working_dir.clone() } else { given.cwd.to_owned() };
        let network = given.network;
        let task = prepared_task(given).map_err(failed)?;
        let gpus = devices::task_devices(&task, &cdi::SPEC_DIRS.map(PathBuf::from))?;
        let mounts = MountTable::read();
        let hierarchies = Hierarchies::mounted().unwrap_or_default();
        let inputs = ContainerInputs {
            entrypoint: &entrypoint,
            agent: &agent,
            run_dir: None,
            git: None,
            image_env: &config.environment,
            working_dir: &cwd,
            account: &account,
            rootfs: &bundle.rootfs(),
            files: &bundle.files(),
            hostname: &hostname,
            cgroup: &cgroup,
            has_cgroup_v2: hierarchies.v1.is_empty() && hierarchies.v2.is_some(),
            gpus: &gpus,
            open_files: open_files_max(),
            has_infiniband: devices::has_infiniband(),
            own_capabilities: &[],
            rootless: self.rootless.as_ref().map(|own| RootlessInputs { has_ids: own.map.id_count() > 1 }),
            notices: &[],
            is_shared: &|path: &Path| mounts.is_shared(path),
            locked_options: &|path: &Path| match self.rootless {
                Some(_) => rootless::locked_options(path),
                None => Vec::new(),
            },
        };
        // Only this user may read its variables.
        let path = bundle.root().join(CONFIG_FILE);
        let bytes = serde_json::to_vec(&container_config(&task, &inputs)).map_err(io::Error::from);
        bytes.and_then(|bytes| write_private(&path, &bytes)).map_err(failed)?;
        let request = self.start_request(name, hostname, network, claim.layers.len()).map_err(failed)?;
        write_file(&bundle.root().join(REQUEST_FILE), &request).map_err(failed)?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let words = [text(&self.agent), "child".to_owned(), "run-container".to_owned()];
        let options = ["--bundle".to_owned(), text(bundle.root()), "--errors".to_owned(), text(errors)];
        Ok(words.into_iter().chain(options).collect())
    }

    fn start_request(
        &self,
        id: String,
        hostname: String,
        network: NetworkMode,
        layers: usize,
    ) -> io::Result<StartRequest> {
        let is_bridged = network == NetworkMode::Bridge;
        let bridge = if is_bridged && self.rootless.is_none() { Some(Bridge::ensure()?) } else { None };
        let uplink = self.rootless.as_ref().and_then(|own| own.uplink.clone()).filter(|_| is_bridged);
        Ok(StartRequest {
            program: self.program.path.clone(),
            id,
            layers,
            enter: Vec::new(),
            home_id: String::new(),
            group: String::new(),
            hidden_mount: self.program.hidden_mount.clone(),
            hostname,
            network: bridge.map(|bridge| NetworkRequest { bridge, publish: Vec::new() }),
            map: self.rootless.as_ref().map(|own| own.map.clone()),
            user_network: uplink.map(|uplink| UserNetworkRequest { uplink, publish: Vec::new() }),
        })
    }

    /// Returns the path of this program that every user of a container may execute.
    fn readable_agent(&self, bundle: &Bundle) -> io::Result<PathBuf> {
        if fs::metadata(&self.agent)?.permissions().mode() & 0o005 == 0o005 {
            return Ok(self.agent.clone());
        }
        let copy = bundle.root().join("agent");
        fs::copy(&self.agent, &copy)?;
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o555))?;
        Ok(copy)
    }
}

/// Stores an image; if all images would exceed their limit, after those that no container uses were removed.
async fn fetch_with_space(
    store: &Arc<ImageStore>,
    source: &ImageSource,
    uses: &Path,
) -> io::Result<Result<StoredImage, PullError>> {
    let credentials = match source {
        ImageSource::Registry(name) => stored_credentials(name),
        ImageSource::Local(_) => None,
    };
    let progress: ProgressCallback = Arc::new(|_| {});
    let fetched = source.fetch(store, credentials.as_ref(), Arc::clone(&progress)).await;
    let Err(PullError::Full { bytes, .. }) = &fetched else { return Ok(fetched) };
    let (emptied, bytes, uses) = (Arc::clone(store), *bytes, uses.to_owned());
    let removed = tokio::task::spawn_blocking(move || {
        let in_use = used_layers(&uses)?;
        emptied.make_space(bytes, || Some(in_use))
    });
    removed.await.map_err(io::Error::other)??;
    Ok(source.fetch(store, credentials.as_ref(), progress).await)
}

fn prepared_task(given: AttemptContainer<'_>) -> io::Result<PreparedTask> {
    let bind = |(source, target)| BindMount { source, target, read_only: false };
    #[expect(clippy::cast_precision_loss, reason = "numbers of cores are small")]
    let cpu = given.cpus.unwrap_or(0) as f64;
    let spec: TaskSpec = serde_json::from_value(json!({
        "id": uuid::Uuid::nil(), "name": given.name, "image_name": given.image, "network_mode": given.network,
        "memory": given.memory.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(0), "cpu": cpu,
    }))?;
    Ok(PreparedTask {
        dir: TaskDir::new(given.dir, spec.id),
        spec,
        gpus: given.gpus,
        binds: given.binds.into_iter().map(bind).collect(),
        publish: Vec::new(),
        limits: given.limits,
        env: given.env,
    })
}

fn container_hostname(name: &str) -> String {
    let name: String =
        name.chars().map(|sign| if sign.is_ascii_alphanumeric() { sign } else { '-' }).collect();
    let end = name.len().saturating_sub(HOSTNAME_LEN_MAX);
    name[end..].trim_start_matches('-').to_owned()
}

fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Creates the directory of the store. Another user could have created it in a directory that everyone may write.
fn open_store(path: &Path) -> io::Result<()> {
    // Other directories are next to it, so the parent keeps the default mode.
    if let Some(above) = path.parent() {
        fs::create_dir_all(above)?;
    }
    private_dir(path)?;
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
        let why = format!("{} is not a directory that only this user may write", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    options.create(true).truncate(true).write(true).mode(0o600).open(path)?.write_all(bytes)
}

fn open_lock(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).read(true).mode(0o600).open(path)
}

/// Waits until no other executor has the lock. Another one may be pulling an image.
async fn lock(path: &Path) -> io::Result<File> {
    let file = open_lock(path)?;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => tokio::time::sleep(LOCK_RETRY_DELAY).await,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Keeps the layers of an image for an attempt. The kernel drops the lock of an executor that is killed.
fn claim(store: &ImageStore, uses: &Path, attempt: &str, image: StoredImage) -> io::Result<ImageClaim> {
    let path = uses.join(attempt);
    let mut file = open_lock(&path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.set_len(0)?;
    file.write_all(&serde_json::to_vec(&image.layers)?)?;
    let layers = image.layers.iter().map(|key| store.layer_files(key)).collect();
    Ok(ImageClaim { image, layers, path, _lock: file })
}

/// Returns the layers of all containers, and removes the claims of executors that are dead.
fn used_layers(uses: &Path) -> io::Result<BTreeSet<String>> {
    let mut layers = BTreeSet::new();
    for entry in fs::read_dir(uses)? {
        let path = entry?.path();
        // The executor may have ended meanwhile.
        let Ok(file) = File::open(&path) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
            fs::remove_file(&path)?;
        } else {
            let keys: Vec<String> = serde_json::from_slice(&fs::read(&path)?)?;
            layers.extend(keys);
        }
    }
    Ok(layers)
}

/// Returns the credentials with which this user has logged in to a registry with Docker or Podman.
fn stored_credentials(image: &ImageName) -> Option<Credentials> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = variable("HOME");
    let files = [
        variable("REGISTRY_AUTH_FILE"),
        variable("DOCKER_CONFIG").map(|dir| dir.join("config.json")),
        variable("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json")),
        home.map(|home| home.join(".docker/config.json")),
    ];
    let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
    files.into_iter().flatten().filter_map(read).find_map(|file| find_credentials(&file, image))
}

fn find_credentials(file: &Value, image: &ImageName) -> Option<Credentials> {
    let registry = image.registry().to_string();
    let hub = (registry == DOCKER_HUB.0).then_some(DOCKER_HUB.1);
    let known =
        std::iter::once(registry.as_str()).chain(hub).find_map(|key| file["auths"][key]["auth"].as_str())?;
    let text = String::from_utf8(BASE64_STANDARD.decode(known).ok()?).ok()?;
    let (username, password) = text.split_once(':')?;
    Some(Credentials { username: username.to_owned(), password: password.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_in_use_while_their_executor_lives() {
        let dir = windlass_testkit::temp_dir("uses").unwrap();
        let live = open_lock(&dir.path().join("a.1")).unwrap();
        flock(&live, FlockOperation::NonBlockingLockExclusive).unwrap();
        fs::write(dir.path().join("a.1"), r#"["x", "y"]"#).unwrap();
        fs::write(dir.path().join("dead.1"), r#"["z"]"#).unwrap();
        let used = || used_layers(dir.path()).unwrap().into_iter().collect::<Vec<_>>();
        assert_eq!(used(), ["x", "y"]);
        assert!(!dir.path().join("dead.1").exists());
        drop(live);
        assert_eq!(used(), Vec::<String>::new());
    }

    #[test]
    fn a_store_that_others_may_write_is_refused() {
        let dir = windlass_testkit::temp_dir("store").unwrap();
        let store = dir.path().join("images");
        open_store(&store).unwrap();
        fs::set_permissions(&store, fs::Permissions::from_mode(0o777)).unwrap();
        let error = open_store(&store).unwrap_err();
        assert!(error.to_string().contains("only this user"), "{error}");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(open_store(&link).is_err());
    }

    #[test]
    fn credentials_are_those_of_a_login_to_the_registry_of_the_image() {
        let auth = BASE64_STANDARD.encode("ann:a:b");
        let file = json!({"auths": {
            "ghcr.io": {"auth": auth}, "https://index.docker.io/v1/": {"auth": BASE64_STANDARD.encode("hub:c")},
            "odd.io": {"auth": "?"},
        }});
        let found = |image: &str| {
            let found = find_credentials(&file, &image.parse().unwrap())?;
            Some(format!("{} {}", found.username, found.password))
        };
        assert_eq!(found("ghcr.io/team/x").as_deref(), Some("ann a:b"));
        assert_eq!(found("debian:12").as_deref(), Some("hub c"));
        assert_eq!((found("quay.io/x/y"), found("odd.io/x/y")), (None, None));
    }

    #[test]
    fn the_host_name_of_a_container_is_valid_whatever_the_attempt_is_called() {
        assert_eq!(container_hostname("zzzzz-dz642-000000000000001.12"), "zzzzz-dz642-000000000000001-12");
        assert_eq!(container_hostname(&".a".repeat(50)), format!("a{}", "-a".repeat(31)));
    }
}
