//! The shim's journal: its actions on the host, in order, on disk before they are reported.
//!
//! Append-only. `append` assigns a record its position in the order and never waits; `flush` returns once the record
//! is on disk, and concurrent callers share one sync. Tests and checkers read it with [`read`].
//!
//! Why not a database? The journal is read at the start, never queried, and must survive truncation at any byte.

#[cfg(test)]
mod corruption_tests;
mod frame;
pub mod invariants;

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use windlass_api::agent::shim::Port;
use windlass_model::{id::SubmissionId, task::Status};

use super::{runtime::Handle, tasks::TaskEnd};
use crate::clock;

pub use frame::{Damage, JournalContents, scan};

/// Space reserved so that the shim can end and remove tasks when the disk is full.
pub const RESERVE_BYTES: u64 = 64 * 1024 * 1024;
/// A file that is longer than this, and twice as long as after the last compaction, is compacted.
const COMPACT_BYTES_MIN: u64 = 4 * 1024 * 1024;
/// Maximum number of records in memory, where there is no file, before removed tasks are dropped.
const MEMORY_RECORDS_MAX: usize = 4096;
/// Maximum size of queued records; above it, refusals are not recorded.
const QUEUE_BYTES_MAX: usize = 4 * 1024 * 1024;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Strictly increasing over the lifetime of the journal.
    pub seq: u64,
    /// Microseconds since 1970; informational.
    pub at: i64,
    pub submission: SubmissionId,
    /// The highest epoch seen for the submission; for a refusal the refused epoch.
    pub epoch: i64,
    #[serde(flatten)]
    pub kind: JournalEvent,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum JournalEvent {
    Submitted,
    /// The submission could not be recorded and was refused: as if it had never been received.
    Withdrawn,
    /// A call with a higher epoch was received.
    Admitted,
    Moved {
        to: Status,
    },
    GpuAcquired {
        gpus: Vec<String>,
    },
    GpuReleased {
        gpus: Vec<String>,
    },
    /// Keys of users are about to be added to an account of the host.
    KeyAdded,
    KeyRemoved,
    /// Volumes and mounts are about to be made.
    Mounted,
    Unmounted,
    ContainerCreated {
        handle: Handle,
    },
    /// The container is about to be started. Without a later `container_started` it is unknown whether it was.
    ContainerStarting {
        boot: String,
    },
    ContainerStarted {
        ports: Vec<Port>,
    },
    ContainerExited {
        code: Option<i32>,
    },
    #[serde(rename = "terminate_asked")]
    TerminateRequested {
        reason: String,
        message: String,
        /// Seconds.
        timeout: u64,
    },
    Terminated {
        end: TaskEnd,
    },
    Removed,
    RefusedEpoch {
        seen: i64,
    },
    RefusedSpec {
        why: String,
    },
}

impl JournalEvent {
    /// Returns whether the record is informational only; a refusal changes nothing.
    pub const fn is_refusal(&self) -> bool {
        matches!(self, Self::RefusedEpoch { .. } | Self::RefusedSpec { .. })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to open journal `{path}`")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to open journal `{path}`: it is locked by another shim")]
    Locked { path: PathBuf },
    #[error("failed to write journal `{path}`: it is closed")]
    Closed { path: PathBuf },
    #[error("failed to write journal `{path}`")]
    Write {
        path: PathBuf,
        #[source]
        source: Arc<io::Error>,
    },
}

#[derive(Clone, Debug)]
pub struct Journal {
    queue: Arc<Mutex<PendingRecords>>,
    disk: Option<Arc<tokio::sync::Mutex<JournalFile>>>,
}

#[derive(Debug)]
struct PendingRecords {
    next_seq: u64,
    /// Encoded, not yet on disk.
    bytes: Vec<u8>,
    /// All records, where there is no file.
    memory: Vec<Record>,
}

#[derive(Debug)]
struct JournalFile {
    path: PathBuf,
    file: File,
    /// Length of the complete records that are known to be on disk.
    len: u64,
    compacted_len: u64,
    /// Complete records after them, which are written and not known to be on disk.
    unsynced: Vec<u8>,
    /// Sequence number of the last record that is written.
    written: u64,
    /// Sequence number of the last record known to be on disk.
    synced: u64,
    /// Held while this is the only shim of its home; without it nothing is written.
    lock: Option<File>,
}

impl Journal {
    /// Journal of a simulated host: kept in memory, lost with the process.
    pub fn in_memory() -> Self {
        Self { queue: Arc::new(Mutex::new(PendingRecords::from(1))), disk: None }
    }

