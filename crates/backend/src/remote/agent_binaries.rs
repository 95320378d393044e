//! Agent binaries that the server can upload to hosts: one per processor architecture.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

/// Architectures by the name in `uname -m`, with their number in ELF files.
const ELF_MACHINES: [(&str, u16); 2] = [("x86_64", 62), ("aarch64", 183)];
/// Maximum size of a binary; a larger file is not an agent.
const BYTES_MAX: u64 = 512 << 20;

#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not a Linux executable for a supported architecture")]
    Foreign { path: PathBuf },
    #[error("{path} is larger than {BYTES_MAX} bytes")]
    TooLarge { path: PathBuf },
}

/// Binaries by architecture. A replaced file is detected at the next use.
#[derive(Debug, Default)]
pub struct AgentBinaries {
    by_arch: BTreeMap<&'static str, BinaryFile>,
}

#[derive(Debug)]
struct BinaryFile {
    path: PathBuf,
    /// Kept in memory only during uploads; its checksum is kept.
    read: Mutex<Option<(FileStamp, String, Weak<AgentBinary>)>>,
}

/// Identifies one version of a file.
type FileStamp = (u64, i64, i64, u64);

/// Binary with its contents.
#[derive(Debug)]
pub struct AgentBinary {
    pub bytes: Vec<u8>,
    /// Hexadecimal.
    pub sha256: String,
}

impl AgentBinaries {
    /// Uses the agent at `path`, and those for other architectures next to it as `NAME-x86_64` and `NAME-aarch64`.
    pub fn next_to(path: &Path) -> Self {
        let named = ELF_MACHINES.iter().map(|(arch, _)| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!("-{arch}"));
            PathBuf::from(name)
        });
        Self::of([path.to_owned()].into_iter().chain(named))
    }

    /// Uses these files, each for the architecture in its ELF header; the first of each counts.
    pub fn of(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut by_arch = BTreeMap::new();
        for path in paths {
            if let Ok(arch) = elf_arch(&path) {
                by_arch.entry(arch).or_insert_with(|| BinaryFile { path, read: Mutex::new(None) });
            }
        }
        Self { by_arch }
    }

    /// Returns the architectures for which there is a binary, for messages.
    pub fn arches(&self) -> Vec<&'static str> {
        self.by_arch.keys().copied().collect()
    }

    /// Returns the SHA-256 of the binary for an architecture; `None` if there is no such binary. Reads the file if it
    /// has changed.
    pub fn sum(&self, arch: &str) -> Result<Option<String>, BinaryError> {
        let Some(kept) = self.by_arch.get(arch) else { return Ok(None) };
        let stamp = file_stamp(&kept.path)?;
        if let Some((then, sum, _)) = &*kept.read.lock()
            && *then == stamp
        {
            return Ok(Some(sum.clone()));
        }
        Ok(Some(kept.load()?.sha256.clone()))
    }

    /// Returns the binary itself, shared between concurrent uploads.
    pub fn load(&self, arch: &str) -> Result<Option<Arc<AgentBinary>>, BinaryError> {
        self.by_arch.get(arch).map(BinaryFile::load).transpose()
    }
}

impl BinaryFile {
    fn load(&self) -> Result<Arc<AgentBinary>, BinaryError> {
        // Held while reading, so that concurrent callers share the result.
        let mut read = self.read.lock();
        let stamp = file_stamp(&self.path)?;
        if let Some((then, _, binary)) = &*read
            && *then == stamp
            && let Some(binary) = binary.upgrade()
        {
            return Ok(binary);
        }
        if stamp.3 > BYTES_MAX {
            return Err(BinaryError::TooLarge { path: self.path.clone() });
        }
        let bytes = fs::read(&self.path).map_err(read_error(&self.path))?;
        let sha256 = hex::encode(Sha256::digest(&bytes));
        let binary = Arc::new(AgentBinary { bytes, sha256: sha256.clone() });
        *read = Some((stamp, sha256, Arc::downgrade(&binary)));
        Ok(binary)
    }
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> BinaryError {
    let path = path.to_owned();
    |source| BinaryError::Read { path, source }
}

fn file_stamp(path: &Path) -> Result<FileStamp, BinaryError> {
    let meta = fs::metadata(path).map_err(read_error(path))?;
    Ok((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.size()))
}

/// Returns the architecture in the ELF header of a program.
pub(super) fn elf_arch(path: &Path) -> Result<&'static str, BinaryError> {
    let mut head = [0u8; 20];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut head)).map_err(read_error(path))?;
    let machine = u16::from_le_bytes([head[18], head[19]]);
    let known = ELF_MACHINES.iter().find(|(_, number)| *number == machine);
    match known {
        Some((arch, _)) if head.starts_with(b"\x7fELF") => Ok(arch),
        Some(_) | None => Err(BinaryError::Foreign { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(machine: u16, rest: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0".to_vec();
        bytes.extend(machine.to_le_bytes());
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn agent_binaries_are_identified_by_elf_header_and_reloaded_when_replaced() {
        let dir = windlass_testkit::temp_dir("binaries").unwrap();
        let dir = dir.path();
        let agent = dir.join("agent");
        fs::write(&agent, program(62, b"one")).unwrap();
        fs::write(dir.join("agent-aarch64"), program(183, b"")).unwrap();
        fs::write(dir.join("agent-x86_64"), b"#!/bin/sh, and no program").unwrap();
        let binaries = AgentBinaries::next_to(&agent);
        let arches = binaries.arches();
        let (first, held) = (binaries.sum("x86_64").unwrap(), binaries.load("x86_64").unwrap().unwrap());
        let same = Arc::ptr_eq(&held, &binaries.load("x86_64").unwrap().unwrap());
        fs::write(dir.join("fresh"), program(62, b"two")).unwrap();
        fs::rename(dir.join("fresh"), &agent).unwrap();
        let second = binaries.sum("x86_64").unwrap();
        let none = binaries.sum("riscv64").unwrap();
        assert_eq!(arches, ["aarch64", "x86_64"]);
        assert_eq!(first.as_deref(), Some(held.sha256.as_str()));
        assert!(same && first != second && none.is_none());
    }
}
