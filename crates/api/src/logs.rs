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
    /// Every byte as it was written; else terminal codes are left out, as dstack's clients expect.
    #[serde(default)]
    pub raw: bool,
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
    /// Base64 of the bytes.
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

/// Which log to follow, and from where. A client that comes back sends `Last-Event-ID` instead of `offset`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StreamRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// The first byte that is wanted.
    #[serde(default)]
    pub offset: u64,
    /// Exclusive; what came before is left out.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub start_time: Option<Timestamp>,
    /// Whether to wait for more until the job is over, or to end with what there is.
    #[serde(default = "yes")]
    pub follow: bool,
    /// The runner's own log instead of the job's.
    #[serde(default)]
    pub diagnose: bool,
}

fn yes() -> bool {
    true
}

/// One event of a stream (`text/event-stream`): its name is the `type`, its id the offset after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StreamEvent {
    /// Bytes that came together, or a part of them.
    Log {
        offset: u64,
        #[schemars(with = "crate::document::DateTime")]
        timestamp: Timestamp,
        /// Base64 of the raw bytes.
        message: String,
    },
    /// The last event. If the job is over, nothing will ever be added to the log.
    End {
        offset: u64,
        /// Status of the job.
        status: String,
        #[serde(default)]
        exit_status: Option<i64>,
        #[serde(default)]
        termination_reason: Option<String>,
    },
}

impl StreamEvent {
    /// The name of the event.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Log { .. } => "log",
            Self::End { .. } => "end",
        }
    }
}
