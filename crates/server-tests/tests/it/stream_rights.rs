//! Streams end with the rights of the users who opened them, whichever user or server revoked the rights.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout, timeout_at},
};
use windlass_api::log_stream::{LogStream, LogStreamEvent};
use windlass_server::{
    config::{Settings, SettingsSource},
    db::Unit,
    logs::LogStore as _,
    params,
};
use windlass_testkit::wait::TIMEOUT;

use crate::{
    http::{ServerFixture, TestServer, on_both},
    log_stream::LogTestEnv,
};

on_both! {
    every_stream_ends_within_five_seconds_of_losing_its_rights
    streams_end_when_their_token_expires
    the_streams_of_pages_end_when_their_token_is_revoked
}

const END_TIMEOUT: Duration = Duration::from_secs(5);

impl LogTestEnv {
    /// A member's token.
    async fn member(&self, name: &str) -> String {
        let token = self.server.user(name).await;
        self.server.join("main", &[(name, "user")]).await;
        token
    }

    async fn logs(&self, token: &str) -> LogStream {
        self.open_stream(token, &self.requested()).await
    }

    /// Opens a stream of the queue's events.
    async fn events(&self, token: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.server.authority).await.unwrap();
        let head = format!(
            "GET /websocket?api_token={token} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            seen.push(stream.read_u8().await.unwrap());
        }
        assert!(seen.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&seen));
        stream
    }

    /// Changes a row as another server would, without notifying this one.
    async fn elsewhere(&self, sql: &'static str, user: &str) {
        let unit = Unit::new().expect_one(sql, params![user]);
        self.server.app.db().write(unit).await.unwrap().done().unwrap();
    }
}

async fn every_stream_ends_within_five_seconds_of_losing_its_rights(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let server = &scene.server;
    let names = ["replaced", "disabled", "deleted", "removed", "elsewhere", "demoted"];
    let mut streams = Vec::new();
    for name in names {
        let token = scene.member(name).await;
        streams.push((name, token.clone(), scene.logs(&token).await, scene.events(&token).await));
    }
    let stays = scene.member("stays").await;
    let (mut theirs, _events) = (scene.logs(&stays).await, scene.events(&stays).await);
    scene.server.app.logs().append_to_files(&scene.log, 0, 5, b"for all\n").await.unwrap();
    for (name, _, logs, _) in &mut streams {
        assert!(matches!(logs.next().await.unwrap(), Some(LogStreamEvent::Bytes { .. })), "{name}");
    }
    assert!(matches!(theirs.next().await.unwrap(), Some(LogStreamEvent::Bytes { .. })));

    let token_of = |wanted: &str| streams.iter().find(|(name, ..)| *name == wanted).unwrap().1.clone();
    let replace = json!({ "username": "replaced" });
    server.ok(&token_of("replaced"), "/api/users/refresh_token", replace).await;
    let disable = json!({ "username": "disabled", "global_role": "user", "active": false });
    server.admin("/api/users/update", disable).await;
    server.admin("/api/users/delete", json!({ "users": ["deleted"] })).await;
    server.admin("/api/projects/main/remove_members", json!({ "usernames": ["removed"] })).await;
    let revoke =
        "UPDATE tokens SET revoked_at = now_us() WHERE user_id = (SELECT id FROM users WHERE name = $1)";
    scene.elsewhere(revoke, "elsewhere").await;
    let remove = "DELETE FROM members WHERE user_id = (SELECT id FROM users WHERE name = $1)";
    scene.elsewhere(remove, "demoted").await;

    let until = Instant::now() + END_TIMEOUT;
    for (name, _, logs, _) in &mut streams {
        let ended = timeout_at(until, logs.next()).await;
        assert!(matches!(ended, Ok(Ok(None))), "{name}: {ended:?}");
    }
    for (name, _, _, events) in &mut streams {
        // A user who was removed from the project still exists.
        if !matches!(*name, "removed" | "demoted") {
            let mut rest = Vec::new();
            let ended = timeout_at(until, events.read_to_end(&mut rest)).await;
            assert!(ended.is_ok(), "{name} goes on");
        }
    }
    scene.server.app.logs().append_to_files(&scene.log, 8, 6, b"for some\n").await.unwrap();
    let next = tokio::time::timeout(TIMEOUT, theirs.next()).await.unwrap().unwrap();
    assert!(matches!(next, Some(LogStreamEvent::Bytes { bytes, .. }) if bytes == b"for some\n"));
    drop(streams);
    scene.server.stop().await;
}

