//! Namespaces of a task: its processes, its mounts, its IPC, and what of the host's files it sees.
//!
//! The first process of the task is split in two ([`split`]): one half stays where the shim finds it, the other is the first
//! process of the new namespaces and sets them up ([`set_up`]). Nothing is opened by path after the host's files were covered
//! that has to be the host's, and nothing of the host stays open in the inner half: a handle on a directory would lead out.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change},
    process::{Pid, Signal},
};

use super::{Confinement, USER_NAME};
use crate::runner::init::BindOrder;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Room for the task's own user list and mount points.
const PLACE_OPTIONS: &std::ffi::CStr = c"mode=0755,size=8m,nr_inodes=256";
const HIDDEN_OPTIONS: &std::ffi::CStr = c"mode=0000,size=4k,nr_inodes=2";
const BASH: &str = "/bin/bash";
const SH: &str = "/bin/sh";

/// Which step failed, and why.
#[derive(Debug, thiserror::Error)]
#[error("confine the task: {what}")]
pub struct SetUpError {
    pub what: String,
    #[source]
    pub source: io::Error,
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> SetUpError {
    let what = what.into();
    |source| SetUpError { what, source: source.into() }
}

/// Which half of a split process this is.
pub enum Half {
    /// Still in the host's namespaces, with the pid of the other.
    Outer(Pid),
    /// The first process of the new namespaces.
    Inner,
}

/// Forks into new namespaces. Only for a process with one thread.
#[expect(unsafe_code, reason = "no crate we use forks into namespaces")]
pub fn split(with_user_namespace: bool) -> io::Result<Half> {
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::SIGCHLD;
    if with_user_namespace {
        flags |= libc::CLONE_NEWUSER;
    }
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let none: libc::c_long = 0;
    // SAFETY: without a stack of its own the child goes on with a copy of ours, as after a fork. There is one thread, so no
    // lock is held by another one.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(flags), none, none, none, none) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // The namespaces end with whoever looks after them.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if with_user_namespace {
                map_user(user, group)?;
            }
            Ok(Half::Inner)
        }
        pid => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid.map(Half::Outer).ok_or_else(|| io::ErrorKind::InvalidData.into())
        }
    }
}

/// Everybody stays who they are, and nobody else exists.
fn map_user(user: u32, group: u32) -> io::Result<()> {
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

const SET_READ_ONLY: u64 = 0x1;
const SET_NO_SUID: u64 = 0x2;
const SET_NO_DEV: u64 = 0x4;
const RECURSIVE: libc::c_long = 0x8000;
const MOUNT_SETATTR: libc::c_long = 442;

/// `struct mount_attr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Changes the mount at `path` and those below it.
#[expect(unsafe_code, reason = "no crate we use has this call")]
fn change(path: &Path, attributes: &Attributes) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the kernel reads the path and as many bytes of the structure as its size says.
    let answer = unsafe {
        libc::syscall(
            MOUNT_SETATTR,
            libc::c_long::from(libc::AT_FDCWD),
            path.as_ptr(),
            RECURSIVE,
            std::ptr::from_ref(attributes),
            size_of::<Attributes>(),
        )
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Neither set-user-id programs nor devices have an effect below `path`, a mount.
pub fn make_harmless(path: &Path, read_only: bool) -> io::Result<()> {
    let set = SET_NO_SUID | SET_NO_DEV | if read_only { SET_READ_ONLY } else { 0 };
    match change(path, &Attributes { set, ..Attributes::default() }) {
        // Kernels before 5.12 know this for one mount at a time.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
            flags.set(MountFlags::RDONLY, read_only);
            Ok(rustix::mount::mount_remount(path, flags, c"")?)
        }
        changed => changed,
    }
}

/// A handle in the namespaces of this very process.
fn handle(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// What can be bound without the name it had.
fn by_handle(handle: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", handle.as_raw_fd()))
}

fn tmpfs(at: &Path, flags: MountFlags, options: &std::ffi::CStr) -> io::Result<()> {
    let flags = flags | MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount(c"tmpfs", at, c"tmpfs", flags, options)?)
}

/// A mount point of the source's kind.
fn make_point(at: &Path, is_directory: bool) -> io::Result<()> {
    if at.symlink_metadata().is_ok() {
        return Ok(());
    }
    if is_directory {
        return fs::DirBuilder::new().recursive(true).mode(0o755).create(at);
    }
    if let Some(above) = at.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(above)?;
    }
    fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(at).map(drop)
}

