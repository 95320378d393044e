//! Server information, and the empty request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Request of an operation without parameters.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct EmptyRequest {}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    pub status: String,
}

/// State of one pipeline at one moment.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Pipeline {
    pub name: String,
    /// Rows that are claimed and wait for a worker.
    pub queued: u64,
    pub in_work: u64,
    /// Time since the oldest held row was claimed, in seconds.
    pub oldest_seconds: Option<f64>,
    /// Passes that were applied during the last minute.
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
    /// Version of windlass. `server_version` is that of the API, which other clients compare with theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windlass_version: Option<String>,
    /// Maximum size of an uploaded file, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_bytes_max: Option<u64>,
}

/// A setting of the server, without secrets.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Setting {
    pub name: String,
    pub value: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SettingList {
    pub settings: Vec<Setting>,
}
