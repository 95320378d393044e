//! Connections: accepted, bounded, and let go in good order.

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
    http::{EncryptedConnection, Peer},
    newcomers::{CURRENT_CONNECTION, TrackedConnection, UnauthenticatedConnections},
    tls::FallbackTls,
};

const HEADERS_MAX: usize = 100;
/// Longer heads are answered 431, give or take what one read brings.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Clients that speak TLS keep connections for 30 seconds, and must not find one closed.
const TLS_IDLE_TIMEOUT_MIN: Duration = Duration::from_secs(65);
const CONNECTIONS_MAX: usize = 20_000;
/// A year: whoever came encrypted once does not come in the clear again. Not for names below: those are services.
const HSTS_VALUE: HeaderValue = HeaderValue::from_static("max-age=31536000");
/// Requests in flight get this long at the end.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// When no connection can be accepted (no file descriptors), trying at once again is no use.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The first byte of every greeting in TLS, and of no request.
const TLS_HELLO: u8 = 0x16;

/// How callers of a port are met.
#[derive(Clone)]
pub(crate) enum ListenerKind {
    /// What is said there is encrypted. With a certificate that somebody gave us, browsers are told to keep to it.
    Tls { acceptor: TlsAcceptor, is_strict: bool },
    /// It is not, unless the caller begins so.
    Plain(Arc<FallbackTls>),
}

/// The connections of all doors of a server.
#[derive(Clone)]
pub(crate) struct ConnectionLimits {
    most: usize,
    places: Arc<Semaphore>,
    newcomers: Arc<UnauthenticatedConnections>,
}

impl ConnectionLimits {
    /// As many as were asked for, else as this process may have open files, and as many again for what it opens itself:
    /// a request to a service is a second connection.
    pub(crate) fn new(most: Option<usize>) -> Self {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // Each door keeps one ready.
        let most = most.unwrap_or_else(|| bearable(files)).max(4);
        let newcomers = Arc::new(UnauthenticatedConnections::new(most));
        Self { most, places: Arc::new(Semaphore::new(most)), newcomers }
    }
}

/// Half of the open files that this process may have; `None` is any number.
fn bearable(files: Option<u64>) -> usize {
    let half = files.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    half.min(CONNECTIONS_MAX)
}

/// Serves until `stop` is done; then lets requests finish.
pub(crate) async fn serve(
    app: &App,
    connections: ConnectionLimits,
    listener: TcpListener,
    door: ListenerKind,
    router: Router,
    stop: impl Future<Output = ()>,
) -> Result<(), Infallible> {
    let mut stop = pin!(stop);
    loop {
        if connections.places.available_permits() == 0 {
            connections.newcomers.evict_oldest();
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
                    tracing::warn!(%error, "accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
                continue;
            }
        };
        // Small answers must not wait for more; a socket that refuses is about to fail anyway.
        let _ = stream.set_nodelay(true);
        let connection = connections.newcomers.connected(peer.ip());
        let caller =
            IncomingConnection { app: app.clone(), router: router.clone(), peer: Peer(peer.ip()), place };
        let door = door.clone();
        tokio::spawn(async move {
            let served = caller.serve(stream, &door, &connection);
            tokio::select! {
                () = served => {}
                () = connection.closed() => {
                    tracing::debug!("closed a connection that said nothing: its address has its share of those");
                }
            }
        });
    }
    drop(listener);
    app.close();
    // Whoever has all places knows that nobody is served any more.
    let all = u32::try_from(connections.most).unwrap_or(u32::MAX);
    if timeout(SHUTDOWN_GRACE, connections.places.acquire_many(all)).await.is_err() {
        tracing::warn!("requests still in flight were cut off");
    }
    Ok(())
}

/// A caller who has begun to speak.
enum AcceptedStream {
    Plain { stream: TcpStream, http2: bool },
    Encrypted(Box<TlsStream<TcpStream>>),
}

async fn detect_protocol(stream: TcpStream, door: &ListenerKind) -> io::Result<AcceptedStream> {
    let tls = match door {
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

/// How a caller speaks.
#[derive(Clone, Copy)]
struct ConnectionProtocol {
    http2: bool,
    encrypted: bool,
    /// Browsers are told to come encrypted from now on.
    is_strict: bool,
}

/// Whoever came through a door.
struct IncomingConnection {
    app: App,
    router: Router,
    peer: Peer,
    place: OwnedSemaphorePermit,
}

impl IncomingConnection {
    async fn serve(self, stream: TcpStream, door: &ListenerKind, connection: &Arc<TrackedConnection>) {
        let patience = self.app.settings().head_timeout;
        let is_strict = matches!(door, ListenerKind::Tls { is_strict: true, .. });
        match timeout(patience, detect_protocol(stream, door)).await {
            Ok(Ok(AcceptedStream::Plain { stream, http2 })) => {
                let manner = ConnectionProtocol { http2, encrypted: false, is_strict };
                serve_connection(self, stream, manner, connection).await;
            }
            Ok(Ok(AcceptedStream::Encrypted(stream))) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let manner = ConnectionProtocol { http2, encrypted: true, is_strict };
                serve_connection(self, *stream, manner, connection).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "failed to greet a caller"),
            Err(_) => tracing::debug!("a caller took too long to greet"),
        }
    }
}

/// Counts a connection for as long as it lasts, however it ends.
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

/// One connection, to its end.
async fn serve_connection<S>(
    caller: IncomingConnection,
    stream: S,
    manner: ConnectionProtocol,
    connection: &Arc<TrackedConnection>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let IncomingConnection { app, router, peer, place } = caller;
    let ConnectionProtocol { http2, encrypted, is_strict } = manner;
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
    let patience = match encrypted {
        true => app.settings().head_timeout.max(TLS_IDLE_TIMEOUT_MIN),
        false => app.settings().head_timeout,
    };
    let stream = TokioIo::new(stream);
    let _counted = ConnectionCountGuard::new(&app);
    let served = if http2 {
        let mut connection = pin!(windlass_gateway::http2(patience).serve_connection(stream, service));
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
            .header_read_timeout(patience)
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
        tracing::debug!(%error, "serve a connection");
    }
    drop(place);
}

fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::bearable;

    #[test]
    fn half_of_the_open_files_are_for_callers() {
        assert_eq!((bearable(Some(1024)), bearable(Some(1)), bearable(None)), (512, 0, 20_000));
        assert_eq!(bearable(Some(1_048_576)), 20_000);
    }
}
