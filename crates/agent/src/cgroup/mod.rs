//! Control groups, versions 1 and 2, also mixed: usage, limits and termination of a task.
//!
//! [`Group`] is one group over all hierarchies, for reading. [`task`] creates, limits, kills and removes groups. On a
//! mixed host the controllers are on version 1, while an empty version 2 hierarchy next to them can still kill.

pub mod cloud_metadata;
pub mod port_rewrite;
pub mod task;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Mounted hierarchies. A controller is in one hierarchy only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hierarchies {
    pub v2: Option<Mount>,
    pub v1: Vec<V1Hierarchy>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct V1Hierarchy {
    pub controllers: Vec<String>,
    pub mount: Mount,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub at: PathBuf,
    /// Group of the hierarchy that is visible at `at`; not `/` inside many containers.
    pub root: String,
}

const V1_CONTROLLERS: [&str; 8] =
    ["cpu", "cpuacct", "cpuset", "memory", "pids", "freezer", "devices", "blkio"];

impl Hierarchies {
    pub fn mounted() -> io::Result<Self> {
        Ok(Self::read(&fs::read_to_string("/proc/self/mountinfo")?))
    }

    fn read(mountinfo: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((before, after)) = line.split_once(" - ") else { continue };
            let mut before = before.split(' ').skip(3);
            let (Some(root), Some(at)) = (before.next(), before.next()) else { continue };
            let mut after = after.split(' ');
            let (Some(kind), Some(options)) = (after.next(), after.nth(1)) else { continue };
            let mount = Mount { at: PathBuf::from(at), root: root.to_owned() };
            if kind == "cgroup2" && found.v2.is_none() {
                found.v2 = Some(mount);
            } else if kind == "cgroup" {
                let controllers: Vec<String> = options
                    .split(',')
                    .filter(|option| V1_CONTROLLERS.contains(option))
                    .map(str::to_owned)
                    .collect();
                let known = |c: &String| found.v1.iter().any(|v1| v1.controllers.contains(c));
                if !controllers.is_empty() && !controllers.iter().any(known) {
                    found.v1.push(V1Hierarchy { controllers, mount });
                }
            }
        }
        found
    }

    pub fn v1_of(&self, controller: &str) -> Option<&Mount> {
        self.v1.iter().find(|v1| v1.controllers.iter().any(|c| c == controller)).map(|v1| &v1.mount)
    }
}

impl Mount {
    /// Returns the directory of the group that `/proc/PID/cgroup` names `path`.
    fn directory(&self, path: &str) -> PathBuf {
        let below = Path::new(path).strip_prefix(&self.root).unwrap_or(Path::new(""));
        self.at.join(below)
    }
}

/// One control group: its directory in each relevant hierarchy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub v2: Option<PathBuf>,
    /// Directories of version 1, by controller.
    pub v1: Vec<(String, PathBuf)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in microseconds since the group was created.
    pub cpu_us: Option<u64>,
    pub memory: Option<u64>,
    /// Memory without inactive file pages, which the kernel can drop.
    pub working_set: Option<u64>,
}

impl Group {
    /// Returns the group of this process.
    pub fn own() -> io::Result<Self> {
        Ok(Self::from_proc_lines(&Hierarchies::mounted()?, &fs::read_to_string("/proc/self/cgroup")?))
    }

    /// Returns the group of another process.
    pub fn for_process(pid: i32) -> io::Result<Self> {
        let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        Ok(Self::from_proc_lines(&Hierarchies::mounted()?, &lines))
    }

