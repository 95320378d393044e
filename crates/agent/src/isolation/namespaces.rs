//! Namespaces of a task: its processes, its mounts, its IPC, and its view of the host's files.
//!
//! The first process of the task is split in two ([`split`]): one half stays where the shim finds it, the other is the
//! first process of the new namespaces and sets them up ([`set_up`]). Paths of the host that the task needs are opened
//! before the host's files are covered, and none of them stays open in the inner half: a directory handle would be an
//! escape.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
        },
    },
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_bind_recursive,
        mount_change, move_mount, open_tree,
    },
    process::{Pid, Signal},
};

use super::{Confinement, USER_NAME};
use crate::runner::init::BindRequest;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Space for the task's user list and mount points.
const TASK_DIRS_OPTIONS: &std::ffi::CStr = c"mode=0755,size=8m,nr_inodes=256";
const HIDDEN_OPTIONS: &std::ffi::CStr = c"mode=0000,size=4k,nr_inodes=2";
const BASH: &str = "/bin/bash";
const SH: &str = "/bin/sh";

/// Failed step with its cause.
#[derive(Debug, thiserror::Error)]
#[error("failed to confine the task: {what}")]
pub struct SetUpError {
    pub what: String,
    #[source]
    pub source: io::Error,
}

fn set_up_error<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> SetUpError {
    let what = what.into();
    |source| SetUpError { what, source: source.into() }
}

/// Half of a split process.
pub enum ForkSide {
    /// Still in the host's namespaces; holds the pid of the inner half.
    Outer(Pid),
    /// First process of the new namespaces.
    Inner,
}

/// Forks into new namespaces. Only for a process with one thread.
#[expect(unsafe_code, reason = "no crate we use forks into namespaces")]
pub fn fork_into_namespaces(with_user_namespace: bool) -> io::Result<ForkSide> {
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::SIGCHLD;
    if with_user_namespace {
        flags |= libc::CLONE_NEWUSER;
    }
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let none: libc::c_long = 0;
    // SAFETY: without a separate stack the child continues with a copy of ours, as after a fork. There is one thread,
    // so no lock is held by another one.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(flags), none, none, none, none) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // The namespaces end with the process that supervises them.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if with_user_namespace {
                map_own_user(user, group)?;
            }
            Ok(ForkSide::Inner)
        }
        pid => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid.map(ForkSide::Outer).ok_or_else(|| io::ErrorKind::InvalidData.into())
        }
    }
}

/// Maps the own user and group to themselves; no other ids exist in the namespace.
fn map_own_user(user: u32, group: u32) -> io::Result<()> {
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
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Changes the attributes of the mount at `path` and of those below it.
fn set_mount_attributes(path: &Path, attributes: &MountAttributes) -> io::Result<()> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    mount_setattr(libc::AT_FDCWD, &path, 0, attributes)
}

#[expect(unsafe_code, reason = "no crate we use has this call")]
fn mount_setattr(
    dir: libc::c_int,
    path: &std::ffi::CStr,
    flags: libc::c_int,
    attributes: &MountAttributes,
) -> io::Result<()> {
    // SAFETY: the kernel reads the path and as many bytes of the structure as its size states.
    let answer = unsafe {
        libc::syscall(
            MOUNT_SETATTR,
            libc::c_long::from(dir),
            path.as_ptr(),
            RECURSIVE | libc::c_long::from(flags),
            std::ptr::from_ref(attributes),
            size_of::<MountAttributes>(),
        )
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Mounts `source` and everything below it at `target` without set-user-id programs and devices. Links in `source` are
/// not followed. Later mounts of the host below `source` still arrive, but nothing propagates to the host: `target` can be
/// unmounted without an effect on `source`. Needs Linux 5.12.
pub fn bind_restricted(source: &Path, target: &Path, read_only: bool) -> io::Result<()> {
    let handle = rustix::fs::openat2(
        rustix::fs::CWD,
        source,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS,
    )?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    let mounts = open_tree(&handle, c"", flags)?;
    let attributes = MountAttributes {
        set: SET_NO_SUID | SET_NO_DEV | if read_only { SET_READ_ONLY } else { 0 },
        propagation: MountPropagationFlags::DOWNSTREAM.bits().into(),
        ..MountAttributes::default()
    };
    mount_setattr(mounts.as_raw_fd(), c"", libc::AT_EMPTY_PATH, &attributes)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(&mounts, c"", rustix::fs::CWD, target, flags)?)
}

/// Disables set-user-id programs and devices below `path`, a mount.
pub fn restrict_mount(path: &Path, read_only: bool) -> io::Result<()> {
    let set = SET_NO_SUID | SET_NO_DEV | if read_only { SET_READ_ONLY } else { 0 };
    match set_mount_attributes(path, &MountAttributes { set, ..MountAttributes::default() }) {
        // Kernels before 5.12 can change only one mount at a time.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
            flags.set(MountFlags::RDONLY, read_only);
            Ok(rustix::mount::mount_remount(path, flags, c"")?)
        }
        changed => changed,
    }
}

