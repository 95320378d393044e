//! Callers that send too often, too slowly, or nothing at all.

use std::time::Duration;

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use windlass_server::{
    config::{Settings, SettingsSource},
    rate_limit::{Rate, RateLimits},
};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer};

fn fixture_settings(ground: &ServerFixture) -> Settings {
    let given = SettingsSource { port: Some(0), ..ground.given() };
    Settings { pipelines: false, ..Settings::new(given, None).unwrap() }
}

/// No tokens are refilled during a test.
fn burst_only(burst: u32) -> Rate {
    Rate { burst, per_second: 0 }
}

#[tokio::test]
async fn token_guessing_is_rate_limited_without_affecting_generated_tokens() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(fixture_settings(&ground)).await;
    let mira = server.user("mira").await;
    server.stop().await;
    let mut settings = fixture_settings(&ground);
    settings.paces = RateLimits { login: burst_only(5), ..RateLimits::default() };
    let server = TestServer::start_with_settings(settings).await;
    for guess in 0..5 {
        let token = format!("password{guess}");
        assert_eq!(server.post(&token, "/api/users/get_my_user", "").await.0, 403);
    }
    let (status, body) = server.post("password5", "/api/users/get_my_user", "").await;
    assert_eq!((status, &body["detail"]["code"]), (429, &serde_json::Value::Null), "{body}");
    assert_eq!(server.get("password6", "/metrics").await.0, 429);
    let drawn = "wl_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    assert_eq!(server.post(drawn, "/api/users/get_my_user", "").await.0, 429);
    // The right one of the guessable tokens is indistinguishable from a wrong one.
    assert_eq!(server.post(ADMIN_TOKEN, "/api/users/get_my_user", "").await.0, 429);
    server.ok(&mira, "/api/users/get_my_user", json!({})).await;
    assert_eq!(server.get("", "/healthcheck").await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn rapid_submits_are_rate_limited_per_user() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    settings.paces = RateLimits { submit: burst_only(3), logs: burst_only(2), ..RateLimits::default() };
    let server = TestServer::start_with_settings(settings).await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let task =
        json!({ "plan": { "run_spec": { "configuration": { "type": "task", "commands": ["true"] } } } });
    for _ in 0..3 {
        server.ok(&mira, "/api/project/main/runs/apply", task.clone()).await;
    }
    let request = Request::post("/api/project/main/runs/apply")
        .header("host", &server.authority)
        .header("authorization", format!("Bearer {mira}"))
        .body(Full::new(Bytes::from(task.to_string())))
        .unwrap();
    let (status, body) = server.send(request).await;
    assert_eq!(status, 429, "{}", String::from_utf8_lossy(&body));
    let poll = json!({ "run_name": "none", "job_submission_id": uuid::Uuid::nil() }).to_string();
    for _ in 0..2 {
        assert_eq!(server.post(&mira, "/api/project/main/logs/poll", &poll).await.0, 400);
    }
    assert_eq!(server.post(&mira, "/api/project/main/logs/poll", &poll).await.0, 429);
    // Requests that submit nothing, and those of other users, still succeed.
    server.ok(&mira, "/api/runs/list", json!({})).await;
    server.admin("/api/project/main/runs/apply", task).await;
    server.stop().await;
}

/// Sends `sent` and reads to the end; fails if the server never closes the connection.
async fn read_until_closed(server: &TestServer, sent: &[u8]) -> String {
    let mut stream = TcpStream::connect(&server.authority).await.unwrap();
    stream.write_all(sent).await.unwrap();
    let mut answer = Vec::new();
    // The timeout only keeps a failure short.
    let ended = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
    assert!(ended.is_ok(), "the connection is still open");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_request_with_a_missing_body_times_out() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    assert!(
        settings.head_timeout <= Duration::from_secs(30) && settings.body_timeout <= Duration::from_secs(30)
    );
    settings.body_timeout = Duration::from_millis(100);
    let server = TestServer::start_with_settings(settings).await;
    let head = format!(
        "POST /api/users/list HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
    );
    assert!(read_until_closed(&server, head.as_bytes()).await.starts_with("HTTP/1.1 408 "));
    server.stop().await;
}

