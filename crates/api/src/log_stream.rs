//! Log that is followed as it grows, over the server's event stream.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;
use windlass_model::time::Timestamp;

use crate::{client::CallError, logs::StreamEvent};

/// Maximum length of a line of a stream; the server's lines are far shorter.
const LINE_BYTES_MAX: usize = 2 * 1024 * 1024;

/// Maximum silence on a stream. The server sends a keep-alive every few seconds, so a longer silence means that it is
/// gone.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Item of a log stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogStreamEvent {
    Bytes {
        offset: u64,
        at: Timestamp,
        bytes: Vec<u8>,
    },
    /// Last item. `status` is that of the job.
    End {
        status: String,
        exit_status: Option<i64>,
        termination_reason: Option<String>,
    },
}

/// Open log stream. Dropping it closes its connection.
#[derive(Debug)]
pub struct LogStream {
    body: Incoming,
    parser: SseParser,
    offset: u64,
}

impl LogStream {
    pub(crate) fn new(body: Incoming, offset: u64) -> Self {
        Self { body, parser: SseParser::default(), offset }
    }

    /// Offset after the last returned byte: where to resume if the connection breaks.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next item; `None` if the server closed the stream without an end. The caller then resumes from
    /// [`LogStream::offset`].
    pub async fn next(&mut self) -> Result<Option<LogStreamEvent>, CallError> {
        loop {
            if let Some(data) = self.parser.next_event() {
                match serde_json::from_slice(&data).map_err(CallError::Decode)? {
                    StreamEvent::Log { offset, timestamp, message } => {
                        let bytes = STANDARD.decode(message).map_err(CallError::Base64)?;
                        self.offset = offset.saturating_add(bytes.len() as u64);
                        return Ok(Some(LogStreamEvent::Bytes { offset, at: timestamp, bytes }));
                    }
                    StreamEvent::End { offset, status, exit_status, termination_reason } => {
                        self.offset = offset;
                        return Ok(Some(LogStreamEvent::End { status, exit_status, termination_reason }));
                    }
                }
            }
            let frame = timeout(IDLE_TIMEOUT, self.body.frame()).await.map_err(|_| CallError::TimedOut)?;
            let Some(frame) = frame else { return Ok(None) };
            if let Some(data) = frame.map_err(CallError::Exchange)?.data_ref()
                && !self.parser.push(data)
            {
                return Err(CallError::LineTooLong);
            }
        }
    }
}

/// Incremental parser of server-sent events.
#[derive(Debug, Default)]
struct SseParser {
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that are known to contain no line end.
    scanned: usize,
    data: Vec<u8>,
}

impl SseParser {
    /// Appends bytes. Returns false if a line is too long.
    fn push(&mut self, bytes: &[u8]) -> bool {
        self.buffer.extend_from_slice(bytes);
        self.buffer.len() <= LINE_BYTES_MAX && self.data.len() <= LINE_BYTES_MAX
    }

    /// Returns the data of the next complete event. Names and ids are also in the data; comments are keep-alives only.
    fn next_event(&mut self) -> Option<Vec<u8>> {
        while let Some(found) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=self.scanned + found).collect();
            self.scanned = 0;
            let line = line.trim_ascii_end();
            if line.is_empty() {
                if !self.data.is_empty() {
                    return Some(std::mem::take(&mut self.data));
                }
            } else if let Some(data) = line.strip_prefix(b"data:") {
                self.data.extend_from_slice(data.trim_ascii_start());
            }
        }
        self.scanned = self.buffer.len();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE_BYTES_MAX, SseParser};

    #[test]
    fn sse_events_are_parsed_regardless_of_chunk_boundaries() {
        let text = b": alive\n\nid: 3\nevent: log\ndata: {\"a\":1}\n\ndata:{\"b\":2}\r\n\r\ndata: x";
        for step in 1..text.len() {
            let (mut lines, mut events) = (SseParser::default(), Vec::new());
            for part in text.chunks(step) {
                assert!(lines.push(part));
                events.extend(std::iter::from_fn(|| lines.next_event()));
            }
            assert_eq!(events, [b"{\"a\":1}".to_vec(), b"{\"b\":2}".to_vec()], "by {step}");
        }
    }

    #[test]
    fn an_sse_line_above_the_size_limit_is_rejected() {
        let mut lines = SseParser::default();
        let part = vec![b'x'; LINE_BYTES_MAX];
        assert!(lines.push(&part) && lines.next_event().is_none());
        assert!(!lines.push(b"x"));
    }
}
