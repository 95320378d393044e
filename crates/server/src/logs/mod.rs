//! What jobs wrote, kept after their hosts forgot it.
//!
//! A log is bytes by offset. To append is idempotent: bytes that are already there are left out, a gap is refused,
//! so whoever reads from an agent may start again from [`Store::end`] at any time and from any replica. Times stand
//! beside the bytes, because dstack's clients ask by time.

pub mod archive;
pub mod copy;
pub mod files;
pub mod mask;
pub mod objects;
pub mod page;
pub mod place;
pub mod retention;
pub mod tail;

use std::{io, time::Duration};

use futures_util::future::BoxFuture;
use windlass_model::id::{ProjectId, RunId, SubmissionId};

/// One log: a stream of one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Log {
    pub project: ProjectId,
    pub run: RunId,
    pub submission: SubmissionId,
    pub stream: LogSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogSource {
    /// The job's own output.
    Job,
    /// What the runner said about it.
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

/// Bytes that came together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogChunk {
    pub offset: u64,
    /// Microseconds since 1970.
    pub at: i64,
    pub bytes: Vec<u8>,
}

impl LogChunk {
    /// The offset after its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// Which pieces are wanted: in order, newest first if `descending`, and no more than the two bounds.
#[derive(Clone, Copy, Debug)]
pub struct LogRange {
    /// The first byte, be it in the middle of a piece; descending, the offset before which to begin. `None`: from
    /// the respective end.
    pub from: Option<u64>,
    /// Exclusive.
    pub after: Option<i64>,
    /// Inclusive.
    pub until: Option<i64>,
    pub descending: bool,
    pub pieces_max: usize,
    /// The first piece is given even when it is longer, ascending only this much of it (and one byte at least).
    pub bytes_max: usize,
}

impl LogRange {
    /// The first piece of an ascending answer, as far as it was asked for.
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
    #[error("{what} the log of submission {submission}")]
    Io {
        what: &'static str,
        submission: SubmissionId,
        #[source]
        source: io::Error,
    },
    /// The writer must go back to `end`.
    #[error("append at {offset}, but the log ends at {end}")]
    Gap { offset: u64, end: u64 },
}

pub type LogFuture<'a, T> = BoxFuture<'a, Result<T, LogError>>;

/// Where logs are kept.
pub trait LogStore: Send + Sync + 'static {
    /// Adds bytes that came at `at`, and says where the log ends now.
    fn append<'a>(&'a self, log: &'a Log, offset: u64, at: i64, bytes: &'a [u8]) -> LogFuture<'a, u64>;

    /// The offset after the last byte; 0 for a log nobody has written.
    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64>;

    fn read<'a>(&'a self, log: &'a Log, range: LogRange) -> LogFuture<'a, Vec<LogChunk>>;

    /// Returns when everything appended so far survives a power cut.
    fn sync<'a>(&'a self, log: &'a Log) -> LogFuture<'a, ()>;

    /// Forgets all logs of a run.
    fn remove(&self, project: ProjectId, run: RunId) -> LogFuture<'_, ()>;

    /// How often it may be asked whether other processes appended.
    fn look_every(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Writes down everything that was gathered in memory: the process is about to end.
    fn settle(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Whether it can be used at all; asked once, at the start.
    fn check(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
