//! Runner of a simulated task: answers its calls from the job alone.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    http::{Method, Request, Response, StatusCode},
    response::IntoResponse,
};
use base64::{Engine, engine::general_purpose::STANDARD};

use windlass_api::agent::{
    Health, LOG_COMPLETE_HEADER, LOG_END_HEADER,
    runner::{JobRecord, JobStarted, LogEvent, Metrics, PullResponse, SERVICE, SubmitBody},
};
use windlass_model::id::SubmissionId;

use super::{SimulatedJob, SimulatedRuntime, SimulatedTask};
use crate::{clock, http::ErrorResponse, shim::runtime::JOB_RECORD_PATH};

/// Maximum time to wait for more output.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Interval at which a waiting reader checks for output that only depends on time.
const WAIT_POLL_INTERVAL: Duration = Duration::from_millis(100);

impl SimulatedRuntime {
    pub(super) async fn respond(&self, id: SubmissionId, call: Request<Bytes>) -> Response<Body> {
        let Some(task) = self.task(id) else {
            return ErrorResponse::not_found("task not found").into_response();
        };
        let (parts, body) = call.into_parts();
        let query = Query(parts.uri.query().unwrap_or_default());
        match (&parts.method, parts.uri.path()) {
            (&Method::GET, "/api/healthcheck") => {
                json(&Health { service: SERVICE.to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
            }
            (&Method::POST, "/api/submit") => self.submit(id, &task, &body),
            (&Method::POST, "/api/upload_archive" | "/api/upload_code") => StatusCode::OK.into_response(),
            (&Method::POST, "/api/run") => {
                self.change(id, &task, SimulatedJob::run);
                json(&JobStarted { working_dir: "/simulated".to_owned(), username: "root".to_owned() })
            }
            (&Method::POST, "/api/stop") => {
                self.change(id, &task, SimulatedJob::stop);
                StatusCode::OK.into_response()
            }
            (&Method::GET, "/api/pull") => {
                let after = query.get("timestamp").unwrap_or(0);
                json(&self.change(id, &task, |job, now| pull_response(job, now, after)))
            }
            (&Method::GET, "/api/metrics") => json(&metrics_response(clock::now_us())),
            (&Method::GET, "/api/logs") => logs_response(&task, &query).await,
            (&Method::POST, "/api/logs/read") => {
                let offset = query.get("offset").unwrap_or(0);
                self.change(id, &task, |job, now| acknowledge_read(job, now, offset));
                StatusCode::OK.into_response()
            }
            (&Method::GET, JOB_RECORD_PATH) => json(&job_record(&task.job.lock(), clock::now_ms())),
            _ => ErrorResponse::not_found("the simulated runner does not support this call").into_response(),
        }
    }

    fn submit(&self, id: SubmissionId, task: &SimulatedTask, body: &[u8]) -> Response<Body> {
        let submit: SubmitBody = match crate::http::parse_json(body) {
            Ok(submit) => submit,
            Err(refusal) => return refusal.into_response(),
        };
        let taken = self.change(id, task, |job, _| {
            let fresh = !job.began();
            if fresh {
                job.configure(&submit.job_spec.env);
            }
            fresh
        });
        if taken {
            return StatusCode::OK.into_response();
        }
        ErrorResponse::conflict("the job was already started").into_response()
    }
}

struct Query<'a>(&'a str);

impl Query<'_> {
    fn get<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        let pairs = self.0.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(key, _)| *key == name)?.1.parse().ok()
    }

    fn is_job_stream(&self) -> bool {
        !self.0.split('&').any(|pair| pair.strip_prefix("stream=").is_some_and(|stream| stream != "job"))
    }
}

fn json<T: serde::Serialize>(body: &T) -> Response<Body> {
    axum::Json(body).into_response()
}

fn pull_response(job: &mut SimulatedJob, now: i64, after: i64) -> PullResponse {
    let (lines, complete) = job.output_after(now, after);
    let cut = if complete { i64::MAX } else { lines.last().map_or(after, |(at, _)| *at) };
    let states =
        job.states(now).into_iter().filter(|state| state.timestamp > after && state.timestamp <= cut);
    let job_states: Vec<_> = states.collect();
    let last = job_states.iter().map(|state| state.timestamp).chain(lines.iter().map(|(at, _)| *at)).max();
    let message = |(timestamp, text): (i64, String)| LogEvent { timestamp, message: STANDARD.encode(text) };
    let over = job.over(now) && complete;
    if over {
        job.mark_read();
    }
    PullResponse {
        job_states,
        job_logs: lines.into_iter().map(message).collect(),
        runner_logs: Vec::new(),
        last_updated: last.unwrap_or(after),
        no_connections_secs: 0,
        has_more: !over,
    }
}

fn acknowledge_read(job: &mut SimulatedJob, now: i64, offset: u64) {
    if job.over(now) && offset >= job.output_end(now) {
        job.mark_read();
    }
}

fn job_record(job: &SimulatedJob, now: i64) -> JobRecord {
    JobRecord { states: job.states(now), log_end: job.output_end(now), log_complete: job.over(now) }
}

fn metrics_response(now_us: i64) -> Metrics {
    Metrics {
        timestamp_micro: now_us,
        cpu_usage_micro: 0,
        memory_usage_bytes: 0,
        memory_working_set_bytes: 0,
        gpus: Vec::new(),
    }
}

async fn logs_response(task: &SimulatedTask, query: &Query<'_>) -> Response<Body> {
    let offset = query.get("offset").unwrap_or(0);
    let limit = query.get("limit").unwrap_or(u64::MAX);
    let wait = query.get("wait_ms").map_or(Duration::ZERO, Duration::from_millis).min(WAIT_MAX);
    let deadline = tokio::time::Instant::now() + wait;
    let mut changed = task.changed.subscribe();
    loop {
        let (bytes, end, over) = {
            let job = task.job.lock();
            let now = clock::now_ms();
            let end = if query.is_job_stream() { job.output_end(now) } else { 0 };
            (job.output(now, offset, limit.min(end.saturating_sub(offset))), end, job.over(now))
        };
        if !bytes.is_empty() || over || tokio::time::Instant::now() >= deadline {
            let headers = [(LOG_END_HEADER, end.to_string()), (LOG_COMPLETE_HEADER, over.to_string())];
            return (headers, bytes).into_response();
        }
        let step = deadline.min(tokio::time::Instant::now() + WAIT_POLL_INTERVAL);
        let _ = tokio::time::timeout_at(step, changed.changed()).await;
    }
}
