//! Comparison of dstack and windlass: the same machine, time, requests and work.
//!
//! Each server has an SSH fleet of one host: a network namespace of this machine with systemd and OpenSSH. Both deploy
//! the windlass agent; for dstack it emulates dstack's own (`--compat-tcp`). Jobs are plain processes. Each measurement
//! of one is directly followed by that of the other.

mod dstack;
mod file_server;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::dstack::DstackServer;
use super::{results::BenchResults, runs::Binaries};
use windlass_testenv::server::{Client, Server, ServerOptions, TOKEN};
use windlass_testenv::{
    closed_loop::{self, LoadFigures, RequestLoad},
    process,
};
use windlass_testkit::lab::{Lab, LabHost, WORKER};
use windlass_testkit::temp_dir;

/// Variable with the environment that contains dstack.
const VARIABLE: &str = "WINDLASS_BENCH_DSTACK";
const ROUNDS: usize = 3;
const SUBMITS: usize = 200;
const CLIENTS: usize = 8;
const DURATION: Duration = Duration::from_secs(6);
/// dstack polls a job every ten seconds, and brings a host up within minutes.
const TIMEOUT: Duration = Duration::from_secs(900);
/// Polling interval of a run.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

pub async fn run(binaries: &Binaries<'_>) -> Result<()> {
    let venv = std::env::var_os(VARIABLE)
        .with_context(|| format!("`{VARIABLE}` is not set to a Python environment"))?;
    let scratch = temp_dir("peer")?;
    let lab = Lab::with_systemd(2)?;
    let mut sheet = BenchResults::new("peer")?;
    sheet.say("dstack 0.22.5 and windlass, SQLite, one SSH host each, the same agent, jobs as processes")?;
    // The first start creates the database, and compiles the Python code.
    let (venv, home) = (Path::new(&venv), scratch.path().join("dstack"));
    drop(DstackServer::start(venv, &home, binaries.agent, lab.gateway()).await?);
    let theirs = DstackServer::start(venv, &home, binaries.agent, lab.gateway()).await?;
    let (data, log) = (scratch.path().join("windlass"), scratch.path().join("windlass.log"));
    std::fs::create_dir_all(&data)?;
    let options = ServerOptions { log: Some(&log), ..binaries.server(&data) };
    Server::start(&options).await?.stop()?;
    let ours = Server::start(&options).await?;
    let pair = SystemPair {
        theirs: MeasuredSystem { name: "dstack", address: theirs.address.clone(), pid: theirs.pid() },
        ours: MeasuredSystem { name: "windlass", address: ours.address().to_owned(), pid: ours.pid() },
    };
    sheet.put("dstack.ready_ms", theirs.ready.as_secs_f64() * 1e3);
    sheet.put("windlass.ready_ms", ours.ready.as_secs_f64() * 1e3);
    record_ratio(&mut sheet, "ready after start, ms", "ready_ms", BetterWhen::Less)?;
    pair.measure(&lab, &mut sheet).await?;
    sheet.save()?;
    ours.stop()
}

/// One of the two systems, as its clients see it.
#[derive(Clone)]
struct MeasuredSystem {
    name: &'static str,
    address: String,
    pid: u32,
}

struct SystemPair {
    theirs: MeasuredSystem,
    ours: MeasuredSystem,
}

#[derive(Clone, Copy)]
enum BetterWhen {
    Less,
    More,
}

/// Records one figure of both systems, and their ratio.
fn record_ratio(sheet: &mut BenchResults, what: &str, key: &str, better: BetterWhen) -> Result<()> {
    let theirs = sheet.read(&format!("dstack.{key}")).context("no figure of dstack")?;
    let ours = sheet.read(&format!("windlass.{key}")).context("no figure of windlass")?;
    let times = match better {
        BetterWhen::Less => theirs / ours,
        BetterWhen::More => ours / theirs,
    };
    sheet.put(&format!("ratio.{key}"), times);
    sheet.say(&format!("{what:<44} dstack {theirs:>10.1}   windlass {ours:>10.1}   {times:>8.1} times"))
}

