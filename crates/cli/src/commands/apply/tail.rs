//! The log of one submission: what there is, page by page, or as it grows.
//!
//! What grows comes over a stream that is taken up again where it broke. A server without streams, or with too many
//! of them open, is asked again and again instead.

use std::{pin::Pin, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use uuid::Uuid;
use windlass_api::{
    log_stream::{LogStream, News},
    logs::{PollRequest, StreamRequest},
    operations::PollLogs,
};
use windlass_model::time::Timestamp;

use crate::{context::Context, output, problem::Problem};

/// The most a page may hold.
const PIECES_MAX: i64 = 1000;
/// How soon output is seen without a stream.
const LOOK_EVERY: Duration = Duration::from_millis(150);
/// Between attempts to take up a stream that broke.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// A server that cannot be reached for this long is not waited for.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// When the run has ended, the rest of its output comes by then.
const REST_WITHIN: Duration = Duration::from_secs(15);
/// Without a stream, the page after the end is the last; one may have been asked for before.
const EMPTY_PAGES: u32 = 2;

/// What came of a submission's output.
enum Heard {
    Bytes(Vec<u8>),
    /// Nothing for now; only said where there is no stream.
    Quiet,
    /// Nothing will ever follow.
    Over,
}

/// Why copying stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// It is time.
    Due,
    /// All of the output was copied.
    Over,
    /// Nobody reads what we write.
    Unread,
}

/// What is written down when the work is done: the reader itself, for the next turn.
type Turn<'a> = Pin<Box<dyn Future<Output = (Reader<'a>, Result<Heard, Problem>)> + 'a>>;

/// A log as it grows.
pub(crate) struct Tail<'a> {
    submission: Uuid,
    /// Kept between calls, so that giving up a wait loses nothing. `None` when all was read.
    turn: Option<Turn<'a>>,
}

impl<'a> Tail<'a> {
    pub(crate) fn new(
        cx: &'a Context,
        run: &str,
        submission: Uuid,
        since: Option<Timestamp>,
        diagnose: bool,
    ) -> Self {
        let request = StreamRequest {
            run_name: run.to_owned(),
            job_submission_id: submission,
            offset: 0,
            start_time: since,
            follow: true,
            diagnose,
        };
        let reader = Reader { cx, request, way: Way::Closed { since: Instant::now() } };
        Self { submission, turn: Some(Box::pin(reader.turn())) }
    }

    pub(crate) fn submission(&self) -> Uuid {
        self.submission
    }

    /// Never done when all was read. May be given up at any time.
    async fn hear(&mut self) -> Result<Heard, Problem> {
        let Some(turn) = &mut self.turn else { return std::future::pending().await };
        let (reader, heard) = turn.as_mut().await;
        let goes_on = matches!(heard, Ok(Heard::Bytes(_) | Heard::Quiet));
        self.turn = goes_on.then(|| -> Turn<'a> { Box::pin(reader.turn()) });
        heard
    }

    /// Copies what comes until then.
    pub(crate) async fn copy(&mut self, until: Instant) -> Result<Copied, Problem> {
        while let Ok(heard) = timeout_at(until, self.hear()).await {
            match heard? {
                Heard::Bytes(bytes) if !output::raw(&bytes) => return Ok(Copied::Unread),
                Heard::Bytes(_) | Heard::Quiet => {}
                Heard::Over => return Ok(Copied::Over),
            }
        }
        Ok(Copied::Due)
    }

    /// The submission has ended: copies the rest. False when nobody reads it.
    pub(crate) async fn finish(&mut self) -> Result<bool, Problem> {
        let mut empty = 0;
        while self.turn.is_some() && empty < EMPTY_PAGES {
            // A log that never ends, because its host is gone, has been copied as far as it was kept.
            let Ok(heard) = timeout(REST_WITHIN, self.hear()).await else { break };
            match heard? {
                Heard::Bytes(bytes) => {
                    empty = 0;
                    if !output::raw(&bytes) {
                        return Ok(false);
                    }
                }
                Heard::Quiet => empty += 1,
                Heard::Over => break,
            }
        }
        Ok(true)
    }
}

enum Way {
    /// No connection since then.
    Closed {
        since: Instant,
    },
    Open(LogStream),
    Pages(Pages),
}

struct Reader<'a> {
    cx: &'a Context,
    request: StreamRequest,
    way: Way,
}

