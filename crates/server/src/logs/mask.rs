//! Masks the values of secrets in logs when they are read: each byte becomes an asterisk.
//!
//! The store has what the job wrote. A masked text has the same length, so offsets stay valid. A value that crosses the
//! border of the range is found by reading the bytes before and after it. At the end of a log that still grows, a
//! possible beginning of a value is held back briefly, until the bytes after it are known.

use std::{collections::HashMap, sync::Arc};

use aho_corasick::AhoCorasick;
use parking_lot::Mutex;
use windlass_model::id::ProjectId;

use super::{Log, LogChunk, LogError, LogRange, LogStore};
use crate::{
    db::{
        Db,
        secrets::{self, SecretsState},
    },
    encryption::{AssociatedData, Keyring},
};

/// Shorter values are common words: masking them would make the log unreadable.
const BYTES_MIN: usize = 6;
/// Of values with several lines, lines of at least this length are also masked individually, because a log may indent
/// them.
const LINE_BYTES_MIN: usize = 16;
/// Minimum length of the beginning of a value that is masked at the end of a log, if it is at least half of the value:
/// anything shorter may be a common word.
const PARTIAL_BYTES_MIN: usize = 4;
const PROJECTS_MAX: usize = 1000;
const CHUNKS_MAX: usize = 4096;

/// Finds and masks values.
#[derive(Debug)]
pub struct Mask {
    values: Vec<Vec<u8>>,
    finder: AhoCorasick,
    /// Length of the longest value.
    len_max: usize,
}

impl Mask {
    /// Returns `None` if there is nothing to mask.
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut values: Vec<Vec<u8>> = Vec::new();
        for secret in secrets {
            let secret = secret.trim();
            if secret.len() >= BYTES_MIN {
                values.push(secret.into());
            }
            if secret.contains('\n') {
                let lines = secret.lines().map(str::trim).filter(|line| line.len() >= LINE_BYTES_MIN);
                values.extend(lines.map(|line| line.as_bytes().to_vec()));
            }
        }
        values.sort_unstable();
        values.dedup();
        let len_max = values.iter().map(Vec::len).max()?;
        // Fails only if the patterns do not fit into memory.
        let finder = AhoCorasick::new(&values).ok()?;
        Some(Self { values, finder, len_max })
    }

    /// Masks every value in `text`.
    pub fn apply(&self, text: &mut [u8]) {
        let found: Vec<_> = self.finder.find_overlapping_iter(&*text).map(|found| found.range()).collect();
        for range in found {
            text[range].fill(b'*');
        }
    }

    /// The longest beginning of a value at the end of `text`: its length, and that of the value.
    fn partial_len(&self, text: &[u8]) -> (usize, usize) {
        self.values.iter().map(|value| (begun(value, text), value.len())).max().unwrap_or_default()
    }

    /// Returns whether the first bytes of `text` may be the rest of a value.
    fn may_continue_value(&self, text: &[u8]) -> bool {
        let ends = |value: &Vec<u8>| {
            (1..value.len()).any(|at| {
                let rest = &value[at..];
                text.starts_with(&rest[..rest.len().min(text.len())])
            })
        };
        !text.is_empty() && self.values.iter().any(ends)
    }

    /// Reads pieces and masks values in them, including values that extend beyond the range.
    pub async fn read(
        &self,
        store: &dyn LogStore,
        log: &Log,
        range: LogRange,
    ) -> Result<MaskedChunks, LogError> {
        let mut pieces = store.read(log, range).await?;
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|at| pieces[*at].offset);
        let (Some(first), Some(last)) = (order.first(), order.last()) else {
            return Ok(MaskedChunks { pieces, begun: PartialValue::default() });
        };
        let (begin, end) = (pieces[*first].offset, pieces[*last].end());
        let mut text: Vec<u8> = Vec::new();
        for at in &order {
            // Pieces are contiguous; across a gap no value would be found.
            let from = usize::try_from(pieces[*at].offset - begin).unwrap_or(usize::MAX);
            text.resize(from.max(text.len()), 0);
            text.extend_from_slice(&pieces[*at].bytes);
        }
        let around = (self.len_max - 1) as u64;
        let mut whole = if begin > 0 && self.may_continue_value(&text) {
            read_bytes(store, log, begin.saturating_sub(around), begin).await?
        } else {
            Vec::new()
        };
        let start = whole.len();
        whole.append(&mut text);
        let mut begun = PartialValue::default();
        if self.partial_len(&whole).0 > 0 {
            let after = read_bytes(store, log, end, end + around).await?;
            whole.extend_from_slice(&after);
            let (len, of) = self.partial_len(&whole);
            // Either more bytes follow than any value is long, or the log ends within this value.
            begun = PartialValue { len, of, left: len.saturating_sub(after.len()) };
        }
        self.apply(&mut whole);
        for at in order {
            let piece = &mut pieces[at];
            let from = start + usize::try_from(piece.offset - begin).unwrap_or(usize::MAX);
            let len = piece.bytes.len();
            piece.bytes.copy_from_slice(&whole[from..from + len]);
        }
        Ok(MaskedChunks { pieces, begun })
    }
}

