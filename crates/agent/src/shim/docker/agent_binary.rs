//! The agent's binary as tasks see it: a copy named by its digest.
//!
//! A copy, so that an upgrade of the agent does not change the binary that runs in tasks. Containers mount it
//! read-only; its digest is verified before every start, since a privileged task could have circumvented that.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::pinned_file::{PinnedFile, hash_to};

#[derive(Debug)]
pub(in crate::shim) struct AgentBinary {
    file: PinnedFile,
}

impl AgentBinary {
    /// Copies `exe` below `home`, unless the copy exists. A first copy is hashed while it is written: the file is read once.
    pub(in crate::shim) fn install(home: &Path, exe: &Path) -> io::Result<Self> {
        let dir = home.join("bin");
        fs::create_dir_all(&dir)?;
        if fs::read_dir(&dir)?.next().is_some() {
            let sha256 = hash_to(&mut File::open(exe)?, &mut io::sink())?;
            let binary = Self { file: PinnedFile::new(dir.join(&sha256), sha256) };
            if binary.verify().is_ok() {
                return Ok(binary);
            }
        }
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let half = dir.join(format!("{}.incomplete", hex::encode(random)));
        Self::copy(exe, &dir, &half).inspect_err(|_| {
            let _ = fs::remove_file(&half);
        })
    }

    /// Not synchronised: a copy that a power failure damages is found by its digest, and replaced.
    fn copy(exe: &Path, dir: &Path, half: &Path) -> io::Result<Self> {
        let mut target = File::options().write(true).create_new(true).mode(0o500).open(half)?;
        let sha256 = hash_to(&mut File::open(exe)?, &mut target)?;
        target.set_permissions(fs::Permissions::from_mode(0o555))?;
        let path = dir.join(&sha256);
        fs::rename(half, &path)?;
        Ok(Self { file: PinnedFile::from_written(path, sha256, &target)? })
    }

    pub(in crate::shim) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Fails if the copy was changed. The content is read only if the file was modified since the last verification.
    pub(in crate::shim) fn verify(&self) -> io::Result<()> {
        self.file.verify()
    }

    /// Verifies the copy that a container uses, which may be that of an older agent. Its name is the expected digest.
    pub(in crate::shim) fn verify_copy(&self, path: &Path) -> io::Result<()> {
        if path == self.path() {
            return self.verify();
        }
        let is_ours = path.parent() == self.path().parent();
        if is_ours && path.file_name() == Some(hash_to(&mut File::open(path)?, &mut io::sink())?.as_ref()) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the agent's binary was modified"))
    }

    /// Removes copies of other versions that no container uses, and incomplete copies left by a crash.
    pub(in crate::shim) fn remove_unused(&self, used: &[PathBuf]) {
        let entries = self.path().parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if path != self.path() && !used.contains(&path) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TestHome(PathBuf);

    impl TestHome {
        fn new() -> Self {
            let mut random = [0u8; 6];
            getrandom::fill(&mut random).unwrap();
            let path = std::env::temp_dir().join(format!("windlass-binary-{}", hex::encode(random)));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for TestHome {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_old_copy_is_kept_when_the_agent_is_replaced() {
        let home = TestHome::new();
        let exe = home.0.join("agent");
        fs::write(&exe, "one").unwrap();
        let one = AgentBinary::install(&home.0, &exe).unwrap();
        fs::write(&exe, "two").unwrap();
        let two = AgentBinary::install(&home.0, &exe).unwrap();
        assert_ne!(one.path(), two.path());
        assert_eq!(fs::read(one.path()).unwrap(), b"one");
        assert!(one.verify().is_ok());
        assert_eq!(fs::read_dir(home.0.join("bin")).unwrap().count(), 2, "no half copies");
    }

    #[test]
    fn a_modified_agent_copy_is_detected_and_replaced() {
        let home = TestHome::new();
        let exe = home.0.join("agent");
        fs::write(&exe, "good").unwrap();
        let binary = AgentBinary::install(&home.0, &exe).unwrap();
        fs::remove_file(binary.path()).unwrap();
        fs::write(binary.path(), "evil").unwrap();
        assert!(binary.verify().is_err());
        assert!(AgentBinary::install(&home.0, &exe).is_ok());
        assert_eq!(fs::read(binary.path()).unwrap(), b"good");
        assert!(binary.verify().is_ok());
    }
}
