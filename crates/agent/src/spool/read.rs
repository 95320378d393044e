//! Reader of a stream, for any process.
//!
//! The directory may belong to a hostile job. So files are opened through [`DirHandle`], every number is checked, and
//! no call uses more memory or time than its arguments and the file's actual length allow. A file that does not exist
//! yet is an empty stream.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, OnceLock},
};

use super::{
    CHUNK, EVENT_MAX, Position, Stream,
    index::{self, IndexRecord, IndexRecordKind},
};
use crate::safe_open::DirHandle;

/// Maximum number of bytes that one `read` returns.
pub const READ_MAX: usize = 1024 * 1024;
/// Number of damaged records after which a search gives up at a position.
const DAMAGED_RECORDS_MAX: u64 = 64;

/// One stream of a task. Clones share the handles.
#[derive(Clone, Debug)]
pub struct Reader {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: Arc<DirHandle>,
    stream: Stream,
    log: OnceLock<File>,
    index: OnceLock<File>,
}

/// Bytes that arrived together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Milliseconds since 1970.
    pub time: i64,
    pub start: u64,
    pub end: u64,
}

impl Event {
    pub fn size(&self) -> u64 {
        self.end - self.start
    }
}

/// Events in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    pub events: Vec<Event>,
    /// True if a limit was reached: more of the requested events exist.
    pub more: bool,
    /// True if there are events after `upto`.
    pub later: bool,
}

/// Selection of events: those with `after < time ≤ upto`, up to both limits, but always at least one.
#[derive(Clone, Copy, Debug)]
pub struct EventRange {
    pub after: i64,
    pub upto: i64,
    pub bytes_max: u64,
    pub events_max: usize,
}

/// Range of bytes that differ from what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpoolDamage {
    pub start: u64,
    pub end: u64,
}

impl Reader {
    pub fn new(dir: Arc<DirHandle>, stream: Stream) -> Self {
        Self { shared: Arc::new(Shared { dir, stream, log: OnceLock::new(), index: OnceLock::new() }) }
    }

    pub fn stream(&self) -> Stream {
        self.shared.stream
    }

    /// Directory of the stream.
    pub fn dir(&self) -> &Arc<DirHandle> {
        &self.shared.dir
    }

    /// Reads bytes from `offset` on, at most `max` and [`READ_MAX`]; none at or after the end.
    pub fn read(&self, offset: u64, max: usize) -> io::Result<Vec<u8>> {
        let Some(log) = self.log()? else { return Ok(Vec::new()) };
        let left = log.metadata()?.len().saturating_sub(offset);
        let size = usize::try_from(left).unwrap_or(usize::MAX).min(max).min(READ_MAX);
        read_at(log, offset, size)
    }

    /// Offset after the last byte.
    pub fn end(&self) -> io::Result<u64> {
        self.log()?.map_or(Ok(0), |log| Ok(log.metadata()?.len()))
    }

    /// Returns whether the writer has marked the stream as complete.
    pub fn is_complete(&self) -> io::Result<bool> {
        let index = self.index()?;
        let last = index.records.checked_sub(1).map_or(Ok(None), |last| index.record(last))?;
        Ok(last.is_some_and(|record| record.kind == IndexRecordKind::Complete))
    }

    /// Returns the current position of the stream. Once it is complete, its end is final.
    pub fn position(&self) -> io::Result<Position> {
        // In this order: the other order would miss bytes that arrive between the two reads.
        let complete = self.is_complete()?;
        Ok(Position { end: self.end()?, complete })
    }

    /// Returns the offset of the output that arrived at `time_ms` or later.
    pub fn offset_at(&self, time_ms: i64) -> io::Result<u64> {
        let end = self.end()?;
        let index = self.index()?;
        let found = index.first_record_at(time_ms)?;
        if found == 0 {
            return Ok(0);
        }
        for at in found..index.records.min(found.saturating_add(DAMAGED_RECORDS_MAX)) {
            if let Some(record) = index.record(at)? {
                return Ok(record.offset.min(end));
            }
        }
        Ok(end)
    }

    /// Returns events in order of their time.
    pub fn events(&self, wanted: EventRange) -> io::Result<Events> {
        // The end comes first: every byte before it has its record by the time the index is read.
        let end = self.end()?;
        let index = self.index()?;
        let mut found = Events::default();
        let (mut bytes, mut open) = (0, None::<Event>);
        let mut at = match wanted.after.checked_add(1) {
            Some(from) => index.first_record_at(from)?,
            None => return Ok(found),
        };
        let from_start = at == 0;
        let last = index.records.min(at.saturating_add(index::SCAN_MAX));
        while at < last {
            for record in index.chunk(at)?.into_iter().flatten() {
                let offset = record.offset.min(end);
                if let Some(event) = open.take() {
                    let event = Event { end: offset.max(event.start), ..event };
                    if !found.take(event, &mut bytes, wanted) {
                        return Ok(found);
                    }
                }
                if record.time > wanted.upto || record.kind == IndexRecordKind::Complete {
                    found.later = record.kind == IndexRecordKind::Event;
                    return Ok(found);
                }
                // Bytes before the first record are added to its event.
                let start = if from_start && found.events.is_empty() && bytes == 0 { 0 } else { offset };
                open = Some(Event { time: record.time, start, end: start });
            }
            at += index::CHUNK_RECORDS;
        }
        if let Some(event) = open {
            found.take(Event { end, ..event }, &mut bytes, wanted);
        }
        Ok(found)
    }

