//! Selection of the replica: balancing, failures, departures, and services scaled to zero.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{io::AsyncWriteExt as _, sync::Notify};
use windlass_gateway::{
    DrainOutcome, ProxyLimits,
    route::{Balance, ReplicaRoute, ReplicaTarget, Service},
};

use crate::support::{
    TestProxy, TestSettings, Upstream, default_settings, read_head, read_until, service, text_response,
    unused_address, wait_until, with_timeout,
};

fn sleepy(replicas: Vec<ReplicaRoute>, hold_ms: u64) -> Service {
    Service { hold_ms, ..service(replicas) }
}

async fn unreachable_replica(id: &str) -> ReplicaRoute {
    ReplicaRoute { id: id.to_owned(), target: ReplicaTarget::Tcp { address: unused_address().await } }
}

#[tokio::test]
async fn requests_are_balanced_round_robin() {
    let (a, b, c) =
        (Upstream::replying("a").await, Upstream::replying("b").await, Upstream::replying("c").await);
    let bed = TestProxy::new(vec![service(vec![a.replica("a"), b.replica("b"), c.replica("c")])]).await;
    let mut all = String::new();
    for _ in 0..9 {
        all.push_str(&bed.get("/").await.body);
    }
    assert_eq!(all, "abcabcabc");
}

#[tokio::test]
async fn the_least_busy_replica_gets_the_request() {
    let slow = Upstream::http(|_| async { std::future::pending().await }).await;
    let fast = Upstream::replying("fast").await;
    let mut least = service(vec![slow.replica("slow"), fast.replica("fast")]);
    least.balance = Balance::LeastOutstanding;
    let bed = TestProxy::new(vec![least]).await;
    let live = bed.routes.service("main/llm").unwrap();
    // Both are free: the first in the list gets the request and does not answer it.
    let mut stuck = bed.connect().await;
    stuck.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    wait_until("one is busy", || live.replicas()[0].outstanding() == 1).await;
    for _ in 0..10 {
        assert_eq!(bed.get("/").await.body, "fast");
    }
    drop(stuck);
}

#[tokio::test]
async fn an_unreachable_replica_fails_no_request() {
    let alive = Upstream::replying("alive").await;
    let bed = TestProxy::new(vec![service(vec![
        unreachable_replica("a").await,
        unreachable_replica("b").await,
        alive.replica("c"),
    ])])
    .await;
    for _ in 0..30 {
        // Nothing was sent to the dead ones, so this holds for every method.
        let got = bed.request("POST", "/", &[], "x").await;
        assert_eq!((got.status, got.body.as_str()), (200, "alive"));
    }
    // They are avoided after the first failure.
    let tries: u32 = bed.seen.records.lock().iter().map(|record| record.attempts).sum();
    assert!(tries < 60, "{tries} tries for 30 requests");
}

