//! Clients of the server: log readers, command lines, tokens, and duplicated calls.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use windlass_api::{
    client::ApiClient,
    log_stream::{LogStream, LogStreamEvent},
    logs::StreamRequest,
    runs::ConnectRequest,
};

use super::fixtures::{LabEnv, assert_single_attempt, send_signal};
use crate::{AgentSite, FaultRow, RowTest, Trial};
use windlass_testenv::{
    server::{TOKEN, submission},
    test_env::{HostMode, TestEnv, newest_submission, small_task_config, task_config},
};
use windlass_testkit::fault_proxy::{ConnectionFaults, FaultProxy};
use windlass_testkit::wait::{TIMEOUT, eventually, eventually_async};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F20",
        injection: "agent and API calls duplicated, delayed, cut off midway",
        expected: "exactly one effect",
        bound: "–",
        proves: "A1 A2 R26",
        play: RowTest::Now(|trial| Box::pin(doubled(trial))),
    },
    FaultRow {
        id: "F31",
        injection: "50 tailers around the end of a job, one of which never reads",
        expected: "all readers get all bytes",
        bound: "lag ≤ 1 s",
        proves: "O4",
        play: RowTest::Now(|trial| Box::pin(tailers(trial))),
    },
    FaultRow {
        id: "F32",
        injection: "kill -9 of `apply` and `attach`; Ctrl-C twice",
        expected: "the run continues, or ends as requested; no forwarded port left",
        bound: "≤ 5 s",
        proves: "R12",
        play: RowTest::Now(|trial| Box::pin(command_lines(trial))),
    },
    FaultRow {
        id: "F34",
        injection: "token revoked, user disabled, member removed during a log tail and an attached port",
        expected: "streams closed",
        bound: "≤ 5 s",
        proves: "X7",
        play: RowTest::Now(|trial| Box::pin(access_revoked(trial))),
    },
];

fn client(env: &TestEnv, token: &str) -> ApiClient {
    ApiClient::new(&format!("http://{}", env.address()), Some(token)).unwrap()
}

fn stream_of(run: &Value) -> StreamRequest {
    let name = run["run_spec"]["run_name"].as_str().unwrap().to_owned();
    let id = newest_submission(run)["id"].as_str().unwrap().parse().unwrap();
    let (offset, start_time, follow, diagnose) = (0, None, true, false);
    StreamRequest { run_name: name, job_submission_id: id, offset, start_time, follow, diagnose }
}

/// Output received by one tailer, and the time of the last line.
struct TailedLog {
    began: Instant,
    bytes: Vec<u8>,
    last_at: Option<Instant>,
}

impl TailedLog {
    fn is_early(&self, than: Instant) -> bool {
        self.began < than
    }
}

async fn read_all(mut stream: LogStream) -> TailedLog {
    let mut read = TailedLog { began: Instant::now(), bytes: Vec::new(), last_at: None };
    while let Some(news) = stream.next().await.unwrap() {
        match news {
            LogStreamEvent::Bytes { offset, bytes, .. } => {
                assert_eq!(offset, read.bytes.len() as u64, "O4: a piece is missing or comes twice");
                read.bytes.extend(bytes);
                if read.bytes.ends_with(b"last\n") {
                    read.last_at.get_or_insert_with(Instant::now);
                }
            }
            LogStreamEvent::End { .. } => break,
        }
    }
    read
}

