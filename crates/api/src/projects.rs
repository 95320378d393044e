//! Projects and their members.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{backends::Backend, users::User};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProjectRole {
    User,
    Manager,
    Admin,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MemberPermissions {
    pub can_manage_ssh_fleets: bool,
    #[serde(default)]
    pub can_manage_secrets: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Member {
    pub user: User,
    pub project_role: ProjectRole,
    pub permissions: MemberPermissions,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Project {
    pub project_id: Uuid,
    pub project_name: String,
    pub owner: User,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub created_at: Option<Timestamp>,
    pub backends: Vec<Backend>,
    pub members: Vec<Member>,
    #[serde(default)]
    pub is_public: bool,
    #[serde(default)]
    pub templates_repo: Option<String>,
    /// Backends of the server that fleets of the project may use, by the backends' own names.
    #[serde(default)]
    pub granted_backends: Vec<String>,
    /// Image of runs that name none, on instances that run only containers. Unset: the setting of the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_image: Option<String>,
    /// A project with twice the weight may use twice as much of shared fleets before others come first.
    #[serde(default = "one")]
    pub weight: i64,
}

fn one() -> i64 {
    1
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default = "yes")]
    pub include_not_joined: bool,
    #[serde(default)]
    pub return_total_count: bool,
    #[serde(default)]
    pub name_pattern: Option<String>,
    #[serde(default)]
    pub username: Option<String>,
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
            include_not_joined: yes(),
            return_total_count: Default::default(),
            name_pattern: None,
            username: None,
            prev_created_at: None,
            prev_id: None,
            limit: limit(),
            ascending: Default::default(),
        }
    }
}

fn yes() -> bool {
    true
}

fn limit() -> i64 {
    2000
}

/// Plain list, or a list with its total count if `return_total_count` was set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ProjectList {
    Plain(Vec<Project>),
    Counted { total_count: Option<i64>, projects: Vec<Project> },
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateRequest {
    pub project_name: String,
    #[serde(default)]
    pub is_public: bool,
    #[serde(default)]
    pub templates_repo: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub projects_names: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MemberSetting {
    pub username: String,
    pub project_role: ProjectRole,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MembersRequest {
    pub members: Vec<MemberSetting>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RemoveMembersRequest {
    pub usernames: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MemberRightsRequest {
    pub project_name: String,
    pub username: String,
    pub can_manage_ssh_fleets: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct UpdateRequest {
    #[serde(default)]
    pub is_public: Option<bool>,
    #[serde(default)]
    pub templates_repo: Option<String>,
    #[serde(default)]
    pub reset_templates_repo: bool,
    /// Image of runs that name none; unset leaves it unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_image: Option<String>,
    /// Removes the default image of the project; that of the server applies again.
    #[serde(default)]
    pub reset_default_image: bool,
    /// Weight of the project's usage of shared fleets, from 1 to 1000; requires a global admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<i64>,
}
