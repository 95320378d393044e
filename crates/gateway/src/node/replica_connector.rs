//! Streams from the gateway to replicas: over SSH, or over a socket if the host is this machine.
//!
//! The SSH key of a gateway opens only a relay to the agent of a host. A session is one connection to the agent and
//! carries many streams, because SSH servers allow few sessions.
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
use parking_lot::{Mutex, RwLock};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use windlass_api::{
    agent::ports::{self, PortClient},
    unix,
};
use windlass_model::id::SubmissionId;
use windlass_tunnel::{Backoff, Connection, SshPool};

use crate::{
    connect::{Connector, Stream},
    gateway_config::{AgentAddress, ReplicaHost, SshLogin},
    route::ReplicaTarget,
};

/// Requested program. The SSH server of a host starts the relay to its agent, whatever is requested.
const RELAY_COMMAND: &str = "windlass-agent relay";
/// Maximum number of sessions on one SSH connection. SSH servers allow ten by default.
const RELAYS_MAX: usize = 10;

/// Hosts from the routes, and the connections to them.
pub(super) struct ReplicaConnector {
    hosts: RwLock<BTreeMap<String, ReplicaHost>>,
    ssh_pool: SshPool<String>,
    relays: Mutex<BTreeMap<String, Arc<HostRelays>>>,
}

/// Relays to the agent of one host. The lock also serialises attempts to open one.
type HostRelays = tokio::sync::Mutex<Vec<Relay>>;

/// Connection to the agent of a host, in one session of the host's SSH server.
#[derive(Clone)]
struct Relay {
    ports: PortClient,
    /// Must stay open as long as the session.
    below: Arc<Connection>,
    /// One reference per open stream, in addition to that of the pool.
    streams: Arc<()>,
}

impl Relay {
    fn streams(&self) -> usize {
        Arc::strong_count(&self.streams) - 1
    }
}

impl ReplicaConnector {
    pub(super) fn new() -> Self {
        Self { hosts: RwLock::default(), ssh_pool: SshPool::new(Backoff::STANDARD), relays: Mutex::default() }
    }

    /// Replaces the known hosts. Connections to removed ones are closed when they are no longer in use.
    pub(super) fn replace(&self, sites: BTreeMap<String, ReplicaHost>) {
        let old = std::mem::replace(&mut *self.hosts.write(), sites);
        let known = self.hosts.read();
        for name in old.keys().filter(|name| !known.contains_key(*name)) {
            self.ssh_pool.forget(name);
            self.relays.lock().remove(name);
        }
    }

    async fn open_stream(&self, target: &ReplicaTarget) -> io::Result<Stream> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, "no such replica");
        let ReplicaTarget::Tunnel { name, port } = target else { return Err(absent()) };
        let (host, job) = name.split_once('/').ok_or_else(absent)?;
        let job: SubmissionId = job.parse().map_err(|_| absent())?;
        let site = self.hosts.read().get(host).cloned().ok_or_else(absent)?;
        let (stream, relay) = match &site.address {
            AgentAddress::Socket { path } => {
                let stream = unix::connect(path).await?;
                (ports::connect(stream, &site.credential, job, *port).await, None)
            }
            AgentAddress::Relay { login } => {
                let relay = self.relay(host, login).await?;
                (relay.ports.connect(&site.credential, job, *port).await, Some(relay))
            }
        };
        let stream = stream.map_err(io::Error::other)?;
        Ok(Box::new(TunneledStream { stream, _relay: relay }))
    }

    /// Returns the relay with the fewest streams; opens one if all are full.
    async fn relay(&self, host: &str, login: &SshLogin) -> io::Result<Relay> {
        if !login.is_pinned() {
            return Err(io::Error::other("the SSH host key of this instance is not known yet"));
        }
        let of_host = Arc::clone(self.relays.lock().entry(host.to_owned()).or_default());
        let mut relays = of_host.lock().await;
        relays.retain(|relay| !relay.ports.is_closed() && !relay.below.is_closed());
        let best = relays.iter().min_by_key(|relay| relay.streams()).cloned();
        if let Some(best) = &best
            && (relays.len() >= RELAYS_MAX || best.streams() < PortClient::STREAMS_MAX as usize)
        {
            return Ok(best.clone());
        }
        match self.open_relay(host, login).await {
            Ok(relay) => {
                relays.push(relay.clone());
                Ok(relay)
            }
            // The SSH server allows fewer sessions.
            Err(error) => best.ok_or(error),
        }
    }

    async fn open_relay(&self, host: &str, login: &SshLogin) -> io::Result<Relay> {
        let target = login.target().map_err(io::Error::other)?;
        // Flow control of HTTP/2 limits what the other side may send, as for a control connection.
        let connected = self.ssh_pool.control_connection(&host.to_owned(), &target).await;
        let (below, _) = connected.map_err(io::Error::other)?;
        let stream = below.open_command(RELAY_COMMAND).await.map_err(io::Error::other)?;
        let ports = PortClient::open(stream).await.map_err(io::Error::other)?;
        Ok(Relay { ports, below, streams: Arc::new(()) })
    }
}

impl Connector for ReplicaConnector {
    fn connect<'a>(&'a self, target: &'a ReplicaTarget) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(self.open_stream(target))
    }
}

/// Stream, with the relay that must stay open as long.
struct TunneledStream {
    stream: TokioIo<Upgraded>,
    _relay: Option<Relay>,
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
