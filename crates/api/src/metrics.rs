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

/// How requests to a service were answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResponseCounts {
    /// By the class of the status, from 1xx to 5xx.
    pub classes: Vec<u64>,
    /// By the time they took, in steps that the server knows.
    pub buckets: Vec<u64>,
    /// That time, all of it together.
    pub latency_us: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServiceQuery {
    /// How far back: up to five minutes.
    #[serde(default = "minute")]
    pub seconds: i64,
}

fn minute() -> i64 {
    60
}

/// What a service was asked lately, over all servers and gateways.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServiceMetrics {
    pub seconds: i64,
    /// Requests that were let through.
    pub requests_per_second: f64,
    /// Requests on their way at once, on average, and those of them that waited for a replica.
    pub in_flight: f64,
    pub waiting: f64,
    /// Answers by the class of their status, from 1xx to 5xx.
    pub classes: Vec<u64>,
    /// Time to answer in full; absent without answers.
    #[serde(default)]
    pub average_ms: Option<f64>,
    #[serde(default)]
    pub p50_ms: Option<f64>,
    #[serde(default)]
    pub p99_ms: Option<f64>,
}

/// Newest first; empty with fewer than two samples.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobMetrics {
    pub metrics: Vec<Metric>,
}
