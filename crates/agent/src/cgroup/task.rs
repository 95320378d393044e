//! Control groups that the shim creates, limits, kills and removes, one per task.
//!
//! All groups of one shim are below `windlass/HOME`, where HOME is a hash of the shim's directory: two shims on one
//! host, and other programs that create groups, do not collide. They are created at the root of each hierarchy if
//! permitted, not below the shim's own group, because a service manager kills the whole group of a service that it
//! restarts.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;

use super::{Group, Hierarchies, Mount};
use crate::proc::{self, ProcessHandle};

/// Parent of all groups that shims create.
const ROOT_GROUP: &str = "windlass";
/// Group inside a task's group for all but its first process.
pub(super) const JOB_SUBGROUP: &str = "/job";
/// Version 1 controllers that are used: limits, usage, and freezing everything at once.
const V1_CONTROLLERS_USED: [&str; 5] = ["cpu", "cpuacct", "memory", "pids", "freezer"];
/// Period of a processor limit, in microseconds.
const CPU_PERIOD_US: u64 = 100_000;
/// Minimum quota that the kernel accepts.
const CPU_QUOTA_US_MIN: u64 = 1000;
/// Attempts to remove a group that the kernel still considers busy.
const REMOVE_ATTEMPTS: u32 = 100;
const REMOVE_RETRY_DELAY: Duration = Duration::from_millis(10);
/// Attempts to create a group: the end of another task may remove the common parent at the same time.
const CREATE_ATTEMPTS: u32 = 20;

/// Group inside the one that systemd delegates to a service (`DelegateSubgroup=`), for the processes of the service itself:
/// only a group without processes can pass controllers on.
const SERVICE_SUBGROUP: &str = "windlass-service";

/// Returns the group of version 2 in which a process may create groups with limits.
fn delegated_group(own: PathBuf) -> PathBuf {
    match own.parent() {
        Some(delegated) if own.ends_with(SERVICE_SUBGROUP) => delegated.to_owned(),
        Some(_) | None => own,
    }
}

/// Returns whether a path is that of a task's group.
pub(super) fn is_task_group(path: &str) -> bool {
    Path::new(path).ancestors().nth(2).is_some_and(|above| above.ends_with(ROOT_GROUP))
}

/// Limits of a task. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TaskLimits {
    /// Number of cores.
    pub cpu: Option<f64>,
    /// Bytes, including swap.
    pub memory: Option<u64>,
    /// Number of processes and threads.
    pub pids: Option<u64>,
}

/// Requested limit that is not in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnenforcedLimit {
    pub what: &'static str,
    pub why: String,
}

impl std::fmt::Display for UnenforcedLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the {} limit is not enforced: {}", self.what, self.why)
    }
}

/// Control groups of one shim.
#[derive(Clone, Debug)]
pub struct TaskGroups {
    hierarchies: Hierarchies,
    own: Group,
    /// `windlass/HOME`.
    parent: PathBuf,
}

impl TaskGroups {
    /// `home` is a short name for the shim's directory.
    pub fn new(home: &str, hierarchies: Hierarchies) -> Self {
        let mut own = Group::own().unwrap_or_default();
        own.v2 = own.v2.map(delegated_group);
        Self { hierarchies, own, parent: Path::new(ROOT_GROUP).join(home) }
    }

    /// Creates the group of a task, or finds the existing one, and limits it. Returns the limits that could not be
    /// applied.
    pub fn make(&self, name: &str, limits: &TaskLimits) -> (TaskGroup, Vec<UnenforcedLimit>) {
        let mut group = Group::default();
        if let Some(mount) = &self.hierarchies.v2 {
            group.v2 = self.create_in(mount, self.own.v2.as_deref(), name, true);
        }
        for controller in V1_CONTROLLERS_USED {
            let Some(mount) = self.hierarchies.v1_of(controller) else { continue };
            if let Some(path) = self.create_in(mount, self.own.v1_of(controller), name, false) {
                group.v1.push((controller.to_owned(), path));
            }
        }
        let unenforced = apply_limits(&group, limits);
        (self.task_group(name, group), unenforced)
    }

