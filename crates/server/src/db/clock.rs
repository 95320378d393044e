//! The one place that reads the wall clock, and only for SQLite: the server is the database there.
//! On Postgres time comes from the server's `now()`.
//!
//! A wall clock may be set. If leases and timeouts followed, they would end early or never. So time goes on at the
//! pace of the machine's uptime, and draws near to the wall by no more than a tenth of that.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::SystemTime,
};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// A wall this far ahead is believed at once: the machine was off, whatever its uptime says.
const AHEAD_MAX: i64 = 3_600_000_000;
/// Steps shorter than this are not kept; a tenth of them would be nothing.
const STEP_MIN: i64 = 1000;

/// Microseconds since 1970, never going back.
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

    /// Goes on from the last moment that a database has recorded, if the wall was set back since. One that is
    /// further ahead than the wall can be wrong is not believed.
    pub(super) fn resume_from(&self, recorded: i64) {
        if let ClockSource::Steady(steady) = &*self.source {
            let mut steady = steady.lock();
            if recorded.saturating_sub(steady.at) < AHEAD_MAX {
                steady.at = steady.at.max(recorded);
            }
        }
    }

    /// A given clock that was set back stands still here until it has caught up.
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

/// Counts while the machine sleeps, too.
fn uptime() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

struct SteadyClock {
    at: i64,
    /// When that was.
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

    /// Steps of one second each, with a wall that is so far from the truth.
    fn after(seconds: i64, off_by: i64) -> i64 {
        let mut clock = steady();
        (1..=seconds).map(|n| clock.step(START + n * SECOND + off_by, n * SECOND)).last().unwrap_or(START)
            - START
    }

    #[test]
    fn a_wall_that_is_right_is_followed() {
        assert_eq!(after(100, 0), 100 * SECOND);
    }

    #[test]
    fn l5_a_wall_that_jumps_ends_no_lease_early_and_stops_no_timer() {
        let minutes = 600 * SECOND;
        assert_eq!(after(30, minutes), 33 * SECOND, "a tenth faster");
        assert_eq!(after(30, -minutes), 27 * SECOND, "a tenth slower");
    }

    #[test]
    fn what_is_left_of_a_jump_goes_away() {
        assert_eq!(after(6010, 600 * SECOND), (6010 + 600) * SECOND);
        assert_eq!(after(6010, -600 * SECOND), (6010 - 600) * SECOND);
    }

    #[test]
    fn a_machine_that_was_off_for_long_believes_the_wall() {
        assert_eq!(after(1, 2 * AHEAD_MAX), SECOND + 2 * AHEAD_MAX);
    }

    #[test]
    fn short_steps_count_too() {
        let mut clock = steady();
        for n in 1..=10_000 {
            clock.step(START + n, n);
        }
        assert_eq!(clock.step(START + 10_000, 10_000), START + 10_000);
    }

    #[test]
    fn l5_time_goes_on_from_what_was_recorded() {
        let clock = Clock::wall();
        let ahead = clock.now() + 600 * SECOND;
        clock.resume_from(ahead);
        let now = clock.now();
        assert!((ahead..ahead + 60 * SECOND).contains(&now), "{now} for {ahead}");
        clock.resume_from(ahead + 3 * AHEAD_MAX);
        assert!(clock.now() < ahead + AHEAD_MAX, "that was no time");
    }
}