/// What was opened before anything was covered.
struct Sources {
    own: Vec<(&'static str, OwnedFd)>,
    tmp: OwnedFd,
    var_tmp: OwnedFd,
    agent: OwnedFd,
    binds: Vec<OwnedFd>,
}

impl Sources {
    fn open(task: &Confinement, binds: &[BindOrder]) -> Result<Self, SetUpError> {
        let open = |path: &Path| handle(path).map_err(failed(format!("open {}", path.display())));
        let own = [
            ("run", task.run.clone()),
            ("scratch", task.scratch.clone()),
            ("home", task.private.join("home")),
            ("python", task.private.join("python")),
        ];
        let own = own.into_iter().map(|(name, path)| Ok((name, open(&path)?))).collect::<Result<_, _>>()?;
        Ok(Self {
            own,
            tmp: open(&task.private.join("tmp"))?,
            var_tmp: open(&task.private.join("var-tmp"))?,
            agent: agent(&task.private).map_err(failed("find the agent's binary"))?,
            binds: binds.iter().map(|bind| open(&bind.source)).collect::<Result<_, _>>()?,
        })
    }
}

/// The agent's binary as the job's user may run it; a copy where its file was replaced or others cannot run it.
fn agent(private: &Path) -> io::Result<OwnedFd> {
    let file = fs::read_link("/proc/self/exe")?;
    if file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o005 == 0o005) {
        return handle(&file);
    }
    let copy = private.join("agent");
    fs::copy("/proc/self/exe", &copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    handle(&copy)
}

/// Sets up what the task sees. For the inner half only.
pub fn set_up(task: &Confinement, binds: &[BindOrder]) -> Result<(), SetUpError> {
    separate().map_err(failed("separate mounts from the host's"))?;
    let sources = Sources::open(task, binds)?;
    let mut writable = own_devices(task)?;
    for (at, source) in [("/tmp", &sources.tmp), ("/var/tmp", &sources.var_tmp)] {
        let at = Path::new(at);
        if at.is_dir() {
            bind(source, at).map_err(failed(format!("give it a {} of its own", at.display())))?;
            writable.push(at.to_owned());
        }
    }
    writable.extend(make_place(task, &sources).map_err(failed("make the place of its directories"))?);
    own_user(task).map_err(failed("make its user known"))?;
    for path in &task.hidden {
        hide(task, path).map_err(failed(format!("hide {}", path.display())))?;
    }
    for (order, source) in binds.iter().zip(&sources.binds) {
        let mounted = make_point(&order.target, is_directory(source)).and_then(|()| {
            bind(source, &order.target)?;
            make_harmless(&order.target, order.read_only)
        });
        let (from, to) = (order.source.display(), order.target.display());
        mounted.map_err(failed(format!("mount {from} at {to}")))?;
        if !order.read_only {
            writable.push(order.target.clone());
        }
    }
    processes().map_err(failed("mount its own /proc"))?;
    writable.push(PathBuf::from("/proc"));
    read_only_but(&writable, task.user.is_some()).map_err(failed("make the host's files read-only"))?;
    // From the old working directory one could walk up into what is covered.
    rustix::process::chdir(task.place.join("scratch")).map_err(failed("enter its directory"))
}

/// What the host mounts later is not seen; what it unmounts is unmounted here, too.
fn separate() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

fn processes() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount(c"proc", "/proc", c"proc", flags, None)?)
}

fn bind(source: &OwnedFd, at: &Path) -> io::Result<()> {
    Ok(mount_bind_recursive(by_handle(source), at)?)
}

