//! Output and job states of a task, read from disk; they are available whether or not the runner is alive.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::{Path, Query, Request, State},
    http::Uri,
    response::{IntoResponse, Response},
};
use windlass_api::agent::runner::JobRecord;
use windlass_model::{error_chain::format_chain, id::SubmissionId};

use super::{ApiState, Shim, parse_task_id, task_not_found};
use crate::{
    http::ErrorResponse,
    safe_open::DirHandle,
    shim::{output_watcher, runtime::JOB_RECORD_PATH},
    spool::{Reader, Stream, StreamSource, http as spool},
};

/// Maximum time to wait for more output.
const WAIT_MS_MAX: u64 = 30_000;

pub(super) async fn read_log(
    State(gate): State<ApiState>,
    Path(id): Path<String>,
    Query(mut query): Query<spool::ReadQuery>,
    request: Request,
) -> Result<Response, ErrorResponse> {
    let id = parse_task_id(&id)?;
    let requested = request.uri().query().map_or_else(String::new, |query| format!("?{query}"));
    if let Some(played) = simulated_response(&gate.shim, id, &format!("/api/logs{requested}")).await {
        return Ok(played);
    }
    query.wait_ms = query.wait_ms.min(WAIT_MS_MAX);
    Ok(spool::read(&log_source(&gate.shim, id, query.stream)?, &query).await)
}

pub(super) async fn job_record(
    State(gate): State<ApiState>,
    Path(id): Path<String>,
) -> Result<Response, ErrorResponse> {
    let id = parse_task_id(&id)?;
    if let Some(played) = simulated_response(&gate.shim, id, JOB_RECORD_PATH).await {
        return Ok(played);
    }
    let source = log_source(&gate.shim, id, Stream::Job)?;
    let failed = |error: std::io::Error| {
        ErrorResponse::internal(format!("cannot read task {id}: {}", format_chain(&error)))
    };
    let position = source.position().await.map_err(failed)?;
    let states = match output_watcher::read_states(source.reader().dir(), 0) {
        Ok((states, _)) => states,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(failed(error)),
    };
    let record = JobRecord { states, log_end: position.end, log_complete: position.complete };
    Ok(axum::Json(record).into_response())
}

fn log_source(shim: &Shim, id: SubmissionId, stream: Stream) -> Result<StreamSource, ErrorResponse> {
    let dir = shim.tasks.dir(id).ok_or_else(|| task_not_found(id))?;
    let run = DirHandle::open(&dir.run())
        .map_err(|error| ErrorResponse::not_found(format!("task {id} has no output yet: {error}")))?;
    let reader = Reader::new(Arc::new(run), stream);
    Ok(StreamSource::there(reader, shim.growth.watcher(), shim.growth.ended(id)))
}

/// Returns the response of a runtime that simulates the runner.
async fn simulated_response(shim: &Shim, id: SubmissionId, call: &str) -> Option<Response> {
    let uri: Uri = call.parse().ok()?;
    let request = Request::builder().uri(uri).body(Bytes::new()).ok()?;
    Some(shim.runtime.play(id, request)?.await)
}
