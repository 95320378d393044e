//! Common environment of most rows: a server, hosts of a lab with agents, and functions that inject faults.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_agent::shim::journal::{self, Record};

use super::docker::unique_layer;
use crate::{AgentSite, Trial};
use windlass_testenv::{
    images::busybox_layer,
    test_env::{HostMode, TestEnv, small_task_config},
};
use windlass_testkit::lab::{
    Lab, LabHost,
    registry::{ImageOptions, Registry, digest},
};
use windlass_testkit::wait::{TIMEOUT, eventually, eventually_ok_async};

/// Directory of an agent on its host.
const AGENT_ROOT: &str = "/var/lib/windlass";

/// Size of the part of an image that no other image has.
const IMAGE_BYTES: usize = 200_000;
/// Directory of the hosts that jobs see at the same path, also those in containers.
const SHARED_DIR: &str = "/var/tmp";

/// A server without a local instance, and hosts. Their logs are kept if a row fails.
pub(super) struct LabEnv {
    pub(super) env: TestEnv,
    pub(super) lab: Lab,
    /// Registry of the jobs' images, if they run in containers.
    registry: Option<Registry>,
    keep: PathBuf,
}

impl LabEnv {
    /// One fleet `lab` with the given number of hosts, each for one job.
    pub(super) async fn new(trial: &Trial, hosts: usize) -> Self {
        Self::from_env(trial, hosts, trial.env(HostMode::None)).await
    }

    /// The same, with a shorter time after which silent jobs are lost.
    pub(super) async fn with_lost_after(trial: &Trial, hosts: usize, secs: u64) -> Self {
        let env = trial.env(HostMode::None).with_env("WINDLASS_SERVER_LOST_AFTER", format!("{secs}s"));
        Self::from_env(trial, hosts, env).await
    }

    async fn from_env(trial: &Trial, hosts: usize, mut env: TestEnv) -> Self {
        let lab = Lab::start(hosts).unwrap();
        env.start().await;
        env.create_lab_fleet(&lab, lab.hosts(), 1).await;
        Self { env, lab, registry: None, keep: trial.dir().to_owned() }
    }

    /// Hosts on which no engine is installed: their agents run containers themselves. With several blocks, a small job has a
    /// separate network.
    pub(super) async fn without_engine(trial: &Trial, hosts: usize, blocks: u32) -> Self {
        let lab = Lab::start(hosts).unwrap();
        let registry = Registry::start_at(lab.gateway()).await;
        let policy = format!("mounts: [{SHARED_DIR}]\nplain_http_registries: ['{}']\n", registry.address());
        for host in lab.hosts() {
            host.hide_engine(false).unwrap();
            std::fs::write(host.path("/etc/windlass/policy.yml"), &policy).unwrap();
        }
        let mut env = trial.env(HostMode::None);
        env.start().await;
        env.create_lab_fleet(&lab, lab.hosts(), blocks).await;
        for host in lab.hosts() {
            let runtime = std::fs::read_to_string(host.path(&format!("{AGENT_ROOT}/home/runtime")));
            assert_eq!(runtime.unwrap(), "any-oci", "the agent's own choice");
        }
        Self { env, lab, registry: Some(registry), keep: trial.dir().to_owned() }
    }

    /// A small job, in a container if the hosts run those, with an image that no host has.
    pub(super) fn job(&self, name: &str, commands: &[&str]) -> Value {
        let mut job = small_task_config(name, commands);
        if let Some(registry) = &self.registry {
            let layers = [busybox_layer(None), unique_layer(IMAGE_BYTES)].map(|layer| {
                let digest = digest(&layer);
                (layer, digest)
            });
            let (image, _) = registry.put_layers(name, "1", layers.to_vec(), ImageOptions::default());
            job["image"] = json!(image);
            job["volumes"] = json!([format!("{SHARED_DIR}:{SHARED_DIR}")]);
        }
        job
    }

    pub(super) fn host(&self, number: usize) -> &LabHost {
        self.lab.host(number)
    }

    pub(super) fn sites(&self) -> Vec<AgentSite> {
        self.lab.hosts().iter().map(AgentSite::host).collect()
    }

    /// Runs the checkers.
    pub(super) async fn evaluate(&mut self, trial: &mut Trial) {
        let sites = self.sites();
        trial.evaluate(&mut self.env, &sites).await;
        self.keep_logs();
    }

    /// Keeps the agents' logs and journals for the analysis of a failure.
    fn keep_logs(&self) {
        for host in self.lab.hosts() {
            for name in ["shim.log", "home/journal"] {
                let to = self.keep.join(format!("{}-{}", host.name(), name.replace('/', "-")));
                let _ = std::fs::copy(host.path(&format!("{AGENT_ROOT}/{name}")), to);
            }
        }
    }
}

impl Drop for LabEnv {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.keep_logs();
        }
    }
}

/// Sends a signal to a process, which must exist.
pub(super) fn send_signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "{pid} is not there to get {name}");
}

