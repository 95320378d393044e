//! Confinement of a task on this host: its user, its directories and the paths hidden from it.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use windlass_api::agent::shim::ConfinementMethod;

use super::{PreparedTask, RuntimeError, Shared, TaskDir, runtime_error, state_file::ProcessRecord};
use crate::{
    cgroup::cloud_metadata,
    host::gpu::Gpu,
    isolation::{Confinement, TASK_DIRS_ROOT, TaskUser, user_ids::UserIdAllocator},
};

/// Sockets and directories that would expose the host, the agent or the server, if they exist.
const HIDDEN_PATHS: [&str; 14] = [
    "/run/windlass",
    "/var/lib/windlass",
    "/etc/windlass",
    "/run/docker.sock",
    "/run/docker",
    "/run/containerd",
    "/run/crio",
    "/run/podman",
    "/run/user",
    "/run/dbus",
    "/run/systemd/private",
    "/var/lib/docker",
    "/var/lib/containerd",
    "/var/lib/containers",
];
/// This directory may contain further entries of windlass.
const RUN_DIR: &str = "/run";
const RUN_PREFIX: &str = "windlass";
/// Directories of which a confined task has private instances.
const TEMP_DIRS: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// Returns whether the mount point is in a private directory of the task.
pub(super) fn is_private_dir(task: &Confinement, target: &Path) -> bool {
    target.starts_with(&task.cover) || TEMP_DIRS.iter().any(|own| target.starts_with(own))
}

impl Shared {
    /// Returns the confinement of the task, and the part of it that is not available.
    pub(super) fn build_confinement(
        &self,
        task: &PreparedTask,
        record: &mut ProcessRecord,
        group: Option<&Path>,
    ) -> Result<(Confinement, Option<String>), RuntimeError> {
        let by = self.confined_by().map_err(|why| RuntimeError::Refused {
            what: "failed to confine the task".to_owned(),
            why: why.to_owned(),
        })?;
        let user = match by {
            ConfinementMethod::Users => {
                let user = self
                    .assign_user(&task.dir, record)
                    .map_err(|error| runtime_error("failed to allocate a user id", error))?;
                Some(TaskUser { id: user, groups: device_groups(&task.gpus) })
            }
            ConfinementMethod::Namespaces => None,
        };
        create_private_dirs(&task.dir, user.as_ref().map(|user| user.id))
            .map_err(|error| runtime_error("failed to create the task's directories", error))?;
        let gap = match (by, group) {
            (ConfinementMethod::Namespaces, _) => None,
            (ConfinementMethod::Users, Some(group)) => {
                cloud_metadata::block(group).err().map(|error| error.to_string())
            }
            (ConfinementMethod::Users, None) => Some("cgroup v2 is not available".to_owned()),
        };
        let hidden = self.hidden(by);
        let (place, cover) = match by {
            ConfinementMethod::Users => {
                (Path::new(TASK_DIRS_ROOT).join(task.dir.id.to_string()), PathBuf::from(TASK_DIRS_ROOT))
            }
            // The path stays the same. A hidden directory above it is covered entirely.
            ConfinementMethod::Namespaces => {
                let root = canonical(task.dir.root());
                let cover = hidden.iter().find(|path| root.starts_with(path)).cloned();
                (root.clone(), cover.unwrap_or(root))
            }
        };
        if by == ConfinementMethod::Users {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(&cover)
                .map_err(|error| runtime_error("failed to create the directory of tasks", error))?;
        }
        let confinement = Confinement {
            user,
            place,
            cover,
            run: canonical(&task.dir.run()),
            scratch: canonical(&task.dir.scratch()),
            private: canonical(&task.dir.private()),
            hidden,
            shm_bytes: u64::try_from(task.spec.shm_size).ok().filter(|&bytes| bytes > 0),
            users: self.rules.users.clone(),
        };
        let gap = gap.map(|why| format!("the cloud's metadata address is not blocked for this task: {why}"));
        Ok((confinement, gap))
    }

    /// Returns a user id that no other task has, and stores it in the record.
    fn assign_user(&self, dir: &TaskDir, record: &mut ProcessRecord) -> io::Result<u32> {
        let others = ProcessRecord::other_users(&self.home, dir);
        let ids = UserIdAllocator::new(self.rules.user_ids);
        let root = canonical(dir.root());
        let user = match record.user.filter(|&user| !others.contains(&user) && ids.is_of(user, &root)) {
            Some(user) => user,
            None => ids.take(&root, &others)?,
        };
        record.user = Some(user);
        Ok(user)
    }

    pub(super) fn release_user(&self, dir: &TaskDir, user: Option<u32>) -> io::Result<()> {
        match user {
            Some(user) => UserIdAllocator::new(self.rules.user_ids).give_back(user, &canonical(dir.root())),
            None => Ok(()),
        }
    }

    /// Returns the hidden paths, outermost first, without duplicates.
    fn hidden(&self, by: ConfinementMethod) -> Vec<PathBuf> {
        let mut all: BTreeSet<PathBuf> = HIDDEN_PATHS.iter().map(PathBuf::from).collect();
        all.extend(self.rules.hidden.iter().cloned());
        all.insert(self.home.clone());
        let ours = fs::read_dir(RUN_DIR).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(RUN_PREFIX)) && path != Path::new(TASK_DIRS_ROOT)
        };
        all.extend(ours.filter(is_ours));
        if by == ConfinementMethod::Namespaces {
            // The agent's user owns its contents: keys, and files that run when the user logs in.
            all.extend(
                std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.components().count() > 1),
            );
        }
        let all: BTreeSet<PathBuf> = all.iter().filter_map(|path| path.canonicalize().ok()).collect();
        // In this order, children follow their parent directly.
        let mut outermost: Vec<PathBuf> = Vec::new();
        for path in all {
            if !outermost.iter().any(|above| path.starts_with(above)) && path.components().count() > 1 {
                outermost.push(path);
            }
        }
        outermost
    }
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn create_private_dirs(dir: &TaskDir, user: Option<u32>) -> io::Result<()> {
    let private = dir.private();
    for (name, mode, is_own) in
        [("home", 0o700, true), ("python", 0o755, true), ("tmp", 0o1777, false), ("var-tmp", 0o1777, false)]
    {
        let path = private.join(name);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        if let Some(user) = user.filter(|_| is_own) {
            chown(&path, Some(user), Some(user))?;
        }
    }
    if let Some(user) = user {
        chown(dir.scratch(), Some(user), Some(user))?;
    }
    Ok(())
}

/// Groups that are required to open the task's devices.
fn device_groups(gpus: &[Gpu]) -> Vec<u32> {
    let devices = gpus.iter().flat_map(|gpu| &gpu.devices).filter_map(|device| fs::metadata(device).ok());
    let by_group = devices.filter(|meta| meta.mode() & 0o060 == 0o060 && meta.mode() & 0o006 != 0o006);
    let groups: BTreeSet<u32> = by_group.map(|meta| meta.gid()).filter(|&gid| gid != 0).collect();
    groups.into_iter().collect()
}
