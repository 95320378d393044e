//! `GET /api/connect?port=N`: upgrades the connection to a stream to that port of the task.
//!
//! So users reach a service in a task without a port of the host: the server forwards their bytes over the runner's
//! socket. Like an SSH connection, such a connection counts as a user being connected.

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
use crate::{http::ErrorResponse, task_dir::SSH_PORT_FILE};

/// Maximum number of open streams of one task.
static CONNECTION_SLOTS: Semaphore = Semaphore::const_new(256);
/// A service on the same loopback answers at once or not at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Deserialize)]
pub(super) struct ConnectQuery {
    /// 0 means the SSH server, on any port.
    port: u16,
}

pub(super) async fn connect(
    State(job): State<Arc<Job>>,
    Query(wanted): Query<ConnectQuery>,
    mut request: Request,
) -> Result<Response, ErrorResponse> {
    if request.headers().get(header::UPGRADE).is_none_or(|to| to != PORT_PROTOCOL) {
        return Err(ErrorResponse::bad_request(format!("expected the header `Upgrade: {PORT_PROTOCOL}`")));
    }
    let place = CONNECTION_SLOTS.try_acquire().map_err(|_| {
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "too many open connections to this task")
    })?;
    let port = match wanted.port {
        0 => ssh_port(&job)?,
        port => job.around.ports.own(port),
    };
    let mut inside = connect_loopback(port).await.map_err(|error| {
        ErrorResponse::conflict(format!("failed to connect to port {port} of the task: {error}"))
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
            tracing::debug!(%error, port, "port stream failed");
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(PORT_PROTOCOL));
    Ok(response)
}

/// Reads the port of the SSH server, which is recorded when it listens.
fn ssh_port(job: &Job) -> Result<u16, ErrorResponse> {
    let text = std::fs::read_to_string(job.around.run.join(SSH_PORT_FILE)).ok();
    let port = text.and_then(|text| text.trim().parse().ok()).filter(|port| *port != 0);
    port.ok_or_else(|| ErrorResponse::conflict("the SSH server of the task is not running"))
}

/// Connects to either loopback address: programs listen on one of them.
async fn connect_loopback(port: u16) -> io::Result<TcpStream> {
    let connected = async {
        match TcpStream::connect(("127.0.0.1", port)).await {
            Ok(stream) => Ok(stream),
            // The error of the IPv4 address is the one that most users expect.
            Err(first) => TcpStream::connect(("::1", port)).await.map_err(|_| first),
        }
    };
    let stream = timeout(CONNECT_TIMEOUT, connected).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}
