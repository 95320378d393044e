//! Requests as a replica receives them, and responses as a caller receives them.

use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use windlass_gateway::route::ReplicaTarget;
use windlass_testkit::temp_dir;

use crate::support::{
    TestProxy, TestResponse, Upstream, path_settings, read_head, read_until, service, text_response,
    unused_address, with_timeout,
};

#[tokio::test]
async fn a_request_routed_by_host_reaches_the_replica_with_trusted_forwarding_headers() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let got =
        bed.request("PUT", "/x?y=%20z", &[("X-Forwarded-For", "10.9.9.9"), ("X-Mine", "1")], "hello").await;
    assert_eq!(got.status, 200);
    let expect = "PUT /x?y=%20z\nhost: llm.test\nx-mine: 1\nx-forwarded-for: 127.0.0.1\n\
                  x-forwarded-proto: http\nx-forwarded-host: llm.test\ncontent-length: 5\n\nhello";
    assert_eq!(got.body, expect);
}

#[tokio::test]
async fn hosts_match_exact_names_then_wildcards_and_others_get_404() {
    let (a, b) = (Upstream::replying("a").await, Upstream::replying("b").await);
    let mut star = service(vec![b.replica("b")]);
    star.run = "star".to_owned();
    star.domains = vec!["*.test".to_owned()];
    let bed = TestProxy::new(vec![service(vec![a.replica("a")]), star]).await;
    for (host, body) in [("llm.test", "a"), ("LLM.Test:8443", "a"), ("x.test", "b")] {
        let got = bed.raw(format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).await;
        assert_eq!(TestResponse::parse(&got).body, body, "{host}");
    }
    for host in ["other.example", "a.b.test", "test", "[::1]:80"] {
        let got = bed.raw(format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).await;
        assert_eq!(TestResponse::parse(&got).status, 404, "{host}");
    }
}

#[tokio::test]
async fn path_prefix_is_stripped_unless_disabled_and_forwarded_in_a_header() {
    let upstream = Upstream::echo().await;
    let mut whole = service(vec![upstream.replica("a")]);
    whole.run = "whole".to_owned();
    whole.strip_prefix = false;
    let bed = TestProxy::with(path_settings(), vec![service(vec![upstream.replica("a")]), whole]).await;
    let got = bed.get("/proxy/services/main/llm/v1/x?q=1").await;
    assert!(got.body.starts_with("GET /v1/x?q=1\n"), "{}", got.body);
    assert!(got.body.contains("x-forwarded-prefix: /proxy/services/main/llm\n"), "{}", got.body);
    let got = bed.get("/proxy/services/main/whole/v1").await;
    assert!(got.body.starts_with("GET /proxy/services/main/whole/v1\n"), "{}", got.body);
    let got = bed.get("/proxy/services/main/llm?q=1").await;
    assert_eq!((got.status, got.field("location")), (308, "/proxy/services/main/llm/?q=1"));
    for path in ["/proxy/services/main", "/"] {
        assert_eq!(bed.get(path).await.status, 404, "{path}");
    }
    assert_eq!(bed.get("/proxy/services/main/../main/llm/").await.status, 401);
}

#[tokio::test]
async fn only_members_of_a_project_learn_which_services_it_has() {
    let upstream = Upstream::echo().await;
    let mut closed = service(vec![upstream.replica("a")]);
    closed.auth = true;
    let bed = TestProxy::with(path_settings(), vec![closed]).await;
    for (token, there, missing) in [(None, 401, 401), (Some("bad"), 403, 403), (Some("good"), 200, 404)] {
        let status = async |run: &str| {
            let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
            let path = format!("/proxy/services/main/{run}/");
            let request = format!("GET {path} HTTP/1.1\r\nHost: x.test\r\n{token}Connection: close\r\n\r\n");
            TestResponse::parse(&bed.raw(request).await).status
        };
        assert_eq!((status("llm").await, status("other").await), (there, missing), "{token:?}");
    }
    for run in ["llm", "other"] {
        assert_eq!(bed.get(&format!("/proxy/services/main/{run}")).await.status, 308, "{run}");
    }
}

#[tokio::test]
async fn http_is_redirected_to_https_if_the_service_requires_it() {
    let upstream = Upstream::echo().await;
    let mut service = service(vec![upstream.replica("a")]);
    service.https = true;
    let bed = TestProxy::new(vec![service]).await;
    let got = bed.get("/x?y").await;
    assert_eq!((got.status, got.field("location")), (308, "https://llm.test/x?y"));
}

#[tokio::test]
async fn client_and_replica_connections_are_reused() {
    let upstream = Upstream::replying("hello").await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    for _ in 0..20 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
        assert!(read_until(&mut stream, "hello").await.starts_with("HTTP/1.1 200"));
    }
    // Pipelined requests too, in order.
    stream
        .write_all(b"GET /1 HTTP/1.1\r\nHost: llm.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: llm.test\r\n\r\n")
        .await
        .unwrap();
    for _ in 0..2 {
        read_until(&mut stream, "hello").await;
    }
    assert_eq!(upstream.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_replica_on_a_unix_socket_is_reached() {
    let folder = temp_dir("proxying").unwrap();
    let path = folder.path().join("replica.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let task = crate::support::AbortOnDrop(tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        let _ = stream.read(&mut head).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
    }));
    let replica = windlass_gateway::route::ReplicaRoute {
        id: "a".to_owned(),
        target: ReplicaTarget::Unix { path: path.clone() },
    };
    let bed = TestProxy::new(vec![service(vec![replica])]).await;
    let got = bed.get("/").await;
    assert_eq!((got.status, got.body.as_str()), (200, "ok"));
    drop(task);
}