async fn streams_end_when_their_token_expires(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let first = scene.member("mira").await;
    let made = json!({ "name": "brief", "scope": "read", "expires_in": 4 });
    let made: Value = scene.server.ok(&first, "/api/users/tokens/create", made).await;
    let mut logs = scene.logs(made["token"].as_str().unwrap()).await;
    let ended = tokio::time::timeout(END_TIMEOUT + Duration::from_secs(4), logs.next()).await;
    assert!(matches!(ended, Ok(Ok(None))), "{ended:?}");
    scene.server.stop().await;
}

/// Opens a response without an end; returns it after its head.
async fn open_response(server: &TestServer, token: &str, path: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    // What is not read stays at the server, except for this and the buffer of its socket.
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.authority.parse().unwrap()).await.unwrap();
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"\r\n\r\n") {
        seen.push(timeout(TIMEOUT, stream.read_u8()).await.unwrap().unwrap());
    }
    assert!(seen.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&seen));
    stream
}

async fn read_rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let ended = timeout(TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the stream goes on");
    // A response that is broken off may reset the connection.
    drop(ended);
    rest
}

/// The rights are checked at the interval of the setting, which is 2 s by default.
async fn server_with_fast_checks(ground: &ServerFixture) -> LogTestEnv {
    let given = SettingsSource { port: Some(0), ..ground.given() };
    let settings = Settings::new(given, None).unwrap();
    let rights_poll_interval = Duration::from_millis(20);
    LogTestEnv::on(
        TestServer::start_with_settings(Settings { pipelines: false, rights_poll_interval, ..settings })
            .await,
    )
    .await
}

async fn the_streams_of_pages_end_when_their_token_is_revoked(ground: &ServerFixture) {
    let scene = server_with_fast_checks(ground).await;
    let server = &scene.server;
    let (lost, stays) = (scene.member("lost").await, scene.member("stays").await);
    let (mut ending, mut staying) = (Vec::new(), Vec::new());
    for path in ["/api/changes/stream", "/api/metrics/stream"] {
        ending.push(open_response(server, &lost, path).await);
        staying.push(open_response(server, &stays, path).await);
    }
    server.ok(&lost, "/api/users/refresh_token", json!({ "username": "lost" })).await;
    for stream in &mut ending {
        read_rest(stream).await;
    }
    for stream in &mut staying {
        let mut first = vec![0; 1 << 16];
        // Reads what has arrived; then the stream is neither closed nor broken.
        while let Ok(read) = stream.try_read(&mut first) {
            assert!(read > 0, "the stream of another user ended");
        }
    }
    scene.server.stop().await;
}

/// One thread: every stream is woken before any of them runs.
#[tokio::test]
async fn a_download_is_broken_off_when_its_reader_loses_the_rights() {
    const SIZE: usize = 24 << 20;
    let ground = ServerFixture::sqlite();
    let scene = server_with_fast_checks(&ground).await;
    let server = &scene.server;
    let token = scene.member("mira").await;
    let line = vec![b'x'; 1 << 20];
    for part in 0..SIZE >> 20 {
        let at = u64::try_from(part << 20).unwrap();
        server.app.logs().append_to_files(&scene.log, at, 5, &line).await.unwrap();
    }
    let path = format!(
        "/api/project/main/logs/raw?run_name=train-1&job_submission_id={}&download=1",
        scene.log.submission
    );
    let mut whole = open_response(server, &token, &path).await;
    let rest = read_rest_of_chunks(&mut whole, SIZE).await;
    assert_eq!(rest, SIZE, "with the rights, all of it is sent");

    let mut broken = open_response(server, &token, &path).await;
    let mut logs = scene.logs(&token).await;
    server.admin("/api/projects/main/remove_members", json!({ "usernames": ["mira"] })).await;
    // The reader of the download is slow; that of the log learns of the end.
    while let Ok(Some(_)) = timeout(TIMEOUT, logs.next()).await.expect("an end") {}
    let rest = read_rest(&mut broken).await;
    assert!(rest.len() < SIZE && !rest.ends_with(b"0\r\n\r\n"), "{} bytes", rest.len());
    scene.server.stop().await;
}

/// Reads the chunks of a response until `size` bytes of content have come, and the end.
async fn read_rest_of_chunks(stream: &mut TcpStream, size: usize) -> usize {
    let mut count = 0;
    let mut buffer = vec![0; 1 << 16];
    let mut tail = Vec::new();
    while !tail.ends_with(b"0\r\n\r\n") {
        let read = timeout(TIMEOUT, stream.read(&mut buffer)).await.expect("silent").unwrap();
        assert!(read > 0, "broken off after {count} of {size}");
        count += buffer[..read].iter().filter(|byte| **byte == b'x').count();
        tail.extend_from_slice(&buffer[..read]);
        tail.drain(..tail.len().saturating_sub(5));
    }
    count
}
