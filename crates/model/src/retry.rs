//! When a job that ended badly is tried again, and how long a run waits before it.

use std::fmt;

use crate::{
    job,
    machine::words,
    time::{Span, Timestamp},
};

words! {
    /// What `retry.on_events` may name.
    pub enum Event: "retry event" {
        /// no instance could be had
        NoCapacity = "no-capacity",
        /// a spot instance was taken back
        Interruption = "interruption",
        /// anything else that fails
        Error = "error",
    }
}

/// `retry.duration` when it is not given.
pub const DURATION_DEFAULT: Span = Span::hours(1);

/// Submissions of one job in one execution, retries included, when nothing smaller is asked for: a loop
/// of failures has to end some day even where every single one of them may be retried.
pub const TOTAL_MAX: u32 = 1_000;

/// The wait before the first resubmission, unless the server is told otherwise.
pub const DELAY_FIRST: Span = Span::secs(15);

/// How many times the first wait a pending run waits before its next try; the last entry repeats.
pub const BACKOFF_FACTORS: [i64; 6] = [1, 2, 4, 8, 20, 40];

/// The wait before resubmission number `attempt`, counted from 1. Attempt 0 is no retry and does not wait.
pub fn delay(first: Span, attempt: u32) -> Span {
    let Some(index) = attempt.checked_sub(1) else { return Span::ZERO };
    let last = BACKOFF_FACTORS.len() - 1;
    Span::secs(first.as_secs() * BACKOFF_FACTORS[usize::try_from(index).unwrap_or(last).min(last)])
}

/// One that ran for so long before it failed begins a new streak, or for as long as `retry.duration` if that is less:
/// what fails once a day may be tried again each time.
pub const STREAK_RESET_AFTER: Span = Span::mins(10);

/// A wait is cut short where `retry.duration` would be over before, but not below this.
const DELAY_MIN: Span = Span::secs(1);

/// Failures of one job in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureStreak {
    pub failures: u32,
    /// The end of the first of them that had an instance.
    pub since: Option<Timestamp>,
}

impl FailureStreak {
    /// One more submission that ended. `ran` is how long its program did, if it did.
    pub fn add(&mut self, policy: Option<&Policy>, ended: Timestamp, had_instance: bool, ran: Option<Span>) {
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

/// The wait before the next try, after so many failures of which the first was at `since`.
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

/// What a configuration says about retries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub on_events: Vec<Event>,
    pub duration: Span,
    /// Upper bound on the submissions of one job in one execution.
    pub max_total: u32,
}

impl Policy {
    /// `retry: true`.
    pub fn always() -> Self {
        Self { on_events: Event::ALL.to_vec(), duration: DURATION_DEFAULT, max_total: TOTAL_MAX }
    }

    pub fn covers(&self, event: Event) -> bool {
        self.on_events.contains(&event)
    }
}

/// How a job stands after its latest submission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureHistory {
    pub reason: job::TerminationReason,
    /// Submissions made in this execution of the run, the ended one included.
    pub tries: u32,
    /// When the run was submitted; of a scheduled run, the slot that fired.
    pub run_began: Timestamp,
    /// The first failure of the streak: the end of the first submission that ever had an instance, of those that failed
    /// in a row. See [`FailureStreak`].
    pub failing_since: Option<Timestamp>,
}

/// The answer to "once more?".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    Yes { event: Event, elapsed: Span },
    No(RetryRefusal),
}

/// Why there is no further try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryRefusal {
    /// The configuration has no `retry`.
    Off,
    /// Nothing to repeat: the reason is a decision or a success.
    NotAFailure(job::TerminationReason),
    /// `retry.on_events` leaves this event out.
    NotCovered(Event),
    /// The clock starts at the end of a submission that had an instance, and there was none.
    NeverProvisioned(Event),
    /// `retry.duration` is over.
    DurationExceeded { elapsed: Span, duration: Span },
    /// `retry.max_total` submissions were made.
    AttemptsExceeded { max_total: u32 },
}

impl RetryRefusal {
    /// Whether the job could have been retried and only ran out of time or tries.
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
            Self::DurationExceeded { elapsed, duration } => {
                write!(
                    f,
                    "retry duration of {} s is over ({} s passed)",
                    duration.as_secs(),
                    elapsed.as_secs()
                )
            }
            Self::AttemptsExceeded { max_total } => write!(f, "all {max_total} submissions are spent"),
        }
    }
}

/// Whether a job that ended is to be tried again at `now`.
///
/// The clock: want of capacity before the job ever had an instance counts from the beginning of the run;
/// everything else from the first failure of the streak.
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
        return RetryDecision::No(RetryRefusal::DurationExceeded { elapsed, duration: policy.duration });
    }
    if job.tries >= policy.max_total {
        return RetryDecision::No(RetryRefusal::AttemptsExceeded { max_total: policy.max_total });
    }
    RetryDecision::Yes { event, elapsed }
}
