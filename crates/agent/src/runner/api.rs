//! HTTP routes of the runner. Thin: the work is done in `job`, `uploads` and the spool.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Query, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use windlass_api::agent::{
    Health,
    runner::{GroupHosts, SERVICE, SubmitBody},
};

use super::{
    env,
    job::{Job, RunOutcome, StopSignal},
    metrics::Meter,
    port_connect, steps, supervisor, uploads,
};
use crate::{
    http::{self, ErrorResponse},
    spool,
};

/// Version reported to a dstack server, which treats a text that is not a version as the newest one.
const COMPAT_VERSION: &str = "latest";

/// Routes for the runner's own socket: every call carries the token.
pub fn authenticated_router(job: &Arc<Job>, meter: &Arc<Meter>) -> Router {
    let checked = middleware::from_fn_with_state(Arc::clone(job), check_token);
    let ports = Router::new().route("/api/connect", get(port_connect::connect)).with_state(Arc::clone(job));
    routes(job, meter, env!("CARGO_PKG_VERSION")).merge(ports).layer(checked)
}

/// Routes for a dstack server, which sends no token.
pub fn compat_router(job: &Arc<Job>, meter: &Arc<Meter>) -> Router {
    routes(job, meter, COMPAT_VERSION)
}

/// Routes for users who are logged in to the task: they may follow its output. dstack's CLI does so through its SSH
/// connection and treats what answers there as the runner's port.
pub fn guest_router(tail: Router) -> Router {
    Router::new()
        .route("/api/healthcheck", get(|| health(COMPAT_VERSION)))
        .merge(tail)
        .fallback(http::unknown_route)
}

fn routes(job: &Arc<Job>, meter: &Arc<Meter>, version: &'static str) -> Router {
    let uploads = Router::new()
        .route("/api/upload_archive", post(uploads::upload_archive))
        .route("/api/upload_code", post(uploads::upload_code))
        // Uploads have a separate limit.
        .layer(DefaultBodyLimit::disable());
    Router::new()
        .route("/api/healthcheck", get(move || health(version)))
        .route("/api/submit", post(submit))
        .route("/api/run", post(run))
        .route("/api/stop", post(stop))
        .route("/api/gate", post(gate))
        .route("/api/hosts", post(hosts))
        .route("/api/pull", get(pull))
        .merge(uploads)
        .with_state(Arc::clone(job))
        .merge(Router::new().route("/api/metrics", get(metrics)).with_state(Arc::clone(meter)))
        .merge(spool::http::routes(Arc::clone(&job.spool)))
        .fallback(http::unknown_route)
}

async fn health(version: &'static str) -> Json<Health> {
    Json(Health { service: SERVICE.to_owned(), version: version.to_owned() })
}

async fn check_token(State(job): State<Arc<Job>>, request: Request, next: Next) -> Response {
    let hash = job.around.config.token_sha256.as_str();
    match http::bearer_token(request.headers()) {
        Some(token) if http::matches_hash(token, [hash]) => next.run(request).await,
        Some(_) | None => {
            ErrorResponse::unauthorized("the runner's token is missing or wrong").into_response()
        }
    }
}

async fn submit(
    State(job): State<Arc<Job>>,
    http::Json(submit): http::Json<SubmitBody>,
) -> Result<(), ErrorResponse> {
    env::validate(submit.secrets.iter().chain(&submit.job_spec.env))
        .map_err(|error| ErrorResponse::bad_request(error.to_string()))?;
    job.submit(submit).map_err(|at| ErrorResponse::conflict(steps::refusal_message(at)))
}

async fn run(State(job): State<Arc<Job>>) -> Result<Response, ErrorResponse> {
    let run = job.run().map_err(|at| ErrorResponse::conflict(steps::refusal_message(at)))?;
    let started = match run {
        RunOutcome::Answer(started) => started,
        RunOutcome::Start(started, plan) => {
            supervisor::start(&job, plan);
            started
        }
    };
    Ok(started.map_or_else(|| ().into_response(), |started| Json(started).into_response()))
}

async fn gate(State(job): State<Arc<Job>>) -> Result<(), ErrorResponse> {
    job.open_gate().map_err(|error| ErrorResponse::conflict(format!("failed to open the gate: {error}")))
}

async fn hosts(
    State(job): State<Arc<Job>>,
    http::Json(hosts): http::Json<GroupHosts>,
) -> Result<(), ErrorResponse> {
    job.send_hosts(&hosts.hosts)
        .map_err(|error| ErrorResponse::conflict(format!("failed to write the host names: {error}")))
}

#[derive(Debug, Deserialize)]
struct StopParams {
    /// Time that the commands have to exit; if absent, the job's own setting applies.
    grace_secs: Option<u64>,
    /// True if the scheduler ends the job: it finds a notice in its preemption file.
    #[serde(default)]
    is_preempted: bool,
}

async fn stop(State(job): State<Arc<Job>>, Query(stopping): Query<StopParams>) {
    let grace = stopping.grace_secs.map(Duration::from_secs);
    if stopping.is_preempted {
        job.announce_preemption(grace);
    }
    job.stop(StopSignal::Stop { grace });
}

#[derive(Debug, Deserialize)]
struct PullParams {
    #[serde(default)]
    timestamp: i64,
}

async fn pull(State(job): State<Arc<Job>>, Query(since): Query<PullParams>) -> Response {
    let idle = job.connections.idle_secs();
    spool::http::pull(&job.spool, since.timestamp, idle, || job.report_states()).await
}

async fn metrics(State(meter): State<Arc<Meter>>) -> Result<Response, ErrorResponse> {
    let usage = meter.read().await.ok_or_else(|| ErrorResponse::not_found("metrics are not available"))?;
    Ok(Json(usage).into_response())
}
