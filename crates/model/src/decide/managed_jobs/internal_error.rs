//! Internal errors: a step that failed for an unforeseen reason.
//!
//! A few are tolerated, with growing delays. Then the task ends as FAILED_CONTROLLER, which otherwise follows only from
//! nodes that cannot be released and from invalid states. An unavailable database is not an error of a task.

use super::{TaskTransition, slots::with_jitter};
use crate::{
    managed_job::{
        Event, RecoverySource, ScheduleEvent, ScheduleState, Status,
        record::{INTERNAL_ERRORS_MAX, TaskRecord},
    },
    time::{Span, Timestamp},
};

/// Time without an error after which the count restarts.
pub const ERROR_WINDOW: Span = Span::hours(6);
const DELAY_FIRST: f64 = 60.0;
const DELAY_MAX: f64 = 1800.0;
const JITTER: f64 = 0.5;

/// Returns the delay before attempt number `count`, counted from 1.
pub fn retry_delay(count: u32, jitter: f64) -> Span {
    let power = i32::try_from(count.saturating_sub(1)).unwrap_or(i32::MAX);
    with_jitter(f64::min(DELAY_FIRST * 2.0_f64.powi(power), DELAY_MAX), JITTER, jitter)
}

/// Returns the state of a task after an internal error, with the transition for the event log.
pub fn apply_internal_error(
    record: &TaskRecord,
    what: &str,
    jitter: f64,
    now: Timestamp,
) -> (TaskRecord, Option<TaskTransition>) {
    let mut next = record.clone();
    let stale = record.emergency_at.is_none_or(|last| now.since(last) >= ERROR_WINDOW);
    next.emergencies = if stale { 1 } else { record.emergencies.saturating_add(1) };
    next.emergency_at = Some(now);
    if next.emergencies > INTERNAL_ERRORS_MAX {
        let message = format!("{INTERNAL_ERRORS_MAX} internal errors in a row; the last one: {what}");
        let moved = fail_controller(&mut next, &message, now);
        return (next, moved);
    }
    let retry_at = now + retry_delay(next.emergencies, jitter);
    let from = record.status;
    // A task that was never claimed has nothing to recover: it only waits.
    if matches!(record.schedule, ScheduleState::Inactive | ScheduleState::Waiting) {
        next.next_retry_at = Some(retry_at);
        return (next, None);
    }
    let moved = match next.apply(Event::Interrupted, RecoverySource::Emergency, now) {
        Ok(_) => Some(TaskTransition {
            from,
            to: next.status,
            event: Event::Interrupted,
            source: Some(RecoverySource::Emergency),
            rule: None,
            message: format!("internal error {} of {INTERNAL_ERRORS_MAX}: {what}", next.emergencies),
        }),
        // A task that has ended only waits before its nodes are released again.
        Err(_) => None,
    };
    if let Some(moved) = &moved {
        next.last_failure = Some(moved.message.clone());
    }
    // A recovery waits for a slot like any other, and not before its time.
    if next.status == Status::Recovering {
        requeue(&mut next);
    }
    next.next_retry_at = Some(retry_at);
    (next, moved)
}

/// Puts a recovering task back into the queue, from any state.
pub(super) fn requeue(record: &mut TaskRecord) {
    let events: &[ScheduleEvent] = match record.schedule {
        ScheduleState::Launching => &[ScheduleEvent::LaunchEnded, ScheduleEvent::WantsLaunch],
        ScheduleState::Alive => &[ScheduleEvent::WantsLaunch],
        ScheduleState::AliveBackoff => &[ScheduleEvent::BackoffOver],
        ScheduleState::AliveWaiting
        | ScheduleState::Done
        | ScheduleState::Inactive
        | ScheduleState::Waiting => &[],
    };
    for event in events {
        record.schedule(*event);
    }
}

/// Ends the task as FAILED_CONTROLLER, with the previous status in the reason.
pub(super) fn fail_controller(record: &mut TaskRecord, why: &str, now: Timestamp) -> Option<TaskTransition> {
    let from = record.status;
    if from == Status::FailedController {
        return None;
    }
    let message = format!("{why} (was {from})");
    record.apply(Event::ControllerFailed, RecoverySource::Emergency, now).ok()?;
    record.failure_reason = Some(message.clone());
    if record.schedule == ScheduleState::Launching {
        record.schedule(ScheduleEvent::LaunchEnded);
    }
    Some(TaskTransition {
        from,
        to: record.status,
        event: Event::ControllerFailed,
        source: None,
        rule: None,
        message,
    })
}
