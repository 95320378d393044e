//! A watch on the clock of a Postgres, which somebody may set.
//!
//! Every look for work tells the database's time. One that does not fit the time that has passed since an earlier look
//! means that the clock was set, and is noticed before anything is claimed or decided by it: the difference is taken out
//! of `now_us()`, for all servers, and paid back slowly. What was written in between may be wrong by it. So for the time of
//! a lock nobody takes what seems to have run out: whoever holds it renews it meanwhile.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Less is not a jump: a machine was busy.
const JUMP_MIN: i64 = 5_000_000;
/// A clock that is this far ahead is believed: the machines were off.
const AHEAD_MAX: i64 = 3_600_000_000;

/// So often every queue is searched for rows that were written by a clock that was wrong, though nothing speaks for it:
/// all servers may have been off when it was set right.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// What each session carries, read when it is opened.
pub(super) const SESSION_OFFSET: &str = "SELECT set_config('windlass.version', version::TEXT, FALSE), \
    set_config('windlass.offset', offset_us::TEXT, FALSE), set_config('windlass.since', since_us::TEXT, FALSE) \
    FROM clock";
/// Of all who notice the same jump one takes it out. Who saw it in a session that carried another setting than this
/// one does is too late: what it saw has been taken out since, and would be a second time.
pub(super) const CORRECT_JUMP: &str = "UPDATE clock SET version = version + 1, \
    offset_us = now_us() - wall_us() - CAST($1 AS BIGINT), since_us = wall_us() \
    WHERE version = clock_setting('windlass.version') AND version = CAST($2 AS BIGINT) RETURNING version";
/// The time, and by which setting it is told.
pub(super) const READ_CLOCK: &str = "SELECT now_us(), clock_setting('windlass.version')";

#[derive(Default)]
pub(in crate::db) struct ClockWatch(Mutex<ClockState>);

#[derive(Default)]
struct ClockState {
    /// What the database's time was, and between which moments it was that.
    last: Option<(Instant, Instant, i64)>,
    distrusted_until: Option<Instant>,
    /// When each queue was last searched.
    searched: HashMap<&'static str, Instant>,
}

impl ClockWatch {
    /// By how much the clock was set, if it was, and has to be set right.
    pub(in crate::db) fn jump(&self, asked: Instant, answered: Instant, now: i64) -> Option<i64> {
        let mut state = self.0.lock();
        let jump = state.last.and_then(|(then_asked, then_answered, before)| {
            let (least, most) = (micros(then_answered, asked), micros(then_asked, answered));
            let passed = now.saturating_sub(before);
            let jump = passed - passed.clamp(least.min(most), most);
            (jump.abs() > JUMP_MIN && jump < AHEAD_MAX).then_some(jump)
        });
        if jump.is_none() {
            state.last = Some((asked, answered, now));
        }
        jump
    }

    /// After a jump: for so long nothing is believed to have run out.
    pub(super) fn distrust(&self, ttl: Duration) {
        self.0.lock().distrusted_until = Some(Instant::now() + ttl);
    }

    pub(in crate::db) fn is_trusted(&self) -> bool {
        self.0.lock().distrusted_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Whether the next look at a queue is also for rows that were written by a clock that was wrong.
    pub(in crate::db) fn is_close_poll_due(&self, pipeline: &'static str) -> bool {
        let (mut state, now) = (self.0.lock(), Instant::now());
        let is_trusted = state.distrusted_until.is_none_or(|until| now >= until);
        let is_due = state.searched.get(pipeline).is_none_or(|at| now - *at >= CLOSE_POLL_INTERVAL);
        if is_due {
            state.searched.insert(pipeline, now);
        }
        is_due || !is_trusted
    }

    /// It cannot be set right: better to go on by a clock that was set than not at all.
    pub(super) fn accept_clock(&self) {
        self.0.lock().last = None;
    }
}

/// From one moment to the other; below zero when it is the earlier one.
fn micros(from: Instant, to: Instant) -> i64 {
    let count = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    count(to.saturating_duration_since(from)) - count(from.saturating_duration_since(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    /// What is said of looks that are asked and answered at these seconds, with the clock's time.
    fn observed_jump(looks: &[(u64, u64, i64)]) -> Vec<Option<i64>> {
        let (watch, began) = (ClockWatch::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let look =
            |(asked, answered, now): &(u64, u64, i64)| watch.jump(at(*asked), at(*answered), now * SECOND);
        looks.iter().map(look).map(|jump| jump.map(|jump| jump / SECOND)).collect()
    }

    #[test]
    fn l5_a_clock_that_was_set_is_noticed_until_it_was_set_right() {
        let ahead = [(0, 0, 0), (5, 5, 5), (6, 6, 606), (6, 7, 607), (8, 8, 8)];
        assert_eq!(observed_jump(&ahead), [None, None, Some(600), Some(600), None]);
        assert_eq!(observed_jump(&[(0, 0, 1000), (5, 5, 405)]), [None, Some(-600)]);
    }

    #[test]
    fn a_clock_that_is_right_is_believed_however_slow_looks_are() {
        assert_eq!(observed_jump(&[(0, 0, 0), (600, 600, 600), (601, 641, 630), (610, 642, 611)]), [None; 4]);
        assert_eq!(observed_jump(&[(10, 10, 10), (0, 11, 4), (12, 12, 12)]), [None; 3]);
    }

    #[test]
    fn machines_that_were_off_believe_the_clock() {
        assert_eq!(observed_jump(&[(0, 0, 0), (1, 1, 7200), (2, 2, 7201)]), [None; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn l5_after_a_jump_no_lock_has_run_out_until_its_holder_could_renew_it() {
        let watch = ClockWatch::default();
        assert!(watch.is_trusted());
        watch.distrust(Duration::from_secs(30));
        tokio::time::advance(Duration::from_secs(29)).await;
        assert!(!watch.is_trusted());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(watch.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn l5_queues_are_searched_after_a_jump_and_now_and_then() {
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
