//! Writer of a stream, for one or a few blocking threads.
//!
//! When `append` returns, the bytes are with the kernel: they survive a kill -9 of this process. They are synced only
//! at the end, because a host that goes down takes the job with it. Memory does not grow with the output.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags, fstat, openat};
use tokio::sync::watch;

use super::{
    EVENT_MAX, EVENT_MS, IssuedTimestamp, Position, Stream, Timestamps,
    index::{self, IndexRecord, IndexRecordKind},
};
use crate::safe_open::DirHandle;

const HOUR_MS: i64 = 3_600_000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to open `{name}` of the spool")]
    Open {
        name: &'static str,
        #[source]
        source: io::Error,
    },
    /// The bytes up to the quota are stored, `kept` of these; nothing after them will be.
    #[error("the output exceeds {per_hour} bytes per hour")]
    QuotaExceeded { per_hour: u64, kept: usize },
    #[error("no space left on the device for output")]
    NoSpace {
        /// Number of the bytes that are in the spool.
        kept: usize,
        #[source]
        source: io::Error,
    },
    #[error("the output stream is already complete")]
    Complete,
    #[error("failed to write output")]
    Io {
        kept: usize,
        #[source]
        source: io::Error,
    },
}

/// Appends to one stream. Clones append to the same one.
#[derive(Clone, Debug)]
pub struct Writer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<WriterState>,
    stamps: Arc<Timestamps>,
    position: watch::Sender<Position>,
}

#[derive(Debug)]
struct WriterState {
    log: File,
    index: File,
    end: u64,
    records: u64,
    open: Option<OpenEvent>,
    /// CRC of the event that was closed last.
    before: Option<u32>,
    quota: Option<Quota>,
    complete: bool,
}

/// Event to which bytes are added.
#[derive(Debug)]
struct OpenEvent {
    issued: IssuedTimestamp,
    start: u64,
    crc: crc32fast::Hasher,
}

