//! Forwarding: selects a replica, sends the request, and tries another replica until one responds.
//!
//! A request is sent again only if that cannot have an effect twice: no byte of it was sent, or its method is
//! idempotent. Its body must also still be available from the beginning.

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

use hyper::{
    HeaderMap, Method, Response, StatusCode,
    header::{self, HeaderValue},
};
use tokio::time::Instant;

use crate::{
    body::{RequestBody, RequestBodyError},
    connect,
    error_response::ErrorResponse,
    headers::{self, ForwardedHeaders},
    proxy::{Proxy, ProxyRequest},
    replica::{OutstandingRequest, Replica},
    response_body::{RequestMetrics, ResponseBody, StreamedResponse},
    route_table::ServiceState,
    upgrade,
    upstream::{ExchangeError, Framing, RequestWriter, ResponseHead, UpstreamConnection},
};

/// Interval at which a held request checks again for a reachable replica.
const HOLD_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of stale connections that one request may encounter.
const STALE_MAX: u32 = 8;

/// Failed attempt.
struct FailedAttempt {
    failure: ExchangeError,
    body: RequestBody,
    /// True if the replica may have received a part of the request.
    has_sent: bool,
    /// True on a reused connection: the replica probably closed it meanwhile.
    is_reused: bool,
}

/// State of the attempts at one request.
#[derive(Default)]
struct Attempts {
    tried: Vec<Arc<Replica>>,
    count: u32,
    stale: u32,
    /// True if idle connections are no longer used.
    fresh_only: bool,
    last: Option<String>,
    deadline: Option<Instant>,
}

type LocalResponse = (Response<ResponseBody>, RequestMetrics);

impl Proxy {
    pub(crate) async fn forward(
        &self,
        live: &Arc<ServiceState>,
        request: Box<ProxyRequest<'_>>,
        mut body: RequestBody,
        mut metrics: RequestMetrics,
    ) -> Result<Response<ResponseBody>, LocalResponse> {
        if !body.is_empty() {
            body.enable_replay();
        }
        let mut live = Arc::clone(live);
        let mut tries = Attempts::default();
        let mut headers = HeaderMap::new();
        loop {
            let (outstanding, conn, reused) = match self.connect_replica(&mut live, &mut tries).await {
                Ok(reached) => reached,
                Err(say) => return Err((say.into_response(), metrics)),
            };
            if let Some(note) = &mut metrics.access {
                note.record.replica = Some(Arc::clone(&outstanding.replica.id));
                note.record.attempts = tries.count;
            }
            let answer = self.attempt(&live, conn, reused, body, &request, &mut headers).await;
            let failed = match answer {
                Ok((conn, sending, answer)) => {
                    outstanding.replica.mark_healthy();
                    return Ok(forward_response(request, conn, sending, answer, outstanding, metrics));
                }
                Err(failed) => *failed,
            };
            metrics.bytes_in = failed.body.taken();
            body = failed.body;
            if let Err(say) = tries
                .check_retry(
                    &request.parts.method,
                    &failed.failure,
                    failed.has_sent,
                    failed.is_reused,
                    &outstanding.replica,
                )
                .and_then(|()| body.rewind().then_some(()).ok_or_else(|| failure_response(&failed.failure)))
            {
                return Err((say.into_response(), metrics));
            }
        }
    }

    /// Returns an open connection to a replica.
    async fn connect_replica(
        &self,
        live: &mut Arc<ServiceState>,
        tries: &mut Attempts,
    ) -> Result<(OutstandingRequest, Box<UpstreamConnection>, bool), ErrorResponse> {
        loop {
            let Some(replica) = live.pick_replica(&tries.tried).cloned() else {
                Box::pin(self.wait_for_replica(live, tries)).await?;
                continue;
            };
            // A concurrent request may have reserved it.
            let Some(outstanding) = replica.reserve(live.at_once()) else { continue };
            if !tries.fresh_only
                && let Some(conn) = poll_fn(|cx| Poll::Ready(replica.take_idle(cx))).await
            {
                tries.count += 1;
                return Ok((outstanding, conn, true));
            }
            tries.count += 1;
            let connected =
                connect::connect_with_timeout(self.limits.connect_timeout, &*self.connector, &replica.target);
            // Boxed, like the wait above: what most requests do not need must not enlarge the future of each request.
            match Box::pin(connected).await {
                Ok(stream) => return Ok((outstanding, Box::new(UpstreamConnection::new(stream)), false)),
                Err(error) => {
                    replica.mark_failed();
                    tracing::debug!(service = %live.key, replica = %replica.id, %error, "failed to connect to replica");
                    tries.last = Some(format!("connection failed: {}", error.kind()));
                    tries.tried.push(replica);
                    if tries.tried.len() >= self.limits.attempts_max as usize && live.service.hold_ms == 0 {
                        return Err(tries.unreachable());
                    }
                }
            }
        }
    }