    /// Compares the bytes with the checksums of the index. Reads everything once, so it may take a while.
    pub fn damage(&self) -> io::Result<Vec<SpoolDamage>> {
        let end = self.end()?;
        let index = self.index()?;
        let mut damaged = Vec::new();
        let mut start = None;
        for at in 0..index.records.min(index::SCAN_MAX) {
            let record = index.record(at)?;
            if let (Some(start), Some(record)) = (start, record)
                && let Some(crc) = record.before
                && record.offset >= start
                && (record.offset > end || self.crc(start, record.offset)? != crc)
            {
                damaged.push(SpoolDamage { start, end: record.offset });
            }
            start = record.map(|record| record.offset);
        }
        Ok(damaged)
    }

    fn crc(&self, start: u64, end: u64) -> io::Result<u32> {
        let (mut crc, mut offset) = (crc32fast::Hasher::new(), start);
        while offset < end {
            let size = usize::try_from(end - offset).unwrap_or(CHUNK).min(CHUNK);
            let bytes = self.read(offset, size)?;
            if bytes.is_empty() {
                break;
            }
            crc.update(&bytes);
            offset += bytes.len() as u64;
        }
        Ok(crc.finalize())
    }

    fn log(&self) -> io::Result<Option<&File>> {
        self.file(&self.shared.log, self.shared.stream.log_name())
    }

    fn index(&self) -> io::Result<Index<'_>> {
        let file = match self.file(&self.shared.index, self.shared.stream.index_name()) {
            Ok(file) => file,
            // Times are lost; the bytes are still available.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => None,
            Err(error) => return Err(error),
        };
        let records =
            file.map_or(Ok(0), |file| io::Result::Ok(file.metadata()?.len() / index::SIZE as u64))?;
        if records > 0 {
            return Ok(Index { file, records });
        }
        Ok(Index { file: None, records: self.end()?.div_ceil(EVENT_MAX) })
    }

    fn file<'a>(&self, cell: &'a OnceLock<File>, name: &str) -> io::Result<Option<&'a File>> {
        if cell.get().is_none() {
            match self.shared.dir.file(name) {
                Ok(file) => {
                    // Another thread may have been faster; its handle is equivalent.
                    let _ = cell.set(file);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(cell.get())
    }
}

impl Events {
    /// Adds an event. Returns false if a limit is reached.
    fn take(&mut self, event: Event, bytes: &mut u64, wanted: EventRange) -> bool {
        if event.size() == 0 || event.time <= wanted.after {
            return true;
        }
        let full = *bytes + event.size() > wanted.bytes_max || self.events.len() >= wanted.events_max;
        if full && !self.events.is_empty() {
            self.more = true;
            return false;
        }
        *bytes += event.size();
        self.events.push(event);
        true
    }
}

/// Reads up to `size` bytes; fewer if the file shrinks meanwhile.
fn read_at(file: &File, offset: u64, size: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; size];
    let mut got = 0;
    while got < size {
        match file.read_at(&mut bytes[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// Existing records. Without a file they are synthesized: one for every piece of the log, at the first milliseconds since
/// 1970, so that a reader by time still gets every byte.
struct Index<'a> {
    file: Option<&'a File>,
    records: u64,
}

impl Index<'_> {
    fn record(&self, at: u64) -> io::Result<Option<IndexRecord>> {
        let Some(file) = self.file else { return Ok(Some(synthetic_record(at))) };
        let bytes = read_at(file, at * index::SIZE as u64, index::SIZE)?;
        Ok(bytes.first_chunk().and_then(IndexRecord::decode))
    }

    /// Reads up to [`index::CHUNK_RECORDS`] records.
    fn chunk(&self, at: u64) -> io::Result<Vec<Option<IndexRecord>>> {
        let count = (self.records - at).min(index::CHUNK_RECORDS);
        let Some(file) = self.file else {
            return Ok((at..at + count).map(|at| Some(synthetic_record(at))).collect());
        };
        let size = usize::try_from(count).unwrap_or(0) * index::SIZE;
        let bytes = read_at(file, at * index::SIZE as u64, size)?;
        Ok(bytes.as_chunks().0.iter().map(IndexRecord::decode).collect())
    }

    /// Finds the first record at `time` or later. In an index that is not in order the result is arbitrary.
    fn first_record_at(&self, time: i64) -> io::Result<u64> {
        let (mut low, mut high) = (0, self.records);
        while low < high {
            let middle = low + (high - low) / 2;
            let earlier = match self.next_valid(middle, high)? {
                Some(record) => record.time < time,
                None => false,
            };
            if earlier {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    fn next_valid(&self, from: u64, to: u64) -> io::Result<Option<IndexRecord>> {
        for at in from..to.min(from.saturating_add(DAMAGED_RECORDS_MAX)) {
            if let Some(record) = self.record(at)? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }
}

fn synthetic_record(at: u64) -> IndexRecord {
    let time = i64::try_from(at).unwrap_or(i64::MAX - 1) + 1;
    IndexRecord { offset: at.saturating_mul(EVENT_MAX), time, before: None, kind: IndexRecordKind::Event }
}
