//! Available GPUs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Document;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    pub run_spec: Document,
    #[serde(default)]
    pub group_by: Option<Vec<String>>,
    #[serde(default)]
    pub full_offers: bool,
    #[serde(default)]
    pub unallocated_resources: bool,
    #[serde(default)]
    pub reverse: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GpuList {
    pub gpus: Vec<serde_json::Value>,
    #[serde(default)]
    pub cpus: Option<Vec<serde_json::Value>>,
}
