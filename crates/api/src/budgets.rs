//! Budgets: how much the jobs of a project or of one of its members may cost or use in a period.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Budget {
    /// Member whose jobs it counts; absent: all jobs of the project.
    #[serde(default)]
    pub username: Option<String>,
    /// `cost` (in dollars) or `gpu-hours`.
    pub unit: String,
    /// `day`, `week` or `month`, in UTC.
    pub period: String,
    /// Amount from which a warning is recorded as an event; absent: none.
    #[serde(default)]
    pub warn: Option<f64>,
    /// Amount at which jobs no longer start; absent: no limit.
    #[serde(default)]
    pub cap: Option<f64>,
    /// Amount that is spent in this period.
    pub spent: f64,
    /// `within`, `warning` or `exhausted`.
    pub state: String,
    /// End of this period.
    #[schemars(with = "crate::document::DateTime")]
    pub ends_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Budgets {
    pub budgets: Vec<Budget>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetRequest {
    /// Member whose jobs it counts; absent: all jobs of the project.
    #[serde(default)]
    pub username: Option<String>,
    /// `cost` (in dollars) or `gpu-hours`.
    pub unit: String,
    /// `day`, `week` or `month`, in UTC.
    #[serde(default = "month")]
    pub period: String,
    /// Amount from which a warning is recorded as an event.
    #[serde(default)]
    pub warn: Option<f64>,
    /// Amount at which jobs no longer start. Required, if `warn` is absent.
    #[serde(default)]
    pub cap: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    #[serde(default)]
    pub username: Option<String>,
    pub unit: String,
    #[serde(default = "month")]
    pub period: String,
}

fn month() -> String {
    "month".to_owned()
}
