//! Files of a task that the shim writes (see `taskdir`): replaced atomically, and not trusted where the job may write.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, BufRead as _, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use serde::{Deserialize, Serialize};

use windlass_api::agent::{
    RUNNER_PORT, SSH_PORT,
    runner::JobState,
    shim::{NetworkMode, Port, TaskSpec},
};
use windlass_model::{id::SubmissionId, task::Status};

use super::{
    TasksSettings,
    task::{Task, TaskEnd, TaskState},
    task_end::ExitEvidence,
};
use crate::{
    digest::sha256_hex,
    isolation::user_map,
    safe_open::DirHandle,
    shim::runtime::{Handle, RegistryAuth},
    task_dir::{EXIT_RECORD, ExitRecord, RUNNER_CONFIG, RunnerConfig, STATES, TaskDir},
};

/// Maximum size read of a file that the job could make arbitrarily long.
const EXIT_FILE_BYTES_MAX: u64 = 1024 * 1024;
const ANY_ADDRESS: &str = "0.0.0.0";
const LOOPBACK: &str = "127.0.0.1";

/// `task.json`: the specification without credentials, and its state. The journal is authoritative; this file remains
/// if the journal is lost.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredTask {
    pub(super) spec: TaskSpec,
    pub(super) epoch: i64,
    pub(super) status: Status,
    pub(super) handle: Option<Handle>,
    pub(super) ports: Option<Vec<Port>>,
    pub(super) gpus: Vec<String>,
    pub(super) boot: Option<String>,
    pub(super) end: Option<TaskEnd>,
}

impl StoredTask {
    pub(super) fn of(task: &Task) -> Self {
        let state = task.state.lock();
        Self {
            spec: task.spec.clone(),
            epoch: state.epoch,
            status: state.status,
            handle: state.container.handle.clone(),
            ports: state.ports.clone(),
            gpus: state.gpus.clone(),
            boot: state.container.starting.clone(),
            end: state.end.clone(),
        }
    }

    /// Returns the state as far as this file contains it.
    pub(super) fn state(&self) -> TaskState {
        let mut state = TaskState::new(self.epoch);
        state.status = self.status;
        state.container.handle.clone_from(&self.handle);
        state.container.starting.clone_from(&self.boot);
        state.container.started = self.status == Status::Running;
        state.ports.clone_from(&self.ports);
        state.gpus.clone_from(&self.gpus);
        if self.status.is_active() {
            state.held.gpus.clone_from(&self.gpus);
        }
        state.end.clone_from(&self.end);
        state
    }
}

#[derive(Serialize, Deserialize)]
struct StoredAuth {
    username: String,
    password: String,
}

/// Returns 256 random bits.
pub(super) fn new_token() -> String {
    let mut random = [0u8; 32];
    // Without randomness the token could be guessed.
    getrandom::fill(&mut random).expect("the kernel gives random bytes");
    hex::encode(random)
}

/// Writes everything of a new task that must survive a kill.
pub(super) fn write_submission(
    dir: &TaskDir,
    stored: &StoredTask,
    token: &str,
    auth: Option<&RegistryAuth>,
) -> io::Result<()> {
    let mut private = DirBuilder::new();
    private.mode(0o700).recursive(true);
    private.create(dir.root())?;
    private.create(dir.run())?;
    private.create(dir.scratch())?;
    // In place: before the journal has the submission, these files count for nothing.
    let mut files = vec![write_private(&dir.token(), token.as_bytes())?];
    if let Some(auth) = auth {
        let stored = StoredAuth { username: auth.username.clone(), password: auth.password.clone() };
        files.push(write_private(&dir.registry(), &serde_json::to_vec(&stored)?)?);
    }
    files.push(write_private(&dir.task(), &serde_json::to_vec(stored)?)?);
    files.push(File::open(dir.root())?);
    if let Some(parent) = dir.root().parent() {
        files.push(File::open(parent)?);
    }
    sync_together(&files)
}

/// Waits until all these files are on disk. The file system stores those that are requested at the same time in one step;
/// one after the other, each waits for a separate one.
fn sync_together(files: &[File]) -> io::Result<()> {
    let Some((last, others)) = files.split_last() else { return Ok(()) };
    std::thread::scope(|scope| {
        let sync = |file: &File| file.sync_all();
        let started: Vec<_> = others.iter().map(|file| scope.spawn(move || sync(file))).collect();
        let done = sync(last);
        let ended = started.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("failed to write a file to disk")))
        });
        ended.fold(done, io::Result::and)
    })
}

pub(super) fn write_task(dir: &TaskDir, stored: &StoredTask) -> io::Result<()> {
    write_atomic(&dir.task(), &serde_json::to_vec(stored)?)
}

pub(super) fn read_task(dir: &TaskDir) -> io::Result<StoredTask> {
    let stored: StoredTask = serde_json::from_slice(&fs::read(dir.task())?)?;
    if stored.spec.id != dir.id {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file belongs to another task"));
    }
    Ok(stored)
}

