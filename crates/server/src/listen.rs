//! Connections: accepted, bounded, and let go in good order.

use std::{convert::Infallible, future::Future, io, sync::Arc, time::Duration};

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
use tokio::{net::TcpListener, sync::Semaphore, time::timeout};

use crate::{app::App, http::Peer};

const HEADERS_MAX: usize = 100;
/// Longer heads are answered 431, give or take what one read brings.
const HEAD_BYTES_MAX: usize = 32 * 1024;
const CONNECTIONS_MAX: usize = 20_000;
/// Requests in flight get this long at the end.
const GRACE: Duration = Duration::from_secs(10);
/// When no connection can be accepted (no file descriptors), trying at once again is no use.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop` is done; then lets requests finish.
pub(crate) async fn serve(
    app: &App,
    listener: TcpListener,
    router: Router,
    stop: impl Future<Output = ()>,
) -> Result<(), Infallible> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut stop = std::pin::pin!(stop);
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
        let peer = Peer(peer.ip());
        let routes = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            routes.call(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(app.settings().head_timeout)
            .max_headers(HEADERS_MAX)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let app = app.clone();
        tokio::spawn(async move {
            app.metrics().connected();
            let mut connection = std::pin::pin!(connection);
            let served = tokio::select! {
                served = connection.as_mut() => served,
                () = app.closed() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = served {
                tracing::debug!(%error, "serve a connection");
            }
            app.metrics().disconnected();
            drop(place);
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

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