#[tokio::test]
async fn only_idempotent_requests_are_retried_after_a_closed_connection() {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    let rude = Upstream::raw(move |mut stream| {
        let seen = Arc::clone(&seen);
        async move {
            // Reads the request, then closes the connection without a response.
            read_head(&mut stream).await;
            seen.fetch_add(1, Ordering::SeqCst);
        }
    })
    .await;
    let kind = Upstream::echo().await;
    let fresh = || service(vec![rude.replica("rude"), kind.replica("kind")]);
    let bed = TestProxy::new(vec![fresh()]).await;
    for method in ["GET", "PUT", "DELETE", "HEAD"] {
        for _ in 0..2 {
            let body = if method == "PUT" { "again" } else { "" };
            let got = bed.request(method, "/", &[], body).await;
            assert_eq!(got.status, 200, "{method}");
            assert!(method == "HEAD" || got.body.ends_with(body), "{method}: {}", got.body);
        }
        // A new address is a new replica, without earlier failures.
        bed.replace(vec![service(vec![])]);
        bed.replace(vec![fresh()]);
    }
    assert!(count.load(Ordering::SeqCst) >= 4);
    count.store(0, Ordering::SeqCst);
    let mut failed = 0;
    for _ in 0..2 {
        failed += usize::from(bed.request("POST", "/", &[], "once").await.status == 502);
    }
    assert_eq!((failed, count.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn an_idle_connection_closed_by_the_replica_fails_no_request() {
    // Answers one request on each connection, announces keep-alive, and closes it.
    let upstream = Upstream::raw(|mut stream| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
    })
    .await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    for _ in 0..50 {
        assert_eq!(bed.get("/").await.status, 200);
    }
}

#[tokio::test]
async fn a_replica_marked_down_gets_no_requests_until_it_is_up() {
    let (a, b) = (Upstream::replying("a").await, Upstream::replying("b").await);
    let bed = TestProxy::new(vec![service(vec![a.replica("a"), b.replica("b")])]).await;
    let live = bed.routes.service("main/llm").unwrap();
    live.replicas()[0].set_down(true);
    for _ in 0..6 {
        assert_eq!(bed.get("/").await.body, "b");
    }
    live.replicas()[1].set_down(true);
    assert_eq!(bed.get("/").await.status, 503);
    live.replicas()[0].set_down(false);
    assert_eq!(bed.get("/").await.body, "a");
}

#[tokio::test]
async fn a_removed_replica_finishes_its_open_requests() {
    let (go, arrived) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (go_on, came) = (Arc::clone(&go), Arc::clone(&arrived));
    let old = Upstream::http(move |_| {
        let (go, arrived) = (Arc::clone(&go_on), Arc::clone(&came));
        async move {
            arrived.notify_one();
            go.notified().await;
            text_response("old")
        }
    })
    .await;
    let new = Upstream::replying("new").await;
    let bed = TestProxy::new(vec![service(vec![old.replica("old")])]).await;
    let mut stream = bed.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    with_timeout(arrived.notified()).await;
    let leaving = bed.replace(vec![service(vec![new.replica("new")])]);
    assert_eq!(leaving.iter().map(|replica| replica.id()).collect::<Vec<_>>(), ["old"]);
    assert_eq!(bed.get("/").await.body, "new");
    assert_eq!(leaving[0].drain(Duration::from_millis(10)).await, DrainOutcome::Cut(1));
    go.notify_one();
    read_until(&mut stream, "old").await;
    assert_eq!(leaving[0].drain(Duration::from_secs(20)).await, DrainOutcome::Clean);
}

#[tokio::test]
async fn a_thousand_route_changes_fail_no_request() {
    let (a, b) = (Upstream::replying("a").await, Upstream::replying("b").await);
    let bed = Arc::new(TestProxy::new(vec![service(vec![a.replica("a")])]).await);
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let bed = Arc::clone(&bed);
            tokio::spawn(async move {
                let mut stream = bed.connect().await;
                for _ in 0..200 {
                    stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
                    let head = read_head(&mut stream).await;
                    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
                    let mut body = [0];
                    with_timeout(tokio::io::AsyncReadExt::read_exact(&mut stream, &mut body)).await.unwrap();
                }
            })
        })
        .collect();
    for n in 0..1000 {
        let (id, replica) = if n % 2 == 0 { ("b", &b) } else { ("a", &a) };
        bed.replace(vec![service(vec![replica.replica(&format!("{id}{n}"))])]);
        tokio::task::yield_now().await;
    }
    for caller in callers {
        with_timeout(caller).await.unwrap();
    }
}

#[tokio::test]
async fn a_route_snapshot_that_is_not_newer_is_rejected() {
    let bed = TestProxy::new(vec![]).await;
    let snapshot = bed.routes.snapshot();
    let stale = bed.routes.replace(snapshot).unwrap_err();
    assert_eq!((stale.current, stale.offered), (1, 1));
}

#[tokio::test]
async fn a_request_to_a_service_scaled_to_zero_wakes_it_and_waits() {
    let upstream = Upstream::replying("awake").await;
    let bed = Arc::new(TestProxy::new(vec![sleepy(vec![], 30_000)]).await);
    let caller = Arc::clone(&bed);
    let request = tokio::spawn(async move { caller.request("POST", "/", &[], "x").await });
    wait_until("it was woken", || !bed.seen.woken.lock().is_empty()).await;
    let live = bed.routes.service("main/llm").unwrap();
    wait_until("it waits", || live.stats().read().held == 1).await;
    assert!(!request.is_finished());
    bed.replace(vec![sleepy(vec![upstream.replica("a")], 30_000)]);
    let got = with_timeout(request).await.unwrap();
    assert_eq!((got.status, got.body.as_str()), (200, "awake"));
    assert_eq!((live.stats().read().held, bed.seen.woken.lock()[0].as_str()), (0, "main/llm"));
}

