//! Lifecycle of a container, from its creation to its removal.

use std::{
    fs, io,
    io::{Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{fs::DirBuilderExt as _, net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::process::{Resource, Signal, getrlimit};
use windlass_api::agent::{
    SSH_PORT,
    shim::{NetworkMode, Port},
};
use windlass_model::id::SubmissionId;

use super::{
    OciRuntime, Shared,
    capabilities::own_capabilities,
    config::{Bundle, ContainerInputs, RootlessInputs, container_config, parse_user},
    devices, io_error,
    monitor::{self, StartReply, StartRequest},
    network::{Bridge, NetworkRequest, UserNetworkRequest},
    pull::ImageSource,
    record::{
        ContainerEnd, ContainerRecord, END_FILE, NEVER_STARTED_FILE, PORTS_FILE, PROCESS_FILE, read_file,
    },
    refused, root_files,
    rootless::{self, Rootless},
};
use crate::{
    cgroup::{
        cloud_metadata,
        task::{TaskLimits, remove_from_all_hierarchies},
    },
    image::StoredImage,
    isolation::user_map,
    proc::{self, ProcessHandle, ProcessId},
    runner::user::{Account, UserDatabase},
    safe_open::DirHandle,
    shim::{
        docker::{container_name, host_probe::MountTable, write_image_config},
        runtime::{Exit, FoundState, FoundTask, Handle, LossReason, PreparedTask, RuntimeError},
    },
    task_dir::{self, ImageConfig, TaskDir},
};

/// Mounts and the OCI runtime take milliseconds; a network file system may hang without limit.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// A process that still exists this long after it was killed is stuck in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);
const KILL_RETRY_DELAY: Duration = Duration::from_millis(5);
/// Maximum time for a runner to report the port of its SSH server.
const PORT_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval of looks where the kernel has no more watches.
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(1);
const PORT_WATCH_INTERVAL: Duration = Duration::from_millis(50);
const TAIL_LINES: usize = 5;
const TAIL_LINE_MAX: usize = 2048;
const REPLY_BYTES_MAX: u64 = 16 << 10;
const HOSTNAME_LEN_MAX: usize = 63;
pub(super) const CONFIG_FILE: &str = "config.json";
/// Group of the container, and that of its monitor, below the group of the task.
const CONTAINER_GROUP: &str = "container";
const MONITOR_GROUP: &str = "monitor";

fn handle_for(record: &ContainerRecord, task: &TaskDir) -> Handle {
    Handle { name: record.name.clone(), id: task.id.to_string() }
}

fn load_record(task: &TaskDir) -> Result<Option<ContainerRecord>, RuntimeError> {
    ContainerRecord::load(task).map_err(|error| io_error("failed to read the record of a container", error))
}

fn load_end(task: &TaskDir) -> Result<Option<ContainerEnd>, RuntimeError> {
    read_file(&Bundle::new(task).root().join(END_FILE))
        .map_err(|error| io_error("failed to read the end of a container", error))
}

/// Returns the process, if it is still the one that was started and has not been reaped.
fn open_process(record: &ContainerRecord, process: Option<ProcessId>) -> io::Result<Option<ProcessHandle>> {
    let is_this_boot = proc::boot_id().is_ok_and(|boot| boot == record.boot);
    match process.filter(|_| is_this_boot) {
        Some(process) => ProcessHandle::open(process),
        None => Ok(None),
    }
}

/// Returns the monitor of a container, unless it has ended.
fn open_monitor(record: &ContainerRecord) -> Result<Option<ProcessHandle>, RuntimeError> {
    let monitor = open_process(record, record.monitor)
        .map_err(|error| io_error("failed to find the monitor of a container", error))?;
    Ok(monitor.filter(|monitor| !monitor.ended(Duration::ZERO).unwrap_or(true)))
}

/// Returns whether a monitor was started but the shim ended before it requested a start: nothing ever ran.
fn was_never_started(task: &TaskDir) -> bool {
    Bundle::new(task).root().join(NEVER_STARTED_FILE).exists()
}

/// Returns the path of the host that is mounted at this path of the container.
pub(super) fn mounted_path(task: &TaskDir, target: &str) -> Option<PathBuf> {
    let config: serde_json::Value = read_file(&Bundle::new(task).root().join(CONFIG_FILE)).ok().flatten()?;
    let mounts = config["mounts"].as_array()?;
    let mount = mounts.iter().find(|one| one["destination"] == target)?;
    Some(PathBuf::from(mount["source"].as_str()?))
}

/// Monitor that has no permission to start its container yet. If it is dropped, the monitor ends, and with it all that it
/// has prepared.
#[derive(Debug)]
pub(super) struct PreparedMonitor {
    socket: UnixStream,
    child: Child,
    is_released: bool,
}

impl PreparedMonitor {
    /// Leaves the monitor alone: it has the permission, and may have started its container.
    fn release(mut self) {
        self.is_released = true;
    }
}

impl Drop for PreparedMonitor {
    fn drop(&mut self) {
        if !self.is_released {
            let _ = self.socket.shutdown(Shutdown::Both);
            let _ = self.child.wait();
        }
    }
}

impl Shared {
    /// Writes the configuration of a container. Its processes, groups and mounts are made by its start.
    pub(super) fn create(&self, task: &PreparedTask) -> Result<Handle, RuntimeError> {
        if let Some(record) = load_record(&task.dir)? {
            return Ok(handle_for(&record, &task.dir));
        }
        let name = container_name(&task.spec.name, task.spec.id);
        let what = || format!("failed to create container {name}");
        let image = self.find_image(task)?;
        let bundle = Bundle::new(&task.dir);
        let failed = |error| io_error(what(), error);
        let layers: Vec<PathBuf> = image.layers.iter().map(|key| self.store.layer_files(key)).collect();
        create_directories(&bundle, &layers).map_err(failed)?;
        let hostname = container_hostname(task);
        root_files::write_network_files(&bundle, &hostname, task.spec.network_mode).map_err(failed)?;
        let account = find_account(&task.spec.container_user, &layers, self.rootless.as_ref())?;
        let gpus = devices::task_devices(task, &self.cdi_dirs)?;
        let mounts = MountTable::read();
        let notices = self.unenforced_limits(task);
        let inputs = ContainerInputs {
            entrypoint: &self.entrypoint,
            agent: self.binary.path(),
            run_dir: Some(&task.dir.run()),
            git: self.git.as_deref(),
            image_env: &image.config.environment,
            working_dir: &image.config.working_dir,
            account: &account,
            rootfs: &bundle.rootfs(),
            files: &bundle.files(),
            hostname: &hostname,
            cgroup: &format!("/windlass/{}/{}/{CONTAINER_GROUP}", self.home_id, task.spec.id),
            has_cgroup_v2: self.has_cgroup_v2,
            gpus: &gpus,
            open_files: open_files_max(),
            has_infiniband: devices::has_infiniband(),
            own_capabilities: &own_capabilities(),
            rootless: self.rootless.as_ref().map(|own| RootlessInputs { has_ids: own.map.id_count() > 1 }),
            notices: &notices,
            is_shared: &|path: &Path| mounts.is_shared(path),
            locked_options: &|path: &Path| match self.rootless {
                Some(_) => rootless::locked_options(path),
                None => Vec::new(),
            },
        };
        let config = serde_json::to_vec(&container_config(task, &inputs)).map_err(io::Error::from);
        config.and_then(|bytes| fs::write(bundle.root().join(CONFIG_FILE), bytes)).map_err(failed)?;
        let runner = ImageConfig {
            entrypoint: image.config.entrypoint.clone(),
            cmd: image.config.command.clone(),
            workdir: image.config.working_dir.clone(),
            user: image.config.user.clone(),
        };
        write_image_config(&task.dir, &runner).map_err(failed)?;
        let boot = proc::boot_id().map_err(failed)?;
        let record = ContainerRecord { name: name.clone(), boot, layers: image.layers, monitor: None };
        record.save(&task.dir).map_err(failed)?;
        Ok(handle_for(&record, &task.dir))
    }

    fn find_image(&self, task: &PreparedTask) -> Result<StoredImage, RuntimeError> {
        let name = ImageSource::parse(&task.spec.image_name)?.full();
        let found = self.store.find(&name).map_err(|error| io_error(&task.spec.image_name, error))?;
        let image = found.ok_or_else(|| RuntimeError::NoImage { what: task.spec.image_name.clone() })?;
        self.store.touch(&image).map_err(|error| io_error(&task.spec.image_name, error))?;
        Ok(image)
    }

    /// Creates the control group of a task of an agent that is not root, as far as it may, and returns the limits that
    /// are not enforced. The OCI runtime creates that of root.
    fn unenforced_limits(&self, task: &PreparedTask) -> Vec<String> {
        if self.rootless.is_none() {
            return Vec::new();
        }
        let (_, unenforced) = self.groups.make(&monitor_group(task), &rootless_limits(task));
        for limit in &unenforced {
            tracing::warn!(task = %task.spec.id, "{limit}");
        }
        unenforced.iter().map(ToString::to_string).collect()
    }

    /// Starts the container unless that was done before.
    pub(super) fn start(&self, task: &PreparedTask) -> Result<(), RuntimeError> {
        let _one_at_a_time = self.start_lock(task.spec.id).lock();
        let what = || format!("failed to start container {}", container_name(&task.spec.name, task.spec.id));
        let Some(mut record) = load_record(&task.dir)? else {
            return Err(refused(what(), "it no longer exists"));
        };
        if record.monitor.is_some() {
            if let Some(message) = load_end(&task.dir)?.and_then(|end| end.start_error) {
                return Err(refused(what(), message));
            }
            if open_monitor(&record)?.is_some() || !was_never_started(&task.dir) {
                return Ok(());
            }
        }
        let failed = |error| io_error(what(), error);
        let prepared = self.prepared.lock().remove(&task.spec.id);
        let monitor = prepared.map_or_else(|| self.spawn_monitor(task, &record), Ok).map_err(failed)?;
        // The child is not reaped yet, so its pid cannot be reused.
        let stat = i32::try_from(monitor.child.id()).map_err(io::Error::other).and_then(proc::stat);
        record.monitor = stat.map_err(failed)?.map(|stat| stat.name);
        record.boot = proc::boot_id().map_err(failed)?;
        // If that fails it received no permission, and ends.
        record.save(&task.dir).map_err(failed)?;
        let reply = permit_start(&monitor.socket);
        if !matches!(reply, Ok(StartReply::Failed(_))) {
            monitor.release();
        }
        match reply.map_err(failed)? {
            StartReply::Started(_) => Ok(()),
            StartReply::Failed(message) => Err(refused(what(), message)),
        }
    }

    /// Starts the monitor of a container that was not started yet, which prepares everything that ends with it: mounts and
    /// the network.
    pub(super) fn prepare_start(&self, task: &PreparedTask) -> Result<(), RuntimeError> {
        let _one_at_a_time = self.start_lock(task.spec.id).lock();
        let Some(record) = load_record(&task.dir)?.filter(|record| record.monitor.is_none()) else {
            return Ok(());
        };
        let monitor = self.spawn_monitor(task, &record);
        let monitor =
            monitor.map_err(|error| io_error("failed to start the monitor of a container", error))?;
        self.prepared.lock().insert(task.spec.id, monitor);
        Ok(())
    }

    fn spawn_monitor(&self, task: &PreparedTask, record: &ContainerRecord) -> io::Result<PreparedMonitor> {
        // Those of a monitor that was started but never recorded.
        for name in [NEVER_STARTED_FILE, END_FILE] {
            let _ = fs::remove_file(Bundle::new(&task.dir).root().join(name));
        }
        self.binary.verify()?;
        self.program.verify()?;
        if let Some(agent) = mounted_path(&task.dir, task_dir::AGENT_IN_CONTAINER) {
            self.binary.verify_copy(&agent)?;
        }
        let request = self.start_request(task, record)?;
        let (socket, theirs) = UnixStream::pair()?;
        let child = self.monitor_command(task, theirs).spawn()?;
        let monitor = PreparedMonitor { socket, child, is_released: false };
        // It prepares the container meanwhile.
        send_request(&monitor.socket, &request)?;
        Ok(monitor)
    }

    fn start_request(&self, task: &PreparedTask, record: &ContainerRecord) -> io::Result<StartRequest> {
        let publish = || task.publish.clone();
        let is_bridged = task.spec.network_mode == NetworkMode::Bridge;
        let network = match self.rootless {
            None if is_bridged => Some(NetworkRequest { bridge: Bridge::ensure()?, publish: publish() }),
            None | Some(_) => None,
        };
        let uplink = self.rootless.as_ref().and_then(|own| own.uplink.clone()).filter(|_| is_bridged);
        let id = task.spec.id.to_string();
        let (limits, group) = match self.rootless {
            None => (TaskLimits::default(), CONTAINER_GROUP),
            Some(_) => (rootless_limits(task), MONITOR_GROUP),
        };
        // Outside of the shim's own groups: a service manager kills those of a service that it restarts.
        let (own, _) = self.groups.make(&monitor_group(task), &limits);
        if self.rootless.is_none() {
            self.block_metadata(&id);
        }
        Ok(StartRequest {
            map: self.rootless.as_ref().map(|own| own.map.clone()),
            user_network: uplink.map(|uplink| UserNetworkRequest { uplink, publish: publish() }),
            program: self.program.path.clone(),
            layers: record.layers.len(),
            enter: own.directories(),
            home_id: self.home_id.clone(),
            group: format!("{id}/{group}"),
            hidden_mount: self.program.hidden_mount.clone(),
            hostname: container_hostname(task),
            network,
            id,
        })
    }

    /// Refuses the cloud's metadata address to a container, by a filter on the group above that of the container, which
    /// exists before anything of the container runs.
    fn block_metadata(&self, task: &str) {
        let above = self.groups.find(task).group.v2;
        let missing = || Err(io::Error::other("control groups v2 are not mounted"));
        if let Err(error) = above.as_deref().map_or_else(missing, cloud_metadata::block) {
            tracing::warn!(task, %error, "failed to block the cloud's metadata address for a container");
        }
    }

    fn monitor_command(&self, task: &PreparedTask, socket: UnixStream) -> Command {
        let mut command = Command::new(self.binary.path());
        command.arg0("windlass-agent").args(["child", "container-monitor", "--bundle"]);
        command.arg(Bundle::new(&task.dir).root());
        // The mark of the task, by which its processes are found.
        command.env_clear().env("WINDLASS_TASK_ID", task.spec.id.to_string()).current_dir("/");
        command.env("WINDLASS_HOME_ID", &self.home_id);
        command.stdin(OwnedFd::from(socket)).stdout(Stdio::null()).stderr(Stdio::null());
        let own_session = || rustix::process::setsid().map(drop).map_err(io::Error::from);
        #[expect(unsafe_code, reason = "the session of a child is set between fork and exec")]
        // SAFETY: the closure makes one system call; it neither allocates nor acquires a lock.
        unsafe {
            command.pre_exec(own_session);
        }
        command
    }

    /// Kills the processes of the container until none remains.
    fn kill(&self, task: &TaskDir) -> Result<(), RuntimeError> {
        let begun = Instant::now();
        let prepared = self.prepared.lock().remove(&task.id);
        drop(prepared);
        let record = load_record(task)?;
        loop {
            let groups = self.groups.find(&task.id.to_string());
            let members = groups.members();
            let monitor = record.as_ref().map(open_monitor).transpose()?.flatten();
            let marked = match self.rootless {
                None => 0,
                Some(_) => rootless::kill_marked(task)
                    .map_err(|error| io_error("failed to list the processes of a container", error))?,
            };
            if members.is_empty() && monitor.is_none() && marked == 0 {
                return Ok(());
            }
            if begun.elapsed() > KILL_TIMEOUT {
                let why = format!("{} processes were killed but did not end", members.len().max(marked));
                return Err(refused("failed to kill a container", why));
            }
            groups.kill();
            if let Some(monitor) = monitor {
                let _ = monitor.signal(Signal::KILL);
                monitor.reap();
            }
            std::thread::sleep(KILL_RETRY_DELAY);
        }
    }

    pub(super) fn remove(&self, task: &TaskDir) -> Result<(), RuntimeError> {
        self.kill(task)?;
        if let Some(monitor) =
            load_record(task)?.and_then(|record| open_process(&record, record.monitor).ok()?)
        {
            monitor.reap();
        }
        let failed = |error| io_error("failed to remove a container", error);
        self.groups.find(&task.id.to_string()).remove().map_err(failed)?;
        remove_from_all_hierarchies(&self.home_id, &task.id.to_string());
        match user_map::remove_tree(Bundle::new(task).root()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub(super) fn found(&self) -> io::Result<Vec<FoundTask>> {
        let mut found = Vec::new();
        let boot = proc::boot_id()?;
        for dir in self.task_dirs() {
            let Some(record) = ContainerRecord::load(&dir)? else { continue };
            // The record is not forced to disk: after a power cut only the journal knows whether a start was attempted.
            if record.monitor.is_none() && record.boot != boot {
                continue;
            }
            let is_alive = open_process(&record, record.monitor)?
                .is_some_and(|monitor| !monitor.ended(Duration::ZERO).unwrap_or(true));
            let state = match record.monitor {
                None => FoundState::Created,
                Some(_) if is_alive => FoundState::Running,
                Some(_) if was_never_started(&dir) => FoundState::Created,
                Some(_) => FoundState::Ended,
            };
            found.push(FoundTask { task: dir.id, handle: handle_for(&record, &dir), state });
        }
        // Groups and processes whose files are gone.
        let mut names = self.groups.names();
        if self.rootless.is_some() {
            names.extend(rootless::marked_tasks(&self.home_mark())?);
        }
        for name in names {
            let Ok(task) = name.parse() else { continue };
            if !found.iter().any(|one| one.task == task) {
                let handle = Handle { name: "unknown".to_owned(), id: name };
                found.push(FoundTask { task, handle, state: FoundState::Ended });
            }
        }
        Ok(found)
    }

    /// Variable of all processes of this shim's containers.
    fn home_mark(&self) -> String {
        format!("WINDLASS_HOME_ID={}", self.home_id)
    }

    /// Lock of the starts of a task; a few tasks share one.
    fn start_lock(&self, task: SubmissionId) -> &Mutex<()> {
        let [.., last] = task.0.into_bytes();
        &self.starting[usize::from(last) % self.starting.len()]
    }
}

/// Maximum number of open files that this process can grant a container.
pub(super) fn open_files_max() -> u64 {
    const MAX: u64 = 1_048_576;
    getrlimit(Resource::Nofile).maximum.unwrap_or(MAX).min(MAX)
}

/// Creates the directories of a container, also when an earlier attempt created some of them. `layers` are directories,
/// base layer first.
pub(super) fn create_directories(bundle: &Bundle, layers: &[PathBuf]) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(bundle.root())?;
    for path in [bundle.rootfs(), bundle.work(), bundle.lower()] {
        fs::create_dir_all(path)?;
    }
    // The root of the container has the mode of this directory.
    fs::DirBuilder::new().recursive(true).mode(0o755).create(bundle.upper())?;
    for (at, layer) in layers.iter().enumerate() {
        match std::os::unix::fs::symlink(layer, bundle.lower().join(at.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Finds the user of a container in the layers of its image.
pub(super) fn find_account(
    user: &str,
    layers: &[PathBuf],
    rootless: Option<&Rootless>,
) -> Result<Account, RuntimeError> {
    // Numeric ids need no `/etc/passwd` in the image.
    if matches!(user, "" | "root" | "0") {
        return Ok(Account::root());
    }
    let failed = |error| io_error("failed to read the users of the image", error);
    let passwd = root_files::read_from_layers(layers, "etc/passwd").map_err(failed)?;
    let groups = root_files::read_from_layers(layers, "etc/group").map_err(failed)?;
    let what = || format!("user {user}");
    let account = UserDatabase::parse(&passwd, &groups).account(Some(&parse_user(user)), 0);
    let account = account.map_err(|error| refused(what(), format!("{error} of the image")))?;
    let ids = rootless.map_or(u32::MAX, |own| own.map.id_count());
    if account.uid >= ids || account.gid >= ids {
        let why = format!(
            "containers of this host have {ids} user ids: the agent is not root, and its user has no others in \
             /etc/subuid and /etc/subgid"
        );
        return Err(refused(what(), why));
    }
    Ok(account)
}

/// Group of the monitor. Without root also that of the container, which the OCI runtime does not move.
fn monitor_group(task: &PreparedTask) -> String {
    format!("{}/{MONITOR_GROUP}", task.spec.id)
}

fn rootless_limits(task: &PreparedTask) -> TaskLimits {
    let positive = |number: i64| u64::try_from(number).ok().filter(|number| *number > 0);
    TaskLimits {
        cpu: Some(task.spec.cpu).filter(|cores| *cores > 0.0),
        memory: positive(task.spec.memory),
        pids: positive(task.limits.pids),
    }
}

/// Host name of a container: a separate network comes with a separate name.
fn container_hostname(task: &PreparedTask) -> String {
    match task.spec.network_mode {
        NetworkMode::Host => root_files::hostname(),
        NetworkMode::Bridge => {
            let name = container_name(&task.spec.name, task.spec.id);
            // It ends with a part of the task's id.
            let end = name.len().saturating_sub(HOSTNAME_LEN_MAX);
            name[end..].trim_start_matches(|first: char| !first.is_ascii_alphanumeric()).to_owned()
        }
    }
}

fn send_request(mut socket: &UnixStream, request: &StartRequest) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(request)?;
    bytes.push(b'\n');
    socket.write_all(&bytes)
}

/// Permits the monitor to start the container, and waits for the reply.
fn permit_start(socket: &UnixStream) -> io::Result<StartReply> {
    let mut stream = socket;
    stream.write_all(monitor::GO)?;
    socket.shutdown(Shutdown::Write)?;
    socket.set_read_timeout(Some(START_TIMEOUT))?;
    let mut bytes = Vec::new();
    stream.take(REPLY_BYTES_MAX).read_to_end(&mut bytes)?;
    let ended = |_| io::Error::other("the monitor of the container ended without a reply");
    serde_json::from_slice(&bytes).map_err(ended)
}

/// Returns when the process has ended.
async fn ended(held: ProcessHandle) -> Result<ProcessHandle, RuntimeError> {
    let failed = |error| io_error("failed to watch a container", error);
    let watched = held.watch().map_err(failed)?;
    watched.readable().await.map_err(failed)?.retain_ready();
    Ok(watched.into_inner())
}

impl OciRuntime {
    pub(super) async fn wait_for_end(&self, task: &TaskDir, handle: &Handle) -> Result<Exit, RuntimeError> {
        let what = || format!("failed to wait for container {}", handle.name);
        let Some(record) = load_record(task)? else { return Ok(lost_exit(LossReason::Vanished)) };
        if record.monitor.is_none() {
            return Err(refused(what(), "it was never started"));
        }
        let monitor = open_process(&record, record.monitor).map_err(|error| io_error(what(), error))?;
        if let Some(monitor) = monitor {
            ended(monitor).await?.reap();
        }
        if let Some(end) = load_end(task)? {
            if let Some(message) = end.start_error {
                return Err(refused(what(), format!("it was never started: {message}")));
            }
            let tail = last_lines(&monitor::read_output(&Bundle::new(task)));
            return Ok(Exit { code: end.code, oom_killed: end.oom_killed, tail, lost: None });
        }
        if was_never_started(task) {
            return Err(refused(what(), "it was never started"));
        }
        if proc::boot_id().is_ok_and(|boot| boot != record.boot) {
            return Ok(lost_exit(LossReason::HostRebooted));
        }
        // The monitor was killed; what it left running has no supervisor any more.
        let dir = task.clone();
        self.run_blocking(what(), move |shared| shared.kill(&dir)).await?;
        Ok(lost_exit(LossReason::Vanished))
    }

    pub(super) async fn stop_within(&self, task: &TaskDir, grace: Duration) -> Result<(), RuntimeError> {
        let failed = |error| io_error("failed to stop a container", error);
        let Some(record) = load_record(task)? else { return Ok(()) };
        let process = read_file(&Bundle::new(task).root().join(PROCESS_FILE)).map_err(failed)?;
        let first = open_process(&record, process).map_err(failed)?;
        if let Some(first) = &first
            && first.signal(Signal::TERM).unwrap_or(false)
            && let Some(monitor) = open_monitor(&record)?
            && tokio::time::timeout(grace, ended(monitor)).await.is_err()
        {
            let _ = first.signal(Signal::KILL);
        }
        // The monitor records the end, so it is not killed with the container.
        if let Some(monitor) = open_monitor(&record)? {
            let _ = tokio::time::timeout(KILL_TIMEOUT, ended(monitor)).await;
        }
        let dir = task.clone();
        self.run_blocking("failed to stop a container".to_owned(), move |shared| shared.kill(&dir)).await
    }

    /// Returns the published ports of a running container; none if it has ended.
    pub(super) fn published_ports(dir: &TaskDir) -> Result<Vec<Port>, RuntimeError> {
        let Some(record) = load_record(dir)? else { return Ok(Vec::new()) };
        if open_monitor(&record)?.is_none() {
            return Ok(Vec::new());
        }
        let ports = read_file(&Bundle::new(dir).root().join(PORTS_FILE));
        Ok(ports
            .map_err(|error| io_error("failed to read the ports of a container", error))?
            .unwrap_or_default())
    }

    /// Returns the ports of a container on the host's network. Only the SSH server may have had to choose another port.
    pub(super) async fn host_network_ports(&self, dir: &TaskDir) -> Result<Vec<Port>, RuntimeError> {
        if !dir.runner_config().is_some_and(|config| config.ssh_any_port_if_taken) {
            return Ok(Vec::new());
        }
        let deadline = tokio::time::Instant::now() + PORT_TIMEOUT;
        // Made before the first look, so that no file is missed.
        let run = DirHandle::open(&dir.run()).ok();
        let mut watch = run.and_then(|run| self.shared.watcher.dir(&run));
        loop {
            match dir.ssh_port() {
                Some(SSH_PORT) => return Ok(Vec::new()),
                Some(host) => return Ok(vec![Port { host, container: SSH_PORT }]),
                None => {}
            }
            // `wait` reports the exit.
            let Some(record) = load_record(dir)? else { return Ok(Vec::new()) };
            if open_monitor(&record)?.is_none() {
                return Ok(Vec::new());
            }
            if tokio::time::Instant::now() >= deadline {
                tracing::warn!(task = %dir.id, "runner did not report the port of its SSH server");
                return Ok(Vec::new());
            }
            match &mut watch {
                // The interval also finds the end of a monitor.
                Some(watch) => {
                    let _ = tokio::time::timeout(PORT_WATCH_INTERVAL, watch.wake.changed()).await;
                }
                None => tokio::time::sleep(PORT_POLL_INTERVAL).await,
            }
        }
    }
}

fn lost_exit(reason: LossReason) -> Exit {
    Exit { code: None, oom_killed: false, tail: Vec::new(), lost: Some(reason) }
}

fn last_lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.iter().skip(lines.len().saturating_sub(TAIL_LINES));
    last.map(|line| line.chars().take(TAIL_LINE_MAX).collect()).collect()
}
