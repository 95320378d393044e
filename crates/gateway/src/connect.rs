//! Connections to replicas: a byte stream over any transport.
//!
//! The proxy has no addresses other than those in the routes.

use std::{io, time::Duration};

use futures_util::future::BoxFuture;
use tokio::net::{TcpStream, UnixStream};
pub use windlass_dial::{Io, Stream};

use crate::route::ReplicaTarget;

/// Opens a stream to a replica.
pub trait Connector: Send + Sync + 'static {
    fn connect<'a>(&'a self, target: &'a ReplicaTarget) -> BoxFuture<'a, io::Result<Stream>>;
}

/// Connector for unix sockets and TCP addresses. Does not support tunnels.
#[derive(Clone, Copy, Debug)]
pub struct DirectConnector;

impl Connector for DirectConnector {
    fn connect<'a>(&'a self, target: &'a ReplicaTarget) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            match target {
                ReplicaTarget::Tcp { address } => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Ok(Box::new(stream) as Stream)
                }
                ReplicaTarget::Unix { path } => Ok(Box::new(UnixStream::connect(path).await?) as Stream),
                ReplicaTarget::Tunnel { name, .. } => Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("tunnel to `{name}` is not supported"),
                )),
            }
        })
    }
}

/// Connects, with a timeout.
pub(crate) async fn connect_with_timeout(
    bound: Duration,
    connector: &dyn Connector,
    target: &ReplicaTarget,
) -> io::Result<Stream> {
    match tokio::time::timeout(bound, connector.connect(target)).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "timed out opening the connection")),
    }
}
