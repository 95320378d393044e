//! Backends, by the names that clients use.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::backend_kind::BackendType as BackendName;

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
        match BackendName::parse(name) {
            Some(BackendName::Kubernetes) => Self::Kubernetes,
            Some(BackendName::Slurm) => Self::Slurm,
            Some(BackendName::Aws) => Self::Aws,
            Some(BackendName::Gcp) => Self::Gcp,
            Some(BackendName::Azure) => Self::Azure,
            Some(_) | None => Self::Remote,
        }
    }

    pub const fn as_str(self) -> &'static str {
        let backend = match self {
            Self::Remote => BackendName::Remote,
            Self::Kubernetes => BackendName::Kubernetes,
            Self::Slurm => BackendName::Slurm,
            Self::Aws => BackendName::Aws,
            Self::Gcp => BackendName::Gcp,
            Self::Azure => BackendName::Azure,
        };
        backend.as_str()
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
