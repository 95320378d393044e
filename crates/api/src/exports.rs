//! Sharing between projects. Not supported yet: the lists are empty.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Exports {
    pub exports: Vec<serde_json::Value>,
    #[serde(default)]
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Imports {
    pub imports: Vec<serde_json::Value>,
    #[serde(default)]
    pub warnings: Vec<String>,
}
