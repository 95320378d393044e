//! Where machines come from, as clients name it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Closed on the wire: a client refuses a whole answer with a name it does not know. Own hosts and
/// this machine are `remote`.
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
    /// The word for a backend by its own name. What clients have no word for is a machine of one's own.
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

/// A backend by its own name (`local`, `slurm`), for one project.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GrantRequest {
    pub project_name: String,
    pub backend: String,
}
