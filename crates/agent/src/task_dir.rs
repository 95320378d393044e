//! Layout of a task's directory, and the files that shim and runner exchange there.
//!
//! ```text
//! HOME/tasks/ID/            0700, the shim's; 0711 where unconfined processes of other users must pass through
//!   task.json               the request and the state of the task, without credentials
//!   registry.json           0600, the registry's credential, removed once the image is present
//!   token                   0600, the token with which the shim calls the runner
//!   run/                    mounted at /windlass/run in a container; the job may write here, so the
//!     │                     shim reads it through `confine` only
//!     runner.json           the runner's listeners and authorized keys (`RunnerConfig`)
//!     image.json            entry point and command of the image (`ImageConfig`); only in a container
//!     ports.json            its ports on this host (`TaskPorts`); only for a plain process that has some
//!     runner.sock           the runner's HTTP API
//!     job.log job.idx       the job's output and its timestamps (see `spool`)
//!     runner.log runner.idx
//!     states.jsonl          the job's states, one `JobState` a line, each synced
//!     exit.json             the exit record of the runner (`LastWord`)
//!   scratch/                0700, working directory of a plain process; the runner changes its owner to the job's user
//!   private/                other directories of a confined plain process: `home`, `python`, `tmp`, `var-tmp`
//! ```

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use windlass_model::id::SubmissionId;

use crate::{cgroup::port_rewrite::PortMap, safe_open::DirHandle};

/// Path of the `run` directory inside a container.
pub const RUN_DIR_IN_CONTAINER: &str = "/windlass/run";
/// Path of the agent's binary inside a container, read-only.
pub const AGENT_IN_CONTAINER: &str = "/windlass/agent";
/// Variable of a runner whose container belongs to its task and to nothing else, such as a pod.
pub const OWN_CONTAINER_VARIABLE: &str = "WINDLASS_OWN_CONTAINER";
/// Variable of a runner in a container: the groups of the host that own the devices of its task, separated by commas.
pub const DEVICE_GROUPS_VARIABLE: &str = "WINDLASS_DEVICE_GROUPS";
/// Path of the host's git inside a container, read-only; absent if the host has none.
pub const GIT_IN_CONTAINER: &str = "/windlass/git";

/// Layout of the copy of the host's git.
pub mod host_git {
    /// Links to the agent's binary by the names of the programs, and scripts.
    pub const COMMANDS: &str = "commands";
    pub const PROGRAMS: &str = "programs";
    pub const LIBRARIES: &str = "lib";
    /// Dynamic loader; absent if the programs are static.
    pub const LOADER: &str = "ld.so";
    /// Certificates of trusted authorities.
    pub const AUTHORITIES: &str = "ca.pem";
}

pub const RUNNER_CONFIG: &str = "runner.json";
pub const IMAGE_CONFIG: &str = "image.json";
/// Ports on this host (`TaskPorts`). Written next to the runner's configuration for a plain process that has ports.
pub const PORTS: &str = "ports.json";
pub const RUNNER_SOCKET: &str = "runner.sock";
pub const STATES: &str = "states.jsonl";
pub const EXIT_RECORD: &str = "exit.json";

/// Maximum size in bytes of a runner's file that is read whole.
const SMALL_FILE_MAX: u64 = 64 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskDir {
    pub id: SubmissionId,
    root: PathBuf,
}

impl TaskDir {
    pub fn new(home: &Path, id: SubmissionId) -> Self {
        Self { id, root: home.join("tasks").join(id.to_string()) }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
    pub fn task(&self) -> PathBuf {
        self.root.join("task.json")
    }
    pub fn registry(&self) -> PathBuf {
        self.root.join("registry.json")
    }
    pub fn token(&self) -> PathBuf {
        self.root.join("token")
    }
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }
    /// Directories of a confined plain process other than `scratch`: its home, its temporary files.
    pub fn private(&self) -> PathBuf {
        self.root.join("private")
    }
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// Reads a short text file in `run` as untrusted input. Returns `None` if it cannot be read.
    pub fn read_small_file(&self, name: &str) -> Option<String> {
        let mut text = String::new();
        let file = DirHandle::open(&self.run()).ok()?.file(name).ok()?;
        file.take(SMALL_FILE_MAX).read_to_string(&mut text).ok()?;
        Some(text)
    }

