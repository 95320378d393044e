//! HTTP access to the spool: reads by offset for any client, pulls by time and WebSockets for the runner.

use std::{io, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Query, State, ws::WebSocketUpgrade},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::stream;
use serde::Deserialize;

use windlass_api::agent::{LOG_COMPLETE_HEADER, LOG_END_HEADER, runner::JobState};

use super::{CHUNK, ReaderTracker, Spool, Stream, StreamSource, dstack_pull, websocket};

/// Number of bytes read if the request has no limit.
const LIMIT_DEFAULT: u64 = 1024 * 1024;
const LIMIT_MAX: u64 = 64 * 1024 * 1024;
const WAIT_MS_MAX: u64 = 60_000;
/// Maximum size of a message from a WebSocket client, which sends only control frames.
const MESSAGE_BYTES_MAX: usize = 4096;

/// `?stream=job&offset=N&limit=M&wait_ms=W`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct ReadQuery {
    #[serde(default)]
    pub stream: Stream,
    #[serde(default)]
    pub offset: u64,
    #[serde(default)]
    pub limit: Option<u64>,
    #[serde(default)]
    pub wait_ms: u64,
}

/// Routes of the runner: `/api/logs`, `/api/logs/read` and `/logs_ws`.
pub fn routes(spool: Arc<Spool>) -> Router {
    Router::new()
        .route("/api/logs", get(logs))
        .route("/api/logs/read", post(logs_read))
        .with_state(Arc::clone(&spool))
        .merge(job_tail_router(&spool))
}

/// Returns the route `/logs_ws` only, for a client that may follow the job's output and nothing else.
pub fn job_tail_router(spool: &Spool) -> Router {
    tail_router(spool.source(Stream::Job).clone(), Arc::clone(spool.readers()))
}

/// Returns the same route for output that is read without the runner that wrote it.
pub fn tail_router(source: StreamSource, readers: Arc<ReaderTracker>) -> Router {
    Router::new().route("/logs_ws", get(logs_ws)).with_state(TailState { source, readers })
}

/// Source of a tailer, and the counter of tailers.
#[derive(Clone)]
struct TailState {
    source: StreamSource,
    readers: Arc<ReaderTracker>,
}

/// Returns raw bytes of a stream from an offset on, and waits for some if requested. The body is read while it is sent.
pub async fn read(source: &StreamSource, query: &ReadQuery) -> Response {
    let wait = Duration::from_millis(query.wait_ms.min(WAIT_MS_MAX));
    let position = match source.wait(query.offset, wait).await {
        Ok(position) => position,
        Err(error) => return read_error(&error),
    };
    let limit = query.limit.unwrap_or(LIMIT_DEFAULT).min(LIMIT_MAX);
    let size = position.end.saturating_sub(query.offset).min(limit);
    let mut response = Body::from_stream(read_range(source.clone(), query.offset, size)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    headers.insert(LOG_END_HEADER, HeaderValue::from(position.end));
    headers.insert(
        LOG_COMPLETE_HEADER,
        HeaderValue::from_static(if position.complete { "true" } else { "false" }),
    );
    response
}

/// Returns all output and states after a millisecond, as a dstack server pulls them.
///
/// `states` is called once, at the right moment: a state must be in its list before its
/// [`IssuedTimestamp`](super::IssuedTimestamp) is dropped.
pub async fn pull(
    spool: &Arc<Spool>,
    after: i64,
    no_connections_secs: i64,
    states: impl FnOnce() -> Vec<JobState>,
) -> Response {
    let answer = match dstack_pull::plan_pull(spool, after, dstack_pull::PULL_BOUNDS, states).await {
        Ok(plan) => dstack_pull::render_body(spool, plan, no_connections_secs),
        Err(error) => Err(error),
    };
    match answer {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => read_error(&error),
    }
}

async fn logs(State(spool): State<Arc<Spool>>, Query(query): Query<ReadQuery>) -> Response {
    read(spool.source(query.stream), &query).await
}

async fn logs_read(State(spool): State<Arc<Spool>>, Query(query): Query<ReadQuery>) -> StatusCode {
    match query.stream {
        Stream::Job => spool.readers().mark_read(query.offset),
        // Reading these is not waited for.
        Stream::Runner => {}
    }
    StatusCode::OK
}

/// `?start_time=RFC3339` or `?offset=N`; with neither, from the start.
#[derive(Debug, Deserialize)]
struct TailQuery {
    start_time: Option<String>,
    offset: Option<u64>,
}

async fn logs_ws(
    State(TailState { source, readers }): State<TailState>,
    Query(query): Query<TailQuery>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let offset = match start_offset(&source, &query).await {
        Ok(offset) => offset,
        Err(refused) => return refused,
    };
    let Some(place) = readers.tailer() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many tailers").into_response();
    };
    let follow = source.follow(offset);
    upgrade
        .max_message_size(MESSAGE_BYTES_MAX)
        .write_buffer_size(0)
        .on_upgrade(move |socket| websocket::serve_tailer(socket, follow, place))
}

async fn start_offset(source: &StreamSource, query: &TailQuery) -> Result<u64, Response> {
    let since = match (query.offset, query.start_time.as_deref()) {
        (Some(offset), _) => return Ok(offset),
        (None, None | Some("")) => return Ok(0),
        (None, Some(since)) => since,
    };
    let since: jiff::Timestamp = since
        .parse()
        .map_err(|error| (StatusCode::BAD_REQUEST, format!("invalid start_time: {error}")).into_response())?;
    let since = since.as_millisecond();
    source.run_blocking(move |reader| reader.offset_at(since)).await.map_err(|error| read_error(&error))
}

/// Streams exactly `size` bytes from `offset` on. A file that shrank meanwhile aborts the response.
fn read_range(
    source: StreamSource,
    offset: u64,
    size: u64,
) -> impl futures_util::Stream<Item = io::Result<axum::body::Bytes>> {
    stream::try_unfold((source, offset, size), |(source, offset, left)| async move {
        if left == 0 {
            return Ok(None);
        }
        let bytes = source.read(offset, usize::try_from(left).unwrap_or(CHUNK).min(CHUNK)).await?;
        if bytes.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let size = bytes.len() as u64;
        Ok(Some((bytes, (source, offset + size, left - size))))
    })
}

fn read_error(error: &io::Error) -> Response {
    tracing::warn!(%error, "failed to read the spool");
    (StatusCode::INTERNAL_SERVER_ERROR, "failed to read the spool").into_response()
}