#[tokio::test]
async fn held_requests_are_limited_in_time_and_number() {
    let bounds = ProxyLimits { held_max: 1, ..ProxyLimits::USUAL };
    let bed = Arc::new(
        TestProxy::with(TestSettings { bounds, ..default_settings() }, vec![sleepy(vec![], 20)]).await,
    );
    let got = bed.get("/").await;
    assert_eq!((got.status, got.field("retry-after")), (503, "5"));
    assert!(got.body.contains("no ready replica yet"), "{}", got.body);
    // One request waits for long; the next does not wait at all.
    bed.replace(vec![sleepy(vec![], 60_000)]);
    let mut first = bed.connect().await;
    first.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    let live = bed.routes.service("main/llm").unwrap();
    wait_until("one waits", || live.stats().read().held == 1).await;
    assert_eq!(bed.get("/").await.status, 503);
    // A caller that disconnects no longer waits.
    drop(first);
    wait_until("nobody waits", || live.stats().read().held == 0).await;
}

#[tokio::test]
async fn a_held_request_succeeds_after_its_dead_replica_is_replaced() {
    let upstream = Upstream::replying("new").await;
    let bed = Arc::new(TestProxy::new(vec![sleepy(vec![unreachable_replica("old").await], 30_000)]).await);
    let caller = Arc::clone(&bed);
    let request = tokio::spawn(async move { caller.get("/").await });
    let live = bed.routes.service("main/llm").unwrap();
    wait_until("it waits", || live.stats().read().held == 1).await;
    bed.replace(vec![sleepy(vec![upstream.replica("new")], 30_000)]);
    assert_eq!(with_timeout(request).await.unwrap().body, "new");
}

#[tokio::test]
async fn requests_above_the_concurrency_limit_of_a_replica_wait() {
    let gate = Arc::new(Notify::new());
    let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (opened, count, peak) = (Arc::clone(&gate), Arc::clone(&at_once), Arc::clone(&most));
    let slow = Upstream::http(move |_| {
        let (gate, count, peak) = (Arc::clone(&opened), Arc::clone(&count), Arc::clone(&peak));
        async move {
            peak.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            gate.notified().await;
            count.fetch_sub(1, Ordering::SeqCst);
            text_response("done")
        }
    })
    .await;
    let bounded = Service { at_once: Some(2), ..sleepy(vec![slow.replica("a")], 20_000) };
    let bed = Arc::new(TestProxy::new(vec![bounded]).await);
    let live = bed.routes.service("main/llm").unwrap();
    let requested: Vec<_> = (0..5)
        .map(|_| {
            let bed = Arc::clone(&bed);
            tokio::spawn(async move { bed.get("/").await })
        })
        .collect();
    wait_until("two are served and three wait", || {
        let read = live.stats().read();
        at_once.load(Ordering::SeqCst) == 2 && read.held == 3
    })
    .await;
    // Each answered request makes capacity for one that waits.
    for left in [2, 1, 0] {
        gate.notify_one();
        wait_until("one more is served", || {
            at_once.load(Ordering::SeqCst) == 2 && live.stats().read().held == left
        })
        .await;
    }
    gate.notify_one();
    gate.notify_one();
    for one in requested {
        let got = one.await.unwrap();
        assert_eq!((got.status, got.body.as_str()), (200, "done"));
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
    assert!(live.stats().busy(std::time::Instant::now()).held_us > 0);
}

#[tokio::test]
async fn a_request_that_waits_too_long_for_a_free_replica_gets_503() {
    let stuck = Upstream::http(|_| async { std::future::pending().await }).await;
    let bed =
        TestProxy::new(vec![Service { at_once: Some(1), ..sleepy(vec![stuck.replica("a")], 300) }]).await;
    let live = bed.routes.service("main/llm").unwrap();
    let mut first = bed.connect().await;
    first.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    wait_until("it is busy", || live.replicas()[0].outstanding() == 1).await;
    let got = bed.get("/").await;
    assert_eq!((got.status, got.body.trim()), (503, "all replicas of the service are busy"));
}
