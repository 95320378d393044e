//! Listeners for clients: HTTP/1.1 and HTTP/2, with or without TLS, with limits per client.

use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    task::Poll,
    time::Duration,
};

use hyper::{Request, Response, body::Incoming, header, server::conn, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::RwLock;
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    acme::Challenges,
    connect::Io,
    headers::{self, ClientConnection},
    lazy_timer::ConnectionTimer,
    models,
    proxy::{Proxy, redirect_to_https},
    response_body::ResponseBody,
    write_timeout::WriteTimeout,
};

/// Maximum size of a request head.
const HEAD_MAX: usize = 32 * 1024;
const HEADERS_MAX: usize = 100;
/// Maximum number of streams of one HTTP/2 connection.
const STREAMS_MAX: u32 = 250;
/// Maximum number of streams that are reset before they are accepted; more are an attack.
const RESETS_MAX: usize = 20;
/// Path of the model endpoint at the gateway's own name.
const MODELS_PATH: &str = "/proxy/models";

/// Routing of requests.
#[derive(Clone, Debug)]
pub enum RequestRouting {
    /// By host.
    Hosts,
    /// By host, with the model endpoint at the gateway's own name.
    Gateway(Arc<OwnHostname>),
    /// By path: services below one prefix, models below another.
    ByPath { services: String, models: String },
}

/// Name of the gateway itself, once it is known.
#[derive(Debug, Default)]
pub struct OwnHostname(RwLock<Option<String>>);

impl OwnHostname {
    pub fn set(&self, name: Option<&str>) {
        *self.0.write() = name.map(str::to_ascii_lowercase);
    }

    /// Returns the name if the request is for it.
    fn match_request(&self, request: &Request<Incoming>) -> Option<String> {
        let host = match request.uri().host() {
            Some(host) => host,
            None => headers::host_name(request.headers().get(header::HOST)?),
        };
        self.0.read().as_ref().filter(|own| own.eq_ignore_ascii_case(host)).cloned()
    }
}

/// Timeouts and limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct ListenerLimits {
    /// For a complete head, and for the next request on an idle connection.
    pub head_timeout: Duration,
    /// For a TLS handshake.
    pub handshake_timeout: Duration,
    /// For a client that reads nothing of its response.
    pub write_timeout: Duration,
    /// For requests in flight when the listener stops.
    pub drain_timeout: Duration,
    pub connections_max: usize,
}

impl ListenerLimits {
    /// Delay after a failed accept, when the process has no file descriptor left.
    pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

    pub const USUAL: Self = Self {
        head_timeout: Duration::from_secs(25),
        handshake_timeout: Duration::from_secs(10),
        write_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_secs(30),
        connections_max: 20_000,
    };
}

/// Listener configuration.
#[derive(Clone)]
pub struct ListenerConfig {
    pub proxy: Arc<Proxy>,
    pub routing: RequestRouting,
    /// Responses to challenges of certificate authorities, served on plain connections.
    pub challenges: Option<Arc<Challenges>>,
    /// `None`: plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    pub limits: ListenerLimits,
}

/// Shutdown signal of a listener for its connections.
struct ShutdownSignal {
    /// Set before the notification. Cheap to check, and a connection checks it whenever it is woken.
    has_begun: AtomicBool,
    reported: CancellationToken,
}

impl ShutdownSignal {
    fn begin(&self) {
        self.has_begun.store(true, Release);
        self.reported.cancel();
    }

    /// Runs `work` to its end, or until the listener shuts down: then returns `None`. For one task, which both wake.
    async fn run_until<T>(&self, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut reported = pin!(self.reported.cancelled());
        let mut is_listening = false;
        poll_fn(|cx| {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(done));
            }
            if !is_listening || self.has_begun.load(Acquire) {
                is_listening = true;
                return reported.as_mut().poll(cx).map(|()| None);
            }
            Poll::Pending
        })
        .await
    }
}

