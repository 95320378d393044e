//! Format of refusals, size limits, and requests that must be rejected.

use std::time::Duration;

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use windlass_server::config::{Settings, SettingsSource};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer};

#[tokio::test]
async fn every_error_response_has_the_shape_that_clients_expect() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let (status, body) = server.post("wrong", "/api/users/get_my_user", "").await;
    assert_eq!((status, body), (403, json!({ "detail": { "code": null, "msg": "Invalid token" } })));
    let (status, body) = server.post(ADMIN_TOKEN, "/api/project/none/runs/get", "{}").await;
    assert_eq!((status, &body["detail"]["code"]), (404, &Value::Null));
    let (status, body) = server.post(ADMIN_TOKEN, "/api/nothing/here", "{}").await;
    assert_eq!((status, &body["detail"]["msg"]), (404, &json!("Not Found")));
    assert_eq!(server.get(ADMIN_TOKEN, "/api/users/list").await.0, 405);
    let (status, body) = server.post(ADMIN_TOKEN, "/api/users/create", r#"{"username":"a"}"#).await;
    let missing = json!({ "loc": ["body", "global_role"], "msg": "field required", "type": "missing" });
    assert_eq!((status, body), (422, json!({ "detail": [missing] })));
    let members = r#"{"members":[{"username":"a","project_role":"king"}]}"#;
    let (status, body) = server.post(ADMIN_TOKEN, "/api/projects/main/set_members", members).await;
    assert_eq!(status, 422);
    assert_eq!(body["detail"][0]["loc"], json!(["body", "members", "0", "project_role"]));
    for broken in ["{", "[]", "1", r#"{"username":1}"#, "{} x", "\u{0}"] {
        let (status, body) = server.post(ADMIN_TOKEN, "/api/users/create", broken).await;
        assert_eq!(status, 422, "{broken}: {body}");
        assert!(body["detail"][0]["loc"].is_array(), "{body}");
    }
    server
        .refused(
            ADMIN_TOKEN,
            "/api/project/main/runs/get",
            json!({ "run_name": "none" }),
            "resource_not_exists",
        )
        .await;
    server.stop().await;
}

#[tokio::test]
async fn an_empty_body_and_null_mean_defaults_and_unknown_fields_are_ignored() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    for body in ["", "null", "{}", r#"{"from_the_future":{"a":[1]}}"#] {
        let (status, answer) = server.post(ADMIN_TOKEN, "/api/projects/list", body).await;
        assert_eq!(status, 200, "{body}: {answer}");
        assert_eq!(answer[0]["project_name"], "main");
    }
    let done = server.admin("/api/project/main/runs/stop", json!({ "runs_names": [], "abort": false })).await;
    assert_eq!(done, Value::Null);
    server.stop().await;
}

