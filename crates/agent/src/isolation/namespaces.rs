//! Namespaces of a task: its processes, its mounts, its IPC, and what of the host's files it sees.
//!
//! The first process of the task is split in two ([`split`]): one half stays where the shim finds it, the other is the first
//! process of the new namespaces and sets them up ([`set_up`]). What has to be the host's is opened before the host's files are
//! covered, and nothing of it stays open in the inner half: a handle on a directory would lead out.

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
/// Room for the task's own user list and mount points.
const TASK_DIRS_OPTIONS: &std::ffi::CStr = c"mode=0755,size=8m,nr_inodes=256";
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

fn set_up_error<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> SetUpError {
    let what = what.into();
    |source| SetUpError { what, source: source.into() }
}

/// Which half of a split process this is.
pub enum ForkSide {
    /// Still in the host's namespaces, with the pid of the other.
    Outer(Pid),
    /// The first process of the new namespaces.
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
    // SAFETY: without a stack of its own the child goes on with a copy of ours, as after a fork. There is one thread, so no
    // lock is held by another one.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(flags), none, none, none, none) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // The namespaces end with whoever looks after them.
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

/// Everybody stays who they are, and nobody else exists.
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

/// Changes the mount at `path` and those below it.
#[expect(unsafe_code, reason = "no crate we use has this call")]
fn set_mount_attributes(path: &Path, attributes: &MountAttributes) -> io::Result<()> {
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
            size_of::<MountAttributes>(),
        )
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Neither set-user-id programs nor devices have an effect below `path`, a mount.
pub fn make_harmless(path: &Path, read_only: bool) -> io::Result<()> {
    let set = SET_NO_SUID | SET_NO_DEV | if read_only { SET_READ_ONLY } else { 0 };
    match set_mount_attributes(path, &MountAttributes { set, ..MountAttributes::default() }) {
        // Kernels before 5.12 know this for one mount at a time.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
            flags.set(MountFlags::RDONLY, read_only);
            Ok(rustix::mount::mount_remount(path, flags, c"")?)
        }
        changed => changed,
    }
}

/// Something of the host that is to be seen elsewhere: taken before anything is covered or made read-only.
enum HostPath {
    /// Its mounts as they were, to be put in place.
    Mounts(OwnedFd),
    /// Kernels before 5.2 know handles only.
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

/// A mount point of the source's kind.
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

/// Everything of the host that the task gets.
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
            agent: agent(&task.private).map_err(set_up_error("find the agent's binary"))?,
            binds: binds.collect::<Result<_, _>>()?,
        })
    }
}

/// The agent's binary as the job's user may run it; a copy where its file was replaced or others cannot run it.
fn agent(private: &Path) -> io::Result<HostPath> {
    let file = fs::read_link("/proc/self/exe")?;
    if file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o005 == 0o005) {
        return HostPath::open(&file);
    }
    let copy = private.join("agent");
    fs::copy("/proc/self/exe", &copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    HostPath::open(&copy)
}

/// Sets up what the task sees. For the inner half only.
pub fn set_up(task: &Confinement, binds: &[BindRequest]) -> Result<(), SetUpError> {
    isolate_mounts().map_err(set_up_error("separate mounts from the host's"))?;
    let sources = HostPaths::open(task, binds)?;
    // What is mounted from here on is the task's own, and can be written.
    read_only(task.user.is_some()).map_err(set_up_error("make the host's files read-only"))?;
    mount_devices(task)?;
    for (at, source) in [("/tmp", &sources.tmp), ("/var/tmp", &sources.var_tmp)] {
        let at = Path::new(at);
        if at.is_dir() {
            source.put(at).map_err(set_up_error(format!("give it a {} of its own", at.display())))?;
        }
    }
    mount_task_dirs(task, &sources).map_err(set_up_error("make the place of its directories"))?;
    add_task_user(task).map_err(set_up_error("make its user known"))?;
    for path in &task.hidden {
        hide_path(task, path).map_err(set_up_error(format!("hide {}", path.display())))?;
    }
    for (order, source) in binds.iter().zip(&sources.binds) {
        let mounted = create_mount_point(&order.target, source.is_directory())
            .and_then(|()| source.put(&order.target))
            .and_then(|()| make_harmless(&order.target, order.read_only));
        let (from, to) = (order.source.display(), order.target.display());
        mounted.map_err(set_up_error(format!("mount {from} at {to}")))?;
    }
    mount_proc().map_err(set_up_error("mount its own /proc"))?;
    // From the old working directory one could walk up into what is covered.
    rustix::process::chdir(task.place.join("scratch")).map_err(set_up_error("enter its directory"))
}

