//! Access control for local images that were pulled with credentials.
//!
//! Otherwise every user who knows the name of an image on the disk could use it. So a pull with credentials leaves a
//! record for the image: it is private, and these credentials gave access to it at that time. A task with the same
//! credentials may use it within the hour; for all others the registry is queried. Images that were pulled without
//! credentials have no record and are public.

use std::{fs, io, os::unix::fs::DirBuilderExt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::digest::sha256_hex;
use crate::shim::runtime::RegistryAuth;

/// Validity of a registry's response.
const PROOF_TTL_MS: i64 = 60 * 60 * 1000;
/// Maximum number of different credentials stored per image.
const PROOFS_MAX: usize = 64;

#[derive(Debug)]
pub(in crate::shim) struct PullAccessStore {
    dir: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct ImageAccess {
    proofs: Vec<AccessProof>,
}

#[derive(Debug, Serialize, Deserialize)]
struct AccessProof {
    /// Digest of credentials and repository, with a separate salt.
    digest: String,
    salt: String,
    at_ms: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shim) enum AccessState {
    /// The image was pulled without credentials.
    Public,
    Proven,
    /// The registry must be queried.
    Unproven,
}

impl PullAccessStore {
    pub(in crate::shim) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(in crate::shim) fn access(
        &self,
        image: &str,
        repository: &str,
        auth: Option<&RegistryAuth>,
        now_ms: i64,
    ) -> io::Result<AccessState> {
        let Some(note) = self.read(image)? else { return Ok(AccessState::Public) };
        let Some(auth) = auth else { return Ok(AccessState::Unproven) };
        let proven = note.proofs.iter().any(|proof| {
            (0..PROOF_TTL_MS).contains(&(now_ms - proof.at_ms))
                && proof.digest == credential_digest(&proof.salt, repository, auth)
        });
        Ok(if proven { AccessState::Proven } else { AccessState::Unproven })
    }

    /// Records that the image is private and that these credentials give access to it.
    pub(in crate::shim) fn add(
        &self,
        image: &str,
        repository: &str,
        auth: &RegistryAuth,
        now_ms: i64,
    ) -> io::Result<()> {
        let mut note = self.read(image)?.unwrap_or_default();
        note.proofs.retain(|proof| (0..PROOF_TTL_MS).contains(&(now_ms - proof.at_ms)));
        let surplus = (note.proofs.len() + 1).saturating_sub(PROOFS_MAX);
        note.proofs.drain(..surplus);
        let mut random = [0u8; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let salt = sha256_hex(&random);
        note.proofs.push(AccessProof {
            digest: credential_digest(&salt, repository, auth),
            salt,
            at_ms: now_ms,
        });
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let path = self.path(image);
        let half = path.with_extension(sha256_hex(&random));
        fs::write(&half, serde_json::to_vec(&note)?)?;
        fs::rename(&half, &path)
    }

    fn read(&self, image: &str) -> io::Result<Option<ImageAccess>> {
        match fs::read(self.path(image)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn path(&self, image: &str) -> PathBuf {
        self.dir.join(sha256_hex(image.as_bytes()))
    }
}

fn credential_digest(salt: &str, repository: &str, auth: &RegistryAuth) -> String {
    // Length prefixes keep two different pairs from producing the same text.
    let RegistryAuth { username, password } = auth;
    let parts = [salt, repository, username, password].map(|part| format!("{}:{part}", part.len()));
    sha256_hex(parts.concat().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TempDirGuard(PathBuf);

    impl Drop for TempDirGuard {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn auth(username: &str, password: &str) -> RegistryAuth {
        RegistryAuth { username: username.into(), password: password.into() }
    }

    #[test]
    fn a_private_image_needs_recently_proven_credentials() {
        let mut random = [0u8; 6];
        getrandom::fill(&mut random).unwrap();
        let dir = TempDirGuard(std::env::temp_dir().join(format!("windlass-proofs-{}", sha256_hex(&random))));
        let proofs = PullAccessStore::new(dir.0.clone());
        let ann = auth("ann", "secret");
        let access = |image: &str, repository: &str, auth: Option<&RegistryAuth>, now| {
            proofs.access(image, repository, auth, now).unwrap()
        };
        assert_eq!(access("sha256:1", "r/a", None, 0), AccessState::Public);
        proofs.add("sha256:1", "r/a", &ann, 1000).unwrap();
        assert_eq!(access("sha256:1", "r/a", Some(&ann), 2000), AccessState::Proven);
        assert_eq!(access("sha256:1", "r/a", None, 2000), AccessState::Unproven);
        assert_eq!(access("sha256:1", "r/a", Some(&auth("ann", "wrong")), 2000), AccessState::Unproven);
        assert_eq!(access("sha256:1", "r/a", Some(&auth("an", "nsecret")), 2000), AccessState::Unproven);
        assert_eq!(access("sha256:1", "r/b", Some(&ann), 2000), AccessState::Unproven);
        assert_eq!(access("sha256:1", "r/a", Some(&ann), 1000 + PROOF_TTL_MS), AccessState::Unproven);
        assert_eq!(
            access("sha256:1", "r/a", Some(&ann), 500),
            AccessState::Unproven,
            "a clock set back proves nothing"
        );
        assert_eq!(access("sha256:2", "r/a", None, 2000), AccessState::Public);
        let kept = fs::read_to_string(fs::read_dir(&dir.0).unwrap().next().unwrap().unwrap().path()).unwrap();
        assert!(!kept.contains("secret") && !kept.contains("ann"));
    }
}
