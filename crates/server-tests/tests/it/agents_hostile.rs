//! A hostile host that lies, responds slowly and sends without end: memory stays bounded, nothing hangs, and no other
//! host is affected.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use tokio::{net::UnixListener, sync::Notify};
use windlass_api::agent::LOG_END_HEADER;
use windlass_backend::AgentEndpoint;
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_server::agents::{AgentApi, AgentError, CALL_TIMEOUT, enrolment};
use windlass_testkit::wait::eventually_async;

use crate::agents_host::{AgentTestEnv, call_context};

type Body = UnsyncBoxBody<Bytes, Infallible>;

fn full_body(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

fn endless_body(piece: Bytes, every: Option<Duration>, sent: Arc<AtomicUsize>) -> Body {
    let pieces = stream::unfold((), move |()| {
        let (piece, sent) = (piece.clone(), Arc::clone(&sent));
        async move {
            if let Some(every) = every {
                tokio::time::sleep(every).await;
            }
            sent.fetch_add(1, Ordering::Relaxed);
            Some((Ok(Frame::data(piece)), ()))
        }
    });
    StreamBody::new(pieces).boxed_unsync()
}

/// Behaviour of the hostile host's event stream.
#[derive(Clone)]
enum EventBehavior {
    Endless(Bytes),
    /// Sends this, and closes the whole connection when notified.
    Once(Bytes, Arc<Notify>),
}

struct HostileAgent {
    own: SubmissionId,
    events: EventBehavior,
    lines_sent: Arc<AtomicUsize>,
    /// Requests for the event stream.
    requested: Mutex<Vec<String>>,
}

impl HostileAgent {
    fn answer(&self, path: &str, query: &str) -> Response<Body> {
        let task = format!("/api/tasks/{}", self.own);
        let body = if path == "/api/healthcheck" {
            full_body(json!({"service": "dstack-shim", "version": "1".repeat(1 << 20)}).to_string())
        } else if path == "/api/tasks" {
            // Never complete, never silent.
            endless_body(Bytes::from_static(b" "), Some(Duration::from_millis(100)), Arc::default())
        } else if path == "/api/instance/host" || path == "/api/instance/health" {
            endless_body(vec![b' '; 1 << 20].into(), None, Arc::default())
        } else if path == task {
            let other = uuid::Uuid::from_u128(7);
            full_body(
                json!({"id": other, "status": "running", "termination_reason": "", "termination_message": "",
                "ports": null, "image_pull_progress": null, "container_name": "", "container_id": "",
                "gpus_ids": []})
                .to_string(),
            )
        } else if path == format!("{task}/job") {
            let state = json!({"state": "done", "timestamp": 1, "termination_message": "x".repeat(100_000)});
            let states = vec![state; 70];
            full_body(json!({"states": states, "log_end": u64::MAX, "log_complete": false}).to_string())
        } else if path == format!("{task}/logs") {
            full_body(vec![b'x'; 1 << 20])
        } else if path == "/api/events" {
            self.requested.lock().push(query.to_owned());
            match &self.events {
                EventBehavior::Endless(piece) => {
                    endless_body(piece.clone(), None, Arc::clone(&self.lines_sent))
                }
                EventBehavior::Once(lines, _) => {
                    let lines = lines.clone();
                    let first = stream::once(async move { Ok(Frame::data(lines)) });
                    StreamBody::new(first.chain(stream::pending())).boxed_unsync()
                }
            }
        } else {
            full_body(Bytes::new())
        };
        let mut answer = Response::new(body);
        if path.ends_with("/logs") {
            answer.headers_mut().insert(LOG_END_HEADER, u64::MAX.into());
        }
        answer
    }

    fn serve(self: &Arc<Self>, kit: &AgentTestEnv) -> AgentEndpoint {
        let path = kit.dir.path().join("liar.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let liar = Arc::clone(self);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (liar, end) = (Arc::clone(&liar), liar.end());
                tokio::spawn(async move {
                    let service = service_fn(move |request: Request<Incoming>| {
                        let answer =
                            liar.answer(request.uri().path(), request.uri().query().unwrap_or_default());
                        std::future::ready(Ok::<_, Infallible>(answer))
                    });
                    let served = http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service);
                    tokio::select! {
                        _ = served => {}
                        () = end.notified() => {}
                    }
                });
            }
        });
        AgentEndpoint::Socket { path }
    }

    fn end(&self) -> Arc<Notify> {
        match &self.events {
            EventBehavior::Once(_, end) => Arc::clone(end),
            EventBehavior::Endless(_) => Arc::new(Notify::new()),
        }
    }
}

