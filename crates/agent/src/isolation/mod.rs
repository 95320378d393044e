//! What keeps a plain process in: namespaces of its own, a user of its own, and few rights.
//!
//! | part | what it does | needs |
//! |---|---|---|
//! | [`namespaces`] | processes, mounts and IPC of the task alone; paths of the agent and of others are hidden | root, or user namespaces |
//! | [`restrict`] | no new privileges, no capabilities, a filter on system calls | nothing |
//! | [`user_ids`] | a user of its own for each task | root |
//! | [`probe`] | says what of this works on a host | nothing |
//!
//! The first process of the task sets the namespaces up and stays in control of them. Everything that is started for the job
//! (its commands, sessions of people, git, archives) gives its rights up before it runs.

pub mod namespaces;
pub mod probe;
pub mod restrict;
pub mod user_ids;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The name of a task's own user.
pub const USER_NAME: &str = "windlass";
/// Where the directories of a task with a user of its own appear to it. Empty on the host itself.
pub const TASK_DIRS_ROOT: &str = "/run/windlass-task";
/// What a runner inside is told in this variable: [`Inside`] as JSON.
pub const CONFINED_VARIABLE: &str = "WINDLASS_CONFINED";

/// How a task is confined: for its first process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Absent where the agent is not root: the task keeps the agent's user.
    pub user: Option<TaskUser>,
    /// Where the task's directories appear: `run`, `scratch`, `home`, `python`, and the agent's binary.
    pub place: PathBuf,
    /// What is covered to make room for them: the place itself or something above it.
    pub cover: PathBuf,
    /// The `run` directory of the task on the host.
    pub run: PathBuf,
    pub scratch: PathBuf,
    /// Its other directories on the host: `home`, `python`, `tmp`, `var-tmp`.
    pub private: PathBuf,
    /// Files, sockets and directories that it must not see.
    pub hidden: Vec<PathBuf>,
    /// Bytes of `/dev/shm`; absent is the kernel's default.
    pub shm_bytes: Option<u64>,
    /// Accounts of the host that a job may ask for.
    pub users: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskUser {
    /// Also its group.
    pub id: u32,
    /// Groups that may open its GPUs.
    pub groups: Vec<u32>,
}

/// What the runner of a confined task must know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfinedTask {
    pub user: Option<TaskUser>,
    pub home: PathBuf,
    pub python: PathBuf,
    /// The agent's binary, where the job's user may run it.
    pub agent: PathBuf,
    pub users: Vec<String>,
}

impl Confinement {
    pub fn inside(&self) -> ConfinedTask {
        ConfinedTask {
            user: self.user.clone(),
            home: self.place.join("home"),
            python: self.place.join("python"),
            agent: self.place.join("agent"),
            users: self.users.clone(),
        }
    }
}

impl ConfinedTask {
    /// What the first process of this task said; nothing for a task that is not confined.
    pub fn read() -> Option<Self> {
        serde_json::from_str(&std::env::var(CONFINED_VARIABLE).ok()?).ok()
    }
}
