//! `GET /api/events`: the host's events as lines of JSON, for as long as somebody reads.

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

/// Bytes handed to the connection at once, give or take one event.
const CHUNK_BYTES: usize = 64 * 1024;

#[derive(Debug, Default, Deserialize)]
pub(super) struct EventsQuery {
    /// The last event the reader has seen.
    after: Option<u64>,
    /// The start of the shim that numbered it.
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
    /// Told already by the ring, not yet to the connection.
    waiting: VecDeque<ShimEvent>,
}

impl EventStream {
    /// The next lines; `None` when the shim stops or the reader may read no more.
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
            // Events are ours and have only text for keys: this cannot fail.
            if serde_json::to_writer(&mut text, &event).is_ok() {
                text.push(b'\n');
            }
        }
        Some(text.into())
    }

    fn take(&mut self, next: StreamItem) {
        match next {
            StreamItem::Events(events) => self.waiting.extend(events),
            StreamItem::Alive { seq } => self.waiting.push_back(event(seq, ShimEventKind::Alive)),
            StreamItem::Reset { seq } => {
                let boot = self.shim.events.boot().to_owned();
                self.waiting.push_back(event(seq, ShimEventKind::Reset { boot }));
                // Read after the number was taken: a change in between is told twice, never not at all.
                let tasks = self.shim.tasks.infos().into_iter().map(|info| ShimEventKind::Task { info });
                self.waiting.extend(tasks.map(|what| event(seq, what)));
                let problems = self.shim.problems.lock().clone();
                self.waiting.push_back(event(seq, ShimEventKind::Health { problems }));
            }
        }
    }
}

fn event(seq: u64, what: ShimEventKind) -> ShimEvent {
    ShimEvent { seq, at: clock::now_us(), kind: what }
}
