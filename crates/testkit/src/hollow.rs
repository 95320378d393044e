//! Hosts that servers of this machine reach by sockets, already members of a fleet: hollow ones, which do everything
//! but the work and live in one process, and real ones, whose jobs are processes.

use std::{
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use windlass_model::{
    fleet,
    id::{FleetId, InstanceId, ProjectId},
    instance,
};
use windlass_server::{
    agents::enrol,
    db::{DatabaseUrl, Db, Unit, fleets, instances},
    secrets::Keyring,
};

/// The fleet they are in.
pub const FLEET: &str = "hollow";

/// A task that does nothing and says one line.
pub fn empty_job(name: &str) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"HOLLOW_RUN_MS": "0", "HOLLOW_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

/// How many to start, and where.
pub struct Hosts<'a> {
    /// The agent's program.
    pub agent: &'a Path,
    pub home: &'a Path,
    pub count: usize,
    /// Jobs that one host takes at once.
    pub blocks: i64,
    pub runtime: Runtime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// All of them in one process, without journals.
    Hollow,
    /// An agent each; jobs are processes.
    Process,
}

/// The processes that the hosts are in. They end when this is dropped, and jobs with them.
pub struct Running {
    agents: Vec<Child>,
    home: PathBuf,
}

impl Hosts<'_> {
    /// Enters them into a database that has its first project, and starts them. No server may have the file
    /// open when it is SQLite's.
    pub async fn start(&self, database: &str, key_file: &Path) -> Result<Running> {
        let db = Db::open(&database.parse::<DatabaseUrl>()?).await?;
        let entered = self.enter(&db, &Keyring::open(key_file)?).await;
        db.close().await;
        entered?;
        let policy = self.home.join("policy.yml");
        std::fs::write(&policy, "")?;
        let mut running = Running { agents: Vec::new(), home: self.home.to_owned() };
        let start = |home: &Path, runtime: &[&str]| {
            let mut command = Command::new(self.agent);
            command.arg("shim").args(runtime).arg("--home").arg(home).arg("--policy").arg(&policy);
            command.args(["--log", "error"]).stdin(Stdio::null()).stdout(Stdio::null());
            command.spawn().context("start the hosts")
        };
        match self.runtime {
            Runtime::Hollow => {
                let count = self.count.to_string();
                running.agents.push(start(self.home, &["--runtime", "hollow", "--hosts", &count])?);
            }
            Runtime::Process => {
                for number in 1..=self.count {
                    running.agents.push(start(&home_of(self.home, number), &["--runtime", "process"])?);
                }
            }
        }
        Ok(running)
    }

    /// Writes the fleet and its hosts into the database, and an enrolment into each host's directory.
    async fn enter(&self, db: &Db, keys: &Keyring) -> Result<()> {
        let rows = db.query("SELECT p.id FROM projects p WHERE p.name = 'main'", Vec::new()).await?;
        let project = ProjectId(rows.first().context("no project main")?.uuid(0)?);
        let fleet = FleetId(db.new_id()?);
        let spec = json!({"configuration": {"type": "fleet", "name": FLEET, "placement": "any",
            "ssh_config": {"hosts": []}}, "profile": {"name": "default"}});
        let mut unit = Unit::new().and([fleets::insert(fleets::NewFleet {
            id: fleet,
            project_id: project,
            name: FLEET.into(),
            spec: spec.to_string(),
            spec_sealed: None,
            status: fleet::Status::Active,
            auto_created: false,
        })]);
        let mut hosts = Vec::new();
        for number in 1..=self.count {
            let (id, below) = (InstanceId(db.new_id()?), home_of(self.home, number));
            std::fs::create_dir_all(&below)?;
            let row = host(id, project, fleet, number, &below.join("shim.sock"), self.blocks);
            unit = unit.and([instances::insert(row)]);
            hosts.push((id, below));
        }
        db.write(unit).await?.done()?;
        for (id, below) in hosts {
            let enrolment = enrol::enrolment(db, keys, id).await?;
            let document = json!({"instance_id": id, "credential_sha256": enrolment.credential_sha256,
                "server_keys": [enrolment.server_key]});
            let mut file = std::fs::OpenOptions::new();
            let mut file =
                file.write(true).create_new(true).mode(0o600).open(below.join("enrolment.json"))?;
            file.write_all(document.to_string().as_bytes())?;
        }
        Ok(())
    }
}

/// Where one of them keeps its things.
pub fn home_of(home: &Path, number: usize) -> PathBuf {
    home.join(format!("host-{number:04}"))
}

impl Running {
    pub fn pids(&self) -> Vec<u32> {
        self.agents.iter().map(Child::id).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        crate::stage::sweep(&self.home);
    }
}

fn host(
    id: InstanceId,
    project: ProjectId,
    fleet: FleetId,
    number: usize,
    socket: &Path,
    blocks: i64,
) -> instances::NewInstance {
    let kind = json!({"name": "hollow", "resources": {"cpus": 64, "memory_mib": 262_144, "spot": false,
        "cpu_arch": "x86", "disk": {"size_mib": 1_048_576}, "gpus": []}});
    let machine = windlass_backend::Machine {
        id: format!("hollow-{number}"),
        reach: Some(windlass_backend::Reach::Socket { path: PathBuf::from(socket) }),
        hostname: Some(format!("hollow-{number}")),
        internal_ip: None,
        has: None,
        agent_version: None,
        memo: Value::Null,
    };
    instances::NewInstance {
        id,
        project_id: project,
        fleet_id: Some(fleet),
        name: format!("hollow-{number}"),
        instance_num: i64::try_from(number).unwrap_or_default(),
        backend: Some("remote".into()),
        region: Some("remote".into()),
        hostname: Some(format!("hollow-{number}")),
        price: Some(0.0),
        spot: false,
        instance_type: Some(kind.to_string()),
        offer: None,
        provisioning: serde_json::to_string(&machine).ok(),
        ssh: None,
        ssh_sealed: None,
        requirements: None,
        profile: None,
        status: instance::Status::Idle,
        total_blocks: Some(blocks),
        idle_seconds_max: None,
    }
}
