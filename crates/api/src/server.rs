//! The server itself, and the request that asks nothing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The request of an operation without parameters.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Nothing {}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    pub status: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Info {
    #[serde(default)]
    pub server_version: Option<String>,
}
