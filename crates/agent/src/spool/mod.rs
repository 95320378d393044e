//! A job's output on disk: byte-exact, addressed by stream and offset, readable after all processes have ended.
//!
//! Each stream is two files in the task's `run` directory. `NAME.log` contains the raw bytes and nothing else; an
//! offset is a position in that file. `NAME.idx` contains fixed-size records of the time at which bytes arrived: losing
//! it loses times, never bytes. The runner writes ([`write::Writer`]); the runner and the shim read ([`read::Reader`]),
//! any number of readers, each from disk, so a slow reader delays no other and costs no memory.
//!
//! Our own server and tailers use offsets as cursors. A dstack server has only milliseconds; therefore times increase
//! strictly over output and states ([`stamp::Timestamps`]) and an event is returned only once nothing can be added to
//! it.

mod dstack_pull;
pub mod follow;
pub mod http;
mod index;
mod inotify;
pub mod read;
pub mod reader_tracking;
#[cfg(test)]
mod tests;
pub mod timestamps;
mod websocket;
pub mod write;

pub use follow::{Follower, StreamSource};
pub use inotify::Watcher;
pub use read::Reader;
pub use reader_tracking::ReaderTracker;
pub use timestamps::{IssuedTimestamp, Timestamps};
pub use windlass_model::terminal_codes as strip;
pub use write::Writer;

use std::{path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::safe_open::DirHandle;

/// Maximum size of one event in bytes: a dstack server gets an event whole, because its cursor cannot point into one.
pub const EVENT_MAX: u64 = 256 * 1024;
/// Time in milliseconds within which writes share one event. It limits the index to 100 records a second.
pub const EVENT_MS: i64 = 10;
/// Number of bytes read, sent or held in memory at once, per reader.
pub const CHUNK: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Output of the job's commands.
    #[default]
    Job,
    /// Log of the runner.
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

/// Current extent of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Offset after the last byte.
    pub end: u64,
    /// True if nothing will be added.
    pub complete: bool,
}

/// Both streams in the runner, which writes them and serves them.
#[derive(Debug)]
pub struct Spool {
    stamps: Arc<Timestamps>,
    job: (Writer, StreamSource),
    runner: (Writer, StreamSource),
    readers: Arc<ReaderTracker>,
}

impl Spool {
    /// Opens the spool in a task's `run` directory: creates it, or truncates it to its valid part.
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

    /// Waits until the server has the complete job output and the last tailer has disconnected.
    pub async fn all_read(&self) {
        let end = self.source(Stream::Job).wait_complete().await;
        self.readers.all_read(end).await;
    }
}
