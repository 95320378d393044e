//! A page of a log as clients ask for it: by time, with a token to go on.

use base64::{Engine, engine::general_purpose::STANDARD};
use windlass_api::logs::{LogEvent, Page, PollRequest};
use windlass_model::time::Timestamp;

use super::{Log, LogError, Piece, Range, Store};

/// Raw bytes of one page; base64 makes them a third longer.
const BYTES_MAX: usize = 2 << 20;

/// A token that this server did not give out.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("read next_token `{0}`")]
pub struct BadToken(pub String);

/// What the request asks for.
pub fn range(asked: &PollRequest) -> Result<Range, BadToken> {
    let from = asked.next_token.as_deref().map(|token| token.parse().map_err(|_| BadToken(token.to_owned())));
    Ok(Range {
        from: from.transpose()?,
        after: asked.start_time.map(|time| time.0),
        until: asked.end_time.map(|time| time.0),
        descending: asked.descending,
        pieces_max: usize::try_from(asked.limit).unwrap_or(0),
        bytes_max: BYTES_MAX,
    })
}

pub async fn read(store: &dyn Store, log: &Log, range: Range) -> Result<Page, LogError> {
    let pieces = store.read(log, range).await?;
    // The token is where the next page begins; whether anything is there is seen by looking.
    let next = match pieces.last() {
        Some(last) if range.descending => Some(last.offset),
        Some(last) => Some(last.offset + last.bytes.len() as u64),
        None => None,
    };
    let more = match next {
        Some(from) => !store
            .read(log, Range { from: Some(from), pieces_max: 1, bytes_max: 0, ..range })
            .await?
            .is_empty(),
        None => false,
    };
    let next_token = next.filter(|_| more).map(|from| from.to_string());
    Ok(Page { logs: pieces.into_iter().map(event).collect(), external_url: None, next_token })
}

fn event(piece: Piece) -> LogEvent {
    LogEvent {
        timestamp: Timestamp(piece.at),
        log_source: "stdout".to_owned(),
        message: STANDARD.encode(&piece.bytes),
    }
}