    fn create_in(&self, mount: &Mount, own: Option<&Path>, name: &str, v2: bool) -> Option<PathBuf> {
        for base in [Some(mount.at.as_path()), own].into_iter().flatten() {
            let path = base.join(&self.parent).join(name);
            for _ in 0..CREATE_ATTEMPTS {
                match fs::create_dir_all(&path) {
                    Ok(()) => {
                        if v2 {
                            self.enable_controllers(base, Path::new(name));
                        }
                        return Some(path);
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(_) => break,
                }
            }
        }
        None
    }

    /// Enables controllers in all parents: on version 2 a controller limits a group only if each group above passes it
    /// on.
    fn enable_controllers(&self, base: &Path, name: &Path) {
        let mut above = base.to_owned();
        // A task may have several groups below its own.
        let parts = self.parent.iter().chain(name.parent().into_iter().flatten());
        for part in std::iter::once(Path::new("")).chain(parts.map(Path::new)) {
            above.push(part);
            for controller in ["+cpu", "+memory", "+pids"] {
                let _ = fs::write(above.join("cgroup.subtree_control"), controller);
            }
        }
    }

    /// Returns the group of a task, with the directories that exist.
    pub fn find(&self, name: &str) -> TaskGroup {
        let there = |mount: &Mount, own: Option<&Path>| {
            let bases = [Some(mount.at.as_path()), own].into_iter().flatten();
            bases.map(|base| base.join(&self.parent).join(name)).find(|path| path.is_dir())
        };
        let v2 = self.hierarchies.v2.as_ref().and_then(|mount| there(mount, self.own.v2.as_deref()));
        let v1 = V1_CONTROLLERS_USED.iter().filter_map(|&controller| {
            let path = there(self.hierarchies.v1_of(controller)?, self.own.v1_of(controller))?;
            Some((controller.to_owned(), path))
        });
        self.task_group(name, Group { v2, v1: v1.collect() })
    }

    /// Returns the names of all existing groups.
    pub fn names(&self) -> BTreeSet<String> {
        let v1 = V1_CONTROLLERS_USED
            .iter()
            .filter_map(|c| Some((&self.hierarchies.v1_of(c)?.at, self.own.v1_of(c))));
        let v2 = self.hierarchies.v2.as_ref().map(|mount| (&mount.at, self.own.v2.as_deref()));
        let bases = v1.chain(v2).flat_map(|(at, own)| [Some(at.as_path()), own]).flatten();
        let mut names = BTreeSet::new();
        for base in bases {
            let Ok(entries) = fs::read_dir(base.join(&self.parent)) else { continue };
            let directories =
                entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            names.extend(directories.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        names
    }

    fn task_group(&self, name: &str, group: Group) -> TaskGroup {
        TaskGroup { group, below: Path::new("/").join(&self.parent).join(name) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskGroup {
    pub group: Group,
    /// Suffix of every path of the group in `/proc/PID/cgroup`.
    below: PathBuf,
}

impl TaskGroup {
    /// Returns each directory once: several controllers may share a hierarchy.
    pub fn directories(&self) -> Vec<PathBuf> {
        let all = self.group.v2.iter().chain(self.group.v1.iter().map(|(_, path)| path));
        all.collect::<BTreeSet<_>>().into_iter().cloned().collect()
    }

    /// Creates a version 2 group inside for all but the first process. It can be killed atomically while the first
    /// process lives on.
    pub fn create_job_subgroup(&self) -> Option<PathBuf> {
        let path = self.group.v2.as_ref()?.join("job");
        fs::create_dir_all(&path).ok()?;
        path.join("cgroup.kill").exists().then_some(path)
    }

    /// Returns the pids of all processes in the group, in any hierarchy.
    pub fn members(&self) -> BTreeSet<i32> {
        let mut pids = BTreeSet::new();
        for directory in self.directories() {
            collect_pids(&directory, &mut pids);
        }
        pids
    }

    /// Kills all processes that are in the group now. A process that forks meanwhile may be missed: check, and repeat.
    pub fn kill(&self) {
        let at_one_blow =
            self.group.v2.as_ref().is_some_and(|v2| fs::write(v2.join("cgroup.kill"), "1").is_ok());
        if !at_one_blow {
            self.freeze(true);
        }
        for pid in self.members() {
            self.kill_member(pid);
        }
        if !at_one_blow {
            self.freeze(false);
        }
    }

    /// Kills one process. Opens the handle first and reads the membership afterwards: a pid that was reused in between
    /// is either not opened, or found not to be a member.
    fn kill_member(&self, pid: i32) {
        let Ok(Some(stat)) = proc::stat(pid) else { return };
        let Ok(Some(held)) = ProcessHandle::open(stat.name) else { return };
        if self.contains(pid) {
            let _ = held.signal(Signal::KILL);
        }
    }

    fn contains(&self, pid: i32) -> bool {
        let Ok(lines) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return false };
        let paths = lines.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        paths.into_iter().any(|path| is_in_group(path, &self.below))
    }

    fn freeze(&self, frozen: bool) {
        if let Some(v1) = self.group.v1_of("freezer") {
            let _ = fs::write(v1.join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" });
        }
        if let Some(v2) = &self.group.v2 {
            let _ = fs::write(v2.join("cgroup.freeze"), if frozen { "1" } else { "0" });
        }
    }

    /// Removes the empty group, and its parents if they are unused. Blocks for a moment if the kernel lags.
    pub fn remove(&self) -> io::Result<()> {
        for directory in self.directories() {
            let mut tries = 0;
            while let Err(error) = remove_tree(&directory) {
                tries += 1;
                if tries >= REMOVE_ATTEMPTS {
                    return Err(error);
                }
                std::thread::sleep(REMOVE_RETRY_DELAY);
            }
            for parent in directory.ancestors().skip(1).take(2) {
                let _ = fs::remove_dir(parent);
            }
        }
        Ok(())
    }
}

/// Mount points of all hierarchies, also of those that are not used here.
fn all_mounts() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter(|line| line.contains(" - cgroup"));
    points.filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect()
}

/// Creates a group in every hierarchy, as container engines do: below it they create that of a container, and must not
/// find that the end of another task removed a parent meanwhile.
pub fn create_in_all_hierarchies(home: &str, name: &str) {
    for mount in all_mounts() {
        let group = mount.join(ROOT_GROUP).join(home).join(name);
        let lost_a_race = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let create = || fs::create_dir_all(&group).err().filter(lost_a_race);
        let _ = (0..CREATE_ATTEMPTS).find(|_| create().is_none());
    }
}

/// Removes a group in every hierarchy: container engines create groups also in those that are not used here.
pub fn remove_from_all_hierarchies(home: &str, name: &str) {
    for mount in all_mounts() {
        let group = mount.join(ROOT_GROUP).join(home).join(name);
        let mut tries = 0;
        // A process that has just ended keeps its group busy for a moment.
        while remove_tree(&group).is_err() && tries < REMOVE_ATTEMPTS {
            tries += 1;
            std::thread::sleep(REMOVE_RETRY_DELAY);
        }
        for path in group.ancestors().skip(1).take(2) {
            let _ = fs::remove_dir(path);
        }
    }
}

/// Returns whether `path` is the group `below` or inside it, at any position in the hierarchy.
fn is_in_group(path: &str, below: &Path) -> bool {
    let below = below.to_string_lossy();
    path.match_indices(below.as_ref()).any(|(at, found)| {
        let rest = &path[at + found.len()..];
        rest.is_empty() || rest.starts_with('/')
    })
}

fn collect_pids(directory: &Path, pids: &mut BTreeSet<i32>) {
    if let Ok(text) = fs::read_to_string(directory.join("cgroup.procs")) {
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|&pid| pid > 0));
    }
    for inside in subdirectories(directory) {
        collect_pids(&inside, pids);
    }
}

fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect()
}

fn remove_tree(directory: &Path) -> io::Result<()> {
    for inside in subdirectories(directory) {
        remove_tree(&inside)?;
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn apply_limits(group: &Group, limits: &TaskLimits) -> Vec<UnenforcedLimit> {
    let mut unenforced = Vec::new();
    let mut tried = |what, result: Result<(), String>| {
        if let Err(why) = result {
            unenforced.push(UnenforcedLimit { what, why });
        }
    };
    if let Some(cores) = limits.cpu {
        tried("cpu", limit_cpu(group, cores));
    }
    if let Some(bytes) = limits.memory {
        tried("memory", limit_memory(group, bytes));
    }
    if let Some(pids) = limits.pids {
        tried("pids", set_limit(group, "pids", "pids.max", "pids.max", &pids.to_string()));
    }
    unenforced
}

fn limit_cpu(group: &Group, cores: f64) -> Result<(), String> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to what a host can have"
    )]
    let quota = (cores.clamp(0.0, 1e6) * 1e5) as u64;
    let quota = quota.max(CPU_QUOTA_US_MIN);
    if let Some(v1) = group.v1_of("cpu") {
        write_file(&v1.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
        return write_file(&v1.join("cpu.cfs_quota_us"), &quota.to_string());
    }
    set_limit(group, "cpu", "cpu.max", "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))
}

fn limit_memory(group: &Group, bytes: u64) -> Result<(), String> {
    let text = bytes.to_string();
    set_limit(group, "memory", "memory.limit_in_bytes", "memory.max", &text)?;
    // Swap must not bypass the limit. Where swap is not counted, there may be none, or at least it is avoided.
    if let Some(v1) = group.v1_of("memory") {
        if write_file(&v1.join("memory.memsw.limit_in_bytes"), &text).is_err() {
            let _ = write_file(&v1.join("memory.swappiness"), "0");
        }
    } else if let Some(v2) = &group.v2 {
        let _ = write_file(&v2.join("memory.swap.max"), "0");
    }
    Ok(())
}

/// Writes to the controller in the hierarchy that has it.
fn set_limit(
    group: &Group,
    controller: &str,
    v1_file: &str,
    v2_file: &str,
    value: &str,
) -> Result<(), String> {
    if let Some(v1) = group.v1_of(controller) {
        return write_file(&v1.join(v1_file), value);
    }
    match &group.v2 {
        Some(v2) if v2.join(v2_file).exists() => write_file(&v2.join(v2_file), value),
        Some(_) => Err(format!("the {controller} controller is not available on this host")),
        None => Err("failed to create a control group".to_owned()),
    }
}

fn write_file(path: &Path, value: &str) -> Result<(), String> {
    // Not created if missing: in a control group that fails with misleading errors.
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
        .map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_cgroup_itself_and_its_descendants_count_as_members() {
        let below = Path::new("/windlass/h/7");
        assert!(is_in_group("/windlass/h/7", below));
        assert!(is_in_group("/user.slice/windlass/h/7/job", below));
        assert!(!is_in_group("/windlass/h/77", below));
        assert!(!is_in_group("/windlass/h", below));
        assert!(!is_in_group("/", below));
    }

    #[test]
    fn limits_without_a_cgroup_controller_are_reported_as_not_enforced() {
        let limits = TaskLimits { cpu: Some(0.5), memory: Some(1 << 20), pids: Some(9) };
        let message = apply_limits(&Group::default(), &limits);
        assert_eq!(message.iter().map(|one| one.what).collect::<Vec<_>>(), ["cpu", "memory", "pids"]);
        assert_eq!(message[0].to_string(), "the cpu limit is not enforced: failed to create a control group");
        assert!(apply_limits(&Group::default(), &TaskLimits::default()).is_empty());
    }

    #[test]
    fn limits_are_written_in_the_format_of_each_cgroup_version() {
        let dir = windlass_testkit::temp_dir("limits").unwrap();
        let dir = dir.path();
        for name in [
            "cpu.max",
            "cpu.cfs_period_us",
            "cpu.cfs_quota_us",
            "memory.max",
            "memory.swap.max",
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            "pids.max",
        ] {
            fs::write(dir.join(name), "").unwrap();
        }
        let limits = TaskLimits { cpu: Some(1.5), memory: Some(1 << 20), pids: Some(9) };
        let v2 = apply_limits(&Group { v2: Some(dir.to_owned()), v1: Vec::new() }, &limits);
        let v1 = ["cpu", "memory", "pids"].map(|c| (c.to_owned(), dir.to_owned()));
        let v1 = apply_limits(&Group { v2: None, v1: v1.to_vec() }, &limits);
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let written = [
            ("cpu.max", "150000 100000"),
            ("memory.max", "1048576"),
            ("memory.swap.max", "0"),
            ("cpu.cfs_quota_us", "150000"),
            ("memory.limit_in_bytes", "1048576"),
            ("memory.memsw.limit_in_bytes", "1048576"),
            ("pids.max", "9"),
        ]
        .map(|(name, value)| (read(name).contains(value), name));
        assert_eq!((v2, v1), (Vec::new(), Vec::new()));
        assert!(written.iter().all(|(is, _)| *is), "{written:?}");
    }

    #[test]
    fn groups_of_tasks_and_of_the_processes_of_a_service_have_the_same_parent() {
        let group = |own: &str| delegated_group(PathBuf::from(own)).display().to_string();
        assert_eq!(group("/sys/fs/cgroup/a.service/windlass-service"), "/sys/fs/cgroup/a.service");
        assert_eq!(group("/sys/fs/cgroup/a.service"), "/sys/fs/cgroup/a.service");
        assert_eq!(group("/sys/fs/cgroup/a-windlass-service"), "/sys/fs/cgroup/a-windlass-service");
        for unit in ["windlass-server", "windlass-dispatch-local"] {
            let path = format!("{}/../../packaging/systemd/{unit}.service", env!("CARGO_MANIFEST_DIR"));
            let text = fs::read_to_string(path).unwrap();
            assert!(text.contains(&format!("\nDelegateSubgroup={SERVICE_SUBGROUP}\n")), "{unit}");
        }
    }

    #[test]
    fn controllers_of_version_2_are_passed_on_to_groups_inside_of_that_of_a_task() {
        let dir = windlass_testkit::temp_dir("cgroup").unwrap();
        let mount = Mount { at: dir.path().to_owned(), root: "/".to_owned() };
        let groups = TaskGroups::new("home", Hierarchies { v2: Some(mount), v1: Vec::new() });
        let limits = TaskLimits { memory: Some(1 << 20), ..TaskLimits::default() };
        let group = dir.path().join("windlass/home/task/monitor");
        // The kernel creates it with the group.
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.max"), "max").unwrap();
        let (made, unenforced) = groups.make("task/monitor", &limits);
        assert_eq!((made.directories(), unenforced), (vec![group.clone()], Vec::new()));
        assert_eq!(fs::read_to_string(group.join("memory.max")).unwrap(), "1048576");
        for above in group.ancestors().skip(1).take(4) {
            // Here each write replaces the one before.
            assert_eq!(fs::read_to_string(above.join("cgroup.subtree_control")).unwrap(), "+pids");
        }
        assert!(!group.join("cgroup.subtree_control").exists(), "it has processes");
        assert_eq!(groups.find("task/monitor").directories(), [group]);
    }
}
