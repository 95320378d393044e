//! Confinement of plain processes: separate namespaces, a separate user, and few privileges.
//!
//! | part | effect | needs |
//! |---|---|---|
//! | [`namespaces`] | separate processes, mounts, IPC; hides paths of the agent and other tasks | root, or user namespaces |
//! | [`restrict`] | no new privileges, no capabilities, a filter on system calls | nothing |
//! | [`user_ids`] | a separate user for each task | root |
//! | [`user_map`] | containers of an agent that is not root | user namespaces |
//! | [`probe`] | reports what of this works on a host | nothing |
//!
//! The first process of the task sets up the namespaces and stays in control of them. Everything that is started for
//! the job (its commands, SSH sessions, git, archives) drops its privileges before it runs.

pub mod namespaces;
pub mod probe;
pub mod restrict;
pub mod user_ids;
pub mod user_map;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Name of a task's user.
pub const USER_NAME: &str = "windlass";
/// Path where a task with its own user sees its directories. Empty on the host itself.
pub const TASK_DIRS_ROOT: &str = "/run/windlass-task";
/// Environment variable of a confined runner: [`Inside`] as JSON.
pub const CONFINED_VARIABLE: &str = "WINDLASS_CONFINED";

/// Confinement of a task, as its first process sets it up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Absent if the agent is not root: the task keeps the agent's user.
    pub user: Option<TaskUser>,
    /// Directory where the task sees its directories: `run`, `scratch`, `home`, `python`, and the agent's binary.
    pub place: PathBuf,
    /// Directory on which a tmpfs is mounted for them: `place` itself or one of its ancestors.
    pub cover: PathBuf,
    /// The `run` directory of the task on the host.
    pub run: PathBuf,
    pub scratch: PathBuf,
    /// Directory on the host with `home`, `python`, `tmp` and `var-tmp` of the task.
    pub private: PathBuf,
    /// Files, sockets and directories that the task must not see.
    pub hidden: Vec<PathBuf>,
    /// Size of `/dev/shm` in bytes; absent means the kernel's default.
    pub shm_bytes: Option<u64>,
    /// Accounts of the host that a job may request.
    pub users: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskUser {
    /// User id, and also the id of its group.
    pub id: u32,
    /// Groups that may open the task's GPUs.
    pub groups: Vec<u32>,
}

/// Settings for the runner of a confined task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfinedTask {
    pub user: Option<TaskUser>,
    pub home: PathBuf,
    pub python: PathBuf,
    /// Path of the agent's binary that the job's user may run.
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
    /// Reads the settings from the environment. `None` for a task that is not confined.
    pub fn read() -> Option<Self> {
        serde_json::from_str(&std::env::var(CONFINED_VARIABLE).ok()?).ok()
    }
}