    /// Waits for a change if there is no replica, none is reachable, or all are busy; fails if the service does not
    /// hold requests.
    async fn wait_for_replica(
        &self,
        live: &mut Arc<ServiceState>,
        tries: &mut Attempts,
    ) -> Result<(), ErrorResponse> {
        let service = &live.service;
        if service.hold_ms == 0 {
            return Err(tries.unreachable());
        }
        let bound = Duration::from_millis(service.hold_ms);
        let deadline = *tries.deadline.get_or_insert_with(|| Instant::now() + bound);
        let later = |live: &ServiceState| {
            let text = if live.replicas.is_empty() {
                "the service has no ready replica yet"
            } else {
                "all replicas of the service are busy"
            };
            ErrorResponse::with_retry_after(StatusCode::SERVICE_UNAVAILABLE, text, Duration::from_secs(5))
        };
        let (counted, began) = (Arc::clone(live), std::time::Instant::now());
        if !counted.stats().hold(self.limits.held_max, began) {
            return Err(later(live));
        }
        let _held = HeldGuard(counted, began);
        let mut changes = self.routes.changes();
        let freed = live.freed();
        // A request that waits for a free replica wakes nothing: the replicas exist and are busy.
        if live.replicas.is_empty() || service.at_once.is_none() {
            self.waker.wake(&service.project, &service.run);
        }
        // Read after the subscription, so that no change is missed.
        let key = Arc::clone(&live.key);
        loop {
            let mut room = pin!(freed.notified());
            // Enabled before the check, so that no notification is missed.
            room.as_mut().enable();
            let Some(now) = self.routes.service(&key) else {
                return Err(ErrorResponse::new(StatusCode::NOT_FOUND, "the service no longer exists"));
            };
            *live = now;
            if live.pick_replica(&tries.tried).is_some() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(later(live));
            }
            let check = deadline.min(Instant::now() + HOLD_POLL_INTERVAL);
            // A timeout counts as a change: failed replicas are tried again.
            tokio::select! {
                _ = tokio::time::timeout_at(check, changes.changed()) => {}
                () = room => {}
            }
            tries.tried.clear();
        }
    }

    async fn attempt(
        &self,
        live: &ServiceState,
        mut conn: Box<UpstreamConnection>,
        reused: bool,
        body: RequestBody,
        request: &ProxyRequest<'_>,
        headers: &mut HeaderMap,
    ) -> Result<(Box<UpstreamConnection>, RequestWriter, ResponseHead), Box<FailedAttempt>> {
        let framing = match body.length() {
            Some(0) => Framing::None,
            Some(length) => Framing::Sized(length),
            None => Framing::Chunked,
        };
        let forwarded = ForwardedHeaders {
            client: request.client,
            head: &request.head,
            path: request.path(),
            prefix: (!request.stripped_prefix.is_empty()).then_some(request.stripped_prefix),
            framing,
            strip_authorization: request.strip_authorization,
            identity: request.identity.as_ref(),
        };
        headers::write_request_head(conn.begin(), &request.parts, &forwarded);
        let mut sending = RequestWriter::new(body, framing);
        let upgrade = request.head.upgrade.is_some();
        let limits = Duration::from_millis(live.service.answer_ms);
        let method = &request.parts.method;
        match exchange(&mut conn, &mut sending, method, upgrade, headers, limits).await {
            Ok(answer) => Ok((conn, sending, answer)),
            Err(failure) => {
                let sent = conn.has_sent();
                Err(Box::new(FailedAttempt {
                    failure,
                    body: sending.into_body(),
                    has_sent: sent,
                    is_reused: reused,
                }))
            }
        }
    }
}

/// Sends and receives concurrently, until the head of the response has arrived.
async fn exchange(
    conn: &mut UpstreamConnection,
    sending: &mut RequestWriter,
    method: &Method,
    upgrade: bool,
    headers: &mut HeaderMap,
    limits: Duration,
) -> Result<ResponseHead, ExchangeError> {
    let (mut ends, mut progress) = (Instant::now() + limits, 0);
    poll_fn(|cx| {
        let broken = if sending.is_done() {
            None
        } else {
            match conn.poll_send(sending, cx) {
                Poll::Ready(Err(failure)) => Some(failure),
                Poll::Ready(Ok(())) | Poll::Pending => None,
            }
        };
        // A replica that rejects a large body may respond early and stop reading: the response counts, not the broken
        // pipe.
        match (conn.poll_head(method, upgrade, headers, cx), broken) {
            (Poll::Ready(Ok(answer)), _) => return Poll::Ready(Ok(answer)),
            (_, Some(failure)) | (Poll::Ready(Err(failure)), None) => return Poll::Ready(Err(failure)),
            (Poll::Pending, None) => {}
        }
        while conn.alarm.poll(ends, cx).is_ready() {
            if conn.sent() == progress {
                return Poll::Ready(Err(ExchangeError::Late));
            }
            // Progress of a long upload extends the deadline.
            progress = conn.sent();
            ends = Instant::now() + limits;
        }
        Poll::Pending
    })
    .await
}

