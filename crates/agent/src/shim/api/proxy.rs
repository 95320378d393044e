//! `/api/tasks/ID/runner/…`: calls to the runner of a task, forwarded over its socket.
//!
//! Bodies stream in both directions and are not inspected. The runner receives its token and the request; the
//! credential of the host is not forwarded. A WebSocket is passed through, from HTTP/1.1 and from HTTP/2.

use std::{io, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    response::Response,
};
use base64::{Engine, prelude::BASE64_STANDARD};
use http_body_util::{BodyExt, Limited};
use hyper::{client::conn::http1, ext::Protocol, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::Instant};
use windlass_api::agent::{EPOCH_HEADER, SIGNATURE_HEADER, shim::TaskStatus};
use windlass_model::{error_chain::format_chain, id::SubmissionId};

use super::{ApiState, PresentedCredential, Shim, parse_task_id, task_not_found};
use crate::{
    http::{self, ErrorResponse},
    safe_open::DirHandle,
    task_dir,
};

/// Maximum size of an upload.
const UPLOAD_BYTES_MAX: usize = 2 << 30;
/// Maximum size of an upload where the runtime simulates the runner and needs the whole body.
const SIMULATED_BODY_BYTES_MAX: usize = 16 << 20;
/// Time within which a started runner must listen on its socket.
const RUNNER_START_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of attempts where the kernel has no more watches, or a watch missed the socket.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Headers that apply only to the connection between the caller and the shim.
const HOP_BY_HOP_HEADERS: [HeaderName; 9] = [
    header::AUTHORIZATION,
    header::CONNECTION,
    header::HOST,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

pub(super) async fn forward(
    State(gate): State<ApiState>,
    Path((id, _)): Path<(String, String)>,
    Extension(shown): Extension<PresentedCredential>,
    request: Request,
) -> Result<Response, ErrorResponse> {
    let id = parse_task_id(&id)?;
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD | Method::CONNECT);
    if !is_read {
        gate.shim.tasks.admit(id, gate.epoch(request.headers())?).await?;
    }
    let uri = runner_uri(request.uri()).ok_or_else(|| ErrorResponse::bad_request("invalid path"))?;
    let token = gate.shim.tasks.runner_token(id).ok_or_else(|| task_not_found(id))?;
    match respond_if_simulated(&gate.shim, id, &uri, request).await? {
        RunnerCall::Responded(response) => Ok(response),
        RunnerCall::Forward(request) => {
            check_length(request.headers())?;
            let runner = connect(&gate.shim, id).await?;
            let forwarded = forward_request(runner, uri, &token, request).await;
            let (response, upgraded) =
                forwarded.map_err(|error| runner_unreachable(id, &format_chain(error.as_ref())))?;
            if let Some((caller, runner)) = upgraded {
                let shim = gate.shim;
                tokio::spawn(async move {
                    tokio::select! {
                        () = copy_both_ways(caller, runner) => {}
                        () = shim.credential_revoked(&shown) => {}
                    }
                });
            }
            Ok(response)
        }
    }
}

/// Returns the part of the path after `/runner`, with the query. Nothing is decoded.
fn runner_uri(uri: &Uri) -> Option<Uri> {
    let whole = uri.path_and_query()?.as_str();
    let (_, rest) = whole.strip_prefix("/api/tasks/")?.split_once("/runner/")?;
    format!("/{rest}").parse().ok()
}

enum RunnerCall {
    Responded(Response),
    Forward(Request),
}

async fn respond_if_simulated(
    shim: &Shim,
    id: SubmissionId,
    uri: &Uri,
    request: Request,
) -> Result<RunnerCall, ErrorResponse> {
    // Only the simulated runtime answers for the runner; the others must not buffer the body.
    if shim.runtime.name() != "simulated" {
        return Ok(RunnerCall::Forward(request));
    }
    let (mut parts, body) = request.into_parts();
    parts.uri = uri.clone();
    let body = axum::body::to_bytes(body, SIMULATED_BODY_BYTES_MAX).await.map_err(|_| {
        ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large to be simulated")
    })?;
    match shim.runtime.play(id, Request::from_parts(parts, body)) {
        Some(answer) => Ok(RunnerCall::Responded(answer.await)),
        None => Err(task_not_found(id)),
    }
}

