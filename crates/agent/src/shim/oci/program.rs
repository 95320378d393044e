//! The OCI runtime of the host: `crun` or `runc`.

use std::{
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{cgroup::Hierarchies, pinned_file::PinnedFile};

const DIRECTORIES: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Program that runs containers, and what it needs on this host.
#[derive(Clone, Debug)]
pub struct OciProgram {
    pub path: PathBuf,
    /// Mount that is hidden from the program: `crun` refuses hosts with control groups of both versions.
    pub hidden_mount: Option<PathBuf>,
    /// Set if its digest was given.
    pinned: Option<Arc<PinnedFile>>,
}

impl OciProgram {
    /// Finds a program on this host. `crun` starts containers faster; `runc` is better at the older versions of control
    /// groups.
    pub fn find() -> Option<Self> {
        let hierarchies = Hierarchies::mounted().unwrap_or_default();
        let names = if hierarchies.v1.is_empty() { ["crun", "runc"] } else { ["runc", "crun"] };
        let path = names.into_iter().find_map(find_program)?;
        Some(Self::at(path, &hierarchies))
    }

    pub fn at(path: PathBuf, hierarchies: &Hierarchies) -> Self {
        let is_crun = is_crun(&path);
        let is_mixed = !hierarchies.v1.is_empty();
        let unified = hierarchies.v2.as_ref().map(|mount| mount.at.clone());
        Self { path, hidden_mount: unified.filter(|_| is_crun && is_mixed), pinned: None }
    }

    /// The program at this path. With its digest it is verified before each use.
    pub fn given(path: PathBuf, sha256: Option<String>) -> Self {
        let pinned = sha256.map(|sha256| Arc::new(PinnedFile::new(path.clone(), sha256)));
        Self { pinned, ..Self::at(path, &Hierarchies::mounted().unwrap_or_default()) }
    }

    /// Fails if the program is not the one whose digest was given. Reads it only if it was changed since the last time.
    pub fn verify(&self) -> io::Result<()> {
        self.pinned.as_ref().map_or(Ok(()), |pinned| pinned.verify())
    }
}

fn is_crun(path: &Path) -> bool {
    // Also names with a version or an architecture.
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"crun"))
}

/// Returns the option without which a program needs root.
pub(super) fn rootless_option(path: &Path) -> &'static str {
    // Groups that the agent may create, the monitor has entered already.
    if is_crun(path) { "--cgroup-manager=disabled" } else { "--rootless=true" }
}

fn find_program(name: &str) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    DIRECTORIES.iter().map(|dir| Path::new(dir).join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::{Mount, V1Hierarchy};

    #[test]
    fn control_groups_of_version_2_are_hidden_from_crun_on_mixed_hosts_only() {
        let mount = |at: &str| Mount { at: PathBuf::from(at), root: "/".to_owned() };
        let v1 =
            V1Hierarchy { controllers: vec!["memory".to_owned()], mount: mount("/sys/fs/cgroup/memory") };
        let mixed = Hierarchies { v2: Some(mount("/sys/fs/cgroup/unified")), v1: vec![v1] };
        let modern = Hierarchies { v2: Some(mount("/sys/fs/cgroup")), v1: Vec::new() };
        let hidden = |path: &str, on| OciProgram::at(PathBuf::from(path), on).hidden_mount;
        assert_eq!(hidden("/usr/bin/crun", &mixed), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(hidden("/usr/bin/crun", &modern), None);
        assert_eq!(hidden("/usr/sbin/runc", &mixed), None);
    }
}
