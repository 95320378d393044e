//! Runs on hollow hosts: everything but the work. What is measured is the control plane alone.

use std::{
    collections::BTreeMap,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;
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

use super::{Binaries, hosts_ready, is_busy, live, show};
use crate::server::{Client, Options, Server, submission};

const HOSTS: usize = 200;
/// Jobs that one host takes at once.
const BLOCKS: i64 = 8;
const TIMES: usize = 20;
const AT_ONCE: usize = 16;
/// Whole lives for the throughput.
const LIVES: usize = 4_000;
const SUBMITTERS: usize = 32;
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) async fn run(
    binaries: &Binaries<'_>,
    home: &Path,
    postgres: Option<&str>,
    out: &mut impl Write,
) -> Result<()> {
    let data = home.join("server");
    std::fs::create_dir_all(&data)?;
    let options = Options {
        binary: binaries.windlass,
        data: &data,
        database: postgres,
        core: None,
        local: false,
        env: vec![("WINDLASS_AGENT", binaries.agent.to_owned())],
        log: None,
    };
    // The first start makes the database and its keys.
    drop(Server::start(&options).await?);
    let _hosts = Hosts::start(binaries.agent, &home.join("hosts"), &data, postgres).await?;
    let server = Server::start(&options).await?;
    hosts_ready(&server, "hollow", HOSTS).await?;
    writeln!(out, "hollow hosts: {HOSTS}, {}", if postgres.is_some() { "Postgres" } else { "SQLite" })?;
    alone(&server, out).await?;
    together(&server, out).await?;
    many(&server, out).await
}

