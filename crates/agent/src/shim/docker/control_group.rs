//! Access to the control group that the engine created for a container.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    cgroup::{Group, Hierarchies, cloud_metadata},
    proc::{self, ProcessHandle},
};

/// Returns the group of a running container if it is where engines usually create it: those that do so themselves, and
/// those that leave it to systemd. This requires no request to the engine.
pub(super) fn find(container: &str) -> Option<PathBuf> {
    if container.is_empty() {
        return None;
    }
    let mount = Hierarchies::mounted().ok()?.v2?;
    usual_groups(container).into_iter().map(|group| mount.at.join(group)).find(|path| path.is_dir())
}

fn usual_groups(container: &str) -> [String; 4] {
    [
        format!("docker/{container}"),
        format!("system.slice/docker-{container}.scope"),
        format!("libpod_parent/libpod-{container}"),
        format!("machine.slice/libpod-{container}.scope"),
    ]
}

/// Blocks the cloud's metadata address for everything in the group of a container, whatever its network. Does nothing
/// if the container has ended meanwhile.
pub(super) fn block_metadata_in(group: &Path) -> io::Result<()> {
    match cloud_metadata::block(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        blocked => blocked,
    }
}

/// The same for a container by its first process. Does nothing for a container that has ended.
pub(super) fn block_metadata(pid: Option<i64>, container: &str) -> io::Result<()> {
    let Some(pid) = pid.and_then(|pid| i32::try_from(pid).ok()).filter(|pid| *pid > 0) else {
        return Ok(());
    };
    let Some(stat) = proc::stat(pid)? else { return Ok(()) };
    // Held open, so that the group is not that of another process with the same id.
    let Some(first) = ProcessHandle::open(stat.name)? else { return Ok(()) };
    match block_group(pid, container) {
        Err(_) if first.ended(Duration::ZERO).unwrap_or(true) => Ok(()),
        blocked => blocked,
    }
}

fn block_group(pid: i32, container: &str) -> io::Result<()> {
    let group = Group::for_process(pid)?.v2;
    let group = group.ok_or_else(|| io::Error::other("control groups v2 are not mounted"))?;
    if !is_of_container(&group, container) {
        return Err(io::Error::other(format!(
            "the container has no group of version 2: {}",
            group.display()
        )));
    }
    cloud_metadata::block(&group)
}

/// Returns whether the group belongs to the container: engines name the group by the container's id.
pub(super) fn is_of_container(group: &Path, container: &str) -> bool {
    !container.is_empty() && group.to_string_lossy().contains(container)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_cgroup_of_the_container_gets_the_filter() {
        let id = "4f6a0c";
        let is = |path: &str| is_of_container(Path::new(path), id);
        assert!(is("/sys/fs/cgroup/system.slice/docker-4f6a0c.scope"));
        assert!(is("/sys/fs/cgroup/machine.slice/libpod-4f6a0c.scope/container"));
        assert!(!is("/sys/fs/cgroup") && !is("/sys/fs/cgroup/system.slice/ssh.service"));
        assert!(!is_of_container(Path::new("/sys/fs/cgroup"), ""));
        block_metadata(None, id).unwrap();
        block_metadata(Some(0), id).unwrap();
        assert!(usual_groups(id).iter().all(|group| is(group)));
        assert_eq!((find("no-such-container"), find("")), (None, None));
        let own = block_metadata(Some(i64::from(std::process::id())), id).unwrap_err();
        assert!(own.to_string().contains("group"), "{own}");
    }
}