/// Path of the host that is mounted elsewhere. Opened before anything is covered or made read-only.
enum HostPath {
    /// Copy of its mount tree, to be attached.
    Mounts(OwnedFd),
    /// Plain handle, for kernels before 5.2.
    Handle(OwnedFd),
}

impl HostPath {
    fn open(path: &Path) -> io::Result<Self> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        match open_tree(rustix::fs::CWD, path, flags) {
            Err(rustix::io::Errno::NOSYS) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                Ok(Self::Handle(rustix::fs::open(path, flags, Mode::empty())?))
            }
            opened => Ok(Self::Mounts(opened?)),
        }
    }

    fn put(&self, at: &Path) -> io::Result<()> {
        match self {
            Self::Mounts(mounts) => {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
                Ok(move_mount(mounts, c"", rustix::fs::CWD, at, flags)?)
            }
            Self::Handle(handle) => {
                Ok(mount_bind_recursive(format!("/proc/self/fd/{}", handle.as_raw_fd()), at)?)
            }
        }
    }

    fn is_directory(&self) -> bool {
        let (Self::Mounts(fd) | Self::Handle(fd)) = self;
        let stat = rustix::fs::fstat(fd);
        stat.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
    }
}

fn tmpfs(at: &Path, flags: MountFlags, options: &std::ffi::CStr) -> io::Result<()> {
    let flags = flags | MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount(c"tmpfs", at, c"tmpfs", flags, options)?)
}

/// Creates a mount point of the source's kind.
fn create_mount_point(at: &Path, is_directory: bool) -> io::Result<()> {
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

/// Everything of the host that the task receives.
struct HostPaths {
    own: Vec<(&'static str, HostPath)>,
    tmp: HostPath,
    var_tmp: HostPath,
    agent: HostPath,
    binds: Vec<HostPath>,
}

impl HostPaths {
    fn open(task: &Confinement, binds: &[BindRequest]) -> Result<Self, SetUpError> {
        let open =
            |path: &Path| HostPath::open(path).map_err(set_up_error(format!("open {}", path.display())));
        let own = [
            ("run", task.run.clone()),
            ("scratch", task.scratch.clone()),
            ("home", task.private.join("home")),
            ("python", task.private.join("python")),
        ];
        let own = own.into_iter().map(|(name, path)| Ok((name, open(&path)?))).collect::<Result<_, _>>()?;
        let binds = binds.iter().map(|bind| {
            let (from, to) = (bind.source.display(), bind.target.display());
            HostPath::open(&bind.source).map_err(set_up_error(format!("mount {from} at {to}")))
        });
        Ok(Self {
            own,
            tmp: open(&task.private.join("tmp"))?,
            var_tmp: open(&task.private.join("var-tmp"))?,
            agent: open_agent_binary(&task.private).map_err(set_up_error("open the agent's binary"))?,
            binds: binds.collect::<Result<_, _>>()?,
        })
    }
}

/// Opens the agent's binary for the job's user; a copy if its file was replaced or other users cannot run it.
fn open_agent_binary(private: &Path) -> io::Result<HostPath> {
    let file = fs::read_link("/proc/self/exe")?;
    if file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o005 == 0o005) {
        return HostPath::open(&file);
    }
    let copy = private.join("agent");
    fs::copy("/proc/self/exe", &copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    HostPath::open(&copy)
}

/// Sets up the task's view of the file system. For the inner half only.
pub fn set_up(task: &Confinement, binds: &[BindRequest]) -> Result<(), SetUpError> {
    isolate_mounts().map_err(set_up_error("isolate mounts from the host"))?;
    let sources = HostPaths::open(task, binds)?;
    // Everything mounted from here on belongs to the task and is writable.
    make_host_read_only(task.user.is_some())
        .map_err(set_up_error("make the host's file systems read-only"))?;
    mount_devices(task)?;
    for (at, source) in [("/tmp", &sources.tmp), ("/var/tmp", &sources.var_tmp)] {
        let at = Path::new(at);
        if at.is_dir() {
            source.put(at).map_err(set_up_error(format!("mount a private {}", at.display())))?;
        }
    }
    mount_task_dirs(task, &sources).map_err(set_up_error("mount its directories"))?;
    add_task_user(task).map_err(set_up_error("add its user to /etc/passwd"))?;
    for path in &task.hidden {
        hide_path(task, path).map_err(set_up_error(format!("hide {}", path.display())))?;
    }
    for (order, source) in binds.iter().zip(&sources.binds) {
        let mounted = create_mount_point(&order.target, source.is_directory())
            .and_then(|()| source.put(&order.target))
            .and_then(|()| restrict_mount(&order.target, order.read_only));
        let (from, to) = (order.source.display(), order.target.display());
        mounted.map_err(set_up_error(format!("mount {from} at {to}")))?;
    }
    mount_proc().map_err(set_up_error("mount a private /proc"))?;
    // The old working directory would lead up into paths that are covered.
    rustix::process::chdir(task.place.join("scratch")).map_err(set_up_error("change to its directory"))
}

/// Hides mounts made here from the host. Unmounts of the host still propagate here: a task keeps no disk busy.
fn isolate_mounts() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

fn mount_proc() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount(c"proc", "/proc", c"proc", flags, None)?)
}

