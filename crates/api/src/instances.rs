//! Instances, the members of fleets.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::Document;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GpuDriver {
    #[serde(default)]
    pub vendor: Option<String>,
    pub version: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Instance {
    pub id: Uuid,
    pub project_name: String,
    #[serde(default)]
    pub backend: Option<String>,
    #[serde(default)]
    pub instance_type: Option<Document>,
    pub name: String,
    #[serde(default)]
    pub fleet_id: Option<Uuid>,
    #[serde(default)]
    pub fleet_name: Option<String>,
    pub instance_num: i64,
    #[serde(default)]
    pub job_name: Option<String>,
    #[serde(default)]
    pub hostname: Option<String>,
    #[schemars(extend("enum" = ["pending", "provisioning", "idle", "busy", "terminating", "terminated"]))]
    pub status: String,
    /// Progress of the instance, or the problem that it has.
    #[serde(default)]
    pub status_message: Option<String>,
    #[serde(default)]
    pub unreachable: bool,
    #[schemars(extend("enum" = ["healthy", "warning", "failure"]))]
    pub health_status: String,
    #[serde(default)]
    pub termination_reason: Option<String>,
    #[serde(default)]
    pub termination_reason_message: Option<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub created: Timestamp,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub finished_at: Option<Timestamp>,
    #[serde(default)]
    pub region: Option<String>,
    #[serde(default)]
    pub availability_zone: Option<String>,
    #[serde(default)]
    pub price: Option<f64>,
    #[serde(default)]
    pub total_blocks: Option<i64>,
    #[serde(default)]
    pub busy_blocks: i64,
    #[serde(default)]
    pub gpu_driver: Option<GpuDriver>,
    /// Time of the last response of its agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub seen_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub unreachable_since: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub project_names: Option<Vec<String>>,
    #[serde(default)]
    pub fleet_ids: Option<Vec<Uuid>>,
    #[serde(default)]
    pub only_active: bool,
    #[serde(default)]
    pub include_imported: bool,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub prev_created_at: Option<Timestamp>,
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
            project_names: None,
            fleet_ids: None,
            only_active: Default::default(),
            include_imported: Default::default(),
            prev_created_at: None,
            prev_id: None,
            limit: limit(),
            ascending: Default::default(),
        }
    }
}

fn limit() -> i64 {
    1000
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    pub id: Uuid,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HealthChecksRequest {
    pub fleet_name: String,
    pub instance_num: i64,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub after: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub before: Option<Timestamp>,
    #[serde(default)]
    pub limit: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HealthEvent {
    #[schemars(with = "crate::document::DateTime")]
    pub timestamp: Timestamp,
    pub status: String,
    pub message: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HealthCheck {
    #[schemars(with = "crate::document::DateTime")]
    pub collected_at: Timestamp,
    pub status: String,
    pub events: Vec<HealthEvent>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HealthChecks {
    pub health_checks: Vec<HealthCheck>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HistoryRequest {
    pub id: Uuid,
}

/// A job that ran or runs on an instance.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PastJob {
    pub run: String,
    pub run_id: Uuid,
    pub job: String,
    pub user: String,
    #[schemars(with = "crate::document::DateTime")]
    pub from: Timestamp,
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub to: Option<Timestamp>,
    pub status: String,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InstanceHistory {
    /// Newest first, at most 100.
    pub jobs: Vec<PastJob>,
}
