//! Source of random ids: the operating system, or a seed in the simulation.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use uuid::{Builder, Uuid};

use super::error::DbError;

/// Generator of UUIDv4, the only version that every client accepts.
#[derive(Clone, Debug)]
pub(super) struct Ids {
    source: IdSource,
    drawn_in_order: Arc<AtomicU64>,
}

#[derive(Clone, Debug)]
enum IdSource {
    System,
    Seeded(Arc<Mutex<u64>>),
}

impl Ids {
    pub(super) fn system() -> Self {
        Self::from_source(IdSource::System)
    }

    pub(super) fn seeded(seed: u64) -> Self {
        Self::from_source(IdSource::Seeded(Arc::new(Mutex::new(seed))))
    }

    fn from_source(source: IdSource) -> Self {
        Self { source, drawn_in_order: Arc::default() }
    }

    pub(super) fn generate(&self) -> Result<Uuid, DbError> {
        Ok(Builder::from_random_bytes(self.bytes()?).into_uuid())
    }

    /// Returns an id that sorts after all ordered ids of this process. Rows written in one unit share their time, so
    /// only their ids preserve the order in which they were written.
    pub(super) fn generate_ordered(&self) -> Result<Uuid, DbError> {
        let mut bytes = self.bytes()?;
        let next = self.drawn_in_order.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        // The six bytes before the version; the rest distinguishes processes.
        bytes[..6].copy_from_slice(&next[2..]);
        Ok(Builder::from_random_bytes(bytes).into_uuid())
    }

    fn bytes(&self) -> Result<[u8; 16], DbError> {
        let mut bytes = [0_u8; 16];
        match &self.source {
            IdSource::System => {
                getrandom::fill(&mut bytes).map_err(|error| DbError::Random { source: Arc::new(error) })?;
            }
            IdSource::Seeded(state) => {
                let mut state = state.lock();
                let (high, low) = (split_mix(&mut state), split_mix(&mut state));
                bytes[..8].copy_from_slice(&high.to_be_bytes());
                bytes[8..].copy_from_slice(&low.to_be_bytes());
            }
        }
        Ok(bytes)
    }
}

/// SplitMix64: small, and every seed gives a full-period sequence.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::Ids;

    #[test]
    fn ordered_ids_sort_in_generation_order() {
        for ids in [Ids::system(), Ids::seeded(7)] {
            let drawn: Vec<_> = (0..300).map(|_| ids.generate_ordered().expect("random bytes")).collect();
            assert!(drawn.is_sorted(), "{drawn:?}");
            assert!(drawn.iter().all(|id| id.get_version_num() == 4), "{drawn:?}");
        }
    }
}
