//! Usage: time of GPUs and CPUs, and cost, by project, user and class over time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::time::Timestamp;

/// Grouping of rows of usage. Periods are in UTC, weeks begin on Mondays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UsageGrouping {
    Project,
    User,
    Class,
    Day,
    Week,
    Month,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    /// Projects; empty: all that the caller may see.
    #[serde(default)]
    pub projects: Vec<String>,
    /// Grouping; at most one of `day`, `week` and `month`. Empty: one row.
    #[serde(default)]
    pub by: Vec<UsageGrouping>,
    /// First day (UTC). Default: 29 days before the last one.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Last day (UTC), as a whole. Default: today.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
}

/// Usage of one group; fields by which it is not grouped are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UsageRow {
    /// Beginning of the day, the week or the month.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub from: Option<Timestamp>,
    #[serde(default)]
    pub project: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    /// `urgent`, `normal` or `idle`.
    #[serde(default)]
    pub class: Option<String>,
    /// Number of submissions of jobs that ended.
    pub jobs: i64,
    pub gpu_hours: f64,
    pub cpu_hours: f64,
    /// Dollars.
    pub cost: f64,
}

/// Usage over whole days, of jobs that ended and of those that run until now. A job on some blocks of an instance counts as
/// that share of it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct UsageReport {
    #[schemars(with = "crate::document::DateTime")]
    pub since: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub until: Timestamp,
    pub rows: Vec<UsageRow>,
    pub total: UsageRow,
}