impl Writer {
    /// Opens or creates a stream. A record torn by a crash is cut off, and a lost index is rebuilt with coarse times.
    pub fn open(dir: &DirHandle, stream: Stream, stamps: Arc<Timestamps>) -> Result<Self, Error> {
        let file = |name| open_plain_file(dir, name).map_err(|source| Error::Open { name, source });
        let (log, index) = (file(stream.log_name())?, file(stream.index_name())?);
        let state = recover(log, index, &stamps)
            .map_err(|source| Error::Open { name: stream.index_name(), source })?;
        let position = Position { end: state.end, complete: state.complete };
        let shared = Shared { state: Mutex::new(state), stamps, position: watch::Sender::new(position) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Limits the bytes per hour from now on; 0 and `None` mean no limit.
    pub fn limit(&self, per_hour: Option<u64>) {
        let now = self.shared.stamps.now_ms();
        self.shared.state.lock().quota =
            per_hour.filter(|limit| *limit > 0).map(|limit| Quota::new(limit, now));
    }

    /// Writes at once. On an error, the first `kept` bytes are in the spool and the rest is not.
    pub fn append(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.shared.state.lock();
        let outcome = state.append(bytes, &self.shared.stamps);
        let position = Position { end: state.end, complete: state.complete };
        // Under the lock, because otherwise an older position could be published last.
        self.shared.position.send_if_modified(|seen| std::mem::replace(seen, position) != position);
        outcome
    }

    /// Marks durably that nothing will be added. Readers are notified even if the disk refuses the mark.
    pub fn finish(&self) -> Result<(), Error> {
        let mut state = self.shared.state.lock();
        if state.complete {
            return Ok(());
        }
        let outcome = state.finish(&self.shared.stamps);
        state.complete = true;
        self.shared.position.send_replace(Position { end: state.end, complete: true });
        outcome
    }

    pub fn position(&self) -> Position {
        *self.shared.position.borrow()
    }

    /// Subscribes to every growth.
    pub fn watch(&self) -> watch::Receiver<Position> {
        self.shared.position.subscribe()
    }

    /// Closes the open event, so that everything written until now can be returned.
    pub(super) fn close_event(&self) {
        self.shared.state.lock().close();
    }
}

/// For log subscribers, which may ignore errors.
impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map(|()| bytes.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WriterState {
    fn append(&mut self, bytes: &[u8], stamps: &Arc<Timestamps>) -> Result<(), Error> {
        if self.complete {
            return Err(Error::Complete);
        }
        let now = stamps.now_ms();
        let allowed = self.quota.as_mut().map_or(bytes.len(), |quota| quota.allowed_bytes(now, bytes.len()));
        let mut kept = 0;
        while kept < allowed {
            let wrote = self.append_part(&bytes[kept..allowed], now, stamps);
            let wrote = wrote.map_err(|source| write_error(source, kept))?;
            kept += wrote;
            if let Some(quota) = &mut self.quota {
                quota.used += wrote as u64;
            }
        }
        match &mut self.quota {
            Some(quota) if kept < bytes.len() => {
                quota.exceeded = true;
                Err(Error::QuotaExceeded { per_hour: quota.per_hour, kept })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Writes what fits in one event, and returns how much that was.
    fn append_part(&mut self, bytes: &[u8], now: i64, stamps: &Arc<Timestamps>) -> io::Result<usize> {
        let fits = self.open.as_ref().is_some_and(|open| {
            now < open.issued.at().saturating_add(EVENT_MS)
                && open.issued.at() == stamps.last()
                && self.end - open.start < EVENT_MAX
        });
        if !fits {
            self.close();
            let issued = stamps.issue();
            self.record(issued.at(), IndexRecordKind::Event)?;
            self.open = Some(OpenEvent { issued, start: self.end, crc: crc32fast::Hasher::new() });
        }
        let Some(open) = &mut self.open else { return Ok(0) };
        let room = usize::try_from(EVENT_MAX - (self.end - open.start)).unwrap_or(usize::MAX);
        let part = &bytes[..bytes.len().min(room)];
        let wrote = loop {
            match self.log.write_at(part, self.end) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                other => break other?,
            }
        };
        open.crc.update(&part[..wrote]);
        self.end += wrote as u64;
        Ok(wrote)
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.before = Some(open.crc.finalize());
        }
    }

    /// Writes at a tracked position, not at the end of the file: a partial record is overwritten by the next.
    fn record(&mut self, time: i64, kind: IndexRecordKind) -> io::Result<()> {
        let record = IndexRecord { offset: self.end, time, before: self.before, kind };
        self.index.write_all_at(&record.encode(), self.records * index::SIZE as u64)?;
        self.records += 1;
        self.before = None;
        Ok(())
    }

    fn finish(&mut self, stamps: &Arc<Timestamps>) -> Result<(), Error> {
        self.close();
        let marked = self.log.sync_data().and_then(|()| {
            let issued = stamps.issue();
            self.record(issued.at(), IndexRecordKind::Complete)?;
            self.index.sync_data()
        });
        marked.map_err(|source| write_error(source, 0))
    }
}

fn write_error(source: io::Error, kept: usize) -> Error {
    if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        return Error::NoSpace { kept, source };
    }
    Error::Io { kept, source }
}

/// Count of bytes that restarts every hour. Once exceeded it stays so: bytes that are refused are never followed by
/// bytes that are stored.
#[derive(Debug)]
struct Quota {
    per_hour: u64,
    since: i64,
    used: u64,
    exceeded: bool,
}

impl Quota {
    fn new(per_hour: u64, now: i64) -> Self {
        Self { per_hour, since: now, used: 0, exceeded: false }
    }

    fn allowed_bytes(&mut self, now: i64, wanted: usize) -> usize {
        if self.exceeded {
            return 0;
        }
        let hours = now.saturating_sub(self.since).max(0) / HOUR_MS;
        if hours > 0 {
            self.since += hours * HOUR_MS;
            self.used = 0;
        }
        usize::try_from(self.per_hour - self.used).map_or(wanted, |left| left.min(wanted))
    }
}

fn open_plain_file(dir: &DirHandle, name: &str) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?;
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(File::from(fd))
}

/// Truncates the index to its last valid record and adds coarse records for bytes without one.
fn recover(log: File, index: File, stamps: &Arc<Timestamps>) -> io::Result<WriterState> {
    let end = log.metadata()?.len();
    let mut records = index.metadata()?.len() / index::SIZE as u64;
    let sound = records.saturating_sub(index::SCAN_MAX);
    let mut last = None;
    while records > sound {
        let mut bytes = [0; index::SIZE];
        index.read_exact_at(&mut bytes, (records - 1) * index::SIZE as u64)?;
        last = IndexRecord::decode(&bytes).filter(|record| record.offset <= end);
        if last.is_some() {
            break;
        }
        records -= 1;
    }
    if last.is_none() {
        records = 0;
    }
    index.set_len(records * index::SIZE as u64)?;
    if let Some(last) = last {
        stamps.raise(last.time);
    }
    let complete = last.is_some_and(|record| record.kind == IndexRecordKind::Complete);
    let mut state =
        WriterState { log, index, end: 0, records, open: None, before: None, quota: None, complete };
    let covered = match last {
        Some(last) => last.offset.saturating_add(EVENT_MAX),
        None => 0,
    };
    if !complete {
        state.index_uncovered(covered, end, stamps)?;
    }
    state.end = end;
    Ok(state)
}

impl WriterState {
    fn index_uncovered(&mut self, from: u64, end: u64, stamps: &Arc<Timestamps>) -> io::Result<()> {
        let mut offset = from;
        while offset < end {
            self.end = offset;
            self.record(stamps.issue().at(), IndexRecordKind::Event)?;
            offset += EVENT_MAX;
        }
        Ok(())
    }
}
