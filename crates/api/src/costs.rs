//! What machines cost: price by time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

/// What costs are added up by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CostGrouping {
    /// What each run's jobs had of their instances, while they had it.
    #[default]
    Run,
    /// The same, by who submitted the run.
    User,
    /// What each fleet's instances cost while they existed, idle time included.
    Fleet,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub by: CostGrouping,
    /// From the beginning if not given.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Until now if not given.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
    /// From 1 to 1000.
    #[serde(default = "limit")]
    pub limit: i64,
}

fn limit() -> i64 {
    100
}

/// What one of them came to.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostItem {
    pub id: Uuid,
    pub name: String,
    /// Who submitted the run; only by run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Submissions of jobs, or instances.
    pub count: i64,
    /// Hours of instances; a part of an instance counts as that part.
    pub hours: f64,
    /// Dollars.
    pub cost: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostTotal {
    pub count: i64,
    pub hours: f64,
    pub cost: f64,
}

/// The dearest first. The total is of all, shown or not.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostReport {
    #[schemars(with = "crate::document::DateTime")]
    pub since: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub until: Timestamp,
    pub items: Vec<CostItem>,
    pub total: CostTotal,
}
