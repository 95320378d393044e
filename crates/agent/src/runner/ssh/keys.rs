//! Keys of clients and of this server.

use std::{
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    sync::Arc,
};

use parking_lot::RwLock;
use russh::keys::{
    Algorithm, PrivateKey, PublicKey,
    ssh_key::{HashAlg, LineEnding, public::KeyData},
};

/// Maximum number of bytes read of an `authorized_keys` file.
const FILE_BYTES_MAX: u64 = 256 * 1024;
/// Maximum number of keys: more than are ever maintained by hand.
const KEYS_MAX: usize = 1024;
/// Minimum length of an RSA key; shorter ones are insecure today.
const RSA_BITS_MIN: u32 = 2048;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("failed to read host key {path}")]
    Read {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("failed to parse host key {path}")]
    Understand {
        path: String,
        #[source]
        source: russh::keys::ssh_key::Error,
    },
    #[error("failed to create a host key")]
    Make(#[source] russh::keys::ssh_key::Error),
    #[error("failed to store host key {path}")]
    Keep {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// Keys that may log in. Clones share one list; keys may be added while the server runs.
#[derive(Clone, Debug, Default)]
pub struct AuthorizedKeys(Arc<RwLock<Vec<KeyData>>>);

impl AuthorizedKeys {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds keys in the format of an `authorized_keys` file and returns how many lines were acceptable keys.
    pub fn add(&self, text: &str) -> usize {
        let found = parse(text);
        let count = found.len();
        let mut keys = self.0.write();
        for key in found {
            if keys.len() < KEYS_MAX && !keys.contains(&key) {
                keys.push(key);
            }
        }
        count
    }

    pub(super) fn contains(&self, key: &PublicKey) -> bool {
        self.0.read().contains(key.key_data())
    }
}

/// Parses keys in the format of an `authorized_keys` file.
///
/// A line with options is skipped: an option is a restriction (`command=`, `from=`), and one that is not enforced must
/// not be ignored.
fn parse(text: &str) -> Vec<KeyData> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter_map(|line| PublicKey::from_openssh(line).ok())
        .map(|key| key.key_data().clone())
        .filter(is_strong)
        .take(KEYS_MAX)
        .collect()
}

fn is_strong(key: &KeyData) -> bool {
    if let KeyData::Rsa(rsa) = key { rsa.key_size() >= RSA_BITS_MIN } else { !matches!(key, KeyData::Dsa(_)) }
}

/// Refuses signatures with SHA-1; accepts everything else that russh verifies.
pub(super) fn is_acceptable(algorithm: &Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::Ed25519
            | Algorithm::Ecdsa { .. }
            | Algorithm::SkEd25519
            | Algorithm::SkEcdsaSha2NistP256
            | Algorithm::Rsa { hash: Some(HashAlg::Sha256 | HashAlg::Sha512) }
    )
}

/// Returns whether a user's own file contains the key. Reads the disk: not for the event loop.
///
/// The file counts only if no one except its owner and root may write it, as with sshd.
pub(super) fn file_contains(file: &Path, uid: u32, key: &PublicKey) -> bool {
    use std::{io::Read as _, os::unix::fs::MetadataExt as _};
    // Not blocking: a FIFO with that name must not hang the login.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    let Ok(opened) = std::fs::OpenOptions::new().read(true).custom_flags(nonblock).open(file) else {
        return false;
    };
    let Ok(meta) = opened.metadata() else { return false };
    let owned = meta.uid() == uid || meta.uid() == 0;
    if !meta.is_file() || !owned || meta.permissions().mode() & 0o022 != 0 {
        return false;
    }
    let mut text = Vec::new();
    if opened.take(FILE_BYTES_MAX).read_to_end(&mut text).is_err() {
        return false;
    }
    parse(&String::from_utf8_lossy(&text)).contains(key.key_data())
}

/// Host key of this server: Ed25519.
#[derive(Clone, Debug)]
pub struct HostKey(pub(super) PrivateKey);

