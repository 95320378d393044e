//! Encryption at rest: a keyring of master keys, and envelopes sealed with them.
//!
//! Each value has its own data key; the master key only wraps the data key. So a rotation (a new master key) rewraps 32
//! bytes per value and never touches the values. The location of a value (table, owner, name, version) is authenticated
//! with it: an envelope copied to another row does not open.
//!
//! The keyring is a file with mode 0600 and one key per line, `ID HEX`; the last one seals, all of them open. It is
//! never in the database: a backup of the database alone contains no secret.

use std::{
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use aes_gcm::{
    Aes256Gcm, KeyInit,
    aead::{Aead, Payload},
};
use parking_lot::RwLock;

const VERSION: u8 = 1;
const KEY_ID_BYTES: usize = 8;
const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
const KEY_BYTES: usize = 32;
const HEADER_BYTES: usize = 1 + KEY_ID_BYTES + NONCE_BYTES + KEY_BYTES + TAG_BYTES + NONCE_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("failed to access the key file `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("invalid line {line} of the key file `{}`: expected `ID KEY` in hexadecimal", path.display())]
    Line { path: PathBuf, line: usize },
    #[error("the key file `{}` is readable by other users: expected mode 0600", path.display())]
    Mode { path: PathBuf },
    #[error(
        "the directory `{}` of the key file is writable by other users, who could replace the file; run \
         `chmod go-w` on it, or set another file with `--key-file`",
        folder.display()
    )]
    UnsafeFolder { folder: PathBuf },
    #[error("the key file `{}` contains no key", path.display())]
    Empty { path: PathBuf },
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
    #[error("secrets are encrypted with key {id}, which is not in the key file (`--key-file`)")]
    UnknownKey { id: String },
    #[error("failed to decrypt a value: it is damaged or belongs to another record")]
    Damaged,
    #[error("failed to encrypt a value")]
    Seal,
}

struct MasterKey {
    id: [u8; KEY_ID_BYTES],
    cipher: Aes256Gcm,
}

