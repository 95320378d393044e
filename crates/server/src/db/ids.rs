//! Where random ids come from: the operating system, or a seed in the simulation.

use std::sync::Arc;

use parking_lot::Mutex;
use uuid::{Builder, Uuid};

use super::error::DbError;

/// Makes UUIDv4, the only version every client accepts.
#[derive(Clone, Debug)]
pub(super) enum Ids {
    System,
    Seeded(Arc<Mutex<u64>>),
}

impl Ids {
    pub(super) fn seeded(seed: u64) -> Self {
        Self::Seeded(Arc::new(Mutex::new(seed)))
    }

    pub(super) fn draw(&self) -> Result<Uuid, DbError> {
        let mut bytes = [0_u8; 16];
        match self {
            Self::System => {
                getrandom::fill(&mut bytes).map_err(|error| DbError::Random { source: Arc::new(error) })?;
            }
            Self::Seeded(state) => {
                let mut state = state.lock();
                let (high, low) = (split_mix(&mut state), split_mix(&mut state));
                bytes[..8].copy_from_slice(&high.to_be_bytes());
                bytes[8..].copy_from_slice(&low.to_be_bytes());
            }
        }
        Ok(Builder::from_random_bytes(bytes).into_uuid())
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
