//! Simulated hosts: many in one process, inserted into a server's database as members of the fleet `simulated`.

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
    agents::enrolment,
    db::{Change, DatabaseUrl, Db, Unit, Val, fleets, instances},
    encryption::Keyring,
};

/// Maximum number of jobs on one host.
pub const BLOCKS: i64 = 8;

/// Database URL of a server with this data directory.
pub fn database_url(data: &Path, postgres: Option<&str>) -> String {
    postgres.map_or_else(|| format!("sqlite:{}/windlass.db", data.display()), str::to_owned)
}

/// Many hosts in one process, already members of a fleet.
pub struct SimulatedHosts {
    child: Child,
    pub count: usize,
}

impl SimulatedHosts {
    /// `data` is the directory of a stopped server that has created its database and keys.
    pub async fn start(
        agent: &Path,
        home: &Path,
        data: &Path,
        postgres: Option<&str>,
        count: usize,
    ) -> Result<Self> {
        let db = Db::open(&database_url(data, postgres).parse::<DatabaseUrl>()?).await?;
        let keys = Keyring::open(&data.join("keys").join("master"))?;
        insert_hosts(&db, &keys, home, count, BLOCKS).await?;
        db.close().await;
        std::fs::write(home.join("policy.yml"), "")?;
        // Each host needs a socket and one or two connections: more files than the usual soft limit.
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n \"$(ulimit -Hn)\" && exec \"$0\" \"$@\""]).arg(agent);
        command.args(["shim", "--runtime", "simulated", "--hosts", &count.to_string(), "--home"]).arg(home);
        command.arg("--policy").arg(home.join("policy.yml")).args(["--log", "error"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("start the hosts")?;
        Ok(Self { child, count })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for SimulatedHosts {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the fleet and its hosts into the database, and an enrolment into each host's directory. `blocks` is the
/// maximum number of jobs on a host.
pub(crate) async fn insert_hosts(
    db: &Db,
    keys: &Keyring,
    home: &Path,
    count: usize,
    blocks: i64,
) -> Result<()> {
    let rows = db.query("SELECT p.id FROM projects p WHERE p.name = 'main'", Vec::new()).await?;
    let project = ProjectId(rows.first().context("no project main")?.uuid(0)?);
    let fleet = FleetId(db.new_id()?);
    let spec = json!({"configuration": {"type": "fleet", "name": "simulated", "placement": "any",
        "ssh_config": {"hosts": []}}, "profile": {"name": "default"}});
    let mut unit = Unit::new().and([fleets::insert(fleets::NewFleet {
        id: fleet,
        project_id: project,
        user_id: None,
        name: "simulated".into(),
        spec: spec.to_string(),
        spec_sealed: None,
        status: fleet::Status::Active,
        auto_created: false,
    })]);
    let mut hosts = Vec::new();
    for number in 1..=count {
        let (id, below) = (InstanceId(db.new_id()?), home.join(format!("host-{number:04}")));
        std::fs::create_dir_all(&below)?;
        let row = host_row(id, project, fleet, number, &below.join("shim.sock"), blocks);
        unit = unit.and([instances::insert(row), creation_event(db, id, project)?]);
        hosts.push((id, below));
    }
    db.write(unit).await?.done()?;
    for (id, below) in hosts {
        let enrolment = enrolment::enrolment(db, keys, id).await?;
        let document = json!({"instance_id": id, "credential_sha256": enrolment.credential_sha256,
            "server_keys": [enrolment.server_key]});
        let mut file = std::fs::OpenOptions::new();
        let mut file = file.write(true).create_new(true).mode(0o600).open(below.join("enrolment.json"))?;
        file.write_all(document.to_string().as_bytes())?;
    }
    Ok(())
}

/// The first event of an instance, for checkers that require a creation event.
fn creation_event(db: &Db, id: InstanceId, project: ProjectId) -> Result<Change> {
    let values = vec![
        ("id", db.new_id()?.into()),
        ("entity", "instance".into()),
        ("entity_id", id.0.into()),
        ("project_id", project.0.into()),
        ("kind", "status".into()),
        ("to_status", "idle".into()),
        ("is_final", false.into()),
        ("reason", "".into()),
        ("message", "entered by a test".into()),
        ("actor", "system".into()),
        ("recorded_at", Val::Now),
    ];
    Ok(Change::Insert { table: "events", values })
}

fn host_row(
    id: InstanceId,
    project: ProjectId,
    fleet: FleetId,
    number: usize,
    socket: &Path,
    blocks: i64,
) -> instances::NewInstance {
    let kind = json!({"name": "simulated", "resources": {"cpus": 64, "memory_mib": 262_144, "spot": false,
        "cpu_arch": "x86", "disk": {"size_mib": 1_048_576}, "gpus": []}, "processes": {"mode": "own"}});
    let machine = windlass_backend::BackendInstance {
        id: format!("simulated-{number}"),
        reach: Some(windlass_backend::AgentEndpoint::Socket { path: PathBuf::from(socket) }),
        hostname: Some(format!("simulated-{number}")),
        internal_ip: None,
        has: None,
        agent_version: None,
        memo: Value::Null,
    };
    instances::NewInstance {
        id,
        project_id: project,
        fleet_id: Some(fleet),
        name: format!("simulated-{number}"),
        instance_num: i64::try_from(number).unwrap_or_default(),
        backend: Some("remote".into()),
        region: Some("remote".into()),
        hostname: Some(format!("simulated-{number}")),
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