#[tokio::test]
async fn an_upload_that_takes_too_long_is_refused_with_the_setting_name() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    settings.limits.upload_timeout = Duration::from_secs(1);
    let server = TestServer::start_with_settings(settings).await;
    let head = format!(
        "POST /api/files/upload_archive HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n\
         Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000\r\n\r\n--b\r\n"
    );
    let answer = read_until_closed(&server, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("took longer than 1 s") && answer.contains("`upload_timeout`"), "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn ambiguous_request_heads_are_refused() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(fixture_settings(&ground)).await;
    let hidden = "GET /healthcheck HTTP/1.1\r\nHost: a\r\n\r\n";
    for head in [
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: +4\r\n",
        "Content-Length: 4, 5\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "X: a\r\n b\r\n",
        "X\0: a\r\n",
        ": a\r\n",
        "X: a\0b\r\n",
    ] {
        let sent = format!(
            "POST /api/server/get_info HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{head}\r\n{hidden}"
        );
        let answer = read_until_closed(&server, sent.as_bytes()).await;
        let statuses = answer.matches("HTTP/1.1 ").count();
        assert!(statuses <= 1, "{head:?} hides a request: {answer}");
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{head:?}: {answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_request_with_two_host_headers_is_refused() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(fixture_settings(&ground)).await;
    let requested = |hosts: &str| format!("GET /healthcheck HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n");
    for hosts in ["Host: a\r\nHost: b\r\n", "Host: a\r\nX: y\r\nhost: a\r\n"] {
        let answer = read_until_closed(&server, requested(hosts).as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{hosts:?}: {answer}");
    }
    let answer = read_until_closed(&server, requested("Host: a\r\n").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    server.stop().await;
}

/// Ten thousand connections, or as many as the limit of open files permits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_idle_connections_do_not_block_requests() {
    let wanted: u64 = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    // Both ends are in this process.
    let room = limit.maximum.map_or(wanted, |most| most.saturating_sub(500) / 2);
    if room < wanted {
        println!("only {room} connections: the limit of open files is {:?}", limit.maximum);
    }
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(fixture_settings(&ground)).await;
    let mut idle = Vec::new();
    for at in 0..wanted.min(room) {
        let mut stream = TcpStream::connect(&server.authority).await.unwrap();
        // Some send nothing, some begin a request and stop.
        if at % 3 == 0 {
            stream.write_all(b"GET /healthcheck HTTP/1.1\r\nHost").await.unwrap();
        }
        idle.push(stream);
    }
    for _ in 0..20 {
        server.admin("/api/users/get_my_user", json!({})).await;
    }
    drop(idle);
    server.admin("/api/users/get_my_user", json!({})).await;
    server.stop().await;
}

#[tokio::test]
async fn a_request_over_a_limit_is_refused_with_the_setting_name() {
    let ground = ServerFixture::sqlite();
    let mut given = SettingsSource { port: Some(0), ..ground.given() };
    for (name, value) in [
        ("upload_max", "1KB"),
        ("request_max", "4KB"),
        ("projects_max", "1"),
        ("run_jobs_max", "2"),
        ("fleet_hosts_max", "1"),
        ("secret_max", "3"),
    ] {
        *given.limits.named(name).unwrap() = Some(value.to_owned());
    }
    let server =
        TestServer::start_with_settings(Settings { pipelines: false, ..Settings::new(given, None).unwrap() })
            .await;
    let file = vec![7_u8; 1025];
    let name = crate::http_secrets::sha256_hex(&file);
    let (status, body) = server.upload(ADMIN_TOKEN, "/api/files/upload_archive", &name, &file).await;
    assert_eq!((status, body.to_string().contains("`upload_max` (`--upload-max`)")), (413, true), "{body}");
    let (status, body) =
        server.post(ADMIN_TOKEN, "/api/users/list", &format!("\"{}\"", "x".repeat(5000))).await;
    assert_eq!((status, body.to_string().contains("`request_max`")), (413, true), "{body}");
    let mira = server.user("mira").await;
    let project = |name: &str| json!({ "project_name": name });
    server.ok(&mira, "/api/projects/create", project("first")).await;
    let message = server.refused(&mira, "/api/projects/create", project("second"), "error").await;
    assert!(message.contains("`projects_max`"), "{message}");
    let spec =
        json!({ "run_name": "wide", "configuration": { "type": "task", "commands": ["x"], "nodes": 3 } });
    let body = json!({ "plan": { "run_spec": spec }, "force": false });
    let message = server.refused(ADMIN_TOKEN, "/api/project/main/runs/apply", body, "error").await;
    assert!(message.contains("starts with 3 jobs") && message.contains("`run_jobs_max`"), "{message}");
    let secret = json!({ "name": "key", "value": "long" });
    let message =
        server.refused(ADMIN_TOKEN, "/api/project/main/secrets/create_or_update", secret, "error").await;
    assert!(message.contains("`secret_max`"), "{message}");
    let ssh = json!({ "user": "u", "identity_file": "f", "hosts": ["10.0.0.1", "10.0.0.2"] });
    let fleet = json!({ "configuration": { "type": "fleet", "name": "own", "ssh_config": ssh }, "profile": { "name": "x" } });
    let body = json!({ "plan": { "spec": fleet } });
    let message = server.refused(ADMIN_TOKEN, "/api/project/main/fleets/apply", body, "error").await;
    assert!(message.contains("`fleet_hosts_max`"), "{message}");
    server.stop().await;
}

#[tokio::test]
async fn uploads_of_one_user_are_limited_to_their_quota() {
    for ground in [ServerFixture::sqlite(), ServerFixture::postgres().await] {
        let mut given = SettingsSource { port: Some(0), ..ground.given() };
        *given.limits.named("uploads_max").unwrap() = Some("100KB".to_owned());
        let server = TestServer::start_with_settings(Settings {
            pipelines: false,
            ..Settings::new(given, None).unwrap()
        })
        .await;
        let mira = server.user("mira").await;
        let noor = server.user("noor").await;
        server.join("main", &[("mira", "user"), ("noor", "user")]).await;
        let upload = async |token: &str, path: &str, letter: u8, bytes: usize| {
            let file = vec![letter; bytes];
            server.upload(token, path, &crate::http_secrets::sha256_hex(&file), &file).await
        };
        let archive = "/api/files/upload_archive";
        let repo = json!({ "repo_id": "r", "repo_info": { "repo_type": "remote", "repo_name": "r" } });
        server.ok(&mira, "/api/project/main/repos/init", repo).await;
        let code = "/api/project/main/repos/upload_code?repo_id=r";
        assert_eq!(upload(&mira, archive, 1, 40 << 10).await.0, 200);
        assert_eq!(upload(&mira, code, 2, 40 << 10).await.0, 200, "both kinds count together");
        // A small upload counts as sixteen kilobytes.
        assert_eq!(upload(&mira, archive, 3, 1).await.0, 200);
        let (status, body) = upload(&mira, archive, 4, 16 << 10).await;
        let message = body.to_string();
        assert!(
            status == 413 && message.contains("102400 bytes") && message.contains("`uploads_max`"),
            "{message}"
        );
        let (status, body) = upload(&mira, code, 5, 16 << 10).await;
        assert!(status == 413 && body.to_string().contains("`keep_uploads`"), "{body}");
        // An upload that exists already does not count again, and those of other users do not count.
        assert_eq!(upload(&mira, archive, 1, 40 << 10).await.0, 200);
        assert_eq!(upload(&mira, code, 2, 40 << 10).await.0, 200);
        assert_eq!(upload(&noor, archive, 4, 60 << 10).await.0, 200);
        // Deleting an upload frees its share.
        let gone = json!({ "repos_ids": ["r"] });
        server.ok(&mira, "/api/project/main/repos/delete", gone).await;
        assert_eq!(upload(&mira, archive, 4, 40 << 10).await.0, 200);
        server.stop().await;
    }
}

#[tokio::test]
async fn log_streams_are_limited_per_user() {
    let ground = ServerFixture::sqlite();
    let mut given = SettingsSource { port: Some(0), ..ground.given() };
    *given.limits.named("streams_max").unwrap() = Some("2".to_owned());
    let server =
        TestServer::start_with_settings(Settings { pipelines: false, ..Settings::new(given, None).unwrap() })
            .await;
    let (mira, noor) = (server.user("mira").await, server.user("noor").await);
    server.join("main", &[("mira", "user"), ("noor", "user")]).await;
    let spec =
        json!({ "run_name": "long", "configuration": { "type": "task", "commands": ["x"], "image": "a" } });
    let run = server.ok(&mira, "/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec } })).await;
    let job = run["latest_job_submission"]["id"].as_str().unwrap().to_owned();
    // The head of the response; the body stays open.
    let follow = async |token: &str| {
        let mut stream = TcpStream::connect(&server.authority).await.unwrap();
        let head = format!(
            "GET /api/project/main/logs/stream?run_name=long&job_submission_id={job} HTTP/1.1\r\nHost: a\r\n\
             Authorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let read = stream.read(&mut answer).await.unwrap();
        (stream, String::from_utf8_lossy(&answer[..read]).into_owned())
    };
    let (first, message) = follow(&mira).await;
    assert!(message.starts_with("HTTP/1.1 200 "), "{message}");
    let (_second, message) = follow(&mira).await;
    assert!(message.starts_with("HTTP/1.1 200 "), "{message}");
    let (_, message) = follow(&mira).await;
    let is_reported = message.to_lowercase().contains("retry-after");
    assert!(
        message.starts_with("HTTP/1.1 429 ") && message.contains("`streams_max`") && is_reported,
        "{message}"
    );
    let (_others, message) = follow(&noor).await;
    assert!(message.starts_with("HTTP/1.1 200 "), "{message}");
    // A closed stream frees its slot as soon as the server has noticed.
    drop(first);
    let mut message = String::new();
    for _ in 0..500 {
        message = follow(&mira).await.1;
        if message.starts_with("HTTP/1.1 200 ") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(message.starts_with("HTTP/1.1 200 "), "{message}");
    server.stop().await;
}

#[tokio::test]
async fn managed_job_launches_count_against_the_submit_rate_limit() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    settings.paces = RateLimits { submit: burst_only(3), ..RateLimits::default() };
    let server = TestServer::start_with_settings(settings).await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let launch = json!({ "text": "run: sleep 1\n" });
    for _ in 0..3 {
        server.ok(&mira, "/api/project/main/jobs/launch", launch.clone()).await;
    }
    let (status, _) = server.post(&mira, "/api/project/main/jobs/launch", &launch.to_string()).await;
    assert_eq!(status, 429);
    // The admin has added a user and a member, which count too.
    server.admin("/api/project/main/jobs/launch", launch).await;
    server.stop().await;
}

/// A connection from one of the many loopback addresses.
async fn connect_from(address: &str, server: &TestServer) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
    socket.connect(server.authority.parse().unwrap()).await.unwrap()
}

const HEALTH: &str = "GET /healthcheck HTTP/1.1\r\nHost: a\r\n\r\n";

/// Reads one response to its end and returns the status line.
async fn read_status_line(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut all = Vec::new();
    loop {
        let mut piece = vec![0; 4096];
        // Shorter than the timeout for a request head: a caller that is served does not wait until the others are
        // closed.
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut piece)).await;
        let read = read.expect("it is answered").unwrap();
        assert!(read > 0, "it was closed");
        all.extend_from_slice(&piece[..read]);
        let text = String::from_utf8_lossy(&all).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(0_usize) {
            return head.lines().next().unwrap_or_default().to_owned();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_requests_from_one_address_do_not_block_others() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    settings.connections_max = Some(40);
    let server = TestServer::start_with_settings(settings).await;
    let known_requests = format!(
        "POST /api/users/get_my_user HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}"
    );
    let mut known = connect_from("127.0.0.1", &server).await;
    assert_eq!(read_status_line(&mut known, &known_requests).await, "HTTP/1.1 200 OK");
    let mut halves = Vec::new();
    for _ in 0..100 {
        let mut half = connect_from("127.0.0.1", &server).await;
        // The write fails if the connection is closed already.
        let _ = half.write_all(b"GET /healthcheck HTTP/1.1\r\nHost").await;
        halves.push(half);
    }
    // From another address, and from the same one.
    for address in ["127.0.0.2", "127.0.0.1"] {
        let mut stream = connect_from(address, &server).await;
        assert_eq!(read_status_line(&mut stream, HEALTH).await, "HTTP/1.1 200 OK", "{address}");
    }
    // An authenticated connection stays open.
    assert_eq!(read_status_line(&mut known, &known_requests).await, "HTTP/1.1 200 OK");
    // The oldest were closed, and no more than necessary.
    let mut open = 0;
    for half in &mut halves {
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_millis(50), half.read(&mut byte)).await;
        open += usize::from(read.is_err());
    }
    assert!((1..=10).contains(&open), "{open} are open");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_one_user_do_not_block_other_users() {
    let ground = ServerFixture::sqlite();
    let mut settings = fixture_settings(&ground);
    settings.connections_max = Some(40);
    let server = TestServer::start_with_settings(settings).await;
    let body = r#"{"username":"alice","global_role":"user"}"#;
    let (status, alice) = server.post(ADMIN_TOKEN, "/api/users/create", body).await;
    assert_eq!(status, 200, "{alice}");
    let request = |token: &str| {
        format!(
            "POST /api/users/get_my_user HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}"
        )
    };
    let of_alice = request(alice["creds"]["token"].as_str().unwrap());
    let mut idle = Vec::new();
    for _ in 0..60 {
        let mut stream = connect_from("127.0.0.1", &server).await;
        assert_eq!(read_status_line(&mut stream, &of_alice).await, "HTTP/1.1 200 OK");
        idle.push(stream);
    }
    let mut other = connect_from("127.0.0.1", &server).await;
    assert_eq!(read_status_line(&mut other, &request(ADMIN_TOKEN)).await, "HTTP/1.1 200 OK");
    // The newest is still open, and those above the share of the user were closed.
    let mut newest = idle.pop().unwrap();
    assert_eq!(read_status_line(&mut newest, &of_alice).await, "HTTP/1.1 200 OK");
    for (at, stream) in idle.iter_mut().take(30).enumerate() {
        // An idle connection is closed after 30 s even if its user has no more than a share.
        let end = tokio::time::timeout(Duration::from_secs(15), stream.read(&mut [0])).await;
        assert!(matches!(end, Ok(Ok(0) | Err(_))), "connection {at} is still open");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deeply_nested_documents_are_refused_by_every_operation_that_takes_one() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(fixture_settings(&ground)).await;
    let deep = format!("{}1{}", "{\"a\":".repeat(200), "}".repeat(200));
    for (path, body) in [
        ("runs/get_plan", format!(r#"{{"run_spec":{deep}}}"#)),
        ("runs/apply", format!(r#"{{"plan":{{"run_spec":{deep}}},"force":false}}"#)),
        ("gpus/list", format!(r#"{{"run_spec":{deep}}}"#)),
        ("fleets/get_plan", format!(r#"{{"spec":{deep}}}"#)),
        ("fleets/apply", format!(r#"{{"plan":{{"spec":{deep}}},"force":false}}"#)),
        ("volumes/create", format!(r#"{{"configuration":{deep}}}"#)),
        ("gateways/create", format!(r#"{{"configuration":{deep}}}"#)),
        ("gateways/apply", format!(r#"{{"plan":{{"spec":{{"configuration":{deep}}}}},"force":false}}"#)),
        ("repos/init", format!(r#"{{"repo_id":"r","repo_info":{deep}}}"#)),
        ("secrets/create_or_update", format!(r#"{{"name":"a","value":"b","unknown":{deep}}}"#)),
    ] {
        let (status, answer) = server.post(ADMIN_TOKEN, &format!("/api/project/main/{path}"), &body).await;
        assert!(
            status == 422 && answer.to_string().contains("nested too deeply"),
            "{path}: {status} {answer}"
        );
    }
    server.stop().await;
}