/// What is mounted here is not seen by the host. What the host unmounts is unmounted here, too: a task keeps no disk busy.
fn isolate_mounts() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

fn mount_proc() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount(c"proc", "/proc", c"proc", flags, None)?)
}

/// Shared memory and terminals of its own.
fn mount_devices(task: &Confinement) -> Result<(), SetUpError> {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() {
        let size = task.shm_bytes.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        let options = std::ffi::CString::new(format!("mode=1777{size}")).unwrap_or_default();
        tmpfs(shm, MountFlags::empty(), &options).map_err(set_up_error("give it a /dev/shm of its own"))?;
    }
    mount_devpts().map_err(set_up_error("give it terminals of its own"))
}

fn mount_devpts() -> io::Result<()> {
    let options = c"newinstance,ptmxmode=0666,mode=0620";
    mount(c"devpts", "/dev/pts", c"devpts", MountFlags::NOSUID | MountFlags::NOEXEC, options)?;
    Ok(rustix::mount::mount_bind("/dev/pts/ptmx", "/dev/ptmx")?)
}

/// The directories of the task at a path that its user can walk to, and nothing else beside them.
fn mount_task_dirs(task: &Confinement, sources: &HostPaths) -> io::Result<()> {
    create_mount_point(&task.cover, true)?;
    tmpfs(&task.cover, MountFlags::empty(), TASK_DIRS_OPTIONS)?;
    for (name, source) in &sources.own {
        let at = task.place.join(name);
        create_mount_point(&at, true)?;
        source.put(&at)?;
        make_harmless(&at, false)?;
    }
    let agent = task.place.join("agent");
    create_mount_point(&agent, false)?;
    sources.agent.put(&agent)?;
    make_harmless(&agent, true)?;
    // What hidden files are covered with.
    fs::OpenOptions::new().write(true).create_new(true).mode(0o000).open(empty_file_path(task)).map(drop)
}

fn empty_file_path(task: &Confinement) -> PathBuf {
    task.place.join(".hidden")
}

/// Programs ask for the name of their user: its own comes before the host's.
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
    Ok(rustix::mount::mount_bind(empty_file_path(task), path)?)
}

/// Nothing of the host can be written.
fn read_only(has_own_user: bool) -> io::Result<()> {
    match set_mount_attributes(
        Path::new("/"),
        &MountAttributes { set: SET_READ_ONLY, ..MountAttributes::default() },
    ) {
        // Kernels before 5.12. Another user has few places to write to anyway.
        Err(error) if has_own_user && error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        changed => changed,
    }
}

/// Everything that a confined task needs and that a host may refuse, tried in place.
pub fn try_confinement(has_own_user: bool) -> Result<(), SetUpError> {
    isolate_mounts().map_err(set_up_error("separate mounts from the host's"))?;
    read_only(has_own_user).map_err(set_up_error("make the host's files read-only"))?;
    tmpfs(Path::new("/tmp"), MountFlags::empty(), TASK_DIRS_OPTIONS)
        .map_err(set_up_error("mount a tmpfs"))?;
    mount_devpts().map_err(set_up_error("give it terminals of its own"))?;
    mount_proc().map_err(set_up_error("mount its own /proc"))
}
