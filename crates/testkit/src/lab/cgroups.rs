//! Control groups of a host: a subtree of each hierarchy that appears to the host as the root.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::program::wait_until;

/// Groups stay busy for a moment after their last process ended.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(5);
/// Group of a host's first process: a parent group may delegate controllers only while it contains no process.
const FIRST_GROUP: &str = "init";

/// One hierarchy, and the host's subtree in it.
pub(super) struct HostCgroup {
    pub(super) mount: PathBuf,
    pub(super) part: PathBuf,
    pub(super) first: PathBuf,
}

/// Creates the groups of a host where that is permitted.
pub(super) fn create(name: &str) -> Vec<HostCgroup> {
    let mut parts = Vec::new();
    for (mount, is_v2) in cgroup_mounts() {
        let part = mount.join(name);
        let first = if is_v2 { part.join(FIRST_GROUP) } else { part.clone() };
        if fs::create_dir_all(&first).is_err() {
            continue;
        }
        if is_v2 {
            for controller in ["+cpu", "+memory", "+pids"] {
                let _ = fs::write(mount.join("cgroup.subtree_control"), controller);
            }
        }
        // A new `cpuset` group accepts no process until its CPUs and memory nodes are set.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read(mount.join(file)) {
                let _ = fs::write(part.join(file), value);
            }
        }
        parts.push(HostCgroup { mount, part, first });
    }
    parts
}

/// Removes the groups with a name prefix. Their processes have ended.
pub(super) fn remove(prefix: &str) {
    for (mount, _) in cgroup_mounts() {
        let groups = fs::read_dir(&mount).into_iter().flatten().flatten();
        let ours =
            groups.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)));
        for group in ours {
            wait_until(EMPTY_TIMEOUT, || remove_all(&group.path()).is_ok());
        }
    }
}

fn remove_all(group: &Path) -> io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_all(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// Mounted hierarchies, and whether they are version 2.
fn cgroup_mounts() -> Vec<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let of_kind = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (at, kind) = (words.next()?, words.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| (PathBuf::from(at), kind == "cgroup2"))
    };
    mounts.lines().filter_map(of_kind).collect()
}
