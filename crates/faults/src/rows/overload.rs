//! Overload: cancels, submissions, connections.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream, task::JoinSet};

use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::{
    server::{Server, ServerOptions, binary_path, call_api, submission},
    test_hosts::{HostOptions, HostRuntime, RunningHosts, empty_job},
};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F28",
        injection: "200 cancellations at once; 600 submissions in a burst (1,000 and 5,000 with `--long`), on SQLite",
        expected: "only 200, 429 and 503; no \"locked\" error",
        bound: "all final ≤ 60 s",
        proves: "L8",
        play: RowTest::Now(|trial| Box::pin(burst(trial))),
    },
    FaultRow {
        id: "F29",
        injection: "server without free file descriptors",
        expected: "connections wait or are refused, runs continue, recovery without restart",
        bound: "≤ 10 s",
        proves: "R2",
        play: RowTest::Now(|trial| Box::pin(no_descriptors(trial))),
    },
];

const APPLY: &str = "/api/project/main/runs/apply";
const STOP: &str = "/api/project/main/runs/stop";
const FINAL_BOUND: Duration = Duration::from_secs(60);
const CONNECTIONS: usize = 48;

/// One server with SQLite and simulated hosts.
struct LoadedServer {
    server: Server,
    log: PathBuf,
    _hosts: RunningHosts,
}

impl LoadedServer {
    async fn new(trial: &Trial, hosts: usize, blocks: i64) -> Self {
        let (data, log) = (trial.dir().join("server"), trial.dir().join("server.log"));
        std::fs::create_dir_all(&data).unwrap();
        let (windlass, agent) = (binary_path("windlass").unwrap(), binary_path("windlass-agent").unwrap());
        let options = ServerOptions {
            binary: &windlass,
            data: &data,
            database: None,
            core: None,
            local: false,
            env: vec![("WINDLASS_AGENT", agent.clone()), ("WINDLASS_LOG", PathBuf::from("warn"))],
            log: Some(&log),
        };
        // The first start creates the database and its keys.
        Server::start(&options).await.unwrap().stop().unwrap();
        let home = trial.dir().join("hosts");
        let runtime = HostRuntime::Simulated;
        let hosts = HostOptions { agent: &agent, home: &home, count: hosts, blocks, runtime };
        let url = format!("sqlite:{}/windlass.db", data.display());
        let hosts = hosts.start(&url, &data.join("keys/master")).await.unwrap();
        Self { server: Server::start(&options).await.unwrap(), log, _hosts: hosts }
    }

