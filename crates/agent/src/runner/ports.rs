//! `GET /api/connect?port=N`: the connection becomes a stream to that port of the task.
//!
//! So people reach what listens in a task without a port of the host: the server forwards their bytes over the
//! runner's socket. Such a connection counts as somebody being there, as one over SSH does.

use std::{io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{Query, Request, State},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{net::TcpStream, sync::Semaphore, time::timeout};
use windlass_api::agent::PORT_PROTOCOL;

use super::job::Job;
use crate::{http::ErrorResponse, taskdir::SSH_PORT_FILE};

/// Streams open at once; a task is one process' worth of guests.
static CONNECTION_SLOTS: Semaphore = Semaphore::const_new(256);
/// Something on the same loopback answers at once or not at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Deserialize)]
pub(super) struct ConnectQuery {
    /// 0 is the SSH server, wherever it listens.
    port: u16,
}

pub(super) async fn connect(
    State(job): State<Arc<Job>>,
    Query(wanted): Query<ConnectQuery>,
    mut request: Request,
) -> Result<Response, ErrorResponse> {
    if request.headers().get(header::UPGRADE).is_none_or(|to| to != PORT_PROTOCOL) {
        return Err(ErrorResponse::bad_request(format!("ask for it with `Upgrade: {PORT_PROTOCOL}`")));
    }
    let place = CONNECTION_SLOTS.try_acquire().map_err(|_| {
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "too many connections to this task are open")
    })?;
    let port = match wanted.port {
        0 => ssh_port(&job)?,
        port => job.around.ports.own(port),
    };
    let mut inside = connect_loopback(port).await.map_err(|error| {
        ErrorResponse::conflict(format!("nobody answers at port {port} of the task: {error}"))
    })?;
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let _place = place;
        let _entered = job.connections.enter();
        let pumped = async {
            let mut outside = TokioIo::new(upgraded.await?);
            tokio::io::copy_bidirectional(&mut outside, &mut inside).await?;
            Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
        };
        if let Err(error) = pumped.await {
            tracing::debug!(%error, port, "carry bytes to a port");
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(PORT_PROTOCOL));
    Ok(response)
}

/// Written down when the SSH server listens.
fn ssh_port(job: &Job) -> Result<u16, ErrorResponse> {
    let text = std::fs::read_to_string(job.around.run.join(SSH_PORT_FILE)).ok();
    let port = text.and_then(|text| text.trim().parse().ok()).filter(|port| *port != 0);
    port.ok_or_else(|| ErrorResponse::conflict("the task has no SSH server, or not yet"))
}

/// Programs listen on either loopback.
async fn connect_loopback(port: u16) -> io::Result<TcpStream> {
    let connected = async {
        match TcpStream::connect(("127.0.0.1", port)).await {
            Ok(stream) => Ok(stream),
            // What the older address said is what most people know.
            Err(first) => TcpStream::connect(("::1", port)).await.map_err(|_| first),
        }
    };
    let stream = timeout(CONNECT_TIMEOUT, connected).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}
