//! The log of one submission: what exists, page by page, or as it grows.
//!
//! Live output uses a stream that resumes where it broke. A server without streams, or with too many open ones, is
//! polled instead.

use std::{
    pin::Pin,
    task::{Poll, ready},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use windlass_api::{
    log_stream::{LogStream, LogStreamEvent},
    logs::{PollRequest, StreamRequest},
    operations::PollLogs,
};
use windlass_model::time::Timestamp;

use crate::{context::Context, error::CliError};

/// Maximum number of chunks in a page.
const PAGE_CHUNKS_MAX: i64 = 1000;
/// Polling interval without a stream.
const POLL_INTERVAL: Duration = Duration::from_millis(150);
/// Delay between attempts to reconnect a stream.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// Maximum time to wait for an unreachable server.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// A part of a log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LogChunk {
    /// Offset of its first byte, if known.
    pub(crate) offset: Option<u64>,
    pub(crate) at: Timestamp,
    pub(crate) bytes: Vec<u8>,
}

/// Result of reading a submission's output.
pub(crate) enum TailEvent {
    Chunks(Vec<LogChunk>),
    /// No new output; reported only without a stream.
    Idle,
    /// The log is complete.
    Over,
}

/// A part of the log of a submission.
#[derive(Clone, Debug)]
pub(crate) struct LogRange {
    pub(crate) run: String,
    pub(crate) submission: Uuid,
    /// Offset of the first byte.
    pub(crate) offset: u64,
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
    /// Selects the log of the runner.
    pub(crate) diagnose: bool,
}

impl LogRange {
    /// The complete output of a job.
    pub(crate) fn whole(run: &str, submission: Uuid) -> Self {
        Self { run: run.to_owned(), submission, offset: 0, since: None, until: None, diagnose: false }
    }
}

/// A pending read, which returns the reader for the next call.
type ReadFuture<'a> = Pin<Box<dyn Future<Output = (LogReader<'a>, Result<TailEvent, CliError>)> + 'a>>;

/// A growing log.
pub(crate) struct LogTail<'a> {
    submission: Uuid,
    /// Kept between calls, so that a cancelled wait loses nothing. `None` after the log was read completely.
    event: Option<ReadFuture<'a>>,
}

impl<'a> LogTail<'a> {
    pub(crate) fn new(cx: &'a Context, part: LogRange) -> Self {
        let submission = part.submission;
        let request = StreamRequest {
            run_name: part.run,
            job_submission_id: part.submission,
            offset: part.offset,
            start_time: part.since,
            follow: true,
            diagnose: part.diagnose,
        };
        let reader = LogReader { cx, request, state: StreamState::Closed { since: Instant::now() } };
        Self { submission, event: Some(Box::pin(reader.event())) }
    }

    pub(crate) fn submission(&self) -> Uuid {
        self.submission
    }

    /// Returns whether the log was read completely.
    pub(crate) fn is_over(&self) -> bool {
        self.event.is_none()
    }

    /// Stays pending after the log was read completely. Cancel-safe.
    pub(crate) fn poll_next(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Result<TailEvent, CliError>> {
        let Some(event) = &mut self.event else { return Poll::Pending };
        let (reader, received) = ready!(event.as_mut().poll(cx));
        let goes_on = matches!(received, Ok(TailEvent::Chunks(_) | TailEvent::Idle));
        self.event = goes_on.then(|| -> ReadFuture<'a> { Box::pin(reader.event()) });
        Poll::Ready(received)
    }
}

enum StreamState {
    /// Disconnected since this time.
    Closed {
        since: Instant,
    },
    Open(LogStream),
    Pages(LogPages),
}

struct LogReader<'a> {
    cx: &'a Context,
    request: StreamRequest,
    state: StreamState,
}

impl LogReader<'_> {
    async fn event(mut self) -> (Self, Result<TailEvent, CliError>) {
        let received = self.next().await;
        (self, received)
    }

    async fn next(&mut self) -> Result<TailEvent, CliError> {
        loop {
            match &mut self.state {
                StreamState::Closed { since } => {
                    let since = *since;
                    self.open(since).await?;
                }
                StreamState::Open(stream) => match stream.next().await {
                    Ok(Some(LogStreamEvent::Bytes { offset, at, bytes })) => {
                        self.request.offset = stream.offset();
                        return Ok(TailEvent::Chunks(vec![LogChunk { offset: Some(offset), at, bytes }]));
                    }
                    Ok(Some(LogStreamEvent::End { .. })) => return Ok(TailEvent::Over),
                    Ok(None) => self.state = StreamState::Closed { since: Instant::now() },
                    Err(error) if error.is_unconfirmed() => {
                        self.state = StreamState::Closed { since: Instant::now() }
                    }
                    Err(error) => return Err(self.cx.explain(&error).await),
                },
                StreamState::Pages(pages) => {
                    let pieces = pages.next(self.cx).await?;
                    if !pieces.is_empty() {
                        return Ok(TailEvent::Chunks(pieces));
                    }
                    sleep(POLL_INTERVAL).await;
                    return Ok(TailEvent::Idle);
                }
            }
        }
    }

    async fn open(&mut self, since: Instant) -> Result<(), CliError> {
        match self.cx.client.stream_logs(&self.cx.project, &self.request).await {
            Ok(stream) => self.state = StreamState::Open(stream),
            Err(error) if error.is_unconfirmed() && since.elapsed() < RECONNECT_TIMEOUT => {
                sleep(RETRY_DELAY).await
            }
            Err(error) if error.is_unconfirmed() => return Err(self.cx.explain(&error).await),
            // Fall back to pages; if the request itself is wrong, that call reports it.
            Err(_) => self.state = StreamState::Pages(LogPages::from(&self.request)),
        }
        Ok(())
    }
}

