//! Users, their credentials and keys.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GlobalRole {
    Admin,
    User,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Permissions {
    pub can_create_projects: bool,
    /// Whether they may ask for containers of the queue.
    #[serde(default)]
    pub can_use_queue: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct User {
    pub id: Uuid,
    pub username: String,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub created_at: Option<Timestamp>,
    pub global_role: GlobalRole,
    #[serde(default)]
    pub email: Option<String>,
    pub active: bool,
    pub permissions: Permissions,
    #[serde(default)]
    pub ssh_public_key: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Creds {
    /// Empty where the server cannot know it: only a hash is stored, so a token is shown when it is
    /// made and, to its owner, when it is the one that was sent.
    pub token: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct UserWithCreds {
    pub id: Uuid,
    pub username: String,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub created_at: Option<Timestamp>,
    pub global_role: GlobalRole,
    #[serde(default)]
    pub email: Option<String>,
    pub active: bool,
    pub permissions: Permissions,
    #[serde(default)]
    pub ssh_public_key: Option<String>,
    pub creds: Creds,
    #[serde(default)]
    pub ssh_private_key: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub return_total_count: bool,
    #[serde(default)]
    pub name_pattern: Option<String>,
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
            return_total_count: Default::default(),
            name_pattern: None,
            prev_created_at: None,
            prev_id: None,
            limit: limit(),
            ascending: Default::default(),
        }
    }
}

fn limit() -> i64 {
    2000
}

/// A plain list, or with its length when `return_total_count` was asked.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Listing {
    Plain(Vec<User>),
    Counted { total_count: Option<i64>, users: Vec<User> },
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NameRequest {
    pub username: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateRequest {
    pub username: String,
    pub global_role: GlobalRole,
    #[serde(default)]
    pub email: Option<String>,
    #[serde(default = "active")]
    pub active: bool,
    /// Gives or takes the right to ask for containers of the queue. A new user has none if not given, and an update leaves
    /// it as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub can_use_queue: Option<bool>,
}

fn active() -> bool {
    true
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub users: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PublicKey {
    pub id: Uuid,
    #[schemars(with = "crate::document::DateTime")]
    pub added_at: Timestamp,
    pub name: String,
    pub r#type: String,
    pub fingerprint: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct AddPublicKeyRequest {
    pub key: String,
    #[serde(default)]
    pub name: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeletePublicKeysRequest {
    pub ids: Vec<Uuid>,
}
