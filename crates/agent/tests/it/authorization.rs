//! Access to the shim: credentials, signatures, epochs, limits; also its start, its stop and its events.

use std::time::{Duration, Instant};

use axum::{body::Body, http::Method};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use windlass_api::agent::{
    EPOCH_SEEN_HEADER, SIGNATURE_HEADER,
    events::{ShimEvent, ShimEventKind},
    shim::{TaskList, TaskStatus},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::TIMEOUT;

use crate::support::{
    agent,
    client::{Client, Reply},
    shim::{CREDENTIAL, Setup, Shim, free_port, random_uuid, sign},
    temp_dir,
};

fn task_id(spec: &Value) -> SubmissionId {
    serde_json::from_value(spec["id"].clone()).unwrap()
}

async fn submit_raw(client: &Client, body: &[u8]) -> Reply {
    client.call(Method::POST, "/api/tasks", Body::from(body.to_vec())).await
}

/// Reads events line by line.
struct EventLines {
    body: hyper::body::Incoming,
    text: Vec<u8>,
}

impl EventLines {
    async fn open(client: &Client, query: &str) -> Self {
        let response = client.open(Method::GET, &format!("/api/events{query}"), Body::empty()).await;
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), text: Vec::new() }
    }

    async fn next(&mut self) -> ShimEvent {
        loop {
            if let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                return serde_json::from_slice(&line).unwrap();
            }
            let frame = tokio::time::timeout(TIMEOUT, self.body.frame()).await.unwrap();
            self.text.extend_from_slice(&frame.expect("the stream goes on").unwrap().into_data().unwrap());
        }
    }

    /// Returns the first matching event; earlier ones are skipped.
    async fn until(&mut self, wanted: impl Fn(&ShimEventKind) -> bool) -> ShimEvent {
        let begun = Instant::now();
        let mut passed = Vec::new();
        while begun.elapsed() < TIMEOUT {
            let event = self.next().await;
            if wanted(&event.kind) {
                return event;
            }
            passed.push(event);
        }
        panic!("it does not come; there were {passed:#?}");
    }
}

fn is_task_event(what: &ShimEventKind, wanted: SubmissionId, status: TaskStatus) -> bool {
    matches!(what, ShimEventKind::Task { info } if info.id == wanted && info.status == status)
}

#[tokio::test]
async fn every_call_but_the_health_check_needs_the_credential() {
    let shim = Shim::start(Setup::simulated());
    let (without, wrong) = (Client::unix(&shim.socket()), Client::unix(&shim.socket()).credential("wrong"));
    let health: Value = without.get("/api/healthcheck").await.json();
    assert_eq!(health, json!({"service": "dstack-shim", "version": env!("CARGO_PKG_VERSION")}));
    let id = random_uuid();
    for path in ["/api/tasks", "/api/events", "/api/components", "/api/instance/health", "/api/nothing"] {
        assert_eq!(without.get(path).await.status, 401, "{path}");
        assert_eq!(wrong.get(path).await.status, 401, "{path}");
    }
    for path in
        [format!("/api/tasks/{id}/remove"), format!("/api/tasks/{id}/runner/api/run"), "/api/shutdown".into()]
    {
        assert_eq!(wrong.post(&path, &json!({})).await.status, 401, "{path}");
    }
    assert_eq!(submit_raw(&wrong, b"{}").await.status, 401);
    shim.client().get("/api/tasks").await.expect(200);
    shim.client().get("/api/nothing").await.expect(404);
}

#[tokio::test]
async fn a_credential_is_rotated_without_a_restart() {
    let shim = Shim::start(Setup::simulated());
    let next = Client::unix(&shim.socket()).credential("next");
    next.get("/api/tasks").await.expect(401);
    shim.enrol(&shim.home(), &[CREDENTIAL, "next"]);
    next.get("/api/tasks").await.expect(200);
    shim.client().get("/api/tasks").await.expect(200);
    shim.enrol(&shim.home(), &["next"]);
    shim.client().get("/api/tasks").await.expect(401);
    next.get("/api/tasks").await.expect(200);
}

#[tokio::test]
async fn a_host_that_is_not_enrolled_rejects_calls_and_explains_how_to_enrol_it() {
    let shim = Shim::start(Setup::simulated().not_enrolled());
    let reply = shim.client().get("/api/tasks").await.expect(401);
    assert!(reply.text().contains("windlass-agent shim enrol"), "{}", reply.text());
}

