//! Dispatch of requests to handlers: authorization, decoding, and the form of errors.
//!
//! A handler is registered for an operation of the table and cannot be reached without it: the access level is checked
//! here, before the body is read, and the kind of registration must match the level or the server does not compile.

use std::{future::Future, net::IpAddr, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{FromRequest, Multipart, Query, RawPathParams, Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::Response,
    routing::{MethodFilter, on},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{Instant, timeout};
use windlass_api::{
    Access, Body as Kind, Method, Operation, RenderedJson,
    error::{BadRequest, ErrorBody as Detail, ErrorDetail, ValidationError},
};
use windlass_model::{error_chain::format_chain, id::GatewayId};

use crate::{
    agents::PortStream,
    app::App,
    auth::{self, Caller, ProjectScope},
    db::DbError,
    error::{Error, Result},
    limits,
    services::{SseStream, Upload},
    stream_rights::{RightsBasis, StreamRights},
};

mod depth;
mod port_stream;
mod sse;

/// Time within which a client must have sent its file.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(300);
/// Bytes that a multipart frame may add to the file in it.
const FRAME_BYTES_MAX: usize = 64 * 1024;

/// Seconds after which a failed request may succeed: by then a restarted database is up again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("2");

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Address of the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Marker of an encrypted connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncryptedConnection;

/// Values that may be returned where a `T` is expected: a `T`, or its rendered form.
pub trait ResponseFor<T>: Serialize {}

impl<T: Serialize> ResponseFor<T> for T {}
impl<T> ResponseFor<Vec<T>> for Vec<RenderedJson<T>> {}

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
                let caller = authenticate::<O>(&app, arrived.peer(), arrived.authorization()).await?;
                caller.must(O::ACCESS)?;
                let request = arrived.read::<O>(&app).await?;
                handler(app, caller, request).await
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
                let caller = authenticate::<O>(&app, arrived.peer(), arrived.authorization()).await?;
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
        F: Fn(App, GatewayId, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<O::Response>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Gateway)) }
        self.mount::<O, _, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let (peer, token) = (arrived.peer(), arrived.authorization());
                let gateway =
                    throttle_failed_auth(&app, peer, token, auth::authenticate_gateway(&app, token)).await?;
                let request = arrived.read::<O>(&app).await?;
                handler(app, gateway, request).await
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
                let caller = authenticate::<O>(&app, arrived.peer(), arrived.authorization()).await?;
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
                let caller = authenticate::<O>(&app, arrived.peer(), arrived.authorization()).await?;
                let scope = resolve_scope::<O>(&app, caller, &arrived.path).await?;
                let (request, upload) = arrived.read_file::<O>(&app).await?;
                handler(app, scope, request, upload).await
            }
        })
    }

    /// As `project`, with a stream of events as the response. The handler receives the id of the last event that a
    /// reconnecting client had received.
    #[must_use]
    pub fn project_events<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, ProjectScope, O::Request, Option<u64>) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<SseStream<O::Response>>> + Send,
    {
        const { assert!(O::ACCESS.in_project() && matches!(O::BODY, Kind::Events)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let authorization = arrived.authorization().map(str::to_owned);
                let (last, path) = (arrived.last_event_id()?, arrived.path.clone());
                let caller = authenticate::<O>(&app, arrived.peer(), authorization.as_deref()).await?;
                let within = resolve_scope::<O>(&app, caller, &path).await?;
                let rights = StreamRights::register(&app, rights_basis(&within));
                let place = port_stream::StreamSlot::for_response(&app, within.caller.user.id)?;
                let request = arrived.read::<O>(&app).await?;
                let beats = handler(app.clone(), within, request, last).await?;
                let watched = app.clone();
                let allowed = move || {
                    let (app, authorization, path) = (watched.clone(), authorization.clone(), path.clone());
                    async move { reauthorize::<O>(&app, authorization.as_deref(), &path).await.map(drop) }
                };
                Ok(sse::respond(app, beats, place, rights, allowed))
            }
        })
    }

    /// As `project`, and the connection becomes a stream to what the handler opened. `check` determines, repeatedly
    /// while the stream is open, whether the caller still has the rights to the object and the project.
    #[must_use]
    pub fn project_stream<O, F, R, C, S>(self, handler: F, check: C) -> Self
    where
        O: Operation<Request: Clone + Sync>,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<PortStream>> + Send,
        C: Fn(App, ProjectScope, O::Request) -> S + Clone + Send + Sync + 'static,
        S: Future<Output = Result<()>> + Send,
    {
        const { assert!(O::ACCESS.in_project() && matches!(O::BODY, Kind::Stream)) }
        self.mount_raw::<O, _, _>(move |app, mut arrived| {
            let (handler, check) = (handler.clone(), check.clone());
            async move {
                let authorization = arrived.authorization().map(str::to_owned);
                let path = arrived.path.clone();
                let asker = authenticate::<O>(&app, arrived.peer(), authorization.as_deref()).await?;
                let within = resolve_scope::<O>(&app, asker, &path).await?;
                let rights = StreamRights::register(&app, rights_basis(&within));
                let caller = port_stream::require_upgrade(&mut arrived.request)?;
                let request = arrived.read::<O>(&app).await?;
                let place = port_stream::StreamSlot::for_stream(&app, within.caller.user.id)?;
                let port = handler(app.clone(), within, request.clone()).await?;
                let watched = app.clone();
                let allowed = move || {
                    let (app, authorization, path) = (watched.clone(), authorization.clone(), path.clone());
                    let (check, request) = (check.clone(), request.clone());
                    async move {
                        let scope = reauthorize::<O>(&app, authorization.as_deref(), &path).await?;
                        check(app, scope, request).await
                    }
                };
                Ok(port_stream::respond(app, caller, port, place, rights, allowed))
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
        self.router
            .merge(crate::routes::arvados::router())
            .fallback(|| async { error_body(StatusCode::NOT_FOUND, "Not Found") })
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
async fn authenticate<O: Operation>(
    app: &App,
    peer: Option<IpAddr>,
    authorization: Option<&str>,
) -> Result<Caller> {
    let caller =
        throttle_failed_auth(app, peer, authorization, auth::authenticate(app, authorization)).await?;
    caller.require_operation(O::ID)?;
    app.paces().operation(O::ID, caller.user.id.0)?;
    Ok(caller)
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
    authorization: Option<&str>,
    path: &[String],
) -> Result<ProjectScope> {
    let caller = auth::authenticate(app, authorization).await?;
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

/// A request whose caller is not known yet.
struct IncomingRequest {
    request: Request,
    /// Values of the path's parameters, in order.
    path: Vec<String>,
}

impl IncomingRequest {
    /// Address of the other end of the connection, which may be a proxy's.
    fn peer(&self) -> Option<IpAddr> {
        self.request.extensions().get::<Peer>().map(|peer| peer.0)
    }

    fn authorization(&self) -> Option<&str> {
        self.request.headers().get(header::AUTHORIZATION)?.to_str().ok()
    }

    /// Idempotency key: 1 to 200 printable characters.
    fn idempotency_key(&self) -> Result<Option<String>> {
        let Some(key) = self.request.headers().get("idempotency-key") else { return Ok(None) };
        let key = key.to_str().ok().filter(|key| (1..=200).contains(&key.len()));
        key.map(|key| Some(key.to_owned())).ok_or_else(|| {
            Error::refused("invalid `Idempotency-Key` header: expected 1 to 200 printable characters")
        })
    }

    fn last_event_id(&self) -> Result<Option<u64>> {
        let Some(id) = self.request.headers().get("last-event-id") else { return Ok(None) };
        let id = id.to_str().ok().and_then(|id| id.parse().ok());
        id.map(Some).ok_or_else(|| Error::refused("invalid `Last-Event-ID` header: expected a number"))
    }

    async fn read<O: Operation>(self, app: &App) -> Result<O::Request> {
        match O::BODY {
            Kind::Json => {
                let limit = app.settings().limits.request_bytes;
                let body = collect(self.request.into_body(), limit, app.settings().body_timeout).await?;
                decode(if body.is_empty() || &body[..] == b"null" { b"{}" } else { &body })
            }
            Kind::Query | Kind::Text | Kind::File | Kind::Events | Kind::Stream => query(&self.request),
        }
    }

    async fn read_file<O: Operation>(self, app: &App) -> Result<(O::Request, Upload)> {
        let parsed = query(&self.request)?;
        let limit = app.settings().limits.upload_bytes;
        let (parts, body) = self.request.into_parts();
        let body = Body::new(Limited::new(body, limit.saturating_add(FRAME_BYTES_MAX)));
        let reading = read_upload(Request::from_parts(parts, body), limit);
        let upload = timeout(UPLOAD_TIMEOUT, reading).await.map_err(|_| Error::Slow)??;
        Ok((parsed, upload))
    }
}

pub(crate) async fn collect(body: Body, limit: usize, within: Duration) -> Result<Bytes> {
    let reading = Limited::new(body, limit).collect();
    match timeout(within, reading).await {
        Err(_) => Err(Error::Slow),
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Error::TooLarge { limit, name: limits::REQUEST_MAX })
        }
        Ok(Err(_)) => Err(invalid_body("the request body is incomplete")),
    }
}

async fn read_upload(request: Request, limit: usize) -> Result<Upload> {
    let unreadable = |_| invalid_body("expected multipart/form-data with a part `file`");
    let mut parts = Multipart::from_request(request, &())
        .await
        .map_err(|_| invalid_body("expected multipart/form-data with a part `file`"))?;
    while let Some(mut part) = parts.next_field().await.map_err(unreadable)? {
        if part.name() != Some("file") {
            continue;
        }
        let name = part.file_name().unwrap_or_default().to_owned();
        let mut content = Vec::new();
        while let Some(chunk) = part.chunk().await.map_err(|error| too_large_or_broken(&error, limit))? {
            if content.len() + chunk.len() > limit {
                return Err(Error::TooLarge { limit, name: limits::UPLOAD_MAX });
            }
            content.extend_from_slice(&chunk);
        }
        return Ok(Upload { name, content });
    }
    Err(Error::Invalid(vec![violation(&["body", "file"], "field required".into(), "missing")]))
}

fn too_large_or_broken(error: &axum::extract::multipart::MultipartError, limit: usize) -> Error {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        Error::TooLarge { limit, name: limits::UPLOAD_MAX }
    } else {
        invalid_body("the uploaded file is incomplete")
    }
}

fn invalid_body(msg: &str) -> Error {
    Error::Invalid(vec![violation(&["body"], msg.to_owned(), "value_error")])
}

fn query<T: DeserializeOwned>(request: &Request) -> Result<T> {
    if request.uri().query().is_some_and(|query| query.contains("%00")) {
        return Err(Error::Invalid(vec![violation(&["query"], NUL.into(), "value_error")]));
    }
    Query::try_from_uri(request.uri())
        .map(|Query(parsed)| parsed)
        .map_err(|error| Error::Invalid(vec![violation(&["query"], error.body_text(), "value_error")]))
}

/// No stored or queried text contains NUL, and Postgres rejects it.
const NUL: &str = "text must not contain NUL";

/// Returns whether a JSON text contains the escape for NUL: after an odd number of backslashes.
pub(crate) fn has_nul(body: &[u8]) -> bool {
    body.windows(6).enumerate().any(|(at, window)| {
        window == br"\u0000" && body[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0
    })
}

/// Decodes a body. Unknown fields are ignored, so that newer clients work.
fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    if has_nul(body) {
        return Err(invalid_body(NUL));
    }
    if depth::is_too_deep(body) {
        return Err(invalid_body(depth::TOO_DEEP));
    }
    let mut reader = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let mut loc = vec!["body".to_owned()];
        loc.extend(error.path().iter().filter_map(segment_name));
        let msg = error.inner().to_string();
        // The missing field is part of the location, as in every other violation.
        if let Some(rest) = msg.strip_prefix("missing field `")
            && let Some((field, _)) = rest.split_once('`')
        {
            loc.push(field.to_owned());
            return ValidationError { loc, msg: "field required".into(), r#type: "missing".into() };
        }
        let kind = if error.inner().is_data() { "value_error" } else { "json_invalid" };
        ValidationError { loc, msg, r#type: kind.into() }
    });
    let ended = reader.end();
    match (parsed, ended) {
        (Ok(parsed), Ok(())) => Ok(parsed),
        (Ok(_), Err(error)) => {
            Err(Error::Invalid(vec![violation(&["body"], error.to_string(), "json_invalid")]))
        }
        (Err(violation), _) => Err(Error::Invalid(vec![violation])),
    }
}

fn segment_name(segment: &serde_path_to_error::Segment) -> Option<String> {
    use serde_path_to_error::Segment;
    match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { variant } => Some(variant.clone()),
        Segment::Unknown => None,
    }
}

fn violation(loc: &[&str], msg: String, kind: &str) -> ValidationError {
    ValidationError { loc: loc.iter().map(|part| (*part).to_owned()).collect(), msg, r#type: kind.to_owned() }
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
    let internal = |status: StatusCode| {
        let chain = format_chain(error);
        tracing::error!(request = %id, error = %chain, "failed to answer request");
        error_body(status, &format!("Internal server error (request {id})"))
    };
    match error {
        Error::Refused { code, msg } => {
            let entry = BadRequest { code: *code, msg: msg.clone(), fields: None };
            json(StatusCode::BAD_REQUEST, &Detail { detail: vec![entry] })
        }
        Error::Invalid(violations) => {
            json(StatusCode::UNPROCESSABLE_ENTITY, &Detail { detail: violations.clone() })
        }
        Error::Unauthenticated => error_body(StatusCode::UNAUTHORIZED, &error.to_string()),
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
        Error::Slow => error_body(StatusCode::REQUEST_TIMEOUT, &error.to_string()),
        Error::Db(cause) if cause.is_passing() => {
            tracing::warn!(request = %id, error = %format_chain(error), "failed to answer request");
            let (status, what) = database_error(cause);
            retry_later(status, &format!("{what}; try again (request {id})"))
        }
        Error::Db(_)
        | Error::Key(_)
        | Error::Document(_)
        | Error::Random(_)
        | Error::SshKey(_)
        | Error::KeyPair(_)
        | Error::NodeKey(_)
        | Error::Logs(_) => internal(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

#[cfg(test)]
mod tests {
    use super::has_nul;

    #[test]
    fn escaped_nul_is_detected_without_false_positives() {
        assert!(has_nul(br#"{"a":"\u0000"}"#));
        assert!(has_nul(br#"{"a":"x\\\u0000"}"#));
        assert!(!has_nul(br#"{"a":"\\u0000"}"#), "a backslash and five letters");
        assert!(!has_nul(br#"{"a":"u0000"}"#));
    }
}
