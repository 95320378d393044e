//! What a job used, as series.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Query {
    #[serde(default)]
    pub replica_num: i64,
    #[serde(default)]
    pub job_num: i64,
    #[serde(default = "one")]
    pub limit: i64,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub after: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub before: Option<Timestamp>,
    #[serde(default)]
    pub run_id: Option<Uuid>,
}

fn one() -> i64 {
    1
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Metric {
    pub name: String,
    #[schemars(with = "Vec<crate::document::DateTime>")]
    pub timestamps: Vec<Timestamp>,
    pub values: Vec<serde_json::Value>,
}

/// Newest first; empty with fewer than two samples.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobMetrics {
    pub metrics: Vec<Metric>,
}
