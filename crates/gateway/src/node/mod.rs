//! The process of a gateway: routes from the server, requests from callers, word back of what came.
//!
//! It asks the server and is never asked: nothing but its own ports has to be open. While the server is away it goes on
//! with the routes that it has, which lie in a file too; tokens that were checked are believed up to their bound.

mod follow;
mod gate;
mod handover;
mod server;
mod sites;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

pub use self::server::{Server, ServerError};
use self::{follow::Follower, gate::Asking};
use crate::{
    access::{AccessLog, Record},
    auth::{Cached, Trust},
    proxy::{Bounds, Proxy},
    route::Snapshot,
    serve::{Door, Listening, Patience, serve},
    state::{self, StateError},
    tls::{self, Certificates, Pem, TlsError},
};

/// A stream through SSH takes longer to open than a socket.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Tokens whose checks are remembered.
const TOKENS_MAX: usize = 100_000;
/// A wrong token may be made right.
const DENY_FOR: Duration = Duration::from_secs(5);
/// The server need not wait for what this process had, but the process does not wait for the server either.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("make the state directory `{}`", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    State(#[from] StateError),
    #[error("read `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("take over from the process that is there")]
    TakeOver(#[source] io::Error),
    #[error("let the next process take over")]
    HandOver(#[source] io::Error),
}

/// How a gateway is run.
#[derive(Debug)]
pub struct Settings {
    pub server: Server,
    /// Routes and the socket of the next process are kept here.
    pub state: PathBuf,
    pub listen: SocketAddr,
    pub tls: Option<TlsSettings>,
    /// Where people find it.
    pub address: Option<String>,
    /// How long a token is believed after the server said yes to it.
    pub trust: Duration,
}

#[derive(Clone, Debug)]
pub struct TlsSettings {
    pub listen: SocketAddr,
    pub chain: PathBuf,
    pub key: PathBuf,
}

/// A gateway that listens.
pub struct Node {
    follower: Arc<Follower>,
    proxy: Arc<Proxy>,
    plain: TcpListener,
    encrypted: Option<(TcpListener, Arc<Certificates>)>,
    tls: Option<TlsSettings>,
    given: Option<handover::Given>,
    state: PathBuf,
}

impl Node {
    /// With the routes that were known last, and with the listeners of the process before, if one is there.
    pub fn start(settings: Settings, id: Uuid) -> Result<Self, NodeError> {
        let Settings { server, state, listen, tls, address, trust } = settings;
        make_dir(&state)?;
        let server = Arc::new(server);
        let follower = Follower::new(Arc::clone(&server), id, address, &state, tls.is_some());
        let follower = Arc::new(follower);
        follower.restore()?;
        let trust = Trust { allow: trust, deny: DENY_FOR.min(trust), entries_max: TOKENS_MAX };
        let proxy = Proxy {
            routes: Arc::clone(follower.routes()),
            connector: follower.connector(),
            gatekeeper: Arc::new(Cached::new(Asking(server), trust)),
            wake: Arc::clone(&follower) as Arc<dyn crate::hold::Wake>,
            log: Some(Arc::new(Log)),
            bounds: Bounds { connect: CONNECT_WITHIN, ..Bounds::USUAL },
        };
        let certificates = tls.as_ref().map(certificates).transpose()?;
        let mut given = handover::ask(&state).map_err(NodeError::TakeOver)?;
        let plain = listener(listen, given.as_mut())?;
        let encrypted = match (&tls, certificates) {
            (Some(tls), Some(certificates)) => Some((listener(tls.listen, given.as_mut())?, certificates)),
            _ => None,
        };
        Ok(Self { follower, proxy: Arc::new(proxy), plain, encrypted, tls, given, state })
    }

    /// Where it listens: plain, and encrypted.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let encrypted = self.encrypted.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
        (self.plain.local_addr().ok(), encrypted)
    }

    /// Reads certificates anew; open connections keep theirs.
    pub fn reloader(&self) -> impl Fn() -> Result<(), NodeError> + Send + Sync + 'static {
        let tls = self.tls.clone();
        let certificates = self.encrypted.as_ref().map(|(_, certificates)| Arc::clone(certificates));
        move || match (&tls, &certificates) {
            (Some(tls), Some(certificates)) => load(tls, certificates),
            _ => Ok(()),
        }
    }

    /// Serves until `stop`, or until another process took the listeners; then lets requests finish.
    pub async fn run(self, stop: CancellationToken) -> Result<(), NodeError> {
        let Self { follower, proxy, plain, encrypted, given, state, .. } = self;
        let listening =
            Listening { proxy, door: Door::Hosts, challenges: None, tls: None, patience: Patience::USUAL };
        let doors = TaskTracker::new();
        let mut handed = Vec::new();
        let mut open = |listener: TcpListener, listening: Listening| -> Result<(), NodeError> {
            let failed = |source| NodeError::Listen { address: SocketAddr::from(([0, 0, 0, 0], 0)), source };
            handed.push(listener.try_clone().map_err(failed)?);
            let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
            doors.spawn(serve(listener, listening, stop.clone()));
            Ok(())
        };
        if let Some((listener, certificates)) = encrypted {
            let tls = Some(tls::config(certificates)?);
            open(listener, Listening { tls, ..listening.clone() })?;
        }
        open(plain, listening)?;
        let next = handover::open(&state).map_err(NodeError::HandOver)?;
        if let Some(given) = given {
            // Both accept for a moment; nobody is turned away.
            given.taken().map_err(NodeError::TakeOver)?;
        }
        let next = tokio::spawn(wait_for_next(next, handed, stop.clone()));
        let following = tokio::spawn(Arc::clone(&follower).follow());
        let reporting = tokio::spawn(Arc::clone(&follower).report());
        stop.cancelled().await;
        next.abort();
        // The listeners that could be handed over are closed with it.
        let _ = next.await;
        doors.close();
        doors.wait().await;
        following.abort();
        reporting.abort();
        let _ = tokio::time::timeout(LEAVE_WITHIN, follower.leave()).await;
        Ok(())
    }
}

