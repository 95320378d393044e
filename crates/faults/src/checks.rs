//! Collects the input of the checkers after a trial: the database, the hosts' journals, and the state of the machine.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use uuid::Uuid;
use windlass_agent::shim::journal::{self, JournalEvent};
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_server::db::{DatabaseUrl, Db};
use windlass_sim::{
    host::{HostEffect, HostEntry},
    invariants::{self, History, rows},
};

use super::Trial;
use windlass_testenv::test_env::TestEnv;
use windlass_testkit::lab::LabHost;

/// Time limit of G6 after the end of faults. User keys stay for a minute after a task is done, because its output may
/// still be read.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Label with the agent that owns a container.
const HOME_LABEL: &str = "windlass.shim.home";

/// A location where an agent runs.
pub struct AgentSite {
    /// Directory of the agent, as seen from this machine.
    pub home: PathBuf,
    /// Directory as the agent itself names it, which is the label of its containers.
    pub label: PathBuf,
    /// Files with user keys.
    pub keys: Vec<PathBuf>,
    /// Engine of its containers.
    pub engine: Option<PathBuf>,
    /// The journal was damaged on purpose: only its valid part is read.
    pub is_damaged: bool,
}

impl AgentSite {
    /// The machine of a stage.
    pub fn local(env: &TestEnv, engine: Option<PathBuf>) -> Self {
        let home = env.home().join("server/local");
        Self { label: home.clone(), home, keys: Vec::new(), engine, is_damaged: false }
    }

    /// A host of a lab.
    pub fn host(host: &LabHost) -> Self {
        let users = ["/root", "/home/worker", "/home/guest"];
        let keys = users.iter().map(|home| host.path(&format!("{home}/.ssh/authorized_keys")));
        Self {
            home: host.path("/var/lib/windlass/home"),
            label: PathBuf::from("/var/lib/windlass/home"),
            keys: keys.collect(),
            engine: None,
            is_damaged: false,
        }
    }

    #[must_use]
    pub fn damaged(mut self) -> Self {
        self.is_damaged = true;
        self
    }

    fn has_tasks(&self) -> bool {
        fs::read_dir(self.home.join("tasks")).is_ok_and(|mut tasks| tasks.next().is_some())
    }

    /// Converts its whole journal for the checkers.
    fn journal(&self, number: u128) -> Result<Vec<HostEntry>> {
        let path = self.home.join("journal");
        let reading = journal::read(&path).with_context(|| format!("read {}", path.display()))?;
        let host = InstanceId(Uuid::from_u128(number));
        let mut entries = Vec::new();
        let mut open = BTreeSet::new();
        for record in reading.records {
            let entry = |kind| HostEntry {
                at: record.at,
                host,
                submission: record.submission,
                epoch: record.epoch,
                kind,
            };
            match record.kind {
                JournalEvent::ContainerStarted { .. } => {
                    open.insert(record.submission);
                    entries.push(entry(HostEffect::ContainerStarted));
                }
                // A container that died with its host has no exit record, but an end.
                JournalEvent::ContainerExited { .. } | JournalEvent::Terminated { .. } => {
                    if open.remove(&record.submission) {
                        entries.push(entry(HostEffect::ContainerExited));
                    }
                }
                JournalEvent::GpuAcquired { gpus } => {
                    entries.extend(gpus.into_iter().map(|gpu| entry(HostEffect::GpuAcquired(gpu))));
                }
                JournalEvent::GpuReleased { gpus } => {
                    entries.extend(gpus.into_iter().map(|gpu| entry(HostEffect::GpuReleased(gpu))));
                }
                JournalEvent::Removed => entries.push(entry(HostEffect::Removed)),
                JournalEvent::RefusedEpoch { .. } => entries.push(entry(HostEffect::RefusedEpoch)),
                JournalEvent::Submitted
                | JournalEvent::Withdrawn
                | JournalEvent::Admitted
                | JournalEvent::Moved { .. }
                | JournalEvent::KeyAdded
                | JournalEvent::KeyRemoved
                | JournalEvent::Mounted
                | JournalEvent::Unmounted
                | JournalEvent::ContainerCreated { .. }
                | JournalEvent::ContainerStarting { .. }
                | JournalEvent::TerminateRequested { .. }
                | JournalEvent::RefusedSpec { .. } => {}
            }
        }
        Ok(entries)
    }