async fn start_hostile_agent(
    kit: &AgentTestEnv,
    instance_num: i64,
    events: EventBehavior,
) -> (Arc<HostileAgent>, InstanceId) {
    let own = SubmissionId(uuid::Uuid::from_u128(0x1234_5678_0000_4000_8000_0000_0000_0001));
    let liar =
        Arc::new(HostileAgent { own, events, lines_sent: Arc::default(), requested: Mutex::default() });
    let instance = kit.instance(instance_num, liar.serve(kit)).await;
    enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap();
    (liar, instance)
}

fn no_events() -> EventBehavior {
    EventBehavior::Once(Bytes::new(), Arc::new(Notify::new()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_agent_replies_are_truncated_and_slow_ones_time_out() {
    let kit = AgentTestEnv::sqlite().await;
    let (liar, instance) = start_hostile_agent(&kit, 0, no_events()).await;
    let at = call_context(instance, liar.own, 1);
    let pulled = kit.wire.pull(at).await.unwrap().record;
    assert_eq!((pulled.states.len(), i64::try_from(pulled.log_end)), (64, Ok(i64::MAX)));
    assert!(pulled.states.iter().all(|state| state.termination_message.len() <= 4096));
    let log = kit.wire.log(at, "job", 0, 10).await.unwrap();
    assert_eq!((log.bytes.len(), i64::try_from(log.end)), (10, Ok(i64::MAX)));
    let another = kit.wire.task(at).await;
    assert!(matches!(another, Err(AgentError::Unreachable { .. })), "{another:?}");
    let start = Instant::now();
    let (drawl, flood) = tokio::join!(kit.wire.tasks(instance), kit.wire.host(instance));
    assert!(start.elapsed() < CALL_TIMEOUT + Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(
        matches!(&drawl, Err(AgentError::Unreachable { why, .. }) if why.contains("within")),
        "{drawl:?}"
    );
    assert!(
        matches!(&flood, Err(AgentError::Unreachable { why, .. }) if why.contains("longer")),
        "{flood:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_agent_events_are_read_at_a_limited_rate() {
    let kit = AgentTestEnv::sqlite().await;
    let run = kit.run("train").await;
    let elsewhere = kit.instance(1, AgentEndpoint::Socket { path: "/nowhere".into() }).await;
    let foreign = kit.job_start(run, 0, elsewhere, "running").await;
    // A line for a job of another host, and one that is not an event.
    let line = json!({"seq": u64::MAX, "at": 0, "event": "gone", "id": foreign}).to_string();
    let piece = Bytes::from(format!("{line}\nnonsense\n"));
    let (liar, instance) = start_hostile_agent(&kit, 0, EventBehavior::Endless(piece)).await;
    let own = kit.job_start(run, 1, instance, "running").await;
    let at = call_context(instance, liar.own, 1);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        kit.wire.log(at, "job", 0, 10).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // 256 per 20 ms, plus the content of windows and buffers.
    let sent = liar.lines_sent.load(Ordering::Relaxed);
    assert!((100..60_000).contains(&sent), "{sent} lines were taken in two seconds");
    assert!(!kit.is_due("jobs", foreign.0).await, "a host has no say over jobs of others");
    assert!(!kit.is_due("jobs", own.0).await, "nothing was said of this one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_reader_resumes_after_its_last_event() {
    let kit = AgentTestEnv::sqlite().await;
    let lines = [
        json!({"seq": 7, "at": 0, "event": "reset", "boot": "b1"}),
        json!({"seq": 9, "at": 0, "event": "alive"}),
    ];
    let lines = lines.map(|line| format!("{line}\n")).concat();
    let end = Arc::new(Notify::new());
    let (liar, instance) =
        start_hostile_agent(&kit, 0, EventBehavior::Once(lines.into(), Arc::clone(&end))).await;
    let run = kit.run("train").await;
    let job = kit.job_start(run, 0, instance, "running").await;
    let at = call_context(instance, liar.own, 1);
    kit.wire.log(at, "job", 0, 10).await.unwrap();
    kit.wait_until_due("jobs", job.0).await;
    kit.postpone("instances", instance.0).await;
    end.notify_waiters();
    kit.wait_until_due("instances", instance.0).await;
    kit.wire.log(at, "job", 0, 10).await.unwrap();
    eventually_async("a second stream", async || (liar.requested.lock().len() >= 2).then_some(())).await;
    assert_eq!(*liar.requested.lock(), ["", "boot=b1&after=9"]);
}