/// Mounts separate shared memory and terminals.
fn mount_devices(task: &Confinement) -> Result<(), SetUpError> {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() {
        let size = task.shm_bytes.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        let options = std::ffi::CString::new(format!("mode=1777{size}")).unwrap_or_default();
        tmpfs(shm, MountFlags::empty(), &options).map_err(set_up_error("mount a private /dev/shm"))?;
    }
    mount_devpts().map_err(set_up_error("mount a private /dev/pts"))
}

fn mount_devpts() -> io::Result<()> {
    let options = c"newinstance,ptmxmode=0666,mode=0620";
    mount(c"devpts", "/dev/pts", c"devpts", MountFlags::NOSUID | MountFlags::NOEXEC, options)?;
    Ok(rustix::mount::mount_bind("/dev/pts/ptmx", "/dev/ptmx")?)
}

/// Mounts the task's directories at a path that its user can reach, with nothing else next to them.
fn mount_task_dirs(task: &Confinement, sources: &HostPaths) -> io::Result<()> {
    create_mount_point(&task.cover, true)?;
    tmpfs(&task.cover, MountFlags::empty(), TASK_DIRS_OPTIONS)?;
    for (name, source) in &sources.own {
        let at = task.place.join(name);
        create_mount_point(&at, true)?;
        source.put(&at)?;
        restrict_mount(&at, false)?;
    }
    let agent = task.place.join("agent");
    create_mount_point(&agent, false)?;
    sources.agent.put(&agent)?;
    restrict_mount(&agent, true)?;
    // Empty file that is mounted over hidden files.
    fs::OpenOptions::new().write(true).create_new(true).mode(0o000).open(empty_file_path(task)).map(drop)
}

fn empty_file_path(task: &Confinement) -> PathBuf {
    task.place.join(".hidden")
}

/// Adds the task's user to the user and group lists, before the host's entries: programs look up their user name.
fn add_task_user(task: &Confinement) -> io::Result<()> {
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

fn hide_path(task: &Confinement, path: &Path) -> io::Result<()> {
    let covered = path.starts_with(&task.cover) || task.cover.starts_with(path);
    let meta = match path.symlink_metadata() {
        // Paths below a hidden path cannot be seen either.
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
    Ok(rustix::mount::mount_bind(empty_file_path(task), path)?)
}

/// Makes all files of the host read-only.
fn make_host_read_only(has_own_user: bool) -> io::Result<()> {
    match set_mount_attributes(
        Path::new("/"),
        &MountAttributes { set: SET_READ_ONLY, ..MountAttributes::default() },
    ) {
        // Kernels before 5.12. A separate user can write to few paths of the host anyway.
        Err(error) if has_own_user && error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        changed => changed,
    }
}

/// Tries everything that a confined task needs and that a host may refuse.
pub fn try_confinement(has_own_user: bool) -> Result<(), SetUpError> {
    isolate_mounts().map_err(set_up_error("isolate mounts from the host"))?;
    make_host_read_only(has_own_user).map_err(set_up_error("make the host's file systems read-only"))?;
    tmpfs(Path::new("/tmp"), MountFlags::empty(), TASK_DIRS_OPTIONS)
        .map_err(set_up_error("mount a tmpfs"))?;
    mount_devpts().map_err(set_up_error("mount a private /dev/pts"))?;
    mount_proc().map_err(set_up_error("mount a private /proc"))
}
