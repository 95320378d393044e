//! Isolation of an attempt that is a plain process: a separate user, no additional privileges, private directories for
//! temporary files and private shared memory, and no view of the dispatcher or of other attempts.
//!
//! There is no namespace of processes: the first process of one would need a program that reaps, and ignores signals. Other
//! users' processes are hidden by `/proc`, and their user protects them.
//!
//! Only root can set up all of that. If executors run as another user, programs run as that user too, and the only
//! guarantee is that no program gains a privilege which this user does not have.

use std::{
    collections::hash_map::DefaultHasher,
    ffi::CString,
    fs::{self, File},
    hash::{Hash as _, Hasher as _},
    io,
    os::{
        fd::AsRawFd as _,
        unix::{
            ffi::OsStrExt as _,
            fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
        },
    },
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::{
    fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock},
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change},
    process::{Gid, Uid},
    thread::{UnshareFlags, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe},
};

use crate::isolation::restrict::{Restrictions, restrict_children};

/// Directory that records which attempt has which user on this host.
const CLAIMS_DIR: &str = "/run/windlass/exec-users";

/// Directories for temporary files, and the names of the private ones in the directory of an attempt.
pub(super) const TEMPORARY_DIRS: [(&str, &str); 2] = [("/tmp", "tmp"), ("/var/tmp", "var-tmp")];

/// Range of user ids for attempts. It must not be used for anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserRange {
    first: u32,
    last: u32,
}

impl UserRange {
    pub(super) const DEFAULT: &str = "1900100000-1900165535";
}

impl FromStr for UserRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not a range of user ids above 0, such as `{}`", Self::DEFAULT);
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let (Ok(first), Ok(last)) = (first.parse(), last.parse()) else { return Err(wrong()) };
        // The kernel treats the highest number as no user.
        if first == 0 || last < first || last == u32::MAX { Err(wrong()) } else { Ok(Self { first, last }) }
    }
}

/// User id of one attempt on this host, reserved while this value lives.
#[derive(Debug)]
pub(super) struct UserClaim {
    pub(super) uid: u32,
    _lock: File,
}

impl UserClaim {
    /// Acquires an unused user. Requires root.
    pub(super) fn take(users: UserRange, attempt: &str) -> io::Result<Self> {
        Self::acquire_in(Path::new(CLAIMS_DIR), users, attempt)
    }

    fn acquire_in(claims: &Path, users: UserRange, attempt: &str) -> io::Result<Self> {
        // Other directories are next to it, so the parent keeps the default mode.
        if let Some(above) = claims.parent() {
            fs::create_dir_all(above)?;
        }
        match fs::DirBuilder::new().mode(0o700).create(claims) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let count = u64::from(users.last - users.first) + 1;
        let mut hasher = DefaultHasher::new();
        attempt.hash(&mut hasher);
        let start = hasher.finish() % count;
        for step in 0..count {
            let offset = u32::try_from((start + step) % count).unwrap_or(0);
            let uid = users.first + offset;
            let mut options = File::options();
            let lock = options.create(true).truncate(false).write(true).mode(0o600);
            let lock = lock.open(claims.join(uid.to_string()))?;
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                // An executor that was killed does not hold the lock, but its guard may not have killed everything yet.
                Ok(()) if has_processes(uid) => {}
                Ok(()) => return Ok(Self { uid, _lock: lock }),
                Err(Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("all user ids for plain processes are in use (`--process-users`)"))
    }
}

fn has_processes(uid: u32) -> bool {
    let uid = uid.to_string();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut statuses = processes.filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok());
    statuses.any(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        line.is_some_and(|users| users.split_whitespace().any(|user| user == uid))
    })
}

/// Changes the owner of a directory and its contents. Links themselves are changed and never followed.
pub(super) fn chown_tree(path: &Path, uid: u32) -> io::Result<()> {
    std::os::unix::fs::lchown(path, Some(uid), Some(uid))?;
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            chown_tree(&entry?.path(), uid)?;
        }
    }
    Ok(())
}

