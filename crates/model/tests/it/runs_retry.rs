//! Retry decisions.

use windlass_model::{
    retry::{self, FailureHistory, FailureStreak, Policy, RetryDecision},
    time::{Span, Timestamp},
};

use crate::runs_fixture::NOW;

fn ago(secs: i64) -> Timestamp {
    NOW - Span::secs(secs)
}

#[track_caller]
fn check(
    policy: Option<&Policy>,
    reason: &str,
    began: i64,
    provisioned: Option<i64>,
    tries: u32,
    expected: &str,
) {
    let phase = FailureHistory {
        reason: reason.parse().unwrap(),
        attempts: tries,
        run_began: ago(began),
        failing_since: provisioned.map(ago),
    };
    let answer = match retry::decide(policy, phase, NOW) {
        RetryDecision::Yes { event, elapsed } => format!("yes: {event} after {} s", elapsed.as_secs()),
        RetryDecision::No(refusal) if refusal.is_limit() => format!("limit: {refusal}"),
        RetryDecision::No(refusal) => format!("no: {refusal}"),
    };
    assert_eq!(answer, expected);
}

#[test]
fn without_a_policy_nothing_is_retried() {
    check(None, "container_exited_with_error", 0, Some(0), 1, "no: retry is off");
}

#[test]
fn successes_and_ends_by_users_or_limits_are_never_retried() {
    let all = Policy::always();
    for reason in ["done_by_runner", "terminated_by_user", "max_duration_exceeded", "scaled_down"] {
        check(Some(&all), reason, 0, Some(0), 1, &format!("no: {reason} is never retried"));
    }
}

#[test]
fn r11_only_the_named_events_are_retried() {
    let interruptions = Policy { on_events: vec![retry::Event::Interruption], ..Policy::always() };
    check(Some(&interruptions), "interrupted_by_no_capacity", 9, Some(5), 1, "yes: interruption after 5 s");
    check(Some(&interruptions), "volume_error", 9, Some(5), 1, "no: retry does not cover error");
}

#[test]
fn r11_no_capacity_retries_count_from_the_run_start_until_a_job_had_an_instance() {
    let all = Policy::always();
    let reason = "failed_to_start_due_to_no_capacity";
    check(Some(&all), reason, 3_599, None, 40, "yes: no-capacity after 3599 s");
    check(
        Some(&all),
        reason,
        3_600,
        None,
        1,
        "limit: retry duration of 3600 s exceeded after 1 attempt (3600 s elapsed)",
    );
    check(Some(&all), reason, 90_000, Some(60), 1, "yes: no-capacity after 60 s");
}

#[test]
fn r11_other_retry_durations_count_from_the_first_failure_with_an_instance() {
    let all = Policy::always();
    check(Some(&all), "executor_error", 90_000, Some(10), 1, "yes: error after 10 s");
    check(
        Some(&all),
        "executor_error",
        0,
        Some(4_000),
        1,
        "limit: retry duration of 3600 s exceeded after 1 attempt (4000 s elapsed)",
    );
    check(Some(&all), "volume_error", 0, None, 1, "no: error before it ever had an instance");
}

#[test]
fn r11_the_total_number_of_submissions_is_limited() {
    let three = Policy { max_total: 3, ..Policy::always() };
    check(Some(&three), "executor_error", 0, Some(0), 2, "yes: error after 0 s");
    check(Some(&three), "executor_error", 0, Some(0), 3, "limit: all 3 attempts are used up");
}

#[test]
fn r11_the_delay_grows_to_ten_minutes() {
    let delays: Vec<_> = (0..9).map(|attempt| retry::delay(retry::DELAY_FIRST, attempt).as_secs()).collect();
    assert_eq!(delays, [0, 15, 30, 60, 120, 300, 600, 600, 600]);
    assert_eq!(retry::delay(retry::DELAY_FIRST, u32::MAX), Span::mins(10));
    assert_eq!(retry::delay(Span::secs(2), 3), Span::secs(8));
}

#[test]
fn r11_a_failure_streak_starts_at_its_first_failure_and_resets_after_a_long_run() {
    let policy = Policy { duration: Span::mins(2), ..Policy::always() };
    let mut streak = FailureStreak::default();
    let mut add = |ended, had_instance, ran: Option<i64>| {
        streak.record_failure(Some(&policy), ago(ended), had_instance, ran.map(Span::secs));
        (streak.failures, streak.since.map(|since| NOW.since(since).as_secs()))
    };
    assert_eq!(add(900, false, None), (1, None), "want of capacity has no clock of its own");
    assert_eq!(add(800, true, Some(1)), (2, Some(800)));
    assert_eq!(add(700, true, Some(119)), (3, Some(800)));
    assert_eq!(add(500, true, Some(120)), (1, Some(500)), "as long as the duration");
    assert_eq!(add(400, true, None), (2, Some(500)));
    let mut streak = FailureStreak::default();
    for (ran, failures) in [(1, 1), (599, 2), (600, 1)] {
        streak.record_failure(Some(&Policy::always()), NOW, true, Some(Span::secs(ran)));
        assert_eq!(streak.failures, failures, "{ran}");
    }
}

#[test]
fn r11_waits_grow_with_the_failures_of_the_streak() {
    let hour = Policy::always();
    let wait = |failures, since| {
        retry::next_delay(Some(&hour), retry::DELAY_FIRST, failures, ago(since), NOW).as_secs()
    };
    assert_eq!([wait(1, 0), wait(2, 20), wait(3, 60), wait(4, 200)], [15, 30, 60, 120]);
    assert_eq!(wait(6, 3_590), 10, "no longer than what is left");
    assert_eq!(wait(6, 3_600), 1);
}
