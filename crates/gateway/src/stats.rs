//! Traffic statistics of a service, for the autoscaler, metrics and users.
//!
//! Lock-free and without allocation: a request updates a few atomic counters.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use hyper::StatusCode;

/// Number of seconds that are kept. More than the longest window, so that a late reader still gets all of it.
const FRAMES: usize = 512;
const _: () = assert!(FRAMES > WINDOW_MAX);

/// Maximum length of a window, in seconds.
pub const WINDOW_MAX: usize = 300;

/// Upper bounds of the latency histogram, in microseconds. The last bucket is unbounded.
pub const BUCKETS_US: [u64; 14] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000, 60_000_000,
];

/// Counters of one service. They persist across route changes.
#[derive(Debug)]
pub struct ServiceStats {
    started: Instant,
    /// One second each: the second in the upper half, the number of requests in the lower half.
    frames: Box<[AtomicU64]>,
    requests: AtomicU64,
    admitted: AtomicU64,
    in_flight: AtomicU64,
    held: AtomicU64,
    /// Responses from 1xx to 5xx, indexed by their first digit minus one.
    classes: [AtomicU64; 5],
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    latency_us: AtomicU64,
    /// Sum of the start times of requests in flight, in microseconds since `started`.
    began_us: AtomicU64,
    /// Sum of the start times of waiting requests, and the total time that others have waited.
    held_began_us: AtomicU64,
    held_us: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// Total time of all requests in flight so far: two requests for one second are two seconds. The difference of two
/// readings, divided by the time between them, is the average concurrency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusyTime {
    pub in_flight_us: u64,
    /// Part of it that was spent waiting for a replica.
    pub held_us: u64,
}

/// Counters of a service at the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficTotals {
    pub requests: u64,
    pub in_flight_us: u64,
    pub held_us: u64,
    pub answers: ResponseStats,
}

/// Responses by status class and latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseStats {
    /// 1xx to 5xx.
    pub classes: [u64; 5],
    /// Buckets as in [`Reading`].
    pub buckets: [u64; BUCKETS_US.len() + 1],
    pub latency_us: u64,
}

impl ResponseStats {
    /// Converts to the API type.
    pub fn wire(&self) -> windlass_api::metrics::ResponseCounts {
        windlass_api::metrics::ResponseCounts {
            classes: self.classes.to_vec(),
            buckets: self.buckets.to_vec(),
            latency_us: self.latency_us,
        }
    }

    fn since(self, before: Self) -> Self {
        fn less<const N: usize>(now: [u64; N], before: [u64; N]) -> [u64; N] {
            std::array::from_fn(|at| {
                let of = |all: [u64; N]| all.get(at).copied().unwrap_or_default();
                of(now).saturating_sub(of(before))
            })
        }
        Self {
            classes: less(self.classes, before.classes),
            buckets: less(self.buckets, before.buckets),
            latency_us: self.latency_us.saturating_sub(before.latency_us),
        }
    }
}

/// Estimates a quantile of the latency in microseconds, by linear interpolation within its bucket. `None` without
/// responses.
pub fn quantile_us(buckets: &[u64], part: f64) -> Option<f64> {
    let all: u64 = buckets.iter().sum();
    let wanted = all as f64 * part;
    let (mut before, mut from) = (0.0, 0.0);
    for (at, count) in buckets.iter().enumerate() {
        // Latencies in the unbounded bucket count as the highest bound.
        let until = BUCKETS_US.get(at).map_or(from, |end| *end as f64);
        let within = *count as f64;
        if within > 0.0 && before + within >= wanted {
            return Some(from + (until - from) * (wanted - before) / within);
        }
        before += within;
        from = until;
    }
    None
}

impl TrafficTotals {
    pub fn now(stats: &ServiceStats, now: Instant) -> Self {
        let BusyTime { in_flight_us, held_us } = stats.busy(now);
        let StatsSnapshot { admitted, classes, buckets, latency_us, .. } = stats.read();
        let answers = ResponseStats { classes, buckets, latency_us };
        Self { requests: admitted, in_flight_us, held_us, answers }
    }