/// Returns the path, which must be below the directory, unless one of its components is a link: a program could have
/// created one to anything.
pub(super) fn reject_symlinks(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let below = path.strip_prefix(root).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut at = root.to_owned();
    for part in below.components() {
        at.push(part);
        match fs::symlink_metadata(&at) {
            Ok(found) if found.is_symlink() => {
                return Err(io::Error::other(format!("{} is a symbolic link", at.display())));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(error),
        }
    }
    Ok(path.to_owned())
}

/// Changes to a plain process between fork and exec. Everything is prepared beforehand, so that only system calls
/// remain.
pub(super) struct Isolation {
    user: Option<UserIsolation>,
    restrictions: Restrictions,
}

struct UserIsolation {
    uid: u32,
    /// Private directories with the paths where they are mounted.
    temporary: Vec<(CString, CString)>,
    /// True if the host has a directory for shared memory.
    has_shared_memory: bool,
    /// Files and directories that are hidden.
    hidden_files: Vec<CString>,
    hidden_dirs: Vec<CString>,
    /// Directory that is covered, the directories to create in it, and the root that is mounted at the last of them. It is
    /// covered by the private directory if it is one for temporary files, otherwise by an empty one.
    cover: CString,
    way: Vec<CString>,
    root: CString,
    cwd: CString,
}

impl Isolation {
    /// For an executor that is not root: the program can gain no privileges.
    pub(super) fn plain() -> Self {
        restrict_children();
        Self { user: None, restrictions: Restrictions::for_children() }
    }

    /// For a separate user that sees `root`, and of the directories above it what other users may see anyway. `apart`
    /// is one of those directories, and nothing in it is visible except `root`.
    pub(super) fn for_user(uid: u32, root: &Path, apart: &Path, hidden: &[PathBuf]) -> io::Result<Self> {
        let cwd = to_cstring(&std::env::current_dir()?)?;
        let (root, apart) = (&fs::canonicalize(root)?, &fs::canonicalize(apart)?);
        let cover = first_private_dir(root).filter(|closed| apart.starts_with(closed));
        let cover = cover.unwrap_or_else(|| apart.to_owned());
        // The private directory hides everything else there.
        let shared = TEMPORARY_DIRS.into_iter().map(|(path, _)| Path::new(path));
        let cover = shared.into_iter().find(|path| cover.starts_with(path)).map_or(cover, Path::to_owned);
        let attempt = root.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let mut temporary = Vec::new();
        for (path, name) in TEMPORARY_DIRS {
            // A link leads to another one of them.
            if !fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
                continue;
            }
            let private = attempt.join(name);
            fs::create_dir_all(&private)?;
            fs::set_permissions(&private, fs::Permissions::from_mode(0o1777))?;
            temporary.push((to_cstring(&private)?, to_cstring(Path::new(path))?));
        }
        let below = root.strip_prefix(&cover).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut at = cover.clone();
        let mut way = Vec::new();
        for part in below.components() {
            at.push(part);
            way.push(to_cstring(&at)?);
        }
        let mut hidden_files = Vec::new();
        let mut hidden_dirs = Vec::new();
        for path in hidden {
            // A directory that contains the program's root is not listed: the cover already hides the rest of it.
            let Ok(path) = fs::canonicalize(path) else { continue };
            match fs::metadata(&path) {
                Ok(found) if found.is_dir() && !root.starts_with(&path) => {
                    hidden_dirs.push(to_cstring(&path)?)
                }
                Ok(found) if found.is_file() => hidden_files.push(to_cstring(&path)?),
                Ok(_) | Err(_) => {}
            }
        }
        let (root, cover) = (to_cstring(root)?, to_cstring(&cover)?);
        let shared_memory = Path::new("/dev/shm");
        let has_shared_memory = shared_memory.is_dir() && !root.as_bytes().starts_with(b"/dev/shm/");
        let user = UserIsolation {
            uid,
            temporary,
            has_shared_memory,
            hidden_files,
            hidden_dirs,
            cover,
            way,
            root,
            cwd,
        };
        Ok(Self { user: Some(user), ..Self::plain() })
    }

    /// Called between fork and exec, in a process with one thread. Allocates nothing and acquires no lock.
    pub(super) fn enter(&self) -> io::Result<()> {
        if let Some(user) = &self.user {
            user.hide_paths()?;
            self.restrictions.drop_capabilities()?;
            user.become_user()?;
        }
        self.restrictions.seal()
    }
}

