//! Logs as files below the data directory.
//!
//! `PROJECT/RUN/SUBMISSION/STREAM.log` holds the bytes, `STREAM.idx` a record of [`RECORD_BYTES`] bytes for each piece:
//! offset, time, length, and a checksum of these and the bytes. A piece at the tail is valid only if its checksum
//! matches, so what a crash truncated or a power cut left blank is ignored, and its writer sends it again.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::{FileExt, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use windlass_model::id::{ProjectId, RunId, SubmissionId};

use super::{Log, LogChunk, LogError, LogFuture, LogRange, LogStore};
use crate::encryption::create_private_dirs;

const RECORD_BYTES: u64 = 24;
/// Number of records per read of the index.
const RECORDS_AT_ONCE: usize = 1024;

#[derive(Debug)]
pub struct FileLogStore {
    root: PathBuf,
}

impl FileLogStore {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    fn run(&self, project: ProjectId, run: RunId) -> PathBuf {
        self.root.join(project.to_string()).join(run.to_string())
    }

    fn base(&self, log: &Log) -> PathBuf {
        self.run(log.project, log.run).join(log.submission.to_string()).join(log.stream.name())
    }
}

impl LogStore for FileLogStore {
    fn append_to_files<'a>(
        &'a self,
        log: &'a Log,
        offset: u64,
        at: i64,
        bytes: &'a [u8],
    ) -> LogFuture<'a, u64> {
        let (base, bytes, submission) = (self.base(log), bytes.to_vec(), log.submission);
        run_blocking("append to", submission, move || append(&base, offset, at, &bytes))
    }

    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64> {
        let base = self.base(log);
        run_blocking("measure", log.submission, move || {
            Ok(LogFiles::read(&base)?.map_or(Ok(0), |open| open.end().map(|end| end.0))?)
        })
    }

    fn read<'a>(&'a self, log: &'a Log, range: LogRange) -> LogFuture<'a, Vec<LogChunk>> {
        let base = self.base(log);
        run_blocking("read", log.submission, move || match LogFiles::read(&base)? {
            Some(open) => Ok(open.read_range(range)?),
            None => Ok(Vec::new()),
        })
    }

    fn sync<'a>(&'a self, log: &'a Log) -> LogFuture<'a, ()> {
        let base = self.base(log);
        run_blocking("sync", log.submission, move || {
            let Some(open) = LogFiles::read(&base)? else { return Ok(()) };
            open.bytes.sync_data()?;
            open.index.sync_data()?;
            let directory = base.parent().map(File::open).transpose()?;
            Ok(directory.map_or(Ok(()), |directory| directory.sync_all())?)
        })
    }

    fn remove(&self, project: ProjectId, run: RunId) -> LogFuture<'_, ()> {
        let directory = self.run(project, run);
        run_blocking("remove", SubmissionId(run.0), move || match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            Ok(()) | Err(_) => Ok(()),
        })
    }
}

/// Errors of file operations; the caller adds the submission.
enum FileError {
    Io(io::Error),
    Gap { offset: u64, end: u64 },
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn run_blocking<T: Send + 'static>(
    what: &'static str,
    submission: SubmissionId,
    work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> LogFuture<'static, T> {
    let failed = move |source| LogError::Io { what, submission, source };
    Box::pin(async move {
        match tokio::task::spawn_blocking(work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(FileError::Io(source))) => Err(failed(source)),
            Ok(Err(FileError::Gap { offset, end })) => Err(LogError::Gap { offset, end }),
            Err(gone) => Err(failed(io::Error::other(gone))),
        }
    })
}

fn append(base: &Path, offset: u64, at: i64, bytes: &[u8]) -> Result<u64, FileError> {
    let open = LogFiles::write(base)?;
    // Another replica may have lost its lease a moment ago and still be writing the same bytes.
    open.index.lock()?;
    let (end, records) = open.end()?;
    if offset > end {
        return Err(FileError::Gap { offset, end });
    }
    let known = usize::try_from(end - offset).unwrap_or(usize::MAX);
    let Some(fresh) = bytes.get(known..).filter(|fresh| !fresh.is_empty()) else { return Ok(end) };
    open.bytes.write_all_at(fresh, end)?;
    // A record stores the length in 32 bits.
    let len = u32::try_from(fresh.len()).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
    // Clocks of hosts jump, but a search by time needs times that never decrease.
    let at = match records.checked_sub(1) {
        Some(last) => at.max(open.record(last)?.at),
        None => at,
    };
    // Otherwise invalid records after the last valid one would become valid again after the next append.
    open.index.set_len(records * RECORD_BYTES)?;
    let record = IndexRecord::new(end, at, len, fresh);
    open.index.write_all_at(&record.encode(), records * RECORD_BYTES)?;
    Ok(end + u64::from(len))
}

struct LogFiles {
    bytes: File,
    index: File,
}

