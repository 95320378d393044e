//! Connections: accepted, bounded, and let go in good order.

use std::{convert::Infallible, future::Future, io, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use hyper::{
    Request,
    body::Incoming,
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
use windlass_gateway::speaks_http2;

use crate::{
    app::App,
    http::{Encrypted, Peer},
    tls::Fallback,
};

const HEADERS_MAX: usize = 100;
/// Longer heads are answered 431, give or take what one read brings.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Clients that speak TLS keep connections for 30 seconds, and must not find one closed.
const IDLE_MIN: Duration = Duration::from_secs(65);
const CONNECTIONS_MAX: usize = 20_000;
/// Requests in flight get this long at the end.
const GRACE: Duration = Duration::from_secs(10);
/// When no connection can be accepted (no file descriptors), trying at once again is no use.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The first byte of every greeting in TLS, and of no request.
const TLS_HELLO: u8 = 0x16;

/// How callers of a port are met.
#[derive(Clone)]
pub(crate) enum Door {
    /// What is said there is encrypted.
    Tls(TlsAcceptor),
    /// It is not, unless the caller begins so.
    Plain(Arc<Fallback>),
}

/// Serves until `stop` is done; then lets requests finish.
pub(crate) async fn serve(
    app: &App,
    listener: TcpListener,
    door: Door,
    router: Router,
    stop: impl Future<Output = ()>,
) -> Result<(), Infallible> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut stop = pin!(stop);
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if !is_passing(&error) {
                    tracing::warn!(%error, "accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                continue;
            }
        };
        // Small answers must not wait for more; a socket that refuses is about to fail anyway.
        let _ = stream.set_nodelay(true);
        let (app, router, peer) = (app.clone(), router.clone(), Peer(peer.ip()));
        let door = door.clone();
        tokio::spawn(async move {
            let patience = app.settings().head_timeout;
            match timeout(patience, meet(stream, &door)).await {
                Ok(Ok(Met::Plain { stream, http2 })) => {
                    let manner = Manner { http2, encrypted: false };
                    carry(app, stream, router, peer, manner, place).await;
                }
                Ok(Ok(Met::Encrypted(stream))) => {
                    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let manner = Manner { http2, encrypted: true };
                    carry(app, *stream, router, peer, manner, place).await;
                }
                Ok(Err(error)) => tracing::debug!(%error, "failed to greet a caller"),
                Err(_) => tracing::debug!("a caller took too long to greet"),
            }
        });
    }
    drop(listener);
    app.close();
    // Whoever has all places knows that nobody is served any more.
    if timeout(GRACE, places.acquire_many(CONNECTIONS_MAX as u32)).await.is_err() {
        tracing::warn!("requests still in flight were cut off");
    }
    Ok(())
}

/// A caller who has begun to speak.
enum Met {
    Plain { stream: TcpStream, http2: bool },
    Encrypted(Box<TlsStream<TcpStream>>),
}

async fn meet(stream: TcpStream, door: &Door) -> io::Result<Met> {
    let tls = match door {
        Door::Tls(tls) => Some(tls.clone()),
        Door::Plain(fallback) => {
            let mut first = [0];
            let is_tls = stream.peek(&mut first).await? == 1 && first[0] == TLS_HELLO;
            if is_tls { fallback.acceptor() } else { None }
        }
    };
    match tls {
        Some(tls) => Ok(Met::Encrypted(Box::new(tls.accept(stream).await?))),
        None => {
            let http2 = speaks_http2(&stream).await?;
            Ok(Met::Plain { stream, http2 })
        }
    }
}

/// How a caller speaks.
#[derive(Clone, Copy)]
struct Manner {
    http2: bool,
    encrypted: bool,
}

/// One connection, to its end.
async fn carry<S>(
    app: App,
    stream: S,
    router: Router,
    peer: Peer,
    manner: Manner,
    place: OwnedSemaphorePermit,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Manner { http2, encrypted } = manner;
    let routes = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        if encrypted {
            request.extensions_mut().insert(Encrypted);
        }
        routes.call(request)
    });
    let patience = match encrypted {
        true => app.settings().head_timeout.max(IDLE_MIN),
        false => app.settings().head_timeout,
    };
    let stream = TokioIo::new(stream);
    app.metrics().connected();
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
    app.metrics().disconnected();
    drop(place);
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
