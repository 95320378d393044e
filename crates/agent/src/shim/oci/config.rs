//! Translation of a task into the configuration of an OCI runtime. Pure.
//!
//! What a container may do is what a container of Docker may do with the same policy: namespaces, capabilities, hidden
//! paths, mounts and the filter of system calls.

use std::path::{Path, PathBuf};

use super::{cdi::GpuEdits, seccomp};
use crate::{
    runner::{init::NOTICES_VARIABLE, user::Account},
    shim::runtime::{BindMount, PreparedTask},
    task_dir::{self, DEVICE_GROUPS_VARIABLE},
};
use serde_json::{Value, json};
use windlass_api::agent::shim::NetworkMode;

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SHM_BYTES_DEFAULT: i64 = 64 << 20;
const CPU_PERIOD_US: u64 = 100_000;
const CPU_QUOTA_US_MIN: u64 = 1000;
/// Paths of the kernel that are hidden, and those that cannot be written.
const MASKED_PATHS: [&str; 11] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// Files of the network that a container gets a copy of.
pub(super) const NETWORK_FILES: [&str; 3] = ["hosts", "hostname", "resolv.conf"];

/// A device file of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceNode {
    /// Path in the container.
    pub(super) path: String,
    /// `c` or `b`.
    pub(super) kind: char,
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Facts about the host, the image and the task's directory.
pub(super) struct ContainerInputs<'a> {
    pub(super) entrypoint: &'a [String],
    /// Copy of the agent's binary.
    pub(super) agent: &'a Path,
    /// Directory of the runner; `None` for a container without one.
    pub(super) run_dir: Option<&'a Path>,
    /// Directory with the host's git for images that have none.
    pub(super) git: Option<&'a Path>,
    /// Variables of the image.
    pub(super) image_env: &'a [String],
    pub(super) working_dir: &'a str,
    pub(super) account: &'a Account,
    pub(super) rootfs: &'a Path,
    /// Directory with the files of the network.
    pub(super) files: &'a Path,
    pub(super) hostname: &'a str,
    pub(super) cgroup: &'a str,
    pub(super) has_cgroup_v2: bool,
    /// Device files, and what GPUs need in addition.
    pub(super) gpus: &'a GpuEdits,
    /// Maximum number of open files that this process can grant.
    pub(super) open_files: u64,
    pub(super) has_infiniband: bool,
    /// Capabilities of this process, for privileged containers.
    pub(super) own_capabilities: &'a [String],
    /// Set if the agent is not root.
    pub(super) rootless: Option<RootlessInputs>,
    /// Messages for the log of the runner.
    pub(super) notices: &'a [String],
    /// Returns whether a path is on a mount whose later submounts may propagate into a container.
    pub(super) is_shared: &'a dyn Fn(&Path) -> bool,
    /// Returns the options of the mount that holds a path, if a mount of the path must have them too.
    pub(super) locked_options: &'a dyn Fn(&Path) -> Vec<&'static str>,
}

/// A container in a user namespace of the agent's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RootlessInputs {
    /// Other ids than that of root exist.
    pub(super) has_ids: bool,
}

/// Returns `config.json`.
pub(super) fn container_config(task: &PreparedTask, inputs: &ContainerInputs<'_>) -> Value {
    let privileged = task.spec.privileged;
    let mut config = json!({
        "ociVersion": "1.0.2",
        "process": process(task, inputs),
        "root": {"path": inputs.rootfs, "readonly": false},
        "hostname": inputs.hostname,
        "mounts": mounts(task, inputs),
        "linux": {
            "namespaces": namespaces(inputs),
            "devices": inputs.gpus.devices.iter().map(device).collect::<Vec<_>>(),
            "rootfsPropagation": "rslave",
        },
    });
    if inputs.rootless.is_none() {
        config["linux"]["cgroupsPath"] = json!(inputs.cgroup);
        config["linux"]["resources"] = resources(task, inputs);
    }
    if !inputs.gpus.hooks.is_empty() {
        config["hooks"] = json!(inputs.gpus.hooks);
    }
    if !privileged {
        config["linux"]["maskedPaths"] = json!(MASKED_PATHS);
        config["linux"]["readonlyPaths"] = json!(READ_ONLY_PATHS);
        config["linux"]["seccomp"] = seccomp::profile(&task.limits.capabilities);
    }
    config
}

