//! Hosts that servers of this machine reach by sockets, already members of a fleet: hollow ones, which do everything
//! but the work and live in one process, and real ones, whose jobs are processes.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use windlass_server::{
    db::{DatabaseUrl, Db},
    secrets::Keyring,
};

use crate::hosts::insert_hosts;

/// The fleet they are in.
pub const FLEET: &str = "hollow";

/// A task that does nothing and says one line.
pub fn empty_job(name: &str) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"HOLLOW_RUN_MS": "0", "HOLLOW_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

/// How many to start, and where.
pub struct HostOptions<'a> {
    /// The agent's program.
    pub agent: &'a Path,
    pub home: &'a Path,
    pub count: usize,
    /// Jobs that one host takes at once.
    pub blocks: i64,
    pub runtime: HostRuntime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRuntime {
    /// All of them in one process, without journals.
    Hollow,
    /// An agent each; jobs are processes.
    Process,
}

/// The processes that the hosts are in. They end when this is dropped, and jobs with them.
pub struct RunningHosts {
    agents: Vec<Child>,
    home: PathBuf,
}

impl HostOptions<'_> {
    /// Enters them into a database that has its first project, and starts them. No server may have the file
    /// open when it is SQLite's.
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
            HostRuntime::Hollow => {
                let count = self.count.to_string();
                running.agents.push(start(self.home, &["--runtime", "hollow", "--hosts", &count])?);
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

/// Where one of them keeps its things.
pub fn host_home(home: &Path, number: usize) -> PathBuf {
    home.join(format!("host-{number:04}"))
}

impl RunningHosts {
    /// The power goes for one host with an agent of its own, and for the jobs on it. Hosts are counted from 1.
    pub fn power_off(&mut self, number: usize) -> Result<()> {
        let agent = number.checked_sub(1).and_then(|at| self.agents.get_mut(at)).context("no such host")?;
        agent.kill()?;
        agent.wait()?;
        crate::stage::kill_processes_of(&host_home(&self.home, number));
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
        crate::stage::kill_processes_of(&self.home);
    }
}
