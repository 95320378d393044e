//! Tombstones of removed tasks: nothing may start under their ids again.

use std::collections::{BTreeMap, HashMap};

use windlass_model::id::SubmissionId;

/// Limits of the tombstones: no server remembers a submission for longer.
pub(super) const TOMBSTONES_MAX: usize = 100_000;
pub(super) const AGE_US_MAX: i64 = 30 * 24 * 3600 * 1_000_000;

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    epochs: HashMap<SubmissionId, (i64, (i64, u64))>,
    /// Ids by age, oldest first.
    order: BTreeMap<(i64, u64), SubmissionId>,
    dug: u64,
}

impl Tombstones {
    /// Adds a tombstone; drops the oldest when there are too many.
    pub(super) fn insert(&mut self, id: SubmissionId, epoch: i64, at: i64) {
        self.dug += 1;
        let place = (at, self.dug);
        if let Some((_, old)) = self.epochs.insert(id, (epoch, place)) {
            self.order.remove(&old);
        }
        self.order.insert(place, id);
        while let Some((&oldest, &buried)) = self.order.first_key_value() {
            if self.order.len() <= TOMBSTONES_MAX && oldest.0 >= at.saturating_sub(AGE_US_MAX) {
                break;
            }
            self.order.remove(&oldest);
            self.epochs.remove(&buried);
        }
    }

    /// Epoch of the removal.
    pub(super) fn epoch(&self, id: SubmissionId) -> Option<i64> {
        self.epochs.get(&id).map(|(epoch, _)| *epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> SubmissionId {
        SubmissionId(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn the_oldest_tombstones_are_dropped() {
        let mut tombstones = Tombstones::default();
        for n in 0..=TOMBSTONES_MAX as u128 {
            tombstones.insert(id(n), 1, 5);
        }
        assert_eq!(tombstones.epoch(id(0)), None);
        assert_eq!(tombstones.epoch(id(1)), Some(1));
        tombstones.insert(id(1), 7, AGE_US_MAX + 6);
        assert_eq!(tombstones.epoch(id(1)), Some(7));
        assert_eq!(tombstones.epoch(id(2)), None, "too old");
        assert_eq!(tombstones.order.len(), 1);
    }
}