fn empty_job(name: &str) -> Value {
    json!({"type": "task", "name": name, "image": "busybox", "user": "root", "commands": ["true"],
        "env": {"HOLLOW_RUN_MS": "0", "HOLLOW_LOG_LINES": "1"},
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

async fn alone(server: &Server, out: &mut impl Write) -> Result<()> {
    let mut client = server.client().await?;
    let (mut running, mut ended) = (Vec::new(), Vec::new());
    for time in 0..=TIMES {
        let mut job = empty_job(&format!("alone-{time}"));
        // Long enough to be seen running.
        job["env"]["HOLLOW_RUN_MS"] = "30".into();
        let seen = live(&mut client, &job).await?;
        let nothing = live(&mut client, &empty_job(&format!("empty-{time}"))).await?;
        if time > 0 {
            running.extend(seen.running);
            ended.push(nothing.ended);
        }
    }
    if !running.is_empty() {
        show(out, "  submit to running", &mut running)?;
    }
    show(out, "  submit to done, empty job", &mut ended)
}

async fn together(server: &Server, out: &mut impl Write) -> Result<()> {
    let mut lives = JoinSet::new();
    for n in 0..AT_ONCE {
        let mut client = server.client().await?;
        lives.spawn(async move { live(&mut client, &empty_job(&format!("together-{n}"))).await });
    }
    let mut ended = Vec::new();
    while let Some(life) = lives.join_next().await {
        ended.push(life??.ended);
    }
    show(out, &format!("  the same, {AT_ONCE} at once"), &mut ended)
}

async fn many(server: &Server, out: &mut impl Write) -> Result<()> {
    let mut client = server.client().await?;
    let before = passes(&mut client).await?;
    let (cpu, started) = (server.cpu_secs()?, Instant::now());
    let next = Arc::new(AtomicUsize::new(0));
    let mut submitters = JoinSet::new();
    for _ in 0..SUBMITTERS {
        let (mut client, next) = (server.client().await?, Arc::clone(&next));
        submitters.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= LIVES {
                    return anyhow::Ok(());
                }
                let job = empty_job(&format!("many-{n}"));
                client.post("/api/project/main/runs/apply", &submission(&job)).await?;
            }
        });
    }
    while let Some(done) = submitters.join_next().await {
        done??;
    }
    let submitted = started.elapsed();
    while is_busy(&mut client).await? {
        ensure!(started.elapsed() < PATIENCE, "not all of {LIVES} runs end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = started.elapsed();
    let each = (server.cpu_secs()? - cpu) / LIVES as f64;
    let rate = |took: Duration| LIVES as f64 / took.as_secs_f64();
    writeln!(out, "{:<46} {:>9.0} /s", "  submits, while runs go on", rate(submitted))?;
    writeln!(out, "{:<46} {:>9.0} /s   ({LIVES} in {took:.1?})", "  whole lives", rate(took))?;
    writeln!(out, "{:<46} {:>9.2} ms", "  server's processor time, each", each * 1e3)?;
    writeln!(out, "{:<46} {:>9.1} MB", "  server, resident after that", server.resident_mb()?)?;
    for (pipeline, count) in passes(&mut client).await? {
        let each = (count - before.get(&pipeline).unwrap_or(&0.0)) / LIVES as f64;
        if each >= 0.1 {
            writeln!(out, "{:<46} {each:>9.1}", format!("  passes of {pipeline}, each"))?;
        }
    }
    Ok(())
}

/// Rows that each pipeline has claimed since the server was started.
async fn passes(client: &mut Client) -> Result<BTreeMap<String, f64>> {
    let pipelines = client.post("/api/server/pipelines", &json!({})).await?;
    let all = pipelines.as_array().context("no list of pipelines")?.iter();
    let counted = all.filter_map(|one| Some((one["name"].as_str()?.to_owned(), one["claimed"].as_f64()?)));
    Ok(counted.collect())
}

/// Many hosts in one process, already members of a fleet.
struct Hosts {
    child: Child,
}

impl Hosts {
    async fn start(agent: &Path, home: &Path, data: &Path, postgres: Option<&str>) -> Result<Self> {
        let url = postgres.map_or_else(|| format!("sqlite:{}/windlass.db", data.display()), str::to_owned);
        let db = Db::open(&url.parse::<DatabaseUrl>()?).await?;
        let keys = Keyring::open(&data.join("keys").join("master"))?;
        enter(&db, &keys, home).await?;
        db.close().await;
        std::fs::write(home.join("policy.yml"), "")?;
        let mut command = Command::new(agent);
        command.args(["shim", "--runtime", "hollow", "--hosts", &HOSTS.to_string(), "--home"]).arg(home);
        command.arg("--policy").arg(home.join("policy.yml")).args(["--log", "error"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("start the hosts")?;
        Ok(Self { child })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the fleet and its hosts into the database, and an enrolment into each host's directory.
async fn enter(db: &Db, keys: &Keyring, home: &Path) -> Result<()> {
    let rows = db.query("SELECT p.id FROM projects p WHERE p.name = 'main'", Vec::new()).await?;
    let project = ProjectId(rows.first().context("no project main")?.uuid(0)?);
    let fleet = FleetId(db.new_id()?);
    let spec = json!({"configuration": {"type": "fleet", "name": "hollow", "placement": "any",
        "ssh_config": {"hosts": []}}, "profile": {"name": "default"}});
    let mut unit = Unit::new().and([fleets::insert(fleets::NewFleet {
        id: fleet,
        project_id: project,
        name: "hollow".into(),
        spec: spec.to_string(),
        spec_sealed: None,
        status: fleet::Status::Active,
        auto_created: false,
    })]);
    let mut hosts = Vec::new();
    for number in 1..=HOSTS {
        let (id, below) = (InstanceId(db.new_id()?), home.join(format!("host-{number:04}")));
        std::fs::create_dir_all(&below)?;
        unit = unit.and([instances::insert(host(id, project, fleet, number, &below.join("shim.sock")))]);
        hosts.push((id, below));
    }
    db.write(unit).await?.done()?;
    for (id, below) in hosts {
        let enrolment = enrol::enrolment(db, keys, id).await?;
        let document = json!({"instance_id": id, "credential_sha256": enrolment.credential_sha256,
            "server_keys": [enrolment.server_key]});
        let mut file = std::fs::OpenOptions::new();
        let mut file = file.write(true).create_new(true).mode(0o600).open(below.join("enrolment.json"))?;
        file.write_all(document.to_string().as_bytes())?;
    }
    Ok(())
}

fn host(
    id: InstanceId,
    project: ProjectId,
    fleet: FleetId,
    number: usize,
    socket: &Path,
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
        total_blocks: Some(BLOCKS),
        idle_seconds_max: None,
    }
}
