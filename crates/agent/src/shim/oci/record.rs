//! Stored record of a container: enough to find it again, and to touch nothing else.
//!
//! All files are in the directory `container` of the task, which only the shim can read: nothing that a container
//! writes decides about processes of the host.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::config::Bundle;
use crate::{proc::ProcessId, task_dir::TaskDir};

const RECORD_FILE: &str = "record.json";
/// First process of the container, written by the monitor before it reports the start.
pub(super) const PROCESS_FILE: &str = "process.json";
/// Published ports, written by the monitor before it reports the start.
pub(super) const PORTS_FILE: &str = "ports.json";
/// End of the container, written by the monitor.
pub(super) const END_FILE: &str = "end.json";
/// Written by a monitor whose shim exited before it requested a start.
pub(super) const NEVER_STARTED_FILE: &str = "never.started";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContainerRecord {
    pub(super) name: String,
    /// Start times count from boot: a process name of another boot is meaningless.
    pub(super) boot: String,
    /// Keys of the layers that the container uses, base layer first.
    pub(super) layers: Vec<String>,
    /// Process that starts the container and waits for its end; absent until it was started.
    pub(super) monitor: Option<ProcessId>,
}

/// End of a container, or of the attempt to start it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContainerEnd {
    /// Exit status of the first process; 128 + signal if it was killed.
    pub(super) code: Option<i32>,
    pub(super) oom_killed: bool,
    /// Reason why the container could not be started.
    pub(super) start_error: Option<String>,
}

impl ContainerRecord {
    pub(super) fn load(task: &TaskDir) -> io::Result<Option<Self>> {
        read_file(&Bundle::new(task).root().join(RECORD_FILE))
    }

    /// Survives the end of the shim, but not that of the host, which ends the container too.
    pub(super) fn save(&self, task: &TaskDir) -> io::Result<()> {
        write_file(&Bundle::new(task).root().join(RECORD_FILE), self)
    }
}

/// Reads a file. One that cannot be parsed counts as absent.
pub(super) fn read_file<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Concurrent readers see the old file or the new one.
pub(super) fn write_file(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("new");
    fs::write(&fresh, serde_json::to_vec(value)?)?;
    fs::rename(&fresh, path)
}

/// Returns when the file is on disk. Concurrent readers see the old file or the new one.
pub(super) fn write_durably(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = fs::File::create(&fresh)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}