impl SystemPair {
    async fn measure(&self, lab: &Lab, sheet: &mut BenchResults) -> Result<()> {
        for system in [&self.theirs, &self.ours] {
            process::wait_until_idle(system.pid).await?;
            sheet.put(&format!("{}.idle_resident_mb", system.name), process::resident_mb(system.pid)?);
        }
        record_ratio(sheet, "resident memory, idle, MB", "idle_resident_mb", BetterWhen::Less)?;
        for system in [&self.theirs, &self.ours] {
            let get = system.load("/api/users/get_my_user", "", 16).await?;
            sheet.put(&format!("{}.get_per_s", system.name), get.per_second);
            sheet.put(&format!("{}.get_p99_ms", system.name), get.p99.as_secs_f64() * 1e3);
        }
        record_ratio(sheet, "authenticated get, 16 connections, /s", "get_per_s", BetterWhen::More)?;
        let (theirs, ours) = tokio::join!(
            self.theirs.create_fleet(lab.host(1), lab),
            self.ours.create_fleet(lab.host(2), lab)
        );
        theirs.and(ours)?;
        self.measure_lifecycles(sheet).await?;
        self.measure_submits(sheet).await?;
        for system in [&self.theirs, &self.ours] {
            let body = json!({"project_name": "main", "only_active": false, "limit": 100,
                "job_submissions_limit": 1});
            let list = system.load("/api/runs/list", &body.to_string(), 16).await?;
            sheet.put(&format!("{}.list_per_s", system.name), list.per_second);
            sheet.put(&format!("{}.list_p50_ms", system.name), list.p50.as_secs_f64() * 1e3);
            sheet.put(&format!("{}.end_resident_mb", system.name), process::resident_mb(system.pid)?);
        }
        let what = format!("list 100 runs after {SUBMITS} submits, /s");
        record_ratio(sheet, &what, "list_per_s", BetterWhen::More)?;
        record_ratio(sheet, "resident memory, afterwards, MB", "end_resident_mb", BetterWhen::Less)
    }

    /// Measures lifecycles of dstack and windlass alternately.
    async fn measure_lifecycles(&self, sheet: &mut BenchResults) -> Result<()> {
        for (key, what, command) in
            [("running_ms", "submit to running, ms", "sleep 1"), ("done_ms", "submit to done, ms", "true")]
        {
            let mut taken = [Vec::new(), Vec::new()];
            for round in 0..ROUNDS {
                for (system, taken) in [&self.theirs, &self.ours].into_iter().zip(&mut taken) {
                    let name = format!("{}-{round}", key.trim_end_matches("_ms"));
                    let life = system.measure_run(&name, command).await?;
                    taken.push(if key == "done_ms" {
                        life.ended
                    } else {
                        life.running.unwrap_or(life.ended)
                    });
                }
            }
            for (system, taken) in [&self.theirs, &self.ours].into_iter().zip(&mut taken) {
                taken.sort();
                sheet.put(&format!("{}.{key}", system.name), taken[ROUNDS / 2].as_secs_f64() * 1e3);
            }
            record_ratio(sheet, what, key, BetterWhen::Less)?;
        }
        Ok(())
    }

    async fn measure_submits(&self, sheet: &mut BenchResults) -> Result<()> {
        for system in [&self.theirs, &self.ours] {
            let (rate, p50) = system.submit_many().await?;
            sheet.put(&format!("{}.submits_per_s", system.name), rate);
            sheet.put(&format!("{}.submit_p50_ms", system.name), p50.as_secs_f64() * 1e3);
            let took = system.clear().await?;
            sheet.put(&format!("{}.cancel_{SUBMITS}_ms", system.name), took.as_secs_f64() * 1e3);
        }
        record_ratio(sheet, &format!("submits, {CLIENTS} clients, /s"), "submits_per_s", BetterWhen::More)?;
        let key = format!("cancel_{SUBMITS}_ms");
        record_ratio(sheet, &format!("cancel {SUBMITS} waiting runs, ms"), &key, BetterWhen::Less)
    }
}

struct RunTimes {
    running: Option<Duration>,
    ended: Duration,
}

impl MeasuredSystem {
    async fn client(&self) -> Result<Client> {
        Client::connect(&self.address).await
    }

    async fn load(&self, path: &str, body: &str, connections: usize) -> Result<LoadFigures> {
        let request = closed_loop::build_post(path, TOKEN, body);
        let load = RequestLoad { address: self.address.clone(), request, connections, lasts: DURATION };
        closed_loop::run_load(&load, |_, _| None)
            .await
            .with_context(|| format!("{}: failed to load {path}", self.name))
    }