    pub fn runner_config(&self) -> Option<RunnerConfig> {
        serde_json::from_str(&self.read_small_file(RUNNER_CONFIG)?).ok()
    }

    /// Port of the SSH server, once the runner has written it.
    pub fn ssh_port(&self) -> Option<u16> {
        self.port(SSH_PORT_FILE)
    }

    /// Port of the runner's HTTP API, once the runner has written it. The runner writes it if it may use any port.
    pub fn http_port(&self) -> Option<u16> {
        self.port(HTTP_PORT_FILE)
    }

    fn port(&self, file: &str) -> Option<u16> {
        self.read_small_file(file)?.trim().parse().ok().filter(|port| *port != 0)
    }
}

/// Listeners of a runner and the keys that it accepts. Written by the shim before the runner starts; contains no
/// secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerConfig {
    pub task: SubmissionId,
    /// SHA-256 (hex) of the token that authenticates calls on the runner's socket.
    pub token_sha256: String,
    /// Address where the HTTP API listens in addition to the socket, as a dstack server expects; no token is required
    /// there. Port 0 means any port, and the actual one is written to `http.port`.
    pub compat_http: Option<String>,
    /// Address where the SSH server listens, `ADDRESS:PORT`. Port 0 means any port, and the actual one is written to
    /// `ssh.port`.
    pub ssh_listen: Option<String>,
    /// True if any other port of the same address may be used when that port is occupied.
    #[serde(default)]
    pub ssh_any_port_if_taken: bool,
    /// Address where the SSH server listens for other nodes on the same host, `ADDRESS:PORT`.
    #[serde(default)]
    pub node_ssh_listen: Option<String>,
    pub ssh_authorized_keys: Vec<String>,
    /// UUIDs of the GPUs that this task holds, for its metrics.
    pub gpus: Vec<String>,
    /// Maximum time to wait for the job, and for the last reader of its logs.
    pub wait_secs: u64,
}

/// Ports of a plain process: from those that its program uses to those of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPorts {
    pub map: PortMap,
    /// True if the kernel rewrites the ports. Otherwise the program must use the variable `PORT`.
    pub is_rewritten: bool,
}

impl TaskPorts {
    /// Reads the ports of a task. Empty if the task has none or is not a plain process.
    pub fn read(run: &Path) -> Self {
        let text = fs::read(run.join(PORTS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Returns the host's port for the port that a program uses.
    pub fn own(&self, port: u16) -> u16 {
        self.map.get(&port).copied().unwrap_or(port)
    }
}

impl RunnerConfig {
    /// Returns whether the HTTP API may use any port and must write which one.
    pub fn has_any_http_port(&self) -> bool {
        self.compat_http.as_deref().is_some_and(|address| address.ends_with(":0"))
    }
}

/// Entry point and related settings of the image. Written before the container is started, because the runner replaces
/// the image's entry point and needs them when the job has no commands. The runner itself is also started with the
/// image's working directory and variables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    #[serde(default)]
    pub entrypoint: Vec<String>,
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Empty means `/`.
    #[serde(default)]
    pub workdir: String,
    /// User as written in the image: `NAME`, `UID`, `NAME:GROUP`, …; empty means root.
    #[serde(default)]
    pub user: String,
}

/// File with the port that the SSH server actually listens on.
pub const SSH_PORT_FILE: &str = "ssh.port";
/// File with the port that the runner's HTTP API actually listens on.
pub const HTTP_PORT_FILE: &str = "http.port";

/// Record that a runner writes when it exits by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Exit status of the job's main process; 128 + signal if it was killed.
    pub exit_status: Option<i32>,
    /// True if the kernel killed a process of the job for lack of memory.
    pub oom_killed: bool,
}
