//! Following a stream as it grows.
//!
//! A follower keeps only an offset, and reads from disk. It is woken by the writer in the same process, or by inotify;
//! and because a wake-up may be lost, it also polls now and then.

use std::{io, sync::Arc, time::Duration};

use axum::body::Bytes;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::{CHUNK, Position, Reader, Watcher, Writer, inotify::DirWatch};

/// Maximum time that a follower waits for a wake-up before it polls.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The same if nothing can wake it.
const POLL_INTERVAL_UNWATCHED: Duration = Duration::from_millis(100);
/// Time that a follower which got few bytes waits for more, because otherwise every small write would cost a read.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// Maximum number of concurrent disk reads of one source: each occupies a thread.
const READS_MAX: usize = 4;

/// Stream that can be read and waited for. Clones share the handles.
#[derive(Clone, Debug)]
pub struct StreamSource {
    reader: Reader,
    growth: GrowthSignal,
    reads: Arc<Semaphore>,
}

/// Source of wake-ups.
#[derive(Clone, Debug)]
enum GrowthSignal {
    /// The writer is in this process.
    Here(watch::Receiver<Position>),
    /// The writer is in another process, and `ended` is cancelled when that process is dead.
    There { watcher: Watcher, ended: CancellationToken },
}

impl StreamSource {
    pub fn here(writer: &Writer, reader: Reader) -> Self {
        Self::new(reader, GrowthSignal::Here(writer.watch()))
    }

    /// Returns a stream that another process writes. Once `ended` is cancelled the stream counts as complete, with or
    /// without the writer's own mark.
    pub fn there(reader: Reader, watcher: Watcher, ended: CancellationToken) -> Self {
        Self::new(reader, GrowthSignal::There { watcher, ended })
    }

    fn new(reader: Reader, growth: GrowthSignal) -> Self {
        Self { reader, growth, reads: Arc::new(Semaphore::new(READS_MAX)) }
    }

    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    pub async fn position(&self) -> io::Result<Position> {
        match &self.growth {
            GrowthSignal::Here(position) => Ok(*position.borrow()),
            GrowthSignal::There { ended, .. } => {
                // Checked first: what a dead writer left is final.
                let ended = ended.is_cancelled();
                let mut position = self.run_blocking(Reader::position).await?;
                position.complete |= ended;
                Ok(position)
            }
        }
    }

    /// Reads up to `max` bytes from `offset` on; none at the end.
    pub async fn read(&self, offset: u64, max: usize) -> io::Result<Bytes> {
        Ok(self.run_blocking(move |reader| reader.read(offset, max)).await?.into())
    }

    /// Waits until there are bytes after `offset`, the stream is complete, or `patience` has elapsed.
    pub async fn wait(&self, offset: u64, timeout: Duration) -> io::Result<Position> {
        let mut waiter = self.waiter();
        let deadline = Instant::now() + timeout;
        loop {
            let position = self.position().await?;
            if position.complete || position.end > offset || Instant::now() >= deadline {
                return Ok(position);
            }
            waiter.wait(deadline).await;
        }
    }

    /// Waits for the end of the stream and returns its offset. A reader that fails counts as the end.
    pub async fn wait_complete(&self) -> u64 {
        let mut waiter = self.waiter();
        loop {
            match self.position().await {
                Ok(Position { complete: false, .. }) => waiter.wait(Instant::now() + POLL_INTERVAL).await,
                Ok(Position { end, .. }) => return end,
                Err(_) => return 0,
            }
        }
    }

    pub fn follow(&self, offset: u64) -> Follower {
        Follower { waiter: self.waiter(), source: self.clone(), offset, gather: None }
    }

    /// Runs a function of the reader on a thread that may block on the disk.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Reader) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(io::Error::other)?;
        let reader = self.reader.clone();
        let run = move || {
            let _permit = permit;
            work(&reader)
        };
        tokio::task::spawn_blocking(run).await.map_err(io::Error::other)?
    }

    fn waiter(&self) -> Waiter {
        match &self.growth {
            GrowthSignal::Here(position) => {
                let mut position = position.clone();
                position.mark_unchanged();
                Waiter::Here(position)
            }
            GrowthSignal::There { watcher, ended } => {
                Waiter::There { dir: watcher.dir(self.reader.dir()), ended: ended.clone() }
            }
        }
    }
}

/// Created before the first check, so that no growth is missed between a check and the wait.
#[derive(Debug)]
enum Waiter {
    Here(watch::Receiver<Position>),
    There { dir: Option<DirWatch>, ended: CancellationToken },
}

impl Waiter {
    /// Returns when another check is worthwhile, at the latest at the deadline.
    async fn wait(&mut self, deadline: Instant) {
        match self {
            Waiter::Here(position) => {
                // A writer that was dropped sends no wake-ups: then the deadline applies.
                if let Ok(Err(_)) = timeout_at(deadline, position.changed()).await {
                    sleep_until(deadline.min(Instant::now() + POLL_INTERVAL)).await;
                }
            }
            Waiter::There { dir, ended } => {
                let poll_interval = if dir.is_some() { POLL_INTERVAL } else { POLL_INTERVAL_UNWATCHED };
                let poll_interval = deadline.min(Instant::now() + poll_interval);
                let changed = async {
                    match dir {
                        Some(dir) => {
                            let _ = dir.wake.changed().await;
                        }
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = changed => {}
                    // Once it has ended there is nothing to wait for.
                    () = ended.cancelled() => {}
                    () = sleep_until(poll_interval) => {}
                }
            }
        }
    }
}

/// Returns a stream's bytes from an offset on until it is complete.
#[derive(Debug)]
pub struct Follower {
    source: StreamSource,
    waiter: Waiter,
    offset: u64,
    gather: Option<Instant>,
}

impl Follower {
    /// Offset of the next chunk.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next bytes, or `None` after the last. Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(until) = self.gather {
                sleep_until(until).await;
                self.gather = None;
            }
            let position = self.source.position().await?;
            if position.end > self.offset {
                let bytes = self.source.read(self.offset, CHUNK).await?;
                if !bytes.is_empty() {
                    self.offset += bytes.len() as u64;
                    let little = bytes.len() < CHUNK && !position.complete;
                    self.gather = little.then(|| Instant::now() + BATCH_DELAY);
                    return Ok(Some(bytes));
                }
            }
            if position.complete {
                return Ok(None);
            }
            self.waiter.wait(Instant::now() + POLL_INTERVAL).await;
        }
    }
}