impl LogFiles {
    fn write(base: &Path) -> io::Result<Self> {
        let open = |extension: &str| {
            let path = base.with_extension(extension);
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
        };
        match open("log") {
            Ok(bytes) => return Ok(Self { bytes, index: open("idx")? }),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) => {}
        }
        base.parent().map_or(Ok(()), create_private_dirs)?;
        Ok(Self { bytes: open("log")?, index: open("idx")? })
    }

    /// Returns `None` if the log does not exist.
    fn read(base: &Path) -> io::Result<Option<Self>> {
        let open = |extension: &str| match File::open(base.with_extension(extension)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        };
        Ok(open("log")?.zip(open("idx")?).map(|(bytes, index)| Self { bytes, index }))
    }

    /// End of the log, and the number of valid records.
    fn end(&self) -> io::Result<(u64, u64)> {
        let (mut records, held) = (self.index.metadata()?.len() / RECORD_BYTES, self.bytes.metadata()?.len());
        // Records at the tail that are torn, or whose bytes are missing, do not count.
        while let Some(last) = records.checked_sub(1) {
            let record = self.record(last)?;
            if record.end() <= held && self.piece(&record).is_ok() {
                return Ok((record.end(), records));
            }
            records = last;
        }
        Ok((0, 0))
    }

    fn records(&self, first: u64, count: usize) -> io::Result<Vec<IndexRecord>> {
        let mut raw = vec![0; count * RECORD_BYTES as usize];
        self.index.read_exact_at(&mut raw, first * RECORD_BYTES)?;
        Ok(raw.chunks_exact(RECORD_BYTES as usize).filter_map(IndexRecord::decode).collect())
    }

    fn record(&self, at: u64) -> io::Result<IndexRecord> {
        self.records(at, 1)?.pop().ok_or_else(|| ErrorKind::UnexpectedEof.into())
    }

    /// Index of the first of `count` records for which `before` is false.
    fn seek(&self, count: u64, before: impl Fn(&IndexRecord) -> bool) -> io::Result<u64> {
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if before(&self.record(middle)?) { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    fn read_range(&self, range: LogRange) -> io::Result<Vec<LogChunk>> {
        let (_, count) = self.end()?;
        let mut low = match range.after {
            Some(after) => self.seek(count, |record| record.at <= after)?,
            None => 0,
        };
        let mut high = match range.until {
            Some(until) => self.seek(count, |record| record.at <= until)?,
            None => count,
        };
        match range.from {
            Some(from) if range.descending => {
                high = high.min(self.seek(count, |record| record.offset < from)?)
            }
            Some(from) => low = low.max(self.seek(count, |record| record.end() <= from)?),
            None => {}
        }
        let mut taken = Vec::new();
        let mut bytes = 0;
        while low < high && taken.len() < range.pieces_max {
            let wanted =
                (high - low).min(RECORDS_AT_ONCE as u64).min((range.pieces_max - taken.len()) as u64);
            let first = if range.descending { high - wanted } else { low };
            let mut batch = self.records(first, usize::try_from(wanted).unwrap_or(RECORDS_AT_ONCE))?;
            if range.descending {
                batch.reverse();
                high = first;
            } else {
                low += wanted;
            }
            for record in batch {
                let len = record.len as usize;
                if !taken.is_empty() && bytes + len > range.bytes_max {
                    return Ok(taken);
                }
                let mut piece = self.piece(&record)?;
                if taken.is_empty() {
                    range.cut(&mut piece);
                }
                bytes += piece.bytes.len();
                taken.push(piece);
                if bytes >= range.bytes_max {
                    return Ok(taken);
                }
            }
        }
        Ok(taken)
    }

    fn piece(&self, record: &IndexRecord) -> io::Result<LogChunk> {
        let mut bytes = vec![0; record.len as usize];
        self.bytes.read_exact_at(&mut bytes, record.offset)?;
        if IndexRecord::new(record.offset, record.at, record.len, &bytes) != *record {
            let what = format!("the chunk at offset {} is damaged", record.offset);
            return Err(io::Error::new(ErrorKind::InvalidData, what));
        }
        Ok(LogChunk { offset: record.offset, at: record.at, bytes })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IndexRecord {
    offset: u64,
    at: i64,
    len: u32,
    sum: u32,
}

impl IndexRecord {
    fn new(offset: u64, at: i64, len: u32, bytes: &[u8]) -> Self {
        let mut sum = crc32fast::Hasher::new();
        sum.update(&offset.to_be_bytes());
        sum.update(&at.to_be_bytes());
        sum.update(bytes);
        Self { offset, at, len, sum: sum.finalize() }
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.len))
    }

    fn encode(self) -> [u8; RECORD_BYTES as usize] {
        let mut raw = [0; RECORD_BYTES as usize];
        raw[..8].copy_from_slice(&self.offset.to_be_bytes());
        raw[8..16].copy_from_slice(&self.at.to_be_bytes());
        raw[16..20].copy_from_slice(&self.len.to_be_bytes());
        raw[20..].copy_from_slice(&self.sum.to_be_bytes());
        raw
    }

    fn decode(raw: &[u8]) -> Option<Self> {
        Some(Self {
            offset: u64::from_be_bytes(raw.get(..8)?.try_into().ok()?),
            at: i64::from_be_bytes(raw.get(8..16)?.try_into().ok()?),
            len: u32::from_be_bytes(raw.get(16..20)?.try_into().ok()?),
            sum: u32::from_be_bytes(raw.get(20..24)?.try_into().ok()?),
        })
    }
}
