//! Secrets of a project.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Secret {
    pub id: Uuid,
    pub name: String,
    /// Value of the secret. Only in the response to a read of that one secret.
    #[serde(default)]
    pub value: Option<String>,
    /// Users whose runs may use the secret.
    #[serde(default)]
    pub users: SecretUsers,
}

/// Users whose runs may use a secret: `everyone` in the project, its `managers` (which include admins), or a list of
/// user names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SecretUsers {
    Group(SecretGroup),
    Named(Vec<String>),
}

impl Default for SecretUsers {
    fn default() -> Self {
        Self::Group(SecretGroup::Everyone)
    }
}

impl std::fmt::Display for SecretUsers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Group(SecretGroup::Everyone) => f.write_str("everyone"),
            Self::Group(SecretGroup::Managers) => f.write_str("managers"),
            Self::Named(names) => f.write_str(&names.join(", ")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SecretGroup {
    Everyone,
    Managers,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NameRequest {
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SetRequest {
    pub name: String,
    pub value: String,
    /// Users whose runs may use the secret. Absent: unchanged, and `everyone` for a new secret.
    #[serde(default)]
    pub users: Option<SecretUsers>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteRequest {
    pub secrets_names: Vec<String>,
}
