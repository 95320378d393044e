//! Fleets: sets of instances.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{Document, instances::Instance, offers::Offer, runs::ApplyAction};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Fleet {
    pub id: Uuid,
    pub name: String,
    pub project_name: String,
    pub spec: Document,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[schemars(extend("enum" = ["submitted", "active", "terminating", "terminated", "failed"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: Option<String>,
    pub instances: Vec<Instance>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub project_name: Option<String>,
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
            project_name: None,
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
    100
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ProjectListRequest {
    #[serde(default)]
    pub include_imported: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub id: Option<Uuid>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PlanRequest {
    pub spec: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct FleetPlan {
    pub project_name: String,
    pub user: String,
    pub spec: Document,
    #[serde(default)]
    pub effective_spec: Option<Document>,
    #[serde(default)]
    pub current_resource: Option<Fleet>,
    pub offers: Vec<Offer>,
    pub total_offers: i64,
    #[serde(default)]
    pub max_offer_price: Option<f64>,
    #[serde(default)]
    pub action: Option<ApplyAction>,
}

/// Expected state of the fleet: only the fields that show whether it has changed since.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedFleet {
    pub id: Uuid,
    pub spec: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyInput {
    pub spec: Document,
    #[serde(default)]
    pub current_resource: Option<ExpectedFleet>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyRequest {
    pub plan: ApplyInput,
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub names: Vec<String>,
    /// Releases SSH hosts that do not respond after one attempt, without cleaning them up.
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteInstancesRequest {
    pub name: String,
    pub instance_nums: Vec<i64>,
}