#[tokio::test]
async fn a_response_without_a_body_keeps_its_headers() {
    let upstream = Upstream::raw(|mut stream| async move {
        loop {
            let head = read_head(&mut stream).await;
            let answer = if head.starts_with("HEAD") {
                "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nETag: x\r\n\r\n"
            } else {
                "HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"
            };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let got = bed.request("HEAD", "/", &[], "").await;
    assert_eq!((got.status, got.field("content-length"), got.body.as_str()), (200, "12345", ""));
    let got = bed.get("/").await;
    assert_eq!((got.status, got.field("etag"), got.body.as_str()), (304, "x", ""));
    assert_eq!(upstream.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_invalid_replica_response_gets_502_with_an_explanation() {
    for (says, status, words) in [
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            502,
            "ambiguous body length",
        ),
        ("SSH-2.0-OpenSSH\r\n\r\n", 502, "not HTTP/1"),
        ("HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", 502, "without an upgrade request"),
        ("", 502, "closed the connection before it responded"),
        ("HTTP/1.1 200 OK\r\nContent-Le", 502, "in the middle"),
    ] {
        let upstream = Upstream::raw(move |mut stream| async move {
            read_head(&mut stream).await;
            stream.write_all(says.as_bytes()).await.unwrap();
        })
        .await;
        let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
        let got = bed.request("POST", "/", &[], "").await;
        assert_eq!(got.status, status, "{says}");
        assert!(got.body.contains(words), "{says}: {}", got.body);
    }
}

#[tokio::test]
async fn unreachable_missing_and_slow_replicas_get_502_503_and_504() {
    let address = unused_address().await;
    let replica =
        windlass_gateway::route::ReplicaRoute { id: "a".to_owned(), target: ReplicaTarget::Tcp { address } };
    let bed = TestProxy::new(vec![service(vec![replica])]).await;
    let got = bed.get("/").await;
    assert_eq!(got.status, 502);
    assert!(got.body.contains("no replica of the service can be reached"), "{}", got.body);
    bed.replace(vec![service(vec![])]);
    let got = bed.get("/").await;
    assert_eq!((got.status, got.field("retry-after")), (503, "5"));

    let upstream = Upstream::http(|_| async { std::future::pending().await }).await;
    let mut slow = service(vec![upstream.replica("a")]);
    slow.answer_ms = 50;
    bed.replace(vec![slow]);
    assert_eq!(bed.get("/").await.status, 504);
}

#[tokio::test]
async fn interim_responses_of_a_replica_are_not_forwarded() {
    let upstream = Upstream::raw(|mut stream| async move {
        read_head(&mut stream).await;
        let says = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n\
                    HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        stream.write_all(says.as_bytes()).await.unwrap();
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let got = bed.get("/").await;
    assert_eq!((got.status, got.body.as_str(), got.field("link")), (200, "ok", ""));
}

#[tokio::test]
async fn a_finished_request_is_counted_and_logged() {
    let upstream = Upstream::http(|_| async { text_response("0123456789") }).await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    bed.request("POST", "/x", &[], "abc").await;
    bed.get("/y?secret=1").await;
    let live = bed.routes.service("main/llm").unwrap();
    crate::support::wait_until("both are over", || bed.seen.records.lock().len() == 2).await;
    let read = live.stats().read();
    assert_eq!((read.requests, read.in_flight, read.classes[1]), (2, 0, 2));
    assert_eq!((read.bytes_in, read.bytes_out, read.buckets.iter().sum::<u64>()), (3, 20, 2));
    let records = bed.seen.records.lock();
    let record = &records[0];
    assert_eq!((&*record.service, record.replica.as_deref()), ("main/llm", Some("a")));
    assert_eq!((record.status.as_u16(), record.bytes_in, record.bytes_out, record.attempts), (200, 3, 10, 1));
    assert!(!record.is_truncated);
    // A change of routes keeps the counters.
    drop(records);
    bed.replace(vec![service(vec![])]);
    assert_eq!(bed.routes.service("main/llm").unwrap().stats().read().requests, 2);
}

#[tokio::test]
async fn a_client_that_disconnects_is_logged_with_status_499() {
    let upstream = Upstream::http(|_| async { std::future::pending().await }).await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    let live = bed.routes.service("main/llm").unwrap();
    crate::support::wait_until("it is under way", || live.replicas()[0].outstanding() == 1).await;
    drop(stream);
    crate::support::wait_until("it is over", || live.stats().read().in_flight == 0).await;
    assert_eq!(live.replicas()[0].outstanding(), 0);
    assert_eq!(bed.seen.records.lock()[0].status.as_u16(), 499);
    with_timeout(async {}).await;
}
