//! Calls to a task's runner through the shim: one connection for everything.

use axum::{body::Body, http::Method};
use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest, protocol::Role},
};
use windlass_api::agent::{
    LOG_COMPLETE_HEADER, LOG_END_HEADER,
    events::ShimEventKind,
    port_pass::PortPass,
    runner::JobRecord,
    shim::{TaskInfo, TaskStatus},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};

use crate::support::shim::{CREDENTIAL, Setup, Shim, sign_pass};

/// Starts a task and waits until its runner responds.
async fn start_task(shim: &Shim) -> SubmissionId {
    let id = shim.submit(&shim.spec("t"), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let path = format!("/api/tasks/{id}/runner/api/healthcheck");
    let answers = async || (shim.client().get(&path).await.status == 200).then_some(());
    eventually_async("the runner answers", answers).await;
    id
}

fn job(script: &str) -> Value {
    json!({
        "run": {"id": "r", "run_spec": {"run_name": "t", "configuration": {}}},
        "job_spec": {"commands": ["/bin/sh", "-c", script], "env": {"X": "1"}},
    })
}

async fn run(shim: &Shim, id: SubmissionId, script: &str) {
    let client = shim.client().epoch(1);
    client.post(&format!("/api/tasks/{id}/runner/api/submit"), &job(script)).await.expect(200);
    client.post(&format!("/api/tasks/{id}/runner/api/run"), &json!({})).await.expect(200);
}

#[tokio::test]
async fn a_job_can_be_run_and_its_output_read_through_the_shim_alone() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let path = format!("/api/tasks/{id}");
    shim.client().epoch(0).post(&format!("{path}/runner/api/submit"), &job("true")).await.expect(412);
    run(&shim, id, "echo hello; exit 3").await;
    // Waits for the output, and returns when it comes.
    let logs = shim.client().get(&format!("{path}/logs?stream=job&offset=0&wait_ms=20000")).await.expect(200);
    assert_eq!(logs.text().trim_end(), "hello");
    let through = shim.client().get(&format!("{path}/runner/api/logs?stream=job&offset=0")).await.expect(200);
    assert_eq!(through.body, logs.body);
    let record = eventually_ok_async("the job fails", async || {
        let record: JobRecord = shim.client().get(&format!("{path}/job")).await.json();
        let has_failed = record.states.last().is_some_and(|state| state.state == "failed");
        if record.log_complete && has_failed { Ok(record) } else { Err(format!("{record:?}")) }
    })
    .await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(3));
    assert_eq!(record.log_end, logs.body.len() as u64);
    // The same after the runner has ended.
    shim.terminate(id, 1, 0).await;
    let after = shim.client().get(&format!("{path}/logs?offset=2&wait_ms=20000")).await.expect(200);
    assert_eq!(
        (after.text().trim_end(), after.headers[LOG_COMPLETE_HEADER].to_str().unwrap()),
        ("llo", "true")
    );
    assert_eq!(after.headers[LOG_END_HEADER], record.log_end.to_string());
    let dead = shim.client().get(&format!("{path}/runner/api/healthcheck")).await.expect(502);
    assert!(dead.text().contains("did not respond"), "{}", dead.text());
    shim.remove(id, 1).await;
    shim.client().get(&format!("{path}/logs")).await.expect(404);
    shim.client().get(&format!("{path}/runner/api/healthcheck")).await.expect(404);
}

#[tokio::test]
async fn x5_the_runner_socket_rejects_calls_without_its_token() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let socket = shim.home().join(format!("tasks/{id}/run/runner.sock"));
    for client in [
        crate::support::client::Client::unix(&socket),
        crate::support::client::Client::unix(&socket).credential(CREDENTIAL),
    ] {
        client.get("/api/metrics").await.expect(401);
    }
}