/// Connects to the runner. Waits for a runner that was just started: the caller would only retry, much later. A runner
/// that has ended left its socket behind and is not waited for.
async fn connect(shim: &Shim, id: SubmissionId) -> Result<UnixStream, ErrorResponse> {
    let dir = shim.tasks.dir(id).ok_or_else(|| task_not_found(id))?;
    let deadline = Instant::now() + RUNNER_START_TIMEOUT;
    // Made before the first attempt that is followed by a wait, so that no socket is missed.
    let mut watch = None;
    loop {
        let connected = async {
            let socket = DirHandle::open(&dir.run())?.socket(task_dir::RUNNER_SOCKET)?;
            http::connect_unix(&socket).await
        };
        let error: io::Error = match connected.await {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let starts = || shim.tasks.info(id).is_some_and(|info| info.status == TaskStatus::Running);
        if error.kind() != io::ErrorKind::NotFound || Instant::now() >= deadline || !starts() {
            return Err(runner_unreachable(id, &error.to_string()));
        }
        match &mut watch {
            None => {
                watch = Some(DirHandle::open(&dir.run()).ok().and_then(|run| shim.growth.watcher().dir(&run)))
            }
            Some(Some(watch)) => {
                let _ = tokio::time::timeout(CONNECT_RETRY_DELAY, watch.wake.changed()).await;
            }
            Some(None) => tokio::time::sleep(CONNECT_RETRY_DELAY).await,
        }
    }
}

fn runner_unreachable(id: SubmissionId, why: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::BAD_GATEWAY, format!("the runner of task {id} did not respond: {why}"))
}

/// Rejects a body by its `Content-Length` before any of it is read.
fn check_length(headers: &HeaderMap) -> Result<(), ErrorResponse> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > UPLOAD_BYTES_MAX as u64) {
        let text = format!("the body is longer than {UPLOAD_BYTES_MAX} bytes");
        return Err(ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    Ok(())
}

/// Both ends of an upgraded connection.
type UpgradedPair = Option<(OnUpgrade, OnUpgrade)>;

async fn forward_request(
    runner: UnixStream,
    uri: Uri,
    token: &str,
    mut request: Request,
) -> Result<(Response, UpgradedPair), Box<dyn std::error::Error + Send + Sync>> {
    let requirements = ExpectedResponse::of(&mut request);
    let (mut sender, connection) = http1::handshake(TokioIo::new(runner)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection to the runner failed");
        }
    });
    let (parts, body) = request.into_parts();
    let mut headers = parts.headers;
    strip_headers(&mut headers);
    headers.insert(header::HOST, HeaderValue::from_static("runner"));
    headers.insert(header::AUTHORIZATION, HeaderValue::try_from(format!("Bearer {token}"))?);
    let (method, body) = match &requirements {
        ExpectedResponse::Plain => (parts.method, Body::new(Limited::new(body, UPLOAD_BYTES_MAX))),
        ExpectedResponse::Upgrade { .. } => (Method::GET, Body::empty()),
    };
    requirements.set_headers(&mut headers)?;
    let mut forwarded = Request::new(body);
    *forwarded.method_mut() = method;
    *forwarded.uri_mut() = uri;
    *forwarded.headers_mut() = headers;
    let mut response = sender.send_request(forwarded).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let ExpectedResponse::Upgrade { caller, is_h2, .. } = requirements
    {
        let runner = hyper::upgrade::on(&mut response);
        let (mut parts, _) = response.into_parts();
        if is_h2 {
            // In HTTP/2 the stream itself is the connection; the protocol is not switched.
            parts.status = StatusCode::OK;
            strip_headers(&mut parts.headers);
            parts.headers.remove(header::SEC_WEBSOCKET_ACCEPT);
        }
        return Ok((Response::from_parts(parts, Body::empty()), Some((caller, runner))));
    }
    let (mut parts, body) = response.into_parts();
    strip_headers(&mut parts.headers);
    Ok((Response::from_parts(parts, Body::new(body.map_err(axum::Error::new))), None))
}

