//! Logs of jobs, stored independently of their hosts.
//!
//! A log is bytes by offset. Appending is idempotent: bytes that are already stored are skipped, and a gap is refused,
//! so a copy from an agent may restart from [`Store::end`] at any time and from any replica. Times are stored beside
//! the bytes, because dstack's clients query by time.

pub mod copier;
pub mod files;
pub mod location;
pub mod mask;
pub mod notifying_store;
pub mod objects;
pub mod page;
pub mod readers;
pub mod retention;

use std::{io, time::Duration};

use futures_util::future::BoxFuture;
use windlass_model::id::{ProjectId, RunId, SubmissionId};

/// Identifies a log: one stream of one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Log {
    pub project: ProjectId,
    pub run: RunId,
    pub submission: SubmissionId,
    pub stream: LogSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogSource {
    /// Output of the job.
    Job,
    /// Messages of the runner about the job.
    Runner,
}

impl LogSource {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Job => "job",
            Self::Runner => "runner",
        }
    }
}

/// Bytes that were appended together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogChunk {
    pub offset: u64,
    /// Microseconds since 1970.
    pub at: i64,
    pub bytes: Vec<u8>,
}

impl LogChunk {
    /// Offset after the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// Selects pieces in order, newest first if `descending`, limited by `pieces_max` and `bytes_max`.
#[derive(Clone, Copy, Debug)]
pub struct LogRange {
    /// Offset of the first byte, which may be in the middle of a piece; if descending, the offset before which to
    /// begin. `None` means from the respective end.
    pub from: Option<u64>,
    /// Exclusive.
    pub after: Option<i64>,
    /// Inclusive.
    pub until: Option<i64>,
    pub descending: bool,
    pub pieces_max: usize,
    /// The first piece is returned even if it is longer: if ascending, only this much of it (and at least one byte).
    pub bytes_max: usize,
}

impl LogRange {
    /// Cuts the first piece of an ascending result to the requested range.
    pub(crate) fn cut(&self, piece: &mut LogChunk) {
        if self.descending {
            return;
        }
        let before = self.from.unwrap_or(0).saturating_sub(piece.offset);
        let before = usize::try_from(before).unwrap_or(usize::MAX).min(piece.bytes.len());
        piece.bytes.drain(..before);
        piece.offset += before as u64;
        piece.bytes.truncate(self.bytes_max.max(1));
    }
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("failed to {what} the log of submission {submission}")]
    Io {
        what: &'static str,
        submission: SubmissionId,
        #[source]
        source: io::Error,
    },
    /// The writer must continue from `end`.
    #[error("cannot append at offset {offset}: the log ends at {end}")]
    Gap { offset: u64, end: u64 },
}

pub type LogFuture<'a, T> = BoxFuture<'a, Result<T, LogError>>;

/// Storage of logs.
pub trait LogStore: Send + Sync + 'static {
    /// Appends bytes that were received at `at`, and returns the new end of the log.
    fn append_to_files<'a>(
        &'a self,
        log: &'a Log,
        offset: u64,
        at: i64,
        bytes: &'a [u8],
    ) -> LogFuture<'a, u64>;

    /// Offset after the last byte; 0 for a log that does not exist.
    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64>;

    fn read<'a>(&'a self, log: &'a Log, range: LogRange) -> LogFuture<'a, Vec<LogChunk>>;

    /// Completes when everything appended so far survives a power cut.
    fn sync<'a>(&'a self, log: &'a Log) -> LogFuture<'a, ()>;

    /// Removes all logs of a run.
    fn remove(&self, project: ProjectId, run: RunId) -> LogFuture<'_, ()>;

    /// Minimum interval for checking whether other processes appended.
    fn poll_interval(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Writes everything that is buffered in memory, before the process ends.
    fn flush(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Checks that the store is usable; called once, at the start.
    fn check(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
