//! Retry of failed jobs: the conditions, and the delay of a run before it.

use std::fmt;

use crate::{
    job,
    state_machine::words,
    time::{Span, Timestamp},
};

words! {
    /// Events that `retry.on_events` may name.
    pub enum Event: "retry event" {
        /// no instance was available
        NoCapacity = "no-capacity",
        /// a spot instance was reclaimed
        Interruption = "interruption",
        /// anything else that fails
        Error = "error",
    }
}

/// Default of `retry.duration`.
pub const DURATION_DEFAULT: Span = Span::hours(1);

/// Default limit of submissions of one job in one execution, including retries: a loop of failures has to end even if
/// every single one of them may be retried.
pub const TOTAL_MAX: u32 = 1_000;

/// Default delay before the first resubmission.
pub const DELAY_FIRST: Span = Span::secs(15);

/// Delay of a pending run before its next attempt, in multiples of the first delay; the last entry repeats.
pub const BACKOFF_FACTORS: [i64; 6] = [1, 2, 4, 8, 20, 40];

/// Returns the delay before resubmission number `attempt`, counted from 1. Attempt 0 is no retry and has no delay.
pub fn delay(first: Span, attempt: u32) -> Span {
    let Some(index) = attempt.checked_sub(1) else { return Span::ZERO };
    let last = BACKOFF_FACTORS.len() - 1;
    Span::secs(first.as_secs() * BACKOFF_FACTORS[usize::try_from(index).unwrap_or(last).min(last)])
}

/// A submission that ran this long before it failed begins a new streak, or as long as `retry.duration` if that is
/// less: a job that fails once a day may be retried each time.
pub const STREAK_RESET_AFTER: Span = Span::mins(10);

/// A delay is shortened if `retry.duration` would end before, but not below this.
const DELAY_MIN: Span = Span::secs(1);

/// Failures of one job in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureStreak {
    pub failures: u32,
    /// End of the first of them that had an instance.
    pub since: Option<Timestamp>,
}

impl FailureStreak {
    /// Adds a submission that ended. `ran` is how long its program ran, if it did.
    pub fn record_failure(
        &mut self,
        policy: Option<&Policy>,
        ended: Timestamp,
        had_instance: bool,
        ran: Option<Span>,
    ) {
        let steady = policy.map_or(STREAK_RESET_AFTER, |policy| policy.duration.min(STREAK_RESET_AFTER));
        if ran.is_some_and(|ran| ran >= steady) {
            *self = Self::default();
        }
        self.failures = self.failures.saturating_add(1);
        if had_instance {
            self.since = self.since.or(Some(ended));
        }
    }
}

/// Returns the delay before the next attempt, after this number of failures of which the first was at `since`.
pub fn next_delay(
    policy: Option<&Policy>,
    first: Span,
    failures: u32,
    since: Timestamp,
    now: Timestamp,
) -> Span {
    let left = policy.map_or(Span::ZERO, |policy| Span(policy.duration.0 - now.since(since).0));
    delay(first, failures).min(left.max(DELAY_MIN))
}

/// Retry settings of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub on_events: Vec<Event>,
    pub duration: Span,
    /// Maximum number of submissions of one job in one execution.
    pub max_total: u32,
}

impl Policy {
    /// Returns the policy of `retry: true`.
    pub fn always() -> Self {
        Self { on_events: Event::ALL.to_vec(), duration: DURATION_DEFAULT, max_total: TOTAL_MAX }
    }

    pub fn covers(&self, event: Event) -> bool {
        self.on_events.contains(&event)
    }
}

/// State of a job after its latest submission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureHistory {
    pub reason: job::TerminationReason,
    /// Submissions in this execution of the run, including the ended one.
    pub attempts: u32,
    /// Time at which the run was submitted; for a scheduled run, the slot that fired.
    pub run_began: Timestamp,
    /// First failure of the streak: the end of the first submission that had an instance, of those that failed in a
    /// row. See [`FailureStreak`].
    pub failing_since: Option<Timestamp>,
}

/// Decision whether to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    Yes { event: Event, elapsed: Span },
    No(RetryRefusal),
}

/// Reason why there is no retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryRefusal {
    /// The configuration has no `retry`.
    Off,
    /// Nothing to retry: the reason is a decision or a success.
    NotAFailure(job::TerminationReason),
    /// `retry.on_events` does not include this event.
    NotCovered(Event),
    /// The time counts from the end of a submission that had an instance, and there was none.
    NeverProvisioned(Event),
    /// `retry.duration` is exceeded.
    DurationExceeded { elapsed: Span, duration: Span, attempts: u32 },
    /// `retry.max_total` submissions were made.
    AttemptsExceeded { max_total: u32 },
}

impl RetryRefusal {
    /// Returns whether the job could have been retried and only exceeded the time or number of attempts.
    pub const fn is_limit(self) -> bool {
        match self {
            Self::DurationExceeded { .. } | Self::AttemptsExceeded { .. } => true,
            Self::Off | Self::NotAFailure(_) | Self::NotCovered(_) | Self::NeverProvisioned(_) => false,
        }
    }
}

impl fmt::Display for RetryRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("retry is off"),
            Self::NotAFailure(reason) => write!(f, "{reason} is never retried"),
            Self::NotCovered(event) => write!(f, "retry does not cover {event}"),
            Self::NeverProvisioned(event) => write!(f, "{event} before it ever had an instance"),
            Self::DurationExceeded { elapsed, duration, attempts } => {
                let plural = if *attempts == 1 { "" } else { "s" };
                write!(
                    f,
                    "retry duration of {} s exceeded after {attempts} attempt{plural} ({} s elapsed)",
                    duration.as_secs(),
                    elapsed.as_secs()
                )
            }
            Self::AttemptsExceeded { max_total } => write!(f, "all {max_total} attempts are used up"),
        }
    }
}

/// Decides whether a job that ended is retried at `now`.
///
/// Time counts from the start of the run if there was no capacity before the job ever had an instance, and otherwise
/// from the first failure of the streak.
pub fn decide(policy: Option<&Policy>, job: FailureHistory, now: Timestamp) -> RetryDecision {
    let Some(policy) = policy else { return RetryDecision::No(RetryRefusal::Off) };
    let Some(event) = job.reason.retry_event() else {
        return RetryDecision::No(RetryRefusal::NotAFailure(job.reason));
    };
    if !policy.covers(event) {
        return RetryDecision::No(RetryRefusal::NotCovered(event));
    }
    let since = match (event, job.failing_since) {
        (_, Some(end)) => end,
        (Event::NoCapacity, None) => job.run_began,
        (Event::Interruption | Event::Error, None) => {
            return RetryDecision::No(RetryRefusal::NeverProvisioned(event));
        }
    };
    let elapsed = now.since(since);
    if elapsed >= policy.duration {
        let attempts = job.attempts;
        return RetryDecision::No(RetryRefusal::DurationExceeded {
            elapsed,
            duration: policy.duration,
            attempts,
        });
    }
    if job.attempts >= policy.max_total {
        return RetryDecision::No(RetryRefusal::AttemptsExceeded { max_total: policy.max_total });
    }
    RetryDecision::Yes { event, elapsed }
}