    /// Returns the difference to `before`; `None` if there is none.
    #[must_use]
    pub fn since(self, before: Self) -> Option<Self> {
        let came = Self {
            requests: self.requests.saturating_sub(before.requests),
            in_flight_us: self.in_flight_us.saturating_sub(before.in_flight_us),
            held_us: self.held_us.saturating_sub(before.held_us),
            answers: self.answers.since(before.answers),
        };
        (came != Self::default()).then_some(came)
    }
}

/// Counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsSnapshot {
    pub requests: u64,
    /// Requests that were admitted to the service: with a valid token and within its limits.
    pub admitted: u64,
    pub in_flight: u64,
    /// Requests that wait for a first replica.
    pub held: u64,
    pub classes: [u64; 5],
    /// Not cumulative: one count for each of `BUCKETS_US`, and one for longer latencies.
    pub buckets: [u64; BUCKETS_US.len() + 1],
    pub latency_us: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl ServiceStats {
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
            began_us: AtomicU64::new(0),
            held_began_us: AtomicU64::new(0),
            held_us: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        }
    }

    /// Returns the seconds since the counters started, from one, because zero marks a frame that was never written.
    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_secs() + 1
    }

    fn since_start_us(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.started))
    }

    pub(crate) fn record_arrival(&self, now: Instant) {
        self.requests.fetch_add(1, Relaxed);
        self.began_us.fetch_add(self.since_start_us(now), Relaxed);
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

    /// Counts a request that passed the checks.
    pub(crate) fn admit(&self) {
        self.admitted.fetch_add(1, Relaxed);
    }

    pub(crate) fn leave(
        &self,
        status: StatusCode,
        (began, took): (Instant, Duration),
        bytes_in: u64,
        bytes_out: u64,
    ) {
        self.in_flight.fetch_sub(1, Relaxed);
        self.began_us.fetch_sub(self.since_start_us(began), Relaxed);
        let class = usize::from(status.as_u16() / 100).saturating_sub(1);
        if let Some(class) = self.classes.get(class) {
            class.fetch_add(1, Relaxed);
        }
        let us = micros(took);
        let bucket = BUCKETS_US.partition_point(|end| *end < us);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        self.latency_us.fetch_add(us, Relaxed);
        self.bytes_in.fetch_add(bytes_in, Relaxed);
        self.bytes_out.fetch_add(bytes_out, Relaxed);
    }

    /// Counts a waiting request. Returns false if `max` requests wait already.
    pub(crate) fn hold(&self, max: u64, now: Instant) -> bool {
        let counted = self.held.fetch_update(Relaxed, Relaxed, |held| (held < max).then_some(held + 1));
        if counted.is_ok() {
            self.held_began_us.fetch_add(self.since_start_us(now), Relaxed);
        }
        counted.is_ok()
    }

    /// Records that a request waited from `began` to `now`.
    pub(crate) fn release_held(&self, began: Instant, now: Instant) {
        self.held.fetch_sub(1, Relaxed);
        self.held_began_us.fetch_sub(self.since_start_us(began), Relaxed);
        self.held_us.fetch_add(micros(now.saturating_duration_since(began)), Relaxed);
    }

    /// Returns the time of completed requests, plus that of open ones from their start to now. The counters are read
    /// one after the other, so differences must be clamped at zero.
    pub fn busy(&self, now: Instant) -> BusyTime {
        let now_us = self.since_start_us(now);
        let open = |count: &AtomicU64, began: &AtomicU64| {
            count.load(Relaxed).saturating_mul(now_us).saturating_sub(began.load(Relaxed))
        };
        BusyTime {
            in_flight_us: self.latency_us.load(Relaxed) + open(&self.in_flight, &self.began_us),
            held_us: self.held_us.load(Relaxed) + open(&self.held, &self.held_began_us),
        }
    }

    /// Returns the number of requests in the last `seconds` whole seconds (at most `WINDOW_MAX`).
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

    /// Returns the age of the counters: a longer window is not complete yet.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    pub fn read(&self) -> StatsSnapshot {
        StatsSnapshot {
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

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_completed_seconds_and_drops_older_ones() {
        let start = Instant::now();
        let stats = ServiceStats::new(start);
        let at = |s: u64| start + Duration::from_secs(s);
        for second in 0..400 {
            for _ in 0..second % 3 {
                stats.record_arrival(at(second));
            }
        }
        // Seconds 370 to 399: ten each of 0, 1 and 2 requests.
        assert_eq!(stats.window(30, at(400)), 30);
        assert_eq!(stats.window(60, at(400)), 60);
        assert_eq!(stats.window(300, at(400)), 300);
        assert_eq!(stats.window(9_999, at(400)), 300);
        // The current second does not count, and silence is zero.
        assert_eq!(stats.window(1, at(398)), 397 % 3);
        assert_eq!(stats.window(300, at(800)), 0);
    }

    #[test]
    fn a_reused_frame_does_not_keep_its_old_count() {
        let start = Instant::now();
        let stats = ServiceStats::new(start);
        stats.record_arrival(start);
        let later = start + Duration::from_secs(FRAMES as u64);
        stats.record_arrival(later);
        assert_eq!(stats.window(1, later + Duration::from_secs(1)), 1);
    }

    #[test]
    fn a_finished_request_is_counted_by_status_class_and_latency_bucket() {
        let began = Instant::now();
        let stats = ServiceStats::new(began);
        stats.record_arrival(began);
        assert_eq!(stats.read().in_flight, 1);
        stats.leave(StatusCode::BAD_GATEWAY, (began, Duration::from_micros(2_500)), 3, 5);
        let read = stats.read();
        assert_eq!((read.in_flight, read.classes, read.buckets[1]), (0, [0, 0, 0, 0, 1], 1));
        assert_eq!((read.bytes_in, read.bytes_out, read.latency_us), (3, 5, 2_500));
    }

    #[test]
    fn a_quantile_is_interpolated_within_its_bucket() {
        let mut buckets = [0; BUCKETS_US.len() + 1];
        assert_eq!(quantile_us(&buckets, 0.5), None);
        (buckets[0], buckets[1]) = (50, 50);
        assert_eq!(quantile_us(&buckets, 0.25), Some(500.0));
        assert_eq!(quantile_us(&buckets, 0.5), Some(1_000.0));
        assert_eq!(quantile_us(&buckets, 1.0), Some(2_500.0));
        buckets[BUCKETS_US.len()] = 900;
        assert_eq!(quantile_us(&buckets, 0.99), Some(60_000_000.0));
    }

    #[test]
    fn requests_above_the_limit_of_held_requests_are_not_held() {
        let now = Instant::now();
        let stats = ServiceStats::new(now);
        assert!(stats.hold(2, now) && stats.hold(2, now) && !stats.hold(2, now));
        stats.release_held(now, now);
        assert!(stats.hold(2, now));
    }

    #[test]
    fn busy_time_counts_finished_and_unfinished_requests() {
        let start = Instant::now();
        let stats = ServiceStats::new(start);
        let at = |ms: u64| start + Duration::from_millis(ms);
        // One from 1 s to 3 s, one from 2 s on that waits until 2.5 s.
        stats.record_arrival(at(1_000));
        stats.record_arrival(at(2_000));
        assert!(stats.hold(9, at(2_000)));
        let reported = TrafficTotals::now(&stats, at(2_250));
        assert_eq!(reported.since(reported), None);
        assert_eq!(stats.busy(at(2_250)), BusyTime { in_flight_us: 1_500_000, held_us: 250_000 });
        stats.release_held(at(2_000), at(2_500));
        stats.leave(StatusCode::OK, (at(1_000), Duration::from_secs(2)), 0, 0);
        assert_eq!(stats.busy(at(4_000)), BusyTime { in_flight_us: 4_000_000, held_us: 500_000 });
        let came = TrafficTotals::now(&stats, at(4_000)).since(reported).unwrap();
        assert_eq!((came.requests, came.in_flight_us, came.held_us), (0, 2_500_000, 250_000));
        assert_eq!((came.answers.classes, came.answers.latency_us), ([0, 1, 0, 0, 0], 2_000_000));
    }
}
