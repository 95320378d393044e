//! The only code that reads the wall clock, and only for SQLite, where the server is the database. On Postgres time
//! comes from the server's `now()`.
//!
//! A wall clock may be set. If leases and timeouts followed, they would end early or never. So this clock advances with
//! the machine's uptime, and approaches the wall clock by no more than a tenth of the elapsed time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::SystemTime,
};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// A wall clock this far ahead is adopted at once: the machine was off, whatever its uptime is.
const AHEAD_MAX: i64 = 3_600_000_000;
/// Shorter steps are not recorded; a tenth of them would be nothing.
const STEP_MIN: i64 = 1000;

/// Clock in microseconds since 1970 that never goes back.
#[derive(Clone)]
pub(super) struct Clock {
    source: Arc<ClockSource>,
    last: Arc<AtomicI64>,
}

enum ClockSource {
    Steady(Mutex<SteadyClock>),
    External(Arc<dyn Fn() -> i64 + Send + Sync>),
}

impl Clock {
    pub(super) fn wall() -> Self {
        let steady = SteadyClock { at: wall(), uptime: uptime() };
        Self::from(ClockSource::Steady(Mutex::new(steady)))
    }

    pub(super) fn of(read: Arc<dyn Fn() -> i64 + Send + Sync>) -> Self {
        Self::from(ClockSource::External(read))
    }

    fn from(source: ClockSource) -> Self {
        Self { source: Arc::new(source), last: Arc::new(AtomicI64::new(i64::MIN)) }
    }

    /// Continues from the last time that the database recorded, if the wall clock was set back since. A recorded time
    /// too far ahead of the wall clock is ignored.
    pub(super) fn resume_from(&self, recorded: i64) {
        if let ClockSource::Steady(steady) = &*self.source {
            let mut steady = steady.lock();
            if recorded.saturating_sub(steady.at) < AHEAD_MAX {
                steady.at = steady.at.max(recorded);
            }
        }
    }

    /// Current time. If an external clock was set back, time stands still until it has caught up.
    pub(super) fn now(&self) -> i64 {
        let read = match &*self.source {
            ClockSource::Steady(steady) => steady.lock().step(wall(), uptime()),
            ClockSource::External(read) => read(),
        };
        read.max(self.last.fetch_max(read, Ordering::Relaxed))
    }
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the database's clock")]
fn wall() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Uptime, including the time that the machine was suspended.
fn uptime() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

struct SteadyClock {
    at: i64,
    /// Uptime at `at`.
    uptime: i64,
}

impl SteadyClock {
    fn step(&mut self, wall: i64, uptime: i64) -> i64 {
        let passed = (uptime - self.uptime).max(0);
        let expected = self.at + passed;
        if passed < STEP_MIN {
            return expected;
        }
        let apart = wall.saturating_sub(expected);
        let drift = if apart > AHEAD_MAX { apart } else { apart.clamp(-passed / 10, passed / 10) };
        (self.at, self.uptime) = (expected + drift, uptime);
        self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const START: i64 = 1_700_000_000 * SECOND;

    fn steady() -> SteadyClock {
        SteadyClock { at: START, uptime: 0 }
    }

    /// Elapsed time after steps of one second each, with a wall clock that is off by so much.
    fn after(seconds: i64, off_by: i64) -> i64 {
        let mut clock = steady();
        (1..=seconds).map(|n| clock.step(START + n * SECOND + off_by, n * SECOND)).last().unwrap_or(START)
            - START
    }

    #[test]
    fn an_accurate_wall_clock_is_followed() {
        assert_eq!(after(100, 0), 100 * SECOND);
    }

    #[test]
    fn l5_a_wall_clock_jump_neither_expires_leases_early_nor_stops_timers() {
        let minutes = 600 * SECOND;
        assert_eq!(after(30, minutes), 33 * SECOND, "a tenth faster");
        assert_eq!(after(30, -minutes), 27 * SECOND, "a tenth slower");
    }

    #[test]
    fn a_wall_clock_jump_is_absorbed_gradually() {
        assert_eq!(after(6010, 600 * SECOND), (6010 + 600) * SECOND);
        assert_eq!(after(6010, -600 * SECOND), (6010 - 600) * SECOND);
    }

    #[test]
    fn a_jump_beyond_the_limit_follows_the_wall_clock_at_once() {
        assert_eq!(after(1, 2 * AHEAD_MAX), SECOND + 2 * AHEAD_MAX);
    }

    #[test]
    fn short_clock_steps_accumulate() {
        let mut clock = steady();
        for n in 1..=10_000 {
            clock.step(START + n, n);
        }
        assert_eq!(clock.step(START + 10_000, 10_000), START + 10_000);
    }

    #[test]
    fn l5_time_resumes_from_the_recorded_time() {
        let clock = Clock::wall();
        let ahead = clock.now() + 600 * SECOND;
        clock.resume_from(ahead);
        let now = clock.now();
        assert!((ahead..ahead + 60 * SECOND).contains(&now), "{now} for {ahead}");
        clock.resume_from(ahead + 3 * AHEAD_MAX);
        assert!(clock.now() < ahead + AHEAD_MAX, "that was no time");
    }
}