fn strip_headers(headers: &mut HeaderMap) {
    for name in HOP_BY_HOP_HEADERS.iter().map(HeaderName::as_str).chain([EPOCH_HEADER, SIGNATURE_HEADER]) {
        headers.remove(name);
    }
}

/// Kind of response that the caller expects.
enum ExpectedResponse {
    Plain,
    Upgrade { caller: OnUpgrade, to: HeaderValue, is_h2: bool },
}

impl ExpectedResponse {
    fn of(request: &mut Request) -> Self {
        if let Some(protocol) = request.extensions().get::<Protocol>() {
            let to = HeaderValue::from_str(protocol.as_str());
            let to = to.unwrap_or(HeaderValue::from_static("websocket"));
            return Self::Upgrade { caller: hyper::upgrade::on(request), to, is_h2: true };
        }
        match request.headers().get(header::UPGRADE).cloned() {
            Some(to) => Self::Upgrade { caller: hyper::upgrade::on(request), to, is_h2: false },
            None => Self::Plain,
        }
    }

    /// Sets the headers that request the upgrade from an HTTP/1.1 server.
    fn set_headers(&self, headers: &mut HeaderMap) -> Result<(), getrandom::Error> {
        let Self::Upgrade { to, .. } = self else { return Ok(()) };
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, to.clone());
        if !headers.contains_key(header::SEC_WEBSOCKET_KEY) {
            let mut key = [0u8; 16];
            getrandom::fill(&mut key)?;
            if let Ok(key) = HeaderValue::try_from(BASE64_STANDARD.encode(key)) {
                headers.insert(header::SEC_WEBSOCKET_KEY, key);
            }
        }
        Ok(())
    }
}

/// Copies bytes in both directions until one side ends.
async fn copy_both_ways(caller: OnUpgrade, runner: OnUpgrade) {
    let pumped = async {
        let (caller, runner) = tokio::try_join!(caller, runner)?;
        let (mut caller, mut runner) = (TokioIo::new(caller), TokioIo::new(runner));
        tokio::io::copy_bidirectional(&mut caller, &mut runner).await?;
        Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    };
    if let Err(error) = pumped.await {
        tracing::debug!(%error, "upgraded connection failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxied_path_reaches_the_runner_unchanged() {
        let path = |uri: &str| runner_uri(&uri.parse().unwrap()).map(|uri| uri.to_string());
        assert_eq!(path("/api/tasks/X/runner/api/run").as_deref(), Some("/api/run"));
        assert_eq!(
            path("/api/tasks/X/runner/api/logs?offset=1&q=/runner/"),
            Some("/api/logs?offset=1&q=/runner/".into())
        );
        assert_eq!(path("/api/tasks/X/runner/a%2Fb/runner/c").as_deref(), Some("/a%2Fb/runner/c"));
        assert_eq!(path("/api/tasks/X/runner"), None);
    }

    #[test]
    fn a_content_length_over_the_limit_is_refused() {
        let of = |length: &str| {
            HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::try_from(length).unwrap())])
        };
        assert!(check_length(&HeaderMap::new()).is_ok());
        assert!(check_length(&of("2147483648")).is_ok());
        assert_eq!(check_length(&of("2147483649")).unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[test]
    fn the_hosts_credential_does_not_reach_the_runner() {
        let mut headers = HeaderMap::new();
        for (name, value) in
            [("authorization", "Bearer x"), (EPOCH_HEADER, "1"), (SIGNATURE_HEADER, "s"), ("accept", "*/*")]
        {
            headers.insert(name, HeaderValue::from_static(value));
        }
        strip_headers(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }
}