    /// Leftovers of tasks: directories, mounts, keys, containers.
    fn find_leftovers(&self, jobs: &BTreeSet<Uuid>) -> Vec<String> {
        let mut left = Vec::new();
        for entry in fs::read_dir(self.home.join("tasks")).into_iter().flatten().flatten() {
            left.push(format!("directory {}", entry.path().display()));
        }
        for entry in fs::read_dir(self.home.join("oci/tmp")).into_iter().flatten().flatten() {
            left.push(format!("unfinished layer {}", entry.path().display()));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
        let tasks = self.home.join("tasks");
        left.extend(points.filter(|at| at.starts_with(&tasks)).map(|at| format!("mount {}", at.display())));
        for file in &self.keys {
            let text = fs::read_to_string(file).unwrap_or_default();
            let marked = text.lines().filter(|line| jobs.iter().any(|job| line.contains(&job.to_string())));
            left.extend(marked.map(|_| format!("a key in {}", file.display())));
        }
        if let Some(engine) = &self.engine {
            let label = format!("label={HOME_LABEL}={}", self.label.display());
            let mut docker = Command::new("docker");
            docker.arg("--host").arg(format!("unix://{}", engine.display()));
            docker.args([
                "ps",
                "--all",
                "--no-trunc",
                "--filter",
                &label,
                "--format",
                "{{.Names}} {{.State}}",
            ]);
            match docker.output() {
                Ok(output) if output.status.success() => {
                    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
                    left.extend(listed.lines().map(|line| format!("container {line}")));
                }
                Ok(output) => left.push(format!("no list of containers: {output:?}")),
                Err(error) => left.push(format!("no list of containers: {error}")),
            }
        }
        left
    }
}

/// Tasks with a process on this machine, by a variable that every process of a task inherits.
fn tasks_with_processes(jobs: &BTreeSet<Uuid>) -> Vec<SubmissionId> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let marks = environment.split(|byte| *byte == 0).filter_map(|variable| {
            std::str::from_utf8(variable).ok()?.strip_prefix("WINDLASS_TASK_ID=")?.parse::<Uuid>().ok()
        });
        found.extend(marks.filter(|id| jobs.contains(id)));
    }
    found.into_iter().map(SubmissionId).collect()
}

/// Prefix of the control groups of lab hosts, which appear to a host as the root.
const LAB_HOST_GROUP: &str = "wlab";

/// Control groups named after a task.
fn cgroups_of_tasks(jobs: &BTreeSet<Uuid>) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts =
        text.lines().filter(|line| line.contains(" - cgroup")).filter_map(|line| line.split(' ').nth(4));
    let mut left = Vec::new();
    for mount in mounts.map(Path::new) {
        let groups = fs::read_dir(mount).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_host = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(LAB_HOST_GROUP.as_bytes()))
        };
        let roots = groups.filter(is_host).chain([mount.to_owned()]);
        let homes =
            roots.flat_map(|root| fs::read_dir(root.join("windlass")).into_iter().flatten().flatten());
        for home in homes {
            for group in fs::read_dir(home.path()).into_iter().flatten().flatten() {
                let name = group.file_name().to_string_lossy().parse::<Uuid>();
                if name.is_ok_and(|id| jobs.contains(&id)) {
                    left.push(format!("control group {}", group.path().display()));
                }
            }
        }
    }
    left
}

impl Trial {
    /// Runs the checks after the faults: waits until every run has ended, stops the server cleanly, and checks its
    /// database, the journals of the sites, and the state of the machine.
    pub async fn evaluate(&mut self, env: &mut TestEnv, sites: &[AgentSite]) {
        let began = Instant::now();
        while let Some(run) = find_active_run(env).await {
            if began.elapsed() > CLEANUP_TIMEOUT {
                self.violation(&format!("R2: {} is still {}", run["run_spec"]["run_name"], run["status"]));
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        // An abandoned host removes its old tasks when the server reaches it again.
        while sites.iter().any(AgentSite::has_tasks) && began.elapsed() < CLEANUP_TIMEOUT {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let url = DatabaseUrl::Sqlite(env.home().join("server/windlass.db"));
        env.stop_server();
        self.check_database(&url, sites).await;
    }

    /// Checks a database whose servers have stopped.
    pub async fn check_database(&mut self, url: &DatabaseUrl, sites: &[AgentSite]) {
        if let Err(error) = self.run_checkers(url, sites).await {
            self.violation(&format!("the checkers could not run: {error:#}"));
        }
    }

    async fn run_checkers(&mut self, url: &DatabaseUrl, sites: &[AgentSite]) -> Result<()> {
        let mut history = History::default();
        let db = Db::open(url).await.context("open the database")?;
        let read = rows::read_history(&mut history, &db).await;
        db.close().await;
        read.context("read the database")?;
        let jobs: BTreeSet<Uuid> = history.jobs.iter().map(|job| job.id).collect();
        let began = Instant::now();
        let mut left = find_all_leftovers(sites, &jobs);
        while !left.is_empty() && began.elapsed() < CLEANUP_TIMEOUT {
            tokio::time::sleep(POLL_INTERVAL).await;
            left = find_all_leftovers(sites, &jobs);
        }
        for what in left {
            self.violation(&format!("G6: left over: {what}"));
        }
        history.containers = tasks_with_processes(&jobs);
        for (number, site) in (1..).zip(sites) {
            match site.journal(number) {
                Ok(entries) => history.journal.extend(entries),
                Err(_) if site.is_damaged => {}
                Err(error) => return Err(error),
            }
        }
        for broken in
            invariants::check_always(&history).into_iter().chain(invariants::check_after_faults(&history))
        {
            self.violation(&format!("{}: {}", broken.id, broken.what));
        }
        Ok(())
    }
}

fn find_all_leftovers(sites: &[AgentSite], jobs: &BTreeSet<Uuid>) -> Vec<String> {
    let mut left: Vec<String> = sites.iter().flat_map(|site| site.find_leftovers(jobs)).collect();
    left.extend(cgroups_of_tasks(jobs));
    left.extend(tasks_with_processes(jobs).iter().map(|id| format!("a process of {id}")));
    left
}

/// Returns any run that has not ended.
async fn find_active_run(env: &mut TestEnv) -> Option<Value> {
    let runs = env.post("/api/runs/list", &json!({"project_name": "main", "only_active": true})).await;
    runs.as_array().and_then(|runs| runs.first().cloned())
}
