//! Leftover checks: prove that nothing of a shim's tasks is left on the host.
//!
//! They query the host and never the shim: the engine's own list, the kernel's mounts, processes and control groups,
//! and the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use bollard::query_parameters::ListContainersOptionsBuilder;
use windlass_agent::shim::journal::{self, JournalEvent, Record, invariants};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::eventually_ok_async;

use super::engine;

const HOME_LABEL: &str = "windlass.shim.home";

/// Returns everything that is left of the tasks of `home`; empty means clean.
pub(crate) async fn leftovers(home: &Path, tasks: &[SubmissionId]) -> Vec<String> {
    let mut left = Vec::new();
    if let Some(socket) = std::env::var_os("WINDLASS_TEST_DOCKER") {
        left.extend(containers(Path::new(&socket), home, tasks).await);
    }
    left.extend(mounts(home));
    left.extend(processes(tasks));
    left.extend(groups(tasks));
    left.extend(directories(home));
    left.extend(keys(tasks));
    left
}

/// Waits briefly for the host to be clean, and checks the journal as well.
pub(crate) async fn assert_clean(home: &Path, tasks: &[SubmissionId]) {
    eventually_ok_async("nothing is left over", async || {
        let left = leftovers(home, tasks).await;
        if left.is_empty() { Ok(()) } else { Err(format!("{left:#?}")) }
    })
    .await;
    assert_eq!(invariants::violations(&records(home)), Vec::<String>::new());
}

pub(crate) fn records(home: &Path) -> Vec<Record> {
    let reading = journal::read(&home.join("journal")).unwrap();
    assert_eq!((reading.damage.len(), reading.torn_bytes), (0, 0), "the journal is damaged");
    reading.records
}

/// Returns the number of matching records in the journal for a task.
pub(crate) fn count_records(home: &Path, task: SubmissionId, is: impl Fn(&JournalEvent) -> bool) -> usize {
    records(home).iter().filter(|record| record.submission == task && is(&record.kind)).count()
}

async fn containers(socket: &Path, home: &Path, tasks: &[SubmissionId]) -> Vec<String> {
    let options = ListContainersOptionsBuilder::default().all(true).build();
    let listed = engine::client(socket).list_containers(Some(options)).await.unwrap();
    let home = home.canonicalize().unwrap_or_else(|_| home.to_owned());
    listed
        .into_iter()
        .filter(|one| {
            let labels = one.labels.clone().unwrap_or_default();
            let here = labels.get(HOME_LABEL).is_some_and(|label| Path::new(label).starts_with(&home));
            here || labels.values().any(|value| tasks.iter().any(|task| *value == task.to_string()))
        })
        .map(|one| format!("container {:?} {:?}", one.names.unwrap_or_default(), one.state))
        .collect()
}

fn mounts(home: &Path) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
    let ours = text.lines().filter_map(at).filter(|at| at.starts_with(home));
    ours.map(|at| format!("mount {}", at.display())).collect()
}

/// Finds processes by the task's id in the environment, which every process of a task inherits.
fn processes(tasks: &[SubmissionId]) -> Vec<String> {
    let mut left = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let marked = |task: &SubmissionId| {
            let mark = format!("WINDLASS_TASK_ID={task}");
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        // A zombie has no environment any more, and runs nothing.
        if tasks.iter().any(marked) {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            left.push(format!("process {pid}: {}", String::from_utf8_lossy(&line).replace('\0', " ")));
        }
    }
    left
}

fn groups(tasks: &[SubmissionId]) -> Vec<String> {
    let mut left = Vec::new();
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let hierarchies =
        text.lines().filter(|line| line.contains(" - cgroup")).filter_map(|line| line.split(' ').nth(4));
    for hierarchy in hierarchies {
        for home in children(&Path::new(hierarchy).join("windlass")) {
            let groups = children(&home).into_iter();
            let ours = groups.filter(|group| tasks.iter().any(|task| group.ends_with(task.to_string())));
            left.extend(ours.map(|group| format!("control group {}", group.display())));
        }
    }
    left
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn directories(home: &Path) -> Vec<String> {
    children(&home.join("tasks")).into_iter().map(|dir| format!("directory {}", dir.display())).collect()
}

/// Searches the files of every user of this host.
fn keys(tasks: &[SubmissionId]) -> Vec<String> {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let mut left = Vec::new();
    for home in users.lines().filter_map(|line| line.split(':').nth(5)) {
        let file = Path::new(home).join(".ssh/authorized_keys");
        let text = fs::read_to_string(&file).unwrap_or_default();
        let marked = text.lines().filter(|line| tasks.iter().any(|task| line.contains(&task.to_string())));
        left.extend(marked.map(|line| format!("key in {}: {line}", file.display())));
    }
    left
}

/// One leftover of every kind; removed when it is dropped.
struct TestLeftovers {
    dir: PathBuf,
    child: std::process::Child,
}

impl TestLeftovers {
    fn create(home: &Path, task: SubmissionId) -> Self {
        let dir = home.join("tasks").join(task.to_string());
        fs::create_dir_all(&dir).unwrap();
        let mut command = std::process::Command::new("sleep");
        let child = command.arg("1000").env("WINDLASS_TASK_ID", task.to_string()).spawn().unwrap();
        let litter = Self { dir, child };
        rustix::mount::mount("none", &litter.dir, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        litter
    }
}

impl Drop for TestLeftovers {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A check that never finds anything proves nothing.
#[tokio::test]
async fn g6_the_leftover_check_finds_every_kind_of_leftover() {
    let scratch = super::temp_dir("sweep").unwrap();
    let task = SubmissionId(super::shim::random_uuid());
    assert_eq!(leftovers(scratch.path(), &[task]).await, Vec::<String>::new());
    let litter = TestLeftovers::create(scratch.path(), task);
    let left = leftovers(scratch.path(), &[task]).await;
    let found: Vec<_> = left.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(found, ["mount", "process", "directory"], "{left:?}");
    drop(litter);
}
