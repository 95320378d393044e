//! One log in a bucket: its known objects, and the appends that are not written yet.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::{Bucket, HEADER_BYTES, LogChunk, LogRange, OBJECT_BYTES_MAX, flush_delay};

/// Maximum number of lists for an object that must exist before a write fails.
const LIST_ATTEMPTS_MAX: u32 = 16;
const LIST_RETRY_DELAY: Duration = Duration::from_millis(50);

pub(super) struct ObjectLog {
    bucket: Arc<dyn Bucket>,
    prefix: String,
    known: Mutex<ObjectLogState>,
    /// Serializes writes and lists.
    lock: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct ObjectLogState {
    objects: Arc<Vec<Object>>,
    listed: Option<Instant>,
    /// Pieces after the last object, without gaps.
    waiting: VecDeque<LogChunk>,
    bytes: usize,
    is_timed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Object {
    offset: u64,
    len: u64,
}

impl Object {
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

impl ObjectLogState {
    fn written(&self) -> u64 {
        self.objects.last().map_or(0, Object::end)
    }

    fn end(&self) -> u64 {
        self.waiting.back().map_or_else(|| self.written(), LogChunk::end)
    }

    /// Drops buffered bytes that are already in the bucket.
    fn drop_written(&mut self) {
        let written = self.written();
        while let Some(first) = self.waiting.front_mut() {
            let done = usize::try_from(written.saturating_sub(first.offset)).unwrap_or(usize::MAX);
            if done < first.bytes.len() {
                first.bytes.drain(..done);
                first.offset += done as u64;
                break;
            }
            self.waiting.pop_front();
        }
        self.bytes = self.waiting.iter().map(|piece| piece.bytes.len()).sum();
    }
}

impl ObjectLog {
    pub(super) fn new(bucket: Arc<dyn Bucket>, prefix: String) -> Self {
        Self { bucket, prefix, known: Mutex::default(), lock: tokio::sync::Mutex::default() }
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.known.lock().waiting.is_empty()
    }

    /// Clears all state. Drops the buffered pieces too: without the bytes before them, their offsets are invalid.
    pub(super) fn reset(&self) {
        let mut known = self.known.lock();
        *known = ObjectLogState { is_timed: known.is_timed, ..ObjectLogState::default() };
    }

    /// Known end of the log.
    pub(super) async fn end(&self) -> io::Result<u64> {
        if self.known.lock().listed.is_none() {
            return self.refreshed_end().await;
        }
        Ok(self.known.lock().end())
    }

    /// End of the log after a new list. With buffered appends, the known end is the latest.
    pub(super) async fn refreshed_end(&self) -> io::Result<u64> {
        if !self.has_pending() {
            let _lock = self.lock.lock().await;
            self.refresh_list().await?;
        }
        Ok(self.known.lock().end())
    }

    /// Appends the new part of these bytes, or nothing if the log ends before `offset`, and returns the end of the log.
    pub(super) async fn add(self: &Arc<Self>, offset: u64, at: i64, bytes: &[u8]) -> io::Result<u64> {
        let (end, is_full, pause) = {
            let mut known = self.known.lock();
            let end = known.end();
            let Some(old) = end.checked_sub(offset) else { return Ok(end) };
            let old = usize::try_from(old).unwrap_or(usize::MAX);
            if let Some(fresh) = bytes.get(old..).filter(|fresh| !fresh.is_empty()) {
                known.bytes += fresh.len();
                known.waiting.push_back(LogChunk { offset: end, at, bytes: fresh.to_vec() });
            }
            let is_full = known.bytes >= OBJECT_BYTES_MAX;
            let starts = !is_full && !known.waiting.is_empty() && !known.is_timed;
            known.is_timed |= starts;
            (known.end(), is_full, starts.then(|| flush_delay(known.objects.len())))
        };
        if is_full {
            // A writer that is faster than the bucket waits here.
            self.write().await?;
        }
        if let Some(pause) = pause {
            let object_log = Arc::downgrade(self);
            tokio::spawn(async move {
                sleep(pause).await;
                Self::flush_delayed(&object_log).await;
            });
        }
        Ok(end)
    }

    async fn flush_delayed(object_log: &Weak<Self>) {
        let Some(object_log) = object_log.upgrade() else { return };
        object_log.known.lock().is_timed = false;
        if let Err(error) = object_log.write().await {
            // The bytes stay buffered: the next append or sync retries.
            tracing::warn!(log = %object_log.prefix, %error, "failed to write a piece of a log");
        }
    }

    /// Writes everything that is buffered.
    pub(super) async fn write(&self) -> io::Result<()> {
        let _lock = self.lock.lock().await;
        let mut late = 0;
        while let Some((offset, object)) = self.next_object() {
            let len = (object.len() - HEADER_BYTES) as u64;
            if self.bucket.link_new_file(&self.name(offset), object).await? {
                let mut known = self.known.lock();
                if known.written() == offset {
                    Arc::make_mut(&mut known.objects).push(Object { offset, len });
                }
                known.drop_written();
            } else {
                self.refresh_list().await?;
                if self.known.lock().written() > offset {
                    late = 0;
                    continue;
                }
                // Another writer is creating the object: a store may reject this write before it lists the other.
                late += 1;
                if late > LIST_ATTEMPTS_MAX {
                    let what = format!("an object of {} exists but is not listed", self.prefix);
                    return Err(io::Error::other(what));
                }
                sleep(LIST_RETRY_DELAY).await;
            }
        }
        Ok(())
    }

    /// The next object to write: as many buffered bytes as fit.
    fn next_object(&self) -> Option<(u64, Vec<u8>)> {
        let known = self.known.lock();
        let first = known.waiting.front()?;
        let mut bytes = Vec::with_capacity(known.bytes.min(OBJECT_BYTES_MAX));
        for piece in &known.waiting {
            let room = OBJECT_BYTES_MAX - bytes.len();
            bytes.extend_from_slice(&piece.bytes[..piece.bytes.len().min(room)]);
        }
        Some((first.offset, encode_object(first.offset, first.at, &bytes)))
    }

    fn name(&self, offset: u64) -> String {
        format!("{}{offset:016x}", self.prefix)
    }

    /// Lists the objects after the last known one.
    async fn refresh_list(&self) -> io::Result<()> {
        loop {
            let last = self.known.lock().objects.last().map(|object| self.name(object.offset));
            let page = self.bucket.list(&self.prefix, last.as_deref()).await?;
            let mut known = self.known.lock();
            for (name, size) in &page.objects {
                let offset =
                    name.strip_prefix(&self.prefix).and_then(|hex| u64::from_str_radix(hex, 16).ok());
                let (Some(offset), Some(len)) = (offset, size.checked_sub(HEADER_BYTES as u64)) else {
                    continue;
                };
                let end = known.written();
                if offset > end {
                    let what = format!("an object of {} is missing at offset {end}", self.prefix);
                    return Err(io::Error::new(ErrorKind::InvalidData, what));
                }
                if offset == end {
                    Arc::make_mut(&mut known.objects).push(Object { offset, len });
                }
            }
            known.listed = Some(Instant::now());
            known.drop_written();
            if !page.more {
                return Ok(());
            }
        }
    }

    pub(super) async fn read(&self, range: LogRange) -> io::Result<Vec<LogChunk>> {
        let is_old = {
            let known = self.known.lock();
            let old = |listed: Instant| listed.elapsed() >= self.bucket.fresh_for();
            known.waiting.is_empty() && known.listed.is_none_or(old)
        };
        if is_old {
            let _lock = self.lock.lock().await;
            self.refresh_list().await?;
        }
        let (objects, waiting) = {
            let known = self.known.lock();
            (Arc::clone(&known.objects), known.waiting.iter().cloned().collect::<Vec<_>>())
        };
        let view = LogSnapshot { object_log: self, objects: &objects, waiting: &waiting };
        view.read(range).await
    }
}

/// A log at one moment: its objects, then the buffered pieces.
struct LogSnapshot<'a> {
    object_log: &'a ObjectLog,
    objects: &'a [Object],
    waiting: &'a [LogChunk],
}

impl LogSnapshot<'_> {
    fn len(&self) -> usize {
        self.objects.len() + self.waiting.len()
    }

    fn offset(&self, at: usize) -> u64 {
        self.objects
            .get(at)
            .map_or_else(|| self.waiting[at - self.objects.len()].offset, |object| object.offset)
    }

    fn end(&self, at: usize) -> u64 {
        self.objects.get(at).map_or_else(|| self.waiting[at - self.objects.len()].end(), Object::end)
    }

    async fn time(&self, at: usize) -> io::Result<i64> {
        let Some(object) = self.objects.get(at) else { return Ok(self.waiting[at - self.objects.len()].at) };
        let head = self.get(object.offset, Some(HEADER_BYTES)).await?;
        let time = head.get(..8).and_then(|time| time.try_into().ok()).map(i64::from_be_bytes);
        time.ok_or_else(|| damaged_object_error(object.offset))
    }

    async fn piece(&self, at: usize) -> io::Result<LogChunk> {
        match self.objects.get(at) {
            Some(object) => decode_object(object.offset, &self.get(object.offset, None).await?),
            None => Ok(self.waiting[at - self.objects.len()].clone()),
        }
    }

    async fn get(&self, offset: u64, limit: Option<usize>) -> io::Result<Vec<u8>> {
        let got = self.object_log.bucket.get(&self.object_log.name(offset), limit).await?;
        got.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "an object of the log is missing"))
    }

    /// Index of the first piece after this time. Times never decrease.
    async fn seek(&self, time: i64) -> io::Result<usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.time(middle).await? <= time { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// Index of the first piece for which `before` is false.
    fn partition_point(&self, before: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if before(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    async fn read(&self, range: LogRange) -> io::Result<Vec<LogChunk>> {
        let mut low = match range.after {
            Some(after) => self.seek(after).await?,
            None => 0,
        };
        let mut high = match range.until {
            Some(until) => self.seek(until).await?,
            None => self.len(),
        };
        match range.from {
            Some(from) if range.descending => {
                high = high.min(self.partition_point(|at| self.offset(at) < from))
            }
            Some(from) => low = low.max(self.partition_point(|at| self.end(at) <= from)),
            None => {}
        }
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while low < high && taken.len() < range.pieces_max && bytes < range.bytes_max.max(1) {
            let at = if range.descending { high - 1 } else { low };
            let len = usize::try_from(self.end(at) - self.offset(at)).unwrap_or(usize::MAX);
            if !taken.is_empty() && bytes.saturating_add(len) > range.bytes_max {
                break;
            }
            let mut piece = self.piece(at).await?;
            if taken.is_empty() {
                range.cut(&mut piece);
            }
            bytes += piece.bytes.len();
            taken.push(piece);
            if range.descending { high -= 1 } else { low += 1 }
        }
        Ok(taken)
    }
}

fn checksum(offset: u64, at: i64, bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&offset.to_be_bytes());
    sum.update(&at.to_be_bytes());
    sum.update(bytes);
    sum.finalize()
}

fn encode_object(offset: u64, at: i64, bytes: &[u8]) -> Vec<u8> {
    let mut object = Vec::with_capacity(HEADER_BYTES + bytes.len());
    object.extend_from_slice(&at.to_be_bytes());
    object.extend_from_slice(&checksum(offset, at, bytes).to_be_bytes());
    object.extend_from_slice(bytes);
    object
}

fn decode_object(offset: u64, object: &[u8]) -> io::Result<LogChunk> {
    let head = object.split_at_checked(HEADER_BYTES).and_then(|(head, bytes)| {
        let at = i64::from_be_bytes(head.get(..8)?.try_into().ok()?);
        let message = u32::from_be_bytes(head.get(8..)?.try_into().ok()?);
        (message == checksum(offset, at, bytes)).then(|| LogChunk { offset, at, bytes: bytes.to_vec() })
    });
    head.ok_or_else(|| damaged_object_error(offset))
}

fn damaged_object_error(offset: u64) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the chunk at offset {offset} is damaged"))
}