impl UserIsolation {
    #[expect(unsafe_code, reason = "mounts of its own are made between fork and exec")]
    fn hide_paths(&self) -> io::Result<()> {
        // SAFETY: only mounts and shared memory are separated; no open files are shared with other threads.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWIPC)? };
        let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change(c"/", flags)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        for file in &self.hidden_files {
            mount_bind(c"/dev/null", file.as_c_str())?;
        }
        for dir in &self.hidden_dirs {
            mount(c"windlass", dir.as_c_str(), c"tmpfs", flags, c"mode=0711,size=16k")?;
        }
        // Through a handle of these mounts: those of the previous namespace cannot be bound here.
        let flags_of_handle = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, self.root.as_c_str(), flags_of_handle, Mode::empty())?;
        let mut buffer = [0_u8; 40];
        let mut is_covered = false;
        let mut handles = [None, None];
        for (handle, (private, _)) in handles.iter_mut().zip(&self.temporary) {
            *handle = Some(rustix::fs::openat(CWD, private.as_c_str(), flags_of_handle, Mode::empty())?);
        }
        for (handle, (_, at)) in handles.iter().flatten().zip(&self.temporary) {
            mount_bind(fd_path(handle.as_raw_fd(), &mut buffer), at.as_c_str())?;
            is_covered |= *at == self.cover;
        }
        if self.has_shared_memory {
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            mount(c"windlass", c"/dev/shm", c"tmpfs", flags, c"mode=1777")?;
        }
        if !is_covered {
            mount(c"windlass", self.cover.as_c_str(), c"tmpfs", flags, c"mode=0711,size=64k")?;
        }
        for dir in &self.way {
            match rustix::fs::mkdirat(CWD, dir.as_c_str(), Mode::RWXU) {
                // A second process of the attempt finds the directories of the first.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            // Independent of the umask that the dispatcher was started with.
            rustix::fs::chmodat(CWD, dir.as_c_str(), Mode::from_raw_mode(0o711), AtFlags::empty())?;
        }
        if let Some(last) = self.way.last() {
            mount_bind(fd_path(root.as_raw_fd(), &mut buffer), last.as_c_str())?;
        }
        // Hides processes of other users; on a host that does not permit this, only their names are visible.
        let _ = mount(c"proc", c"/proc", c"proc", flags, c"hidepid=2");
        rustix::process::chdir(self.cwd.as_c_str())?;
        Ok(())
    }

    fn become_user(&self) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.uid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        // Changing from root to another user drops all capabilities.
        set_thread_res_uid(uid, uid, uid)?;
        Ok(())
    }
}

/// Formats `/proc/self/fd/N` in an existing buffer.
fn fd_path(fd: i32, buffer: &mut [u8; 40]) -> &std::ffi::CStr {
    const BEFORE: &[u8] = b"/proc/self/fd/";
    buffer[..BEFORE.len()].copy_from_slice(BEFORE);
    let mut digits = [0_u8; 10];
    let (mut rest, mut count) = (fd.unsigned_abs(), 0);
    loop {
        digits[count] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        (rest, count) = (rest / 10, count + 1);
        if rest == 0 {
            break;
        }
    }
    for at in 0..count {
        buffer[BEFORE.len() + at] = digits[count - 1 - at];
    }
    std::ffi::CStr::from_bytes_until_nul(buffer).unwrap_or(c"/nonexistent")
}

/// Returns the first directory on the path that other users may not traverse.
fn first_private_dir(path: &Path) -> Option<PathBuf> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.reverse();
    let is_closed =
        |dir: &&Path| fs::metadata(dir).is_ok_and(|found| found.permissions().mode() & 0o001 == 0);
    above.into_iter().find(is_closed).map(Path::to_owned)
}

fn to_cstring(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    #[test]
    fn user_id_ranges_are_parsed_and_never_include_root() {
        let usual: UserRange = UserRange::DEFAULT.parse().unwrap();
        assert_eq!((usual.first, usual.last), (1_900_100_000, 1_900_165_535));
        for wrong in ["", "5", "0-5", "5-4", "a-b", "1-4294967295", "-1-5"] {
            assert!(wrong.parse::<UserRange>().unwrap_err().contains(wrong), "{wrong}");
        }
    }

    #[test]
    fn each_attempt_holds_a_unique_user_id_until_it_ends() {
        let dir = temp_dir("claims").unwrap();
        let users = UserRange { first: 1_900_199_990, last: 1_900_199_991 };
        let claim = |name: &str| UserClaim::acquire_in(dir.path(), users, name);
        let (one, two) = (claim("a.1").unwrap(), claim("b.1").unwrap());
        assert_ne!(one.uid, two.uid);
        assert!(claim("c.1").unwrap_err().to_string().contains("--process-users"));
        let free = one.uid;
        drop(one);
        assert_eq!(claim("c.1").unwrap().uid, free);
    }

    #[test]
    fn paths_that_go_through_a_symlink_are_rejected() {
        let dir = temp_dir("links").unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("plain/out")).unwrap();
        std::os::unix::fs::symlink("/etc", root.join("away")).unwrap();
        assert!(reject_symlinks(root, &root.join("plain/out")).is_ok());
        assert!(reject_symlinks(root, &root.join("plain/none/x")).is_ok());
        let refused = reject_symlinks(root, &root.join("away/passwd")).unwrap_err().to_string();
        assert!(refused.contains("is a symbolic link"), "{refused}");
        assert!(reject_symlinks(root, &root.join("away")).is_err());
    }

    #[test]
    fn file_descriptors_map_to_their_proc_paths() {
        let mut buffer = [0_u8; 40];
        for (fd, want) in [(0, c"/proc/self/fd/0"), (7, c"/proc/self/fd/7"), (1203, c"/proc/self/fd/1203")] {
            buffer.fill(0);
            assert_eq!(fd_path(fd, &mut buffer), want);
        }
    }
}
