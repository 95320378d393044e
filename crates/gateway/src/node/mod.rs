//! Gateway process: fetches routes from the server, serves requests and reports traffic.
//!
//! All communication is initiated by the gateway, so only its own ports have to be open. While the server is
//! unreachable, the gateway continues with the routes that it has, which are also stored in a file; checked tokens stay
//! valid up to their limit.

mod certificates;
mod metrics;
mod replica_connector;
mod route_sync;
mod server;
mod socket_handover;
mod token_check;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

pub use self::{
    certificates::AcmeSettings,
    server::{ServerClient, ServerError},
};
use self::{certificates::CertificateManager, route_sync::RouteSync, token_check::ServerGatekeeper};
use crate::{
    access::TracingAccessLog,
    auth::{CachingGatekeeper, TokenCacheConfig},
    proxy::{Proxy, ProxyLimits},
    route::RouteSnapshot,
    route_cache_file::{self, RouteFileError},
    serve::{ListenerConfig, ListenerLimits, RequestRouting, serve},
    tls::{self, TlsError},
};

/// A stream through SSH takes longer to open than a socket.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of cached token checks.
const TOKENS_MAX: usize = 100_000;
/// Maximum time for which a revoked token opens services, while the server is reachable.
const FRESH_FOR: Duration = Duration::from_secs(3);
/// Short, because a rejected token may become valid.
const DENY_TTL: Duration = Duration::from_secs(5);
/// Maximum time to deregister on exit. The server does not depend on it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);

/// Failure to start a gateway.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    ServerClient(#[from] ServerError),
    #[error("failed to create the state directory `{}`", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    State(#[from] RouteFileError),
    #[error("failed to read `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("failed to listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("failed to take over from the running gateway process")]
    TakeOver(#[source] io::Error),
    #[error("failed to open the handover socket")]
    HandOver(#[source] io::Error),
}

/// Settings of a gateway process.
#[derive(Debug)]
pub struct Settings {
    pub server: ServerClient,
    /// State directory: stored routes and the handover socket.
    pub state: PathBuf,
    pub listen: SocketAddr,
    pub tls: Option<TlsSettings>,
    /// Address of the metrics endpoint.
    pub metrics: Option<SocketAddr>,
    /// Public address of the gateway.
    pub address: Option<String>,
    /// Time for which a token stays valid after the server has accepted it.
    pub token_cache_ttl: Duration,
}

#[derive(Clone, Debug)]
pub struct TlsSettings {
    pub listen: SocketAddr,
    /// Chain and key. They take precedence over the gateway's configuration.
    pub certificate_files: Option<(PathBuf, PathBuf)>,
    pub acme: AcmeSettings,
}

/// Gateway with open listeners.
pub struct Node {
    route_sync: Arc<RouteSync>,
    proxy: Arc<Proxy>,
    plain: TcpListener,
    encrypted: Option<(TcpListener, Arc<CertificateManager>)>,
    metrics: Option<TcpListener>,
    inherited: Option<socket_handover::InheritedListeners>,
    state: PathBuf,
}

impl Node {
    /// Loads the stored routes, and takes over the listeners of a running process, if there is one.
    pub fn start(settings: Settings, id: Uuid) -> Result<Self, NodeError> {
        let Settings { server, state, listen, tls, metrics, address, token_cache_ttl: trust } = settings;
        make_private_dir(&state)?;
        let server = Arc::new(server);
        let (tls_listen, keeper) = match tls {
            Some(TlsSettings { listen, certificate_files: given, acme }) => {
                (Some(listen), Some(Arc::new(CertificateManager::new(&state, acme, given)?)))
            }
            None => (None, None),
        };
        let follower = Arc::new(RouteSync::new(Arc::clone(&server), id, address, &state, keeper.clone()));
        follower.restore()?;
        let trust = TokenCacheConfig {
            fresh_for: FRESH_FOR.min(trust),
            allow_ttl: trust,
            deny_ttl: DENY_TTL.min(trust),
            entries_max: TOKENS_MAX,
        };
        let proxy = Proxy {
            routes: Arc::clone(follower.routes()),
            connector: follower.connector(),
            gatekeeper: Arc::new(CachingGatekeeper::new(ServerGatekeeper(server), trust)),
            waker: Arc::clone(&follower) as Arc<dyn crate::scale_from_zero::ServiceWaker>,
            log: Some(Arc::new(TracingAccessLog)),
            certificates: keeper.as_ref().map(|keeper| keeper.certificates()),
            limits: ProxyLimits { connect_timeout: CONNECT_TIMEOUT, ..ProxyLimits::USUAL },
        };
        let mut given = socket_handover::request_listeners(&state).map_err(NodeError::TakeOver)?;
        let plain = open_listener(listen, given.as_mut())?;
        let encrypted = match (tls_listen, keeper) {
            (Some(address), Some(keeper)) => Some((open_listener(address, given.as_mut())?, keeper)),
            _ => None,
        };
        let metrics = metrics.map(|address| open_listener(address, given.as_mut())).transpose()?;
        Ok(Self {
            route_sync: follower,
            proxy: Arc::new(proxy),
            plain,
            encrypted,
            metrics,
            inherited: given,
            state,
        })
    }

    /// Returns the addresses of the plain and the TLS listener.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let encrypted = self.encrypted.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
        (self.plain.local_addr().ok(), encrypted)
    }

    /// Returns the address of the metrics endpoint.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Returns a function that reloads the certificates; open connections keep theirs.
    pub fn reloader(&self) -> impl Fn() -> Result<(), NodeError> + Send + Sync + 'static {
        let keeper = self.encrypted.as_ref().map(|(_, keeper)| Arc::clone(keeper));
        move || keeper.as_ref().map_or(Ok(()), |keeper| keeper.reload())
    }

    /// Serves until `stop`, or until another process has taken over the listeners; then lets requests finish.
    pub async fn run(self, stop: CancellationToken) -> Result<(), NodeError> {
        let Self { route_sync: follower, proxy, plain, encrypted, metrics, inherited: given, state } = self;
        let listening = ListenerConfig {
            proxy,
            routing: RequestRouting::Gateway(follower.own()),
            challenges: encrypted.as_ref().map(|(_, keeper)| keeper.challenges()),
            tls: None,
            limits: ListenerLimits::USUAL,
        };
        let listeners = TaskTracker::new();
        let mut handed = Vec::new();
        let mut open = |listener: TcpListener| -> Result<tokio::net::TcpListener, NodeError> {
            let failed = |source| NodeError::Listen { address: SocketAddr::from(([0, 0, 0, 0], 0)), source };
            handed.push(listener.try_clone().map_err(failed)?);
            tokio::net::TcpListener::from_std(listener).map_err(failed)
        };
        let mut tasks = tokio::task::JoinSet::new();
        if let Some((listener, keeper)) = encrypted {
            let tls = Some(tls::server_config(keeper.certificates())?);
            listeners.spawn(serve(
                open(listener)?,
                ListenerConfig { tls, ..listening.clone() },
                stop.clone(),
            ));
            tasks.spawn(keeper.run());
        }
        listeners.spawn(serve(open(plain)?, listening, stop.clone()));
        if let Some(listener) = metrics {
            tasks.spawn(metrics::serve(open(listener)?, Arc::clone(&follower), stop.clone()));
        }
        let next = socket_handover::bind(&state).map_err(NodeError::HandOver)?;
        if let Some(given) = given {
            // Both processes accept for a moment, so that no connection is refused.
            given.acknowledge().map_err(NodeError::TakeOver)?;
        }
        let next = tokio::spawn(await_handover(next, handed, stop.clone()));
        let following = tokio::spawn(Arc::clone(&follower).run());
        let reporting = tokio::spawn(Arc::clone(&follower).run_reports());
        stop.cancelled().await;
        next.abort();
        // Closes the listeners that were kept for a handover.
        let _ = next.await;
        listeners.close();
        listeners.wait().await;
        following.abort();
        reporting.abort();
        tasks.abort_all();
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, follower.deregister()).await;
        Ok(())
    }
}