#[tokio::test]
async fn health_and_server_info_need_no_token() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let (status, body) = server.get("", "/healthcheck").await;
    assert_eq!((status, body.as_slice()), (200, br#"{"status":"running"}"#.as_slice()));
    let (status, body) = server.post("", "/api/server/get_info", "").await;
    let ours = env!("CARGO_PKG_VERSION");
    let request =
        json!({ "server_version": "0.22.5", "windlass_version": ours, "upload_bytes_max": 64 << 20 });
    assert_eq!((status, body), (200, request));
    server.stop().await;
}

#[tokio::test]
async fn metrics_need_an_admin_and_name_no_user_or_project() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let mira = server.user("mira-the-canary").await;
    assert_eq!(server.get(&mira, "/metrics").await.0, 403);
    let (status, body) = server.get(ADMIN_TOKEN, "/metrics").await;
    let text = String::from_utf8(body).unwrap();
    assert_eq!(status, 200);
    assert!(
        text.contains(r#"windlass_http_requests_total{operation="create_user",status="200"} 1"#),
        "{text}"
    );
    assert!(!text.contains("canary"));
    server.stop().await;
}

#[tokio::test]
async fn a_safe_request_id_is_returned_in_the_response() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    for (sent, kept) in [("trace-1", true), ("a b", false), ("x\u{7f}", false)] {
        let stream = TcpStream::connect(&server.authority).await.unwrap();
        let mut stream = stream;
        let head = format!(
            "GET /healthcheck HTTP/1.1\r\nHost: a\r\nX-Request-Id: {sent}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        assert_eq!(answer.contains(&format!("x-request-id: {sent}\r\n")), kept, "{answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn error_statuses_and_codes_match_those_of_dstack() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    server.user("mira").await;
    let task = json!({ "configuration": { "type": "task", "commands": ["true"] } });
    let cases = [
        ("/api/users/create", json!({ "username": "Mira", "global_role": "user" }), "resource_exists"),
        ("/api/projects/create", json!({ "project_name": "MAIN" }), "resource_exists"),
        ("/api/runs/list", json!({ "username": "nobody" }), "resource_not_exists"),
        ("/api/runs/list", json!({ "project_name": "main", "repo_id": "ghost" }), "repo_does_not_exist"),
        ("/api/project/main/gpus/list", json!({ "run_spec": task, "group_by": ["gpu", "region"] }), "error"),
    ];
    for (path, body, code) in cases {
        server.refused(ADMIN_TOKEN, path, body, code).await;
    }
    let none = json!({ "project_name": "main", "repo_id": "none" });
    assert_eq!(server.admin("/api/runs/list", none).await, json!([]));
}

#[tokio::test]
async fn bodies_and_heads_that_are_too_large_are_refused() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let large = format!(r#"{{"name_pattern":"{}"}}"#, "x".repeat(2 * 1024 * 1024));
    assert_eq!(server.post(ADMIN_TOKEN, "/api/users/list", &large).await.0, 413);
    // An anonymous caller is refused before the body is read.
    assert_eq!(server.post("", "/api/users/list", &large).await.0, 403);
    let long = Request::get("/healthcheck")
        .header("host", "a")
        .header("x-long", "x".repeat(300 * 1024))
        .body(Full::new(Bytes::new()))
        .unwrap();
    assert_eq!(server.send(long).await.0, 431);
    let mut many = Request::get("/healthcheck").header("host", "a");
    for n in 0..200 {
        many = many.header(format!("x-{n}"), "1");
    }
    assert_eq!(server.send(many.body(Full::new(Bytes::new())).unwrap()).await.0, 431);
    server.stop().await;
}

#[tokio::test]
async fn hostile_names_are_refused_by_every_operation_that_takes_a_name() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let long = "a".repeat(300);
    let hostile = [
        "",
        "../x",
        "/etc/passwd",
        "a\u{0}b",
        "a\\b",
        "a b",
        "a\nb",
        "\u{202e}abc",
        "caf\u{e9}",
        "$(id)",
        "-rf",
        "--help",
        "..",
        ".",
        "/dev/null",
        "C:\\con",
        long.as_str(),
    ];
    let task = |name: &str| {
        json!({ "plan": { "run_spec": { "run_name": name,
        "configuration": { "type": "task", "commands": ["true"] } } } })
    };
    for name in hostile {
        let cases = [
            ("/api/users/create", json!({ "username": name, "global_role": "user" })),
            ("/api/projects/create", json!({ "project_name": name })),
            ("/api/project/main/secrets/create_or_update", json!({ "name": name, "value": "v" })),
            ("/api/project/main/runs/apply", task(name)),
            (
                "/api/project/main/fleets/apply",
                json!({ "plan": { "spec": { "profile": { "name": "p" },
                "configuration": { "type": "fleet", "name": name, "nodes": 1 } } } }),
            ),
            (
                "/api/project/main/volumes/create",
                json!({ "configuration": { "type": "volume", "name": name,
                "backend": "aws", "region": "r", "size": "1GB" } }),
            ),
        ];
        for (path, body) in cases {
            let (status, answer) = server.post(ADMIN_TOKEN, path, &body.to_string()).await;
            assert!(matches!(status, 400 | 422), "{path} takes {name:?}: {status} {answer}");
        }
        assert!(server.upload(ADMIN_TOKEN, "/api/files/upload_archive", "not-a-hash", b"x").await.0 == 400);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_stops_sending_is_disconnected() {
    let ground = ServerFixture::sqlite();
    let mut settings = Settings::new(SettingsSource { port: Some(0), ..ground.given() }, None).unwrap();
    settings.head_timeout = Duration::from_millis(100);
    let server = TestServer::start_with_settings(settings).await;
    let mut slow = TcpStream::connect(&server.authority).await.unwrap();
    slow.write_all(b"GET /healthcheck HTTP/1.1\r\nHost:").await.unwrap();
    let mut rest = Vec::new();
    // The timeout only keeps a failure short.
    let ended = tokio::time::timeout(Duration::from_secs(20), slow.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection is still open");
    server.stop().await;
}