    /// Opens or creates the file, truncates an incomplete record at its end and returns its contents.
    pub fn open(path: &Path) -> Result<(Self, JournalContents), Error> {
        let failed = |source| Error::Open { path: path.to_owned(), source };
        let lock = acquire_lock(path)?;
        let reading = read(path).map_err(failed)?;
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len() - reading.torn_bytes;
        file.set_len(len).map_err(failed)?;
        file.seek(SeekFrom::Start(len)).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        sync_parent(path).map_err(failed)?;
        let last = reading.records.iter().map(|record| record.seq).max().unwrap_or(0);
        let disk = JournalFile {
            path: path.to_owned(),
            file,
            len,
            compacted_len: len,
            unsynced: Vec::new(),
            written: last,
            synced: last,
            lock: Some(lock),
        };
        disk.fill_reserve();
        let queue = Arc::new(Mutex::new(PendingRecords::from(last + 1)));
        Ok((Self { queue, disk: Some(Arc::new(tokio::sync::Mutex::new(disk))) }, reading))
    }

    /// Appends a record to the order. It is not on disk yet: see `flush`.
    pub fn append(&self, submission: SubmissionId, epoch: i64, kind: JournalEvent) -> u64 {
        let mut queue = self.queue.lock();
        let seq = queue.next_seq;
        if kind.is_refusal() && queue.bytes.len() > QUEUE_BYTES_MAX {
            return seq.saturating_sub(1);
        }
        queue.next_seq += 1;
        let record = Record { seq, at: clock::now_us(), submission, epoch, kind };
        if self.disk.is_none() {
            queue.keep_in_memory(record);
        } else if let Err(error) = frame::encode(&record, &mut queue.bytes) {
            // Strings and numbers always encode; a defect here must not end the shim.
            tracing::error!(%error, ?record, "failed to encode journal record");
        }
        seq
    }

    /// Sequence number of the last appended record.
    pub fn last(&self) -> u64 {
        self.queue.lock().next_seq - 1
    }

    /// Returns once the record and all before it are on disk.
    pub async fn flush(&self, seq: u64) -> Result<(), Error> {
        self.store(move |disk| disk.synced >= seq, JournalFile::drain).await
    }

    /// Returns once the record and all before it are written: they survive the end of this process, but not that of the
    /// host.
    pub async fn write(&self, seq: u64) -> Result<(), Error> {
        self.store(move |disk| disk.written >= seq, JournalFile::drain_unsynced).await
    }