    /// Creates an SSH fleet of one host, and waits until it accepts jobs.
    async fn create_fleet(&self, host: &LabHost, lab: &Lab) -> Result<()> {
        let mut client = self.client().await?;
        let (private, public) = lab.key_pair()?;
        let init = json!({"repo_id": "none", "repo_info": {"repo_type": "virtual"}, "repo_creds": null});
        client.post("/api/project/main/repos/init", &init).await?;
        // Not root: the agent's policy allows no user keys in that account.
        let configuration = json!({"type": "fleet", "name": "lab", "ssh_config": {"user": WORKER, "port": 22,
            "ssh_key": {"public": public, "private": private}, "hosts": [host.addr().to_string()]}});
        let spec = json!({"configuration": configuration, "configuration_path": "fleet.yml",
            "profile": {"name": "default"}});
        let body = json!({"plan": {"spec": spec, "current_resource": null}, "force": false});
        client.post("/api/project/main/fleets/apply", &body).await.with_context(|| self.name)?;
        let started = Instant::now();
        loop {
            let fleet = client.post("/api/project/main/fleets/get", &json!({"name": "lab"})).await?;
            let instance = &fleet["instances"][0];
            match instance["status"].as_str() {
                Some("idle") => return Ok(()),
                Some("terminated") => bail!("{}: the host was rejected: {instance}", self.name),
                Some(_) | None => {}
            }
            ensure!(started.elapsed() < TIMEOUT, "{}: the host did not become ready: {instance}", self.name);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn measure_run(&self, name: &str, command: &str) -> Result<RunTimes> {
        let mut client = self.client().await?;
        let start = Instant::now();
        client.post("/api/project/main/runs/apply", &submission(name, command)).await?;
        let mut running = None;
        loop {
            let run = client.post("/api/project/main/runs/get", &json!({"run_name": name})).await?;
            let seen = start.elapsed();
            match run["status"].as_str().unwrap_or_default() {
                "running" => running = running.or(Some(seen)),
                "done" => return Ok(RunTimes { running, ended: seen }),
                "failed" | "terminated" => bail!("{}: {name} ended: {run}", self.name),
                _ => {}
            }
            ensure!(seen < TIMEOUT, "{}: {name} is still {}", self.name, run["status"]);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn submit_many(&self) -> Result<(f64, Duration)> {
        let next = Arc::new(AtomicUsize::new(0));
        let mut clients = JoinSet::new();
        let started = Instant::now();
        for _ in 0..CLIENTS {
            let (mut client, next) = (self.client().await?, Arc::clone(&next));
            clients.spawn(async move {
                let mut taken = Vec::new();
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= SUBMITS {
                        return anyhow::Ok(taken);
                    }
                    let start = Instant::now();
                    let body = submission(&format!("many-{n}"), "sleep 3600");
                    client.post("/api/project/main/runs/apply", &body).await?;
                    taken.push(start.elapsed());
                }
            });
        }
        let mut all = Vec::new();
        while let Some(taken) = clients.join_next().await {
            all.extend(taken?.with_context(|| self.name)?);
        }
        let rate = all.len() as f64 / started.elapsed().as_secs_f64();
        all.sort();
        Ok((rate, all[all.len() / 2]))
    }

    /// Stops all runs, and waits until none is left.
    async fn clear(&self) -> Result<Duration> {
        let mut client = self.client().await?;
        let names: Vec<String> = (0..SUBMITS).map(|n| format!("many-{n}")).collect();
        let started = Instant::now();
        let body = json!({"runs_names": names, "abort": true});
        client.post("/api/project/main/runs/stop", &body).await?;
        let body =
            json!({"project_name": "main", "only_active": true, "limit": 1, "job_submissions_limit": 1});
        loop {
            let list = client.post("/api/runs/list", &body).await?;
            if list.as_array().is_some_and(Vec::is_empty) {
                return Ok(started.elapsed());
            }
            ensure!(started.elapsed() < TIMEOUT, "{}: timed out waiting for the runs to end", self.name);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// A submission that both systems accept.
fn submission(name: &str, command: &str) -> Value {
    let configuration = json!({"type": "task", "name": name, "image": "none", "user": "root",
        "commands": [command], "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1},
        "disk": null}});
    let spec = json!({"run_name": name, "repo_id": "none", "repo_data": {"repo_type": "virtual"},
        "configuration_path": "task.yml", "configuration": configuration, "profile": {"name": "default"},
        "ssh_key_pub": null});
    json!({"plan": {"run_spec": spec, "current_resource": null}, "force": false})
}