    fn from_proc_lines(hierarchies: &Hierarchies, lines: &str) -> Self {
        let mut group = Self::default();
        for line in lines.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            if controllers.is_empty() {
                // The group inside a task's group is for killing only; its parent has the usage and the limits.
                let path = path
                    .strip_suffix(task::JOB_SUBGROUP)
                    .filter(|above| task::is_task_group(above))
                    .unwrap_or(path);
                group.v2 = hierarchies.v2.as_ref().map(|mount| mount.directory(path));
            }
            for controller in controllers.split(',').filter(|c| V1_CONTROLLERS.contains(c)) {
                if let Some(mount) = hierarchies.v1_of(controller) {
                    group.v1.push((controller.to_owned(), mount.directory(path)));
                }
            }
        }
        group
    }

    pub fn v1_of(&self, controller: &str) -> Option<&Path> {
        self.v1.iter().find(|(name, _)| name == controller).map(|(_, path)| path.as_path())
    }

    /// Returns the combined usage of all processes of the group. A field is `None` if the kernel does not report it.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        if let Some(v1) = self.v1_of("cpuacct") {
            usage.cpu_us = read_number(&v1.join("cpuacct.usage")).map(|ns| ns / 1000);
        } else if let Some(v2) = &self.v2 {
            usage.cpu_us = read_field(&v2.join("cpu.stat"), "usage_usec");
        }
        let (memory, inactive) = if let Some(v1) = self.v1_of("memory") {
            let inactive = read_field(&v1.join("memory.stat"), "total_inactive_file");
            (read_number(&v1.join("memory.usage_in_bytes")), inactive)
        } else if let Some(v2) = &self.v2 {
            (read_number(&v2.join("memory.current")), read_field(&v2.join("memory.stat"), "inactive_file"))
        } else {
            (None, None)
        };
        usage.memory = memory;
        usage.working_set = memory.map(|memory| memory.saturating_sub(inactive.unwrap_or(0)));
        usage
    }

    /// Returns the peak memory usage of the group. `None` if the kernel does not report it.
    pub fn memory_peak(&self) -> Option<u64> {
        match (self.v1_of("memory"), &self.v2) {
            (Some(v1), _) => read_number(&v1.join("memory.max_usage_in_bytes")),
            (None, Some(v2)) => read_number(&v2.join("memory.peak")),
            (None, None) => None,
        }
    }

    /// Returns the number of processes of the group that the kernel killed for lack of memory.
    pub fn oom_kills(&self) -> u64 {
        let v1 = self.v1_of("memory").and_then(|v1| read_field(&v1.join("memory.oom_control"), "oom_kill"));
        let v2 = || self.v2.as_ref().and_then(|v2| read_field(&v2.join("memory.events"), "oom_kill"));
        v1.or_else(v2).unwrap_or(0)
    }
}

/// Reads a file that contains one number; `None` also for `max`.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads the number after `name` in a file of `name number` lines.
fn read_field(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn a_hybrid_cgroup_host_has_its_controllers_on_v1() {
        let found = Hierarchies::read(MIXED);
        assert_eq!(found.v1_of("cpu"), found.v1_of("cpuacct"));
        assert_eq!(found.v1_of("memory").unwrap().at, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(found.v1_of("pids"), None);
        let group =
            Group::from_proc_lines(&found, "4:memory:/a/b\n1:cpu,cpuacct:/\n3:name=systemd:/x\n0::/c\n");
        assert_eq!(group.v1_of("memory").unwrap(), Path::new("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(group.v1_of("cpuacct").unwrap(), Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(group.v2.unwrap(), Path::new("/sys/fs/cgroup/unified/c"));
    }

    #[test]
    fn cgroup_paths_inside_a_container_are_relative_to_the_mount_root() {
        let mountinfo = "32 30 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let group = Group::from_proc_lines(&Hierarchies::read(mountinfo), "4:memory:/docker/abc/job\n");
        assert_eq!(group.v1_of("memory").unwrap(), Path::new("/sys/fs/cgroup/memory/job"));
        let inside = "0::/windlass/0123456789ab/7/job\n";
        let v2 = "32 30 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        let group = Group::from_proc_lines(&Hierarchies::read(v2), inside);
        assert_eq!(group.v2.unwrap(), Path::new("/sys/fs/cgroup/windlass/0123456789ab/7"));
        let namespaced = "32 30 0:28 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let group = Group::from_proc_lines(&Hierarchies::read(namespaced), "0::/\n");
        assert_eq!(group.v2.unwrap(), Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn usage_and_oom_kills_are_read_from_cgroup_v1_and_v2() {
        let dir = windlass_testkit::temp_dir("cgroup").unwrap();
        let dir = dir.path();
        for (name, text) in [
            ("cpu.stat", "usage_usec 1500\nuser_usec 900\n"),
            ("memory.current", "4096\n"),
            ("memory.peak", "8192\n"),
            ("memory.max_usage_in_bytes", "200\n"),
            ("memory.stat", "total_inactive_file 30\nanon 5\ninactive_file 96\n"),
            ("memory.events", "low 0\noom 3\noom_kill 2\n"),
            ("cpuacct.usage", "7000\n"),
            ("memory.usage_in_bytes", "100\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
        ] {
            fs::write(dir.join(name), text).unwrap();
        }
        let v2 = Group { v2: Some(dir.to_owned()), v1: Vec::new() };
        let v1 = ["cpuacct", "memory"].map(|c| (c.to_owned(), dir.to_owned()));
        let v1 = Group { v2: None, v1: v1.to_vec() };
        assert_eq!((v2.memory_peak(), v1.memory_peak()), (Some(8192), Some(200)));
        let read = [(v2.usage(), v2.oom_kills()), (v1.usage(), v1.oom_kills())];
        let usage =
            |cpu, memory, set| Usage { cpu_us: Some(cpu), memory: Some(memory), working_set: Some(set) };
        assert_eq!(read, [(usage(1500, 4096, 4000), 2), (usage(7, 100, 70), 1)]);
    }
}
