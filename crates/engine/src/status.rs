//! Metrics of a pipeline: gauges and totals, cheap to update and to read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{lease::Leases, work_queue::WorkQueue};

/// State of a pipeline at one time, for `/metrics` and for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub pipeline: &'static str,
    /// Rows claimed and waiting for a worker.
    pub queued: usize,
    pub in_work: usize,
    /// Age of the oldest lease, queued or in progress.
    pub oldest_age: Option<Duration>,
    /// Rows written or finished during the last minute.
    pub applied_last_minute: u64,
    pub totals: Totals,
}

/// Counts since the pipeline was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub fetches: u64,
    pub fetches_empty: u64,
    pub claimed: u64,
    /// Successful passes: written, or nothing to write.
    pub applied: u64,
    /// Passes whose row was no longer held when they wrote.
    pub stale: u64,
    /// Rows put back because a related row was busy.
    pub reset: u64,
    /// Leases that ended while their row was queued or in progress.
    pub lost: u64,
    /// Passes that failed or panicked.
    pub errors: u64,
    pub handed_back: u64,
    /// Calls to the store that failed.
    pub store_errors: u64,
    /// Restarts of the pipeline after one of its tasks crashed.
    pub restarts: u64,
}

/// Reads the status of an engine's pipelines without owning the engine.
#[derive(Clone, Debug)]
pub struct Monitor {
    meters: Arc<[Arc<PipelineMeter>]>,
}

impl Monitor {
    pub(crate) fn new(meters: Vec<Arc<PipelineMeter>>) -> Self {
        Self { meters: meters.into() }
    }

    /// Returns one snapshot per pipeline, in the order in which they were started.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.meters.iter().map(|meter| meter.snapshot()).collect()
    }
}

#[derive(Debug)]
pub(crate) struct PipelineMeter {
    pipeline: &'static str,
    pub(crate) leases: Leases,
    queue: Mutex<Option<Arc<WorkQueue>>>,
    in_work: AtomicUsize,
    recent: Mutex<RecentCounts>,
    pub(crate) fetches: Counter,
    pub(crate) fetches_empty: Counter,
    pub(crate) claimed: Counter,
    applied: Counter,
    pub(crate) stale: Counter,
    pub(crate) reset: Counter,
    pub(crate) lost: Counter,
    pub(crate) errors: Counter,
    pub(crate) handed_back: Counter,
    pub(crate) store_errors: Counter,
    pub(crate) restarts: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl PipelineMeter {
    pub(crate) fn new(pipeline: &'static str) -> Self {
        Self {
            pipeline,
            leases: Leases::default(),
            queue: Mutex::default(),
            in_work: AtomicUsize::new(0),
            recent: Mutex::new(RecentCounts::new(Instant::now())),
            fetches: Counter::default(),
            fetches_empty: Counter::default(),
            claimed: Counter::default(),
            applied: Counter::default(),
            stale: Counter::default(),
            reset: Counter::default(),
            lost: Counter::default(),
            errors: Counter::default(),
            handed_back: Counter::default(),
            store_errors: Counter::default(),
            restarts: Counter::default(),
        }
    }

    /// Sets the queue; a restarted pipeline has a new one.
    pub(crate) fn set_queue(&self, line: Arc<WorkQueue>) {
        *self.queue.lock() = Some(line);
    }

    /// Counts rows as in progress until the guard is dropped, however the work ends.
    pub(crate) fn in_work(&self, count: usize) -> InWorkGuard<'_> {
        self.in_work.fetch_add(count, Ordering::Relaxed);
        InWorkGuard { meter: self, count }
    }

    pub(crate) fn applied(&self, count: usize) {
        self.applied.add(count);
        self.recent.lock().add(Instant::now(), count as u64);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let now = Instant::now();
        Snapshot {
            pipeline: self.pipeline,
            queued: self.queue.lock().as_ref().map_or(0, |line| line.len()),
            in_work: self.in_work.load(Ordering::Relaxed),
            oldest_age: self.leases.oldest_requested_at().map(|since| now.saturating_duration_since(since)),
            applied_last_minute: self.recent.lock().sum(now),
            totals: Totals {
                fetches: self.fetches.total(),
                fetches_empty: self.fetches_empty.total(),
                claimed: self.claimed.total(),
                applied: self.applied.total(),
                stale: self.stale.total(),
                reset: self.reset.total(),
                lost: self.lost.total(),
                errors: self.errors.total(),
                handed_back: self.handed_back.total(),
                store_errors: self.store_errors.total(),
                restarts: self.restarts.total(),
            },
        }
    }
}

pub(crate) struct InWorkGuard<'a> {
    meter: &'a PipelineMeter,
    count: usize,
}

impl Drop for InWorkGuard<'_> {
    fn drop(&mut self) {
        self.meter.in_work.fetch_sub(self.count, Ordering::Relaxed);
    }
}

const BUCKETS: u64 = 60;

/// Counts of the last sixty seconds, one bucket each.
#[derive(Debug)]
struct RecentCounts {
    started: Instant,
    second: u64,
    buckets: [u64; BUCKETS as usize],
}

impl RecentCounts {
    fn new(started: Instant) -> Self {
        Self { started, second: 0, buckets: [0; BUCKETS as usize] }
    }

    fn advance_to(&mut self, now: Instant) {
        let second = now.saturating_duration_since(self.started).as_secs();
        for passed in (self.second + 1..=second).take(BUCKETS as usize) {
            self.buckets[(passed % BUCKETS) as usize] = 0;
        }
        // More than a minute without counts empties every bucket, whichever ones were visited.
        self.second = self.second.max(second);
    }

    fn add(&mut self, now: Instant, count: u64) {
        self.advance_to(now);
        self.buckets[(self.second % BUCKETS) as usize] += count;
    }

    fn sum(&mut self, now: Instant) -> u64 {
        self.advance_to(now);
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recent_count_covers_only_the_last_minute() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut recent = RecentCounts::new(start);
        recent.add(at(0), 5);
        recent.add(at(30), 7);
        assert_eq!(recent.sum(at(59)), 12);
        assert_eq!(recent.sum(at(60)), 7);
        assert_eq!(recent.sum(at(89)), 7);
        assert_eq!(recent.sum(at(90)), 0);
        recent.add(at(91), 3);
        assert_eq!(recent.sum(at(500)), 0);
    }
}
