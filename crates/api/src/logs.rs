//! What a job wrote.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PollRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Exclusive.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub start_time: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub end_time: Option<Timestamp>,
    #[serde(default)]
    pub descending: bool,
    #[serde(default)]
    pub next_token: Option<String>,
    #[serde(default = "limit")]
    pub limit: i64,
    /// The runner's own log instead of the job's.
    #[serde(default)]
    pub diagnose: bool,
}

fn limit() -> i64 {
    100
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LogEvent {
    #[schemars(with = "crate::document::DateTime")]
    pub timestamp: Timestamp,
    #[schemars(extend("enum" = ["stdout", "stderr"]))]
    pub log_source: String,
    /// Base64 of the raw bytes.
    pub message: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Page {
    pub logs: Vec<LogEvent>,
    #[serde(default)]
    pub external_url: Option<String>,
    /// Null: the end of what exists now.
    #[serde(default)]
    pub next_token: Option<String>,
}
