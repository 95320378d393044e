//! Streams to ports of tasks: a call to the runner that is upgraded to a raw connection.

use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::{http1, http2},
    ext::Protocol,
    header::{self, HeaderValue},
    upgrade::Upgraded,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use windlass_model::id::SubmissionId;

use super::{
    PORT_PROTOCOL,
    client::{ShimError, error_for_status},
};

/// Maximum length of the error text that is kept from a refusal.
const ERROR_TEXT_MAX: usize = 4 * 1024;
/// Interval of HTTP/2 pings on a silent connection. The connection is closed if a ping is not answered in time.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Flow control windows: unread bytes of one stream, and of all streams of a connection together.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 24 * 1024 * 1024;

/// Opens a stream to a port of a task, over a stream to the shim's socket. Port 0 is the task's SSH server.
pub async fn connect(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    credential: &str,
    task: SubmissionId,
    port: u16,
) -> Result<TokioIo<Upgraded>, ShimError> {
    let (mut send, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(ShimError::Exchange)?;
    tokio::spawn(async move {
        // The user of the stream receives the error from the stream.
        let _ = connection.with_upgrades().await;
    });
    let request = Request::get(connect_path(task, port))
        .header(header::HOST, "shim")
        .header(header::AUTHORIZATION, bearer(credential)?)
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, PORT_PROTOCOL)
        .body(Empty::<Bytes>::new())
        .map_err(ShimError::Build)?;
    let answer = send.send_request(request).await.map_err(ShimError::Exchange)?;
    upgrade(answer, StatusCode::SWITCHING_PROTOCOLS).await
}

/// One connection to the shim's socket, with many streams to ports.
#[derive(Clone)]
pub struct PortClient {
    send: http2::SendRequest<Empty<Bytes>>,
}

impl PortClient {
    /// Maximum number of streams: with more, a few readers that do not read could stall the others.
    pub const STREAMS_MAX: u32 = CONNECTION_WINDOW / STREAM_WINDOW;

    /// Starts HTTP/2 over a stream, and checks that a shim is at its other end. A separate task drives the connection.
    pub async fn open(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<Self, ShimError> {
        let (mut send, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ShimError::Exchange)?;
        tokio::spawn(async move {
            // The users of its streams receive the error from them.
            let _ = connection.await;
        });
        let request = Request::get("http://shim/api/healthcheck").body(Empty::<Bytes>::new());
        let answer = send.send_request(request.map_err(ShimError::Build)?).await;
        let status = answer.map_err(ShimError::Exchange)?.status();
        if !status.is_success() {
            return Err(error_for_status(status, None, String::new()));
        }
        Ok(Self { send })
    }

    pub fn is_closed(&self) -> bool {
        self.send.is_closed()
    }

    /// Opens a stream to a port of a task, as `connect` does.
    pub async fn connect(
        &self,
        credential: &str,
        task: SubmissionId,
        port: u16,
    ) -> Result<TokioIo<Upgraded>, ShimError> {
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(format!("http://shim{}", connect_path(task, port)))
            .extension(Protocol::from_static(PORT_PROTOCOL))
            .header(header::AUTHORIZATION, bearer(credential)?)
            .body(Empty::<Bytes>::new())
            .map_err(ShimError::Build)?;
        let answer = self.send.clone().send_request(request).await.map_err(ShimError::Exchange)?;
        upgrade(answer, StatusCode::OK).await
    }
}

impl std::fmt::Debug for PortClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortClient").field("is_closed", &self.send.is_closed()).finish_non_exhaustive()
    }
}

fn connect_path(task: SubmissionId, port: u16) -> String {
    format!("/api/tasks/{task}/runner/api/connect?port={port}")
}

fn bearer(credential: &str) -> Result<HeaderValue, ShimError> {
    let mut authorization = HeaderValue::try_from(format!("Bearer {credential}"))
        .map_err(|error| ShimError::Build(error.into()))?;
    authorization.set_sensitive(true);
    Ok(authorization)
}

/// Returns the stream of an accepted request, or the reason why it was refused.
async fn upgrade(answer: Response<Incoming>, accepted: StatusCode) -> Result<TokioIo<Upgraded>, ShimError> {
    let status = answer.status();
    if status != accepted {
        let why = Limited::new(answer.into_body(), ERROR_TEXT_MAX).collect().await;
        let why = why.map(|body| body.to_bytes()).unwrap_or_default();
        return Err(error_for_status(status, None, String::from_utf8_lossy(&why).trim().to_owned()));
    }
    hyper::upgrade::on(answer).await.map(TokioIo::new).map_err(ShimError::Exchange)
}