/// Serves until `stop`; then lets requests in flight finish, within their limit.
pub async fn serve(listener: TcpListener, listening: ListenerConfig, stop: CancellationToken) {
    let listening = Arc::new(listening);
    let places = Arc::new(Semaphore::new(listening.limits.connections_max));
    let tasks = TaskTracker::new();
    let closing =
        Arc::new(ShutdownSignal { has_begun: AtomicBool::new(false), reported: CancellationToken::new() });
    loop {
        // A listener at its connection limit must also react to the stop, because it notifies the connections.
        let place = tokio::select! {
            Ok(place) = Arc::clone(&places).acquire_owned() => place,
            () = stop.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "failed to accept connection");
                tokio::time::sleep(ListenerLimits::ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let (listening, closing) = (Arc::clone(&listening), Arc::clone(&closing));
        tasks.spawn(async move {
            let _place = place;
            if let Err(error) = listening.handle_connection(stream, peer, &closing).await {
                tracing::debug!(%peer, %error, "connection ended early");
            }
        });
    }
    drop(listener);
    closing.begin();
    tasks.close();
    if tokio::time::timeout(listening.limits.drain_timeout, tasks.wait()).await.is_err() {
        tracing::warn!(connections = tasks.len(), "listener stopped with requests in flight");
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

impl ListenerConfig {
    async fn handle_connection(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        closing: &ShutdownSignal,
    ) -> Result<(), ConnectionError> {
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            let http2 = tokio::time::timeout(self.limits.head_timeout, detect_http2(&stream)).await??;
            let origin = ClientConnection::new(peer, false);
            return self.serve_http(stream, origin, http2, closing).await;
        };
        let accept = TlsAcceptor::from(Arc::clone(tls)).accept(stream);
        let stream = tokio::time::timeout(self.limits.handshake_timeout, accept).await??;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        self.serve_http(stream, ClientConnection::new(peer, true), http2, closing).await
    }

    async fn serve_http<S: Io>(
        self: Arc<Self>,
        stream: S,
        origin: ClientConnection,
        http2: bool,
        closing: &ShutdownSignal,
    ) -> Result<(), ConnectionError> {
        let stream = TokioIo::new(WriteTimeout::new(stream, self.limits.write_timeout));
        let origin = Arc::new(origin);
        let this = Arc::clone(&self);
        let service = service_fn(move |request: Request<Incoming>| {
            let (this, origin) = (Arc::clone(&this), Arc::clone(&origin));
            async move { Ok::<_, Infallible>(this.route_request(&origin, request).await) }
        });
        if http2 {
            let mut connection =
                pin!(self::http2_builder(self.limits.head_timeout).serve_connection(stream, service));
            if let Some(result) = closing.run_until(connection.as_mut()).await {
                return Ok(result?);
            }
            connection.as_mut().graceful_shutdown();
            return Ok(connection.await?);
        }
        let mut connection = pin!(self.http1_builder().serve_connection(stream, service).with_upgrades());
        if let Some(result) = closing.run_until(connection.as_mut()).await {
            return Ok(result?);
        }
        connection.as_mut().graceful_shutdown();
        Ok(connection.await?)
    }

    fn http1_builder(&self) -> conn::http1::Builder {
        let mut builder = conn::http1::Builder::new();
        builder
            .timer(ConnectionTimer::default())
            .header_read_timeout(self.limits.head_timeout)
            // Most responses are small: one copy costs less than a vectored write.
            .writev(false)
            .max_headers(HEADERS_MAX)
            .max_header_size(HEAD_MAX)
            .max_buf_size(2 * HEAD_MAX);
        builder
    }

    /// Returns whether this process has a certificate for a name.
    fn has_certificate(&self, name: &str) -> bool {
        self.proxy.certificates.as_ref().is_some_and(|known| known.has(name))
    }

    /// Routes a request. The future is copied and kept per request, so large parts that are not always needed are
    /// boxed.
    async fn route_request(
        &self,
        origin: &ClientConnection,
        request: Request<Incoming>,
    ) -> Response<ResponseBody> {
        if let Some(challenges) = &self.challenges
            && !origin.https
            && let Some(proof) = challenges.find(request.uri().path())
        {
            return Response::new(ResponseBody::text(proof.into()));
        }
        let own = match &self.routing {
            RequestRouting::Gateway(own) => own.match_request(&request),
            RequestRouting::Hosts | RequestRouting::ByPath { .. } => None,
        };
        if let Some(own) = own {
            // The request carries a token, which must not be sent unencrypted.
            if !origin.https && self.has_certificate(&own) {
                return redirect_to_https(&own, request.uri().path());
            }
            return Box::pin(models::handle(&self.proxy, origin, MODELS_PATH, request)).await;
        }
        match &self.routing {
            RequestRouting::Hosts | RequestRouting::Gateway(_) => {
                self.proxy.serve_by_host(origin, request).await
            }
            RequestRouting::ByPath { models, .. } if request.uri().path().starts_with(models.as_str()) => {
                Box::pin(models::handle(&self.proxy, origin, models, request)).await
            }
            RequestRouting::ByPath { services, .. } => {
                self.proxy.serve_by_path(origin, services, request).await
            }
        }
    }
}

/// HTTP/2 server settings with limits per connection. A silent peer is pinged after `patience`.
pub fn http2_builder(limits: Duration) -> conn::http2::Builder<TokioExecutor> {
    let mut builder = conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(limits)
        .keep_alive_timeout(limits)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_MAX as u32)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX);
    builder
}

/// Returns whether a plain connection starts with the HTTP/2 preface. No HTTP/1 method starts with it.
pub async fn detect_http2(stream: &TcpStream) -> io::Result<bool> {
    const PREFACE: &[u8] = b"PRI ";
    let mut start = [0_u8; PREFACE.len()];
    loop {
        let seen = stream.peek(&mut start).await?;
        let seen_bytes = start.get(..seen).unwrap_or_default();
        if seen == 0 || !PREFACE.starts_with(seen_bytes) {
            return Ok(false);
        }
        if seen == PREFACE.len() {
            return Ok(true);
        }
        // Peeking does not consume the bytes, so the socket stays readable: poll again in a moment.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
