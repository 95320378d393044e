//! How a pipeline is turned: sizes, times and the seed of its jitter. Every bound has a name.

use std::time::Duration;

/// Rows in work at once. Most of them wait for a host or the database.
pub const WORKERS: usize = 64;
/// Rows waiting in memory, at most. It bounds what has to expire before others recover it after a crash.
pub const QUEUE_LEN_MAX: usize = 256;
/// Below this many waiting rows the fetcher claims more: half the queue, so that workers never wait for it.
pub const QUEUE_LEN_MIN: usize = 128;
/// Rows per claim.
pub const CLAIM_MAX: usize = 256;
/// Rows per finish statement.
pub const FINISH_MAX: usize = 256;
/// Rows that somebody wants looked at are claimed before those whose time has come. One that has been due for so long
/// is claimed with them, so that none is forgotten over the others.
pub const URGENT_AFTER: Duration = Duration::from_secs(30);
/// A crashed replica's rows are taken over after this long.
pub const LEASE_TTL: Duration = Duration::from_secs(30);
/// Shorter leases would run out while a busy server is on its way to extend them.
pub const LEASE_TTL_MIN: Duration = Duration::from_secs(5);
/// A holder that could not extend its lease lets go this long before others may take it.
pub const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// How often the heartbeater looks at its leases. Looking is free; only those older than [`RENEW_AFTER`]
/// cost a statement.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Leases younger than this are not extended. Most passes take milliseconds and never see a heartbeat; a
/// long one has (30 - 5 - 5) / 1 = 20 tries before its lease is given up.
pub const RENEW_AFTER: Duration = Duration::from_secs(5);
/// Sleeps after the first, second, … empty fetch.
pub const IDLE_DELAYS: &[Duration] =
    &[Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5)];
/// A row whose pass fails comes back after the first, second, … of these.
pub const ERROR_DELAYS: &[Duration] = &[
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];
/// Between two tries to lock a related row that somebody else holds.
pub const RELATED_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Before a pipeline one of whose tasks crashed is started again.
pub const RESTART_DELAY: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Settings {
    pub workers: usize,
    /// What waits here is out of reach of other replicas, so a pipeline whose passes are slow wants a short
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

    /// The same with leases of another length. What depends on the length keeps its share of it.
    #[must_use]
    pub fn with_lease(self, lease_ttl: Duration) -> Self {
        Self { lease_ttl, lease_margin: lease_ttl / 6, renew_after: lease_ttl / 6, ..self }
    }

    /// A lease must outlive the longest wait for its renewal, or every long pass would be dropped.
    pub(crate) fn is_valid(&self) -> bool {
        self.renew_after + self.heartbeat_interval < self.lease_validity()
            && !self.heartbeat_interval.is_zero()
    }

    /// How long a lease may be relied on after the moment it was asked for.
    pub(crate) fn lease_validity(&self) -> Duration {
        self.lease_ttl.saturating_sub(self.lease_margin)
    }
}

/// The `step`th of growing delays; the last one repeats.
pub(crate) fn delay_at(delays: &[Duration], step: usize) -> Duration {
    delays.get(step).or(delays.last()).copied().unwrap_or(Duration::ZERO)
}

/// A small generator of our own (splitmix64): jitter must replay with its seed and needs no more.
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

    /// The delay, give or take a fifth.
    pub(crate) fn apply(&mut self, delay: Duration) -> Duration {
        let percent = 80 + u32::try_from(self.next() % 41).unwrap_or(0);
        delay * percent / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_within_a_fifth_and_replays_with_its_seed() {
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
    fn the_standard_settings_are_sound_and_shorter_leases_are_not() {
        assert!(Settings::standard(0).is_valid());
        assert!(!Settings { lease_ttl: Duration::from_secs(10), ..Settings::standard(0) }.is_valid());
    }

    #[test]
    fn shorter_leases_are_sound_with_a_shorter_margin() {
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