#[tokio::test]
async fn task_ports_and_the_ssh_server_are_reachable_through_the_shim() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut guest, _) = listener.accept().await.unwrap();
        let mut requested = [0; 4];
        guest.read_exact(&mut requested).await.unwrap();
        guest.write_all(&[&requested[..], b" pong"].concat()).await.unwrap();
    });
    let open = |credential: &'static str, port: u16| {
        let socket = shim.home().join("shim.sock");
        async move {
            let stream = UnixStream::connect(socket).await.unwrap();
            windlass_api::agent::ports::connect(stream, credential, id, port).await
        }
    };
    let mut stream = open(CREDENTIAL, port).await.unwrap();
    stream.write_all(b"ping").await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"ping pong", "to the last byte, and then the end");

    let refused = open(CREDENTIAL, port).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("failed to connect to port {port}")), "{refused}");
    let other = open("wrong", port).await.unwrap_err().to_string();
    assert!(other.contains("credential"), "{other}");
    let plain = shim.client().get(&format!("/api/tasks/{id}/runner/api/connect?port={port}")).await;
    plain.expect(400);

    let mut ssh = open(CREDENTIAL, 0).await.unwrap();
    let mut hello = [0; 16];
    ssh.read_exact(&mut hello).await.unwrap();
    assert_eq!(&hello, b"SSH-2.0-windlass");
}

#[tokio::test]
async fn a_pass_permits_only_connections_to_the_ports_it_names() {
    use tokio::io::AsyncReadExt as _;
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut guest, _) = listener.accept().await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut guest, b"hello").await.unwrap();
    });
    let tasks = std::collections::BTreeMap::from([(id, std::collections::BTreeSet::from([port]))]);
    let far = i64::from(u32::MAX);
    let good = sign_pass(&PortPass { instance: shim.instance, tasks: tasks.clone(), expires_at: far });
    let old = sign_pass(&PortPass { instance: shim.instance, tasks: tasks.clone(), expires_at: 1 });
    let other = windlass_model::id::InstanceId(uuid::Uuid::from_u128(1));
    let foreign = sign_pass(&PortPass { instance: other, tasks, expires_at: far });
    let open = |shown: String, port: u16| {
        let socket = shim.home().join("shim.sock");
        async move {
            let stream = UnixStream::connect(socket).await.unwrap();
            windlass_api::agent::ports::connect(stream, &shown, id, port).await
        }
    };
    let mut answer = Vec::new();
    open(good.clone(), port).await.unwrap().read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"hello");
    for (shown, port, why) in [
        (&good, 0, "does not permit this call"),
        (&good, 1, "does not permit this call"),
        (&old, port, "does not permit this call"),
        (&foreign, port, "credential"),
    ] {
        let refused = open(shown.clone(), port).await.unwrap_err().to_string();
        assert!(refused.contains(why), "{port}: {refused}");
    }
    let with_pass = crate::support::client::Client::unix(&shim.home().join("shim.sock")).credential(&good);
    for path in [
        "/api/tasks".to_owned(),
        format!("/api/tasks/{id}"),
        "/api/events".to_owned(),
        format!("/api/tasks/{id}/runner/api/logs?stream=job"),
    ] {
        with_pass.get(&path).await.expect(403);
    }
    with_pass.post(&format!("/api/tasks/{id}/terminate"), &json!({})).await.expect(403);
    with_pass.post("/api/shutdown", &json!({})).await.expect(403);
}

#[tokio::test]
async fn output_and_state_events_are_sent_as_they_happen() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let response = shim.client().open(Method::GET, "/api/events", Body::empty()).await;
    let mut body = response.into_body();
    run(&shim, id, "echo one; exit 0").await;
    let (mut text, mut reported) = (Vec::new(), Vec::new());
    let until = tokio::time::Instant::now() + TIMEOUT;
    while !reported.iter().any(|what| *what == "done") {
        let frame = tokio::time::timeout_at(until, body.frame()).await.expect("told in time");
        text.extend_from_slice(&frame.unwrap().unwrap().into_data().unwrap());
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let event: windlass_api::agent::events::ShimEvent = serde_json::from_slice(&line).unwrap();
            match event.kind {
                ShimEventKind::Log { id: of, stream, end } if of == id && stream == "job" => {
                    assert!(end >= 4, "{end}");
                    reported.push("log".to_owned());
                }
                ShimEventKind::Job { id: of, state } if of == id => reported.push(state.state),
                ShimEventKind::Reset { .. }
                | ShimEventKind::Task { .. }
                | ShimEventKind::Gone { .. }
                | ShimEventKind::Job { .. }
                | ShimEventKind::Log { .. }
                | ShimEventKind::Health { .. }
                | ShimEventKind::Alive => {}
            }
        }
    }
    assert!(reported.contains(&"running".to_owned()) && reported.contains(&"log".to_owned()), "{reported:?}");
}