impl HostKey {
    pub fn make() -> Result<Self, KeyError> {
        let mut seed = [0u8; 32];
        getrandom::fill(&mut seed).map_err(|_| KeyError::Make(russh::keys::ssh_key::Error::Crypto))?;
        let pair = russh::keys::ssh_key::private::Ed25519Keypair::from_seed(&seed);
        Ok(Self(PrivateKey::from(pair)))
    }

    /// Returns the key stored in `file`; creates and stores it if there is none, so that a restart presents the same
    /// key.
    pub fn keep(file: &Path) -> Result<Self, KeyError> {
        let path = || file.display().to_string();
        match std::fs::read(file) {
            Ok(text) => PrivateKey::from_openssh(text)
                .map(Self)
                .map_err(|source| KeyError::Understand { path: path(), source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let made = Self::make()?;
                let text = made.0.to_openssh(LineEnding::LF).map_err(KeyError::Make)?;
                write_new(file, text.as_bytes()).map_err(|source| KeyError::Keep { path: path(), source })?;
                Ok(made)
            }
            Err(source) => Err(KeyError::Read { path: path(), source }),
        }
    }

    /// Returns the public half as a line for `known_hosts` and similar files.
    pub fn public(&self) -> String {
        self.0.public_key().to_openssh().unwrap_or_default()
    }
}

/// Writes a file atomically: to a temporary name, then renamed.
fn write_new(file: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    let next_to = file.with_extension("new");
    match std::fs::remove_file(&next_to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next_to)?;
    opened.write_all(bytes)?;
    opened.sync_all()?;
    std::fs::rename(&next_to, file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ADA: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILM+rvN+ot98qgEN796jTiQfZfG1KaT0PtFDJ/XFSqti ada@home";

    #[test]
    fn authorized_keys_may_contain_comments_blank_lines_and_duplicates() {
        let keys = AuthorizedKeys::new();
        assert_eq!(keys.add(&format!("# a remark\n\n  {ADA}\r\nrubbish\n{ADA}\n")), 2);
        assert_eq!(keys.0.read().len(), 1, "one key, however often it is written");
        assert!(keys.contains(&PublicKey::from_openssh(ADA).unwrap()));
        assert!(!keys.contains(HostKey::make().unwrap().0.public_key()));
    }

    #[test]
    fn authorized_keys_lines_with_options_are_ignored() {
        assert_eq!(parse(&format!("command=\"/bin/true\" {ADA}")).len(), 0);
        assert_eq!(parse(&format!("restrict {ADA}")).len(), 0);
    }

    #[test]
    fn signatures_with_sha1_are_refused() {
        assert!(is_acceptable(&Algorithm::Ed25519));
        assert!(is_acceptable(&Algorithm::Rsa { hash: Some(HashAlg::Sha512) }));
        assert!(!is_acceptable(&Algorithm::Rsa { hash: None }));
        assert!(!is_acceptable(&Algorithm::Dsa));
    }

    #[test]
    fn the_host_key_is_reused_and_readable_only_by_its_owner() {
        let dir = std::env::temp_dir().join(format!("windlass-hostkey-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("host_key");
        let first = HostKey::keep(&file).unwrap().public();
        let mode = std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        let second = HostKey::keep(&file).unwrap().public();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!((first, mode), (second, 0o600));
    }

    #[test]
    fn an_authorized_keys_file_writable_by_others_is_ignored() {
        let dir = std::env::temp_dir().join(format!("windlass-authkeys-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("authorized_keys");
        std::fs::write(&file, ADA).unwrap();
        let ada = PublicKey::from_openssh(ADA).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let mut message = Vec::new();
        for mode in [0o600, 0o644, 0o664, 0o666] {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            message.push(file_contains(&file, uid, &ada));
        }
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(message, [true, true, false, false]);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn fuzz_of_authorized_keys(
            words in prop::collection::vec(
                prop::sample::select(&["ssh-ed25519 ", "ssh-rsa ", "AAAAC3NzaC1lZDI1NTE5AAAAI", "AAAA", "=", " ", "\n", "from=\"x\" ", "#", "\0", ADA][..]),
                0..20,
            ),
            noise in "(?s).{0,200}",
        ) {
            for text in [words.concat(), noise] {
                prop_assert!(AuthorizedKeys::new().add(&text) <= text.lines().count());
            }
        }
    }
}
