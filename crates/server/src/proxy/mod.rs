//! Services through the server's own address: `/proxy/services/PROJECT/RUN/…` and `/proxy/models/PROJECT/…`.
//!
//! The data plane is `windlass-gateway`. This module provides what it needs from a server: routes from the database
//! (`keep`), streams to replicas (`AgentConnector`), authentication (`TokenGatekeeper`), and a destination for records.
//! Which replicas are ready is determined separately (`readiness`).

mod gateway_config;
mod readiness;
mod route_builder;
mod route_sync;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    middleware::{self, Next},
    response::Response,
    routing::any,
};
use futures_util::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::JoinSet,
};
use windlass_api::Access;
use windlass_gateway::{
    ClientConnection, Connector, Gatekeeper, Proxy, ProxyLimits, RequestBody, SESSION_COOKIE, Stream,
    TracingAccessLog, Verdict, models, route::ReplicaTarget,
};

pub use windlass_gateway::metrics::render as metrics;

pub(crate) use self::gateway_config::build_gateway_config;
use self::route_sync::RouteSync;
use crate::{
    agents::{CallContext, PortStream},
    app::App,
    auth,
    error::Error,
    peer::{EncryptedConnection, Peer},
    stream_rights::{RightsBasis, StreamRights},
};

/// Path prefixes of services and models.
const SERVICES: &str = "/proxy/services";
const MODELS: &str = "/proxy/models";
/// Gives pages an opaque origin: without cookies and storage, and without access to the API.
const SANDBOX: &str = "sandbox allow-scripts allow-forms allow-popups allow-downloads allow-modals";
/// A stream through SSH takes longer to open than a socket.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The proxy of a running server, with the tasks that keep it up to date.
pub(crate) struct ServiceProxy {
    proxy: Arc<Proxy>,
    keeper: Arc<RouteSync>,
    _tasks: JoinSet<()>,
}

impl ServiceProxy {
    /// Starts with the present routes, so that a restarted server knows its services from the first request.
    pub(crate) async fn start(app: &App) -> Self {
        let keeper = Arc::new(RouteSync::new(app));
        keeper.begin().await;
        let proxy = Proxy {
            routes: Arc::clone(app.routes()),
            connector: Arc::new(AgentConnector(app.clone())),
            gatekeeper: Arc::new(TokenGatekeeper(app.clone())),
            waker: Arc::clone(&keeper) as Arc<dyn windlass_gateway::ServiceWaker>,
            log: Some(Arc::new(TracingAccessLog)),
            certificates: None,
            limits: ProxyLimits { connect_timeout: CONNECT_TIMEOUT, ..ProxyLimits::USUAL },
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&keeper).run());
        if app.settings().pipelines {
            tasks.spawn(readiness::run(app.clone()));
        }
        Self { proxy: Arc::new(proxy), keeper, _tasks: tasks }
    }

    /// Routes on the ports of the API. Pages of services have an opaque origin there if the server has a web UI, whose
    /// origin they would share otherwise.
    pub(crate) fn router(&self, app: &App) -> Router {
        if app.settings().web_ui {
            self.routes().layer(middleware::from_fn(from_web_ui)).layer(middleware::map_response(sandbox))
        } else {
            self.services_router()
        }
    }

    /// Routes on a port that serves nothing else. Pages there share an origin with other services, so no cookie of
    /// windlass is accepted.
    pub(crate) fn services_router(&self) -> Router {
        self.routes().layer(middleware::from_fn(without_session))
    }

    fn routes(&self) -> Router {
        Router::new()
            .route("/proxy/services/{*rest}", any(handle_service))
            .route("/proxy/models/{*rest}", any(handle_model))
            .with_state(Arc::clone(&self.proxy))
    }

    /// Unregisters the proxy, so that ending replicas need not wait for it.
    pub(crate) async fn stop(self) {
        self.keeper.end().await;
    }
}

/// Adds a policy; those of the service apply as well.
async fn sandbox(mut response: Response) -> Response {
    response.headers_mut().append(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(SANDBOX));
    response
}

/// Accepts the cookie of a session if a link of the web UI or the user caused the request.
async fn from_web_ui(mut request: Request, next: Next) -> Response {
    let site = request.headers().get("sec-fetch-site");
    if !site.is_some_and(|site| site == "same-origin" || site == "none") {
        remove_session_cookie(request.headers_mut());
    }
    next.run(request).await
}

async fn without_session(mut request: Request, next: Next) -> Response {
    remove_session_cookie(request.headers_mut());
    next.run(request).await
}

fn remove_session_cookie(headers: &mut HeaderMap) {
    let is_session = |cookie: &str| cookie.trim_start().starts_with(SESSION_COOKIE);
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let cookies: Vec<&str> = lines.flat_map(|line| line.split(';')).collect();
    if !cookies.iter().any(|cookie| is_session(cookie)) {
        return;
    }
    let kept: Vec<&str> = cookies.into_iter().filter(|cookie| !is_session(cookie)).collect();
    let kept = HeaderValue::from_str(&kept.join(";"));
    headers.remove(header::COOKIE);
    if let Ok(kept) = kept
        && !kept.is_empty()
    {
        headers.insert(header::COOKIE, kept);
    }
}

