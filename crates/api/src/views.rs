//! Saved views: named filters of lists of the web UI.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A named filter of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct View {
    pub id: Uuid,
    pub name: String,
    /// List, such as `runs` or `events`.
    pub page: String,
    /// Query string of the address of the list, without `?`.
    pub query: String,
    /// Project whose members see it; null for a view of the caller only.
    pub project: Option<String>,
    /// User who saved it.
    pub user: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ViewList {
    pub views: Vec<View>,
}

/// A view to save. It replaces one of the caller with the same page, name and project.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetRequest {
    pub name: String,
    pub page: String,
    pub query: String,
    #[serde(default)]
    pub project: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub id: Uuid,
}
