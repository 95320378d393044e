//! Costs of instances: price multiplied by time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

/// Grouping of costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CostGrouping {
    /// By run: the share of the instances that the run's jobs held, while they held it.
    #[default]
    Run,
    /// By the user who submitted the run: the same costs as by run.
    User,
    /// By fleet: the cost of the fleet's instances while they existed, idle time included.
    Fleet,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub by: CostGrouping,
    /// Start of the period. Default: the beginning.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// End of the period. Default: now.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
    /// Maximum number of items, from 1 to 1000.
    #[serde(default = "limit")]
    pub limit: i64,
    /// Step of a series of costs; none without it.
    #[serde(default)]
    pub every: Option<CostStep>,
}

/// Step of a series of costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CostStep {
    Hour,
    Day,
}

/// Dollars of one item in each step.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostSeriesItem {
    pub name: String,
    pub costs: Vec<f64>,
}

/// Costs in steps: of the items with the highest cost, and of all others as `others`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostSeries {
    #[schemars(with = "Vec<crate::document::DateTime>")]
    pub times: Vec<Timestamp>,
    pub items: Vec<CostSeriesItem>,
}

/// Dollars by market.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct MarketCosts {
    pub spot: f64,
    pub on_demand: f64,
    /// What the spot part would have cost on demand; null if a price is not known.
    pub spot_at_on_demand: Option<f64>,
}

fn limit() -> i64 {
    100
}

/// Cost of one run, user or fleet.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostItem {
    pub id: Uuid,
    pub name: String,
    /// User who submitted the run; only when grouped by run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Number of job submissions, or of instances.
    pub count: i64,
    /// Instance hours; a share of an instance counts as that share.
    pub hours: f64,
    /// Cost in dollars.
    pub cost: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostTotal {
    pub count: i64,
    pub hours: f64,
    pub cost: f64,
}

/// Costs over a period, the highest first. The total includes items beyond the limit.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CostReport {
    #[schemars(with = "crate::document::DateTime")]
    pub since: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub until: Timestamp,
    pub items: Vec<CostItem>,
    pub total: CostTotal,
    /// With `every` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<CostSeries>,
    /// With `every` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markets: Option<MarketCosts>,
}
