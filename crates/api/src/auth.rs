//! Login by other means than a token.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Provider {
    pub name: String,
    pub enabled: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NextRedirectRequest {
    pub code: String,
    pub state: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NextRedirect {
    #[serde(default)]
    pub redirect_url: Option<String>,
}