pub(super) fn read_token(dir: &TaskDir) -> io::Result<String> {
    fs::read_to_string(dir.token())
}

pub(super) fn read_auth(dir: &TaskDir) -> Option<RegistryAuth> {
    let stored: StoredAuth = serde_json::from_slice(&fs::read(dir.registry()).ok()?).ok()?;
    Some(RegistryAuth { username: stored.username, password: stored.password })
}

/// Deletes the registry credential, which is not needed after the pull.
pub(super) fn delete_auth(dir: &TaskDir) -> io::Result<()> {
    ignore_not_found(fs::remove_file(dir.registry()))
}

/// Deletes all files of a task. Files of the job are deleted by handle; links are not followed.
pub(super) fn remove(dir: &TaskDir) -> io::Result<()> {
    ignore_not_found(user_map::remove_tree(dir.root()))
}

fn ignore_not_found(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Lists the directories below `HOME/tasks` whose names are task ids.
pub(super) fn list_dirs(home: &Path) -> io::Result<Vec<TaskDir>> {
    let entries = match fs::read_dir(home.join("tasks")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut dirs = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        if let Some(id) = name.to_str().and_then(|name| name.parse::<SubmissionId>().ok()) {
            dirs.push(TaskDir::new(home, id));
        }
    }
    Ok(dirs)
}

/// Writes `runner.json`: the runner's listen addresses and the permitted keys.
pub(super) fn write_runner_config(
    settings: &TasksSettings,
    task: &Task,
    runtime: &str,
    gpus: &[String],
) -> io::Result<()> {
    let listeners = listen_addresses(settings, &task.spec, runtime);
    let config = RunnerConfig {
        task: task.id,
        token_sha256: sha256_hex(task.token.as_bytes()),
        compat_http: listeners.http,
        ssh_listen: Some(listeners.ssh),
        ssh_any_port_if_taken: listeners.any_port_if_taken,
        node_ssh_listen: listeners.node_ssh,
        ssh_authorized_keys: task.spec.container_ssh_keys.clone(),
        gpus: gpus.to_vec(),
        wait_secs: settings.runner_wait_secs,
    };
    // Not waited for: a task does not outlive a reboot of its host, and the runner reads the file at its start.
    let path = task.dir.run().join(RUNNER_CONFIG);
    let next_to = path.with_extension("new");
    write_private(&next_to, &serde_json::to_vec(&config)?)?;
    fs::rename(next_to, path)
}

#[derive(Debug, PartialEq, Eq)]
struct ListenAddresses {
    http: Option<String>,
    ssh: String,
    any_port_if_taken: bool,
    /// For other nodes on the same host.
    node_ssh: Option<String>,
}

fn listen_addresses(settings: &TasksSettings, spec: &TaskSpec, runtime: &str) -> ListenAddresses {
    let foreign = is_from_dstack(settings, spec);
    let is_bridged = matches!(runtime, "docker" | "oci") && spec.network_mode == NetworkMode::Bridge;
    let (address, port, any_port_if_taken) = match (is_bridged, runtime) {
        (true, _) => (ANY_ADDRESS, SSH_PORT, false),
        // The other nodes are on this host and connect to the address of the node.
        (false, _) if spec.node_address.is_some() => (LOOPBACK, 0, false),
        // The other nodes connect to exactly this port.
        (false, _) if spec.cluster => (ANY_ADDRESS, SSH_PORT, false),
        // A dstack server does not specify whether there are other nodes, and expects the behaviour of an sshd. Nodes
        // use the whole host.
        (false, _) if foreign && spec.network_mode == NetworkMode::Host => (ANY_ADDRESS, SSH_PORT, true),
        // Plain processes share the ports of the host: any free one.
        (false, "process") => (LOOPBACK, 0, false),
        (false, _) => (LOOPBACK, SSH_PORT, true),
    };
    // The port requires no authentication: on the host's network it must not be reachable from outside.
    let http_address = if is_bridged { ANY_ADDRESS } else { LOOPBACK };
    // Several blocks of a host have several runners, and plain processes have no separate network.
    let is_one_of_many = runtime == "process" && spec.network_mode == NetworkMode::Bridge;
    let http_port = if is_one_of_many { 0 } else { RUNNER_PORT };
    ListenAddresses {
        http: foreign.then(|| format!("{http_address}:{http_port}")),
        ssh: format!("{address}:{port}"),
        any_port_if_taken,
        node_ssh: spec.node_address.map(|address| format!("{address}:{SSH_PORT}")),
    }
}

/// Returns whether a dstack server sent the specification: those of a windlass server have claims.
pub(super) fn is_from_dstack(settings: &TasksSettings, spec: &TaskSpec) -> bool {
    settings.compat_tcp && spec.claims.is_none()
}

/// Returns the container ports that a bridge maps to the host's loopback.
pub(super) fn published_ports(settings: &TasksSettings, spec: &TaskSpec) -> Vec<u16> {
    match (spec.network_mode, is_from_dstack(settings, spec)) {
        (NetworkMode::Host, _) => Vec::new(),
        (NetworkMode::Bridge, true) => vec![RUNNER_PORT, SSH_PORT],
        (NetworkMode::Bridge, false) => vec![SSH_PORT],
    }
}

/// Reads the files that runner and job left. Unreadable files count as absent.
pub(super) fn read_exit_evidence(dir: &TaskDir) -> ExitEvidence {
    let Ok(run) = DirHandle::open(&dir.run()) else { return ExitEvidence::default() };
    let mut left = ExitEvidence::default();
    if let Ok(file) = run.file(EXIT_RECORD) {
        left.last_word = serde_json::from_reader::<_, ExitRecord>(file.take(EXIT_FILE_BYTES_MAX)).ok();
    }
    if let Ok(file) = run.file(STATES) {
        let lines = io::BufReader::new(file.take(EXIT_FILE_BYTES_MAX)).lines().map_while(Result::ok);
        left.job = lines.filter_map(|line| serde_json::from_str::<JobState>(&line).ok()).last();
    }
    left
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    Ok(file)
}

/// Writes a temporary file and renames it: a reader, or a kill, sees the old file or the new one.
fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let next_to = path.with_extension("new");
    write_private(&next_to, bytes)?.sync_all()?;
    fs::rename(&next_to, path)?;
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::shim::Claims;
    use windlass_model::id::InstanceId;

    use super::*;

    /// Runtime, network, whether a windlass server made it, whether it has other nodes; then the HTTP and SSH
    /// addresses, and whether another SSH port is used if that one is in use.
    type Row<'a> = (&'a str, NetworkMode, bool, bool, Option<&'a str>, &'a str, bool);

    #[test]
    fn a_runner_listens_only_where_its_runtime_and_network_mode_require() {
        use NetworkMode::{Bridge, Host};
        let table: [Row; 13] = [
            ("docker", Bridge, true, false, None, "0.0.0.0:10022", false),
            ("docker", Bridge, false, false, Some("0.0.0.0:10999"), "0.0.0.0:10022", false),
            ("docker", Host, true, false, None, "127.0.0.1:10022", true),
            ("docker", Host, true, true, None, "0.0.0.0:10022", false),
            ("docker", Host, false, false, Some("127.0.0.1:10999"), "0.0.0.0:10022", true),
            ("oci", Bridge, true, false, None, "0.0.0.0:10022", false),
            ("oci", Bridge, false, false, Some("0.0.0.0:10999"), "0.0.0.0:10022", false),
            ("oci", Host, true, false, None, "127.0.0.1:10022", true),
            ("process", Host, true, false, None, "127.0.0.1:0", false),
            ("process", Host, true, true, None, "0.0.0.0:10022", false),
            ("process", Bridge, true, false, None, "127.0.0.1:0", false),
            ("process", Host, false, false, Some("127.0.0.1:10999"), "0.0.0.0:10022", true),
            ("process", Bridge, false, false, Some("127.0.0.1:0"), "127.0.0.1:0", false),
        ];
        for (runtime, network_mode, is_ours, cluster, http, ssh, any_port_if_taken) in table {
            let claims = Claims { instance_id: InstanceId(uuid::Uuid::nil()), epoch: 1, expires_at: 1 };
            let spec = TaskSpec {
                network_mode,
                cluster,
                claims: is_ours.then_some(claims),
                ..super::super::tests::spec(1)
            };
            let mut settings = TasksSettings::in_memory("/".into(), Vec::new());
            settings.compat_tcp = true;
            let expected = ListenAddresses {
                http: http.map(str::to_owned),
                ssh: ssh.to_owned(),
                any_port_if_taken,
                node_ssh: None,
            };
            assert_eq!(
                listen_addresses(&settings, &spec, runtime),
                expected,
                "{runtime} {network_mode:?} {is_ours}"
            );
            settings.compat_tcp = false;
            assert_eq!(listen_addresses(&settings, &spec, runtime).http, None);
        }
    }

    #[test]
    fn nodes_on_one_host_have_separate_ssh_addresses() {
        let settings = TasksSettings::in_memory("/".into(), Vec::new());
        let node = TaskSpec {
            network_mode: NetworkMode::Host,
            cluster: true,
            node_address: Some([127, 4, 5, 2].into()),
            ..super::super::tests::spec(1)
        };
        for runtime in ["docker", "process"] {
            let addresses = listen_addresses(&settings, &node, runtime);
            assert_eq!((addresses.ssh.as_str(), addresses.any_port_if_taken), ("127.0.0.1:0", false));
            assert_eq!(addresses.node_ssh.as_deref(), Some("127.4.5.2:10022"));
        }
    }
}