#[tokio::test]
async fn x8_a_specification_must_be_unexpired_and_signed_for_this_host_and_epoch() {
    let shim = Shim::start(Setup::simulated());
    let mut spec = shim.spec("t");
    let body = serde_json::to_vec(&spec).unwrap();
    let refuse = async |client: &Client, body: &[u8], why: &str| {
        let reply = submit_raw(client, body).await.expect(403);
        assert!(reply.text().contains(why), "{why} is not in {}", reply.text());
    };
    let client = shim.client().epoch(1);
    refuse(&client, &body, "not signed").await;
    let other = client.clone().header(SIGNATURE_HEADER, &sign(b"something else"));
    refuse(&other, &body, "not signed by a server of this host").await;
    let good = client.clone().header(SIGNATURE_HEADER, &sign(&body));
    let changed = [&body[..], b" "].concat();
    refuse(&good, &changed, "not signed by a server of this host").await;
    let later = shim.client().epoch(2).header(SIGNATURE_HEADER, &sign(&body));
    refuse(&later, &body, "for epoch 1, but the call has epoch 2").await;
    let sign_and_refuse = async |spec: &Value, why: &str| {
        let body = serde_json::to_vec(spec).unwrap();
        refuse(&client.clone().header(SIGNATURE_HEADER, &sign(&body)), &body, why).await;
    };
    spec["claims"]["instance_id"] = json!(random_uuid());
    sign_and_refuse(&spec, "another instance").await;
    spec["claims"] = shim.spec("t")["claims"].clone();
    spec["claims"]["expires_at"] = json!(1_000_000_000);
    sign_and_refuse(&spec, "expired").await;
    spec.as_object_mut().unwrap().remove("claims");
    sign_and_refuse(&spec, "no claims").await;
    let list: TaskList = shim.client().get("/api/tasks").await.json();
    assert_eq!(list.tasks, []);
    submit_raw(&good, &body).await.expect(200);
}

#[tokio::test]
async fn l2_a_call_with_an_older_epoch_has_no_effect() {
    let shim = Shim::start(Setup::simulated());
    let spec = shim.spec("t");
    let id = shim.submit(&spec, 5).await;
    shim.submit(&spec, 5).await;
    let older = shim.try_submit(&spec, 4).await.expect(412);
    assert_eq!(older.headers[EPOCH_SEEN_HEADER], "5");
    for path in [format!("/api/tasks/{id}/terminate"), format!("/api/tasks/{id}/runner/api/run")] {
        let reply = shim.client().epoch(4).post(&path, &json!({})).await.expect(412);
        assert_eq!(reply.headers[EPOCH_SEEN_HEADER], "5");
    }
    shim.client().epoch(4).post(&format!("/api/tasks/{id}/remove"), &json!({})).await.expect(412);
    assert_ne!(shim.info(id).await.status, TaskStatus::Terminated);
    assert_eq!(shim.terminate(id, 6, 0).await.epoch, 6);
    shim.remove(id, 6).await;
    shim.try_submit(&spec, 7).await.expect(410);
}

#[tokio::test]
async fn a_repeated_submission_succeeds_and_creates_no_second_task() {
    let shim = Shim::start(Setup::simulated());
    let spec = shim.spec("t");
    shim.submit(&spec, 1).await;
    shim.submit(&spec, 1).await;
    let list: TaskList = shim.client().get("/api/tasks").await.json();
    assert_eq!(list.tasks.len(), 1);
}

#[tokio::test]
async fn oversized_and_malformed_requests_are_rejected() {
    let shim = Shim::start(Setup::simulated());
    let long = vec![b' '; (1 << 20) + 1];
    submit_raw(&shim.client(), &long).await.expect(413);
    submit_raw(&shim.client(), b"{").await.expect(400);
    let mut spec = shim.spec("t");
    spec["name"] = json!("");
    shim.try_submit(&spec, 1).await.expect(400);
    let text = shim.client().header("content-type", "text/plain");
    submit_raw(&text, b"{}").await.expect(415);
    let charset = shim.client().header("content-type", "application/json; charset=utf-8");
    charset.post("/api/components/install", &json!({"name": "x"})).await.expect(400);
    shim.client().get("/api/tasks/not-an-id").await.expect(404);
    shim.client().epoch(1).header("windlass-epoch", "x").get("/api/tasks").await.expect(200);
    shim.client().call(Method::DELETE, "/api/tasks", Body::empty()).await.expect(405);
}

