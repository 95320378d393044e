//! Where a task keeps its files, and what shim and runner tell each other there.
//!
//! ```text
//! HOME/tasks/ID/            0700, the shim's; 0711 where unconfined processes of other users must pass through
//!   task.json               what was asked for and what became of it, without credentials
//!   registry.json           0600, the registry's credential, gone once the image is here
//!   token                   0600, what the shim says to the runner
//!   run/                    mounted at /windlass/run in a container; the job may write here, so the
//!     │                     shim reads it through `confine` only
//!     runner.json           how the runner is to listen and whom to let in
//!     image.json            what the image itself would have run (`ImageConfig`); only in a container
//!     ports.json            its ports on this machine (`TaskPorts`); only for a plain process that has some
//!     runner.sock           the runner's HTTP
//!     job.log job.idx       the job's output and when it came (see `spool`)
//!     runner.log runner.idx
//!     states.jsonl          the job's states, one `JobState` a line, each synced
//!     exit.json             the runner's last word (`LastWord`)
//!   scratch/                0700, where a plain process starts; the runner gives it to the job's user
//!   private/                what else a confined plain process has: `home`, `python`, `tmp`, `var-tmp`
//! ```

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use windlass_model::id::SubmissionId;

use crate::{cgroup::ports::PortMap, confine::DirHandle};

/// Where the `run` directory appears inside a container.
pub const RUN_DIR_IN_CONTAINER: &str = "/windlass/run";
/// Where the agent's binary appears inside a container, read-only.
pub const AGENT_IN_CONTAINER: &str = "/windlass/agent";

pub const RUNNER_CONFIG: &str = "runner.json";
pub const IMAGE_CONFIG: &str = "image.json";
/// Beside it, for a plain process that has ports: which they are on this machine (`TaskPorts`).
pub const PORTS: &str = "ports.json";
pub const RUNNER_SOCKET: &str = "runner.sock";
pub const STATES: &str = "states.jsonl";
pub const EXIT_RECORD: &str = "exit.json";

/// Files of a runner that are read whole are not longer than this.
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
    /// Directories of a confined plain process beside `scratch`: its home, its temporary files.
    pub fn private(&self) -> PathBuf {
        self.root.join("private")
    }
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// A short text in `run`, read with distrust; nothing where it cannot be read.
    pub fn read_small_file(&self, name: &str) -> Option<String> {
        let mut text = String::new();
        let file = DirHandle::open(&self.run()).ok()?.file(name).ok()?;
        file.take(SMALL_FILE_MAX).read_to_string(&mut text).ok()?;
        Some(text)
    }

    pub fn runner_config(&self) -> Option<RunnerConfig> {
        serde_json::from_str(&self.read_small_file(RUNNER_CONFIG)?).ok()
    }

    /// The port of the SSH server, once the runner says it.
    pub fn ssh_port(&self) -> Option<u16> {
        self.port(SSH_PORT_FILE)
    }

    /// The port of the runner's HTTP API, once the runner says it. It does where it took any.
    pub fn http_port(&self) -> Option<u16> {
        self.port(HTTP_PORT_FILE)
    }

    fn port(&self, file: &str) -> Option<u16> {
        self.read_small_file(file)?.trim().parse().ok().filter(|port| *port != 0)
    }
}

/// How a runner is to listen and whom it lets in. Written by the shim before the runner starts; no secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerConfig {
    pub task: SubmissionId,
    /// SHA-256 (hex) of the token that calls on the runner's socket carry.
    pub token_sha256: String,
    /// Where the HTTP API listens beside the socket, as a dstack server expects; it asks for no token there.
    /// Port 0 is any, and the real one is written to `http.port`.
    pub compat_http: Option<String>,
    /// Where the SSH server listens, `ADDRESS:PORT`; port 0 is any, and the real one is written to `ssh.port`.
    pub ssh_listen: Option<String>,
    /// Where somebody else has that port, any other of the same address will do.
    #[serde(default)]
    pub ssh_any_port_if_taken: bool,
    pub ssh_authorized_keys: Vec<String>,
    /// UUIDs of the GPUs this task holds, for its metrics.
    pub gpus: Vec<String>,
    /// How long to wait for the job, and for the last reader of its logs.
    pub wait_secs: u64,
}

/// The ports of a plain process: those that its program names, and those of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPorts {
    pub map: PortMap,
    /// The kernel turns the first into the second. Otherwise the program must look at `PORT`.
    pub is_rewritten: bool,
}

impl TaskPorts {
    /// None where the task has none, or is no plain process.
    pub fn read(run: &Path) -> Self {
        let text = fs::read(run.join(PORTS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// The port of the machine for what a program calls `port`.
    pub fn own(&self, port: u16) -> u16 {
        self.map.get(&port).copied().unwrap_or(port)
    }
}

impl RunnerConfig {
    /// Whether the HTTP API takes any port, and says which.
    pub fn has_any_http_port(&self) -> bool {
        self.compat_http.as_deref().is_some_and(|address| address.ends_with(":0"))
    }
}

/// What the image says about itself. Written before the container is started, because the runner takes the
/// place of the image's own entry point and needs it when the job names no commands. The image's working
/// directory and variables are also those the runner itself is started with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    #[serde(default)]
    pub entrypoint: Vec<String>,
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Empty is `/`.
    #[serde(default)]
    pub workdir: String,
    /// As written in the image: `NAME`, `UID`, `NAME:GROUP`, …; empty is root.
    #[serde(default)]
    pub user: String,
}

/// The file with the port the SSH server really listens on.
pub const SSH_PORT_FILE: &str = "ssh.port";
/// The file with the port the runner's HTTP API really listens on.
pub const HTTP_PORT_FILE: &str = "http.port";

/// What a runner leaves when it ends of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// What the job's main process exited with; 128 + signal when it was killed.
    pub exit_status: Option<i32>,
    /// The kernel killed something of the job for want of memory.
    pub oom_killed: bool,
}