/// Gives the listeners to the next process; then this one stops.
async fn wait_for_next(
    door: std::os::unix::net::UnixListener,
    listeners: Vec<TcpListener>,
    stop: CancellationToken,
) {
    let door = match tokio::net::UnixListener::from_std(door) {
        Ok(door) => door,
        Err(error) => return tracing::warn!(%error, "wait for the next process"),
    };
    let listeners = Arc::new(listeners);
    loop {
        let asked = match door.accept().await {
            Ok((stream, _)) => stream.into_std(),
            Err(error) => Err(error),
        };
        let listeners = Arc::clone(&listeners);
        let given = match asked {
            Ok(stream) => tokio::task::spawn_blocking(move || handover::give(&stream, &listeners)).await,
            Err(error) => Ok(Err(error)),
        };
        match given {
            Ok(Ok(true)) => {
                tracing::info!("another process took the listeners; this one answers what it has and ends");
                stop.cancel();
                return;
            }
            Ok(Ok(false)) => tracing::warn!("another process asked for the listeners and did not serve"),
            Ok(Err(error)) => {
                tracing::warn!(%error, "hand the listeners over");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(_) => return,
        }
    }
}

fn listener(address: SocketAddr, given: Option<&mut handover::Given>) -> Result<TcpListener, NodeError> {
    let failed = |source| NodeError::Listen { address, source };
    let listener = match given.and_then(|given| given.take(address)) {
        Some(listener) => listener,
        None => TcpListener::bind(address).map_err(failed)?,
    };
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn certificates(tls: &TlsSettings) -> Result<Arc<Certificates>, NodeError> {
    let certificates = Arc::new(Certificates::default());
    load(tls, &certificates)?;
    Ok(certificates)
}

fn load(tls: &TlsSettings, certificates: &Certificates) -> Result<(), NodeError> {
    let read =
        |path: &Path| std::fs::read(path).map_err(|source| NodeError::File { path: path.to_owned(), source });
    certificates.put(&Pem { name: "*".to_owned(), chain: read(&tls.chain)?, key: read(&tls.key)? })?;
    Ok(())
}

/// It holds what opens hosts: ours alone.
fn make_dir(path: &Path) -> Result<(), NodeError> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    let failed = |source| NodeError::Directory { path: path.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(failed)
}

/// One line for each request. Never the query: it may hold somebody's credential.
struct Log;

impl AccessLog for Log {
    fn record(&self, record: Record) {
        tracing::info!(
            target: "windlass_gateway::access",
            service = %record.service,
            replica = record.replica.as_deref().unwrap_or("-"),
            peer = %record.peer,
            method = %record.method,
            path = record.uri.path(),
            status = record.status.as_u16(),
            took_us = u64::try_from(record.took.as_micros()).unwrap_or(u64::MAX),
            bytes_in = record.bytes_in,
            bytes_out = record.bytes_out,
            tries = record.tries,
            cut = record.cut,
            "request"
        );
    }
}

/// What is kept over a restart.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct Kept {
    generation: u64,
    version: String,
    told: crate::way::Told,
}

impl Kept {
    fn read(path: &Path) -> Result<Option<Self>, StateError> {
        state::restore(path)
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { generation: self.generation, services: self.told.services.clone() }
    }
}
