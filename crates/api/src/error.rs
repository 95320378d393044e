//! Refusals as clients read them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Closed on the wire: a client raises its own error for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApiErrorCode {
    /// Nothing more precise.
    Error,
    ResourceExists,
    ResourceNotExists,
    InvalidCredentials,
    BackendNotAvailable,
    RepoDoesNotExist,
    GatewayError,
}

/// One entry of a 400. Clients know no other keys and want exactly one entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BadRequest {
    pub code: ApiErrorCode,
    pub msg: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fields: Option<Vec<Vec<String>>>,
}

/// The detail of a 403 and of the other plain refusals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorDetail {
    pub code: Option<ApiErrorCode>,
    pub msg: String,
}

/// One entry of a 422: a request that is not shaped as its schema says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ValidationError {
    pub loc: Vec<String>,
    pub msg: String,
    pub r#type: String,
}

/// The body of every refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody<T> {
    pub detail: T,
}
