//! Bind mounts without set-user-id programs and devices, for engines whose bind mounts have no such options.
//!
//! The agent mounts each directory at a separate path with `nosuid` and `nodev`, and the engine binds that path: a bind
//! keeps the options of its source. Once the container has started, it has its own copy, and the agent unmounts its own.
//! Everything happens in the engine's mount namespace, which may differ from the agent's.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use windlass_model::id::SubmissionId;

use super::host_probe;
use crate::{isolation::namespaces::bind_restricted, shim::runtime::BindMount};

const PROBE: &str = "probe";

/// Mount points of the binds of all tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RestrictedBinds {
    root: PathBuf,
    socket: PathBuf,
    is_podman: bool,
}

impl RestrictedBinds {
    /// Tries to mount in the namespace of the engine at `socket`. An agent without the permission to mount cannot.
    pub(super) fn probe(home: &Path, socket: &Path, is_podman: bool) -> io::Result<Self> {
        let binds = Self { root: home.join("binds"), socket: socket.to_owned(), is_podman };
        let dir = binds.root.join(PROBE);
        let bind = BindMount { source: binds.root.clone(), target: String::new(), read_only: false };
        let tried = binds.mount_at(&dir, &[bind]);
        binds.unmount_at(&dir)?;
        tried.map(|()| binds)
    }

    fn task(&self, id: SubmissionId) -> PathBuf {
        self.root.join(id.to_string())
    }

    /// Path that the engine binds in place of the source of the task's bind with this index.
    pub(super) fn path(&self, id: SubmissionId, index: usize) -> PathBuf {
        self.task(id).join(index.to_string())
    }

    /// Creates the paths that the engine binds, because it requires them to exist when it creates the container.
    pub(super) fn create_mount_points(&self, id: SubmissionId, binds: &[BindMount]) -> io::Result<()> {
        create_mount_points(&self.task(id), binds)
    }

    /// Mounts the binds of a task. Idempotent.
    pub(super) fn mount(&self, id: SubmissionId, binds: &[BindMount]) -> io::Result<()> {
        self.mount_at(&self.task(id), binds)
    }

    /// Unmounts the binds of a task and removes their mount points. Idempotent.
    pub(super) fn unmount(&self, id: SubmissionId) -> io::Result<()> {
        self.unmount_at(&self.task(id))
    }

    /// Unmounts what a killed agent left, of tasks for which `is_known` returns false.
    pub(super) fn unmount_unused(&self, is_known: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(&is_known) {
                self.unmount_at(&entry.path())?;
            }
        }
        Ok(())
    }

    fn mount_at(&self, dir: &Path, binds: &[BindMount]) -> io::Result<()> {
        if binds.is_empty() {
            return Ok(());
        }
        create_mount_points(dir, binds)?;
        self.in_namespace_of_engine(|| {
            unmount_all(dir)?;
            // A private mount around the others: none of them propagates to other namespaces.
            mount_bind(dir, dir)?;
            mount_change(dir, MountPropagationFlags::PRIVATE)?;
            for (index, bind) in binds.iter().enumerate() {
                bind_restricted(&bind.source, &dir.join(index.to_string()), bind.read_only)?;
            }
            Ok(())
        })
    }

    fn unmount_at(&self, dir: &Path) -> io::Result<()> {
        if !dir.try_exists()? {
            return Ok(());
        }
        self.in_namespace_of_engine(|| unmount_all(dir))?;
        // Never recursively: a directory that is still mounted has files of the host.
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                fs::remove_dir(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        fs::remove_dir(dir)
    }

    /// Runs `action` in a thread that is in the engine's mount namespace and ends with it.
    fn in_namespace_of_engine(&self, action: impl FnOnce() -> io::Result<()> + Send) -> io::Result<()> {
        let namespace = |pid: &str| File::open(format!("/proc/{pid}/ns/mnt"));
        let engine = namespace(&host_probe::engine_pid(&self.socket, self.is_podman)?.to_string())?;
        let id = |file: &File| rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino));
        if id(&engine)? == id(&namespace("self")?)? {
            return action();
        }
        let run = || {
            enter_namespace(&engine)?;
            action()
        };
        let ended = std::thread::scope(|scope| scope.spawn(run).join());
        ended.unwrap_or_else(|_| Err(io::Error::other("the thread that mounts directories failed")))
    }
}

#[expect(unsafe_code, reason = "the call is unsafe for threads that share their open files")]
fn enter_namespace(namespace: &File) -> io::Result<()> {
    // SAFETY: only the root and the working directory become separate, not the open files.
    unsafe { unshare_unsafe(UnshareFlags::FS)? };
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?)
}

fn create_mount_points(dir: &Path, binds: &[BindMount]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for (index, bind) in binds.iter().enumerate() {
        let path = dir.join(index.to_string());
        let is_directory = fs::metadata(&bind.source)?.is_dir();
        if path.try_exists()? {
            continue;
        }
        if is_directory {
            fs::create_dir(path)?;
        } else {
            File::create(path)?;
        }
    }
    Ok(())
}

/// Unmounts everything at `dir` and below it. The mounts are private or only receive, so nothing else is unmounted.
fn unmount_all(dir: &Path) -> io::Result<()> {
    loop {
        match unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point.
            Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::mount::{MountFlags, mount};
    use windlass_testkit::temp_dir;

    use super::*;

    fn mount_points(below: &Path) -> Vec<PathBuf> {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        points.filter(|point| point.starts_with(below)).collect()
    }

    #[test]
    fn mounts_of_a_killed_agent_are_removed_without_an_effect_on_their_sources() {
        let scratch = temp_dir("binds").unwrap();
        let (home, source) = (scratch.path().join("home"), scratch.path().join("source"));
        let socket = scratch.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::create_dir_all(&home).unwrap();
        fs::create_dir_all(source.join("below")).unwrap();
        // Mounts of the host that propagate: unmounting a copy must not unmount them.
        for at in [source.clone(), source.join("below")] {
            fs::create_dir_all(&at).unwrap();
            mount(c"tmpfs", &at, c"tmpfs", MountFlags::empty(), c"size=1m").unwrap();
            mount_change(&at, MountPropagationFlags::SHARED).unwrap();
        }
        fs::write(source.join("below/file"), "kept").unwrap();
        let before = mount_points(scratch.path());
        let binds = RestrictedBinds::probe(&home, &socket, true).unwrap();
        let [kept, left] = [1, 2].map(|n| SubmissionId::from(uuid::Uuid::from_u128(n)));
        let bind = BindMount { source: source.clone(), target: "/data".to_owned(), read_only: false };
        for id in [kept, left] {
            binds.mount(id, std::slice::from_ref(&bind)).unwrap();
            binds.mount(id, std::slice::from_ref(&bind)).unwrap();
            assert!(binds.path(id, 0).join("below/file").exists());
        }
        let again = RestrictedBinds::probe(&home, &socket, true).unwrap();
        again.unmount_unused(|id| id == kept.to_string()).unwrap();
        assert!(!binds.path(left, 0).exists() && binds.path(kept, 0).join("below/file").exists());
        again.unmount(kept).unwrap();
        again.unmount(kept).unwrap();
        assert_eq!(mount_points(scratch.path()), before);
        assert_eq!(fs::read_to_string(source.join("below/file")).unwrap(), "kept");
        assert_eq!(fs::read_dir(home.join("binds")).unwrap().count(), 0);
        for at in [source.join("below"), source] {
            unmount(&at, UnmountFlags::DETACH).unwrap();
        }
    }
}
