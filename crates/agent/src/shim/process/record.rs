//! What is kept of a task that is a plain process: enough to find it again, and to touch nothing else.

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
    taskdir::{TaskDir, TaskPorts},
};

const FILE: &str = "process.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessRecord {
    /// Start times count from boot: a name of another boot names nobody.
    pub(super) boot: String,
    /// The first process of the task; absent until it was started.
    pub(super) process: Option<ProcessId>,
    /// Where something is mounted for this task.
    pub(super) targets: Vec<PathBuf>,
    /// Mount points that were made for it, outermost first.
    pub(super) made: Vec<PathBuf>,
    /// Its ports on this machine; absent until it was started.
    #[serde(default)]
    pub(super) ports: Option<TaskPorts>,
    /// Its own user, where it has one.
    #[serde(default)]
    pub(super) user: Option<u32>,
}

impl ProcessRecord {
    pub(super) fn new(boot: String) -> Self {
        Self { boot, process: None, targets: Vec::new(), made: Vec::new(), ports: None, user: None }
    }

    /// `None` when there is none. One that cannot be read is as good as none: the task is found by its marks.
    pub(super) fn load(dir: &TaskDir) -> io::Result<Option<Self>> {
        match fs::read(dir.root().join(FILE)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns when it is on disk. Whoever reads meanwhile sees the old one or the new one.
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
        absent_is_fine(fs::remove_file(dir.root().join(FILE)))
    }

    /// Those of all other tasks of this home.
    fn others<'a>(home: &'a Path, but: &'a TaskDir) -> impl Iterator<Item = Self> + use<'a> {
        let entries = fs::read_dir(home.join("tasks")).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let others = ids.map(|id| TaskDir::new(home, id)).filter(|other| other.id != but.id);
        others.filter_map(|other| Self::load(&other).ok().flatten())
    }

    /// Whether any other task of this home has something mounted at or below `path`.
    pub(super) fn is_used_by_others(home: &Path, but: &TaskDir, path: &Path) -> bool {
        Self::others(home, but).any(|record| record.targets.iter().any(|target| target.starts_with(path)))
    }

    /// Users that other tasks of this home have.
    pub(super) fn other_users(home: &Path, but: &TaskDir) -> BTreeSet<u32> {
        Self::others(home, but).filter_map(|record| record.user).collect()
    }

    /// Ports of this machine that other tasks of this home have.
    pub(super) fn other_ports(home: &Path, but: &TaskDir) -> BTreeSet<u16> {
        Self::others(home, but)
            .filter_map(|record| record.ports)
            .flat_map(|ports| ports.map.into_values())
            .collect()
    }
}

pub(super) fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
