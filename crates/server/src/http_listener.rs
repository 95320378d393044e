//! HTTP listeners: accept connections, limit their number and close them gracefully.

use std::{convert::Infallible, future::Future, io, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use hyper::{
    Request,
    body::Incoming,
    header::{HeaderValue, STRICT_TRANSPORT_SECURITY},
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use windlass_gateway::detect_http2;

use crate::{
    app::App,
    connection_shares::{CURRENT_CONNECTION, ConnectionShares, TrackedConnection},
    peer::{EncryptedConnection, Peer},
    tls::FallbackTls,
};

const HEADERS_MAX: usize = 100;
/// Longer request heads are answered with 431. The actual limit is higher by up to one read.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Clients that use TLS keep connections for 30 seconds, and must not find one closed.
const TLS_IDLE_TIMEOUT_MIN: Duration = Duration::from_secs(65);
const CONNECTIONS_MAX: usize = 20_000;
/// One year: a browser that used TLS once does not use plain HTTP again. Does not include subdomains, which are
/// services.
const HSTS_VALUE: HeaderValue = HeaderValue::from_static("max-age=31536000");
/// Maximum time for requests in flight when the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// When no connection can be accepted (no file descriptors), an immediate retry fails too.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// First byte of every TLS handshake, and of no HTTP request.
const TLS_HELLO: u8 = 0x16;

/// Protocols that a port accepts.
#[derive(Clone)]
pub(crate) enum ListenerKind {
    /// TLS only. With a configured certificate (`is_strict`), HSTS headers are sent to browsers.
    Tls { acceptor: TlsAcceptor, is_strict: bool },
    /// Plain HTTP, or TLS if the client starts a handshake.
    Plain(Arc<FallbackTls>),
}

/// Connection limits, shared by all listeners of a server.
#[derive(Clone)]
pub(crate) struct ConnectionLimits {
    most: usize,
    places: Arc<Semaphore>,
    shares: Arc<ConnectionShares>,
}

impl ConnectionLimits {
    /// Uses `most` if it is set, otherwise half of this process's limit of open files: the other half is for
    /// connections that the server opens itself, because a request to a service needs a second one.
    pub(crate) fn new(most: Option<usize>) -> Self {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // Each listener reserves one permit before it accepts.
        let most = most.unwrap_or_else(|| default_connections_max(files)).max(4);
        let shares = Arc::new(ConnectionShares::new(most));
        Self { most, places: Arc::new(Semaphore::new(most)), shares }
    }
}

/// Half of the limit of open files; `None` means no limit.
fn default_connections_max(files: Option<u64>) -> usize {
    let half = files.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    half.min(CONNECTIONS_MAX)
}

/// Serves connections until `stop` completes, then waits for the requests in flight.
pub(crate) async fn serve(
    app: &App,
    connections: ConnectionLimits,
    listener: TcpListener,
    kind: ListenerKind,
    router: Router,
    stop: impl Future<Output = ()>,
) -> Result<(), Infallible> {
    let mut stop = pin!(stop);
    loop {
        if connections.places.available_permits() == 0 {
            connections.shares.evict_oldest();
        }
        let place = tokio::select! {
            place = Arc::clone(&connections.places).acquire_owned() => place,
            () = &mut stop => break,
        };
        let Ok(place) = place else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if !is_transient(&error) {
                    tracing::warn!(%error, "failed to accept connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
                continue;
            }
        };
        // Small responses must not wait for more data. A socket that rejects the option is about to fail anyway.
        let _ = stream.set_nodelay(true);
        let connection = connections.shares.connected(peer.ip());
        let caller =
            IncomingConnection { app: app.clone(), router: router.clone(), peer: Peer(peer.ip()), place };
        let kind = kind.clone();
        tokio::spawn(async move {
            let served = caller.serve(stream, &kind, &connection);
            tokio::select! {
                () = served => {}
                () = connection.closed() => {
                    tracing::debug!("closed a connection: its address or its user reached its share");
                }
            }
        });
    }
    drop(listener);
    app.close();
    // Acquiring all permits succeeds once every connection is closed.
    let all = u32::try_from(connections.most).unwrap_or(u32::MAX);
    if timeout(SHUTDOWN_GRACE, connections.places.acquire_many(all)).await.is_err() {
        tracing::warn!("requests still in flight were cut off");
    }
    Ok(())
}

/// A connection whose protocol has been detected.
enum AcceptedStream {
    Plain { stream: TcpStream, http2: bool },
    Encrypted(Box<TlsStream<TcpStream>>),
}

async fn detect_protocol(stream: TcpStream, kind: &ListenerKind) -> io::Result<AcceptedStream> {
    let tls = match kind {
        ListenerKind::Tls { acceptor, .. } => Some(acceptor.clone()),
        ListenerKind::Plain(fallback) => {
            let mut first = [0];
            let is_tls = stream.peek(&mut first).await? == 1 && first[0] == TLS_HELLO;
            if is_tls { fallback.acceptor() } else { None }
        }
    };
    match tls {
        Some(tls) => Ok(AcceptedStream::Encrypted(Box::new(tls.accept(stream).await?))),
        None => {
            let http2 = detect_http2(&stream).await?;
            Ok(AcceptedStream::Plain { stream, http2 })
        }
    }
}

/// Negotiated protocol of a connection.
#[derive(Clone, Copy)]
struct ConnectionProtocol {
    http2: bool,
    encrypted: bool,
    /// True if HSTS headers are sent.
    is_strict: bool,
}

/// An accepted connection and what it needs to be served.
struct IncomingConnection {
    app: App,
    router: Router,
    peer: Peer,
    place: OwnedSemaphorePermit,
}

impl IncomingConnection {
    async fn serve(self, stream: TcpStream, kind: &ListenerKind, connection: &Arc<TrackedConnection>) {
        let time_limit = self.app.settings().head_timeout;
        let is_strict = matches!(kind, ListenerKind::Tls { is_strict: true, .. });
        match timeout(time_limit, detect_protocol(stream, kind)).await {
            Ok(Ok(AcceptedStream::Plain { stream, http2 })) => {
                let protocol = ConnectionProtocol { http2, encrypted: false, is_strict };
                serve_connection(self, stream, protocol, connection).await;
            }
            Ok(Ok(AcceptedStream::Encrypted(stream))) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let protocol = ConnectionProtocol { http2, encrypted: true, is_strict };
                serve_connection(self, *stream, protocol, connection).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "failed to detect the protocol of a connection"),
            Err(_) => tracing::debug!("timed out detecting the protocol of a connection"),
        }
    }
}

/// Counts a connection in the metrics until it ends, however it ends.
struct ConnectionCountGuard(App);

impl ConnectionCountGuard {
    fn new(app: &App) -> Self {
        app.metrics().connected();
        Self(app.clone())
    }
}

impl Drop for ConnectionCountGuard {
    fn drop(&mut self) {
        self.0.metrics().disconnected();
    }
}

/// Serves one connection until it ends.
async fn serve_connection<S>(
    caller: IncomingConnection,
    stream: S,
    protocol: ConnectionProtocol,
    connection: &Arc<TrackedConnection>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let IncomingConnection { app, router, peer, place } = caller;
    let ConnectionProtocol { http2, encrypted, is_strict } = protocol;
    let routes = TowerToHyperService::new(router);
    let this = Arc::clone(connection);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        if encrypted {
            request.extensions_mut().insert(EncryptedConnection);
        }
        let answering = this.request();
        let answer = routes.call(request);
        CURRENT_CONNECTION.scope(Arc::clone(&this), async move {
            let mut answer = answer.await;
            if is_strict && let Ok(answer) = &mut answer {
                answer.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HSTS_VALUE);
            }
            drop(answering);
            answer
        })
    });
    let timeout = match encrypted {
        true => app.settings().head_timeout.max(TLS_IDLE_TIMEOUT_MIN),
        false => app.settings().head_timeout,
    };
    let stream = TokioIo::new(stream);
    let _counted = ConnectionCountGuard::new(&app);
    let served = if http2 {
        let mut connection = pin!(windlass_gateway::http2_builder(timeout).serve_connection(stream, service));
        tokio::select! {
            served = connection.as_mut() => served,
            () = app.closed() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    } else {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeout)
            .max_headers(HEADERS_MAX)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(stream, service)
            .with_upgrades();
        let mut connection = pin!(connection);
        tokio::select! {
            served = connection.as_mut() => served,
            () = app.closed() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "failed to serve connection");
    }
    drop(place);
}

fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::default_connections_max;

    #[test]
    fn connection_limit_is_half_of_the_open_file_limit() {
        assert_eq!(
            (
                default_connections_max(Some(1024)),
                default_connections_max(Some(1)),
                default_connections_max(None)
            ),
            (512, 0, 20_000)
        );
        assert_eq!(default_connections_max(Some(1_048_576)), 20_000);
    }
}