async fn tailers(trial: &mut Trial) {
    const TAILERS: usize = 50;
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    let gate = env.home().join("go");
    let wait = format!("until [ -e {} ]; do echo waits; sleep 0.05; done", gate.display());
    let burst = "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done";
    let last = "i=0; while [ $i -lt 300 ]; do echo more $i; i=$((i+1)); done; echo last";
    env.apply(&task_config("wordy", &[burst, &wait, last])).await;
    env.says("wordy", "line 4000").await;
    let run = env.run("wordy").await;
    let client = Arc::new(client(&env, TOKEN));
    // A client that opens the stream and never reads.
    let deaf = client.stream_logs("main", &stream_of(&run)).await.unwrap();
    let mut reading = tokio::task::JoinSet::new();
    let mut open = |after: Duration| {
        let (client, request) = (Arc::clone(&client), stream_of(&run));
        reading.spawn(async move {
            tokio::time::sleep(after).await;
            read_all(client.stream_logs("main", &request).await.unwrap()).await
        });
    };
    let early = trial.rng.between(2, TAILERS as u64 - 10) as usize;
    for _ in 0..early {
        open(trial.rng.millis(0, 300));
    }
    tokio::time::sleep(Duration::from_millis(600)).await;
    let let_go = Instant::now();
    std::fs::write(&gate, "").unwrap();
    for _ in early..TAILERS {
        open(trial.rng.millis(0, 1500));
    }
    let run = env.reaches("wordy", &["done"]).await;
    let want = env.log(&run).await.into_bytes();
    let mut seen = Vec::new();
    while let Some(read) = reading.join_next().await {
        let read = read.unwrap();
        assert_eq!(read.bytes.len(), want.len(), "O4");
        assert!(read.bytes == want, "O4: other bytes");
        seen.extend(read.is_early(let_go).then_some(read.last_at).flatten());
    }
    trial.record_faults("tailers", TAILERS as u64);
    trial.fired("never reads");
    // Of the clients connected when the last line was written, none is far behind the first.
    let first = seen.iter().min().copied().unwrap();
    let last = seen.iter().max().copied().unwrap();
    trial.within("lag", Duration::from_secs(1), last - first);
    drop(deaf);
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
}

async fn access_revoked(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    env.apply(&task_config("open", &["while :; do echo tick; sleep 0.1; done"])).await;
    env.says("open", "tick").await;
    let run = env.run("open").await;
    for (name, what) in [("ann", "token revoked"), ("ben", "user disabled"), ("cat", "member removed")] {
        let made = env.post("/api/users/create", &json!({"username": name, "global_role": "user"})).await;
        let token = made["creds"]["token"].as_str().unwrap().to_owned();
        // A role that may access jobs of other users.
        let member = json!({"members": [{"username": name, "project_role": "admin"}]});
        env.post("/api/projects/main/add_members", &member).await;
        let client = client(&env, &token);
        let mut log = client.stream_logs("main", &stream_of(&run)).await.unwrap();
        assert!(matches!(log.next().await, Ok(Some(LogStreamEvent::Bytes { .. }))));
        let request = stream_of(&run);
        let request = ConnectRequest {
            run_name: request.run_name,
            job_submission_id: request.job_submission_id,
            port: 0,
        };
        let mut port = client.connect_job("main", &request).await.unwrap();
        let mut hello = [0; 4];
        tokio::time::timeout(TIMEOUT, port.read_exact(&mut hello)).await.unwrap().unwrap();
        assert_eq!(&hello, b"SSH-");
        trial.pause(0, 500).await;
        match what {
            "token revoked" => {
                env.post("/api/users/refresh_token", &json!({"username": name})).await;
            }
            "user disabled" => {
                let body = json!({"username": name, "global_role": "user", "active": false});
                env.post("/api/users/update", &body).await;
            }
            _ => {
                env.post("/api/projects/main/remove_members", &json!({"usernames": [name]})).await;
            }
        }
        trial.fired(what);
        let shut = Instant::now();
        let closed = tokio::time::timeout(TIMEOUT, async { while let Ok(Some(_)) = log.next().await {} });
        closed.await.expect("X7: the log is still open");
        trial.within("log closed", Duration::from_secs(5), shut.elapsed());
        let closed = tokio::time::timeout(TIMEOUT, drained(&mut port));
        closed.await.expect("X7: the port is still open");
        trial.within("port closed", Duration::from_secs(5), shut.elapsed());
    }
    env.stop("open", true).await;
    env.reaches("open", &["terminated"]).await;
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
}

async fn drained(stream: &mut (impl tokio::io::AsyncRead + Unpin)) {
    let mut rest = [0; 1024];
    while let Ok(1..) = stream.read(&mut rest).await {}
}

