//! Keys of users in the `authorized_keys` of the host, for the lifetime of their task: users reach the SSH server of a
//! task through that of the host.
//!
//! A key permits its holder to forward connections to the ports of their tasks and nothing else. The host's SSH server
//! uses the first line with a key, so each line of a key permits the ports of all tasks that have it. Lines carry the
//! task's id, and only lines with this mark are ever changed; the rest of the file stays the same, byte for byte. The
//! files belong to other users, so they are opened by handle, without following links. The account that receives a
//! task's keys is recorded in the shim's home beforehand, so that the keys can be removed after a crash.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use parking_lot::{Mutex, MutexGuard};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use windlass_api::agent::runner::User;
use windlass_model::id::SubmissionId;

use crate::runner::user::{Account, UserDatabase, UserError};

/// Ends each line of the shim, followed by the task's id.
const MARK: &str = " windlass-task=";
/// Precedes the mark: the ports of the task itself; empty if it may reach any.
const PORTS: &str = " windlass-ports=";
const FILE: &str = "authorized_keys";
const TEMP_FILE: &str = ".authorized_keys.windlass";
/// Longer files are not changed.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of keys of one task.
pub const KEYS_MAX: usize = 64;
const KEY_BYTES_MAX: usize = 16 * 1024;
const KEY_KINDS: [&str; 7] = [
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
];

