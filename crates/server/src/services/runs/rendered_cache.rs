//! Cache of finished runs as lists show them. They never change again, and most of any list is finished: each is
//! rendered once, and afterwards only copied.

use std::{collections::HashMap, mem};

use parking_lot::Mutex;
use windlass_api::RenderedJson;
use windlass_model::id::RunId;

use super::render::IncludedJobs;

/// Maximum size of each of the two generations.
const BYTES_MAX: usize = 8 * 1024 * 1024;

/// A run, and which of its jobs are included.
type Key = (RunId, IncludedJobs);

/// Recently requested runs, in two generations: a hit in the old one moves to the young one, and when that is full it
/// becomes the old one.
#[derive(Debug)]
pub(crate) struct RenderedRunCache<T>(Mutex<CacheGenerations<T>>);

#[derive(Debug)]
struct CacheGenerations<T> {
    young: HashMap<Key, RenderedJson<T>>,
    young_bytes: usize,
    old: HashMap<Key, RenderedJson<T>>,
}

impl<T> Default for RenderedRunCache<T> {
    fn default() -> Self {
        Self(Mutex::new(CacheGenerations { young: HashMap::new(), young_bytes: 0, old: HashMap::new() }))
    }
}

impl<T> RenderedRunCache<T> {
    pub(super) fn find(&self, run: RunId, jobs: IncludedJobs) -> Option<RenderedJson<T>> {
        let mut all = self.0.lock();
        if let Some(found) = all.young.get(&(run, jobs)) {
            return Some(found.clone());
        }
        let found = all.old.remove(&(run, jobs))?;
        all.put((run, jobs), found.clone());
        Some(found)
    }

    pub(super) fn keep(&self, run: RunId, jobs: IncludedJobs, shown: RenderedJson<T>) {
        self.0.lock().put((run, jobs), shown);
    }
}

impl<T> CacheGenerations<T> {
    fn put(&mut self, key: Key, shown: RenderedJson<T>) {
        if self.young_bytes > BYTES_MAX {
            self.old = mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += shown.text().len();
        self.young.insert(key, shown);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const ALL: IncludedJobs = IncludedJobs::Newest(None);

    fn text_of(shown: &RenderedJson<String>) -> &str {
        shown.text()
    }

    #[test]
    fn a_cached_run_is_found_only_with_the_same_included_jobs() {
        let cache = RenderedRunCache::<String>::default();
        let run = RunId(Uuid::from_u128(1));
        cache.keep(run, ALL, RenderedJson::new(&"all".to_owned()).unwrap());
        cache.keep(run, IncludedJobs::None, RenderedJson::new(&"none".to_owned()).unwrap());
        assert_eq!(cache.find(run, ALL).as_ref().map(text_of), Some("\"all\""));
        assert_eq!(cache.find(run, IncludedJobs::None).as_ref().map(text_of), Some("\"none\""));
        assert!(cache.find(run, IncludedJobs::Newest(Some(1))).is_none());
        assert!(cache.find(RunId(Uuid::from_u128(2)), ALL).is_none());
    }

    #[test]
    fn the_cache_evicts_unused_runs_and_keeps_used_ones() {
        let cache = RenderedRunCache::<String>::default();
        let id = |n: u32| RunId(Uuid::from_u128(n.into()));
        let long = "x".repeat(BYTES_MAX / 8);
        for n in 0..64 {
            cache.keep(id(n), ALL, RenderedJson::new(&long).unwrap());
            assert!(cache.find(id(0), ALL).is_some(), "asked for all the time, gone after {n}");
        }
        assert!(cache.find(id(1), ALL).is_none(), "nobody asked");
        let all = cache.0.lock();
        let held: usize = all.young.values().chain(all.old.values()).map(|one| one.text().len()).sum();
        assert!(held < 3 * BYTES_MAX, "{held} bytes are held");
    }
}
