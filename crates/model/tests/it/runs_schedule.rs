//! Cron slots: each once, in order, regardless of restarts and clocks.

use proptest::prelude::*;
use windlass_model::{
    schedule::{CronSchedule, next_slot},
    time::{Span, Timestamp},
};

#[track_caller]
fn check(patterns: &[&str], after: &str, expected: &str) {
    let next = CronSchedule::parse(patterns).unwrap().next_after(Timestamp::parse(after).unwrap());
    assert_eq!(next.unwrap().to_string(), expected);
}

#[test]
fn the_next_slot_is_strictly_later() {
    check(&["0 9 * * *"], "2026-11-20T08:59:59.999999Z", "2026-11-20T09:00:00Z");
    check(&["0 9 * * *"], "2026-11-20T09:00:00Z", "2026-11-21T09:00:00Z");
    check(&["0 9 * * *"], "2026-11-20T09:00:00.5Z", "2026-11-21T09:00:00Z");
    check(&["*/15 * * * *"], "2026-12-31T23:50:00Z", "2027-01-01T00:00:00Z");
    check(&["0 0 29 2 *"], "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z");
    check(&["30 6 * * MON-FRI"], "2026-11-20T07:00:00Z", "2026-11-23T06:30:00Z");
}

#[test]
fn several_cron_patterns_yield_the_earliest_slot() {
    check(&["0 12 * * *", "30 9 * * *", "0 9 * * *"], "2026-11-20T09:00:00Z", "2026-11-20T09:30:00Z");
}

#[test]
fn r18_slots_are_in_utc_without_daylight_saving_time() {
    // In Europe, one of these hours occurred twice and another never.
    check(&["30 1 * * *"], "2026-10-24T01:30:00Z", "2026-10-25T01:30:00Z");
    check(&["30 2 * * *"], "2026-03-28T02:30:00Z", "2026-03-29T02:30:00Z");
    check(&["0 * * * *"], "2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z");
}

#[test]
fn an_invalid_cron_schedule_is_refused_with_the_reason() {
    #[track_caller]
    fn check(patterns: &[&str], expected: &str) {
        assert_eq!(CronSchedule::parse(patterns).unwrap_err().to_string(), expected);
    }
    check(&[], "`schedule` has no `cron` pattern");
    check(&["0 9 * *"], "invalid cron `0 9 * *`: expected 5 fields (minute hour day month weekday), found 4");
    check(
        &["0 0 9 * * *"],
        "invalid cron `0 0 9 * * *`: expected 5 fields (minute hour day month weekday), found 6",
    );
    check(&["@daily"], "invalid cron `@daily`: expected 5 fields (minute hour day month weekday), found 1");
    check(&["61 * * * *"], "invalid cron `61 * * * *`");
    check(&["0 0 30 2 *"], "cron `0 0 30 2 *` never matches");
}

#[test]
fn r18_a_clock_that_jumps_back_does_not_repeat_a_slot() {
    let crons = CronSchedule::parse(&["0 * * * *"]).unwrap();
    let fired = Timestamp::parse("2026-11-20T09:00:00Z").unwrap();
    let jumped = fired - Span::mins(10);
    assert_eq!(next_slot(&crons, Some(fired), jumped), Some(fired + Span::hours(1)));
    assert_eq!(next_slot(&crons, None, jumped), Some(fired));
}

#[test]
fn slots_that_passed_while_an_execution_lasted_are_skipped() {
    let crons = CronSchedule::parse(&["0 * * * *"]).unwrap();
    let fired = Timestamp::parse("2026-11-20T09:00:00Z").unwrap();
    assert_eq!(next_slot(&crons, Some(fired), fired + Span::mins(190)), Some(fired + Span::hours(4)));
}

const PATTERNS: [&str; 6] =
    ["*/7 * * * *", "0 * * * *", "30 9 * * *", "15,45 */3 * * *", "0 0 1 * *", "5 4 * * SUN"];

fn matches(pattern: &str, minute: i64, hour: i64, day: i64, weekday: i64) -> bool {
    match pattern {
        "*/7 * * * *" => minute % 7 == 0,
        "0 * * * *" => minute == 0,
        "30 9 * * *" => minute == 30 && hour == 9,
        "15,45 */3 * * *" => (minute == 15 || minute == 45) && hour % 3 == 0,
        "0 0 1 * *" => minute == 0 && hour == 0 && day == 1,
        "5 4 * * SUN" => minute == 5 && hour == 4 && weekday == 0,
        other => panic!("no rule for {other}"),
    }
}

/// 2026-11-01, a Sunday: a month of which every minute can be enumerated.
const NOVEMBER: i64 = 1_793_491_200;

fn slots_by_hand(patterns: &[&str], from: i64, to: i64) -> Vec<i64> {
    let minutes = (from.div_euclid(60) + 1)..=to.div_euclid(60);
    let is_slot = |minute: &i64| {
        let since = minute - NOVEMBER / 60;
        let (day, hour) = (since / 1_440, since / 60 % 24);
        patterns.iter().any(|pattern| matches(pattern, since % 60, hour, day % 30 + 1, day % 7))
    };
    minutes.filter(is_slot).map(|minute| minute * 60).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Repeated queries from the previous slot return every slot, in order, once.
    #[test]
    fn r18_repeated_next_slot_queries_return_every_slot_once_in_order(
        patterns in prop::sample::subsequence(&PATTERNS[..], 1..=3),
        from in 0..20 * 86_400_i64,
        length in 0..3 * 86_400_i64,
    ) {
        let crons = CronSchedule::parse(&patterns).unwrap();
        let (from, to) = (NOVEMBER + from, NOVEMBER + from + length);
        let mut found = Vec::new();
        let mut last = Timestamp::from_secs(from);
        while let Some(next) = crons.next_after(last).filter(|next| *next <= Timestamp::from_secs(to)) {
            prop_assert!(next > last);
            found.push(next.0 / 1_000_000);
            last = next;
        }
        prop_assert_eq!(found, slots_by_hand(&patterns, from, to));
    }

    /// A server that queries at arbitrary times, and keeps only the slot it waits for, fires each slot it waited for
    /// exactly once.
    #[test]
    fn r18_restarts_neither_lose_nor_double_a_slot(
        patterns in prop::sample::subsequence(&PATTERNS[..], 1..=3),
        looks in prop::collection::vec((-900..7_200_i64, any::<bool>()), 1..60),
    ) {
        let crons = CronSchedule::parse(&patterns).unwrap();
        let mut now = Timestamp::from_secs(NOVEMBER);
        let mut waiting = crons.next_after(now);
        let mut fired: Vec<Timestamp> = Vec::new();
        for (step, confirms_twice) in looks {
            now = now + Span::secs(step);
            for _ in 0..=i32::from(confirms_twice) {
                if let Some(slot) = waiting.filter(|slot| *slot <= now) {
                    prop_assert!(fired.last().is_none_or(|last| *last < slot), "{slot} fired twice");
                    fired.push(slot);
                    waiting = next_slot(&crons, Some(slot), now);
                }
            }
            let slot = waiting.unwrap();
            let due = fired.last().copied().unwrap_or(Timestamp::from_secs(NOVEMBER));
            prop_assert!(slot > due, "waits for a slot that is over");
        }
    }
}
