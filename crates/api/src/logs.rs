//! Logs of jobs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PollRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Returns entries after this time (exclusive).
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
    /// Returns the log of the runner instead of that of the job.
    #[serde(default)]
    pub diagnose: bool,
    /// Returns every byte as it was written. Otherwise terminal codes are removed, as dstack's clients expect.
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
    /// Token of the next page; null at the end of what exists now.
    #[serde(default)]
    pub next_token: Option<String>,
}

/// Log to follow, and the position to start from. A client that reconnects sends `Last-Event-ID` instead of `offset`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StreamRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Offset of the first byte to return.
    #[serde(default)]
    pub offset: u64,
    /// Skips everything up to this time (exclusive).
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub start_time: Option<Timestamp>,
    /// True: waits for more output until the job has ended. False: ends with the output that exists now.
    #[serde(default = "yes")]
    pub follow: bool,
    /// Returns the log of the runner instead of that of the job.
    #[serde(default)]
    pub diagnose: bool,
}

fn yes() -> bool {
    true
}

/// One event of a stream (`text/event-stream`). Its name is the `type`, its id the offset after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StreamEvent {
    /// Bytes that were written together, or a part of them.
    Log {
        offset: u64,
        #[schemars(with = "crate::document::DateTime")]
        timestamp: Timestamp,
        /// Base64 of the raw bytes.
        message: String,
    },
    /// Last event. If the job has ended, nothing will be appended to the log.
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
    /// Returns the name of the event.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Log { .. } => "log",
            Self::End { .. } => "end",
        }
    }
}
