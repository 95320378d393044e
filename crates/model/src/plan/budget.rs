//! Budgets: how much the jobs of a project, or of one of its members, may cost or use in a period.
//!
//! What ended jobs cost counts, and what running ones have cost until now. Beyond a budget no job starts; those that run
//! go on. So a budget can be exceeded by what runs when it is used up; `max_duration` bounds that.

use std::fmt;

use serde::Serialize;

use crate::{
    config::job_spec::JobSpec,
    id::{ProjectId, UserId},
    plan::quota::{QuotaResource, least_amount},
    state_machine::words,
    time::Timestamp,
};

const DAY_US: i64 = 86_400_000_000;
const HOUR_MS: f64 = 3_600_000.0;
const SECOND_MS: u64 = 1_000;
const MICRODOLLARS: f64 = 1e6;

words! {
    /// Unit of a budget.
    pub enum BudgetUnit: "budget unit" {
        /// dollars
        Cost = "cost",
        /// hours of GPUs
        GpuHours = "gpu-hours",
    }

    /// Period of a budget, in UTC.
    pub enum BudgetPeriod: "budget period" {
        /// from midnight to midnight
        Day = "day",
        /// from Monday to Sunday
        Week = "week",
        /// a calendar month
        Month = "month",
    }
}

impl BudgetUnit {
    /// Number of stored units in a dollar or an hour.
    pub const fn scale(self) -> f64 {
        match self {
            Self::Cost => MICRODOLLARS,
            Self::GpuHours => HOUR_MS,
        }
    }

    /// Writes a stored amount with its unit.
    pub fn amount(self, amount: u64) -> String {
        let amount = amount as f64 / self.scale();
        match self {
            Self::Cost => format!("${amount:.2}"),
            Self::GpuHours => format!("{amount:.1} GPU hours"),
        }
    }
}

impl BudgetPeriod {
    /// First day of the period that contains a day; days are counted from 1970.
    pub fn first_day(self, day: i64) -> i64 {
        match self {
            Self::Day => day,
            // 1970 began on a Thursday.
            Self::Week => day - (day + 3).rem_euclid(7),
            Self::Month => day - i64::from(date_of(day).day()) + 1,
        }
    }

    /// First day of the next period.
    pub fn next_first_day(self, day: i64) -> i64 {
        let first = self.first_day(day);
        match self {
            Self::Day => first + 1,
            Self::Week => first + 7,
            Self::Month => first + i64::from(date_of(first).days_in_month()),
        }
    }
}

/// Number of the day of a time, since 1970, in UTC.
pub fn day_of(at: Timestamp) -> i64 {
    at.0.div_euclid(DAY_US)
}

/// Beginning of a day.
pub fn start_of(day: i64) -> Timestamp {
    Timestamp(day.saturating_mul(DAY_US))
}

/// Calendar date of a day; days that have none are that of 1970.
fn date_of(day: i64) -> jiff::civil::Date {
    let at = jiff::Timestamp::from_microsecond(day.saturating_mul(DAY_US)).unwrap_or_default();
    at.to_zoned(jiff::tz::TimeZone::UTC).date()
}

/// A budget, and how much of it is spent in this period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    pub project: ProjectId,
    /// The member whose jobs it counts; `None`: all jobs of the project.
    pub member: Option<UserId>,
    pub unit: BudgetUnit,
    pub period: BudgetPeriod,
    /// Amount from which a warning is recorded.
    pub warn: Option<u64>,
    /// Amount at which jobs no longer start.
    pub cap: Option<u64>,
    pub spent: u64,
    /// End of the period.
    pub ends_at: Timestamp,
}

words! {
    /// State of a budget.
    pub enum BudgetState: "budget state" {
        /// below its warning and its cap
        Within = "within",
        /// at its warning or beyond
        Warning = "warning",
        /// at its cap or beyond: no job starts
        Exhausted = "exhausted",
    }
}

impl Budget {
    pub fn applies_to(&self, project: ProjectId, user: UserId) -> bool {
        self.project == project && self.member.is_none_or(|member| member == user)
    }

    pub fn state(&self) -> BudgetState {
        if self.cap.is_some_and(|cap| self.spent >= cap) {
            BudgetState::Exhausted
        } else if self.warn.is_some_and(|warn| self.spent >= warn) {
            BudgetState::Warning
        } else {
            BudgetState::Within
        }
    }