/// The master keys. Cheap to share; every holder sees a rotation.
pub struct Keyring {
    path: PathBuf,
    keys: RwLock<Vec<MasterKey>>,
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keyring").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Keyring {
    /// Opens the key file, or creates it with a new key.
    pub fn open(path: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::File { path: path.to_owned(), source };
        if !path.try_exists().map_err(failed)? {
            // An existing folder may belong to another user, so its mode is not changed.
            if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                create_private_dirs(folder).map_err(failed)?;
            }
            write_key_file(path, &new_key_line()?).map_err(failed)?;
        }
        let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(KeyError::Mode { path: path.to_owned() });
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
            && is_writable_by_others(folder).map_err(failed)?
        {
            return Err(KeyError::UnsafeFolder { folder: folder.to_owned() });
        }
        let keys = parse_keys(path, &std::fs::read_to_string(path).map_err(failed)?)?;
        Ok(Self { path: path.to_owned(), keys: RwLock::new(keys) })
    }

    /// Creates a keyring with one new key and no file, for a server that ends with its process.
    pub fn ephemeral() -> Result<Self, KeyError> {
        let path = PathBuf::new();
        let keys = parse_keys(&path, &new_key_line()?)?;
        Ok(Self { path, keys: RwLock::new(keys) })
    }

    /// Adds a new key that seals from now on. The old keys still open.
    pub fn rotate(&self) -> Result<(), KeyError> {
        let failed = |source| KeyError::File { path: self.path.clone(), source };
        let mut keys = self.keys.write();
        let text = std::fs::read_to_string(&self.path).map_err(failed)? + &new_key_line()?;
        write_key_file(&self.path, &text).map_err(failed)?;
        *keys = parse_keys(&self.path, &text)?;
        Ok(())
    }

    /// Removes every key but the one that seals. Call only when nothing is sealed with the others.
    pub fn retire_old_keys(&self) -> Result<(), KeyError> {
        let failed = |source| KeyError::File { path: self.path.clone(), source };
        let mut keys = self.keys.write();
        let text = std::fs::read_to_string(&self.path).map_err(failed)?;
        let kept = text.lines().rfind(|line| !line.is_empty()).unwrap_or_default().to_owned() + "\n";
        write_key_file(&self.path, &kept).map_err(failed)?;
        *keys = parse_keys(&self.path, &kept)?;
        Ok(())
    }

    /// Id of the key that seals.
    pub fn sealing_key_id(&self) -> String {
        self.keys.read().last().map(|key| hex::encode(key.id)).unwrap_or_default()
    }

    /// Returns whether the keyring contains a key with this id.
    pub fn holds(&self, id: &str) -> bool {
        self.keys.read().iter().any(|key| hex::encode(key.id) == id)
    }

    /// Seals `plain`, bound to `belongs`.
    pub fn seal(&self, belongs: &AssociatedData<'_>, plain: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut data_key = [0_u8; KEY_BYTES];
        let mut inner = [0_u8; NONCE_BYTES];
        getrandom::fill(&mut data_key)?;
        getrandom::fill(&mut inner)?;
        let aad = belongs.bytes();
        let cipher = Aes256Gcm::new(&data_key.into());
        let body =
            cipher.encrypt(&inner.into(), Payload { msg: plain, aad: &aad }).map_err(|_| KeyError::Seal)?;
        let mut out = self.wrap_key(&aad, &data_key)?;
        out.extend_from_slice(&inner);
        out.extend_from_slice(&body);
        Ok(out)
    }

    pub fn open_sealed(&self, belongs: &AssociatedData<'_>, sealed: &[u8]) -> Result<Vec<u8>, KeyError> {
        let aad = belongs.bytes();
        let data_key = self.unwrap_key(&aad, sealed)?;
        let (inner, body) = sealed[HEADER_BYTES - NONCE_BYTES..].split_at(NONCE_BYTES);
        let inner: [u8; NONCE_BYTES] = inner.try_into().map_err(|_| KeyError::Damaged)?;
        Aes256Gcm::new(&data_key.into())
            .decrypt(&inner.into(), Payload { msg: body, aad: &aad })
            .map_err(|_| KeyError::Damaged)
    }

    /// Rewraps a value with the newest master key; `None` if it already uses that key.
    pub fn rewrap(&self, belongs: &AssociatedData<'_>, sealed: &[u8]) -> Result<Option<Vec<u8>>, KeyError> {
        if self.keys.read().last().is_some_and(|key| sealed.get(1..=KEY_ID_BYTES) == Some(key.id.as_slice()))
        {
            return Ok(None);
        }
        let aad = belongs.bytes();
        let data_key = self.unwrap_key(&aad, sealed)?;
        let mut out = self.wrap_key(&aad, &data_key)?;
        out.extend_from_slice(&sealed[HEADER_BYTES - NONCE_BYTES..]);
        Ok(Some(out))
    }

    fn wrap_key(&self, aad: &[u8], data_key: &[u8; KEY_BYTES]) -> Result<Vec<u8>, KeyError> {
        let mut nonce = [0_u8; NONCE_BYTES];
        getrandom::fill(&mut nonce)?;
        let keys = self.keys.read();
        let key = keys.last().ok_or(KeyError::Seal)?;
        let wrapped =
            key.cipher.encrypt(&nonce.into(), Payload { msg: data_key, aad }).map_err(|_| KeyError::Seal)?;
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.push(VERSION);
        out.extend_from_slice(&key.id);
        out.extend_from_slice(&nonce);
        out.extend_from_slice(&wrapped);
        Ok(out)
    }

    fn unwrap_key(&self, aad: &[u8], sealed: &[u8]) -> Result<[u8; KEY_BYTES], KeyError> {
        if sealed.len() < HEADER_BYTES + TAG_BYTES || sealed[0] != VERSION {
            return Err(KeyError::Damaged);
        }
        let (id, rest) = sealed[1..].split_at(KEY_ID_BYTES);
        let (nonce, rest) = rest.split_at(NONCE_BYTES);
        let nonce: [u8; NONCE_BYTES] = nonce.try_into().map_err(|_| KeyError::Damaged)?;
        let keys = self.keys.read();
        let key = keys
            .iter()
            .find(|key| key.id == id)
            .ok_or_else(|| KeyError::UnknownKey { id: hex::encode(id) })?;
        let plain = key
            .cipher
            .decrypt(&nonce.into(), Payload { msg: &rest[..KEY_BYTES + TAG_BYTES], aad })
            .map_err(|_| KeyError::Damaged)?;
        plain.try_into().map_err(|_| KeyError::Damaged)
    }
}

/// Location of a sealed value. The value opens only with the same location.
#[derive(Clone, Copy, Debug)]
pub struct AssociatedData<'a> {
    /// `secrets`, `users`, …
    pub table: &'static str,
    /// Id of the project or user that owns the value.
    pub owner: uuid::Uuid,
    pub name: &'a str,
    pub version: i64,
}

impl AssociatedData<'static> {
    /// A sealed column of a row. Every such column is listed in `db::sealed`.
    pub fn row(table: &'static str, column: &'static str, id: uuid::Uuid) -> Self {
        Self { table, owner: id, name: column, version: 1 }
    }
}

impl AssociatedData<'_> {
    /// Encodes each part with its length first, so that no two locations have the same bytes.
    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        for part in [self.table.as_bytes(), self.owner.as_bytes(), self.name.as_bytes()] {
            out.extend_from_slice(&(part.len() as u64).to_be_bytes());
            out.extend_from_slice(part);
        }
        out.extend_from_slice(&self.version.to_be_bytes());
        out
    }
}

fn new_key_line() -> Result<String, KeyError> {
    let mut bytes = [0_u8; KEY_ID_BYTES + KEY_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{} {}\n", hex::encode(&bytes[..KEY_ID_BYTES]), hex::encode(&bytes[KEY_ID_BYTES..])))
}

/// Writes a temporary file and renames it: a crash leaves the old file or the new one.
fn write_key_file(path: &Path, text: &str) -> io::Result<()> {
    let aside = path.with_extension("new");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&aside, path)?;
    if let Some(folder) = path.parent() {
        std::fs::File::open(folder)?.sync_all()?;
    }
    Ok(())
}

