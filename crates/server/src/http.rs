//! Dispatch of requests to handlers: authorization, decoding, and the form of errors.
//!
//! A handler is registered for an operation of the table and cannot be reached without it: the access level is checked
//! here, before the body is read, and the kind of registration must match the level or the server does not compile.

use std::{future::Future, net::IpAddr};

use axum::{
    Router,
    body::Body,
    extract::{RawPathParams, Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::Response,
    routing::{MethodFilter, on},
};
use serde::Serialize;
use tokio::time::Instant;
use windlass_api::{
    Access, Body as Kind, Method, Operation, RenderedJson,
    error::{BadRequest, ErrorBody as Detail, ErrorDetail},
};
use windlass_model::error_chain::format_chain;

use crate::{
    app::App,
    auth::{self, Caller, GatewayCaller, ProjectScope},
    db::DbError,
    error::{Error, Result},
    services::{Upload, sessions::Browser},
    stream_rights::RightsBasis,
};

pub(crate) mod credentials;
mod depth;
mod guarded_body;
mod incoming;
mod port_stream;
mod sse;
mod streaming;
mod terminal;

pub(crate) use self::incoming::{collect, has_nul};
use self::{credentials::Credentials, incoming::IncomingRequest};

/// Seconds after which a failed request may succeed: by then a restarted database is up again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("2");

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Values that may be returned where a `T` is expected: a `T`, or its rendered form.
pub trait ResponseFor<T>: Serialize {}

impl<T: Serialize> ResponseFor<T> for T {}
impl<T> ResponseFor<Vec<T>> for Vec<RenderedJson<T>> {}

/// Additional headers of a response.
pub(crate) type ResponseHeaders = Vec<(HeaderName, String)>;

/// Handlers by operation.
#[derive(Default)]
pub struct ApiRoutes {
    router: Router<App>,
    ids: Vec<&'static str>,
}

impl ApiRoutes {
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a handler without authentication.
    #[must_use]
    pub fn open<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Open)) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let request = arrived.read::<O>(&app).await?;
                handler(app, request).await
            }
        })
    }

    /// Registers a handler for callers with a token.
    #[must_use]
    pub fn token<O, F, R, A>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, Caller, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<A>> + Send,
        A: ResponseFor<O::Response>,
    {
        const { assert!(!O::ACCESS.in_project() && !matches!(O::ACCESS, Access::Open)) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let caller = authenticate::<O>(&app, &arrived).await?;
                caller.must(O::ACCESS)?;
                let request = arrived.read::<O>(&app).await?;
                handler(app, caller, request).await
            }
        })
    }

    /// As `open`, for a browser. The handler also returns headers of the response.
    #[must_use]
    pub(crate) fn open_browser<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, Browser, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<(O::Response, ResponseHeaders)>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Open)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let browser = arrived.browser(&app);
                let request = arrived.read::<O>(&app).await?;
                let (answer, headers) = handler(app, browser, request).await?;
                Ok(with_headers(success::<O, _>(&answer), headers))
            }
        })
    }

    /// As `token`, for a browser. The handler also returns headers of the response.
    #[must_use]
    pub(crate) fn token_browser<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, Caller, Browser, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<(O::Response, ResponseHeaders)>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Token)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let browser = arrived.browser(&app);
                let caller = authenticate::<O>(&app, &arrived).await?;
                let request = arrived.read::<O>(&app).await?;
                let (answer, headers) = handler(app, caller, browser, request).await?;
                Ok(with_headers(success::<O, _>(&answer), headers))
            }
        })
    }

    /// Registers a handler for callers with rights in the project that the path names.
    #[must_use]
    pub fn project<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(O::ACCESS.in_project()) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let key = arrived.idempotency_key()?;
                let caller = authenticate::<O>(&app, &arrived).await?;
                let mut scope = resolve_scope::<O>(&app, caller, &arrived.path).await?;
                scope.idempotency_key = key;
                let request = arrived.read::<O>(&app).await?;
                handler(app, scope, request).await
            }
        })
    }

    /// Registers a handler for the processes of a gateway.
    #[must_use]
    pub fn gateway<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, GatewayCaller, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Gateway)) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let (peer, token) = (arrived.peer(), arrived.authorization());
                let caller =
                    throttle_failed_auth(&app, peer, token, auth::authenticate_gateway(&app, token)).await?;
                let request = arrived.read::<O>(&app).await?;
                handler(app, caller, request).await
            }
        })
    }

    /// As `token`, with a file.
    #[must_use]
    pub fn token_upload<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, Caller, O::Request, Upload) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(!O::ACCESS.in_project() && !matches!(O::ACCESS, Access::Open)) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let caller = authenticate::<O>(&app, &arrived).await?;
                caller.must(O::ACCESS)?;
                let (request, upload) = arrived.read_file::<O>(&app).await?;
                handler(app, caller, request, upload).await
            }
        })
    }

    /// As `project`, with a file.
    #[must_use]
    pub fn project_upload<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, ProjectScope, O::Request, Upload) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(O::ACCESS.in_project()) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let caller = authenticate::<O>(&app, &arrived).await?;
                let scope = resolve_scope::<O>(&app, caller, &arrived.path).await?;
                let (request, upload) = arrived.read_file::<O>(&app).await?;
                handler(app, scope, request, upload).await
            }
        })
    }

    fn mount<O, F, R, A>(self, handle: F) -> Self
    where
        O: Operation,
        F: Fn(App, IncomingRequest) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<A>> + Send,
        A: ResponseFor<O::Response>,
    {
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let answer = handle(app, arrived);
            async move { answer.await.map(|answer| success::<O, A>(&answer)) }
        })
    }

    fn mount_raw<O, F, R>(mut self, handle: F) -> Self
    where
        O: Operation,
        F: Fn(App, IncomingRequest) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<Response>> + Send,
    {
        let filter = match O::METHOD {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
        };
        let answer = move |State(app): State<App>, params: RawPathParams, request: Request| {
            let handle = handle.clone();
            async move {
                let began = Instant::now();
                let id = request_id(&app, &request);
                let path = params.iter().map(|(_, value)| value.to_owned()).collect();
                let done = handle(app.clone(), IncomingRequest { request, path }).await;
                let mut response = match done {
                    Ok(answer) => answer,
                    Err(error) => error_response(&error, &id),
                };
                let took = began.elapsed();
                let status = response.status().as_u16();
                app.metrics().answered(O::ID, status, took);
                tracing::debug!(request = %id, operation = O::ID, status, took_us = took.as_micros(), "answered request");
                if let Ok(id) = HeaderValue::from_str(&id) {
                    response.headers_mut().insert(REQUEST_ID.clone(), id);
                }
                response
            }
        };
        self.router = self.router.route(O::PATH, on(filter, answer));
        self.ids.push(O::ID);
        self
    }

    /// Ids of the operations that have a handler.
    pub fn ids(&self) -> &[&'static str] {
        &self.ids
    }

    pub fn into_router(self, app: App) -> Router {
        let mut router = self.router.merge(crate::routes::arvados::router());
        if app.settings().web_ui {
            router = router.merge(crate::web_ui::router());
        }
        router
            .fallback(|| async { not_found() })
            .method_not_allowed_fallback(|| async {
                error_body(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
            })
            .layer(middleware::from_fn(reject_multiple_hosts))
            .with_state(app)
    }
}

