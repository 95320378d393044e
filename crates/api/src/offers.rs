//! Offers: resources and price of an instance.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backends::BackendType;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Gpu {
    pub name: String,
    pub memory_mib: i64,
    #[serde(default)]
    pub vendor: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Disk {
    pub size_mib: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    pub cpus: i64,
    pub memory_mib: i64,
    pub gpus: Vec<Gpu>,
    pub spot: bool,
    #[serde(default)]
    pub disk: Option<Disk>,
    #[serde(default)]
    pub cpu_arch: Option<String>,
    #[serde(default)]
    pub description: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InstanceType {
    pub name: String,
    pub resources: Resources,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Offer {
    pub backend: BackendType,
    pub instance: InstanceType,
    pub region: String,
    pub price: f64,
    #[schemars(extend("enum" = ["unknown", "available", "not_available", "no_quota", "no_balance", "idle", "busy"]))]
    pub availability: String,
    #[serde(default = "one")]
    pub blocks: i64,
    #[serde(default = "one")]
    pub total_blocks: i64,
}

fn one() -> i64 {
    1
}