async fn read_all_messages<S>(mut socket: WebSocketStream<S>) -> Vec<u8>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let mut got = Vec::new();
    loop {
        let message = tokio::time::timeout(TIMEOUT, socket.next()).await.expect("the stream ends");
        match message {
            Some(Ok(Message::Binary(bytes))) => got.extend_from_slice(&bytes),
            Some(Ok(Message::Close(_))) | None => break,
            Some(Ok(_)) => {}
            Some(Err(error)) => panic!("{error}"),
        }
    }
    let _ = socket.close(None).await;
    got
}

#[tokio::test]
async fn the_shim_proxies_a_websocket_to_the_runner() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    run(&shim, id, "echo a; echo b").await;
    let mut request =
        format!("ws://shim/api/tasks/{id}/runner/logs_ws?offset=0").into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {CREDENTIAL}").parse().unwrap());
    let stream = UnixStream::connect(shim.socket()).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    socket.send(Message::Ping(Vec::new().into())).await.unwrap();
    let got = read_all_messages(socket).await;
    assert_eq!(String::from_utf8(got).unwrap().replace('\r', ""), "a\nb\n");
}

#[tokio::test]
async fn one_connection_carries_calls_and_websockets_at_once() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let stream = TokioIo::new(UnixStream::connect(shim.socket()).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    run(&shim, id, "echo a; echo b").await;
    let request = |method: &str, path: String| {
        hyper::Request::builder()
            .method(method)
            .uri(format!("http://shim{path}"))
            .header("authorization", format!("Bearer {CREDENTIAL}"))
    };
    // The server's settings, which allow the following request, come with its first response.
    let plain = request("GET", format!("/api/tasks/{id}")).body(Body::empty()).unwrap();
    let answer = sender.send_request(plain).await.unwrap().into_body().collect().await.unwrap().to_bytes();
    let info: TaskInfo = serde_json::from_slice(&answer).unwrap();
    assert_eq!(info.id, id);
    let events = request("GET", "/api/events".to_owned()).body(Body::empty()).unwrap();
    let events = sender.send_request(events).await.unwrap();
    let upgrade = request("CONNECT", format!("/api/tasks/{id}/runner/logs_ws?offset=0"))
        .header("sec-websocket-version", "13")
        .extension(hyper::ext::Protocol::from_static("websocket"))
        .body(Body::empty())
        .unwrap();
    let response = sender.send_request(upgrade).await.unwrap();
    assert_eq!(response.status(), 200);
    let upgraded = hyper::upgrade::on(response).await.unwrap();
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await;
    assert_eq!(String::from_utf8(read_all_messages(socket).await).unwrap().replace('\r', ""), "a\nb\n");
    drop(events);
}

#[tokio::test]
async fn a_large_upload_is_streamed_to_the_runner() {
    let shim = Shim::start(Setup::process());
    let id = start_task(&shim).await;
    let client = shim.client().epoch(1);
    client.post(&format!("/api/tasks/{id}/runner/api/submit"), &job("true")).await.expect(200);
    // Longer than the body of any other call may be. How the runner handles it is not tested here.
    let chunks = (0..64).map(|_| Ok::<_, std::io::Error>(axum::body::Bytes::from(vec![7u8; 256 * 1024])));
    let body = Body::from_stream(futures_util::stream::iter(chunks));
    let reply = client.call(Method::POST, &format!("/api/tasks/{id}/runner/api/upload_code"), body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}
