//! OpenAI-compatible endpoint of a project: lists its models, and routes requests by the model that they name.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Limited};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, Uri,
    body::Body,
    header::{self, HeaderValue},
    http::uri::PathAndQuery,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    auth::{self, AccessGrant, Verdict},
    body::RequestBody,
    headers::ClientConnection,
    proxy::Proxy,
    response_body::ResponseBody,
    route_table::{Routes, ServiceState},
};

/// Maximum size of a request. It is read as a whole, because the model's name may be anywhere in it.
const BODY_MAX: usize = 32 * 1024 * 1024;
/// Calls that are forwarded to the service of a model.
const MODEL_CALLS: [&str; 3] = ["/chat/completions", "/completions", "/embeddings"];

/// Refused call: status, type and message, as clients of the OpenAI API expect them.
struct ModelCallError(StatusCode, &'static str, String);

/// Returns the models of a project, by name.
pub fn list(routes: &Routes, project: &str) -> Value {
    let mut models: Vec<_> = routes
        .services()
        .into_iter()
        .filter(|live| live.service.project == project)
        .filter_map(|live| live.service.model.clone())
        .collect();
    models.sort_by(|a, b| (&a.name, b.created).cmp(&(&b.name, a.created)));
    models.dedup_by(|a, b| a.name == b.name);
    let data: Vec<Value> = models
        .iter()
        .map(|model| json!({ "object": "model", "id": model.name, "created": model.created, "owned_by": project }))
        .collect();
    json!({ "object": "list", "data": data })
}

/// Returns the service of a model: of several, one with replicas, then the newest.
fn find_service(routes: &Routes, project: &str, name: &str) -> Option<Arc<ServiceState>> {
    let serves = |live: &Arc<ServiceState>| {
        live.service.project == project && live.service.model.as_ref().is_some_and(|model| model.name == name)
    };
    routes.services().into_iter().filter(serves).max_by_key(|live| {
        (!live.replicas.is_empty(), live.service.model.as_ref().map_or(0, |model| model.created))
    })
}

/// Handles a request to `BASE/PROJECT/…`, such as `/proxy/models/main/chat/completions`.
pub async fn handle<B>(
    proxy: &Proxy,
    origin: &ClientConnection,
    base: &str,
    request: Request<B>,
) -> Response<ResponseBody>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match route(proxy, origin, base, request).await {
        Ok(response) => response,
        Err(ModelCallError(status, kind, text)) => {
            let body = json!({ "error": { "message": text, "type": kind, "param": null, "code": null } });
            json_response(status, &body)
        }
    }
}

async fn route<B>(
    proxy: &Proxy,
    origin: &ClientConnection,
    base: &str,
    request: Request<B>,
) -> Result<Response<ResponseBody>, ModelCallError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let path = request.uri().path().strip_prefix(base).and_then(|path| path.strip_prefix('/'));
    let (project, call) =
        path.and_then(|path| path.find('/').map(|at| path.split_at(at))).ok_or_else(unknown_call)?;
    let (project, call) = (project.to_owned(), call.to_owned());
    let admitted = authenticate(proxy, origin, request.headers(), &project).await?;
    if call == "/models" && request.method() == Method::GET {
        return Ok(json_response(StatusCode::OK, &list(&proxy.routes, &project)));
    }
    let Some(call) = MODEL_CALLS.into_iter().find(|known| **known == call) else {
        return Err(unknown_call());
    };
    if request.method() != Method::POST {
        let text = format!("`{call}` requires POST");
        return Err(ModelCallError(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", text));
    }
    let (mut parts, body) = request.into_parts();
    let body = read_body(body).await?;
    let live = service_for(&proxy.routes, &project, &body)?;
    let prefix = live.service.model.as_ref().map_or("", |model| model.prefix.trim_end_matches('/'));
    let path: PathAndQuery = format!("{prefix}{call}").parse().map_err(|_| unknown_call())?;
    parts.uri = Uri::from(path);
    // The body was read as a whole, so its former framing no longer applies.
    parts.headers.remove(header::TRANSFER_ENCODING);
    parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    Ok(proxy
        .serve_authenticated(live, origin, admitted, Request::from_parts(parts, RequestBody::from(body)))
        .await)
}

fn unknown_call() -> ModelCallError {
    let text = "unknown endpoint: expected GET models, or POST chat/completions, completions or embeddings";
    ModelCallError(StatusCode::NOT_FOUND, "invalid_request_error", text.to_owned())
}

async fn authenticate(
    proxy: &Proxy,
    origin: &ClientConnection,
    headers: &HeaderMap,
    project: &str,
) -> Result<(Option<HeaderValue>, AccessGrant), ModelCallError> {
    let refused = |status, text: &str| Err(ModelCallError(status, "authentication_error", text.to_owned()));
    let Some((token, _)) = auth::find_token(headers) else {
        return refused(StatusCode::UNAUTHORIZED, "missing API key: use the token of a project member");
    };
    match proxy.gatekeeper.check(token, project, origin.peer.ip()).await {
        Verdict::Allow { identity } => Ok((identity, AccessGrant::new(&proxy.gatekeeper, token, project))),
        Verdict::Deny => {
            refused(StatusCode::FORBIDDEN, "the token does not belong to a member of this project")
        }
        Verdict::Unknown => refused(
            StatusCode::SERVICE_UNAVAILABLE,
            "the token cannot be checked now: the server does not respond",
        ),
    }
}

async fn read_body<B>(body: B) -> Result<Bytes, ModelCallError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match Limited::new(body, BODY_MAX).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            let text = format!("the request body is larger than {} MiB", BODY_MAX / 1024 / 1024);
            Err(ModelCallError(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", text))
        }
        Err(_) => {
            let text = "failed to read the request body".to_owned();
            Err(ModelCallError(StatusCode::BAD_REQUEST, "invalid_request_error", text))
        }
    }
}

fn service_for(routes: &Routes, project: &str, body: &[u8]) -> Result<Arc<ServiceState>, ModelCallError> {
    /// The part of a request that matters here.
    #[derive(Deserialize)]
    struct ModelRequest {
        model: String,
    }
    let call: ModelRequest = serde_json::from_slice(body).map_err(|error| {
        let text = format!("the request must be JSON with a `model` field: {error}");
        ModelCallError(StatusCode::BAD_REQUEST, "invalid_request_error", text)
    })?;
    find_service(routes, project, &call.model).ok_or_else(|| {
        let text = format!("no service of this project serves the model `{}`", call.model);
        ModelCallError(StatusCode::NOT_FOUND, "invalid_request_error", text)
    })
}

fn json_response(status: StatusCode, body: &Value) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::text(Bytes::from(body.to_string())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
