//! Metrics of a gateway process for Prometheus, on a separate address that callers cannot reach.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode, body::Incoming, header, server::conn::http1, service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::route_sync::RouteSync;
use crate::{metrics, serve::ListenerLimits};

/// Serves metrics until `stop`.
pub(super) async fn serve(listener: TcpListener, follower: Arc<RouteSync>, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "failed to accept metrics connection");
                tokio::time::sleep(ListenerLimits::ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let follower = Arc::clone(&follower);
        let answer = service_fn(move |request| {
            let follower = Arc::clone(&follower);
            async move { Ok::<_, Infallible>(respond(&follower, &request)) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(ListenerLimits::USUAL.head_timeout)
            .serve_connection(TokioIo::new(stream), answer);
        let stop = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = connection => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

fn respond(follower: &RouteSync, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    if request.uri().path() != "/metrics" {
        *response.status_mut() = StatusCode::NOT_FOUND;
        return response;
    }
    let text = format!("{}{}", follower.metrics(), metrics::render(follower.routes()));
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    *response.body_mut() = Full::new(Bytes::from(text));
    response
}
