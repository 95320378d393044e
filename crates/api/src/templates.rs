//! Templates that the UI offers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Template {
    pub r#type: String,
    pub name: String,
    pub title: String,
    #[serde(default)]
    pub description: Option<String>,
    #[serde(default)]
    pub parameters: Vec<serde_json::Value>,
    pub configuration: serde_json::Value,
    /// Text of the configuration.
    pub text: String,
}