fn capabilities<'a>(task: &'a PreparedTask, inputs: &ContainerInputs<'a>) -> &'a [String] {
    if task.spec.privileged { inputs.own_capabilities } else { &task.limits.capabilities }
}

fn process(task: &PreparedTask, inputs: &ContainerInputs<'_>) -> Value {
    let account = inputs.account;
    let names: Vec<String> = capabilities(task, inputs).iter().map(|name| format!("CAP_{name}")).collect();
    // A user other than root starts without capabilities, and may gain them by files that have some.
    let active = if account.uid == 0 || task.spec.privileged { names.clone() } else { Vec::new() };
    let mut groups = account.groups.clone();
    groups.extend(inputs.gpus.groups.iter().filter(|group| !account.groups.contains(group)));
    if inputs.rootless.is_some_and(|rootless| !rootless.has_ids) {
        groups.clear();
    }
    let mut limits =
        vec![json!({"type": "RLIMIT_NOFILE", "hard": inputs.open_files, "soft": inputs.open_files})];
    if inputs.has_infiniband && inputs.rootless.is_none() {
        // Adapters access memory directly, so it must stay locked.
        limits.push(json!({"type": "RLIMIT_MEMLOCK", "hard": u64::MAX, "soft": u64::MAX}));
    }
    let mut process = json!({
        "terminal": false,
        "user": {"uid": account.uid, "gid": account.gid, "additionalGids": groups},
        "args": inputs.entrypoint,
        "env": environment(task, inputs),
        "cwd": if inputs.working_dir.is_empty() { "/" } else { inputs.working_dir },
        "capabilities": {"bounding": names, "effective": active, "permitted": active},
        "rlimits": limits,
        "noNewPrivileges": !task.spec.privileged && !task.limits.new_privileges,
    });
    // Only root may lower it.
    if inputs.rootless.is_none() {
        process["oomScoreAdj"] = json!(0);
    }
    process
}

/// Returns the variables; of several with one name the last counts.
fn environment(task: &PreparedTask, inputs: &ContainerInputs<'_>) -> Vec<String> {
    let mut all = vec![PATH.to_owned(), format!("HOSTNAME={}", inputs.hostname)];
    all.push(format!("HOME={}", inputs.account.home.display()));
    all.extend(inputs.image_env.iter().cloned());
    all.extend(inputs.gpus.env.iter().cloned());
    if let Some(dir) = inputs.gpus.library_dir {
        let known = inputs.image_env.iter().rev().find_map(|one| one.strip_prefix("LD_LIBRARY_PATH="));
        let known =
            known.filter(|known| !known.is_empty()).map_or(String::new(), |known| format!(":{known}"));
        all.push(format!("LD_LIBRARY_PATH={dir}{known}"));
    }
    all.extend(task.env.iter().map(|(name, value)| format!("{name}={value}")));
    all.extend(inputs.run_dir.map(|_| format!("WINDLASS_TASK_ID={}", task.spec.id)));
    if !inputs.notices.is_empty() {
        all.push(format!("{NOTICES_VARIABLE}={}", inputs.notices.join("\n")));
    }
    // A user namespace has other groups; without a runner, no process changes its user.
    if !inputs.gpus.groups.is_empty() && inputs.rootless.is_none() && inputs.run_dir.is_some() {
        let groups: Vec<String> = inputs.gpus.groups.iter().map(u32::to_string).collect();
        all.push(format!("{DEVICE_GROUPS_VARIABLE}={}", groups.join(",")));
    }
    let name = |one: &str| one.split('=').next().unwrap_or_default().to_owned();
    let mut kept: Vec<String> = Vec::new();
    for one in all {
        kept.retain(|known| name(known) != name(&one));
        kept.push(one);
    }
    kept
}

