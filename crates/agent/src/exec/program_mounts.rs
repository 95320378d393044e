//! Mounts of a program: directories and small files below its root.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::AttemptError;

/// Joins a path to the root so that it stays inside, whatever components it has.
pub(super) fn path_in_root(root: &Path, target: &str) -> PathBuf {
    let parts = Path::new(target).components().filter_map(|part| match part {
        std::path::Component::Normal(part) => Some(part),
        std::path::Component::Prefix(_)
        | std::path::Component::RootDir
        | std::path::Component::CurDir
        | std::path::Component::ParentDir => None,
    });
    parts.fold(root.to_owned(), |path, part| path.join(part))
}

/// Users who may use the mounts, besides the executor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MountAccess {
    Owner,
    /// Whichever user the image of the container has. Other users of the host cannot enter the directories above.
    AnyUserInContainer,
}

impl MountAccess {
    const fn file_mode(self) -> u32 {
        match self {
            Self::Owner => 0o600,
            Self::AnyUserInContainer => 0o644,
        }
    }

    /// Makes a directory writable.
    fn open_dir(self, path: &Path) -> io::Result<()> {
        match self {
            Self::Owner => Ok(()),
            Self::AnyUserInContainer => fs::set_permissions(path, fs::Permissions::from_mode(0o1777)),
        }
    }
}

/// Creates the mounts that are directories and small files, and returns their targets. Mounts that need a file store
/// are not supported.
pub(super) fn create_mounts(
    root: &Path,
    mounts: &Value,
    access: MountAccess,
) -> Result<Vec<String>, AttemptError> {
    let mut targets = Vec::new();
    for (target, create_mounts) in mounts.as_object().into_iter().flatten() {
        let path = path_in_root(root, target);
        targets.push(target.clone());
        let kind = create_mounts["kind"].as_str().unwrap_or_default();
        let content = match kind {
            "tmp" => {
                fs::create_dir_all(&path).map_err(AttemptError::Host)?;
                access.open_dir(&path).map_err(AttemptError::Host)?;
                continue;
            }
            "text" => create_mounts["content"].as_str().unwrap_or_default().to_owned(),
            "json" => create_mounts["content"].to_string(),
            other => {
                let why = format!(
                    "unsupported kind `{other}` of mount `{target}`: expected `tmp`, `text` or `json`"
                );
                return Err(AttemptError::CannotRun { reason: "start_failed", why });
            }
        };
        if let Some(above) = path.parent() {
            fs::create_dir_all(above).map_err(AttemptError::Host)?;
        }
        fs::write(&path, content).map_err(AttemptError::Host)?;
        let mode = fs::Permissions::from_mode(access.file_mode());
        fs::set_permissions(&path, mode).map_err(AttemptError::Host)?;
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_testkit::temp_dir;

    use super::*;

    #[test]
    fn mounts_are_directories_and_files_below_the_root_and_other_kinds_are_refused() {
        let dir = temp_dir("mounts").unwrap();
        let mounts = json!({
            "/out": { "kind": "tmp" }, "/etc/a.txt": { "kind": "text", "content": "x" },
            "/../b.json": { "kind": "json", "content": { "a": 1 } },
        });
        create_mounts(dir.path(), &mounts, MountAccess::Owner).unwrap();
        assert!(dir.path().join("out").is_dir());
        let content = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!((content("etc/a.txt").as_str(), content("b.json").as_str()), ("x", r#"{"a":1}"#));
        let refused =
            create_mounts(dir.path(), &json!({ "/in": { "kind": "collection" } }), MountAccess::Owner);
        let Err(AttemptError::CannotRun { why, .. }) = refused else { panic!("it was accepted") };
        assert!(why.contains("unsupported kind `collection` of mount `/in`"), "{why}");
    }

    #[test]
    fn mounts_of_a_container_can_be_used_by_every_user_in_it() {
        let mounts =
            json!({ "/out": { "kind": "tmp" }, "/.windlass/job": { "kind": "text", "content": "x" } });
        for (access, file, out) in
            [(MountAccess::Owner, 0o600, 0o755), (MountAccess::AnyUserInContainer, 0o644, 0o1777)]
        {
            let dir = temp_dir("mounts").unwrap();
            create_mounts(dir.path(), &mounts, access).unwrap();
            let mode =
                |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode(".windlass/job"), file, "{access:?}");
            // The other bits of a directory depend on the umask.
            assert_eq!(mode("out") & 0o1007, out & 0o1007, "{access:?}");
        }
    }
}
