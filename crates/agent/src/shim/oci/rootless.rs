//! Containers of an agent that is not root: each in a user namespace in which the agent's user is root.

use std::{
    ffi::CString,
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use rustix::{
    fs::{Access, StatVfsMountFlags, statvfs},
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    process::Signal,
    thread::{UnshareFlags, unshare_unsafe},
};

use super::network::Uplink;
use crate::{
    isolation::user_map::{UserMap, is_outside_process, remove_tree, report},
    proc::{self, ProcessHandle, ProcessState},
    task_dir::TaskDir,
};

/// Option of overlay mounts in a user namespace.
pub(super) const OVERLAY_OPTION: &str = ",userxattr";

/// Means of an agent without root for its containers.
#[derive(Clone, Debug)]
pub(super) struct Rootless {
    pub(super) map: UserMap,
    /// Program that connects separate networks, if there is one.
    pub(super) uplink: Option<Uplink>,
}

impl Rootless {
    /// `None` if this process is root.
    pub(super) fn find() -> Option<Self> {
        Some(Self { map: UserMap::for_own_user()?, uplink: Uplink::find() })
    }

    /// Reason why containers cannot have a separate network.
    pub(super) fn network_problem(&self) -> Option<String> {
        if self.uplink.is_none() {
            let problem = "the agent is not root, and neither `pasta` nor `slirp4netns` is installed";
            return Some(problem.to_owned());
        }
        tunnel_device_problem(Path::new(TUNNEL_DEVICE))
    }
}

/// Device with which programs connect the network of a container. udev lets every user open it; a host without udev may
/// not.
const TUNNEL_DEVICE: &str = "/dev/net/tun";

fn tunnel_device_problem(device: &Path) -> Option<String> {
    let error = rustix::fs::access(device, Access::READ_OK | Access::WRITE_OK).err()?;
    let device = device.display();
    Some(format!(
        "the agent is not root and cannot open `{device}`, which a separate network needs ({error}); run `chmod 0666 \
         {device}` as root"
    ))
}

/// Checks whether containers can run with their files in `dir`, in a child process. Blocks.
pub(super) fn check(agent: &Path, dir: &Path) -> Result<(), String> {
    let mut command = Command::new(agent);
    command.arg0("windlass-agent").args(["child", "try-rootless"]).arg(dir).env_clear().stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("failed to try a user namespace: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory in which layers are mounted
    dir: PathBuf,
}

/// Entry point of the process that tries a user namespace and an overlay mount.
pub fn main(args: &Args) -> ExitCode {
    report(try_in_namespace(&args.dir))
}

fn try_in_namespace(dir: &Path) -> Result<(), String> {
    let Some(map) = UserMap::for_own_user() else { return Ok(()) };
    let mut random = [0; 6];
    getrandom::fill(&mut random).map_err(|error| error.to_string())?;
    let scratch = dir.join(format!(".overlay-{}", hex::encode(random)));
    let tried = try_overlay(&map, &scratch);
    let _ = remove_tree(&scratch);
    tried
}

fn try_overlay(map: &UserMap, scratch: &Path) -> Result<(), String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    for name in ["lower", "upper", "work", "merged"] {
        fs::create_dir_all(scratch.join(name)).map_err(failed("failed to create a directory"))?;
    }
    let _outside = map.enter().map_err(failed("failed to create a user namespace"))?;
    #[expect(unsafe_code, reason = "a mount namespace affects all threads of the process")]
    // SAFETY: there is one thread.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
        .map_err(|error| failed("failed to create a mount namespace")(error.into()))?;
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change(c"/", flags).map_err(|error| failed("failed to separate mounts")(error.into()))?;
    std::env::set_current_dir(scratch).map_err(failed("failed to enter a directory"))?;
    let options = format!("lowerdir=lower,upperdir=upper,workdir=work{OVERLAY_OPTION}");
    let options = CString::new(options.as_bytes()).map_err(|error| error.to_string())?;
    let mounted = mount("overlay", "merged", "overlay", MountFlags::empty(), options.as_c_str());
    mounted.map_err(|error| {
        format!("failed to mount an overlay in {} in a user namespace: {error}", scratch.display())
    })?;
    // A whiteout, as removed files of a layer need it.
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, "upper/gone", kind, rustix::fs::Mode::empty(), 0)
        .map_err(|error| format!("failed to mark a removed file in a user namespace: {error}"))
}

/// Options of a mount of the host that cannot be removed in a user namespace.
const LOCKED_OPTIONS: [(StatVfsMountFlags, &str); 7] = [
    (StatVfsMountFlags::RDONLY, "ro"),
    (StatVfsMountFlags::NOSUID, "nosuid"),
    (StatVfsMountFlags::NODEV, "nodev"),
    (StatVfsMountFlags::NOEXEC, "noexec"),
    (StatVfsMountFlags::NOATIME, "noatime"),
    (StatVfsMountFlags::NODIRATIME, "nodiratime"),
    (StatVfsMountFlags::RELATIME, "relatime"),
];

/// Returns the options that a mount of this path must have in a user namespace.
pub(super) fn locked_options(path: &Path) -> Vec<&'static str> {
    // A path that does not exist is reported by the OCI runtime.
    let Ok(mounted) = statvfs(path) else { return Vec::new() };
    let set = LOCKED_OPTIONS.iter().filter(|(flag, _)| mounted.f_flag.contains(*flag));
    set.map(|(_, name)| *name).collect()
}

/// Kills the processes that carry the mark of a task, and returns how many there were. Without control groups they are
/// found by that: the processes of a container end with its first one. The process outside of its user namespace ends by
/// itself, after it has ended the programs that it started: their marks may be unreadable.
pub(super) fn kill_marked(task: &TaskDir) -> io::Result<usize> {
    let mark = format!("WINDLASS_TASK_ID={}", task.id);
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let mut count = 0;
    for stat in proc::list()? {
        let is_other = stat.state == ProcessState::Alive && stat.name.pid != own;
        if is_other && proc::was_started_with(stat.name.pid, &[&mark]) {
            count += 1;
            if is_outside_process(stat.name.pid) {
                continue;
            }
            if let Ok(Some(process)) = ProcessHandle::open(stat.name) {
                let _ = process.signal(Signal::KILL);
            }
        }
    }
    Ok(count)
}

/// Returns the tasks of which a process is alive, by the marks of a shim's home.
pub(super) fn marked_tasks(home_mark: &str) -> io::Result<Vec<String>> {
    let alive = proc::list()?.into_iter().filter(|stat| stat.state == ProcessState::Alive);
    let marked = alive.filter(|stat| proc::was_started_with(stat.name.pid, &[home_mark]));
    Ok(marked.filter_map(|stat| proc::environment_variable(stat.name.pid, "WINDLASS_TASK_ID")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_a_mount_are_those_that_it_shows() {
        let options = locked_options(Path::new("/proc/self/status"));
        let shown = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = shown.lines().rev().find(|line| line.split(' ').nth(4) == Some("/proc")).unwrap();
        let expected: Vec<&str> =
            line.split(' ').nth(5).unwrap().split(',').filter(|one| *one != "rw").collect();
        assert_eq!(options, expected);
        assert_eq!(locked_options(Path::new("/missing")), Vec::<&str>::new());
    }

    #[test]
    fn a_tunnel_device_that_cannot_be_opened_is_a_problem_with_its_cure() {
        assert_eq!(tunnel_device_problem(Path::new("/dev/null")), None);
        let problem = tunnel_device_problem(Path::new("/dev/missing")).unwrap();
        assert!(problem.contains("chmod 0666 /dev/missing"), "{problem}");
    }
}