fn parse_keys(path: &Path, text: &str) -> Result<Vec<MasterKey>, KeyError> {
    let mut keys = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = || KeyError::Line { path: path.to_owned(), line: number + 1 };
        let (id, key) = line.trim().split_once(' ').ok_or_else(wrong)?;
        let id: [u8; KEY_ID_BYTES] =
            hex::decode(id).ok().and_then(|id| id.try_into().ok()).ok_or_else(wrong)?;
        let key: [u8; KEY_BYTES] =
            hex::decode(key).ok().and_then(|key| key.try_into().ok()).ok_or_else(wrong)?;
        keys.push(MasterKey { id, cipher: Aes256Gcm::new(&key.into()) });
    }
    if keys.is_empty() { Err(KeyError::Empty { path: path.to_owned() }) } else { Ok(keys) }
}

/// Creates the missing directories of a path, accessible only to the owner. Existing directories are unchanged.
pub(crate) fn create_private_dirs(path: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Returns whether every user may replace files in a directory. In a sticky one (`/tmp`), users cannot touch the files
/// of others. A directory that a group may write to causes a warning.
pub(crate) fn is_writable_by_others(folder: &Path) -> std::io::Result<bool> {
    let mode = std::fs::metadata(folder)?.permissions().mode();
    if mode & 0o1020 == 0o020 {
        tracing::warn!(folder = %folder.display(), "directory is writable by its group; run `chmod g-w` on it");
    }
    Ok(mode & 0o1002 == 0o002)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        path::{Path, PathBuf},
    };

    use uuid::Uuid;
    use windlass_testkit::{TempDir, temp_dir};

    use super::{AssociatedData, KeyError, Keyring};

    /// A keyring in the file `keys/master` of a temporary directory.
    fn ring() -> (Keyring, TempDir) {
        let home = temp_dir("ring").unwrap();
        (Keyring::open(&file(&home)).unwrap(), home)
    }

    fn file(home: &TempDir) -> PathBuf {
        home.path().join("keys/master")
    }

    const HOME: AssociatedData<'static> =
        AssociatedData { table: "secrets", owner: Uuid::nil(), name: "a", version: 1 };

    #[test]
    fn a_sealed_value_opens_only_with_its_associated_data() {
        let (ring, _home) = ring();
        let sealed = ring.seal(&HOME, b"value").unwrap();
        assert_eq!(ring.open_sealed(&HOME, &sealed).unwrap(), b"value");
        for other in [
            AssociatedData { name: "b", ..HOME },
            AssociatedData { version: 2, ..HOME },
            AssociatedData { owner: Uuid::max(), ..HOME },
            AssociatedData { table: "users", ..HOME },
        ] {
            assert!(matches!(ring.open_sealed(&other, &sealed), Err(KeyError::Damaged)));
        }
    }

    #[test]
    fn every_bit_flip_and_truncation_is_detected() {
        let (ring, _home) = ring();
        let sealed = ring.seal(&HOME, b"value").unwrap();
        for at in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[at] ^= 1;
            assert!(ring.open_sealed(&HOME, &bad).is_err(), "byte {at}");
            assert!(ring.open_sealed(&HOME, &sealed[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn key_rotation_keeps_old_values_readable_until_old_keys_are_retired() {
        let (ring, home) = ring();
        let old = ring.seal(&HOME, b"value").unwrap();
        ring.rotate().unwrap();
        let moved = ring.rewrap(&HOME, &old).unwrap().unwrap();
        assert!(ring.rewrap(&HOME, &moved).unwrap().is_none());
        ring.retire_old_keys().unwrap();
        let again = Keyring::open(&file(&home)).unwrap();
        assert_eq!(again.open_sealed(&HOME, &moved).unwrap(), b"value");
        assert!(matches!(again.open_sealed(&HOME, &old), Err(KeyError::UnknownKey { .. })));
    }

    #[test]
    fn a_key_file_that_others_can_read_is_refused() {
        let (_, home) = ring();
        let path = file(&home);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(matches!(Keyring::open(&path), Err(KeyError::Mode { .. })));
    }

    #[test]
    fn existing_folders_keep_their_mode_and_world_writable_ones_are_refused() {
        let home = temp_dir("folders").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let theirs = home.path().join("etc");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o755)).unwrap();
        Keyring::open(&theirs.join("master")).unwrap();
        assert_eq!(mode(&theirs), 0o755, "it was not ours to close");
        assert_eq!(mode(&theirs.join("master")), 0o600);
        Keyring::open(&theirs.join("ours/deep/master")).unwrap();
        assert_eq!((mode(&theirs.join("ours")), mode(&theirs.join("ours/deep"))), (0o700, 0o700));
        std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(matches!(Keyring::open(&theirs.join("master")), Err(KeyError::UnsafeFolder { .. })));
        std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o1777)).unwrap();
        Keyring::open(&theirs.join("master")).unwrap();
    }

    #[test]
    fn sealing_a_value_twice_gives_different_ciphertexts() {
        let (ring, _home) = ring();
        assert_ne!(ring.seal(&HOME, b"value").unwrap(), ring.seal(&HOME, b"value").unwrap());
    }
}
