//! Hosts that servers of this machine reach by sockets, already members of a fleet: simulated ones, which do everything
//! but the work and share one process, and real ones, whose jobs are processes.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use windlass_server::{
    db::{DatabaseUrl, Db},
    encryption::Keyring,
};

use crate::simulated_hosts::insert_hosts;

/// Their fleet.
pub const FLEET: &str = "simulated";

/// A task that does nothing and writes one line.
pub fn empty_job(name: &str) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"SIMULATED_RUN_MS": "0", "SIMULATED_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

/// Number and location of the hosts to start.
pub struct HostOptions<'a> {
    /// Path of the agent binary.
    pub agent: &'a Path,
    pub home: &'a Path,
    pub count: usize,
    /// Maximum number of jobs on one host.
    pub blocks: i64,
    pub runtime: HostRuntime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRuntime {
    /// All hosts in one process, without journals.
    Simulated,
    /// A separate agent for each host; jobs are processes.
    Process,
}

/// The processes of the hosts. They end on drop, together with their jobs.
pub struct RunningHosts {
    agents: Vec<Child>,
    home: PathBuf,
}

impl HostOptions<'_> {
    /// Inserts the hosts into a database that has its first project, and starts them. No server may have an SQLite file
    /// open.
    pub async fn start(&self, database: &str, key_file: &Path) -> Result<RunningHosts> {
        let db = Db::open(&database.parse::<DatabaseUrl>()?).await?;
        let entered = insert_hosts(&db, &Keyring::open(key_file)?, self.home, self.count, self.blocks).await;
        db.close().await;
        entered?;
        let policy = self.home.join("policy.yml");
        std::fs::write(&policy, "")?;
        let mut running = RunningHosts { agents: Vec::new(), home: self.home.to_owned() };
        let start = |home: &Path, runtime: &[&str]| {
            let mut command = Command::new(self.agent);
            command.arg("shim").args(runtime).arg("--home").arg(home).arg("--policy").arg(&policy);
            command.args(["--log", "error"]).stdin(Stdio::null()).stdout(Stdio::null());
            command.spawn().context("start the hosts")
        };
        match self.runtime {
            HostRuntime::Simulated => {
                let count = self.count.to_string();
                running.agents.push(start(self.home, &["--runtime", "simulated", "--hosts", &count])?);
            }
            HostRuntime::Process => {
                for number in 1..=self.count {
                    running.agents.push(start(
                        &host_home(self.home, number),
                        &["--runtime", "process", "--processes", "own"],
                    )?);
                }
            }
        }
        Ok(running)
    }
}

/// Directory of one host.
pub fn host_home(home: &Path, number: usize) -> PathBuf {
    home.join(format!("host-{number:04}"))
}

impl RunningHosts {
    /// Simulates a power cut of one host with a separate agent, including its jobs. Hosts are counted from 1.
    pub fn power_off(&mut self, number: usize) -> Result<()> {
        let agent = number.checked_sub(1).and_then(|at| self.agents.get_mut(at)).context("no such host")?;
        agent.kill()?;
        agent.wait()?;
        crate::test_env::kill_processes_of(&host_home(&self.home, number));
        Ok(())
    }

    pub fn pids(&self) -> Vec<u32> {
        self.agents.iter().map(Child::id).collect()
    }
}

impl Drop for RunningHosts {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        crate::test_env::kill_processes_of(&self.home);
    }
}