    /// Waits until a condition holds for the active runs.
    async fn wait_for_active(&self, holds: impl Fn(&[Value]) -> bool) -> Duration {
        let began = Instant::now();
        let body =
            json!({"project_name": "main", "only_active": true, "limit": 100, "job_submissions_limit": 1});
        loop {
            let list = call_api(self.server.address(), "/api/runs/list", &body).await.unwrap().ok().unwrap();
            if holds(list.as_array().unwrap()) {
                return began.elapsed();
            }
            assert!(
                began.elapsed() < Duration::from_secs(180),
                "{} runs are not as wanted",
                list.as_array().unwrap().len()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends all calls at full speed, and returns the number of successful ones.
    async fn send_all(&self, path: &'static str, bodies: Vec<Value>) -> usize {
        let (bodies, next) = (Arc::new(bodies), Arc::new(AtomicUsize::new(0)));
        let mut clients = JoinSet::new();
        for _ in 0..CONNECTIONS {
            let (bodies, next) = (Arc::clone(&bodies), Arc::clone(&next));
            let address = self.server.address().to_owned();
            clients.spawn(async move {
                let mut taken = 0;
                while let Some(body) = bodies.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let answer = call_api(&address, path, body).await.unwrap();
                    assert!(matches!(answer.status, 200 | 429 | 503), "{answer:?}");
                    taken += usize::from(answer.status == 200);
                }
                taken
            });
        }
        let mut taken = 0;
        while let Some(client) = clients.join_next().await {
            taken += client.unwrap();
        }
        taken
    }

    fn assert_no_lock_errors(&self) {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        assert!(!log.contains("locked"), "L8: {}", log.lines().find(|line| line.contains("locked")).unwrap());
        assert!(!log.contains("panicked"), "{log}");
    }
}

async fn burst(trial: &mut Trial) {
    let (cancels, submits) = if trial.is_long { (1000, 5000) } else { (200, 600) };
    let place = LoadedServer::new(trial, 20, 64).await;
    let long_lived = |number: usize| {
        let mut job = empty_job(&format!("long-{number}"));
        job["env"]["SIMULATED_RUN_MS"] = "3600000".into();
        submission(&job)
    };
    let taken = place.send_all(APPLY, (0..cancels).map(long_lived).collect()).await;
    assert_eq!(taken, cancels);
    place.wait_for_active(|runs| runs.iter().all(|run| run["status"] == "running")).await;
    let stop =
        |number: usize| json!({"runs_names": [format!("long-{number}")], "abort": number.is_multiple_of(2)});
    let began = Instant::now();
    let taken = place.send_all(STOP, (0..cancels).map(stop).collect()).await;
    trial.record_faults("cancellation", taken as u64);
    assert_eq!(taken, cancels, "all of them are taken");
    place.wait_for_active(<[Value]>::is_empty).await;
    trial.within("all cancelled", FINAL_BOUND, began.elapsed());
    let began = Instant::now();
    let empty = |number: usize| submission(&empty_job(&format!("burst-{number}")));
    let taken = place.send_all(APPLY, (0..submits).map(empty).collect()).await;
    trial.record_faults("submission", taken as u64);
    place.wait_for_active(<[Value]>::is_empty).await;
    trial.within("all submitted runs final", FINAL_BOUND, began.elapsed());
    place.assert_no_lock_errors();
    let url = format!("sqlite:{}/server/windlass.db", trial.dir().display());
    drop(place);
    trial.check_database(&url.parse().unwrap(), &[]).await;
}

async fn no_descriptors(trial: &mut Trial) {
    let place = LoadedServer::new(trial, 1, 8).await;
    let mut job = empty_job("through");
    job["env"]["SIMULATED_RUN_MS"] = "2000".into();
    call_api(place.server.address(), APPLY, &submission(&job)).await.unwrap().ok().unwrap();
    let pid = place.server.pid();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let limit = format!("--nofile={}", open + 8);
    let set = Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap();
    assert!(set.success());
    let mut crowd = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(place.server.address()).await.unwrap();
        stream.write_all(b"POST ").await.unwrap();
        crowd.push(stream);
    }
    let health = json!({});
    let call = call_api(place.server.address(), "/api/server/pipelines", &health);
    let answered = tokio::time::timeout(Duration::from_secs(2), call).await;
    assert!(!matches!(&answered, Ok(Ok(answer)) if answer.status == 200), "it has descriptors left");
    trial.fired("no free file descriptor");
    tokio::time::sleep(Duration::from_secs(2)).await;
    drop(crowd);
    let began = Instant::now();
    loop {
        let call = call_api(place.server.address(), "/api/server/pipelines", &health);
        if matches!(tokio::time::timeout(Duration::from_secs(1), call).await, Ok(Ok(answer)) if answer.status == 200)
        {
            break;
        }
        assert!(began.elapsed() < FINAL_BOUND, "it does not recover");
    }
    trial.within("responding again", Duration::from_secs(10), began.elapsed());
    place.wait_for_active(<[Value]>::is_empty).await;
    let run =
        call_api(place.server.address(), "/api/project/main/runs/get", &json!({"run_name": "through"})).await;
    assert_eq!(run.unwrap().ok().unwrap()["status"], "done", "R2");
    place.assert_no_lock_errors();
    let url = format!("sqlite:{}/server/windlass.db", trial.dir().display());
    drop(place);
    trial.check_database(&url.parse().unwrap(), &[]).await;
}
