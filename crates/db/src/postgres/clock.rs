//! Detection of jumps of the Postgres server's clock.
//!
//! Every poll reads the database's time. One that does not match the time since an earlier poll means that the clock
//! was set, which is detected before any claim or decision is based on it: the difference is subtracted from
//! `now_us()`, for all servers, and reduced slowly. Times written in between may be wrong by it. So for the duration of
//! a lock, no lock that seems expired is claimed: its holder renews it in the meantime.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// A smaller difference is not a jump: a machine was busy.
const JUMP_MIN: i64 = 5_000_000;
/// A clock this far ahead is accepted: the machines were off.
const AHEAD_MAX: i64 = 3_600_000_000;

/// Interval at which every queue is searched for rows that were written with a wrong clock, even without any sign of
/// it: all servers may have been off when the clock was corrected.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// Offset that each session carries, read when it is opened.
pub(super) const SESSION_OFFSET: &str = "SELECT set_config('windlass.version', version::TEXT, FALSE), \
    set_config('windlass.offset', offset_us::TEXT, FALSE), set_config('windlass.since', since_us::TEXT, FALSE) \
    FROM clock";
/// Of all servers that detect the same jump one corrects it. One that saw it in a session with another version of the
/// offset is too late: the jump has been corrected since, and would be corrected twice.
pub(super) const CORRECT_JUMP: &str = "UPDATE clock SET version = version + 1, \
    offset_us = now_us() - wall_us() - CAST($1 AS BIGINT), since_us = wall_us() \
    WHERE version = clock_setting('windlass.version') AND version = CAST($2 AS BIGINT) RETURNING version";
/// Time, and the version of the offset with which it was computed.
pub(super) const READ_CLOCK: &str = "SELECT now_us(), clock_setting('windlass.version')";

#[derive(Default)]
pub(crate) struct ClockWatch(Mutex<ClockState>);

#[derive(Default)]
struct ClockState {
    /// Time of the database, and the local times between which it was read.
    last: Option<(Instant, Instant, i64)>,
    distrusted_until: Option<Instant>,
    /// Time of the last search of each queue.
    searched: HashMap<&'static str, Instant>,
}

impl ClockWatch {
    /// Size of the jump of the clock, if there was one that needs correction.
    pub(crate) fn jump(&self, requested: Instant, answered: Instant, now: i64) -> Option<i64> {
        let mut state = self.0.lock();
        let jump = state.last.and_then(|(then_requested, then_answered, before)| {
            let (least, most) = (micros(then_answered, requested), micros(then_requested, answered));
            let passed = now.saturating_sub(before);
            let jump = passed - passed.clamp(least.min(most), most);
            (jump.abs() > JUMP_MIN && jump < AHEAD_MAX).then_some(jump)
        });
        if jump.is_none() {
            state.last = Some((requested, answered, now));
        }
        jump
    }

    /// After a jump: treats no lock as expired for this long.
    pub(super) fn distrust(&self, ttl: Duration) {
        self.0.lock().distrusted_until = Some(Instant::now() + ttl);
    }

    pub(crate) fn is_trusted(&self) -> bool {
        self.0.lock().distrusted_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Returns whether the next poll of a queue also searches for rows that were written with a wrong clock.
    pub(crate) fn is_close_poll_due(&self, pipeline: &'static str) -> bool {
        let (mut state, now) = (self.0.lock(), Instant::now());
        let is_trusted = state.distrusted_until.is_none_or(|until| now >= until);
        let is_due = state.searched.get(pipeline).is_none_or(|at| now - *at >= CLOSE_POLL_INTERVAL);
        if is_due {
            state.searched.insert(pipeline, now);
        }
        is_due || !is_trusted
    }

    /// Accepts a jump that cannot be corrected: that is better than stopping.
    pub(super) fn accept_clock(&self) {
        self.0.lock().last = None;
    }
}

/// Microseconds from one time to the other; negative if the second is earlier.
fn micros(from: Instant, to: Instant) -> i64 {
    let count = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    count(to.saturating_duration_since(from)) - count(from.saturating_duration_since(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    /// Results for polls that were sent and answered at these seconds, with the clock's time.
    fn observed_jump(looks: &[(u64, u64, i64)]) -> Vec<Option<i64>> {
        let (watch, began) = (ClockWatch::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let poll = |(requested, answered, now): &(u64, u64, i64)| {
            watch.jump(at(*requested), at(*answered), now * SECOND)
        };
        looks.iter().map(poll).map(|jump| jump.map(|jump| jump / SECOND)).collect()
    }

    #[test]
    fn l5_a_clock_jump_is_detected_until_it_is_corrected() {
        let ahead = [(0, 0, 0), (5, 5, 5), (6, 6, 606), (6, 7, 607), (8, 8, 8)];
        assert_eq!(observed_jump(&ahead), [None, None, Some(600), Some(600), None]);
        assert_eq!(observed_jump(&[(0, 0, 1000), (5, 5, 405)]), [None, Some(-600)]);
    }

    #[test]
    fn an_accurate_clock_is_trusted_even_with_slow_readings() {
        assert_eq!(observed_jump(&[(0, 0, 0), (600, 600, 600), (601, 641, 630), (610, 642, 611)]), [None; 4]);
        assert_eq!(observed_jump(&[(10, 10, 10), (0, 11, 4), (12, 12, 12)]), [None; 3]);
    }

    #[test]
    fn a_jump_beyond_the_limit_is_treated_as_downtime() {
        assert_eq!(observed_jump(&[(0, 0, 0), (1, 1, 7200), (2, 2, 7201)]), [None; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn l5_after_a_jump_no_lock_expires_before_its_holder_could_renew_it() {
        let watch = ClockWatch::default();
        assert!(watch.is_trusted());
        watch.distrust(Duration::from_secs(30));
        tokio::time::advance(Duration::from_secs(29)).await;
        assert!(!watch.is_trusted());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(watch.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn l5_queues_are_polled_closely_after_a_jump_and_periodically() {
        let watch = ClockWatch::default();
        assert!(watch.is_close_poll_due("runs") && watch.is_close_poll_due("jobs"), "the first look of each");
        assert!(!watch.is_close_poll_due("runs"));
        watch.distrust(Duration::from_secs(10));
        assert!(watch.is_close_poll_due("runs") && watch.is_close_poll_due("runs"));
        tokio::time::advance(Duration::from_secs(11)).await;
        assert!(!watch.is_close_poll_due("runs"));
        tokio::time::advance(CLOSE_POLL_INTERVAL).await;
        assert!(watch.is_close_poll_due("runs"));
    }
}
