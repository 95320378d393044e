//! HTTP API of the shim: listeners, authentication and routes.
//!
//! There are two listeners. The unix socket offers every call; each call carries the credential of the host, and a task
//! specification also the signature of the server. The loopback port of `--compat-tcp` offers the calls that a dstack
//! server makes and requires neither; the policy of the host applies there as well.

mod events;
mod instance;
mod logs;
mod proxy;
mod tasks;

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use hyper::ext::Protocol;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use windlass_api::agent::{EPOCH_HEADER, EPOCH_SEEN_HEADER, port_pass::PortPass, shim::ProcessesInfo};
use windlass_model::{error_chain::format_chain, id::SubmissionId};

use super::{
    enrolment::{Enrolment, EnrolmentFile},
    events::EventLog,
    host_resources::HostResources,
    output_watcher::OutputWatcher,
    runtime::Runtime,
    tasks::{TaskError, Tasks},
};
use crate::{
    clock,
    host::gpu::Inventory,
    http::{ErrorResponse, bearer_token, unknown_route},
};

/// Version that a dstack server treats as the newest, so that it never tries to replace the agent.
pub const COMPAT_VERSION: &str = "latest";

/// Shared state of all API handlers.
pub struct Shim {
    pub home: PathBuf,
    pub tasks: Arc<Tasks>,
    pub runtime: Arc<dyn Runtime>,
    pub enrolment: EnrolmentFile,
    /// `None` for a simulated host, which has nothing to protect.
    pub host_resources: Option<HostResources>,
    pub events: EventLog,
    pub growth: OutputWatcher,
    pub gpus: Inventory,
    /// Support for plain processes on this host.
    pub processes: ProcessesInfo,
    /// Directory in which images are stored.
    pub data: PathBuf,
    /// Problems of the host that the last health check found.
    pub problems: Mutex<Vec<String>>,
    /// Cancelled to shut the process down cleanly.
    pub stop: CancellationToken,
}

/// Listener on which a call arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Socket,
    Compat,
}

#[derive(Clone)]
struct ApiState {
    shim: Arc<Shim>,
    listener: Transport,
}

/// Returns the router of the unix socket: all calls, which require the credential.
pub fn socket_router(shim: Arc<Shim>) -> Router {
    let gate = ApiState { shim, listener: Transport::Socket };
    shared_routes()
        .route("/api/tasks/{id}/logs", get(logs::read_log))
        .route("/api/tasks/{id}/job", get(logs::job_record))
        .route("/api/tasks/{id}/runner/{*path}", any(proxy::forward))
        .route("/api/events", get(events::stream))
        .route("/api/instance/host", get(instance::host))
        .fallback(unknown_route)
        .layer(middleware::from_fn_with_state(gate.clone(), authenticate))
        .with_state(gate)
}

/// Returns the router of the calls that a dstack server makes, without authentication.
pub fn compat_router(shim: Arc<Shim>) -> Router {
    shared_routes().fallback(unknown_route).with_state(ApiState { shim, listener: Transport::Compat })
}

fn shared_routes() -> Router<ApiState> {
    Router::new()
        .route("/api/healthcheck", get(instance::healthcheck))
        .route("/api/tasks", get(tasks::list).post(tasks::submit))
        .route("/api/tasks/{id}", get(tasks::info))
        .route("/api/tasks/{id}/terminate", post(tasks::terminate))
        .route("/api/tasks/{id}/remove", post(tasks::remove))
        .route("/api/instance/health", get(instance::health))
        .route("/api/instance/info", get(instance::info))
        .route("/api/components", get(instance::components))
        .route("/api/components/install", post(instance::install))
        .route("/api/shutdown", post(instance::shutdown))
        .method_not_allowed_fallback(method_not_allowed)
}

async fn method_not_allowed() -> ErrorResponse {
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
}