impl Attempts {
    /// Checks whether the request may be tried once more.
    fn check_retry(
        &mut self,
        method: &Method,
        failure: &ExchangeError,
        sent: bool,
        reused: bool,
        replica: &Arc<Replica>,
    ) -> Result<(), ErrorResponse> {
        let nobody_answered = match failure {
            ExchangeError::Write(_)
            | ExchangeError::Read(_)
            | ExchangeError::ClosedBeforeResponse
            | ExchangeError::Cut => true,
            ExchangeError::Malformed(_)
            | ExchangeError::HeadTooLarge
            | ExchangeError::Late
            | ExchangeError::Request(_)
            | ExchangeError::Denied => false,
        };
        if !nobody_answered || (sent && !is_idempotent(method)) {
            return Err(failure_response(failure));
        }
        if reused && self.stale < STALE_MAX {
            // The same replica on a new connection: it only closed an old one.
            self.stale += 1;
            self.fresh_only = true;
            return Ok(());
        }
        replica.mark_failed();
        self.last = Some(failure.to_string());
        self.tried.push(Arc::clone(replica));
        if self.count >= STALE_MAX { Err(failure_response(failure)) } else { Ok(()) }
    }

    fn unreachable(&self) -> ErrorResponse {
        match &self.last {
            None => ErrorResponse::with_retry_after(
                StatusCode::SERVICE_UNAVAILABLE,
                "the service has no ready replica",
                Duration::from_secs(5),
            ),
            Some(last) => ErrorResponse::new(
                StatusCode::BAD_GATEWAY,
                format!("no replica of the service can be reached: {last}"),
            ),
        }
    }
}

fn is_idempotent(method: &Method) -> bool {
    method.is_idempotent()
}

/// Converts a failure to a response for the caller.
fn failure_response(failure: &ExchangeError) -> ErrorResponse {
    let status = match failure {
        ExchangeError::Request(RequestBodyError::TooLarge { .. }) => StatusCode::PAYLOAD_TOO_LARGE,
        ExchangeError::Request(RequestBodyError::Stalled { .. }) => StatusCode::REQUEST_TIMEOUT,
        ExchangeError::Request(RequestBodyError::LengthMismatch | RequestBodyError::Read(_)) => {
            StatusCode::BAD_REQUEST
        }
        ExchangeError::Late => StatusCode::GATEWAY_TIMEOUT,
        ExchangeError::Denied => StatusCode::FORBIDDEN,
        ExchangeError::Write(_)
        | ExchangeError::Read(_)
        | ExchangeError::ClosedBeforeResponse
        | ExchangeError::Cut
        | ExchangeError::Malformed(_)
        | ExchangeError::HeadTooLarge => StatusCode::BAD_GATEWAY,
    };
    ErrorResponse::new(status, failure.to_string())
}

/// Held request, with the time at which the wait began.
struct HeldGuard(Arc<ServiceState>, std::time::Instant);

impl Drop for HeldGuard {
    fn drop(&mut self) {
        self.0.stats().release_held(self.1, std::time::Instant::now());
    }
}

fn forward_response(
    request: Box<ProxyRequest<'_>>,
    conn: Box<UpstreamConnection>,
    sending: RequestWriter,
    answer: ResponseHead,
    outstanding: OutstandingRequest,
    mut metrics: RequestMetrics,
) -> Response<ResponseBody> {
    metrics.status = answer.status;
    metrics.bytes_in = sending.taken();
    let mut headers = answer.headers;
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        let protocol = headers.get(header::UPGRADE).cloned();
        headers::clean_response(&mut headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol.or(request.head.upgrade) {
            headers.insert(header::UPGRADE, protocol);
        }
        if let Some(on_upgrade) = request.on_upgrade {
            upgrade::spawn_splice(on_upgrade, conn, outstanding, metrics, request.grant);
        }
        let mut response = Response::new(ResponseBody::text(bytes::Bytes::new()));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = headers;
        return response;
    }
    headers::clean_response(&mut headers);
    let flow = StreamedResponse {
        conn: Some(conn),
        body_reader: answer.framing.into(),
        request_writer: (!sending.is_done()).then_some(sending),
        keep_alive: answer.keep_alive,
        grant: request.grant,
        outstanding,
        metrics,
    };
    let mut response = Response::new(ResponseBody::streamed(flow));
    *response.status_mut() = answer.status;
    *response.headers_mut() = headers;
    response
}