/// A beginning of a value at the present end of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PartialValue {
    len: usize,
    /// Length of the value.
    of: usize,
    /// Number of bytes of the beginning that are in the requested range.
    left: usize,
}

/// Pieces with masked values.
#[derive(Debug)]
pub struct MaskedChunks {
    pub pieces: Vec<LogChunk>,
    begun: PartialValue,
}

impl MaskedChunks {
    /// Removes a possible beginning of a value, for readers that can receive it later. The pieces must be in order.
    pub fn hold_back_partial(&mut self) {
        let mut left = self.begun.left;
        while left > 0
            && let Some(last) = self.pieces.last_mut()
        {
            let cut = left.min(last.bytes.len());
            last.bytes.truncate(last.bytes.len() - cut);
            left -= cut;
            if last.bytes.is_empty() {
                self.pieces.pop();
            }
        }
    }

    /// Masks the beginning of a value if it is at least half of it, for readers that query by time and cannot receive
    /// it later.
    pub fn hide(&mut self) {
        let PartialValue { len, of, mut left } = self.begun;
        if len < PARTIAL_BYTES_MIN || 2 * len < of {
            return;
        }
        let mut newest: Vec<&mut LogChunk> = self.pieces.iter_mut().collect();
        newest.sort_by_key(|piece| std::cmp::Reverse(piece.offset));
        for piece in newest {
            let from = piece.bytes.len().saturating_sub(left);
            left = left.saturating_sub(piece.bytes.len());
            piece.bytes[from..].fill(b'*');
        }
    }
}

/// Number of bytes at the end of `text` that are the beginning of the value.
fn begun(value: &[u8], text: &[u8]) -> usize {
    let most = text.len().min(value.len() - 1);
    (1..=most).rev().find(|len| text.ends_with(&value[..*len])).unwrap_or(0)
}

/// Reads the bytes of a log between two offsets.
async fn read_bytes(store: &dyn LogStore, log: &Log, from: u64, to: u64) -> Result<Vec<u8>, LogError> {
    let mut found = Vec::new();
    loop {
        let at = from + found.len() as u64;
        let left = usize::try_from(to.saturating_sub(at)).unwrap_or(0);
        if left == 0 {
            return Ok(found);
        }
        let range = LogRange {
            from: Some(at),
            after: None,
            until: None,
            descending: false,
            pieces_max: CHUNKS_MAX,
            bytes_max: left,
        };
        let pieces = store.read(log, range).await?;
        if pieces.is_empty() {
            return Ok(found);
        }
        for piece in pieces {
            found.extend_from_slice(&piece.bytes);
        }
        found.truncate(usize::try_from(to - from).unwrap_or(usize::MAX));
    }
}

struct CachedMask {
    /// State of the secrets from which the mask was made.
    state: SecretsState,
    mask: Option<Arc<Mask>>,
}

/// Cache of the masks of all projects. Cheap to clone.
#[derive(Clone)]
pub struct MaskCache(Arc<Inner>);

struct Inner {
    db: Db,
    keys: Arc<Keyring>,
    is_on: bool,
    known: Mutex<HashMap<ProjectId, CachedMask>>,
}

impl MaskCache {
    pub fn new(db: Db, keys: Arc<Keyring>, is_on: bool) -> Self {
        Self(Arc::new(Inner { db, keys, is_on, known: Mutex::default() }))
    }