#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error(transparent)]
    User(#[from] UserError),
    #[error("invalid key {number}: {why}")]
    Key { number: usize, why: &'static str },
    #[error("too many keys: {count}, at most {KEYS_MAX} are allowed")]
    TooMany { count: usize },
    #[error("failed to write {file}: {why}")]
    Odd { file: PathBuf, why: &'static str },
    #[error("failed to write {file}")]
    Write {
        file: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Accounts of this host. Writes are serialized.
#[derive(Debug)]
pub struct HostAuthorizedKeys {
    /// Directory that contains `/etc/passwd` and the homes: `/` except in tests.
    root: PathBuf,
    /// Directory with one file per task, which contains the user's name.
    notes: PathBuf,
    pub(super) writing: Mutex<()>,
}

/// Permission for the holders of `keys` to connect through the account of `user` during the lifetime of `task`.
#[derive(Clone, Copy, Debug)]
pub struct KeyGrant<'a> {
    pub task: SubmissionId,
    pub user: &'a str,
    pub keys: &'a [String],
    /// Permitted ports of the host's loopback; empty permits any.
    pub ports: &'a [u16],
}

impl HostAuthorizedKeys {
    pub fn new(root: &Path, home: &Path) -> Self {
        Self { root: root.to_owned(), notes: home.join("keys"), writing: Mutex::new(()) }
    }

    /// Adds or replaces the task's lines. Idempotent. `is_wanted` is called under the write lock: a task that ended
    /// meanwhile must not receive its keys again.
    pub fn grant(&self, grant: &KeyGrant<'_>, is_wanted: impl Fn() -> bool) -> Result<(), KeysError> {
        let ours = render_lines(grant)?;
        let one_at_a_time = self.writing.lock();
        if !is_wanted() {
            return Ok(());
        }
        let note = self.notes.join(grant.task.to_string());
        let noted = fs::create_dir_all(&self.notes).and_then(|()| fs::write(&note, grant.user));
        noted.map_err(|source| KeysError::Write { file: note, source })?;
        self.rewrite(&one_at_a_time, grant.user, MissingDir::Create, |old| {
            rewrite_lines(old, &|id| id == grant.task.to_string(), &ours)
        })
    }

    /// Removes the task's lines. Succeeds if there are none, or if the user no longer exists.
    pub fn revoke(&self, task: SubmissionId, user: &str) -> Result<(), KeysError> {
        let goes = |id: &str| id == task.to_string();
        let one_at_a_time = self.writing.lock();
        match self.rewrite(&one_at_a_time, user, MissingDir::Ignore, |old| rewrite_lines(old, &goes, "")) {
            Err(KeysError::User(UserError::NoUser(_))) | Ok(()) => {}
            Err(error) => return Err(error),
        }
        let note = self.notes.join(task.to_string());
        match fs::remove_file(&note) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(KeysError::Write { file: note, source })
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Removes the lines of every task that is not in `living`: remains of a crash.
    pub fn sweep(&self, living: &[SubmissionId]) -> Result<(), KeysError> {
        let Ok(notes) = fs::read_dir(&self.notes) else { return Ok(()) };
        for note in notes.flatten() {
            let Some(task) = note.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if living.contains(&task) {
                continue;
            }
            let user = fs::read_to_string(note.path());
            let user = user.map_err(|source| KeysError::Write { file: note.path(), source })?;
            self.revoke(task, &user)?;
        }
        Ok(())
    }

    pub(super) fn rewrite(
        &self,
        _one_at_a_time: &MutexGuard<'_, ()>,
        user: &str,
        missing: MissingDir,
        change: impl FnOnce(&[u8]) -> Vec<u8>,
    ) -> Result<(), KeysError> {
        let requested = User { username: Some(user.to_owned()), ..User::default() };
        let account = UserDatabase::read_file(&self.root)?.account(Some(&requested), 0)?;
        let home = self.root.join(account.home.strip_prefix("/").unwrap_or(&account.home));
        let file = home.join(".ssh").join(FILE);
        let failed = |source: Errno| KeysError::Write { file: file.clone(), source: source.into() };
        let odd = |why| KeysError::Odd { file: file.clone(), why };

        let dir = match ssh_dir(&home, &account, missing) {
            Err(Errno::NOENT) if missing == MissingDir::Ignore => return Ok(()),
            found => found.map_err(failed)?,
        };
        let Some(dir) = dir else {
            return Err(odd("`.ssh` is not a directory that the user owns"));
        };
        let old = match read_existing(&dir).map_err(failed)? {
            FileState::None => {
                ExistingFile { bytes: Vec::new(), mode: 0o600, uid: account.uid, gid: account.gid }
            }
            FileState::File(old) => old,
            FileState::Odd(why) => return Err(odd(why)),
        };
        let new = change(&old.bytes);
        if new == old.bytes {
            return Ok(());
        }
        let written = replace_file(&dir, &old, &new);
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&dir, TEMP_FILE, AtFlags::empty());
        }
        written.map_err(|source| KeysError::Write { file: file.clone(), source })
    }
}

/// Handling of a missing `.ssh`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingDir {
    Create,
    Ignore,
}

/// Opens the user's `.ssh`. `None` if the path is something else.
fn ssh_dir(home: &Path, account: &Account, missing: MissingDir) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let home = rustix::fs::open(home, flags, Mode::empty())?;
    if missing == MissingDir::Create {
        match rustix::fs::mkdirat(&home, ".ssh", Mode::from_raw_mode(0o700)) {
            Ok(()) => {
                let made = rustix::fs::openat(&home, ".ssh", flags | OFlags::NOFOLLOW, Mode::empty())?;
                let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
                rustix::fs::fchown(&made, Some(uid), Some(gid))?;
                return Ok(Some(made));
            }
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    let dir = match rustix::fs::openat(&home, ".ssh", flags | OFlags::NOFOLLOW, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        opened => opened?,
    };
    let owner = rustix::fs::fstat(&dir)?.st_uid;
    Ok((owner == account.uid || owner == 0).then_some(dir))
}

struct ExistingFile {
    bytes: Vec<u8>,
    mode: u32,
    uid: u32,
    gid: u32,
}

enum FileState {
    None,
    File(ExistingFile),
    Odd(&'static str),
}

fn read_existing(dir: &OwnedFd) -> Result<FileState, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(dir, FILE, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(FileState::None),
        Err(Errno::LOOP) => return Ok(FileState::Odd("it is a symbolic link")),
        opened => opened?,
    };
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(FileState::Odd("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    let read = File::from(file).take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Ok(FileState::Odd("it is too large"));
    }
    Ok(FileState::File(ExistingFile {
        bytes,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
    }))
}

/// Replaces the file atomically, with the owner and mode of the old one.
fn replace_file(dir: &OwnedFd, old: &ExistingFile, bytes: &[u8]) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, TEMP_FILE, AtFlags::empty()) {
        Err(Errno::NOENT) => {}
        gone => gone?,
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(dir, TEMP_FILE, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(bytes)?;
    rustix::fs::fchown(&file, Some(Uid::from_raw(old.uid)), Some(Gid::from_raw(old.gid)))?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(old.mode))?;
    file.sync_all()?;
    rustix::fs::renameat(dir, TEMP_FILE, dir, FILE)?;
    Ok(rustix::fs::fsync(dir)?)
}

/// Returns the lines of a grant, each with a line break.
fn render_lines(grant: &KeyGrant<'_>) -> Result<String, KeysError> {
    if grant.keys.len() > KEYS_MAX {
        return Err(KeysError::TooMany { count: grant.keys.len() });
    }
    let options =
        key_options(Some(&grant.ports.iter().copied().collect()).filter(|_| !grant.ports.is_empty()));
    let ports: Vec<String> = grant.ports.iter().map(u16::to_string).collect();
    let mut text = String::new();
    for (number, key) in grant.keys.iter().enumerate() {
        let (kind, body) = parse_key(key).map_err(|why| KeysError::Key { number: number + 1, why })?;
        let line = format!("{options} {kind} {body}{PORTS}{}{MARK}{}\n", ports.join(","), grant.task);
        if !text.contains(&line) {
            text.push_str(&line);
        }
    }
    Ok(text)
}

/// Command that runs instead of any requested program. Without it, `restrict` would still let the holder of a key run
/// commands as the user of the account. Options contain no space: lines are split there.
const NO_COMMAND: &str = ",command=\"false\"";

/// Returns the options of a key: it may reach these ports of the host's loopback, or any.
fn key_options(ports: Option<&BTreeSet<u16>>) -> String {
    let mut options = String::from("restrict,port-forwarding");
    for port in ports.into_iter().flatten() {
        // Matched against the name that the client sent.
        let _ = write!(options, ",permitopen=\"localhost:{port}\",permitopen=\"127.0.0.1:{port}\"");
    }
    options.push_str(NO_COMMAND);
    options
}

/// Returns type and body of a public key. Drops its comment; options or a second line would act as directives.
pub(super) fn parse_key(text: &str) -> Result<(&'static str, &str), &'static str> {
    let text = text.trim();
    if text.len() > KEY_BYTES_MAX {
        return Err("too long");
    }
    if text.contains(|c: char| c.is_control()) {
        return Err("contains control characters");
    }
    let mut words = text.split(' ').filter(|word| !word.is_empty());
    let (first, body) = (words.next().ok_or("empty")?, words.next().ok_or("not a public key")?);
    let kind = *KEY_KINDS.iter().find(|kind| **kind == first).ok_or("unknown key type")?;
    let blob = BASE64_STANDARD.decode(body).map_err(|_| "not base64")?;
    // The blob repeats its type: a length and the name.
    let named = blob
        .split_first_chunk::<4>()
        .and_then(|(length, rest)| rest.get(..usize::try_from(u32::from_be_bytes(*length)).ok()?));
    if named != Some(kind.as_bytes()) { Err("key type and data do not match") } else { Ok((kind, body)) }
}

/// Returns the file without the lines of removed tasks, and with `ours` at its end.
fn rewrite_lines(old: &[u8], goes: &dyn Fn(&str) -> bool, ours: &str) -> Vec<u8> {
    let mut new: Vec<u8> = Vec::with_capacity(old.len() + ours.len());
    for line in old.split_inclusive(|byte| *byte == b'\n') {
        if !line_task(line).is_some_and(goes) {
            new.extend_from_slice(line);
        }
    }
    if !ours.is_empty() && new.last().is_some_and(|last| *last != b'\n') {
        new.push(b'\n');
    }
    new.extend_from_slice(ours.as_bytes());
    merge_ports(&new)
}

/// Returns the same lines; all lines of one key have the ports of all its tasks.
fn merge_ports(lines: &[u8]) -> Vec<u8> {
    let mut of_key: BTreeMap<&str, Option<BTreeSet<u16>>> = BTreeMap::new();
    let lines: Vec<&[u8]> = lines.split_inclusive(|byte| *byte == b'\n').collect();
    for own in lines.iter().filter_map(|line| TaskLine::read(line)) {
        let all = of_key.entry(own.key).or_insert_with(|| Some(BTreeSet::new()));
        match (all.as_mut(), own.ports) {
            (Some(all), Some(ports)) => all.extend(ports),
            (_, None) => *all = None,
            (None, Some(_)) => {}
        }
    }
    let mut new = Vec::new();
    for line in lines {
        match TaskLine::read(line) {
            Some(own) => {
                let options = key_options(of_key.get(own.key).and_then(Option::as_ref));
                new.extend_from_slice(format!("{options} {}{}\n", own.key, own.tail).as_bytes());
            }
            None => new.extend_from_slice(line),
        }
    }
    new
}

/// A line of the shim.
struct TaskLine<'a> {
    /// Type and body.
    key: &'a str,
    /// Ports of its task; `None` permits any.
    ports: Option<Vec<u16>>,
    /// Text after the key: ports and task.
    tail: &'a str,
}

impl<'a> TaskLine<'a> {
    fn read(line: &'a [u8]) -> Option<Self> {
        line_task(line)?;
        let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
        let (_, rest) = line.split_once(' ')?;
        let (key, ports) = rest.split_once(PORTS)?;
        let (ports, _) = ports.split_once(MARK)?;
        let ports: Vec<u16> = ports.split(',').filter_map(|port| port.parse().ok()).collect();
        Some(Self { key, ports: (!ports.is_empty()).then_some(ports), tail: &rest[key.len()..] })
    }
}

/// Returns the task of a line of the shim.
fn line_task(line: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (rest, id) = line.rsplit_once(MARK)?;
    (rest.starts_with("restrict,") && id.parse::<SubmissionId>().is_ok()).then_some(id)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use proptest::prelude::*;
    use windlass_testkit::{TempDir, temp_dir};

    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFpe1VEr4vk/w2OaNzvZbmmpbRnHzT3XVpqzGkOmFSJN ann@laptop";
    const RSA: &str = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAQQ==";
    const FOREIGN: &[u8] =
        b"# mine\nssh-rsa AAAA me\n\xff\xfe no text\ncommand=\"x\" ssh-rsa B windlass-task=no\nlast";

    struct KeysFixture(TempDir);

    impl KeysFixture {
        fn new() -> Self {
            let dir = temp_dir("keys").unwrap();
            let root = dir.path();
            fs::create_dir_all(root.join("etc")).unwrap();
            fs::create_dir_all(root.join("home/ann")).unwrap();
            let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            let passwd = format!("ann:x:{uid}:{gid}::/home/ann:/bin/sh\n");
            fs::write(root.join("etc/passwd"), passwd).unwrap();
            Self(dir)
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        fn file(&self) -> PathBuf {
            self.path().join("home/ann/.ssh/authorized_keys")
        }

        fn keys(&self) -> HostAuthorizedKeys {
            HostAuthorizedKeys::new(self.path(), &self.path().join("home-of-shim"))
        }

        fn with_file(bytes: &[u8]) -> Self {
            let scratch = Self::new();
            fs::create_dir(scratch.path().join("home/ann/.ssh")).unwrap();
            fs::write(scratch.file(), bytes).unwrap();
            scratch
        }
    }

    fn task(n: u128) -> SubmissionId {
        SubmissionId(uuid::Uuid::from_u128(n))
    }

    fn grant(keys: &HostAuthorizedKeys, n: u128, lines: &[&str], ports: &[u16]) -> Result<(), KeysError> {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        keys.grant(&KeyGrant { task: task(n), user: "ann", keys: &lines, ports }, || true)
    }

    #[test]
    fn foreign_authorized_keys_lines_are_kept_byte_for_byte() {
        let scratch = KeysFixture::with_file(FOREIGN);
        fs::set_permissions(scratch.file(), fs::Permissions::from_mode(0o640)).unwrap();
        let keys = scratch.keys();
        grant(&keys, 1, &[KEY], &[]).unwrap();
        let with = fs::read(scratch.file()).unwrap();
        assert!(with.starts_with(FOREIGN) && with.len() > FOREIGN.len());
        assert_eq!(fs::metadata(scratch.file()).unwrap().permissions().mode() & 0o777, 0o640);
        keys.revoke(task(1), "ann").unwrap();
        // The line break that the file lacked is kept: removing it would be a guess.
        assert_eq!(fs::read(scratch.file()).unwrap(), [FOREIGN, b"\n"].concat());
    }

    #[test]
    fn a_granted_key_allows_only_port_forwarding() {
        let scratch = KeysFixture::new();
        let keys = scratch.keys();
        grant(&keys, 1, &[KEY], &[32768]).unwrap();
        let body = KEY.split(' ').nth(1).unwrap();
        let expected = format!(
            "restrict,port-forwarding,permitopen=\"localhost:32768\",permitopen=\"127.0.0.1:32768\",command=\"false\" \
             ssh-ed25519 {body} windlass-ports=32768 windlass-task={}\n",
            task(1)
        );
        assert_eq!(fs::read_to_string(scratch.file()).unwrap(), expected);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&scratch.file()), mode(scratch.file().parent().unwrap())), (0o600, 0o700));
    }

    #[test]
    fn repeated_grants_change_nothing_and_tasks_with_the_same_key_are_independent() {
        let scratch = KeysFixture::with_file(b"ssh-rsa AAAA me\n");
        let keys = scratch.keys();
        grant(&keys, 1, &[KEY, KEY, RSA], &[1]).unwrap();
        let once = fs::read(scratch.file()).unwrap();
        grant(&keys, 1, &[KEY, KEY, RSA], &[1]).unwrap();
        assert_eq!(fs::read(scratch.file()).unwrap(), once);
        assert_eq!(once.iter().filter(|byte| **byte == b'\n').count(), 3);
        grant(&keys, 2, &[KEY], &[2]).unwrap();
        keys.revoke(task(1), "ann").unwrap();
        let left = fs::read_to_string(scratch.file()).unwrap();
        assert!(left.contains(&task(2).to_string()) && !left.contains(&task(1).to_string()));
        keys.revoke(task(2), "ann").unwrap();
        keys.revoke(task(2), "ann").unwrap();
        assert_eq!(fs::read(scratch.file()).unwrap(), b"ssh-rsa AAAA me\n");
    }

    /// The host's SSH server uses the first line that has the key.
    #[test]
    fn every_line_of_a_key_permits_the_ports_of_all_its_tasks() {
        let scratch = KeysFixture::new();
        let keys = scratch.keys();
        let opened = |key: &str| {
            let text = fs::read_to_string(scratch.file()).unwrap();
            let line = text.lines().find(|line| line.contains(key.split(' ').nth(1).unwrap())).unwrap();
            let ports = line.split("permitopen=\"localhost:").skip(1);
            ports.map(|rest| rest.split('"').next().unwrap().to_owned()).collect::<Vec<_>>().join(",")
        };
        grant(&keys, 1, &[KEY, RSA], &[10]).unwrap();
        grant(&keys, 2, &[KEY], &[20, 21]).unwrap();
        assert_eq!((opened(KEY).as_str(), opened(RSA).as_str()), ("10,20,21", "10"));
        keys.revoke(task(1), "ann").unwrap();
        assert_eq!(opened(KEY), "20,21");
        grant(&keys, 3, &[KEY], &[]).unwrap();
        assert_eq!(opened(KEY), "", "one of them may reach any port");
        keys.revoke(task(3), "ann").unwrap();
        assert_eq!(opened(KEY), "20,21");
    }

    #[test]
    fn g6_keys_left_by_a_crash_are_removed_and_those_of_another_shim_are_kept() {
        let scratch = KeysFixture::new();
        let other = HostAuthorizedKeys::new(scratch.path(), &scratch.path().join("other"));
        grant(&other, 3, &[KEY], &[]).unwrap();
        let keys = scratch.keys();
        grant(&keys, 1, &[KEY], &[]).unwrap();
        grant(&keys, 2, &[KEY], &[]).unwrap();
        scratch.keys().sweep(&[task(2)]).unwrap();
        let left = fs::read_to_string(scratch.file()).unwrap();
        let has = |n| left.contains(&task(n).to_string());
        assert_eq!((has(1), has(2), has(3)), (false, true, true));
        assert_eq!(fs::read_dir(scratch.path().join("home-of-shim/keys")).unwrap().count(), 1);
    }

    #[test]
    fn anything_but_a_plain_public_key_is_refused() {
        let scratch = KeysFixture::with_file(b"");
        let keys = scratch.keys();
        let second_line = format!("{KEY}\nssh-rsa AAAA evil");
        let with_options = format!("command=\"sh\" {KEY}");
        let mismatched = KEY.replace("ssh-ed25519", "ssh-rsa");
        for bad in ["", "ssh-rsa", "ssh-rsa !!", "ssh-dss AAAA", &second_line, &with_options, &mismatched] {
            assert!(
                matches!(grant(&keys, 1, &[KEY, bad], &[]), Err(KeysError::Key { number: 2, .. })),
                "{bad}"
            );
        }
        assert_eq!(fs::read(scratch.file()).unwrap(), b"");
    }

    #[test]
    fn authorized_keys_are_not_written_through_symlinks() {
        let scratch = KeysFixture::with_file(b"x");
        let elsewhere = scratch.path().join("elsewhere");
        fs::rename(scratch.file(), &elsewhere).unwrap();
        symlink(&elsewhere, scratch.file()).unwrap();
        let keys = scratch.keys();
        assert!(matches!(grant(&keys, 1, &[KEY], &[]), Err(KeysError::Odd { .. })));
        fs::remove_dir_all(scratch.path().join("home/ann/.ssh")).unwrap();
        symlink(scratch.path().join("etc"), scratch.path().join("home/ann/.ssh")).unwrap();
        assert!(matches!(grant(&keys, 1, &[KEY], &[]), Err(KeysError::Odd { .. })));
        assert_eq!(fs::read(&elsewhere).unwrap(), b"x");
        assert!(!scratch.path().join("etc/authorized_keys").exists());
    }

    #[test]
    fn a_task_that_has_already_ended_is_granted_no_keys() {
        let scratch = KeysFixture::new();
        let grant = KeyGrant { task: task(1), user: "ann", keys: &[KEY.to_owned()], ports: &[] };
        scratch.keys().grant(&grant, || false).unwrap();
        assert!(!scratch.file().exists());
    }

    #[test]
    fn a_missing_user_is_an_error_for_a_grant_but_not_for_a_revocation() {
        let scratch = KeysFixture::new();
        let keys = scratch.keys();
        let grant = KeyGrant { task: task(1), user: "bob", keys: &[KEY.to_owned()], ports: &[] };
        assert!(matches!(keys.grant(&grant, || true), Err(KeysError::User(_))));
        keys.revoke(task(1), "bob").unwrap();
        keys.revoke(task(1), "ann").unwrap();
        assert!(!scratch.path().join("home/ann/.ssh").exists());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Arbitrary files and keys: no foreign line is lost, and no line of the shim permits more than a port.
        #[test]
        fn fuzz_of_host_authorized_keys(
            words in prop::collection::vec(
                prop::sample::select(&[
                    "restrict,", "port-forwarding,", "permitopen=\"x\"", " ", "\n", "ssh-rsa", "ssh-ed25519", "AAAA", MARK, PORTS,
                    "1,2", "65536", "00000000-0000-0000-0000-000000000005", "command=\"x\"", "é", "\0", "#",
                ][..]),
                0..30,
            ),
            noise in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let text = words.concat();
            for old in [text.as_bytes(), &noise] {
                let kept = rewrite_lines(old, &|_| false, "");
                let others = |bytes: &[u8]| -> Vec<Vec<u8>> {
                    let lines = bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| line_task(line).is_none());
                    lines.map(<[u8]>::to_vec).collect()
                };
                prop_assert_eq!(others(&kept), others(old));
                let gone = rewrite_lines(old, &|_| true, "");
                prop_assert_eq!(others(&gone), others(old));
            }
            if let Ok((kind, body)) = parse_key(&text) {
                prop_assert!(KEY_KINDS.contains(&kind) && !body.contains(|c: char| c.is_control() || c == ' '));
            }
        }
    }
}
