//! The connection to a replica: tokens, paths, streams, restarts, the end.

use std::io::{Read as _, Write as _};

use serde_json::json;
use sha2::{Digest as _, Sha256};
use windlass_testenv::services::{ServiceCaller, free_port, probe_config, read, read_until, service_config};
use windlass_testkit::lab::Lab;

use super::wait_for_answer;
use crate::{
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

#[tokio::test]
async fn only_members_reach_a_service_through_the_server_and_it_streams_both_ways() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    env.apply(&service_config("page", free_port())).await;
    let caller = ServiceCaller::new(env.address());
    let got = wait_for_answer(&mut env, &caller, "/proxy/services/main/page/a/b?c=d", 200, "version=1").await;
    // The replica gets its own path, and does not receive the token.
    assert!(got.body.contains(" path=/a/b?c=d token=none\n"), "{}", got.body);
    let run = env.run("page").await;
    assert_eq!(run["service"]["url"], "/proxy/services/main/page/");

    for (token, status) in [(None, 401), (Some("wrong"), 403)] {
        let got = caller.with_token(token).get("/proxy/services/main/page/").unwrap();
        assert_eq!(got.status, status, "{got:?}");
    }
    for (path, status) in [
        ("/proxy/services/main/nobody/", 404),
        ("/proxy/services/other/page/", 403),
        ("/proxy/services/main", 404),
    ] {
        assert_eq!(caller.get(path).unwrap().status, status, "{path}");
    }
    for (token, status) in [(None, 401), (Some("wrong"), 403)] {
        let got = caller.with_token(token).get("/proxy/services/main/nobody/").unwrap();
        assert_eq!(got.status, status, "as of a service that is there: {got:?}");
    }
    assert_eq!(caller.get("/proxy/services/main/page").unwrap().status, 308);

    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let got = caller.request("POST", "/proxy/services/main/page/sum", &body).unwrap();
    let want: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((got.status, got.body), (200, want));

    // An event is forwarded when it is written, not when the response ends.
    let mut events = caller.send("GET", "/proxy/services/main/page/sse", "", b"").unwrap();
    let seen = read_until(&mut events, "data: one\n\n");
    assert!(!seen.contains("data: two"), "{seen}");
    assert_eq!(caller.get("/proxy/services/main/page/open").unwrap().status, 200);
    read_until(&mut events, "data: two\n\n");

    let upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let mut socket = caller.send("GET", "/proxy/services/main/page/ws", upgrade, b"").unwrap();
    let head = read_until(&mut socket, "\r\n\r\n").to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    for word in ["ping", "and again"] {
        socket.write_all(word.as_bytes()).unwrap();
        let mut back = vec![0; word.len()];
        socket.read_exact(&mut back).unwrap();
        assert_eq!(back, word.as_bytes());
    }
    drop(socket);

    let metrics = caller.get("/metrics").unwrap().body;
    for line in [
        "windlass_service_replicas{project=\"main\",run=\"page\"} 1",
        "windlass_service_requests_total{project=\"main\",run=\"page\",class=\"4xx\"} 2",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let log = std::fs::read_to_string(env.home().join("server.log")).unwrap();
    assert!(log.contains("/proxy/services/main/page/a/b") && !log.contains("c=d"), "{log}");
}

#[tokio::test]
async fn a_model_is_listed_and_its_chat_is_streamed_by_the_service_that_serves_it() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let port = free_port();
    let mut chat = service_config("chat", port);
    // Ready when it answers a chat request, which is the default probe of a model.
    chat["model"] = json!("tiny");
    env.apply(&chat).await;
    let caller = ServiceCaller::new(env.address());
    wait_for_answer(
        &mut env,
        &caller,
        "/metrics",
        200,
        "windlass_service_replicas{project=\"main\",run=\"chat\"} 1",
    )
    .await;
    let list = caller.get("/proxy/models/main/models").unwrap();
    let list: serde_json::Value = serde_json::from_str(&list.body).unwrap();
    assert_eq!((&list["data"][0]["id"], list["data"].as_array().unwrap().len()), (&json!("tiny"), 1));
    let path = "/proxy/models/main/chat/completions";
    assert_eq!(caller.with_token(None).request("POST", path, b"{}").unwrap().status, 401);
    assert_eq!(caller.request("POST", path, br#"{"model": "other"}"#).unwrap().status, 404);
    let body = br#"{"model": "tiny", "stream": true, "messages": []}"#;
    let mut events = caller.send("POST", path, "Content-Type: application/json\r\n", body).unwrap();
    let seen = read_until(&mut events, "data: {}\n\n");
    assert!(seen.starts_with("HTTP/1.1 200") && !seen.contains("[DONE]"), "{seen}");
    assert_eq!(caller.get("/proxy/services/main/chat/open").unwrap().status, 200);
    read_until(&mut events, "data: [DONE]\n\n");
}

#[tokio::test]
async fn a_restarted_or_killed_server_keeps_its_services_and_a_stop_drains_requests() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let port = free_port();
    let mut open = service_config("open", port);
    open["auth"] = json!(false);
    env.apply(&open).await;
    let nobody = ServiceCaller::new(env.address()).with_token(None);
    let first = wait_for_answer(&mut env, &nobody, "/proxy/services/main/open/", 200, "replica=").await;
    for is_killed in [false, true] {
        if is_killed {
            env.kill();
        } else {
            env.stop_server();
        }
        env.start().await;
        // The first request reaches it.
        let got =
            ServiceCaller::new(env.address()).with_token(None).get("/proxy/services/main/open/").unwrap();
        assert_eq!((got.status, &got.body), (200, &first.body), "{}", env.server_log());
    }

    let nobody = ServiceCaller::new(env.address()).with_token(None);
    let slow = nobody.send("GET", "/proxy/services/main/open/slow", "Connection: close\r\n", b"").unwrap();
    // The request has arrived when the server's metrics show it.
    let (admin, timeout) = (ServiceCaller::new(env.address()), std::time::Instant::now());
    let in_flight = "windlass_service_in_flight{project=\"main\",run=\"open\"} 1";
    while !admin.get("/metrics").unwrap().body.contains(in_flight) {
        assert!(timeout.elapsed() < super::TIMEOUT);
    }
    env.stop("open", false).await;
    let drains = env.eventually_run("open", super::TIMEOUT, |run| {
        let last = run["jobs"][0]["job_submissions"].as_array().unwrap().last().unwrap();
        last["status_message"] == "waiting for requests in flight"
    });
    drains.await;
    // It receives no further requests, and lives until it has answered.
    assert_eq!(nobody.get("/proxy/services/main/open/").unwrap().status, 401);
    let itself = ServiceCaller::new(&format!("127.0.0.1:{port}")).with_token(None);
    assert_eq!(itself.get("/open").unwrap().status, 200);
    let got = read(slow).unwrap();
    assert_eq!((got.status, got.body.as_str()), (200, "slow"));
    env.reaches("open", &["terminated"]).await;
    assert_eq!(nobody.get("/proxy/services/main/open/").unwrap().status, 401);
}

#[tokio::test]
async fn requests_reach_replicas_on_ssh_hosts_and_none_fails_when_one_is_killed() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let mut pair = service_config("pair", 8000);
    pair["replicas"] = json!(2);
    pair["retry"] = json!(true);
    pair["probes"] = probe_config();
    env.apply(&pair).await;
    let caller = ServiceCaller::new(env.address());
    let path = "/proxy/services/main/pair/";
    let metrics = "windlass_service_replicas{project=\"main\",run=\"pair\"} 2";
    wait_for_answer(&mut env, &caller, path, 200, "replica=").await;
    wait_for_answer(&mut env, &caller, "/metrics", 200, metrics).await;
    let mut replicas: Vec<String> = (0..4).map(|_| caller.get(path).unwrap().body).collect();
    replicas.sort_unstable();
    replicas.dedup();
    assert_eq!(replicas.len(), 2, "{replicas:?}");

    let killed = lab.host(1).run("kill -9 $(pgrep -f 'python3 -c' | head -n 1)").unwrap();
    assert!(killed.status.success(), "{killed:?}");
    let submissions = |run: &serde_json::Value| {
        let jobs = run["jobs"].as_array().unwrap();
        jobs.iter().map(|job| job["job_submissions"].as_array().unwrap().len()).sum::<usize>()
    };
    let mut count = 0;
    let start = std::time::Instant::now();
    loop {
        let got = caller.get(path).unwrap_or_else(|error| panic!("{error}\n{}", env.server_log()));
        assert_eq!(got.status, 200, "{got:?}\n{}", env.server_log());
        count += 1;
        // Until the retried replica receives requests again.
        if count % 50 == 0 && submissions(&env.run("pair").await) == 3 {
            let ready = caller.get("/metrics").unwrap().body.contains(metrics);
            if ready {
                break;
            }
        }
        assert!(start.elapsed() < super::TIMEOUT, "{:#}\n{}", env.run("pair").await, env.server_log());
    }
}
