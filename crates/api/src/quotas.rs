//! Quotas: how much a project or one of its members may hold at once, and how much is guaranteed to a project.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Quota {
    /// Member whose jobs it limits; absent: all jobs of the project.
    #[serde(default)]
    pub username: Option<String>,
    /// `gpu`, `gpu:NAME`, `cpu`, `memory` (in GB) or `price` (in dollars per hour).
    pub resource: String,
    /// The most that jobs may hold at once; absent: no limit.
    #[serde(default)]
    pub max: Option<f64>,
    /// Amount that is guaranteed to the project: its jobs come before those of projects that borrow.
    #[serde(default)]
    pub share: Option<f64>,
    /// Amount that jobs hold now.
    pub used: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Quotas {
    pub quotas: Vec<Quota>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetRequest {
    /// Member whose jobs it limits; absent: all jobs of the project.
    #[serde(default)]
    pub username: Option<String>,
    /// `gpu`, `gpu:NAME`, `cpu`, `memory` (in GB) or `price` (in dollars per hour).
    pub resource: String,
    /// The most that jobs may hold at once.
    #[serde(default)]
    pub max: Option<f64>,
    /// Amount that is guaranteed to the project. Required, if `max` is absent.
    #[serde(default)]
    pub share: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    #[serde(default)]
    pub username: Option<String>,
    pub resource: String,
}
