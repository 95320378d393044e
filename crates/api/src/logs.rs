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

/// Bytes of a log.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RawRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Offset of the first byte.
    #[serde(default)]
    pub offset: u64,
    /// Maximum number of bytes, up to 1 MiB; 0 returns only the headers. Without effect on a download.
    #[serde(default)]
    pub limit: Option<u64>,
    /// Returns the log of the runner instead of that of the job.
    #[serde(default)]
    pub diagnose: bool,
    /// 1: returns the whole log from the offset as a file.
    #[serde(default)]
    pub download: Option<u8>,
}

/// Text to search in a log.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SearchRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    /// Text, or a regular expression.
    pub q: String,
    #[serde(default)]
    pub regex: bool,
    #[serde(default)]
    pub ignore_case: bool,
    /// Offset at which the search begins.
    #[serde(default)]
    pub from: u64,
    /// Maximum number of hits, up to 10,000. Default: 1,000.
    #[serde(default)]
    pub limit: Option<u32>,
    /// Number of lines before and after each hit, up to 10.
    #[serde(default)]
    pub context: Option<u32>,
    /// Searches the log of the runner instead of that of the job.
    #[serde(default)]
    pub diagnose: bool,
}

/// One event of a search. Its name is the `type`; offsets are bytes of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SearchEvent {
    Hit {
        offset: u64,
        length: u64,
        /// Offset of the line.
        line: u64,
        #[schemars(with = "crate::document::DateTime")]
        timestamp: Timestamp,
        /// The line, without terminal codes.
        text: String,
        before: Vec<String>,
        after: Vec<String>,
    },
    Progress {
        scanned: u64,
        size: u64,
    },
    End {
        hits: u32,
        /// True if the search ended at its limit.
        more: bool,
    },
}

impl SearchEvent {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hit { .. } => "hit",
            Self::Progress { .. } => "progress",
            Self::End { .. } => "end",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MarksRequest {
    pub run_name: String,
    pub job_submission_id: Uuid,
    #[serde(default)]
    pub diagnose: bool,
}

/// Offsets of a log with the times at which they were written.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LogMarks {
    pub size: u64,
    /// First offset that still exists.
    pub first: u64,
    #[schemars(with = "Vec<(u64, crate::document::DateTime)>")]
    pub marks: Vec<(u64, Timestamp)>,
    pub events: Vec<LogMarkEvent>,
}

/// An event of the job at its position in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogMarkEvent {
    #[schemars(with = "crate::document::DateTime")]
    pub at: Timestamp,
    pub offset: u64,
    pub message: String,
}