/// A running command, killed at the end of the row.
struct CommandGuard(Child);

impl Drop for CommandGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn_command(env: &TestEnv, args: &[&str]) -> CommandGuard {
    let mut command: Command = env.command(env.home(), args);
    CommandGuard(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Waits until the server has a run.
async fn wait_until_submitted(env: &mut TestEnv, name: &str) {
    eventually_async(&format!("{name} is submitted"), async || {
        let runs = env.post("/api/runs/list", &json!({"project_name": "main", "only_active": true})).await;
        runs.as_array().unwrap().iter().any(|run| run["run_spec"]["run_name"] == name).then_some(())
    })
    .await;
}

/// Number of open connections to a port on this machine.
fn connections(port: u16) -> usize {
    let listed = Command::new("ss").args(["-Htn", "state", "established"]).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    listed
        .lines()
        .filter(|line| line.split_whitespace().any(|word| word.ends_with(&format!(":{port}"))))
        .count()
}

async fn command_lines(trial: &mut Trial) {
    let mut env = trial.env(HostMode::Processes);
    env.start().await;
    let port = 20_000 + u16::try_from(trial.rng.between(0, 9_999)).unwrap();
    let page = format!("exec busybox nc -ll -p {port} -e cat");
    let job = format!(
        "type: task\nname: open\nuser: root\nresources: {{cpu: 1.., memory: 0.., disk: null}}\n\
                       commands: [echo up, {page}]\n"
    );
    std::fs::write(env.home().join("open.yml"), job).unwrap();
    // Killed while it follows: the run continues.
    let mut apply = spawn_command(&env, &["apply", "-f", "open.yml", "-y"]);
    wait_until_submitted(&mut env, "open").await;
    env.reaches("open", &["running"]).await;
    env.says("open", "up").await;
    trial.pause(0, 500).await;
    send_signal(apply.0.id(), "KILL");
    apply.0.wait().unwrap();
    trial.fired("apply killed");
    // Killed while it forwards: nothing of the forward remains on either side.
    let mut attach = spawn_command(&env, &["attach", "open", "-p", &format!("*:{port}")]);
    let mut reported = None;
    for line in BufReader::new(attach.0.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some((_, address)) = line.split_once(&format!("Port {port} of the job: http://")) {
            reported = Some(address.trim().to_owned());
            break;
        }
    }
    let address = reported.expect("a port is told of");
    let mut through = TcpStream::connect(&address).unwrap();
    through.write_all(b"hello\n").unwrap();
    eventually("the job is reached", || connections(port) > 0);
    trial.pause(0, 500).await;
    send_signal(attach.0.id(), "KILL");
    attach.0.wait().unwrap();
    trial.fired("attach killed");
    let killed = Instant::now();
    eventually("no forward is left", || connections(port) == 0 && TcpStream::connect(&address).is_err());
    trial.within("forward closed", Duration::from_secs(5), killed.elapsed());
    assert_eq!(env.run("open").await["status"], "running");
    env.stop("open", true).await;
    env.reaches("open", &["terminated"]).await;
    interrupted_twice(trial, &mut env).await;
    let site = AgentSite::local(&env, None);
    trial.evaluate(&mut env, &[site]).await;
}

/// The first interrupt asks the job to stop, which it ignores; the second aborts it.
async fn interrupted_twice(trial: &mut Trial, env: &mut TestEnv) {
    let job = "type: task\nname: deaf\nuser: root\nresources: {cpu: 1.., memory: 0.., disk: null}\n\
               commands: [\"trap '' INT TERM; echo up; while :; do sleep 0.1; done\"]\n";
    std::fs::write(env.home().join("deaf.yml"), job).unwrap();
    let mut apply = spawn_command(env, &["apply", "-f", "deaf.yml", "-y"]);
    wait_until_submitted(env, "deaf").await;
    env.reaches("deaf", &["running"]).await;
    env.says("deaf", "up").await;
    send_signal(apply.0.id(), "INT");
    trial.pause(300, 900).await;
    send_signal(apply.0.id(), "INT");
    trial.fired("interrupted twice");
    let start = Instant::now();
    let run = env.reaches("deaf", &["terminated"]).await;
    trial.within("ended", Duration::from_secs(5), start.elapsed());
    assert_eq!(run["termination_reason"], "aborted_by_user", "{run:#}");
    assert_single_attempt(&run);
    apply.0.wait().unwrap();
}

/// Sends one request on a separate connection, and repeats it if the connection is cut.
async fn post_with_retry(address: &str, path: &str, key: Option<&str>, body: &Value) -> Value {
    eventually_async(&format!("{path} is answered"), async || try_post(address, path, key, body).await).await
}

async fn try_post(address: &str, path: &str, key: Option<&str>, body: &Value) -> Option<Value> {
    use tokio::io::AsyncWriteExt as _;
    let body = body.to_string();
    let key = key.map_or(String::new(), |key| format!("idempotency-key: {key}\r\n"));
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: faults\r\nauthorization: Bearer {TOKEN}\r\n{key}connection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
    stream.write_all(format!("{head}{body}").as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    let text = String::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200"), "A1: {path}: {text}");
    serde_json::from_str(body).ok()
}

async fn doubled(trial: &mut Trial) {
    const RUNS: usize = 5;
    let mut ground = LabEnv::new(trial, 1).await;
    let (api_seed, shim_seed) = (trial.rng.draw(), trial.rng.draw());
    let listener = ground.host(1).path("/var/lib/windlass/door/shim.sock");
    let shim = FaultProxy::before(&listener, shim_seed).unwrap();
    // Connections from before the proxy are closed.
    ground.env.stop_server();
    ground.env.start().await;
    ground.env.wait_for_hosts("lab", 1).await;
    let env = &mut ground.env;
    let api = FaultProxy::tcp(env.address(), api_seed).await.unwrap();
    let foul = ConnectionFaults { latency: Duration::from_millis(20), ..ConnectionFaults::default() };
    api.set(ConnectionFaults { replay_after: Some(Duration::from_millis(700)), ..foul });
    shim.set(ConnectionFaults { replay_after: Some(Duration::from_millis(300)), ..foul });
    for number in 0..RUNS {
        let name = format!("run-{number}");
        let body = submission(&small_task_config(&name, &["echo said; sleep 0.5"]));
        let key = format!("{}-{number}", trial.seed);
        post_with_retry(api.address(), "/api/project/main/runs/apply", Some(&key), &body).await;
        trial.pause(0, 1000).await;
        shim.cut();
        let run = env.reaches(&name, &["done"]).await;
        assert_single_attempt(&run);
        assert_eq!(env.log(&run).await, "said\n", "O1");
    }
    // A duplicated stop, the second one possibly after the end.
    env.apply(&small_task_config("stopped", &["echo up; sleep 4716"])).await;
    env.says("stopped", "up").await;
    let stop = json!({"runs_names": ["stopped"], "abort": true});
    post_with_retry(api.address(), "/api/project/main/runs/stop", None, &stop).await;
    env.reaches("stopped", &["terminated"]).await;
    shim.cut();
    eventually("calls were said again", || {
        let again = |proxy: &FaultProxy| proxy.counts().replayed.load(Ordering::Relaxed);
        again(&api) > RUNS as u64 && again(&shim) > 0
    });
    trial.record_faults("API calls duplicated", api.counts().replayed.load(Ordering::Relaxed));
    trial.record_faults("agent connections replayed", shim.counts().replayed.load(Ordering::Relaxed));
    trial.record_faults("chunks delayed", shim.counts().delayed.load(Ordering::Relaxed));
    trial.record_faults("connections cut", shim.counts().cut.load(Ordering::Relaxed));
    let runs = env.post("/api/runs/list", &json!({"project_name": "main", "limit": 100})).await;
    assert_eq!(runs.as_array().unwrap().len(), RUNS + 1, "A1: a run came twice");
    drop(shim);
    ground.evaluate(trial).await;
}