#[tokio::test]
async fn a_second_shim_on_the_same_home_reports_the_pid_of_the_first() {
    let shim = Shim::start(Setup::simulated());
    let output = shim.command().output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(message.contains(&format!("process {}", shim.pid())), "{message}");
    shim.client().get("/api/tasks").await.expect(200);
}

#[tokio::test]
async fn a_shim_stops_promptly_and_with_status_0_even_with_an_open_event_stream() {
    let mut shim = Shim::start(Setup::simulated());
    let mut lines = EventLines::open(&shim.client(), "").await;
    lines.until(|what| matches!(what, ShimEventKind::Health { .. })).await;
    let begun = Instant::now();
    assert_eq!(shim.stop(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    shim.restart();
    shim.client().post("/api/shutdown", &json!({"force": false})).await.expect(200);
    assert_eq!(shim.wait_for_exit(), Some(0));
}

#[tokio::test]
async fn the_event_stream_resumes_where_a_reader_stopped() {
    let mut shim = Shim::start(Setup::simulated());
    let spec = shim.spec("t");
    let id = task_id(&spec);
    let mut lines = EventLines::open(&shim.client(), "").await;
    let ShimEventKind::Reset { boot } = lines.next().await.kind else {
        panic!("a new reader is told everything")
    };
    shim.submit(&spec, 1).await;
    let running = lines.until(|what| is_task_event(what, id, TaskStatus::Running)).await;
    drop(lines);
    shim.terminate(id, 1, 0).await;
    shim.remove(id, 1).await;
    let mut lines = EventLines::open(&shim.client(), &format!("?after={}&boot={boot}", running.seq)).await;
    let first = lines.next().await;
    assert_eq!(first.seq, running.seq + 1);
    assert!(is_task_event(&first.kind, id, TaskStatus::Terminated), "{first:?}");
    lines.until(|what| *what == ShimEventKind::Gone { id }).await;
    // Another start uses new numbers: the same position is meaningless to it.
    shim.kill();
    shim.restart();
    let mut lines = EventLines::open(&shim.client(), &format!("?after={}&boot={boot}", running.seq)).await;
    assert!(matches!(lines.next().await.kind, ShimEventKind::Reset { boot: other } if other != boot));
}

#[tokio::test]
async fn an_event_reader_that_connects_late_gets_every_task() {
    let shim = Shim::start(Setup::simulated());
    let (one, two) = (shim.submit(&shim.spec("a"), 1).await, shim.submit(&shim.spec("b"), 1).await);
    shim.wait_for(one, TaskStatus::Running).await;
    let mut lines = EventLines::open(&shim.client(), "").await;
    assert!(matches!(lines.next().await.kind, ShimEventKind::Reset { .. }));
    let mut reported = Vec::new();
    while let ShimEventKind::Task { info } = lines.next().await.kind {
        reported.push(info.id);
    }
    assert!(reported.contains(&one) && reported.contains(&two), "{reported:?}");
}

#[tokio::test]
async fn x7_an_event_stream_ends_when_its_credential_is_revoked() {
    let shim = Shim::start(Setup::simulated());
    let mut lines = EventLines::open(&shim.client(), "").await;
    lines.until(|what| matches!(what, ShimEventKind::Health { .. })).await;
    shim.enrol(&shim.home(), &["another"]);
    let ended = tokio::time::timeout(Duration::from_secs(5), lines.body.frame()).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
}

#[tokio::test]
async fn as_dstack_shim_the_agent_is_configured_by_environment_variables() {
    let scratch = temp_dir("standin").unwrap();
    let (binary, home) = (scratch.path().join("dstack-shim"), scratch.path().join(".dstack"));
    std::fs::hard_link(agent(), &binary).or_else(|_| std::fs::copy(agent(), &binary).map(drop)).unwrap();
    let version = std::process::Command::new(&binary).arg("--version").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    assert!(version.starts_with("dstack-shim version latest"), "{version}");
    let address = free_port();
    let mut command = std::process::Command::new(&binary);
    command.env_clear().env("DSTACK_SHIM_HOME", &home).env("DSTACK_SERVICE_MODE", "1");
    command.env("DSTACK_SHIM_HTTP_PORT", address.port().to_string()).env("DSTACK_SHIM_LOG_LEVEL", "5");
    // No engine: plain processes.
    command.env("DOCKER_HOST", "").stderr(std::process::Stdio::null());
    let mut child = KillOnDrop(command.spawn().unwrap());
    let until = Instant::now() + TIMEOUT;
    while tokio::net::TcpStream::connect(address).await.is_err() {
        assert!(Instant::now() < until && child.0.try_wait().unwrap().is_none(), "it does not come up");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Written before the first response.
    let info: Value = serde_json::from_slice(&std::fs::read(home.join("host_info.json")).unwrap()).unwrap();
    assert!(info["cpus"].as_u64().unwrap() > 0 && info["memory"].as_u64().unwrap() > 0, "{info}");
    let health: Value = Client::tcp(address).get("/api/healthcheck").await.json();
    assert_eq!(health["service"], "dstack-shim");
    Client::unix(&home.join("shim.sock")).get("/api/tasks").await.expect(401);
}

/// A process that does not outlive the test.
struct KillOnDrop(std::process::Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn without_the_compat_flag_the_shim_listens_on_no_tcp_port() {
    let shim = Shim::start(Setup::process());
    let listening = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let own = std::fs::read_dir(format!("/proc/{}/fd", shim.pid())).unwrap().flatten();
    let sockets: Vec<String> = own
        .filter_map(|fd| std::fs::read_link(fd.path()).ok()?.to_str().map(str::to_owned))
        .filter_map(|link| Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    assert!(!sockets.is_empty());
    let is_own = |line: &&str| {
        line.split_whitespace().nth(9).is_some_and(|inode| sockets.iter().any(|own| own == inode))
    };
    assert_eq!(listening.lines().filter(is_own).collect::<Vec<_>>(), [""; 0]);
}

#[tokio::test]
async fn a_dstack_server_needs_no_credential_and_can_make_only_its_own_calls() {
    let shim = Shim::start(Setup::simulated().compat().not_enrolled());
    let compat = shim.compat();
    let health: Value = compat.get("/api/healthcheck").await.json();
    assert_eq!(health, json!({"service": "dstack-shim", "version": "latest"}));
    let components: Value = compat.get("/api/components").await.json();
    assert_eq!(
        components["components"][1],
        json!({"name": "dstack-shim", "version": "latest", "status": "installed"})
    );
    let mut spec = shim.spec("t");
    spec.as_object_mut().unwrap().remove("claims");
    compat.post("/api/tasks", &spec).await.expect(200);
    compat.post("/api/tasks", &spec).await.expect(200);
    let path = format!("/api/tasks/{}", task_id(&spec));
    let info: Value = compat.get(&path).await.json();
    assert_eq!(info["termination_reason"], "");
    for path in ["/api/events".to_owned(), format!("{path}/logs"), format!("{path}/runner/api/healthcheck")] {
        compat.get(&path).await.expect(404);
    }
    compat.post(&format!("{path}/remove"), &json!({})).await.expect(409);
    compat.post(&format!("{path}/terminate"), &json!({"timeout": 0})).await.expect(200);
    compat.post(&format!("{path}/remove"), &json!({})).await.expect(200);
    compat.get(&path).await.expect(404);
    let install = json!({"name": "dstack-shim", "url": "https://example.com/x"});
    compat.post("/api/components/install", &install).await.expect(403);
}

#[test]
fn the_shim_refuses_a_compat_address_that_is_not_loopback() {
    let mut command = std::process::Command::new(agent());
    command.args(["shim", "--home", "/nonexistent", "--compat-tcp", "0.0.0.0:10998"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("loopback"));
}

#[tokio::test]
async fn one_process_can_simulate_many_hosts() {
    let shim = Shim::start(Setup::simulated().arg("--hosts").arg("3").not_enrolled());
    for number in 1..=3 {
        let home = shim.home().join(format!("host-{number:04}"));
        shim.enrol(&home, &[CREDENTIAL]);
        let client = Client::unix(&home.join("shim.sock")).credential(CREDENTIAL);
        client.get("/api/tasks").await.expect(200);
    }
}

#[tokio::test]
async fn a_log_file_has_no_colours_and_no_debug_lines_of_libraries() {
    let mut shim = Shim::start(Setup::simulated());
    for _ in 0..3 {
        shim.client().get("/api/tasks").await.expect(200);
    }
    assert_eq!(shim.stop(), Some(0));
    let log = shim.log();
    assert!(log.contains("windlass_agent"), "it says something of itself: {log}");
    assert!(!log.contains('\u{1b}'), "{log}");
    for line in log.lines().filter(|line| ["DEBUG", "TRACE"].iter().any(|level| line.contains(level))) {
        assert!(line.contains("windlass_agent"), "{line}");
    }
}
