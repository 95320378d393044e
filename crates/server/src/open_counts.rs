//! Counts of the streams that each user has open, with a limit.

use std::{collections::HashMap, fmt::Debug, hash::Hash};

use parking_lot::Mutex;

/// Number of open streams by owner. Owners without any occupy no memory.
#[derive(Debug)]
pub(crate) struct OpenCounts<K>(Mutex<Option<HashMap<K, usize>>>);

/// One open stream of an owner, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenGuard<K: Eq + Hash + 'static> {
    counts: &'static OpenCounts<K>,
    owner: K,
}

impl<K: Clone + Eq + Hash> OpenCounts<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Counts one more for the owner, or returns `None` when the owner has `limit` already.
    pub(crate) fn open(&'static self, owner: K, limit: usize) -> Option<OpenGuard<K>> {
        let mut counts = self.0.lock();
        let count = counts.get_or_insert_default().entry(owner.clone()).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(OpenGuard { counts: self, owner })
    }
}

impl<K: Eq + Hash> Drop for OpenGuard<K> {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        let Some(counts) = counts.as_mut() else { return };
        if let Some(count) = counts.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.owner);
            }
        }
    }
}