/// Rejects a request that names two hosts, because two readers may choose different ones. The proxy rejects it too.
async fn reject_multiple_hosts(request: Request, next: Next) -> Response {
    if request.headers().get_all(header::HOST).iter().nth(1).is_none() {
        return next.run(request).await;
    }
    let mut response = error_body(StatusCode::BAD_REQUEST, "The request has more than one `Host` header");
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Authenticates the caller and applies its rate limit. Guessable tokens are not even looked up for an address with too
/// many failures; a generated token cannot be guessed, so its owner is admitted regardless of other attempts from that
/// address.
fn authenticate<'a, O: Operation>(
    app: &'a App,
    arrived: &IncomingRequest,
) -> impl Future<Output = Result<Caller>> + Send + use<'a, O> {
    let (credentials, peer) = (Credentials::of::<O>(app, arrived), arrived.peer());
    async move {
        let credentials = credentials?;
        let lookup = credentials.authenticate(app);
        let caller = match credentials.header() {
            Some(token) => throttle_failed_auth(app, peer, Some(token), lookup).await?,
            None => lookup.await?,
        };
        caller.require_operation(O::ID)?;
        app.paces().operation(O::ID, caller.user.id.0)?;
        Ok(caller)
    }
}

/// Finds the owner of a token, unless its address has too many failures.
async fn throttle_failed_auth<T>(
    app: &App,
    peer: Option<IpAddr>,
    authorization: Option<&str>,
    lookup: impl Future<Output = Result<T>>,
) -> Result<T> {
    if let Some(peer) = peer
        && !auth::is_unguessable(app, authorization)
    {
        app.paces().check_login(peer)?;
    }
    let found = lookup.await;
    if let (Err(Error::Denied { .. }), None) = (&found, authorization) {
        return Err(Error::Unauthenticated);
    }
    if let (Err(Error::Denied { .. }), Some(peer), Some(_)) = (&found, peer, authorization) {
        app.paces().tried(peer)?;
    }
    found
}

/// Basis of the rights of a stream in a project.
fn rights_basis(scope: &ProjectScope) -> RightsBasis {
    RightsBasis {
        user: scope.caller.user.id,
        token_hash: scope.caller.token.hash(),
        queue_token: None,
        project: Some(scope.project.name.clone()),
    }
}

/// Checks that an admitted caller still has the rights.
async fn reauthorize<O: Operation>(
    app: &App,
    credentials: &Credentials,
    path: &[String],
) -> Result<ProjectScope> {
    let caller = credentials.authenticate(app).await?;
    resolve_scope::<O>(app, caller, path).await
}

