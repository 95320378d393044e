//! Records of an index file: the time at which the bytes from an offset on arrived.
//!
//! A record is written before its bytes. So a byte in the log always has its record, and a record whose bytes never
//! arrived is an empty event.

/// Size of one record in bytes.
pub(super) const SIZE: usize = 28;
/// Maximum number of records scanned before an index counts as lost. A writer adds at most 100 a second.
pub(super) const SCAN_MAX: u64 = 1 << 18;
/// Number of records read at once.
pub(super) const CHUNK_RECORDS: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexRecordKind {
    /// Bytes from `offset` up to the next record's offset arrived at `time`.
    Event,
    /// The stream ended at `offset`.
    Complete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexRecord {
    pub(super) offset: u64,
    /// Milliseconds since 1970.
    pub(super) time: i64,
    /// CRC-32 of the bytes of the previous event, if the writer knows it.
    pub(super) before: Option<u32>,
    pub(super) kind: IndexRecordKind,
}

impl IndexRecord {
    pub(super) fn encode(&self) -> [u8; SIZE] {
        let mut out = [0; SIZE];
        out[0..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..16].copy_from_slice(&self.time.to_le_bytes());
        out[16..20].copy_from_slice(&self.before.unwrap_or_default().to_le_bytes());
        out[20] = match self.kind {
            IndexRecordKind::Event => 1,
            IndexRecordKind::Complete => 2,
        };
        out[21] = u8::from(self.before.is_some());
        let crc = crc32fast::hash(&out[..24]);
        out[24..28].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes a record. Returns `None` if it is torn, corrupted or was never a record.
    pub(super) fn decode(bytes: &[u8; SIZE]) -> Option<Self> {
        let (body, crc) = bytes.split_at(24);
        if crc != crc32fast::hash(body).to_le_bytes() {
            return None;
        }
        let kind = match bytes[20] {
            1 => IndexRecordKind::Event,
            2 => IndexRecordKind::Complete,
            _ => return None,
        };
        let before = u32::from_le_bytes(bytes[16..20].try_into().ok()?);
        Some(Self {
            offset: u64::from_le_bytes(bytes[0..8].try_into().ok()?),
            time: i64::from_le_bytes(bytes[8..16].try_into().ok()?),
            before: (bytes[21] != 0).then_some(before),
            kind,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_index_record_round_trips_through_its_encoding(offset: u64, time: i64, before: Option<u32>, complete: bool) {
            let kind = if complete { IndexRecordKind::Complete } else { IndexRecordKind::Event };
            let record = IndexRecord { offset, time, before, kind };
            prop_assert_eq!(IndexRecord::decode(&record.encode()), Some(record));
        }

        #[test]
        fn f35_a_flipped_bit_in_an_index_record_is_detected(offset: u64, time: i64, bit in 0..SIZE * 8) {
            let mut bytes = IndexRecord { offset, time, before: Some(7), kind: IndexRecordKind::Event }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(IndexRecord::decode(&bytes), None);
        }
    }

    #[test]
    fn zeros_are_not_a_valid_index_record() {
        assert_eq!(IndexRecord::decode(&[0; SIZE]), None);
    }
}
