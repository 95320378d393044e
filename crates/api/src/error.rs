//! Error responses.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Error code. The set is closed: clients map each code to one of their errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApiErrorCode {
    /// Any other error.
    Error,
    ResourceExists,
    ResourceNotExists,
    InvalidCredentials,
    BackendNotAvailable,
    RepoDoesNotExist,
    GatewayError,
}

/// One entry of a 400 response. Clients know no other keys and expect exactly one entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BadRequest {
    pub code: ApiErrorCode,
    pub msg: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fields: Option<Vec<Vec<String>>>,
}

/// Detail of a 403 response and of other plain errors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorDetail {
    pub code: Option<ApiErrorCode>,
    pub msg: String,
}

/// One entry of a 422 response: the request does not match its schema.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ValidationError {
    pub loc: Vec<String>,
    pub msg: String,
    pub r#type: String,
}

/// Body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody<T> {
    pub detail: T,
}
