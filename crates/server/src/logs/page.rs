//! Pages of a log as clients request them: by time, with a token for the next page.

use base64::{Engine, engine::general_purpose::STANDARD};
use windlass_api::logs::{LogEvent, Page, PollRequest};
use windlass_model::{terminal_codes::CodeStripper, time::Timestamp};

use super::{Log, LogChunk, LogError, LogRange, LogStore, mask::Mask};

/// Maximum number of raw bytes of one page; base64 makes them a third longer.
const BYTES_MAX: usize = 2 << 20;

/// A token that this server did not issue.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid `next_token` value `{0}`")]
pub struct InvalidPageToken(pub String);

/// Converts a request to a range.
pub fn requested_range(requested: &PollRequest) -> Result<LogRange, InvalidPageToken> {
    let from = requested
        .next_token
        .as_deref()
        .map(|token| token.parse().map_err(|_| InvalidPageToken(token.to_owned())));
    Ok(LogRange {
        from: from.transpose()?,
        after: requested.start_time.map(|time| time.0),
        until: requested.end_time.map(|time| time.0),
        descending: requested.descending,
        pieces_max: usize::try_from(requested.limit).unwrap_or(0),
        bytes_max: BYTES_MAX,
    })
}

/// Reads a page, and masks the values of secrets if there is a mask.
pub async fn read_page(
    store: &dyn LogStore,
    log: &Log,
    range: LogRange,
    mask: Option<&Mask>,
) -> Result<Page, LogError> {
    let pieces = match mask {
        Some(mask) => {
            let mut masked = mask.read(store, log, range).await?;
            masked.hide();
            masked.pieces
        }
        None => store.read(log, range).await?,
    };
    // The token is the offset of the next page; another read determines whether that page has content.
    let next = match pieces.last() {
        Some(last) if range.descending => Some(last.offset),
        Some(last) => Some(last.offset + last.bytes.len() as u64),
        None => None,
    };
    let more = match next {
        Some(from) => !store
            .read(log, LogRange { from: Some(from), pieces_max: 1, bytes_max: 0, ..range })
            .await?
            .is_empty(),
        None => false,
    };
    let next_token = next.filter(|_| more).map(|from| from.to_string());
    Ok(Page { logs: pieces.into_iter().map(to_log_event).collect(), external_url: None, next_token })
}

/// Removes terminal codes from a page. A code that spans two pieces is recognised only if they are in ascending order.
pub fn strip_terminal_codes(page: Page, descending: bool) -> Page {
    let mut stripper = CodeStripper::default();
    let strip = |mut event: LogEvent| {
        let mut bytes = STANDARD.decode(&event.message).unwrap_or_default();
        if descending {
            stripper = CodeStripper::default();
        }
        stripper.strip(&mut bytes);
        event.message = STANDARD.encode(&bytes);
        (!bytes.is_empty()).then_some(event)
    };
    Page { logs: page.logs.into_iter().filter_map(strip).collect(), ..page }
}

fn to_log_event(piece: LogChunk) -> LogEvent {
    LogEvent {
        timestamp: Timestamp(piece.at),
        log_source: "stdout".to_owned(),
        message: STANDARD.encode(&piece.bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_codes_are_stripped_across_chunks_and_empty_chunks_are_dropped() {
        let pieces = ["\x1b[3", "1mred\x1b[0m\n", "\x1b[2K", "plain\n"];
        let logs = pieces
            .iter()
            .zip(1..)
            .map(|(text, at)| to_log_event(LogChunk { offset: 0, at, bytes: text.as_bytes().to_vec() }));
        let page = Page { logs: logs.collect(), external_url: None, next_token: Some("9".to_owned()) };
        let shown = strip_terminal_codes(page, false);
        let texts: Vec<String> = shown
            .logs
            .iter()
            .map(|event| String::from_utf8(STANDARD.decode(&event.message).unwrap()).unwrap())
            .collect();
        assert_eq!(texts, ["red\n", "plain\n"]);
        assert_eq!(shown.next_token.as_deref(), Some("9"), "the next page begins where it did");
    }
}
