//! The connection to the server: sometimes slow or lossy; a request of a caller that dies still takes effect.

use axum::{Router, body::Body};
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;
use windlass_api::queue_client::{QueueError, QueueTransport, TransportFuture};
use windlass_model::dispatch::Attempt;

use super::{LockRecord, SharedQueueState};
use crate::rng::Rng;

/// Fault rates, in percent.
const LOST_PERCENT: u64 = 2;
const UNANSWERED_PERCENT: u64 = 2;
const SLOW_PERCENT: u64 = 5;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// Calls without faults.
    User,
    Dispatcher(usize),
    Executor,
}

pub(super) struct FaultyTransport {
    router: Router,
    state: SharedQueueState,
    rng: Mutex<Rng>,
    who: Caller,
}

/// A call, for the checks.
struct ObservedCall {
    method: String,
    path: String,
    query: String,
    body: Value,
}

impl ObservedCall {
    fn from_request(request: &Request<Full<Bytes>>, body: &Bytes) -> Self {
        let uri = request.uri();
        Self {
            method: request.method().to_string(),
            path: uri.path().trim_start_matches("/arvados/v1/").to_owned(),
            query: uri.query().unwrap_or_default().to_owned(),
            body: serde_json::from_slice(body).unwrap_or_default(),
        }
    }

    /// Returns the container to be locked.
    fn locks(&self) -> Option<&str> {
        self.path.strip_prefix("containers/")?.strip_suffix("/lock")
    }

    /// Returns the attempt that a dispatcher releases, and the stated reason.
    fn released_attempt(&self) -> Option<(Attempt, &str)> {
        let rest = self.path.strip_prefix("containers/")?;
        if let Some(uuid) = rest.strip_suffix("/unlock") {
            let number = self.query.split('&').find_map(|pair| pair.strip_prefix("attempt="))?;
            return Some((Attempt { uuid: uuid.to_owned(), number: number.parse().ok()? }, "unlock"));
        }
        let change = &self.body["container"];
        if self.method != "PUT" || change["state"] != "Cancelled" {
            return None;
        }
        let number = change["attempt"].as_u64()?;
        Some((Attempt { uuid: rest.to_owned(), number }, change["runtime_status"]["reason"].as_str()?))
    }
}

impl FaultyTransport {
    pub(super) fn new(router: Router, state: SharedQueueState, rng: Rng, who: Caller) -> Self {
        Self { router, state, rng: Mutex::new(rng), who }
    }

    fn should_fail(&self, percent: u64, fault: &'static str) -> bool {
        let hit = self.who != Caller::User && self.rng.lock().chance(percent);
        if hit {
            self.state.lock().record_fault(fault);
        }
        hit
    }

    async fn delay(&self) {
        if self.who == Caller::User {
            return;
        }
        let most = if self.should_fail(SLOW_PERCENT, "slow call") { 3_000 } else { 20 };
        let time = self.rng.lock().millis(1, most);
        sleep(time).await;
    }

    async fn bring(&self, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), QueueError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let request = Request::from_parts(head, Full::new(body.clone()));
        let call = ObservedCall::from_request(&request, &body);
        self.delay().await;
        let is_overloaded = {
            let mut state = self.state.lock();
            state.calls += 1;
            let is = state.overloaded_until.is_some_and(|until| Instant::now() < until);
            if is && self.who != Caller::User {
                state.record_fault("server overloaded");
            }
            is && self.who != Caller::User
        };
        if is_overloaded {
            self.record_missed_lock(&call);
            return Ok((503, Bytes::from_static(br#"{"errors":["overloaded"]}"#)));
        }
        if self.should_fail(LOST_PERCENT, "lost request") {
            self.record_missed_lock(&call);
            return Err(QueueError::TimedOut);
        }
        let router = self.router.clone();
        // A separate task: a server continues after the caller is gone.
        let (state, who) = (self.state.clone(), self.who);
        let answered = tokio::spawn(async move {
            let (head, body) = request.into_parts();
            let answer = match router.oneshot(Request::from_parts(head, Body::new(body))).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            };
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.map(http_body_util::Collected::to_bytes);
            check_call(&state, who, &call, status);
            (status, body.unwrap_or_default(), call)
        });
        let Ok((status, body, call)) = answered.await else { return Err(QueueError::TimedOut) };
        if self.should_fail(UNANSWERED_PERCENT, "lost response") {
            self.record_missed_lock(&call);
            return Err(QueueError::TimedOut);
        }
        self.delay().await;
        Ok((status, body))
    }

    fn record_missed_lock(&self, call: &ObservedCall) {
        if let (Caller::Dispatcher(at), Some(uuid)) = (self.who, call.locks()) {
            self.state.lock().missed.push((at, uuid.to_owned(), Instant::now()));
        }
    }
}

/// Checks a call at the time it happens.
fn check_call(state: &SharedQueueState, who: Caller, call: &ObservedCall, status: u16) {
    let Caller::Dispatcher(at) = who else { return };
    if status != 200 {
        return;
    }
    let mut state = state.lock();
    if let Some(uuid) = call.locks() {
        let alive = state.pools[at].alive();
        let locked = LockRecord { dispatcher: at, uuid: uuid.to_owned(), at: Instant::now(), alive };
        state.locks.push(locked);
    }
    if let Some((attempt, why)) = call.released_attempt() {
        if state.pools[at].is_known_alive(&attempt) {
            state.record_violation("C12", format!("{attempt} was released ({why}) while its job is alive"));
        }
        if why == "abandoned" && !state.pools[at].was_whole {
            state.record_violation(
                "R15",
                format!("{attempt} was reported as abandoned while the state of a worker was unknown"),
            );
        }
    }
}

impl QueueTransport for FaultyTransport {
    fn send(&self, request: Request<Full<Bytes>>) -> TransportFuture<'_> {
        Box::pin(self.bring(request))
    }
}