fn namespaces(inputs: &ContainerInputs<'_>) -> Vec<Value> {
    let mut kinds = vec!["mount", "pid", "ipc", "uts"];
    if inputs.has_cgroup_v2 && inputs.rootless.is_none() {
        kinds.push("cgroup");
    }
    // The network of a container is that of the OCI runtime, which the monitor starts in the right one.
    kinds.into_iter().map(|kind| json!({"type": kind})).collect()
}

fn mount(destination: &str, kind: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": kind, "source": kind, "options": options})
}

fn mounts(task: &PreparedTask, inputs: &ContainerInputs<'_>) -> Vec<Value> {
    let access = if task.spec.privileged { "rw" } else { "ro" };
    let shm = match task.spec.shm_size {
        // The default is mounted `noexec`, as with Docker; one of a requested size is for programs that compile code
        // into shared memory.
        0 => ["nosuid", "nodev", "noexec", "mode=1777"].map(str::to_owned).to_vec(),
        _ => ["nosuid", "nodev", "exec", "mode=1777"].map(str::to_owned).to_vec(),
    };
    let size = if task.spec.shm_size > 0 { task.spec.shm_size } else { SHM_BYTES_DEFAULT };
    let shm: Vec<String> = shm.into_iter().chain([format!("size={size}")]).collect();
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ];
    let mut terminals = vec!["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"];
    // The group of terminals must exist.
    terminals.extend(inputs.rootless.is_none_or(|rootless| rootless.has_ids).then_some("gid=5"));
    mounts.push(mount("/dev/pts", "devpts", &terminals));
    mounts.extend(match (inputs.rootless, task.spec.network_mode) {
        (None, _) => [
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", access]),
            mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", access]),
        ],
        (Some(_), NetworkMode::Bridge) => {
            [mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]), hidden_groups()]
        }
        // Only the owner of a network may mount its part of this file system.
        (Some(_), NetworkMode::Host) => {
            let options = ["rbind", "nosuid", "noexec", "nodev", "ro", "rprivate"];
            let bind = json!({"destination": "/sys", "type": "bind", "source": "/sys", "options": options});
            [bind, hidden_groups()]
        }
    });
    mounts.extend([
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shm}),
    ]);
    for name in NETWORK_FILES {
        let source = inputs.files.join(name);
        let bind = BindMount { source, target: format!("/etc/{name}"), read_only: false };
        mounts.push(bind_mount(&bind, false));
    }
    let agent = (inputs.agent, task_dir::AGENT_IN_CONTAINER, true);
    let run_dir = inputs.run_dir.map(|dir| (dir, task_dir::RUN_DIR_IN_CONTAINER, false));
    for (source, target, read_only) in std::iter::once(agent).chain(run_dir) {
        let (source, target) = (source.to_owned(), target.to_owned());
        mounts.push(bind_mount(&BindMount { source, target, read_only }, false));
    }
    if let Some(git) = inputs.git {
        let target = task_dir::GIT_IN_CONTAINER.to_owned();
        mounts.push(bind_mount(&BindMount { source: git.to_owned(), target, read_only: true }, false));
    }
    mounts.extend(inputs.gpus.mounts.iter().map(|bind| bind_mount(bind, false)));
    // Parents before what is mounted below them.
    let mut binds: Vec<&BindMount> = task.binds.iter().collect();
    binds.sort_by_key(|bind| Path::new(&bind.target).components().count());
    mounts.extend(binds.into_iter().map(|bind| {
        let mut mount = bind_mount(bind, (inputs.is_shared)(&bind.source));
        if let Some(options) = mount["options"].as_array_mut() {
            options.extend(["nosuid", "nodev"].map(Value::from));
        }
        mount
    }));
    for mount in &mut mounts {
        add_locked_options(mount, inputs);
    }
    mounts
}

