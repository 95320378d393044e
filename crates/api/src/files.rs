//! Archives of files that configurations refer to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HashRequest {
    pub hash: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Archive {
    pub id: Uuid,
    pub hash: String,
}
