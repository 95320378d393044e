//! Responses that stream events, for as long as the caller has the rights to receive them.
//!
//! The next event is created when the client has read the previous one, so a slow client costs one event and delays no
//! other. The stream of a caller who lost the rights is closed, and a stopping server does not wait for the end.

use std::{convert::Infallible, future::Future};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::{StreamExt as _, stream::unfold};
use serde::Serialize;

use super::{port_stream::StreamSlot, with_body};
use crate::{
    app::App,
    error::{Error, Result},
    services::{SseEvent, SseStream},
    stream_rights::StreamRegistration,
};

struct SseResponse<T, A> {
    app: App,
    beats: SseStream<T>,
    allowed: A,
    rights: StreamRegistration,
    _place: StreamSlot,
}

pub(super) fn respond<T, A, R>(
    app: App,
    beats: SseStream<T>,
    place: StreamSlot,
    rights: StreamRegistration,
    allowed: A,
) -> Response
where
    T: Serialize + Send + 'static,
    A: Fn() -> R + Send + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let sse_response = SseResponse { app, beats, allowed, rights, _place: place };
    let frames = unfold(sse_response, |mut sse_response| async move {
        let frame = sse_response.next().await?;
        Some((Ok::<_, Infallible>(frame), sse_response))
    });
    let mut response = with_body(StatusCode::OK, "text/event-stream", Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Some proxies buffer a response until it is complete.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<T, A, R> SseResponse<T, A>
where
    T: Serialize,
    A: Fn() -> R,
    R: Future<Output = Result<()>>,
{
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let beat = tokio::select! {
                // Events after the loss of the rights are not sent, even if they are available.
                biased;
                () = self.rights.changed() => {
                    match (self.allowed)().await {
                        Ok(()) => continue,
                        // A database that does not answer revokes no rights.
                        Err(Error::Db(_)) => {
                            self.rights.again();
                            continue;
                        }
                        Err(_) => return None,
                    }
                }
                () = self.app.closed() => return None,
                beat = self.beats.next() => beat?,
            };
            return match frame(&beat) {
                Ok(frame) => Some(frame),
                Err(error) => {
                    tracing::error!(%error, "failed to encode event");
                    None
                }
            };
        }
    }
}

fn frame<T: Serialize>(beat: &SseEvent<T>) -> serde_json::Result<Bytes> {
    match beat {
        SseEvent::Alive => Ok(Bytes::from_static(b": alive\n\n")),
        SseEvent::Event { id, name, data } => {
            let mut out = format!("id: {id}\nevent: {name}\ndata: ").into_bytes();
            serde_json::to_writer(&mut out, data)?;
            out.extend_from_slice(b"\n\n");
            Ok(out.into())
        }
    }
}
