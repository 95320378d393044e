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

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Backend {
    pub name: String,
    pub config: serde_json::Value,
}
