//! Cron schedules: the next start of a scheduled run. UTC, five fields; of several patterns the earliest slot.
//!
//! A slot is a time that matches a pattern. The run pipeline stores a slot that it fires, and computes the next one
//! strictly after it: so a slot fires once, however often the computation is repeated or interrupted.

use croner::{Cron, errors::CronError, parser::CronParser};
use jiff::{civil::DateTime, tz::TimeZone};

use crate::time::Timestamp;

#[derive(Debug, thiserror::Error)]
pub enum CronParseError {
    #[error("invalid cron `{pattern}`: expected 5 fields (minute hour day month weekday), found {found}")]
    Fields { pattern: String, found: usize },
    #[error("invalid cron `{pattern}`")]
    Pattern {
        pattern: String,
        #[source]
        source: CronError,
    },
    #[error("cron `{pattern}` never matches")]
    Never { pattern: String },
    #[error("`schedule` has no `cron` pattern")]
    Empty,
}

/// Patterns of one schedule; at least one, each with a future slot.
#[derive(Clone, Debug, PartialEq)]
pub struct CronSchedule(Vec<Cron>);

impl CronSchedule {
    pub fn parse<T: AsRef<str>>(patterns: &[T]) -> Result<Self, CronParseError> {
        if patterns.is_empty() {
            return Err(CronParseError::Empty);
        }
        patterns.iter().map(|p| parse(p.as_ref())).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the earliest slot strictly after `moment`; `None` only at the end of the calendar.
    pub fn next_after(&self, moment: Timestamp) -> Option<Timestamp> {
        let from = to_utc(moment)?;
        self.0
            .iter()
            .filter_map(|cron| cron.find_next_occurrence(&from, false).ok())
            .filter_map(from_utc)
            .min()
    }
}

/// Returns the slot after an execution that was fired by `fired` and ended at `now`: the slots that passed while it ran
/// are skipped. A clock that jumped back must not repeat the fired slot.
pub fn next_slot(crons: &CronSchedule, fired: Option<Timestamp>, now: Timestamp) -> Option<Timestamp> {
    crons.next_after(fired.map_or(now, |slot| slot.max(now)))
}

fn parse(pattern: &str) -> Result<Cron, CronParseError> {
    let found = pattern.split_whitespace().count();
    if found != 5 {
        return Err(CronParseError::Fields { pattern: pattern.to_owned(), found });
    }
    let cron = CronParser::new()
        .parse(pattern)
        .map_err(|source| CronParseError::Pattern { pattern: pattern.to_owned(), source })?;
    // Any leap day is within eight years of any other, so one starting point is sufficient.
    match cron.find_next_occurrence(&DateTime::constant(2024, 1, 1, 0, 0, 0, 0), true) {
        Ok(_) => Ok(cron),
        Err(_) => Err(CronParseError::Never { pattern: pattern.to_owned() }),
    }
}

fn to_utc(moment: Timestamp) -> Option<DateTime> {
    let moment = jiff::Timestamp::from_microsecond(moment.0).ok()?;
    Some(moment.to_zoned(TimeZone::UTC).datetime())
}

fn from_utc(slot: DateTime) -> Option<Timestamp> {
    let slot = slot.to_zoned(TimeZone::UTC).ok()?;
    Some(Timestamp(slot.timestamp().as_microsecond()))
}
