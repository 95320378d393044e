//! Static builds of `crun` or `runc` that the server brings along to hosts, so that nothing has to be installed there: one
//! per processor architecture, each with its digest.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::agent_binaries::{BinaryError, elf_arch};

/// Mark between path and digest.
const DIGEST_MARK: &str = "@sha256:";
const DIGEST_LEN: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum OciProgramError {
    #[error("`{text}` is not `FILE@sha256:HEX` with 64 hexadecimal digits")]
    Malformed { text: String },
    #[error("`{}` is named neither `crun…` nor `runc…`", path.display())]
    Unknown { path: PathBuf },
    #[error("there are two programs for {arch}")]
    Twice { arch: &'static str },
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error("{} has the SHA-256 {found}, expected {expected}", path.display())]
    Modified { path: PathBuf, found: String, expected: String },
}

/// Programs by architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OciPrograms {
    by_arch: BTreeMap<&'static str, OciProgram>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciProgram {
    path: PathBuf,
    /// `crun` or `runc`.
    pub name: &'static str,
    /// Hexadecimal.
    pub sha256: String,
}

impl OciPrograms {
    /// Reads `FILE@sha256:HEX[,…]`. Each file is for the architecture in its ELF header.
    pub fn parse(text: &str) -> Result<Self, OciProgramError> {
        let mut by_arch = BTreeMap::new();
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            let malformed = || OciProgramError::Malformed { text: one.to_owned() };
            let (path, sha256) = one.rsplit_once(DIGEST_MARK).ok_or_else(malformed)?;
            if sha256.len() != DIGEST_LEN || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(malformed());
            }
            let path = PathBuf::from(path);
            let name = program_name(&path).ok_or_else(|| OciProgramError::Unknown { path: path.clone() })?;
            let arch = elf_arch(&path)?;
            let program = OciProgram { path, name, sha256: sha256.to_ascii_lowercase() };
            program.load()?;
            if by_arch.insert(arch, program).is_some() {
                return Err(OciProgramError::Twice { arch });
            }
        }
        Ok(Self { by_arch })
    }

    pub fn get(&self, arch: &str) -> Option<&OciProgram> {
        self.by_arch.get(arch)
    }
}

impl OciProgram {
    /// Reads the file, and fails if it has another digest.
    pub fn load(&self) -> Result<Vec<u8>, OciProgramError> {
        let read = |source: io::Error| BinaryError::Read { path: self.path.clone(), source };
        let bytes = fs::read(&self.path).map_err(read)?;
        let found = hex::encode(Sha256::digest(&bytes));
        if found != self.sha256 {
            let (path, expected) = (self.path.clone(), self.sha256.clone());
            return Err(OciProgramError::Modified { path, found, expected });
        }
        Ok(bytes)
    }
}

fn program_name(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    ["crun", "runc"].into_iter().find(|known| name.starts_with(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_given_with_their_digest_and_a_changed_one_is_refused() {
        let dir = windlass_testkit::temp_dir("oci-programs").unwrap();
        let path = dir.path().join("crun-1.19-static");
        let program = |machine: u8| {
            let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0".to_vec();
            bytes.extend([machine, 0]);
            bytes
        };
        fs::write(&path, program(62)).unwrap();
        let sha256 = hex::encode(Sha256::digest(program(62)));
        let setting = format!("{}@sha256:{sha256}", path.display());
        let programs = OciPrograms::parse(&setting).unwrap();
        let found = programs.get("x86_64").unwrap();
        assert_eq!((found.name, found.load().unwrap()), ("crun", program(62)));
        assert!(programs.get("aarch64").is_none());
        assert_eq!(OciPrograms::parse("").unwrap(), OciPrograms::default());
        let twice = OciPrograms::parse(&format!("{setting},{setting}")).unwrap_err().to_string();
        assert_eq!(twice, "there are two programs for x86_64");
        for wrong in [path.display().to_string(), format!("{}@sha256:12", path.display())] {
            assert!(matches!(OciPrograms::parse(&wrong), Err(OciProgramError::Malformed { .. })), "{wrong}");
        }
        fs::write(&path, [program(62), vec![0]].concat()).unwrap();
        for refused in [found.load().map(drop), OciPrograms::parse(&setting).map(drop)] {
            assert!(matches!(refused, Err(OciProgramError::Modified { .. })), "{refused:?}");
        }
        fs::rename(&path, dir.path().join("podman")).unwrap();
        let other = format!("{}@sha256:{sha256}", dir.path().join("podman").display());
        assert!(matches!(OciPrograms::parse(&other), Err(OciProgramError::Unknown { .. })));
    }
}