/// Passes the listeners to the next process; then stops this one.
async fn await_handover(
    listener: std::os::unix::net::UnixListener,
    listeners: Vec<TcpListener>,
    stop: CancellationToken,
) {
    let listener = match tokio::net::UnixListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::warn!(%error, "failed to open handover socket"),
    };
    let listeners = Arc::new(listeners);
    loop {
        let requested = match listener.accept().await {
            Ok((stream, _)) => stream.into_std(),
            Err(error) => Err(error),
        };
        let listeners = Arc::clone(&listeners);
        let given = match requested {
            Ok(stream) => {
                tokio::task::spawn_blocking(move || socket_handover::send_listeners(&stream, &listeners))
                    .await
            }
            Err(error) => Ok(Err(error)),
        };
        match given {
            Ok(Ok(true)) => {
                tracing::info!("listeners handed over to another process; draining requests");
                stop.cancel();
                return;
            }
            Ok(Ok(false)) => {
                tracing::warn!("another process requested the listeners but did not start serving")
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "failed to hand over listeners");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(_) => return,
        }
    }
}

fn open_listener(
    address: SocketAddr,
    given: Option<&mut socket_handover::InheritedListeners>,
) -> Result<TcpListener, NodeError> {
    let failed = |source| NodeError::Listen { address, source };
    let listener = match given.and_then(|given| given.take_listener(address)) {
        Some(listener) => listener,
        None => TcpListener::bind(address).map_err(failed)?,
    };
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Creates the state directory, accessible to this user only, because it contains credentials for hosts.
fn make_private_dir(path: &Path) -> Result<(), NodeError> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    let failed = |source| NodeError::Directory { path: path.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(failed)
}

/// State that is stored across restarts.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct SavedRoutes {
    generation: u64,
    version: String,
    #[serde(rename = "told")]
    reported: crate::gateway_config::GatewayConfig,
}

impl SavedRoutes {
    fn read(path: &Path) -> Result<Option<Self>, RouteFileError> {
        route_cache_file::load(path)
    }

    fn snapshot(&self) -> RouteSnapshot {
        RouteSnapshot { generation: self.generation, services: self.reported.services.clone() }
    }
}
