//! The control plane: routes, services and pipelines. All SQL is in the crate `windlass-db`.

pub mod agents;
pub mod app;
pub mod attachments;
mod attempt_specs;
pub mod auth;
pub mod backend_set;
mod change_feed;
pub mod config;
mod configured_backends;
mod connection_shares;
mod dispatcher_nodes;
pub mod encryption;
pub mod error;
pub mod events;
pub mod hints;
pub mod http;
mod http_listener;
mod image_lookup;
mod instance_documents;
mod inventory;
pub mod job_metrics;
pub mod job_payload;
pub mod job_spec_view;
pub mod limits;
pub mod logs;
pub mod metrics;
pub mod node_keys;
pub mod offer_cache;
mod oidc;
mod open_counts;
pub mod parsed_fleet_spec;
pub mod parsed_run_spec;
pub mod pass_error;
mod peer;
pub mod pipelines;
mod plain_processes;
pub mod proxy;
pub mod queue_backend;
pub mod rate_limit;
pub(crate) mod registry_passwords;
pub mod retention;
pub mod routes;
mod run_tracking;
pub mod running_pipelines;
mod sealed_passwords;
mod secret_rights;
pub mod services;
pub mod ssh_keys;
mod stream_rights;
pub mod tls;
mod ui_assets;
mod waiting_replica;
mod web_ui;

pub use windlass_db::{self as db, params, queue_rank};