fn is_directory(handle: &OwnedFd) -> bool {
    let stat = rustix::fs::fstat(handle);
    stat.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

/// Shared memory and terminals of its own.
fn own_devices(task: &Confinement) -> Result<Vec<PathBuf>, SetUpError> {
    let mut writable = Vec::new();
    let shm = Path::new("/dev/shm");
    if shm.is_dir() {
        let size = task.shm_bytes.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        let options = std::ffi::CString::new(format!("mode=1777{size}")).unwrap_or_default();
        tmpfs(shm, MountFlags::empty(), &options).map_err(failed("give it a /dev/shm of its own"))?;
        writable.push(shm.to_owned());
    }
    terminals().map_err(failed("give it terminals of its own"))?;
    writable.push(PathBuf::from("/dev/pts"));
    Ok(writable)
}

fn terminals() -> io::Result<()> {
    let options = c"newinstance,ptmxmode=0666,mode=0620";
    mount(c"devpts", "/dev/pts", c"devpts", MountFlags::NOSUID | MountFlags::NOEXEC, options)?;
    Ok(rustix::mount::mount_bind("/dev/pts/ptmx", "/dev/ptmx")?)
}

/// The directories of the task at a path that its user can walk to, and nothing else beside them.
fn make_place(task: &Confinement, sources: &Sources) -> io::Result<Vec<PathBuf>> {
    make_point(&task.cover, true)?;
    tmpfs(&task.cover, MountFlags::empty(), PLACE_OPTIONS)?;
    let mut writable = Vec::new();
    for (name, source) in &sources.own {
        let at = task.place.join(name);
        make_point(&at, true)?;
        bind(source, &at)?;
        make_harmless(&at, false)?;
        writable.push(at);
    }
    let agent = task.place.join("agent");
    make_point(&agent, false)?;
    bind(&sources.agent, &agent)?;
    make_harmless(&agent, true)?;
    // What hidden files are covered with.
    fs::OpenOptions::new().write(true).create_new(true).mode(0o000).open(nothing(task)).map(drop)?;
    Ok(writable)
}

fn nothing(task: &Confinement) -> PathBuf {
    task.place.join(".hidden")
}

/// Programs ask for the name of their user: its own comes before the host's.
fn own_user(task: &Confinement) -> io::Result<()> {
    let Some(user) = &task.user else { return Ok(()) };
    let (id, home) = (user.id, task.place.join("home"));
    let shell = if Path::new(BASH).exists() { BASH } else { SH };
    let user = format!("{USER_NAME}:x:{id}:{id}::{}:{shell}\n", home.display());
    let group = format!("{USER_NAME}:x:{id}:\n");
    for (file, line, name) in [(PASSWD, user, "passwd"), (GROUP, group, "group")] {
        if !Path::new(file).is_file() {
            continue;
        }
        let own = task.place.join(format!(".{name}"));
        let mut text = line.into_bytes();
        text.extend(fs::read(file)?);
        fs::write(&own, text)?;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o644))?;
        rustix::mount::mount_bind(&own, file)?;
    }
    Ok(())
}

fn hide(task: &Confinement, path: &Path) -> io::Result<()> {
    let covered = path.starts_with(&task.cover) || task.cover.starts_with(path);
    let meta = match path.symlink_metadata() {
        // What is behind something that was hidden before cannot be seen either.
        Err(_) => return Ok(()),
        Ok(_) if covered => return Ok(()),
        Ok(meta) => meta,
    };
    if meta.is_symlink() {
        return Ok(());
    }
    if meta.is_dir() {
        return tmpfs(path, MountFlags::RDONLY, HIDDEN_OPTIONS);
    }
    Ok(rustix::mount::mount_bind(nothing(task), path)?)
}

/// Nothing can be written but what is the task's own.
fn read_only_but(writable: &[PathBuf], has_own_user: bool) -> io::Result<()> {
    let read_only = Attributes { set: SET_READ_ONLY, ..Attributes::default() };
    match change(Path::new("/"), &read_only) {
        // Kernels before 5.12. Another user has few places to write to anyway.
        Err(error) if has_own_user && error.raw_os_error() == Some(libc::ENOSYS) => return Ok(()),
        changed => changed?,
    }
    let again = Attributes { clear: SET_READ_ONLY, ..Attributes::default() };
    writable.iter().try_for_each(|path| change(path, &again))
}

/// Everything that a confined task needs and that a host may refuse, tried in place.
pub fn try_out(has_own_user: bool) -> Result<(), SetUpError> {
    separate().map_err(failed("separate mounts from the host's"))?;
    tmpfs(Path::new("/tmp"), MountFlags::empty(), PLACE_OPTIONS).map_err(failed("mount a tmpfs"))?;
    terminals().map_err(failed("give it terminals of its own"))?;
    processes().map_err(failed("mount its own /proc"))?;
    let writable = [PathBuf::from("/proc"), PathBuf::from("/tmp")];
    read_only_but(&writable, has_own_user).map_err(failed("make the host's files read-only"))
}
