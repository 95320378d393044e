//! Backends, by the names that clients use.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Type of a backend. The set is closed: a client rejects a whole response with a type it does not know. SSH hosts and
/// the server's own machine are `remote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BackendType {
    Remote,
    Kubernetes,
    Slurm,
    Aws,
    Gcp,
    Azure,
}

impl BackendType {
    /// Returns the type for a backend's own name. A backend for which clients have no type is `remote`.
    pub fn from_name(name: &str) -> Self {
        match name {
            "kubernetes" => Self::Kubernetes,
            "slurm" => Self::Slurm,
            "aws" => Self::Aws,
            "gcp" => Self::Gcp,
            "azure" => Self::Azure,
            _ => Self::Remote,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Kubernetes => "kubernetes",
            Self::Slurm => "slurm",
            Self::Aws => "aws",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Backend {
    pub name: String,
    pub config: serde_json::Value,
}

/// Backend of the server, and the projects that may use it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServerBackend {
    /// Name in configurations.
    pub name: String,
    pub projects: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CheckRequest {
    /// Name of the backend.
    pub backend: String,
}

/// One thing that instances of a backend need.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    pub what: String,
    /// What is wrong and what to do; null if nothing is.
    pub problem: Option<String>,
}

/// Grant of a backend to a project. The backend is referred to by its own name (`local`, `slurm`).
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GrantRequest {
    pub project_name: String,
    pub backend: String,
}