    /// Returns the mask for the logs of a project. If it cannot be determined, the read fails and shows nothing.
    pub async fn of(&self, log: &Log) -> Result<Option<Arc<Mask>>, LogError> {
        let inner = &self.0;
        if !inner.is_on {
            return Ok(None);
        }
        let failed =
            |source| LogError::Io { what: "find the secrets to mask in", submission: log.submission, source };
        // A run may print a secret right after it was stored, so the mask is never older than the last change.
        let state = secrets::state(&inner.db, log.project)
            .await
            .map_err(|error| failed(std::io::Error::other(error)))?;
        if let Some(known) = inner.known.lock().get(&log.project).filter(|known| known.state == state) {
            return Ok(known.mask.clone());
        }
        let stored = secrets::list(&inner.db, log.project)
            .await
            .map_err(|error| failed(std::io::Error::other(error)))?;
        let mut values = Vec::with_capacity(stored.len());
        for secret in stored {
            let belongs = AssociatedData {
                table: "secrets",
                owner: secret.project_id.0,
                name: &secret.name,
                version: secret.version,
            };
            let plain = inner.keys.open_sealed(&belongs, &secret.sealed);
            let plain = plain.map_err(|error| failed(std::io::Error::other(error)))?;
            values.push(String::from_utf8_lossy(&plain).into_owned());
        }
        let mask = Mask::new(values.iter().map(String::as_str)).map(Arc::new);
        let mut known = inner.known.lock();
        if known.len() >= PROJECTS_MAX {
            known.clear();
        }
        known.insert(log.project, CachedMask { state, mask: mask.clone() });
        Ok(mask)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn masked(mask: &Mask, text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        mask.apply(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn secret_values_are_masked_with_equal_length_and_short_ones_are_not() {
        let mask = Mask::new(["hunter22", "abcdef", "cdefgh", "short", "  padded-value\n"]).unwrap();
        for (text, shown) in [
            ("a hunter22 b", "a ******** b"),
            ("hunter22hunter22", "****************"),
            ("abcdefgh", "********"),
            ("hunter2 short", "hunter2 short"),
            ("padded-value", "************"),
        ] {
            assert_eq!(masked(&mask, text), shown);
        }
        assert!(Mask::new(["short", ""]).is_none());
    }

    /// `MASK_MB=50 cargo nextest run … a_log_is_masked_in_linear_time --no-capture` prints the duration.
    #[test]
    fn a_log_is_masked_in_linear_time() {
        let megabytes: usize = std::env::var("MASK_MB").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
        let values: Vec<String> =
            (0..50).map(|n| format!("secret-value-number-{n:02}-{:032x}", n * 7919)).collect();
        let mask = Mask::new(values.iter().map(String::as_str)).unwrap();
        let line = b"2026-11-17T10:00:00 step 1200 loss=0.1234 lr=3e-4 secret-value tokens/s=120034\n";
        let mut text = line.repeat((megabytes << 20) / line.len());
        let at = text.len() / 2 / (64 * 1024) * (64 * 1024) + 100;
        text[at..at + values[7].len()].copy_from_slice(values[7].as_bytes());
        let began = Instant::now();
        // In pieces, as readers do.
        for piece in text.chunks_mut(64 * 1024) {
            mask.apply(piece);
            std::hint::black_box(mask.partial_len(piece));
        }
        println!("{megabytes} MB in {} ms", began.elapsed().as_millis());
        assert!(text[at..at + values[7].len()].iter().all(|byte| *byte == b'*'));
    }

    #[test]
    fn each_long_line_of_a_multi_line_secret_is_masked() {
        let mask =
            Mask::new(["-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nx=\n-----END KEY-----"]).unwrap();
        assert_eq!(
            masked(&mask, "  MIIEvQIBADANBgkqhkiG9w0\r\n  x=\r\n"),
            "  ***********************\r\n  x=\r\n"
        );
    }

    fn masked_pieces(texts: &[&str], begun: PartialValue) -> MaskedChunks {
        let mut offset = 0;
        let mut pieces = Vec::new();
        for text in texts {
            pieces.push(LogChunk { offset, at: 1, bytes: (*text).into() });
            offset += text.len() as u64;
        }
        MaskedChunks { pieces, begun }
    }

    fn texts(masked: &MaskedChunks) -> Vec<String> {
        masked.pieces.iter().map(|piece| String::from_utf8(piece.bytes.clone()).unwrap()).collect()
    }

    #[test]
    fn a_partial_secret_at_the_end_is_detected() {
        let mask = Mask::new(["hunter22"]).unwrap();
        for (text, begun) in
            [("a hunter", 6), ("hunter2", 7), ("hunter22", 0), ("a h", 1), ("a b", 0), ("", 0)]
        {
            assert_eq!(mask.partial_len(text.as_bytes()).0, begun, "{text}");
        }
        assert!(
            mask.may_continue_value(b"unte")
                && mask.may_continue_value(b"2 b")
                && !mask.may_continue_value(b"b")
        );
    }

    #[test]
    fn a_partial_secret_is_held_back_or_masked_across_chunks() {
        let begun = |len, left| PartialValue { len, of: 8, left };
        for (begun, held, hidden) in [
            (begun(6, 6), vec!["a "], vec!["a ***", "***"]),
            (begun(6, 3), vec!["a hun"], vec!["a hun", "***"]),
            (begun(3, 3), vec!["a hun"], vec!["a hun", "ter"]),
            (begun(6, 0), vec!["a hun", "ter"], vec!["a hun", "ter"]),
        ] {
            let mut masked = masked_pieces(&["a hun", "ter"], begun);
            masked.hold_back_partial();
            assert_eq!(texts(&masked), held, "{begun:?}");
            let mut masked = masked_pieces(&["a hun", "ter"], begun);
            masked.hide();
            assert_eq!(texts(&masked), hidden, "{begun:?}");
        }
    }
}
