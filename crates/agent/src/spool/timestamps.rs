//! Strictly increasing times, shared by a job's output and its states.
//!
//! A dstack server asks for what came after a millisecond. So no two events share one, none is published with a time
//! that was already passed, and a reader does not go beyond the [`Timestamps::horizon`]: the last time up to which
//! everything is published.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Instant,
};

use parking_lot::Mutex;

use crate::clock;

#[derive(Debug)]
pub struct Timestamps {
    clock: Clock,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    last: i64,
    /// Issued, not yet published: one per stream and one per writer of states, so only a few.
    pending: Vec<i64>,
}

#[derive(Debug)]
enum Clock {
    /// The wall clock at the start and the time elapsed since: it never goes back.
    Steady {
        base_ms: i64,
        since: Instant,
    },
    Manual(AtomicI64),
}

impl Timestamps {
    pub fn new() -> Arc<Self> {
        Self::with(Clock::Steady { base_ms: clock::now_ms(), since: Instant::now() })
    }

    /// Creates a clock that is advanced manually, for tests.
    pub fn manual(now_ms: i64) -> Arc<Self> {
        Self::with(Clock::Manual(AtomicI64::new(now_ms)))
    }

    fn with(clock: Clock) -> Arc<Self> {
        Arc::new(Self { clock, inner: Mutex::default() })
    }

    pub fn now_ms(&self) -> i64 {
        match &self.clock {
            Clock::Steady { base_ms, since } => {
                base_ms.saturating_add(i64::try_from(since.elapsed().as_millis()).unwrap_or(i64::MAX))
            }
            Clock::Manual(now) => now.load(Ordering::Relaxed),
        }
    }

    /// Advances a manual clock; has no effect on a steady one.
    pub fn advance(&self, ms: i64) {
        if let Clock::Manual(now) = &self.clock {
            now.fetch_add(ms, Ordering::Relaxed);
        }
    }

    /// Ensures that no timestamp at or before `floor` is issued: it is already on disk.
    pub fn raise(&self, floor: i64) {
        let mut inner = self.inner.lock();
        inner.last = inner.last.max(floor);
    }

    /// Issues the next time. Its event counts as published when the [`IssuedTimestamp`] is dropped.
    pub fn issue(self: &Arc<Self>) -> IssuedTimestamp {
        let now = self.now_ms();
        let mut inner = self.inner.lock();
        let at = now.max(inner.last.saturating_add(1));
        inner.last = at;
        inner.pending.push(at);
        IssuedTimestamp { at, stamps: Arc::clone(self) }
    }

    /// The latest time issued.
    pub fn last(&self) -> i64 {
        self.inner.lock().last
    }

    /// The time up to which everything is published; nothing will be added at or before it.
    pub fn horizon(&self) -> i64 {
        let inner = self.inner.lock();
        inner.pending.iter().min().map_or(inner.last, |first| first.saturating_sub(1))
    }
}

/// Time that was issued. Drop it once readers can find the event that carries it.
#[derive(Debug)]
pub struct IssuedTimestamp {
    at: i64,
    stamps: Arc<Timestamps>,
}

impl IssuedTimestamp {
    /// Milliseconds since 1970.
    pub fn at(&self) -> i64 {
        self.at
    }
}

impl Drop for IssuedTimestamp {
    fn drop(&mut self) {
        let mut inner = self.stamps.inner.lock();
        if let Some(found) = inner.pending.iter().position(|at| *at == self.at) {
            inner.pending.swap_remove(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_increase_within_one_millisecond_and_never_repeat() {
        let stamps = Timestamps::manual(100);
        let given: Vec<i64> = (0..3).map(|_| stamps.issue().at()).collect();
        assert_eq!(given, [100, 101, 102]);
        stamps.advance(50);
        assert_eq!(stamps.issue().at(), 150);
        stamps.raise(900);
        assert_eq!(stamps.issue().at(), 901);
    }

    #[test]
    fn the_horizon_stays_before_unpublished_timestamps() {
        let stamps = Timestamps::manual(100);
        let first = stamps.issue();
        let second = stamps.issue();
        assert_eq!(stamps.horizon(), 99);
        drop(second);
        assert_eq!(stamps.horizon(), 99);
        drop(first);
        assert_eq!(stamps.horizon(), 101);
    }

    #[test]
    fn the_real_clock_ignores_manual_advances() {
        let stamps = Timestamps::new();
        let before = stamps.now_ms();
        stamps.advance(1_000_000);
        assert!(stamps.now_ms() >= before && stamps.now_ms() < before + 900_000);
    }
}
