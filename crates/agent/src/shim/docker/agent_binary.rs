//! The agent's binary as tasks see it: a copy named by its digest.
//!
//! A copy, so that an upgrade of the agent does not change the binary that runs in tasks. Containers mount it
//! read-only; its digest is verified before every start, since a privileged task could have circumvented that.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use ring::digest::{Context, SHA256};

#[derive(Debug)]
pub(in crate::shim) struct AgentBinary {
    path: PathBuf,
    sha256: String,
    /// Stamp of the file when its content was last verified.
    trusted: Mutex<Option<FileStamp>>,
}

/// Changes with every write to the file, also with one that resets the modification time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

const CHUNK_BYTES: usize = 256 * 1024;

impl AgentBinary {
    /// Copies `exe` below `home`, unless the copy exists. A first copy is hashed while it is written: the file is read once.
    pub(in crate::shim) fn install(home: &Path, exe: &Path) -> io::Result<Self> {
        let dir = home.join("bin");
        fs::create_dir_all(&dir)?;
        if fs::read_dir(&dir)?.next().is_some() {
            let sha256 = hash_to(&mut File::open(exe)?, &mut io::sink())?;
            let binary = Self { path: dir.join(&sha256), sha256, trusted: Mutex::new(None) };
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
        let trusted = Mutex::new(Some(FileStamp::from_file(&target)?));
        Ok(Self { path, sha256, trusted })
    }

    pub(in crate::shim) fn path(&self) -> &Path {
        &self.path
    }

    /// Fails if the copy was changed. The content is read only if the file was modified since the last verification.
    pub(in crate::shim) fn verify(&self) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        let stamp = FileStamp::from_file(&file)?;
        if *self.trusted.lock() == Some(stamp) {
            return Ok(());
        }
        if hash_to(&mut file, &mut io::sink())? != self.sha256 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the agent's binary was modified"));
        }
        *self.trusted.lock() = Some(stamp);
        Ok(())
    }

    /// Verifies the copy that a container uses, which may be that of an older agent. Its name is the expected digest.
    pub(in crate::shim) fn verify_copy(&self, path: &Path) -> io::Result<()> {
        if path == self.path {
            return self.verify();
        }
        let is_ours = path.parent() == self.path.parent();
        if is_ours && path.file_name() == Some(hash_to(&mut File::open(path)?, &mut io::sink())?.as_ref()) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the agent's binary was modified"))
    }

    /// Removes copies of other versions that no container uses, and incomplete copies left by a crash.
    pub(in crate::shim) fn remove_unused(&self, used: &[PathBuf]) {
        let entries = self.path.parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if path != self.path && !used.contains(&path) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

impl FileStamp {
    fn from_file(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        let changed = (meta.ctime(), meta.ctime_nsec());
        Ok(Self { device: meta.dev(), inode: meta.ino(), size: meta.size(), changed })
    }
}

/// Copies all bytes, and returns their digest.
fn hash_to(from: &mut impl Read, target: &mut impl Write) -> io::Result<String> {
    let mut context = Context::new(&SHA256);
    let mut chunk = vec![0u8; CHUNK_BYTES];
    loop {
        let read = from.read(&mut chunk)?;
        let Some(piece) = chunk.get(..read).filter(|piece| !piece.is_empty()) else { break };
        context.update(piece);
        target.write_all(piece)?;
    }
    Ok(hex::encode(context.finish().as_ref()))
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