async fn resolve_scope<O: Operation>(app: &App, caller: Caller, path: &[String]) -> Result<ProjectScope> {
    let (project, rest) = path.split_first().ok_or(Error::Unknown { msg: "Not Found" })?;
    if path.iter().any(|part| part.contains('\0')) {
        return Err(Error::Unknown { msg: "Not Found" });
    }
    let scope = auth::project_scope(app, caller, project, rest.to_vec()).await?;
    scope.must(O::ACCESS)?;
    Ok(scope)
}

/// Client's id of the request, if it is safe to repeat, else a generated id.
fn request_id(app: &App, request: &Request) -> String {
    request
        .headers()
        .get(&REQUEST_ID)
        .and_then(|id| id.to_str().ok())
        .filter(|id| {
            (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        })
        .map_or_else(|| app.next_request_id(), str::to_owned)
}

fn success<O: Operation, A: ResponseFor<O::Response>>(answer: &A) -> Response {
    if O::BODY == Kind::Text {
        let text = serde_json::to_value(answer).ok().and_then(|text| text.as_str().map(str::to_owned));
        return with_body(StatusCode::OK, "text/plain; charset=utf-8", text.unwrap_or_default().into());
    }
    json(StatusCode::OK, answer)
}

fn with_headers(mut response: Response, headers: ResponseHeaders) -> Response {
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().append(name, value);
        }
    }
    response
}

fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => with_body(status, "application/json", body.into()),
        Err(error) => {
            tracing::error!(%error, "failed to encode response");
            error_body(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error")
        }
    }
}

fn with_body(status: StatusCode, kind: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn error_body(status: StatusCode, msg: &str) -> Response {
    json(status, &Detail { detail: ErrorDetail { code: None, msg: msg.to_owned() } })
}

pub(crate) fn not_found() -> Response {
    error_body(StatusCode::NOT_FOUND, "Not Found")
}

fn database_error(cause: &DbError) -> (StatusCode, &'static str) {
    if matches!(cause, DbError::Full { .. }) {
        (StatusCode::INSUFFICIENT_STORAGE, "The database's disk is full")
    } else if matches!(cause, DbError::ReadOnly { .. }) {
        (StatusCode::SERVICE_UNAVAILABLE, "The database does not accept writes")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "The database is unavailable")
    }
}

/// Error response for a temporary failure.
fn retry_later(status: StatusCode, msg: &str) -> Response {
    let mut response = error_body(status, msg);
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
    response
}

/// Builds the response for an error. Internal errors are logged only here; the client receives only the request's id.
fn error_response(error: &Error, id: &str) -> Response {
    let internal = |what: &str| {
        let chain = format_chain(error);
        tracing::error!(request = %id, error = %chain, "failed to answer request");
        error_body(StatusCode::INTERNAL_SERVER_ERROR, &format!("{what} (request {id})"))
    };
    match error {
        Error::Refused { code, msg } => {
            let entry = BadRequest { code: *code, msg: msg.clone(), fields: None };
            json(StatusCode::BAD_REQUEST, &Detail { detail: vec![entry] })
        }
        Error::Invalid(violations) => {
            json(StatusCode::UNPROCESSABLE_ENTITY, &Detail { detail: violations.clone() })
        }
        Error::Unauthenticated | Error::LoginRefused { .. } => {
            error_body(StatusCode::UNAUTHORIZED, &error.to_string())
        }
        Error::Denied { msg } => error_body(StatusCode::FORBIDDEN, msg),
        Error::Unknown { msg } => error_body(StatusCode::NOT_FOUND, msg),
        Error::Busy { msg } => retry_later(StatusCode::SERVICE_UNAVAILABLE, msg),
        Error::Fast | Error::StreamLimit { .. } => {
            retry_later(StatusCode::TOO_MANY_REQUESTS, &error.to_string())
        }
        Error::Conflict { msg } => error_body(StatusCode::CONFLICT, msg),
        Error::TooLarge { .. } | Error::UploadLimit { .. } => {
            error_body(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string())
        }
        Error::Slow | Error::SlowUpload { .. } => error_body(StatusCode::REQUEST_TIMEOUT, &error.to_string()),
        Error::Db(cause) if cause.is_passing() => {
            tracing::warn!(request = %id, error = %format_chain(error), "failed to answer request");
            let (status, what) = database_error(cause);
            retry_later(status, &format!("{what}; try again (request {id})"))
        }
        // Names the row, and nothing of its content.
        Error::Db(cause @ DbError::StoredDocument { .. }) => internal(&cause.to_string()),
        Error::Db(_)
        | Error::Key(_)
        | Error::Document(_)
        | Error::Random(_)
        | Error::SshKey(_)
        | Error::KeyPair(_)
        | Error::NodeKey(_)
        | Error::Logs(_) => internal("Internal server error"),
    }
}
