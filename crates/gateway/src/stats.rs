//! What a service's traffic looks like: for the autoscaler, for metrics, for people.
//!
//! Nothing here locks or allocates: a request touches a handful of atomic numbers.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use hyper::StatusCode;

/// Seconds kept. More than the longest window, so a reader that comes late still finds all of it.
const FRAMES: usize = 512;
const _: () = assert!(FRAMES > WINDOW_MAX);

/// The longest window, in seconds.
pub const WINDOW_MAX: usize = 300;

/// Upper ends of the latency histogram, in microseconds. The last bucket has none.
pub const BUCKETS_US: [u64; 14] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000, 60_000_000,
];

/// The counters of one service. They outlive a change of its routes.
#[derive(Debug)]
pub struct Stats {
    started: Instant,
    /// One second each: the second in the upper half, requests in the lower.
    frames: Box<[AtomicU64]>,
    requests: AtomicU64,
    admitted: AtomicU64,
    in_flight: AtomicU64,
    held: AtomicU64,
    /// 1xx to 5xx, by their first digit less one.
    classes: [AtomicU64; 5],
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    latency_us: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    pub requests: u64,
    /// Those of them that were let through to the service: by their token, within its limits.
    pub admitted: u64,
    pub in_flight: u64,
    /// Requests that wait for a first replica.
    pub held: u64,
    pub classes: [u64; 5],
    /// Not cumulative: one number for each of `BUCKETS_US`, and one for what took longer.
    pub buckets: [u64; BUCKETS_US.len() + 1],
    pub latency_us: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl Stats {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            started: now,
            frames: (0..FRAMES).map(|_| AtomicU64::new(0)).collect(),
            requests: AtomicU64::new(0),
            admitted: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            held: AtomicU64::new(0),
            classes: Default::default(),
            buckets: Default::default(),
            latency_us: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        }
    }

    /// Seconds since the counters began, from one: a frame of nought was never written.
    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_secs() + 1
    }

    pub(crate) fn arrive(&self, now: Instant) {
        self.requests.fetch_add(1, Relaxed);
        self.in_flight.fetch_add(1, Relaxed);
        let second = self.second(now);
        let Some(frame) = self.frames.get(second as usize % FRAMES) else { return };
        let mut seen = frame.load(Relaxed);
        loop {
            let next = if seen >> 32 == second { seen.saturating_add(1) } else { second << 32 | 1 };
            match frame.compare_exchange_weak(seen, next, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(other) => seen = other,
            }
        }
    }

    /// Passed the checks: it is work for the service.
    pub(crate) fn admit(&self) {
        self.admitted.fetch_add(1, Relaxed);
    }

    pub(crate) fn leave(&self, status: StatusCode, took: Duration, bytes_in: u64, bytes_out: u64) {
        self.in_flight.fetch_sub(1, Relaxed);
        let class = usize::from(status.as_u16() / 100).saturating_sub(1);
        if let Some(class) = self.classes.get(class) {
            class.fetch_add(1, Relaxed);
        }
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.partition_point(|end| *end < us);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        self.latency_us.fetch_add(us, Relaxed);
        self.bytes_in.fetch_add(bytes_in, Relaxed);
        self.bytes_out.fetch_add(bytes_out, Relaxed);
    }

    /// Counts a request that waits, unless `max` wait already.
    pub(crate) fn hold(&self, max: u64) -> bool {
        self.held.fetch_update(Relaxed, Relaxed, |held| (held < max).then_some(held + 1)).is_ok()
    }

    pub(crate) fn release(&self) {
        self.held.fetch_sub(1, Relaxed);
    }

    /// Requests that came in the last `seconds` whole seconds (at most `WINDOW_MAX`).
    pub fn window(&self, seconds: usize, now: Instant) -> u64 {
        let this = self.second(now);
        let first = this.saturating_sub(seconds.min(WINDOW_MAX) as u64);
        self.frames
            .iter()
            .map(|frame| frame.load(Relaxed))
            .filter(|frame| (first..this).contains(&(frame >> 32)))
            .map(|frame| frame & u64::from(u32::MAX))
            .sum()
    }

    /// How long these counters have run: a window longer than that is not full yet.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    pub fn read(&self) -> Reading {
        Reading {
            requests: self.requests.load(Relaxed),
            admitted: self.admitted.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
            held: self.held.load(Relaxed),
            classes: std::array::from_fn(|i| self.classes.get(i).map_or(0, |n| n.load(Relaxed))),
            buckets: std::array::from_fn(|i| self.buckets.get(i).map_or(0, |n| n.load(Relaxed))),
            latency_us: self.latency_us.load(Relaxed),
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_whole_seconds_and_forgets_what_is_older() {
        let start = Instant::now();
        let stats = Stats::new(start);
        let at = |s: u64| start + Duration::from_secs(s);
        for second in 0..400 {
            for _ in 0..second % 3 {
                stats.arrive(at(second));
            }
        }
        // Seconds 370 to 399: ten each of 0, 1 and 2 requests.
        assert_eq!(stats.window(30, at(400)), 30);
        assert_eq!(stats.window(60, at(400)), 60);
        assert_eq!(stats.window(300, at(400)), 300);
        assert_eq!(stats.window(9_999, at(400)), 300);
        // The second that is not over yet does not count, and silence is nought.
        assert_eq!(stats.window(1, at(398)), 397 % 3);
        assert_eq!(stats.window(300, at(800)), 0);
    }

    #[test]
    fn an_old_frame_is_not_taken_for_a_new_one() {
        let start = Instant::now();
        let stats = Stats::new(start);
        stats.arrive(start);
        let later = start + Duration::from_secs(FRAMES as u64);
        stats.arrive(later);
        assert_eq!(stats.window(1, later + Duration::from_secs(1)), 1);
    }

    #[test]
    fn a_request_that_left_is_in_its_class_and_bucket() {
        let stats = Stats::new(Instant::now());
        stats.arrive(Instant::now());
        assert_eq!(stats.read().in_flight, 1);
        stats.leave(StatusCode::BAD_GATEWAY, Duration::from_micros(2_500), 3, 5);
        let read = stats.read();
        assert_eq!((read.in_flight, read.classes, read.buckets[1]), (0, [0, 0, 0, 0, 1], 1));
        assert_eq!((read.bytes_in, read.bytes_out, read.latency_us), (3, 5, 2_500));
    }

    #[test]
    fn no_more_wait_than_may() {
        let stats = Stats::new(Instant::now());
        assert!(stats.hold(2) && stats.hold(2) && !stats.hold(2));
        stats.release();
        assert!(stats.hold(2));
    }
}
