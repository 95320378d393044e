//! Settings of a pipeline: sizes, times and the seed of its jitter. Every limit has a name.

use std::time::Duration;

/// Rows in progress at once. Most of them wait for a host or the database.
pub const WORKERS: usize = 64;
/// Maximum number of rows waiting in memory. It bounds the leases that must expire before others recover the rows after
/// a crash.
pub const QUEUE_LEN_MAX: usize = 256;
/// Number of waiting rows below which the fetcher claims more: half the queue, so that workers never wait for it.
pub const QUEUE_LEN_MIN: usize = 128;
/// Maximum number of rows per claim.
pub const CLAIM_MAX: usize = 256;
/// Maximum number of rows per finish statement.
pub const FINISH_MAX: usize = 256;
/// Rows with a requested pass are claimed before rows whose due time has come. A row that has been due for this long is
/// claimed with the former, so that none starves.
pub const URGENT_AFTER: Duration = Duration::from_secs(30);
/// Time after which other replicas claim the rows of a crashed one.
pub const LEASE_TTL: Duration = Duration::from_secs(30);
/// Shorter leases would expire before a busy server can extend them.
pub const LEASE_TTL_MIN: Duration = Duration::from_secs(5);
/// Time before the expiry at which a holder that could not extend its lease stops its work.
pub const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// Interval of the heartbeater. The check is free; only leases older than [`RENEW_AFTER`] cost a statement.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Leases younger than this are not extended. Most passes last milliseconds and never need a heartbeat; a long one has
/// (30 - 5 - 5) / 1 = 20 attempts before its lease is lost.
pub const RENEW_AFTER: Duration = Duration::from_secs(5);
/// Delays after the first, second, … empty fetch.
pub const IDLE_DELAYS: &[Duration] =
    &[Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5)];
/// Delays of a row after its first, second, … failed pass.
pub const ERROR_DELAYS: &[Duration] = &[
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];
/// Delay between two attempts to lock a related row that another holder has.
pub const RELATED_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Delay before a pipeline is restarted after one of its tasks crashed.
pub const RESTART_DELAY: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Settings {
    pub workers: usize,
    /// Rows that wait here are not available to other replicas, so a pipeline with slow passes should have a short
    /// queue.
    pub queue_len_max: usize,
    pub queue_len_min: usize,
    pub claim_max: usize,
    pub finish_max: usize,
    pub lease_ttl: Duration,
    pub lease_margin: Duration,
    pub heartbeat_interval: Duration,
    pub renew_after: Duration,
    pub idle_delays: &'static [Duration],
    pub error_delays: &'static [Duration],
    pub related_retry_delay: Duration,
    pub restart_delay: Duration,
    /// Should differ between replicas, so that they do not fetch in step.
    pub jitter_seed: u64,
}

impl Settings {
    pub fn standard(jitter_seed: u64) -> Self {
        Self {
            workers: WORKERS,
            queue_len_max: QUEUE_LEN_MAX,
            queue_len_min: QUEUE_LEN_MIN,
            claim_max: CLAIM_MAX,
            finish_max: FINISH_MAX,
            lease_ttl: LEASE_TTL,
            lease_margin: LEASE_MARGIN,
            heartbeat_interval: HEARTBEAT_INTERVAL,
            renew_after: RENEW_AFTER,
            idle_delays: IDLE_DELAYS,
            error_delays: ERROR_DELAYS,
            related_retry_delay: RELATED_RETRY_DELAY,
            restart_delay: RESTART_DELAY,
            jitter_seed,
        }
    }

    /// Returns the settings with another lease duration. Settings that depend on it keep their ratio.
    #[must_use]
    pub fn with_lease(self, lease_ttl: Duration) -> Self {
        Self { lease_ttl, lease_margin: lease_ttl / 6, renew_after: lease_ttl / 6, ..self }
    }

    /// Returns whether a lease outlives the longest wait for its renewal; otherwise every long pass would be dropped.
    pub(crate) fn is_valid(&self) -> bool {
        self.renew_after + self.heartbeat_interval < self.lease_validity()
            && !self.heartbeat_interval.is_zero()
    }

    /// Returns how long a lease may be relied on after it was requested.
    pub(crate) fn lease_validity(&self) -> Duration {
        self.lease_ttl.saturating_sub(self.lease_margin)
    }
}

/// Returns the delay at `step`; the last one repeats.
pub(crate) fn delay_at(delays: &[Duration], step: usize) -> Duration {
    delays.get(step).or(delays.last()).copied().unwrap_or(Duration::ZERO)
}

/// A small random generator (splitmix64): jitter must be reproducible from its seed and needs no more.
#[derive(Debug)]
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64, pipeline: &str) -> Self {
        // Pipelines of one replica share the seed but must not fetch in step either.
        Self(
            pipeline.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
        )
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Returns the delay, plus or minus up to a fifth.
    pub(crate) fn apply(&mut self, delay: Duration) -> Duration {
        let percent = 80 + u32::try_from(self.next() % 41).unwrap_or(0);
        delay * percent / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_within_twenty_percent_and_is_reproducible_by_seed() {
        let mut jitter = Jitter::new(7, "runs");
        let delays: Vec<_> = (0..1000).map(|_| jitter.apply(Duration::from_secs(1))).collect();
        assert!(delays.iter().all(|d| (800..=1200).contains(&d.as_millis())));
        assert!(delays.iter().any(|d| d.as_millis() < 850) && delays.iter().any(|d| d.as_millis() > 1150));
        let mut again = Jitter::new(7, "runs");
        assert!(delays.iter().all(|d| *d == again.apply(Duration::from_secs(1))));
        let mut other = Jitter::new(7, "jobs");
        assert!(delays.iter().any(|d| *d != other.apply(Duration::from_secs(1))));
    }

    #[test]
    fn standard_settings_are_valid_and_a_shorter_lease_alone_is_not() {
        assert!(Settings::standard(0).is_valid());
        assert!(!Settings { lease_ttl: Duration::from_secs(10), ..Settings::standard(0) }.is_valid());
    }

    #[test]
    fn a_shorter_lease_is_valid_with_a_shorter_margin() {
        let standard = Settings::standard(0).with_lease(LEASE_TTL);
        assert_eq!((standard.lease_margin, standard.renew_after), (LEASE_MARGIN, RENEW_AFTER));
        assert!(Settings::standard(0).with_lease(LEASE_TTL_MIN).is_valid());
    }

    #[test]
    fn delays_grow_and_the_last_repeats() {
        let steps: Vec<_> = (0..6).map(|step| delay_at(IDLE_DELAYS, step).as_millis()).collect();
        assert_eq!(steps, [500, 1000, 2000, 5000, 5000, 5000]);
    }
}