async fn handle_service(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let origin = request_origin(&request);
    let answer = proxy.serve_by_path(&origin, SERVICES, request.map(RequestBody::boxed)).await;
    answer.map(Body::new)
}

async fn handle_model(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let origin = request_origin(&request);
    models::handle(&proxy, &origin, MODELS, request).await.map(Body::new)
}

fn request_origin(request: &Request) -> ClientConnection {
    let peer = request.extensions().get::<Peer>().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.0);
    let encrypted = request.extensions().get::<EncryptedConnection>().is_some();
    ClientConnection::new(SocketAddr::new(peer, 0), encrypted)
}

/// Opens streams to ports of jobs, on this machine and over SSH.
struct AgentConnector(App);

/// Target of a replica in a route.
pub(super) fn replica_target(
    instance: impl std::fmt::Display,
    job: impl std::fmt::Display,
    port: u16,
) -> ReplicaTarget {
    ReplicaTarget::Tunnel { name: format!("{instance}/{job}"), port }
}

fn parse_target(target: &ReplicaTarget) -> Option<(CallContext, u16)> {
    let ReplicaTarget::Tunnel { name, port } = target else { return None };
    let (instance, job) = name.split_once('/')?;
    let call = CallContext { instance: instance.parse().ok()?, submission: job.parse().ok()?, epoch: 0 };
    Some((call, *port))
}

impl Connector for AgentConnector {
    fn connect<'a>(&'a self, target: &'a ReplicaTarget) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            let absent = || io::Error::new(io::ErrorKind::NotFound, "the replica does not exist");
            let (call, port) = parse_target(target).ok_or_else(absent)?;
            let agents = self.0.agents().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
            let port = agents.connect(call, port).await.map_err(io::Error::other)?;
            Ok(Box::new(port) as Stream)
        })
    }
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(self.stream()).poll_read(cx, buf)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.stream()).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream()).poll_shutdown(cx)
    }
}

/// Authenticates tokens against the database. Results are cached for at most one second, as for the API.
struct TokenGatekeeper(App);

impl Gatekeeper for TokenGatekeeper {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            match self.authenticate(token, project, peer).await {
                Ok(()) => Verdict::Allow { identity: None },
                Err(Error::Db(_)) => Verdict::Unknown,
                Err(_) => Verdict::Deny,
            }
        })
    }

    fn is_known<'a>(
        &'a self,
        token: &'a str,
        _project: &'a str,
        peer: IpAddr,
    ) -> BoxFuture<'a, Option<bool>> {
        Box::pin(async move { auth::is_server_token(&self.0, token, peer).await.ok() })
    }

    fn wait_until_revoked(&self, token: &str, project: &str) -> BoxFuture<'static, ()> {
        let (app, token, project) = (self.0.clone(), token.to_owned(), project.to_owned());
        Box::pin(async move { lost(&app, &token, &project).await })
    }
}

/// Completes when a token no longer grants access to a project.
async fn lost(app: &App, token: &str, project: &str) {
    let rights = loop {
        match authenticate(app, token, None).await {
            Ok(caller) => {
                let ground = RightsBasis {
                    user: caller.user.id,
                    token_hash: caller.token.hash(),
                    queue_token: None,
                    project: Some(project.to_owned()),
                };
                break StreamRights::register(app, ground);
            }
            // A database that does not answer revokes no rights.
            Err(Error::Db(_)) => tokio::time::sleep(crate::config::RIGHTS_POLL_INTERVAL).await,
            Err(_) => return,
        }
    };
    loop {
        rights.changed().await;
        match check_access(app, token, project).await {
            Ok(()) => {}
            Err(Error::Db(_)) => rights.again(),
            Err(_) => return,
        }
    }
}

/// Finds the user of a token, or of the cookie of a session.
async fn authenticate(app: &App, token: &str, peer: Option<IpAddr>) -> Result<auth::Caller, Error> {
    if auth::is_session_cookie(token) {
        return auth::authenticate_session(app, token, peer).await;
    }
    auth::authenticate(app, Some(&format!("Bearer {token}"))).await
}

async fn check_access(app: &App, token: &str, project: &str) -> Result<(), Error> {
    let caller = authenticate(app, token, None).await?;
    auth::project_scope(app, caller, project, Vec::new()).await?.must(Access::ProjectUser)
}

impl TokenGatekeeper {
    /// Applies the rate limit of the API to wrong tokens.
    async fn authenticate(&self, token: &str, project: &str, peer: IpAddr) -> Result<(), Error> {
        let app = &self.0;
        let authorization = format!("Bearer {token}");
        if !auth::is_unguessable(app, Some(&authorization)) {
            app.paces().check_login(peer)?;
        }
        let caller = authenticate(app, token, Some(peer)).await;
        if let Err(Error::Denied { .. }) = &caller {
            app.paces().tried(peer)?;
        }
        let caller = caller?;
        caller.require_services()?;
        auth::project_scope(app, caller, project, Vec::new()).await?.must(Access::ProjectUser)
    }
}
