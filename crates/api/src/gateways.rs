//! Gateways: where services meet the outside.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{Document, metrics::ResponseCounts, runs::ApplyAction};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayReplica {
    pub replica_num: i64,
    #[serde(default)]
    pub hostname: Option<String>,
    #[serde(default)]
    pub backend: Option<String>,
    #[serde(default)]
    pub region: Option<String>,
    #[schemars(extend("enum" = ["submitted", "provisioning", "running", "terminating", "terminated"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: Option<String>,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Gateway {
    pub id: Uuid,
    pub name: String,
    pub project_name: String,
    pub configuration: Document,
    #[schemars(with = "crate::document::DateTime")]
    pub created_at: Timestamp,
    #[schemars(extend("enum" = ["submitted", "provisioning", "running", "failed"]))]
    pub status: String,
    #[serde(default)]
    pub status_message: Option<String>,
    pub default: bool,
    #[serde(default)]
    pub hostname: Option<String>,
    #[serde(default)]
    pub ip_address: Option<String>,
    #[serde(default)]
    pub instance_id: Option<String>,
    #[serde(default)]
    pub wildcard_domain: Option<String>,
    #[serde(default)]
    pub backend: Option<String>,
    #[serde(default)]
    pub region: Option<String>,
    #[serde(default)]
    pub replicas: Vec<GatewayReplica>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ListRequest {
    #[serde(default)]
    pub include_imported: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NameRequest {
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewaySpec {
    pub configuration: Document,
    #[serde(default)]
    pub configuration_path: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PlanRequest {
    pub spec: GatewaySpec,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayPlan {
    pub project_name: String,
    pub user: String,
    pub spec: GatewaySpec,
    pub effective_spec: GatewaySpec,
    #[serde(default)]
    pub current_resource: Option<Gateway>,
    pub action: ApplyAction,
}

/// Of the gateway that was seen, only what tells whether it changed since.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedGateway {
    pub id: Uuid,
    pub configuration: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyInput {
    pub spec: GatewaySpec,
    #[serde(default)]
    pub current_resource: Option<ExpectedGateway>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ApplyRequest {
    pub plan: ApplyInput,
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateRequest {
    pub configuration: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub names: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetDefaultRequest {
    pub name: String,
    #[serde(default)]
    pub gateway_project: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetWildcardDomainRequest {
    pub name: String,
    #[serde(default)]
    pub wildcard_domain: Option<String>,
}

/// What the processes of a gateway show to the server.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayToken {
    pub token: String,
}

/// One process of a gateway asks for its routes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RoutesRequest {
    /// The process: drawn anew at each start.
    pub node: Uuid,
    /// Where people find it.
    #[serde(default)]
    pub address: Option<String>,
    /// The version that it has.
    #[serde(default)]
    pub version: Option<String>,
    /// How long to wait for another version.
    #[serde(default)]
    pub wait_ms: u64,
}

/// The routes of a gateway. They hold what opens its hosts: never to be logged.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayRoutes {
    /// Tells two contents apart.
    pub version: String,
    /// Absent when the asker has them already.
    #[serde(default)]
    pub routes: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TrafficReport {
    pub project: String,
    pub run: String,
    pub requests: u64,
    /// How long requests were on their way, all of them together, and how long of that they waited for a replica.
    #[serde(default)]
    pub in_flight_us: u64,
    #[serde(default)]
    pub waiting_us: u64,
    #[serde(default)]
    pub answers: Option<ResponseCounts>,
    /// There was no replica for them.
    #[serde(default)]
    pub asleep: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayReport {
    pub node: Uuid,
    #[serde(default)]
    pub address: Option<String>,
    /// Requests that were let through since the last report.
    #[serde(default)]
    pub came: Vec<TrafficReport>,
    /// Replicas whose last request was answered.
    #[serde(default)]
    pub left: Vec<Uuid>,
}

#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct TokenCheckRequest {
    pub token: String,
    pub project: String,
}

impl std::fmt::Debug for TokenCheckRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckRequest").field("project", &self.project).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TokenCheck {
    /// It opens the services of the project.
    pub allowed: bool,
    /// It is a token of this server, whatever it opens: no service may be shown it.
    #[serde(default = "known")]
    pub known: bool,
}

/// Who does not say so is in doubt.
fn known() -> bool {
    true
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LeaveRequest {
    pub node: Uuid,
}