    async fn store(
        &self,
        is_stored: impl FnOnce(&JournalFile) -> bool,
        store: fn(&mut JournalFile, &Mutex<PendingRecords>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let mut disk = Arc::clone(disk).lock_owned().await;
        if is_stored(&disk) {
            return Ok(());
        }
        let queue = Arc::clone(&self.queue);
        // The guard moves along: if the caller is dropped meanwhile, no other write can intervene.
        let stored = tokio::task::spawn_blocking(move || store(&mut disk, &queue)).await;
        stored.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Compacts as [`Journal::compact`] does if enough of the file is obsolete. Of several concurrent callers one
    /// rewrites.
    pub async fn compact_if_long(
        &self,
        keep: impl FnOnce(Vec<Record>) -> Vec<Record> + Send + 'static,
    ) -> Result<(), Error> {
        self.compact_if(JournalFile::is_long, keep).await
    }

    /// Rewrites the file with the records that `keep` returns; the old file is replaced atomically.
    pub async fn compact(
        &self,
        keep: impl FnOnce(Vec<Record>) -> Vec<Record> + Send + 'static,
    ) -> Result<(), Error> {
        self.compact_if(|_| true, keep).await
    }

    async fn compact_if(
        &self,
        is_due: fn(&JournalFile) -> bool,
        keep: impl FnOnce(Vec<Record>) -> Vec<Record> + Send + 'static,
    ) -> Result<(), Error> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let mut disk = Arc::clone(disk).lock_owned().await;
        if !is_due(&disk) {
            return Ok(());
        }
        let queue = Arc::clone(&self.queue);
        let rewritten = tokio::task::spawn_blocking(move || {
            disk.drain(&queue)?;
            disk.rewrite(keep).map_err(|source| disk.failed(source))
        });
        rewritten.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Waits for a write in progress and prevents further ones, so that another process may open the file.
    pub async fn close(&self) {
        if let Some(disk) = &self.disk {
            disk.lock().await.lock = None;
        }
    }

    /// Records of a journal without a file.
    pub fn in_memory_records(&self) -> Vec<Record> {
        self.queue.lock().memory.clone()
    }
}

impl PendingRecords {
    fn from(next_seq: u64) -> Self {
        Self { next_seq, bytes: Vec::new(), memory: Vec::new() }
    }

    fn keep_in_memory(&mut self, record: Record) {
        self.memory.push(record);
        if self.memory.len() > MEMORY_RECORDS_MAX {
            let removed: std::collections::HashSet<_> = self
                .memory
                .iter()
                .filter(|record| record.kind == JournalEvent::Removed)
                .map(|record| record.submission)
                .collect();
            self.memory.retain(|record| !removed.contains(&record.submission));
            // All records of existing tasks are kept, unless they alone exceed the maximum.
            let over = self.memory.len().saturating_sub(MEMORY_RECORDS_MAX);
            self.memory.drain(..over);
        }
    }
}

impl JournalFile {
    fn is_long(&self) -> bool {
        self.len > COMPACT_BYTES_MIN && self.len > self.compacted_len.saturating_mul(2)
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Write { path: self.path.clone(), source: Arc::new(source) }
    }

    /// Writes and syncs the queued records. Records that could not be written stay queued, in order.
    fn drain(&mut self, queue: &Mutex<PendingRecords>) -> Result<(), Error> {
        self.drain_with(queue, true)
    }

    /// Writes the queued records. Records that could not be written stay queued, in order.
    fn drain_unsynced(&mut self, queue: &Mutex<PendingRecords>) -> Result<(), Error> {
        self.drain_with(queue, false)
    }

    fn drain_with(&mut self, queue: &Mutex<PendingRecords>, sync: bool) -> Result<(), Error> {
        if self.lock.is_none() {
            return Err(Error::Closed { path: self.path.clone() });
        }
        let (mut bytes, last) = {
            let mut queue = queue.lock();
            (std::mem::take(&mut queue.bytes), queue.next_seq - 1)
        };
        let written = self.write(&mut bytes, sync).or_else(|error| {
            if error.raw_os_error() != Some(rustix::io::Errno::NOSPC.raw_os_error())
                || !self.release_reserve()
            {
                return Err(error);
            }
            tracing::warn!(path = %self.path.display(), "disk full; the journal uses its reserve");
            self.write(&mut bytes, sync)
        });
        if let Err(source) = written {
            let mut queue = queue.lock();
            let newer = std::mem::replace(&mut queue.bytes, bytes);
            queue.bytes.extend_from_slice(&newer);
            return Err(self.failed(source));
        }
        self.written = last;
        if sync {
            self.synced = last;
        }
        Ok(())
    }

    /// Appends the records. After an error they are to be written again, together with those before them of which it is
    /// unknown whether they are on disk: `bytes` then starts with those.
    fn write(&mut self, bytes: &mut Vec<u8>, sync: bool) -> io::Result<()> {
        let written = self.file.write_all(bytes);
        let written = if sync { written.and_then(|()| self.file.sync_data()) } else { written };
        if written.is_err() {
            // No partial record should precede the next one, although a reader would skip it.
            let cut = self.file.set_len(self.len).and_then(|()| self.file.seek(SeekFrom::Start(self.len)));
            if let Err(error) = cut {
                tracing::error!(%error, "failed to truncate a partial journal record");
            }
            bytes.splice(..0, std::mem::take(&mut self.unsynced));
        } else if sync {
            self.len += (self.unsynced.len() + bytes.len()) as u64;
            self.unsynced.clear();
        } else {
            self.unsynced.extend_from_slice(bytes);
        }
        written
    }

    fn rewrite(&mut self, keep: impl FnOnce(Vec<Record>) -> Vec<Record>) -> io::Result<()> {
        let kept = keep(read(&self.path)?.records);
        let mut bytes = Vec::new();
        for record in &kept {
            frame::encode(record, &mut bytes)?;
        }
        let next_to = self.path.with_extension("new");
        let written = write_file(&next_to, &bytes).and_then(|file| {
            std::fs::rename(&next_to, &self.path)?;
            Ok(file)
        });
        if written.is_err() {
            // A partial file occupies space that a full disk needs.
            let _ = std::fs::remove_file(&next_to);
        }
        self.file = written?;
        sync_parent(&self.path)?;
        self.len = bytes.len() as u64;
        self.compacted_len = self.len;
        self.fill_reserve();
        Ok(())
    }

    fn reserve_path(&self) -> PathBuf {
        self.path.with_extension("reserve")
    }

    /// Allocates the reserve. Without it the shim works too, until the disk is full.
    fn fill_reserve(&self) {
        let filled =
            OpenOptions::new().write(true).create(true).truncate(false).open(self.reserve_path()).and_then(
                |file| {
                    use rustix::fs::{FallocateFlags, fallocate};
                    Ok(fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES)?)
                },
            );
        if let Err(error) = filled {
            let _ = std::fs::remove_file(self.reserve_path());
            tracing::info!(%error, "failed to allocate the journal reserve");
        }
    }

    fn release_reserve(&self) -> bool {
        std::fs::remove_file(self.reserve_path()).is_ok()
    }
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

/// Locks the journal: two shims on one home would start everything twice. The kernel releases the lock when the process
/// ends, for whatever reason.
fn acquire_lock(path: &Path) -> Result<File, Error> {
    use rustix::{
        fs::{FlockOperation, flock},
        io::Errno,
    };
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let next_to = path.with_extension("lock");
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(&next_to).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(Error::Locked { path: path.to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// Reads a journal without changing it.
pub fn read(path: &Path) -> io::Result<JournalContents> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(mut file) => file.read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(JournalContents { missing: true, ..JournalContents::default() });
        }
        Err(error) => return Err(error),
    };
    Ok(scan(&bytes))
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}
