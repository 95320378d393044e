//! Metrics of jobs and services.

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

/// Responses of a service to its requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResponseCounts {
    /// Number of responses by status class, from 1xx to 5xx.
    pub classes: Vec<u64>,
    /// Number of responses by latency, in buckets defined by the server.
    pub buckets: Vec<u64>,
    /// Sum of the latencies, in microseconds.
    pub latency_us: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServiceQuery {
    /// Length of the period in seconds, up to five minutes.
    #[serde(default = "minute")]
    pub seconds: i64,
}

fn minute() -> i64 {
    60
}

/// Recent requests to a service, over all servers and gateways.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServiceMetrics {
    pub seconds: i64,
    /// Admitted requests per second.
    pub requests_per_second: f64,
    /// Average number of requests in flight. `waiting` is the number of those that waited for a replica.
    pub in_flight: f64,
    pub waiting: f64,
    /// Number of responses by status class, from 1xx to 5xx.
    pub classes: Vec<u64>,
    /// Average time to the end of the response; like the percentiles below, absent without responses.
    #[serde(default)]
    pub average_ms: Option<f64>,
    #[serde(default)]
    pub p50_ms: Option<f64>,
    #[serde(default)]
    pub p99_ms: Option<f64>,
}

/// Samples, newest first; empty with fewer than two samples.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobMetrics {
    pub metrics: Vec<Metric>,
}