impl Reader<'_> {
    async fn turn(mut self) -> (Self, Result<Heard, Problem>) {
        let heard = self.next().await;
        (self, heard)
    }

    async fn next(&mut self) -> Result<Heard, Problem> {
        loop {
            match &mut self.way {
                Way::Closed { since } => {
                    let since = *since;
                    self.open(since).await?;
                }
                Way::Open(stream) => match stream.next().await {
                    Ok(Some(News::Bytes { bytes, .. })) => {
                        self.request.offset = stream.offset();
                        return Ok(Heard::Bytes(bytes));
                    }
                    Ok(Some(News::End { .. })) => return Ok(Heard::Over),
                    Ok(None) => self.way = Way::Closed { since: Instant::now() },
                    Err(error) if error.is_lost() => self.way = Way::Closed { since: Instant::now() },
                    Err(error) => return Err(self.cx.explain(&error).await),
                },
                Way::Pages(pages) => {
                    let bytes = pages.next(self.cx).await?;
                    if !bytes.is_empty() {
                        return Ok(Heard::Bytes(bytes));
                    }
                    sleep(LOOK_EVERY).await;
                    return Ok(Heard::Quiet);
                }
            }
        }
    }

    async fn open(&mut self, since: Instant) -> Result<(), Problem> {
        match self.cx.client.stream_logs(&self.cx.project, &self.request).await {
            Ok(stream) => self.way = Way::Open(stream),
            Err(error) if error.is_lost() && since.elapsed() < GONE_AFTER => sleep(AGAIN_AFTER).await,
            Err(error) if error.is_lost() => return Err(self.cx.explain(&error).await),
            // What is wrong with the question itself, the answer to the other one says.
            Err(_) => self.way = Way::Pages(Pages::from(&self.request)),
        }
        Ok(())
    }
}

/// A log page by page.
#[derive(Debug)]
pub(crate) struct Pages {
    request: PollRequest,
    /// Bytes read so far, when reading began at a known one.
    read: Option<u64>,
}

impl From<&StreamRequest> for Pages {
    fn from(asked: &StreamRequest) -> Self {
        let StreamRequest { run_name, job_submission_id, offset, start_time, diagnose, .. } = asked;
        let mut pages = Self::new(run_name, *job_submission_id, *start_time, *diagnose);
        if *offset > 0 {
            (pages.request.next_token, pages.read) = (Some(offset.to_string()), Some(*offset));
        }
        pages
    }
}

impl Pages {
    pub(crate) fn new(run: &str, submission: Uuid, since: Option<Timestamp>, diagnose: bool) -> Self {
        let request = PollRequest {
            run_name: run.to_owned(),
            job_submission_id: submission,
            start_time: since,
            end_time: None,
            descending: false,
            next_token: None,
            limit: PIECES_MAX,
            diagnose,
        };
        Self { request, read: since.is_none().then_some(0) }
    }

    /// Copies all there is. Nobody who stopped reading is an error.
    pub(crate) async fn copy(&mut self, cx: &Context) -> Result<(), Problem> {
        loop {
            let bytes = self.next(cx).await?;
            if bytes.is_empty() || !output::raw(&bytes) {
                return Ok(());
            }
        }
    }

    /// What there is beyond what was read; empty when that is nothing.
    async fn next(&mut self, cx: &Context) -> Result<Vec<u8>, Problem> {
        let page = cx.patiently::<PollLogs>(&self.request).await?;
        let mut bytes = Vec::new();
        for event in &page.logs {
            let piece = STANDARD
                .decode(&event.message)
                .map_err(|error| Problem::caused("read the server's log page", &error))?;
            bytes.extend_from_slice(&piece);
        }
        // A token is the offset of the byte to go on with; without one we know it when we counted.
        self.read = self.read.map(|read| read + bytes.len() as u64);
        match (page.next_token, self.read, page.logs.last()) {
            (Some(token), _, _) => self.request.next_token = Some(token),
            (None, Some(read), _) => self.request.next_token = (read > 0).then(|| read.to_string()),
            (None, None, Some(last)) => {
                (self.request.next_token, self.request.start_time) = (None, Some(last.timestamp));
            }
            (None, None, None) => {}
        }
        Ok(bytes)
    }
}

/// How soon to look at a run again: soon after news, more and more seldom without.
#[derive(Debug)]
pub(crate) struct Pace(Duration);

impl Pace {
    const SOON: Duration = Duration::from_millis(25);
    const SELDOM: Duration = Duration::from_secs(1);

    pub(crate) fn new() -> Self {
        Self(Self::SOON)
    }

    pub(crate) fn news(&mut self) {
        self.0 = Self::SOON;
    }

    /// The next wait.
    pub(crate) fn wait(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(Self::SELDOM);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;

    #[test]
    fn a_run_is_looked_at_soon_after_news_and_seldom_without() {
        let mut pace = Pace::new();
        let waits: Vec<u128> = (0..8).map(|_| pace.wait().as_millis()).collect();
        assert_eq!(waits, [25, 50, 100, 200, 400, 800, 1000, 1000]);
        pace.news();
        assert_eq!(pace.wait().as_millis(), 25);
    }
}
