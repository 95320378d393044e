//! Events: what happened, to which objects and by whom.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Target {
    pub r#type: String,
    #[serde(default)]
    pub project_id: Option<Uuid>,
    #[serde(default)]
    pub project_name: Option<String>,
    #[serde(default)]
    pub is_project_deleted: Option<bool>,
    pub id: Uuid,
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    pub id: Uuid,
    pub message: String,
    #[schemars(with = "crate::document::DateTime")]
    pub recorded_at: Timestamp,
    #[serde(default)]
    pub actor_user_id: Option<Uuid>,
    #[serde(default)]
    pub actor_user: Option<String>,
    #[serde(default)]
    pub is_actor_user_deleted: Option<bool>,
    pub targets: Vec<Target>,
}

/// Filter of events. At most one `target_*` and one `within_*` filter, each with 1 to 16 ids.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub target_projects: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_users: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_fleets: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_instances: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_runs: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_jobs: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_volumes: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_gateways: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_gateway_replicas: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_secrets: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_presets: Option<Vec<Uuid>>,
    #[serde(default)]
    pub target_managed_jobs: Option<Vec<Uuid>>,
    #[serde(default)]
    pub within_projects: Option<Vec<Uuid>>,
    #[serde(default)]
    pub within_fleets: Option<Vec<Uuid>>,
    #[serde(default)]
    pub within_runs: Option<Vec<Uuid>>,
    #[serde(default)]
    pub within_gateways: Option<Vec<Uuid>>,
    #[serde(default)]
    pub include_target_types: Option<Vec<String>>,
    /// Users who acted; null stands for the system.
    #[serde(default)]
    pub actors: Option<Vec<Option<Uuid>>>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub prev_recorded_at: Option<Timestamp>,
    #[serde(default)]
    pub prev_id: Option<Uuid>,
    #[serde(default = "limit")]
    pub limit: i64,
    #[serde(default)]
    pub ascending: bool,
}

impl Default for ListRequest {
    fn default() -> Self {
        Self {
            target_projects: None,
            target_users: None,
            target_fleets: None,
            target_instances: None,
            target_runs: None,
            target_jobs: None,
            target_volumes: None,
            target_gateways: None,
            target_gateway_replicas: None,
            target_secrets: None,
            target_presets: None,
            target_managed_jobs: None,
            within_projects: None,
            within_fleets: None,
            within_runs: None,
            within_gateways: None,
            include_target_types: None,
            actors: None,
            prev_recorded_at: None,
            prev_id: None,
            limit: limit(),
            ascending: Default::default(),
        }
    }
}

fn limit() -> i64 {
    100
}
