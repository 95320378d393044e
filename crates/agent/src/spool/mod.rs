//! A job's output on disk: byte-exact, addressed by stream and offset, readable after everybody died.
//!
//! Each stream is two files in the task's `run` directory. `NAME.log` holds the raw bytes and nothing else;
//! an offset is a place in that file. `NAME.idx` holds fixed-size records that say when bytes came: losing it
//! loses times, never bytes. The runner writes ([`write::Writer`]); the runner and the shim read
//! ([`read::Reader`]), any number of them, each from disk, so a slow reader delays nobody and costs no memory.
//!
//! Offsets are the cursor of our own server and of tailers. A dstack server has only milliseconds; for its
//! sake times grow strictly over output and states ([`stamp::Timestamps`]) and an event is shown once nothing can
//! be added to it.

pub mod follow;
pub mod http;
mod index;
mod inotify;
mod pull;
pub mod read;
pub mod readers;
pub mod stamp;
mod tail;
#[cfg(test)]
mod tests;
pub mod write;

pub use follow::{Follower, StreamSource};
pub use inotify::Watcher;
pub use read::Reader;
pub use readers::ReaderTracker;
pub use stamp::{IssuedTimestamp, Timestamps};
pub use windlass_model::terminal_codes as strip;
pub use write::Writer;

use std::{path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::confine::DirHandle;

/// Most bytes of one event: a dstack server gets an event whole, because its cursor cannot point into one.
pub const EVENT_MAX: u64 = 256 * 1024;
/// Writes this close together share one event. It bounds the index at 100 records a second.
pub const EVENT_MS: i64 = 10;
/// Bytes read, sent or kept in memory at once, per reader.
pub const CHUNK: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// What the job's commands print.
    #[default]
    Job,
    /// What the runner says of itself.
    Runner,
}

impl Stream {
    pub fn as_str(self) -> &'static str {
        match self {
            Stream::Job => "job",
            Stream::Runner => "runner",
        }
    }

    pub fn log_name(self) -> &'static str {
        match self {
            Stream::Job => "job.log",
            Stream::Runner => "runner.log",
        }
    }

    pub fn index_name(self) -> &'static str {
        match self {
            Stream::Job => "job.idx",
            Stream::Runner => "runner.idx",
        }
    }
}

/// How far a stream has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The offset after the last byte.
    pub end: u64,
    /// Nothing will be added.
    pub complete: bool,
}

/// The runner's own hold on both streams: it writes them and answers from them.
#[derive(Debug)]
pub struct Spool {
    stamps: Arc<Timestamps>,
    job: (Writer, StreamSource),
    runner: (Writer, StreamSource),
    readers: Arc<ReaderTracker>,
}

impl Spool {
    /// Opens the spool in a task's `run` directory, made anew or cut back to what is sound.
    pub fn open(run: &Path, stamps: Arc<Timestamps>) -> Result<Arc<Self>, write::Error> {
        let dir = DirHandle::open(run).map_err(|source| write::Error::Open { name: "run", source })?;
        let dir = Arc::new(dir);
        let stream = |stream| -> Result<(Writer, StreamSource), write::Error> {
            let writer = Writer::open(&dir, stream, Arc::clone(&stamps))?;
            let source = StreamSource::here(&writer, Reader::new(Arc::clone(&dir), stream));
            Ok((writer, source))
        };
        let (job, runner) = (stream(Stream::Job)?, stream(Stream::Runner)?);
        Ok(Arc::new(Self { stamps, job, runner, readers: Arc::default() }))
    }

    pub fn writer(&self, stream: Stream) -> &Writer {
        match stream {
            Stream::Job => &self.job.0,
            Stream::Runner => &self.runner.0,
        }
    }

    pub fn source(&self, stream: Stream) -> &StreamSource {
        match stream {
            Stream::Job => &self.job.1,
            Stream::Runner => &self.runner.1,
        }
    }

    pub fn stamps(&self) -> &Arc<Timestamps> {
        &self.stamps
    }

    pub fn readers(&self) -> &Arc<ReaderTracker> {
        &self.readers
    }

    /// Waits until the server has everything of the complete job output and the last tailer has gone.
    pub async fn all_read(&self) {
        let end = self.source(Stream::Job).wait_complete().await;
        self.readers.all_read(end).await;
    }
}