/// Process ID of the agent on a host.
pub(super) fn agent_pid(host: &LabHost) -> Option<u32> {
    let is_agent = |line: &str| line.starts_with(&format!("{AGENT_ROOT}/agent shim"));
    host.processes()
        .unwrap()
        .into_iter()
        .find(|process| is_agent(&process.command))
        .map(|process| process.pid)
}

pub(super) fn kill_agent(host: &LabHost) {
    let pid = agent_pid(host).expect("an agent");
    send_signal(pid, "KILL");
    eventually("the agent is dead", || agent_pid(host) != Some(pid));
}

/// Starts the agent as the host does at boot.
pub(super) fn start_agent(host: &LabHost) {
    let started = host.run(&format!("/bin/sh {AGENT_ROOT}/start detached")).unwrap();
    assert!(started.status.success(), "{started:?}");
}

/// Makes the agent pause, from its next start on, when a task reaches this status; `None` disables it.
pub(super) fn set_pause_at(host: &LabHost, status: Option<&str>) {
    let line = status.map_or(String::new(), |status| format!("WINDLASS_AGENT_PAUSE_AT={status}\n"));
    std::fs::write(host.path(&format!("{AGENT_ROOT}/env")), line).unwrap();
}

/// Records of an agent's journal.
pub(super) fn read_journal(host: &LabHost) -> Vec<Record> {
    journal::read(&host.path(&format!("{AGENT_ROOT}/home/journal"))).unwrap().records
}

/// Returns whether this machine can connect to the host's SSH server.
pub(super) fn is_reachable(host: &LabHost) -> bool {
    TcpStream::connect_timeout(&SocketAddr::new(host.addr(), 22), Duration::from_millis(300)).is_ok()
}

/// Processes of a host whose command line contains a text.
pub(super) fn pids_matching(host: &LabHost, words: &str) -> Vec<u32> {
    let all = host.processes().unwrap().into_iter();
    all.filter(|process| process.command.contains(words)).map(|process| process.pid).collect()
}

/// A command that writes numbered lines until a file on its host exists.
pub(super) fn counting_command(gate: &str) -> String {
    format!("i=0; while [ ! -e {gate} ]; do echo line $i; i=$((i+1)); sleep 0.05; done; echo last")
}

/// Checks that the log of [`counting_command`] is complete: every line once, in order, and the last line.
pub(super) fn assert_counted(log: &str) {
    let lines: Vec<&str> = log.lines().collect();
    let (last, counted) = lines.split_last().expect("a log");
    assert_eq!(*last, "last", "O1 O2: the log ends with {:?}", &lines[lines.len().saturating_sub(3)..]);
    for (number, line) in counted.iter().enumerate() {
        assert_eq!(*line, format!("line {number}"), "O1: line {number} of the log");
    }
}

/// Waits until the log of a run has grown, and returns how long that took.
pub(super) async fn wait_for_log_growth(env: &mut TestEnv, name: &str, from: usize) -> Duration {
    let began = Instant::now();
    eventually_ok_async(&format!("the log of {name} grows"), async || {
        let run = env.run(name).await;
        if env.log(&run).await.len() > from { Ok(()) } else { Err(run) }
    })
    .await;
    began.elapsed()
}

pub(super) async fn log_len(env: &mut TestEnv, name: &str) -> usize {
    let run = env.run(name).await;
    env.log(&run).await.len()
}

/// Checks that each job has one submission.
pub(super) fn assert_single_attempt(run: &Value) {
    for job in run["jobs"].as_array().unwrap() {
        assert_eq!(job["job_submissions"].as_array().unwrap().len(), 1, "R7: {run:#}");
    }
}

/// Detail of a submission's end, beyond its reason.
pub(super) fn end_detail(env: &TestEnv, submission: &Value) -> Option<String> {
    let id = submission["id"].as_str().unwrap();
    let path = env.home().join("server/windlass.db");
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let db = rusqlite::Connection::open_with_flags(path, flags).unwrap();
    db.busy_timeout(TIMEOUT).unwrap();
    db.query_row("SELECT termination_detail FROM jobs WHERE id = ?1", [id], |row| row.get(0)).unwrap()
}

/// A job that is retried after every event.
pub(super) fn with_retry(mut job: Value) -> Value {
    job["retry"] = json!({"on_events": ["error", "interruption", "no-capacity"], "duration": 3600});
    job
}

/// A mount that is removed on drop.
pub(super) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `size` in megabytes.
    pub(super) fn at(path: &Path, size: u64) -> Self {
        std::fs::create_dir_all(path).unwrap();
        let options = format!("size={size}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(path).status();
        assert!(mounted.unwrap().success());
        Self(path.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A counting command with a fixed number of lines, for jobs that cannot see a file of the host.
pub(super) fn counting_command_until(lines: u32) -> String {
    format!("i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); sleep 0.1; done; echo last")
}
