//! Live output of one run as plain text.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use windlass_api::{
    log_stream::{LogStream, LogStreamEvent},
    logs::StreamRequest,
};

use crate::{context::Context, error::CliError, output::terminal_filter::TerminalFilter};

/// Delay between attempts to reconnect a stream, and between polls for a job that does not exist yet.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Maximum time to wait for an unreachable server.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The result of one step.
pub(super) enum LogUpdate {
    Text(String),
    Nothing,
    /// No more output will follow, with the reason.
    Ended(String),
    Failed(CliError),
}

enum FollowState {
    /// The run has no job yet.
    NoJob,
    Closed {
        request: StreamRequest,
        since: Instant,
    },
    Open {
        request: StreamRequest,
        stream: Box<LogStream>,
    },
}

/// Follows the output of the first job of a run.
pub(super) struct LogFollower<'a> {
    cx: &'a Context,
    run: String,
    state: FollowState,
    plain: PlainText,
}

impl<'a> LogFollower<'a> {
    pub(super) fn new(cx: &'a Context, run: String) -> Self {
        Self { cx, run, state: FollowState::NoJob, plain: PlainText(TerminalFilter::new()) }
    }

    pub(super) async fn next_update(mut self) -> (Self, LogUpdate) {
        let received = match self.next().await {
            Ok(received) => received,
            Err(problem) => LogUpdate::Failed(problem),
        };
        (self, received)
    }

    async fn next(&mut self) -> Result<LogUpdate, CliError> {
        match std::mem::replace(&mut self.state, FollowState::NoJob) {
            FollowState::NoJob => self.find().await,
            FollowState::Closed { request, since } => self.open(request, since).await,
            FollowState::Open { mut request, mut stream } => match stream.next().await {
                Ok(Some(LogStreamEvent::Bytes { bytes, .. })) => {
                    request.offset = stream.offset();
                    self.state = FollowState::Open { request, stream };
                    Ok(LogUpdate::Text(self.plain.take(&bytes)))
                }
                Ok(Some(LogStreamEvent::End { .. })) => {
                    Ok(LogUpdate::Ended(format!("end of the output of `{}`", self.run)))
                }
                Ok(None) => Ok(self.disconnected(request)),
                Err(error) if error.is_unconfirmed() => Ok(self.disconnected(request)),
                Err(error) => Err(self.cx.explain(&error).await),
            },
        }
    }

    fn disconnected(&mut self, request: StreamRequest) -> LogUpdate {
        self.state = FollowState::Closed { request, since: Instant::now() };
        LogUpdate::Nothing
    }

    async fn find(&mut self) -> Result<LogUpdate, CliError> {
        let run = self.cx.run(&self.run).await?;
        let Some(latest) = run.jobs.first().and_then(|job| job.job_submissions.last()) else {
            sleep(RETRY_DELAY).await;
            return Ok(LogUpdate::Nothing);
        };
        let request = StreamRequest {
            run_name: self.run.clone(),
            job_submission_id: latest.id,
            offset: 0,
            start_time: None,
            follow: true,
            diagnose: false,
        };
        Ok(self.disconnected(request))
    }

    async fn open(&mut self, request: StreamRequest, since: Instant) -> Result<LogUpdate, CliError> {
        match self.cx.client.stream_logs(&self.cx.project, &request).await {
            Ok(stream) => self.state = FollowState::Open { request, stream: Box::new(stream) },
            Err(error) if error.is_unconfirmed() && since.elapsed() < RECONNECT_TIMEOUT => {
                sleep(RETRY_DELAY).await;
                self.state = FollowState::Closed { request, since };
            }
            Err(error) => return Err(self.cx.explain(&error).await),
        }
        Ok(LogUpdate::Nothing)
    }
}

/// Removes escape sequences from terminal output.
struct PlainText(TerminalFilter);

impl PlainText {
    fn take(&mut self, bytes: &[u8]) -> String {
        let text = self.0.push(bytes);
        let text = String::from_utf8_lossy(&text);
        // The filter passes only text and complete colour sequences.
        let mut parts = text.split("\u{1b}[");
        let mut plain = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            plain.push_str(part.split_once('m').map_or(part, |(_, rest)| rest));
        }
        plain
    }
}

#[cfg(test)]
mod tests {
    use super::{PlainText, TerminalFilter};

    #[test]
    fn terminal_sequences_are_stripped_across_chunks() {
        let mut plain = PlainText(TerminalFilter::new());
        assert_eq!(plain.take(b"\x1b[31mred\x1b[0m \x1b[2Ja\r\n"), "red a\r\n");
        // Sequences and characters split between chunks are joined.
        assert_eq!(plain.take(b"x\x1b[3"), "x");
        assert_eq!(plain.take(b"1my\xe2\x82"), "y");
        assert_eq!(plain.take(b"\xac\n"), "€\n");
        assert!(!plain.take(b"\x1b]0;title\x07\xff!").contains('\u{1b}'));
    }
}
