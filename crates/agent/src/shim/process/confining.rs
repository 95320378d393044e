//! How a task of this host is confined: its user, its directories, and what it must not see.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use windlass_api::agent::shim::ConfinedBy;

use super::{Prepared, RuntimeError, Shared, TaskDir, failed, record::Record};
use crate::{
    cgroup::metadata,
    host::gpu::Gpu,
    isolation::{Confinement, PLACES, TaskUser, user_ids::UserIds},
};

/// Sockets and directories that give the host, the agent or the server away, wherever they exist.
const HIDDEN: [&str; 14] = [
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
/// Others of ours may be beside them.
const RUN: &str = "/run";
const RUN_PREFIX: &str = "windlass";
/// Directories that a confined task has for itself.
const TEMPORARY: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// Whether the mount point is in a directory that the task has for itself.
pub(super) fn is_own_place(task: &Confinement, target: &Path) -> bool {
    target.starts_with(&task.cover) || TEMPORARY.iter().any(|own| target.starts_with(own))
}

impl Shared {
    /// How the task is confined, and what of it could not be had.
    pub(super) fn confine(
        &self,
        task: &Prepared,
        record: &mut Record,
        group: Option<&Path>,
    ) -> Result<(Confinement, Option<String>), RuntimeError> {
        let by = self.confined_by().map_err(|why| RuntimeError::Refused {
            what: "confine the task".to_owned(),
            why: why.to_owned(),
        })?;
        let user = match by {
            ConfinedBy::Users => {
                let user = self
                    .own_user(&task.dir, record)
                    .map_err(|error| failed("give the task a user", error))?;
                Some(TaskUser { id: user, groups: groups_of(&task.gpus) })
            }
            ConfinedBy::Namespaces => None,
        };
        make_private(&task.dir, user.as_ref().map(|user| user.id))
            .map_err(|error| failed("make the task's directories", error))?;
        let gap = match (by, group) {
            (ConfinedBy::Namespaces, _) => None,
            (ConfinedBy::Users, Some(group)) => metadata::refuse(group).err().map(|error| error.to_string()),
            (ConfinedBy::Users, None) => Some("no control groups of version 2".to_owned()),
        };
        let hidden = self.hidden(by);
        let (place, cover) = match by {
            ConfinedBy::Users => (Path::new(PLACES).join(task.dir.id.to_string()), PathBuf::from(PLACES)),
            // Where it is anyway. What is hidden above it is covered whole.
            ConfinedBy::Namespaces => {
                let root = real(task.dir.root());
                let cover = hidden.iter().find(|path| root.starts_with(path)).cloned();
                (root.clone(), cover.unwrap_or(root))
            }
        };
        if by == ConfinedBy::Users {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(&cover)
                .map_err(|error| failed("make the place of its directories", error))?;
        }
        let confinement = Confinement {
            user,
            place,
            cover,
            run: real(&task.dir.run()),
            scratch: real(&task.dir.scratch()),
            private: real(&task.dir.private()),
            hidden,
            shm_bytes: u64::try_from(task.spec.shm_size).ok().filter(|&bytes| bytes > 0),
            users: self.rules.users.clone(),
        };
        let gap = gap.map(|why| format!("the cloud's metadata address is not refused to this task: {why}"));
        Ok((confinement, gap))
    }

    /// A user that no other task has, kept in the record.
    fn own_user(&self, dir: &TaskDir, record: &mut Record) -> io::Result<u32> {
        let others = Record::users_of_others(&self.home, dir);
        let ids = UserIds::new(self.rules.user_ids);
        let root = real(dir.root());
        let user = match record.user.filter(|&user| !others.contains(&user) && ids.is_of(user, &root)) {
            Some(user) => user,
            None => ids.take(&root, &others)?,
        };
        record.user = Some(user);
        Ok(user)
    }

    pub(super) fn give_user_back(&self, dir: &TaskDir, user: Option<u32>) -> io::Result<()> {
        match user {
            Some(user) => UserIds::new(self.rules.user_ids).give_back(user, &real(dir.root())),
            None => Ok(()),
        }
    }

    /// Outermost first; nothing twice.
    fn hidden(&self, by: ConfinedBy) -> Vec<PathBuf> {
        let mut all: BTreeSet<PathBuf> = HIDDEN.iter().map(PathBuf::from).collect();
        all.extend(self.rules.hidden.iter().cloned());
        all.insert(self.home.clone());
        let ours = fs::read_dir(RUN).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(RUN_PREFIX)) && path != Path::new(PLACES)
        };
        all.extend(ours.filter(is_ours));
        if by == ConfinedBy::Namespaces {
            // Its user owns what is in there: keys, and files that run when the user logs in.
            all.extend(
                std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.components().count() > 1),
            );
        }
        let all: BTreeSet<PathBuf> = all.iter().filter_map(|path| path.canonicalize().ok()).collect();
        // In order, what is below something comes right after it.
        let mut outermost: Vec<PathBuf> = Vec::new();
        for path in all {
            if !outermost.iter().any(|above| path.starts_with(above)) && path.components().count() > 1 {
                outermost.push(path);
            }
        }
        outermost
    }
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn make_private(dir: &TaskDir, user: Option<u32>) -> io::Result<()> {
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

/// Groups without which its devices cannot be opened.
fn groups_of(gpus: &[Gpu]) -> Vec<u32> {
    let devices = gpus.iter().flat_map(|gpu| &gpu.devices).filter_map(|device| fs::metadata(device).ok());
    let by_group = devices.filter(|meta| meta.mode() & 0o060 == 0o060 && meta.mode() & 0o006 != 0o006);
    let groups: BTreeSet<u32> = by_group.map(|meta| meta.gid()).filter(|&gid| gid != 0).collect();
    groups.into_iter().collect()
}
