//! Streams from the gateway to replicas: over SSH, or over a socket if the host is this machine.
//!
//! Connects to a host only if the server knows its key: a gateway never accepts a host key on first use.

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::RwLock;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use windlass_api::{agent::ports, unix};
use windlass_model::id::SubmissionId;
use windlass_tunnel::{Backoff, Connection, SshPool};

use crate::{
    connect::{Connector, Stream},
    gateway_config::{AgentAddress, ReplicaHost},
    route::ReplicaTarget,
};

/// Hosts from the routes, and the connections to them.
pub(super) struct ReplicaConnector {
    hosts: RwLock<BTreeMap<String, ReplicaHost>>,
    ssh_pool: SshPool<String>,
}

impl ReplicaConnector {
    pub(super) fn new() -> Self {
        Self { hosts: RwLock::default(), ssh_pool: SshPool::new(Backoff::STANDARD) }
    }

    /// Replaces the known hosts. Connections to removed ones are closed when they are no longer in use.
    pub(super) fn replace(&self, sites: BTreeMap<String, ReplicaHost>) {
        let old = std::mem::replace(&mut *self.hosts.write(), sites);
        let known = self.hosts.read();
        for name in old.keys().filter(|name| !known.contains_key(*name)) {
            self.ssh_pool.forget(name);
        }
    }

    async fn open_stream(&self, target: &ReplicaTarget) -> io::Result<Stream> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, "no such replica");
        let ReplicaTarget::Tunnel { name, port } = target else { return Err(absent()) };
        let (host, job) = name.split_once('/').ok_or_else(absent)?;
        let job: SubmissionId = job.parse().map_err(|_| absent())?;
        let site = self.hosts.read().get(host).cloned().ok_or_else(absent)?;
        let (stream, below) = match &site.address {
            AgentAddress::Socket { path } => {
                let stream = unix::connect(path).await?;
                (ports::connect(stream, &site.credential, job, *port).await, None)
            }
            AgentAddress::Ssh { socket, login } => {
                if !login.is_pinned() {
                    return Err(io::Error::other("the SSH host key of this instance is not known yet"));
                }
                let target = login.target().map_err(io::Error::other)?;
                let (below, _) = self
                    .ssh_pool
                    .traffic_connection(&host.to_owned(), &target)
                    .await
                    .map_err(io::Error::other)?;
                let stream = below.open_unix(socket).await.map_err(io::Error::other)?;
                (ports::connect(stream, &site.credential, job, *port).await, Some(below))
            }
        };
        let stream = stream.map_err(io::Error::other)?;
        Ok(Box::new(TunneledStream { stream, _below: below }))
    }
}

impl Connector for ReplicaConnector {
    fn connect<'a>(&'a self, target: &'a ReplicaTarget) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(self.open_stream(target))
    }
}

/// Stream, with the connection that must stay open as long.
struct TunneledStream {
    stream: TokioIo<Upgraded>,
    _below: Option<Arc<Connection>>,
}

impl AsyncRead for TunneledStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TunneledStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
