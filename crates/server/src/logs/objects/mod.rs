//! Logs as objects in a bucket, for servers with several replicas.
//!
//! An object holds one piece and is named by its offset, `PROJECT/RUN/SUBMISSION/STREAM/OFFSET`, so that the list of
//! names and sizes is the whole index. A name is never written twice: of two writers at the same offset, the later one
//! is rejected and continues after the other. The content of an object never changes.
//!
//! Small appends are buffered for a moment ([`delay`]) before they become an object. Readers of this process see them
//! at once, those of other processes when the object exists; [`Store::sync`] does not wait for the delay. A process
//! that stops writes its buffers ([`Store::settle`]). If a process dies, its buffers are lost, but the host still has
//! the bytes and the next copy sends them again.

pub mod dir;
mod object_log;
pub mod s3;

use std::{
    collections::HashMap,
    io::{self, ErrorKind},
    sync::Arc,
    time::Duration,
};

use futures_util::{
    future::BoxFuture,
    stream::{self, StreamExt as _},
};
use parking_lot::Mutex;
use windlass_model::id::{ProjectId, RunId, SubmissionId};
pub use windlass_objects::ObjectPage;

use self::object_log::ObjectLog;
use super::{Log, LogChunk, LogError, LogFuture, LogRange, LogStore};

/// Length of the header before the bytes of an object: their time, and a checksum of it, the offset and the bytes.
const HEADER_BYTES: usize = 12;
/// Maximum number of bytes of one object.
const OBJECT_BYTES_MAX: usize = 1 << 20;
/// Maximum number of logs with a cached index; others are listed again on demand.
const CACHED_LOGS_MAX: usize = 4096;
/// Maximum number of logs that are flushed concurrently when the process stops.
const FLUSHES_MAX: usize = 16;

pub type BucketFuture<'a, T> = BoxFuture<'a, io::Result<T>>;

/// Operations that a log store needs from an object store.
pub trait Bucket: Send + Sync + 'static {
    /// Writes a new object. Returns false, and writes nothing, if the name exists.
    fn link_new_file<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BucketFuture<'a, bool>;

    /// Reads the first `limit` bytes of an object, or all of them; `None` if the object does not exist.
    fn get<'a>(&'a self, name: &'a str, limit: Option<usize>) -> BucketFuture<'a, Option<Vec<u8>>>;

    /// Lists objects whose names begin with `prefix` (which ends with a slash) and sort after `after`.
    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> BucketFuture<'a, ObjectPage>;

    /// Deletes an object. Succeeds if it does not exist.
    fn delete<'a>(&'a self, name: &'a str) -> BucketFuture<'a, ()>;

    /// Deletes all objects whose names begin with `prefix` (which ends with a slash).
    fn delete_all<'a>(&'a self, prefix: &'a str) -> BucketFuture<'a, ()> {
        Box::pin(async move {
            loop {
                let page = self.list(prefix, None).await?;
                for (name, _) in &page.objects {
                    self.delete(name).await?;
                }
                if !page.more {
                    return Ok(());
                }
            }
        })
    }

    /// Maximum age of a list that answers a reader.
    fn fresh_for(&self) -> Duration;

    /// Checks that the bucket can be used as this module requires.
    fn check(&self) -> BucketFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// Time for which small appends are buffered: the more objects exist, the longer, which limits the number of objects
/// per log.
fn flush_delay(objects: usize) -> Duration {
    match objects {
        0..600 => Duration::from_secs(1),
        600..3000 => Duration::from_secs(5),
        _ => Duration::from_secs(30),
    }
}

pub struct ObjectLogStore {
    bucket: Arc<dyn Bucket>,
    shelves: Mutex<HashMap<Log, Arc<ObjectLog>>>,
}

impl ObjectLogStore {
    pub fn new(bucket: Arc<dyn Bucket>) -> Self {
        Self { bucket, shelves: Mutex::default() }
    }

    fn object_log(&self, log: &Log) -> Arc<ObjectLog> {
        let mut shelves = self.shelves.lock();
        if shelves.len() >= CACHED_LOGS_MAX && !shelves.contains_key(log) {
            // Unwritten appends are kept; everything else can be listed again.
            shelves.retain(|_, object_log| object_log.has_pending() || Arc::strong_count(object_log) > 1);
        }
        let object_log = shelves.entry(*log);
        Arc::clone(
            object_log.or_insert_with(|| Arc::new(ObjectLog::new(Arc::clone(&self.bucket), log_prefix(log)))),
        )
    }
}

fn log_prefix(log: &Log) -> String {
    format!("{}/{}/{}/{}/", log.project, log.run, log.submission, log.stream.name())
}

impl std::fmt::Debug for ObjectLogStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("shelves", &self.shelves.lock().len()).finish_non_exhaustive()
    }
}

fn log_error(what: &'static str, submission: SubmissionId) -> impl Fn(io::Error) -> LogError {
    move |source| LogError::Io { what, submission, source }
}

impl LogStore for ObjectLogStore {
    fn append_to_files<'a>(
        &'a self,
        log: &'a Log,
        offset: u64,
        at: i64,
        bytes: &'a [u8],
    ) -> LogFuture<'a, u64> {
        Box::pin(async move {
            let object_log = self.object_log(log);
            let failed = log_error("append to", log.submission);
            if offset > object_log.end().await.map_err(&failed)? {
                // Another replica may have written since.
                object_log.refreshed_end().await.map_err(&failed)?;
            }
            let end = object_log.add(offset, at, bytes).await.map_err(&failed)?;
            if offset > end { Err(LogError::Gap { offset, end }) } else { Ok(end) }
        })
    }

    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64> {
        Box::pin(async move {
            self.object_log(log).refreshed_end().await.map_err(log_error("measure", log.submission))
        })
    }

    fn read<'a>(&'a self, log: &'a Log, range: LogRange) -> LogFuture<'a, Vec<LogChunk>> {
        Box::pin(async move {
            let object_log = self.object_log(log);
            match object_log.read(range).await {
                // Another replica removed the log: the present content counts.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    object_log.reset();
                    object_log.read(range).await.map_err(log_error("read", log.submission))
                }
                other => other.map_err(log_error("read", log.submission)),
            }
        })
    }

    fn sync<'a>(&'a self, log: &'a Log) -> LogFuture<'a, ()> {
        Box::pin(async move { self.object_log(log).write().await.map_err(log_error("sync", log.submission)) })
    }

    fn remove(&self, project: ProjectId, run: RunId) -> LogFuture<'_, ()> {
        Box::pin(async move {
            let failed = log_error("remove", SubmissionId(run.0));
            self.shelves.lock().retain(|log, _| log.run != run);
            self.bucket.delete_all(&format!("{project}/{run}/")).await.map_err(failed)
        })
    }

    fn poll_interval(&self) -> Duration {
        self.bucket.fresh_for()
    }

    fn flush(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            let waiting =
                self.shelves.lock().values().filter(|object_log| object_log.has_pending()).cloned().collect();
            let shelves = stream::iter::<Vec<Arc<ObjectLog>>>(waiting);
            let written = shelves.map(|object_log| async move { object_log.write().await });
            // A failure must not delay the others.
            let written: Vec<_> = written.buffer_unordered(FLUSHES_MAX).collect().await;
            written.into_iter().collect()
        })
    }

    fn check(&self) -> BoxFuture<'_, io::Result<()>> {
        self.bucket.check()
    }
}