use std::{
    future::Future,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::{
    agents::{AgentRouter, HttpAgents},
    app::App,
    auth::Token,
    backend_set::BackendSet,
    config::Settings,
    db::{Db, DbError},
    encryption::{KeyError, Keyring},
    logs::{LogStore as _, location::LogLocationError},
    queue_backend::QueueBackend,
};

/// Interval at which the last use of tokens is written to the database.
const TOKEN_USE_INTERVAL: Duration = Duration::from_secs(20);
/// Maximum time for writing buffered log pieces when the server stops.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("failed to create the data directory `{}`", path.display())]
    DataDir {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the data directory `{}` is writable by all users; run `chmod o-w` on it, or set another one with \
         `--data-dir`",
        path.display()
    )]
    UnsafeDataDir { path: PathBuf },
    #[error("failed to load the encryption keys")]
    Keys(#[from] KeyError),
    #[error("failed to open the database")]
    Db(#[from] DbError),
    #[error("failed to set up the log store")]
    Logs(#[from] LogLocationError),
    #[error("failed to set up backend `kubernetes`")]
    Kubernetes(#[from] windlass_kubernetes::SettingsError),
    #[error("failed to set up the backends")]
    Backends(#[from] configured_backends::BackendConfigError),
    #[cfg(feature = "testing")]
    #[error("failed to set up the mock cloud")]
    Mock(#[from] windlass_backend::mock::script::ScriptError),
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
    #[error("failed to set up the first user and project")]
    Boot(#[from] error::Error),
    #[error("failed to set up TLS")]
    Tls(#[from] tls::TlsSetupError),
    #[error("failed to listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// A server that is bound to its address but does not answer requests yet.
pub struct Server {
    app: App,
    machines: BackendSet,
    listener: TcpListener,
    address: SocketAddr,
    /// Listener of the second port, which accepts only TLS.
    encrypted: Option<(TcpListener, TlsAcceptor)>,
    /// Listener of the port that serves only services.
    services: Option<TcpListener>,
    first_token: Option<Token>,
}

impl Server {
    /// Starts in this order: data directory, keys, database, first user, socket.
    pub async fn start(settings: Settings) -> Result<Self, StartError> {
        create_data_dir(&settings.data_dir)?;
        let keys = Keyring::open(&settings.key_file)?;
        let mut machines = BackendSet::new(&settings)?;
        let db = Db::open(&settings.database_url).await?;
        machines.backends = machines.backends.and(Arc::new(QueueBackend::new(db.clone())));
        let app = App::with_backends(db, settings, keys, machines.backends.clone())?;
        let started = Self::set_up(&app, machines).await;
        if started.is_err() {
            // Releases the file, so that another attempt can open it.
            app.db().close().await;
        }
        started
    }

    async fn set_up(app: &App, machines: BackendSet) -> Result<Self, StartError> {
        services::secrets::claim_key(app).await?;
        registry_passwords::seal_stored_documents(app).await?;
        app.logs().check().await.map_err(LogLocationError::Check)?;
        let first_token = services::bootstrap::ensure(app).await?;
        let address = app.settings().address;
        let failed = |source| StartError::Listen { address, source };
        let listener = match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && app.settings().any_port => {
                TcpListener::bind(SocketAddr::new(address.ip(), 0)).await.map_err(failed)?
            }
            bound => bound.map_err(failed)?,
        };
        let address = listener.local_addr().map_err(failed)?;
        let encrypted = match &app.settings().tls {
            Some(wanted) => {
                let failed = |source| StartError::Listen { address: wanted.address, source };
                let listener = TcpListener::bind(wanted.address).await.map_err(failed)?;
                Some((listener, tls::acceptor(wanted, &app.settings().data_dir)?))
            }
            None => None,
        };
        let services = match app.settings().services_address {
            Some(address) => {
                let failed = |source| StartError::Listen { address, source };
                Some(TcpListener::bind(address).await.map_err(failed)?)
            }
            None => None,
        };
        Ok(Self { app: app.clone(), machines, listener, address, encrypted, services, first_token })
    }

    pub fn app(&self) -> &App {
        &self.app
    }

    /// Address on which the server listens, with the port that the system chose if none was configured.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Address on which the server listens for TLS.
    pub fn tls_address(&self) -> Option<SocketAddr> {
        self.encrypted.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    /// Address that serves only services.
    pub fn services_address(&self) -> Option<SocketAddr> {
        self.services.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// The admin's token, if this start created it. It is shown once.
    pub fn first_token(&self) -> Option<&Token> {
        self.first_token.as_ref()
    }

    /// Serves requests until `stop` completes, then finishes the requests in flight and closes the database.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { app, machines, listener, address, encrypted, services, .. } = self;
        let uses = tokio::spawn(record_token_uses(app.clone()));
        let machines = Arc::new(machines);
        let waking = Arc::clone(&machines);
        let waking = tokio::spawn(async move { waking.wake().await });
        let pipelines = start_pipelines(&app, &machines);
        let front = proxy::ServiceProxy::start(&app).await;
        let router = routes::all_routes().into_router(app.clone()).merge(front.router(&app));
        let stop = stop.shared();
        let fallback = tls::FallbackTls::new(address, &app.settings().data_dir);
        let kind = http_listener::ListenerKind::Plain(Arc::new(fallback));
        let connections = http_listener::ConnectionLimits::new(app.settings().connections_max);
        let plain =
            http_listener::serve(&app, connections.clone(), listener, kind, router.clone(), stop.clone());
        let certificate = encrypted.as_ref().map(|(_, acceptor)| acceptor.clone());
        let second = async {
            if let Some((listener, acceptor)) = encrypted {
                // Browsers ignore HSTS on a connection whose certificate they do not trust.
                let is_strict = app.settings().tls.as_ref().is_some_and(|tls| tls.given.is_some());
                let kind = http_listener::ListenerKind::Tls { acceptor, is_strict };
                http_listener::serve(&app, connections.clone(), listener, kind, router, stop.clone()).await?;
            }
            Ok(())
        };
        let third = async {
            if let Some(listener) = services {
                let kind = services_listener(&app, &listener, certificate);
                let router = front.services_router();
                http_listener::serve(&app, connections.clone(), listener, kind, router, stop.clone()).await?;
            }
            Ok(())
        };
        match tokio::try_join!(plain, second, third) {
            Ok(((), (), ())) => {}
            Err(never) => match never {},
        }
        front.stop().await;
        if let Some(pipelines) = pipelines {
            pipelines.stop().await;
        }
        flush_logs(&app).await;
        waking.abort();
        machines.rest().await;
        uses.abort();
        if let Err(error) = app.access().write_uses(&app).await {
            tracing::warn!(%error, "failed to record the last use of tokens");
        }
        app.db().close().await;
    }
}

/// Protocols of the port of services: TLS only if there is a configured certificate, as on the TLS port.
fn services_listener(
    app: &App,
    listener: &TcpListener,
    certificate: Option<TlsAcceptor>,
) -> http_listener::ListenerKind {
    let is_configured = app.settings().tls.as_ref().is_some_and(|tls| tls.given.is_some());
    match certificate.filter(|_| is_configured) {
        Some(acceptor) => http_listener::ListenerKind::Tls { acceptor, is_strict: true },
        None => {
            let address = listener.local_addr().unwrap_or(app.settings().address);
            let fallback = tls::FallbackTls::new(address, &app.settings().data_dir);
            http_listener::ListenerKind::Plain(Arc::new(fallback))
        }
    }
}

/// Starts the pipelines. If that fails, the server still answers requests, and the error is logged.
fn start_pipelines(app: &App, machines: &BackendSet) -> Option<running_pipelines::RunningPipelines> {
    if !app.settings().pipelines {
        return None;
    }
    let wire = HttpAgents::new(app, Arc::clone(&machines.hosts));
    let agents: Arc<dyn agents::AgentApi> = Arc::new(AgentRouter::new(app, wire));
    app.set_agents(Arc::clone(&agents));
    match running_pipelines::start(app, agents, machines.backends.clone()) {
        Ok(running) => Some(running),
        Err(error) => {
            tracing::error!(%error, "failed to start the pipelines");
            None
        }
    }
}

/// Writes buffered log pieces. The hosts still have what could not be written in time, and the next server copies it
/// again.
async fn flush_logs(app: &App) {
    match tokio::time::timeout(LOG_FLUSH_TIMEOUT, app.logs().flush()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "failed to write the last pieces of logs"),
        Err(_) => tracing::warn!("timed out writing the last pieces of logs to the object store"),
    }
}

async fn record_token_uses(app: App) {
    loop {
        tokio::time::sleep(TOKEN_USE_INTERVAL).await;
        if let Err(error) = app.access().write_uses(&app).await {
            tracing::warn!(%error, "failed to record the last use of tokens");
        }
    }
}

/// Creates the data directory with access for the owner only: other users cannot even list it. An existing directory
/// keeps its mode; one that other users can write to is refused, because they could replace the database.
fn create_data_dir(path: &Path) -> Result<(), StartError> {
    let failed = |source| StartError::DataDir { path: path.to_owned(), source };
    encryption::create_private_dirs(path).map_err(failed)?;
    if encryption::is_writable_by_others(path).map_err(failed)? {
        return Err(StartError::UnsafeDataDir { path: path.to_owned() });
    }
    Ok(())
}