/// A log read page by page.
#[derive(Debug)]
pub(crate) struct LogPages {
    request: PollRequest,
    /// Number of bytes read, if the start offset is known.
    read: Option<u64>,
}

impl From<&StreamRequest> for LogPages {
    fn from(requested: &StreamRequest) -> Self {
        let StreamRequest { run_name, job_submission_id, offset, start_time, diagnose, .. } = requested;
        Self::new(&LogRange {
            run: run_name.clone(),
            submission: *job_submission_id,
            offset: *offset,
            since: *start_time,
            until: None,
            diagnose: *diagnose,
        })
    }
}

impl LogPages {
    pub(crate) fn new(part: &LogRange) -> Self {
        let request = PollRequest {
            run_name: part.run.clone(),
            job_submission_id: part.submission,
            start_time: part.since,
            end_time: part.until,
            descending: false,
            next_token: (part.offset > 0).then(|| part.offset.to_string()),
            limit: PAGE_CHUNKS_MAX,
            diagnose: part.diagnose,
            raw: true,
        };
        let read = (part.offset > 0 || part.since.is_none()).then_some(part.offset);
        Self { request, read }
    }

    /// Returns the next chunks; empty if there are none.
    pub(crate) async fn next(&mut self, cx: &Context) -> Result<Vec<LogChunk>, CliError> {
        let page = cx.call_with_retry::<PollLogs>(&self.request).await?;
        let mut pieces = Vec::with_capacity(page.logs.len());
        for event in page.logs {
            let bytes = decode(&event.message)?;
            let offset = self.read;
            // The token is the offset of the next byte; without one, it is known if all bytes were counted.
            self.read = offset.map(|read| read + bytes.len() as u64);
            pieces.push(LogChunk { offset, at: event.timestamp, bytes });
        }
        match (page.next_token, self.read, pieces.last()) {
            (Some(token), _, _) => self.request.next_token = Some(token),
            (None, Some(read), _) => self.request.next_token = (read > 0).then(|| read.to_string()),
            (None, None, Some(last)) => {
                (self.request.next_token, self.request.start_time) = (None, Some(last.at));
            }
            (None, None, None) => {}
        }
        Ok(pieces)
    }
}

fn decode(message: &str) -> Result<Vec<u8>, CliError> {
    STANDARD
        .decode(message)
        .map_err(|error| CliError::from_error("failed to decode the log page of the server", &error))
}

/// Finds the offset of the last `lines` of a range. `None` if the range has no more lines.
pub(crate) async fn find_last_lines(
    cx: &Context,
    part: &LogRange,
    lines: usize,
) -> Result<Option<u64>, CliError> {
    let mut request = LogPages::new(part).request;
    (request.descending, request.next_token) = (true, None);
    let mut ends = 0;
    let mut is_first = true;
    loop {
        let page = cx.call_with_retry::<PollLogs>(&request).await?;
        // Number of bytes between the start of the page and the part that was scanned.
        let mut pieces = Vec::with_capacity(page.logs.len());
        for event in &page.logs {
            pieces.push(decode(&event.message)?);
        }
        let mut before: u64 = pieces.iter().map(|bytes| bytes.len() as u64).sum();
        let start = page.next_token.as_deref().map_or(Ok(0), str::parse::<u64>);
        let start = start
            .map_err(|error| CliError::from_error("failed to decode the log page of the server", &error))?;
        if lines == 0 {
            return Ok(Some(start + before));
        }
        for bytes in &pieces {
            before -= bytes.len() as u64;
            for (index, byte) in bytes.iter().enumerate().rev() {
                // The last line break does not start another line.
                let is_end = *byte == b'\n' && !std::mem::take(&mut is_first);
                is_first = false;
                ends += usize::from(is_end);
                if ends == lines && is_end {
                    let from_start = before + index as u64 + 1;
                    return Ok(page.next_token.is_some().then_some(start + from_start).or_else(|| {
                        // The page reaches the start of the range, which is known unless it is given as a time.
                        part.since.is_none().then_some(from_start)
                    }));
                }
            }
        }
        match page.next_token {
            Some(token) => request.next_token = Some(token),
            None => return Ok(None),
        }
    }
}

/// Polling interval for a run: short after a change, then increasing.
#[derive(Debug)]
pub(crate) struct PollBackoff(Duration);

impl PollBackoff {
    const MIN: Duration = Duration::from_millis(25);
    const MAX: Duration = Duration::from_secs(1);

    pub(crate) fn new() -> Self {
        Self(Self::MIN)
    }

    pub(crate) fn news(&mut self) {
        self.0 = Self::MIN;
    }

    /// Returns the next interval.
    pub(crate) fn wait(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(Self::MAX);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::PollBackoff;

    #[test]
    fn polling_backs_off_while_idle_and_resets_on_news() {
        let mut pace = PollBackoff::new();
        let waits: Vec<u128> = (0..8).map(|_| pace.wait().as_millis()).collect();
        assert_eq!(waits, [25, 50, 100, 200, 400, 800, 1000, 1000]);
        pace.news();
        assert_eq!(pace.wait().as_millis(), 25);
    }
}
