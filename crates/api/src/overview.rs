//! State of everything that the caller may see, and the search for names.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct SummaryRequest {
    /// Only these projects; empty: all that the caller may see.
    #[serde(default)]
    pub projects: Vec<String>,
}

/// Units of capacity: all, those that jobs have, and those that jobs use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Capacity {
    pub total: i64,
    pub taken: i64,
    pub used: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QueueSummary {
    /// Runs that wait for an instance.
    pub length: i64,
    /// Time since when the oldest of them waits.
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub oldest: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FailureCount {
    pub reason: String,
    pub count: i64,
}

/// Costs in dollars.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CostSummary {
    /// Since midnight, UTC.
    pub today: f64,
    /// In seven days.
    pub week: f64,
    pub per_hour: f64,
}

/// An object that needs attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Attention {
    /// `failed`, `waiting`, `unreachable`, `unhealthy` or `pipeline`.
    pub what: String,
    pub kind: String,
    pub id: String,
    pub project: Option<String>,
    pub name: String,
    pub reason: String,
    #[schemars(with = "crate::document::DateTime")]
    pub since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LaggingPipeline {
    pub name: String,
    pub lag_seconds: f64,
}

/// Runs over the last hour, oldest step first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RunHistory {
    pub step_seconds: i64,
    /// Running runs at the end of each step; the last is now.
    pub running: Vec<i64>,
    /// Submitted runs that had not started at the end of each step.
    pub waiting: Vec<i64>,
    /// Runs that failed within each step.
    pub failed: Vec<i64>,
}

/// Counts by kind and status. Final statuses count those of the last 24 hours.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    /// Time of the database, in microseconds.
    pub as_of: i64,
    pub runs: BTreeMap<String, i64>,
    pub managed_jobs: BTreeMap<String, i64>,
    pub instances: BTreeMap<String, i64>,
    pub containers: BTreeMap<String, i64>,
    pub fleets: BTreeMap<String, i64>,
    pub volumes: BTreeMap<String, i64>,
    pub gateways: BTreeMap<String, i64>,
    /// Blocks of instances that are idle or busy.
    pub blocks: Capacity,
    pub gpus: Capacity,
    pub queue: QueueSummary,
    /// Runs that failed within 24 hours, most frequent reason first.
    pub failures: Vec<FailureCount>,
    pub cost: CostSummary,
    /// At most 10, most urgent first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<Vec<Attention>>,
    /// Pipelines whose oldest row waits for more than 5 s. Only for global admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipelines: Option<Vec<LaggingPipeline>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<RunHistory>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct SearchRequest {
    pub text: String,
    /// Maximum number of hits, up to 50. Default: 12.
    #[serde(default)]
    pub limit: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Hit {
    /// `run`, `managed-job`, `instance`, `fleet`, `volume`, `gateway` or `project`.
    pub kind: String,
    /// Id; the number of a managed job.
    pub id: String,
    pub project: Option<String>,
    pub name: String,
    pub status: Option<String>,
    /// User or backend.
    pub hint: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SearchResult {
    pub hits: Vec<Hit>,
}