    /// Reason why no job starts, if the budget is used up.
    pub fn excess(&self) -> Option<BudgetExcess> {
        let cap = self.cap.filter(|_| self.state() == BudgetState::Exhausted)?;
        let Self { unit, period, spent, ends_at, .. } = *self;
        Some(BudgetExcess { unit, period, spent, cap, is_members: self.member.is_some(), ends_at })
    }
}

/// A budget that is used up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetExcess {
    pub unit: BudgetUnit,
    pub period: BudgetPeriod,
    pub spent: u64,
    pub cap: u64,
    /// True if the budget is that of a member.
    pub is_members: bool,
    pub ends_at: Timestamp,
}

impl fmt::Display for BudgetExcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, period, spent, cap, is_members, ends_at } = self;
        let whose = if *is_members { "member" } else { "project" };
        write!(
            f,
            "the {whose} has spent {} of its budget of {} for this {period}, which ends at {ends_at}",
            unit.amount(*spent),
            unit.amount(*cap)
        )
    }
}

/// The least GPU time that jobs which start together use if they last until their limits, in milliseconds. `None`
/// without a limit.
pub fn least_gpu_time(jobs: &[JobSpec]) -> Option<u64> {
    let of_job = |job: &JobSpec| {
        let secs = u64::try_from(job.max_duration?).ok()?;
        let gpus = least_amount(&job.requirements.resources, &QuotaResource::Gpus);
        Some(gpus.saturating_mul(secs).saturating_mul(SECOND_MS))
    };
    jobs.iter().map(of_job).sum()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn day(text: &str) -> i64 {
        day_of(Timestamp::parse(&format!("{text}T12:00:00Z")).unwrap())
    }

    #[test]
    fn periods_begin_at_midnight_on_mondays_and_with_the_month() {
        for (period, of, first, next) in [
            (BudgetPeriod::Day, "2026-11-19", "2026-11-19", "2026-11-20"),
            (BudgetPeriod::Week, "2026-11-19", "2026-11-16", "2026-11-23"),
            (BudgetPeriod::Week, "2026-11-16", "2026-11-16", "2026-11-23"),
            (BudgetPeriod::Month, "2026-12-31", "2026-12-01", "2027-01-01"),
            (BudgetPeriod::Month, "2028-02-01", "2028-02-01", "2028-03-01"),
            (BudgetPeriod::Week, "1970-01-01", "1969-12-29", "1970-01-05"),
        ] {
            assert_eq!(period.first_day(day(of)), day(first), "{period} of {of}");
            assert_eq!(period.next_first_day(day(of)), day(next), "{period} of {of}");
            assert_eq!(start_of(day(of)).to_string(), format!("{of}T00:00:00Z"));
        }
    }

    #[test]
    fn a_budget_warns_first_and_stops_at_its_cap() {
        let (project, user) = (ProjectId(Uuid::from_u128(1)), UserId(Uuid::from_u128(2)));
        let budget = |spent| Budget {
            project,
            member: Some(user),
            unit: BudgetUnit::Cost,
            period: BudgetPeriod::Month,
            warn: Some(8_000_000),
            cap: Some(10_000_000),
            spent,
            ends_at: Timestamp::parse("2026-12-01T00:00:00Z").unwrap(),
        };
        assert_eq!((budget(7_999_999).state(), budget(7_999_999).excess()), (BudgetState::Within, None));
        assert_eq!((budget(8_000_000).state(), budget(8_000_000).excess()), (BudgetState::Warning, None));
        assert_eq!(budget(10_000_000).state(), BudgetState::Exhausted);
        assert_eq!(
            budget(10_500_000).excess().unwrap().to_string(),
            "the member has spent $10.50 of its budget of $10.00 for this month, which ends at 2026-12-01T00:00:00Z"
        );
        let other = UserId(Uuid::from_u128(3));
        assert!(budget(0).applies_to(project, user) && !budget(0).applies_to(project, other));
        assert_eq!(BudgetUnit::GpuHours.amount(5_400_000), "1.5 GPU hours");
        let only_warns = Budget { cap: None, ..budget(99_000_000) };
        assert_eq!((only_warns.state(), only_warns.excess()), (BudgetState::Warning, None));
    }
}