/// Adds the options without which the kernel refuses to change a mount of the host: `runc` does not add them by itself.
fn add_locked_options(mount: &mut Value, inputs: &ContainerInputs<'_>) {
    let locked = match (mount["type"].as_str(), mount["source"].as_str()) {
        (Some("bind"), Some(source)) => (inputs.locked_options)(Path::new(source)),
        _ => return,
    };
    if let Some(options) = mount["options"].as_array_mut() {
        let missing: Vec<Value> =
            locked.into_iter().map(Value::from).filter(|one| !options.contains(one)).collect();
        options.extend(missing);
    }
}

/// Hides the control groups of the host.
fn hidden_groups() -> Value {
    let options = ["nosuid", "noexec", "nodev", "ro", "mode=755", "size=4k"];
    json!({"destination": "/sys/fs/cgroup", "type": "tmpfs", "source": "tmpfs", "options": options})
}

/// Later mounts of the host below a shared mount propagate into the container; never in the other direction. A
/// read-only mount leaves out the mounts below it, which would stay writable.
fn bind_mount(bind: &BindMount, is_shared: bool) -> Value {
    let propagation = if is_shared { "rslave" } else { "rprivate" };
    let options = if bind.read_only { vec!["bind", "ro", propagation] } else { vec!["rbind", propagation] };
    json!({"destination": bind.target, "type": "bind", "source": bind.source, "options": options})
}

fn resources(task: &PreparedTask, inputs: &ContainerInputs<'_>) -> Value {
    let spec = &task.spec;
    let mut devices = vec![json!({"allow": spec.privileged, "access": "rwm"})];
    if !spec.privileged {
        devices.extend(inputs.gpus.devices.iter().map(|one| {
            json!({"allow": true, "type": one.kind.to_string(), "major": one.major, "minor": one.minor,
                "access": "rwm"})
        }));
    }
    let mut resources = json!({"devices": devices});
    if task.limits.pids > 0 {
        resources["pids"] = json!({"limit": task.limits.pids});
    }
    if spec.memory > 0 {
        // The sum of memory and swap: no swap in addition to the memory.
        resources["memory"] = json!({"limit": spec.memory, "swap": spec.memory});
    }
    if spec.cpu > 0.0 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to what a host can have"
        )]
        let quota = (spec.cpu.clamp(0.0, 1e6) * 1e5) as u64;
        resources["cpu"] = json!({"quota": quota.max(CPU_QUOTA_US_MIN), "period": CPU_PERIOD_US});
    }
    resources
}

fn device(one: &DeviceNode) -> Value {
    json!({"path": one.path, "type": one.kind.to_string(), "major": one.major, "minor": one.minor,
        "fileMode": one.mode & 0o777, "uid": one.uid, "gid": one.gid})
}

/// Splits `USER[:GROUP]`, each a name or a number.
pub(super) fn parse_user(text: &str) -> windlass_api::agent::runner::User {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let number = |text: &str| text.parse::<u32>().ok();
    let name = |text: &str| (!text.is_empty() && number(text).is_none()).then(|| text.to_owned());
    windlass_api::agent::runner::User {
        uid: number(user),
        username: name(user),
        gid: number(group),
        groupname: name(group),
    }
}

/// Directories of one container, below the directory of its task. Only the shim can read them.
#[derive(Clone, Debug)]
pub(super) struct Bundle(PathBuf);

impl Bundle {
    pub(super) fn new(task: &crate::task_dir::TaskDir) -> Self {
        Self(task.root().join("container"))
    }

    pub(super) fn at(root: PathBuf) -> Self {
        Self(root)
    }

    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    pub(super) fn rootfs(&self) -> PathBuf {
        self.0.join("rootfs")
    }

    pub(super) fn upper(&self) -> PathBuf {
        self.0.join("upper")
    }

    pub(super) fn work(&self) -> PathBuf {
        self.0.join("work")
    }

    /// Directory of links to the layers, with short names: the options of a mount are limited to one page.
    pub(super) fn lower(&self) -> PathBuf {
        self.0.join("lower")
    }

    pub(super) fn files(&self) -> PathBuf {
        self.0.join("files")
    }
}

#[cfg(test)]
mod tests;
