//! Connections to an object store.

use std::{io, time::Duration};

use http_body_util::Full;
use hyper::{
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
};
use hyper_util::rt::TokioIo;
use windlass_dial::{Endpoint, TlsRoots};

use super::S3Location;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) type S3Sender = SendRequest<Full<Bytes>>;

/// Endpoint of the store.
pub(super) fn store_endpoint(place: &S3Location) -> io::Result<Endpoint> {
    if !place.tls {
        return Ok(Endpoint::plain(&place.host, place.port));
    }
    let trust = TlsRoots::load(place.roots.as_deref()).map_err(io::Error::other)?;
    Ok(Endpoint::with_tls(&place.host, place.port, &trust))
}

pub(super) async fn connect(peer: &Endpoint) -> io::Result<S3Sender> {
    let stream = peer.connect(CONNECT_TIMEOUT).await?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // The caller that waits for a response receives the connection's errors.
    tokio::spawn(connection);
    Ok(sender)
}
