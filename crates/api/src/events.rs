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
    /// Only if a browser lists events.
    #[serde(default, flatten, skip_serializing_if = "Option::is_none")]
    pub details: Option<EventDetails>,
}

/// Fields of an event for programs.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct EventDetails {
    /// Position in the feed of changes.
    pub seq: i64,
    /// `status`, `schedule`, `note` or `refused`.
    pub kind: String,
    /// Kind of the object.
    pub entity: String,
    /// Status before and after.
    pub from: Option<String>,
    pub to: Option<String>,
    pub reason: Option<String>,
    /// True if the object ended.
    pub is_final: bool,
    /// Part of the server that acted.
    pub actor: Option<String>,
    /// `seq` of the event that caused it; always null for now.
    pub cause: Option<i64>,
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
    /// Only events with these reasons.
    #[serde(default)]
    pub reasons: Option<Vec<String>>,
    /// Only events of these kinds: `status`, `schedule`, `note`, `refused`.
    #[serde(default)]
    pub kinds: Option<Vec<String>>,
    /// Only events about these kinds of objects.
    #[serde(default)]
    pub entities: Option<Vec<String>>,
    /// Recorded at or after this time.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub since: Option<Timestamp>,
    /// Recorded before this time.
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub until: Option<Timestamp>,
    /// Part of the message; letter case does not matter.
    #[serde(default)]
    pub text: Option<String>,
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
            reasons: None,
            kinds: None,
            entities: None,
            since: None,
            until: None,
            text: None,
        }
    }
}

fn limit() -> i64 {
    100
}
