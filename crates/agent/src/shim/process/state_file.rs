//! Stored record of a task that is a plain process: enough to find it again, and to touch nothing else.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    proc::ProcessId,
    task_dir::{TaskDir, TaskPorts},
};

const FILE: &str = "process.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessRecord {
    /// Start times count from boot: a process name of another boot is meaningless.
    pub(super) boot: String,
    /// First process of the task; absent until it was started.
    pub(super) process: Option<ProcessId>,
    /// Mount points in use by this task.
    pub(super) targets: Vec<PathBuf>,
    /// Mount points that were created for it, outermost first.
    pub(super) made: Vec<PathBuf>,
    /// Its ports on this host; absent until it was started.
    #[serde(default)]
    pub(super) ports: Option<TaskPorts>,
    /// Its separate user, if it has one.
    #[serde(default)]
    pub(super) user: Option<u32>,
}

impl ProcessRecord {
    pub(super) fn new(boot: String) -> Self {
        Self { boot, process: None, targets: Vec::new(), made: Vec::new(), ports: None, user: None }
    }

    /// Returns `None` if there is no record, or if it cannot be parsed: then the task is found by its marks.
    pub(super) fn load(dir: &TaskDir) -> io::Result<Option<Self>> {
        match fs::read(dir.root().join(FILE)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns when the record is on disk. Concurrent readers see the old record or the new one.
    pub(super) fn save(&self, dir: &TaskDir) -> io::Result<()> {
        let fresh = dir.root().join(format!("{FILE}.new"));
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&fresh, dir.root().join(FILE))?;
        fs::File::open(dir.root())?.sync_all()
    }

    pub(super) fn delete(dir: &TaskDir) -> io::Result<()> {
        ignore_not_found(fs::remove_file(dir.root().join(FILE)))
    }

    /// Records of all other tasks of this home.
    fn others<'a>(home: &'a Path, but: &'a TaskDir) -> impl Iterator<Item = Self> + use<'a> {
        let entries = fs::read_dir(home.join("tasks")).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let others = ids.map(|id| TaskDir::new(home, id)).filter(|other| other.id != but.id);
        others.filter_map(|other| Self::load(&other).ok().flatten())
    }

    /// Returns whether another task of this home has a mount at or below `path`.
    pub(super) fn is_used_by_others(home: &Path, but: &TaskDir, path: &Path) -> bool {
        Self::others(home, but).any(|record| record.targets.iter().any(|target| target.starts_with(path)))
    }

    /// User ids of other tasks of this home.
    pub(super) fn other_users(home: &Path, but: &TaskDir) -> BTreeSet<u32> {
        Self::others(home, but).filter_map(|record| record.user).collect()
    }

    /// Host ports of other tasks of this home.
    pub(super) fn other_ports(home: &Path, but: &TaskDir) -> BTreeSet<u16> {
        Self::others(home, but)
            .filter_map(|record| record.ports)
            .flat_map(|ports| ports.map.into_values())
            .collect()
    }
}

pub(super) fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
