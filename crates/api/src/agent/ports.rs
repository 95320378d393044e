//! Streams to ports of tasks: a call to the runner that is upgraded to a raw connection.

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{self, HeaderValue},
    upgrade::Upgraded,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use windlass_model::id::SubmissionId;

use super::{
    PORT_PROTOCOL,
    client::{ShimError, error_for_status},
};

/// Maximum length of the error text that is kept from a refusal.
const ERROR_TEXT_MAX: usize = 4 * 1024;

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
    let mut authorization = HeaderValue::try_from(format!("Bearer {credential}"))
        .map_err(|error| ShimError::Build(error.into()))?;
    authorization.set_sensitive(true);
    let request = Request::get(format!("/api/tasks/{task}/runner/api/connect?port={port}"))
        .header(header::HOST, "shim")
        .header(header::AUTHORIZATION, authorization)
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, PORT_PROTOCOL)
        .body(Empty::<Bytes>::new())
        .map_err(ShimError::Build)?;
    let answer = send.send_request(request).await.map_err(ShimError::Exchange)?;
    let status = answer.status();
    if status != StatusCode::SWITCHING_PROTOCOLS {
        let why = Limited::new(answer.into_body(), ERROR_TEXT_MAX).collect().await;
        let why = why.map(|body| body.to_bytes()).unwrap_or_default();
        return Err(error_for_status(status, None, String::from_utf8_lossy(&why).trim().to_owned()));
    }
    hyper::upgrade::on(answer).await.map(TokioIo::new).map_err(ShimError::Exchange)
}
