//! File format of a record: length, checksum, JSON. Unreadable bytes are reported, never guessed.

use super::Record;

/// Length and checksum, four bytes each, little endian.
const HEADER_BYTES: usize = 8;
/// More than any record needs; a longer one is damage.
const RECORD_BYTES_MAX: usize = 64 * 1024;
/// Prefix of every record, which makes the search for the next complete one cheap.
const RECORD_PREFIX: &[u8] = b"{\"seq\":";

/// Contents of a journal file.
#[derive(Debug, Default, PartialEq)]
pub struct JournalContents {
    pub records: Vec<Record>,
    /// Ranges of bytes that are not records although complete records follow, or a complete frame with a wrong
    /// checksum.
    pub damage: Vec<Damage>,
    /// Bytes at the end that never became a record: the writer was killed during the write.
    pub torn_bytes: u64,
    /// The file does not exist.
    pub missing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    pub offset: u64,
    pub len: u64,
    /// Records with a higher sequence number were written after the lost ones.
    pub after_seq: u64,
}

/// Appends one record to `out`.
pub(super) fn encode(record: &Record, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
    let at = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    serde_json::to_writer(&mut *out, record)?;
    let len = u32::try_from(out.len() - at - HEADER_BYTES).unwrap_or(u32::MAX);
    let sum = checksum(len, &out[at + HEADER_BYTES..]);
    out[at..at + 4].copy_from_slice(&len.to_le_bytes());
    out[at + 4..at + HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    Ok(())
}

/// Covers the length as well: a flipped bit in it must not produce a shorter valid record.
fn checksum(len: u32, json: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&len.to_le_bytes());
    hasher.update(json);
    hasher.finalize()
}

/// Decodes the record at the start of `bytes` and returns it with its length.
fn decode(bytes: &[u8]) -> Option<(Record, usize)> {
    let len = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let sum = u32::from_le_bytes(bytes.get(4..HEADER_BYTES)?.try_into().ok()?);
    let end = HEADER_BYTES + usize::try_from(len).ok().filter(|len| *len <= RECORD_BYTES_MAX)?;
    let json = bytes.get(HEADER_BYTES..end)?;
    if !json.starts_with(RECORD_PREFIX) || checksum(len, json) != sum {
        return None;
    }
    Some((serde_json::from_slice(json).ok()?, end))
}

/// Returns whether the bytes could be the start of an incomplete record.
fn is_torn(bytes: &[u8]) -> bool {
    let Some(len) = bytes.get(..4).and_then(|len| len.try_into().ok()).map(u32::from_le_bytes) else {
        return true;
    };
    // A file system may leave zeros where data was never written.
    HEADER_BYTES.saturating_add(len as usize) > bytes.len() || bytes.iter().all(|byte| *byte == 0)
}

/// Returns every complete record, in order, and the damage between them.
pub fn scan(bytes: &[u8]) -> JournalContents {
    let mut reading = JournalContents::default();
    let mut at = 0;
    while at < bytes.len() {
        if let Some((record, len)) = decode(&bytes[at..]) {
            reading.records.push(record);
            at += len;
            continue;
        }
        let lost_at = at;
        let next = (at + 1..bytes.len()).find(|&from| {
            bytes[from..].get(HEADER_BYTES..).is_some_and(|json| json.starts_with(RECORD_PREFIX))
                && decode(&bytes[from..]).is_some()
        });
        at = next.unwrap_or(bytes.len());
        if next.is_none() && is_torn(&bytes[lost_at..]) {
            reading.torn_bytes = (at - lost_at) as u64;
        } else {
            let after_seq = reading.records.last().map_or(0, |record| record.seq);
            reading.damage.push(Damage { offset: lost_at as u64, len: (at - lost_at) as u64, after_seq });
        }
    }
    reading
}
