//! Gateways, which receive requests for services.

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

/// Expected state of the gateway: only the fields that show whether it has changed since.
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

/// Token with which the processes of a gateway authenticate to the server.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayToken {
    pub token: String,
}

/// Request of a gateway process for its routes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RoutesRequest {
    /// Random id of the process, new at each start.
    pub node: Uuid,
    /// Public address of the process.
    #[serde(default)]
    pub address: Option<String>,
    /// Version of the routes that the process has.
    #[serde(default)]
    pub version: Option<String>,
    /// Time to wait for a different version, in milliseconds.
    #[serde(default)]
    pub wait_ms: u64,
}

/// Routes of a gateway. They contain credentials for its hosts and must never be logged.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayRoutes {
    /// Version of the contents. Different contents have different versions.
    pub version: String,
    /// Absent if the caller has this version already.
    #[serde(default)]
    pub routes: Option<Document>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TrafficReport {
    pub project: String,
    pub run: String,
    pub requests: u64,
    /// Total time that requests were in flight, in microseconds. `waiting_us` is the part of it that they waited for a
    /// replica.
    #[serde(default)]
    pub in_flight_us: u64,
    #[serde(default)]
    pub waiting_us: u64,
    #[serde(default)]
    pub answers: Option<ResponseCounts>,
    /// True if there was no replica for the requests.
    #[serde(default)]
    pub asleep: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GatewayReport {
    pub node: Uuid,
    #[serde(default)]
    pub address: Option<String>,
    /// Requests that were admitted since the last report.
    #[serde(default)]
    pub came: Vec<TrafficReport>,
    /// Replicas whose last request has been answered.
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
    /// True if the token permits requests to the services of the project.
    pub allowed: bool,
    /// True if it is a token of this server, whatever it permits. Such a token must not be forwarded to a service.
    #[serde(default = "known")]
    pub known: bool,
}

/// A server that does not report it leaves this unknown; the safe assumption is true.
fn known() -> bool {
    true
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LeaveRequest {
    pub node: Uuid,
}
