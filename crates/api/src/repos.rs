//! Repos, credentials for them, and uploaded diffs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Document;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RepoHead {
    pub repo_id: String,
    pub repo_info: Document,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Creds {
    pub clone_url: String,
    #[serde(default)]
    pub private_key: Option<String>,
    #[serde(default)]
    pub oauth_token: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RepoHeadWithCreds {
    pub repo_id: String,
    pub repo_info: Document,
    #[serde(default)]
    pub repo_creds: Option<Creds>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReadRequest {
    pub repo_id: String,
    #[serde(default)]
    pub include_creds: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InitRequest {
    pub repo_id: String,
    pub repo_info: Document,
    #[serde(default)]
    pub repo_creds: Option<Creds>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub repos_ids: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct UploadCodeQuery {
    pub repo_id: String,
}
