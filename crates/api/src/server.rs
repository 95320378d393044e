//! The server itself, and the request that asks nothing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The request of an operation without parameters.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct EmptyRequest {}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    pub status: String,
}

/// One pipeline at one moment.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Pipeline {
    pub name: String,
    /// Rows claimed and waiting for a worker.
    pub queued: u64,
    pub in_work: u64,
    /// How long the oldest row has been held.
    pub oldest_seconds: Option<f64>,
    /// Passes that ended well during the last minute.
    pub applied_last_minute: u64,
    pub claimed: u64,
    pub applied: u64,
    pub stale: u64,
    pub reset: u64,
    pub lost: u64,
    pub errors: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Info {
    #[serde(default)]
    pub server_version: Option<String>,
    /// Of windlass itself; `server_version` is that of the interface, which other clients compare with theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windlass_version: Option<String>,
    /// Largest file that it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_bytes_max: Option<u64>,
}
