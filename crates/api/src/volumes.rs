//! Volumes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::Document;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VolumeInstance {
    pub name: String,
    #[serde(default)]
    pub fleet_name: Option<String>,
    pub instance_num: i64,
    #[serde(default)]
    pub instance_id: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Attachment {
    pub instance: VolumeInstance,
    #[serde(default)]
    pub attachment_data: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Volume {
    pub id: Uuid,
    pub name: String,
    pub user: String,
    pub project_name: String,
    pub configuration: Document,
    pub external: bool,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub last_processed_at: Timestamp,
    #[schemars(extend("enum" = ["submitted", "provisioning", "active", "failed"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: Option<String>,
    pub deleted: bool,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub deleted_at: Option<Timestamp>,
    #[serde(default)]
    pub volume_id: Option<String>,
    #[serde(default)]
    pub provisioning_data: Option<Document>,
    #[serde(default)]
    pub cost: f64,
    #[serde(default)]
    pub attachments: Option<Vec<Attachment>>,
    #[serde(default)]
    pub attachment_data: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub project_name: Option<String>,
    #[serde(default)]
    pub only_active: bool,
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

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NameRequest {
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateRequest {
    pub configuration: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub names: Vec<String>,
}