/// Requires the credential of the host for everything but the health check. A pass is sufficient to reach a port of a
/// task.
async fn authenticate(State(gate): State<ApiState>, mut request: Request, next: Next) -> Response {
    if request.uri().path() == "/api/healthcheck" {
        return next.run(request).await;
    }
    let Some(enrolment) = gate.shim.enrolment.enrolment() else {
        let file = gate.shim.enrolment.path().display();
        let text = format!(
            "this host is not enrolled: {file} is missing or invalid\n\
             hint: create it with `windlass-agent shim enrol`"
        );
        return ErrorResponse::unauthorized(text).into_response();
    };
    if let Some(host) = &gate.shim.host_resources {
        host.sync_gateway_key(&enrolment).await;
    }
    let shown = bearer_token(request.headers()).map(str::to_owned);
    match shown {
        Some(credential) if enrolment.knows(&credential) => {
            request.extensions_mut().insert(PresentedCredential(credential));
            next.run(request).await
        }
        Some(shown) => match enrolment.pass(&shown) {
            Some(pass) if is_pass_valid(&pass, &request) => {
                request.extensions_mut().insert(PresentedCredential(shown));
                next.run(request).await
            }
            Some(_) => {
                let text = "this pass has expired or does not permit this call";
                ErrorResponse::new(StatusCode::FORBIDDEN, text).into_response()
            }
            None => ErrorResponse::unauthorized("invalid credential for this host").into_response(),
        },
        None => ErrorResponse::unauthorized("the call has no credential (`Authorization: Bearer …`)")
            .into_response(),
    }
}

/// Returns whether a pass permits a request at this time.
fn is_pass_valid(pass: &PortPass, request: &Request) -> bool {
    // In HTTP/2, a connection to a port is a `CONNECT` with a protocol.
    let is_connect =
        || request.method() == Method::CONNECT && request.extensions().get::<Protocol>().is_some();
    pass.expires_at > clock::now_ms() / 1000
        && (request.method() == Method::GET || is_connect())
        && pass.allows(request.uri().path(), request.uri().query())
}

/// The credential that a call presented. Long-lived responses check repeatedly whether it is still valid.
#[derive(Clone)]
struct PresentedCredential(String);

/// Maximum delay until a long-lived response notices that its credential was revoked.
const CREDENTIAL_CHECK_INTERVAL: Duration = Duration::from_secs(2);

impl Shim {
    /// Returns when the credential no longer belongs to this host.
    async fn credential_revoked(&self, shown: &PresentedCredential) {
        // An expired pass permits no new connections; established ones continue.
        let holds = |enrolment: &Enrolment| enrolment.knows(&shown.0) || enrolment.pass(&shown.0).is_some();
        while self.enrolment.enrolment().is_some_and(|enrolment| holds(&enrolment)) {
            tokio::time::sleep(CREDENTIAL_CHECK_INTERVAL).await;
        }
    }
}

impl ApiState {
    /// Epoch of a call. A dstack server sends none.
    fn epoch(&self, headers: &HeaderMap) -> Result<Option<i64>, ErrorResponse> {
        if self.listener == Transport::Compat {
            return Ok(None);
        }
        let Some(value) = headers.get(EPOCH_HEADER) else { return Ok(None) };
        let epoch = value.to_str().ok().and_then(|text| text.parse().ok());
        epoch
            .map(Some)
            .ok_or_else(|| ErrorResponse::bad_request(format!("`{EPOCH_HEADER}` is not an integer")))
    }
}

fn parse_task_id(text: &str) -> Result<SubmissionId, ErrorResponse> {
    text.parse().map_err(|_| ErrorResponse::not_found("invalid task id"))
}

fn task_not_found(id: SubmissionId) -> ErrorResponse {
    ErrorResponse::not_found(format!("task {id} not found"))
}

impl From<TaskError> for ErrorResponse {
    fn from(error: TaskError) -> Self {
        let status = match &error {
            TaskError::NotFound { .. } => StatusCode::NOT_FOUND,
            TaskError::Gone { .. } => StatusCode::GONE,
            TaskError::Fenced { .. } => StatusCode::PRECONDITION_FAILED,
            TaskError::Alive { .. } => StatusCode::CONFLICT,
            TaskError::RemovalPending { .. } | TaskError::Full { .. } => StatusCode::SERVICE_UNAVAILABLE,
            TaskError::NotAccepted { .. } | TaskError::Journal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let refusal = Self::new(status, format_chain(&error));
        match error {
            TaskError::Fenced { seen, .. } => {
                refusal.header(axum::http::HeaderName::from_static(EPOCH_SEEN_HEADER), seen)
            }
            TaskError::NotFound { .. }
            | TaskError::Gone { .. }
            | TaskError::Alive { .. }
            | TaskError::RemovalPending { .. }
            | TaskError::Full { .. }
            | TaskError::NotAccepted { .. }
            | TaskError::Journal { .. } => refusal,
        }
    }
}
