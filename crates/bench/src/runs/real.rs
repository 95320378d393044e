//! Runs that do something: processes of this machine, and containers compared with `docker run` of the same image.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::{Binaries, TIMEOUT, measure_run, wait_for_hosts};
use crate::{agent::engine::BenchEngine, results::BenchResults};
use windlass_testenv::server::{Client, Server, ServerOptions, submission};

const REPEATS: usize = 10;
const POLL_INTERVAL: Duration = Duration::from_millis(1);

pub(super) async fn run(binaries: &Binaries<'_>, home: &Path, sheet: &mut BenchResults) -> Result<()> {
    measure_processes(binaries, &home.join("process"), sheet).await?;
    std::fs::create_dir_all(home)?;
    let engine = BenchEngine::from_environment(home)?;
    measure_containers(binaries, &home.join("docker"), &engine, sheet).await
}

/// Servers that are started for each of the two modes.
const STARTS: usize = 10;

/// Rights of the plain processes of a server.
const MODES: [&str; 2] = ["own", "confined"];
/// Jobs for each of the modes: the time of a single one varies by much more than confinement costs.
const LINES: usize = 200;

/// Alternates servers whose plain processes have the server's privileges with those that confine them: the time from the
/// start of the server's process until its own machine accepts jobs.
async fn measure_starts(binaries: &Binaries<'_>, home: &Path, sheet: &mut BenchResults) -> Result<()> {
    let (mut owns, mut confineds, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    for time in 0..=STARTS {
        let mut took = [Duration::ZERO; 2];
        // Each is first in half of the pairs.
        for turn in [time % 2, (time + 1) % 2] {
            let mode = MODES[turn];
            took[turn] = measure_start(binaries, &home.join(format!("{mode}-{time}")), mode).await?;
        }
        let [of_own, of_confined] = took;
        if time > 0 {
            owns.push(of_own);
            confineds.push(of_confined);
            differences.push((of_confined.as_secs_f64() - of_own.as_secs_f64()) * 1e3);
        }
    }
    sheet.say("start of a server, SQLite")?;
    sheet.times("own_start", "own rights: start to first host", &mut owns)?;
    sheet.times("confined_start", "confined: start to first host", &mut confineds)?;
    differences.sort_by(f64::total_cmp);
    let overhead = differences[differences.len() / 2];
    sheet.figure("start_overhead_ms", "… in addition, median of pairs", overhead, "ms")
}

async fn measure_start(binaries: &Binaries<'_>, data: &Path, processes: &str) -> Result<Duration> {
    let start = Instant::now();
    let server = start_server_unready(binaries, data, None, processes).await?;
    let mut client = server.client().await?;
    let took = loop {
        let fleet = client.post("/api/project/main/fleets/get", &json!({"name": "local"})).await?;
        if fleet["instances"][0]["status"] == "idle" {
            break start.elapsed();
        }
        ensure!(start.elapsed() < TIMEOUT, "no host is ready: {fleet}");
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    server.stop()?;
    Ok(took)
}

/// Alternates plain processes with the server's privileges and confined ones, to measure the cost of confinement.
pub(super) async fn measure_isolation(
    binaries: &Binaries<'_>,
    home: &Path,
    sheet: &mut BenchResults,
) -> Result<()> {
    measure_starts(binaries, home, sheet).await?;
    let own = start_server_with(binaries, &home.join("own"), None, "own").await?;
    let confined = start_server_with(binaries, &home.join("confined"), None, "confined").await?;
    let (mut own_client, mut confined_client) = (own.client().await?, confined.client().await?);
    let (mut owns, mut confineds, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    for time in 0..=LINES {
        let mut job = task_config(&format!("line-{time}"), "none", "echo hello");
        job.as_object_mut().context("the configuration is not an object")?.remove("user");
        let mut took = [Duration::ZERO; 2];
        let clients = [&mut own_client, &mut confined_client];
        for turn in [time % 2, (time + 1) % 2] {
            took[turn] = measure_first_line(clients[turn], &job).await?;
        }
        let [of_own, of_confined] = took;
        if time > 0 {
            owns.push(of_own);
            confineds.push(of_confined);
            // Of two runs one right after the other: what else happens on the machine affects both.
            differences.push((of_confined.as_secs_f64() - of_own.as_secs_f64()) * 1e3);
        }
    }
    differences.sort_by(f64::total_cmp);
    sheet.say("this machine, plain processes, SQLite")?;
    sheet.times("own_first_line", "own rights: submit to first line in the log", &mut owns)?;
    sheet.times("confined_first_line", "confined: submit to first line in the log", &mut confineds)?;
    let ratio = super::median(&mut confineds).as_secs_f64() / super::median(&mut owns).as_secs_f64();
    sheet.figure("ratio", "confined, relative to own rights", ratio, "times")?;
    let overhead = differences[differences.len() / 2];
    sheet.figure("overhead_ms", "… in addition, median of pairs", overhead, "ms")?;
    own.stop()?;
    confined.stop()
}

async fn start_server(binaries: &Binaries<'_>, data: &Path, engine: Option<&Path>) -> Result<Server> {
    start_server_with(binaries, data, engine, "own").await
}

async fn start_server_with(
    binaries: &Binaries<'_>,
    data: &Path,
    engine: Option<&Path>,
    processes: &str,
) -> Result<Server> {
    let server = start_server_unready(binaries, data, engine, processes).await?;
    wait_for_hosts(&server, "local", 1).await?;
    Ok(server)
}

/// The host of the server's machine may not accept jobs yet.
async fn start_server_unready(
    binaries: &Binaries<'_>,
    data: &Path,
    engine: Option<&Path>,
    processes: &str,
) -> Result<Server> {
    std::fs::create_dir_all(data)?;
    // This socket does not exist, so that jobs are processes on any machine.
    let engine = engine.map_or_else(|| data.join("no-engine.sock"), Path::to_owned);
    Server::start(&ServerOptions {
        binary: binaries.windlass,
        data,
        database: None,
        core: None,
        local: true,
        env: vec![
            ("WINDLASS_AGENT", binaries.agent.to_owned()),
            ("DOCKER_HOST", PathBuf::from(format!("unix://{}", engine.display()))),
            ("WINDLASS_SERVER_LOCAL_PROCESSES", PathBuf::from(processes)),
        ],
        log: None,
    })
    .await
}

fn task_config(name: &str, image: &str, command: &str) -> Value {
    json!({"type": "task", "name": name, "image": image, "user": "root", "commands": [command],
        "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

async fn measure_processes(binaries: &Binaries<'_>, data: &Path, sheet: &mut BenchResults) -> Result<()> {
    let server = start_server(binaries, data, None).await?;
    let mut client = server.client().await?;
    let (mut lines, mut ends, mut exits, mut stops) = (vec![], vec![], vec![], vec![]);
    for time in 0..=REPEATS {
        let line =
            measure_first_line(&mut client, &task_config(&format!("line-{time}"), "none", "echo hello"))
                .await?;
        let end = measure_run(&mut client, &task_config(&format!("end-{time}"), "none", "true")).await?.ended;
        let exit = measure_exit_to_finished(&mut client, &format!("exit-{time}"), data).await?;
        let stop = measure_stop_to_signal(&mut client, &format!("stop-{time}"), data).await?;
        if time > 0 {
            lines.push(line);
            ends.push(end);
            exits.push(exit);
            stops.push(stop);
        }
    }
    sheet.say("this machine, processes, SQLite")?;
    sheet.about("process");
    sheet.times("first_line", "submit to first line in the log", &mut lines)?;
    sheet.times("done", "submit to done, `true`", &mut ends)?;
    sheet.times("exit", "exit of the job to finished run", &mut exits)?;
    sheet.times("stop", "stop request to signal in the job", &mut stops)?;
    // Its agent on this machine ends with it.
    server.stop()
}

/// Network of a job's container, as arguments of `docker run`.
const JOB_NETWORK_ARGS: [&str; 3] = ["windlass", "--publish", "127.0.0.1::10022"];

async fn measure_containers(
    binaries: &Binaries<'_>,
    data: &Path,
    engine: &BenchEngine,
    sheet: &mut BenchResults,
) -> Result<()> {
    let server = start_server(binaries, data, Some(&engine.socket)).await?;
    let mut client = server.client().await?;
    let (mut lines, mut same, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    for time in 0..=REPEATS {
        let job = task_config(&format!("line-{time}"), &engine.image, "echo hello");
        let line = measure_first_line(&mut client, &job).await?;
        let (alike, _) = engine.run(&JOB_NETWORK_ARGS)?;
        let (message, _) = engine.run(&["host"])?;
        if time > 0 {
            lines.push(line);
            same.push(alike);
            bare.push(message);
        }
    }
    sheet.say("this machine, containers, SQLite")?;
    sheet.about("docker");
    sheet.times("bare", "docker run, host network, to first line", &mut bare)?;
    sheet.times("same", "docker run, network and port of a job", &mut same)?;
    sheet.times("first_line", "submit to first line in the log", &mut lines)?;
    let more = (super::median(&mut lines).as_secs_f64() - super::median(&mut same).as_secs_f64()) * 1e3;
    sheet.figure("overhead_ms", "… overhead over docker run", more, "ms")?;
    server.stop()
}

/// Measures the time from the submission until the server returns the output.
async fn measure_first_line(client: &mut Client, configuration: &Value) -> Result<Duration> {
    let start = Instant::now();
    let run = client.post("/api/project/main/runs/apply", &submission(configuration)).await?;
    let body = json!({"run_name": configuration["name"], "limit": 10,
        "job_submission_id": run["jobs"][0]["job_submissions"][0]["id"]});
    let took = loop {
        let page = client.post("/api/project/main/logs/poll", &body).await?;
        let message: Vec<u8> = page["logs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|event| STANDARD.decode(event["message"].as_str()?).ok())
            .flatten()
            .collect();
        if message.starts_with(b"hello") {
            break start.elapsed();
        }
        ensure!(start.elapsed() < TIMEOUT, "no log line received: {page}");
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    wait_end(client, configuration["name"].as_str().context("no name")?).await?;
    Ok(took)
}

async fn wait_end(client: &mut Client, name: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        let run = client.post("/api/project/main/runs/get", &json!({"run_name": name})).await?;
        if matches!(run["status"].as_str(), Some("done" | "failed" | "terminated")) {
            return Ok(());
        }
        ensure!(start.elapsed() < TIMEOUT, "{name} did not end in time: {run}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Measures the time from the job's last action, the removal of a file, until the run is done.
async fn measure_exit_to_finished(client: &mut Client, name: &str, scratch: &Path) -> Result<Duration> {
    let (go, flag) = (scratch.join(format!("{name}.go")), scratch.join(format!("{name}.flag")));
    std::fs::write(&flag, "")?;
    let command = format!(
        "until [ -e {go} ]; do sleep 0.01; done; exec rm {flag}",
        go = go.display(),
        flag = flag.display()
    );
    client.post("/api/project/main/runs/apply", &submission(&task_config(name, "none", &command))).await?;
    wait_running(client, name).await?;
    std::fs::write(&go, "")?;
    while flag.exists() {
        std::thread::sleep(Duration::from_micros(100));
    }
    let gone = Instant::now();
    wait_end(client, name).await?;
    Ok(gone.elapsed())
}

/// Measures the time from the stop request until the job's trap has written a file.
async fn measure_stop_to_signal(client: &mut Client, name: &str, scratch: &Path) -> Result<Duration> {
    let (ready, flag) = (scratch.join(format!("{name}.ready")), scratch.join(format!("{name}.flag")));
    let command = format!(
        "trap 'echo x > {flag}; exit 0' INT TERM; echo x > {ready}; while :; do sleep 0.005; done",
        flag = flag.display(),
        ready = ready.display()
    );
    client.post("/api/project/main/runs/apply", &submission(&task_config(name, "none", &command))).await?;
    wait_running(client, name).await?;
    while !ready.exists() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let start = Instant::now();
    client.post("/api/project/main/runs/stop", &json!({"runs_names": [name], "abort": false})).await?;
    while !flag.exists() {
        ensure!(start.elapsed() < TIMEOUT, "{name} did not receive a signal in time");
        std::thread::sleep(Duration::from_micros(100));
    }
    let took = start.elapsed();
    wait_end(client, name).await?;
    Ok(took)
}

async fn wait_running(client: &mut Client, name: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        let run = client.post("/api/project/main/runs/get", &json!({"run_name": name})).await?;
        if run["status"] == "running" {
            return Ok(());
        }
        ensure!(start.elapsed() < TIMEOUT, "{name} did not start in time: {run}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
