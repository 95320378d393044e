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

/// Kinds of objects that have series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SeriesOf {
    /// Ids are submissions.
    Job,
    Instance,
    Fleet,
    /// Ids are `PROJECT/RUN`.
    Service,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SeriesRequest {
    pub of: SeriesOf,
    /// At most 50.
    pub ids: Vec<String>,
    /// `cpu` (cores), `memory` and `gpu_memory` (bytes) and `gpu` (from 0 to 1) of jobs, instances and fleets;
    /// `requests` and `errors` (per second), `p50` and `p99` (milliseconds), `in_flight` and `waiting` of services. Unknown
    /// names have no series.
    pub names: Vec<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub from: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub to: Timestamp,
    /// Maximum number of points, up to 500.
    pub points: u32,
}

/// Values of one metric of one object; null where nothing was measured.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Series {
    pub id: String,
    pub name: String,
    /// Number of the GPU, for metrics of each device.
    pub device: Option<u32>,
    /// What the object has of it.
    pub limit: Option<f64>,
    pub min: Vec<Option<f64>>,
    pub mean: Vec<Option<f64>>,
    pub max: Vec<Option<f64>>,
}

/// Series over the same times.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SeriesList {
    /// Seconds since 1970, in even steps.
    pub times: Vec<i64>,
    pub step_seconds: i64,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct BlockStreamRequest {
    /// Fleets to report, separated by commas. Default: all that the caller may see.
    #[serde(default)]
    pub fleets: Option<String>,
}

/// Job on a block; names are absent if the caller may not see them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BlockJob {
    pub project: Option<String>,
    pub run: Option<String>,
    pub rank: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Block {
    /// `free` or `taken`.
    pub state: String,
    pub job: Option<BlockJob>,
    /// Use of its GPUs, or of its CPUs if it has none, from 0 to 1.
    pub used: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceBlocks {
    pub id: Uuid,
    pub blocks: Vec<Block>,
}

/// Event of the stream of blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum BlockEvent {
    /// Event `sample`: every block of every instance.
    Sample {
        #[schemars(with = "crate::document::DateTime")]
        at: Timestamp,
        instances: Vec<InstanceBlocks>,
    },
}

impl BlockEvent {
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Sample { .. } => "sample",
        }
    }
}
