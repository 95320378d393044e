//! Streams end with the rights of the users who opened them, whichever user or server revoked the rights.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use windlass_api::log_stream::{LogStream, LogStreamEvent};
use windlass_server::{db::Unit, logs::LogStore as _, params};
use windlass_testkit::wait::TIMEOUT;

use crate::{
    http::{ServerFixture, on_both},
    log_stream::LogTestEnv,
};

on_both! {
    every_stream_ends_within_five_seconds_of_losing_its_rights
    streams_end_when_their_token_expires
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
