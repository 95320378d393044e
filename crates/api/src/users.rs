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
    /// True if the user may request containers from the queue.
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
    /// Token of the user. Empty if the server does not know it: only a hash is stored, so a token is returned when it
    /// is created and, to its owner, when the request was made with it.
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

/// Plain list, or a list with its total count if `return_total_count` was set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum UserList {
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
    /// Grants or revokes the right to request containers from the queue. If absent, a new user does not have it, and an
    /// update leaves it unchanged.
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

/// Operations that a token permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TokenScope {
    /// Everything that its user may do.
    #[default]
    All,
    /// Read access: lists, plans, logs, metrics. Excludes values of secrets and keys.
    Read,
    /// Read access, and running and stopping: runs, managed jobs, uploads, connections to jobs, requests to services.
    Submit,
    /// Requests to services of the user's projects, and no API calls.
    Services,
}

impl TokenScope {
    pub const ALL: [Self; 4] = [Self::All, Self::Read, Self::Submit, Self::Services];

    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Services => "services",
        }
    }

    /// Returns whether a token of this scope may call an operation.
    pub fn allows(self, operation: &str) -> bool {
        match self {
            Self::All => true,
            Self::Read => READ_OPERATIONS.contains(&operation),
            Self::Submit => READ_OPERATIONS.contains(&operation) || SUBMIT_OPERATIONS.contains(&operation),
            Self::Services => false,
        }
    }

    /// Returns whether a token of this scope permits requests to services.
    pub const fn opens_services(self) -> bool {
        match self {
            Self::All | Self::Submit | Self::Services => true,
            Self::Read => false,
        }
    }
}

/// Operations that change nothing but the caller's session and return no secret. A new operation is in neither list until it is added
/// explicitly.
const READ_OPERATIONS: [&str; 68] = [
    "read_metrics",
    "list_pipelines",
    "read_session",
    "close_session",
    "list_sessions",
    "list_run_rows",
    "list_managed_job_rows",
    "list_instance_rows",
    "list_container_rows",
    "list_dispatchers",
    "read_summary",
    "search_names",
    "list_settings",
    "read_schema",
    "read_error_page",
    "list_views",
    "query_metrics",
    "stream_blocks",
    "check_configuration",
    "plan_configuration",
    "read_savings",
    "list_instance_jobs",
    "stream_changes",
    "list_queue",
    "explain_run",
    "explain_managed_job",
    "explain_instance",
    "read_timeline",
    "compare_variants",
    "list_deployments",
    "list_users",
    "read_my_user",
    "list_public_keys",
    "list_projects",
    "list_projects_without_fleets",
    "read_project",
    "list_secrets",
    "list_events",
    "list_repos",
    "read_archive",
    "list_runs",
    "read_run",
    "plan_run",
    "poll_logs",
    "stream_logs",
    "read_raw_log",
    "search_log",
    "read_log_marks",
    "read_job_metrics",
    "read_service_metrics",
    "list_gpus",
    "check_managed_jobs",
    "list_managed_jobs",
    "read_managed_job",
    "list_costs",
    "list_fleets",
    "list_project_fleets",
    "read_fleet",
    "plan_fleet",
    "list_instances",
    "read_instance",
    "list_health_checks",
    "list_volumes",
    "list_project_volumes",
    "read_volume",
    "list_gateways",
    "read_gateway",
    "plan_gateway",
];

/// Operations that start and stop work.
const SUBMIT_OPERATIONS: [&str; 12] = [
    "apply_run",
    "redeploy_service",
    "open_terminal",
    "stop_runs",
    "connect_job",
    "launch_managed_jobs",
    "cancel_managed_jobs",
    "resume_managed_job",
    "upload_code",
    "upload_archive",
    "init_repo",
    "read_repo",
];

/// Named token, in addition to the user's first token.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NamedToken {
    pub name: String,
    pub scope: TokenScope,
    /// First characters of the token; empty if the token is too short to show any.
    pub prefix: String,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub expires_at: Option<Timestamp>,
    #[serde(default)]
    #[schemars(with = "Option<crate::document::DateTime>")]
    pub last_used_at: Option<Timestamp>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateTokenRequest {
    pub name: String,
    #[serde(default)]
    pub scope: TokenScope,
    /// Seconds until it expires. Default: the server's `token_expiry`.
    #[serde(default)]
    pub expires_in: Option<i64>,
}

#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct NewToken {
    #[serde(flatten)]
    pub about: NamedToken,
    /// The token. Returned only here.
    pub token: String,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MadeToken").field("about", &self.about).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RevokeTokensRequest {
    pub names: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::{READ_OPERATIONS, SUBMIT_OPERATIONS, TokenScope};
    use crate::{Access, operations};

    #[test]
    fn token_scopes_list_existing_operations_and_exclude_sensitive_ones() {
        for id in READ_OPERATIONS.iter().chain(&SUBMIT_OPERATIONS) {
            assert!(operations::table().iter().any(|entry| entry.id == *id), "{id} is no operation");
        }
        for entry in operations::table() {
            if matches!(entry.access, Access::Open | Access::Gateway) {
                continue;
            }
            assert!(TokenScope::All.allows(entry.id));
            assert!(!TokenScope::Services.allows(entry.id), "{}", entry.id);
            assert!(
                !TokenScope::Read.allows(entry.id) || TokenScope::Submit.allows(entry.id),
                "{}",
                entry.id
            );
        }
        for hidden in
            ["read_secret", "read_user", "create_token", "refresh_token", "refresh_ssh_key", "apply_fleet"]
        {
            assert!(!TokenScope::Submit.allows(hidden), "{hidden}");
        }
        assert!(!TokenScope::Read.allows("apply_run") && TokenScope::Submit.allows("apply_run"));
    }
}
