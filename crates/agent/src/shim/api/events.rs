//! `GET /api/events`: the events of the host as lines of JSON, until the client disconnects.

use std::{collections::VecDeque, sync::Arc};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::{Query, State},
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Deserialize;
use windlass_api::agent::events::{ShimEvent, ShimEventKind};

use super::{ApiState, PresentedCredential, Shim};
use crate::{
    clock,
    shim::events::{EventReader, StreamItem},
};

/// Approximate maximum size of one chunk of the response; the last event may exceed it.
const CHUNK_BYTES: usize = 64 * 1024;

#[derive(Debug, Default, Deserialize)]
pub(super) struct EventsQuery {
    /// Sequence number of the last event that the reader received.
    after: Option<u64>,
    /// Boot id of the shim that assigned the sequence number.
    boot: Option<String>,
}

pub(super) async fn stream(
    State(gate): State<ApiState>,
    Extension(shown): Extension<PresentedCredential>,
    Query(from): Query<EventsQuery>,
) -> Response {
    let reader = gate.shim.events.reader(from.after, from.boot.as_deref());
    let lines = EventStream { shim: gate.shim, shown, reader, waiting: VecDeque::new() };
    let body = stream::unfold(lines, |mut lines| async move {
        let chunk = lines.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(chunk), lines))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}

struct EventStream {
    shim: Arc<Shim>,
    shown: PresentedCredential,
    reader: EventReader,
    /// Events read from the ring and not yet sent to the connection.
    waiting: VecDeque<ShimEvent>,
}

impl EventStream {
    /// Returns the next lines; `None` when the shim stops or the credential of the reader is revoked.
    async fn next(&mut self) -> Option<Bytes> {
        if self.waiting.is_empty() {
            let next = tokio::select! {
                next = self.reader.next() => next,
                () = self.shim.stop.cancelled() => return None,
                () = self.shim.credential_revoked(&self.shown) => return None,
            };
            self.take(next);
        }
        let mut text = Vec::new();
        while text.len() < CHUNK_BYTES
            && let Some(event) = self.waiting.pop_front()
        {
            // Serialization of an event cannot fail: all keys are text.
            if serde_json::to_writer(&mut text, &event).is_ok() {
                text.push(b'\n');
            }
        }
        Some(text.into())
    }

    fn take(&mut self, next: StreamItem) {
        match next {
            StreamItem::Events(events) => self.waiting.extend(events),
            StreamItem::Alive { seq } => self.waiting.push_back(new_event(seq, ShimEventKind::Alive)),
            StreamItem::Reset { seq } => {
                let boot = self.shim.events.boot().to_owned();
                self.waiting.push_back(new_event(seq, ShimEventKind::Reset { boot }));
                // Read after the sequence number: a change in between is reported twice, but never lost.
                let tasks = self.shim.tasks.infos().into_iter().map(|info| ShimEventKind::Task { info });
                self.waiting.extend(tasks.map(|what| new_event(seq, what)));
                let problems = self.shim.problems.lock().clone();
                self.waiting.push_back(new_event(seq, ShimEventKind::Health { problems }));
            }
        }
    }
}

fn new_event(seq: u64, what: ShimEventKind) -> ShimEvent {
    ShimEvent { seq, at: clock::now_us(), kind: what }
}
