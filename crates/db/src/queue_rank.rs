//! Rank of a run in the queue, as one number: the column `priority` of runs and jobs, by which the queue is sorted.

use windlass_model::config::run::RunClass;

/// Distance between the classes; priorities are from 0 to 100.
const CLASS_DISTANCE: i64 = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRank {
    pub class: RunClass,
    /// From 0 to 100.
    pub priority: u32,
}

impl QueueRank {
    pub const fn to_stored(self) -> i64 {
        let class = match self.class {
            RunClass::Idle => -CLASS_DISTANCE,
            RunClass::Normal => 0,
            RunClass::Urgent => CLASS_DISTANCE,
        };
        class + self.priority as i64
    }

    pub fn from_stored(stored: i64) -> Self {
        let class = match stored.div_euclid(CLASS_DISTANCE) {
            ..=-1 => RunClass::Idle,
            0 => RunClass::Normal,
            1.. => RunClass::Urgent,
        };
        let priority = u32::try_from(stored.rem_euclid(CLASS_DISTANCE)).unwrap_or_default();
        Self { class, priority }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_outweighs_every_priority_and_ranks_are_read_as_written() {
        let mut ranks = Vec::new();
        for class in [RunClass::Idle, RunClass::Normal, RunClass::Urgent] {
            for priority in [0, 1, 100] {
                let rank = QueueRank { class, priority };
                assert_eq!(QueueRank::from_stored(rank.to_stored()), rank);
                ranks.push(rank.to_stored());
            }
        }
        assert!(ranks.is_sorted(), "{ranks:?}");
    }
}
