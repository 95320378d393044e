//! GPUs of this host.
//!
//! They are read with the vendors' tools. NVIDIA's library would have to be loaded at run time, which a static binary
//! cannot do safely. If AMD's tool is missing, the kernel's files suffice.

mod amd;
mod nvidia;
mod other;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::vendor_cli::ToolError;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vendor {
    Nvidia,
    Amd,
    Intel,
    Tenstorrent,
}

impl Vendor {
    /// Name of the vendor in the server's API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Nvidia => "nvidia",
            Self::Amd => "amd",
            Self::Intel => "intel",
            Self::Tenstorrent => "tenstorrent",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub vendor: Vendor,
    /// The vendor's stable id (`GPU-…` for NVIDIA), by which allocations are recorded.
    pub id: String,
    /// Index assigned by the driver.
    pub index: u32,
    pub name: String,
    pub memory_mib: u64,
    /// NVIDIA only; `None` if the driver does not report it.
    #[serde(default)]
    pub compute_capability: Option<(u32, u32)>,
    /// Device files that a container needs for this GPU only.
    pub devices: Vec<PathBuf>,
}

/// GPUs found on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    pub gpus: Vec<Gpu>,
    pub driver_version: Option<String>,
    /// GPUs that could not be used and the reasons, for people.
    pub problems: Vec<String>,
}

/// Usage of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuUsage {
    pub id: String,
    pub memory_mib: u64,
    pub percent: u64,
}

/// Searches for GPUs of every vendor. Never fails: errors are in `problems`.
pub async fn discover() -> Inventory {
    discover_in(Path::new("/")).await
}

/// The same with the kernel's files below `root`.
pub async fn discover_in(root: &Path) -> Inventory {
    let found = [
        nvidia::discover(root).await,
        amd::discover(root).await,
        other::gaudi(root).await,
        other::tenstorrent(root),
    ];
    select_vendor(found)
}

/// Selects the GPUs of one vendor, because a host is reported with a single one. The first vendor counts, and the
/// others are listed as problems.
fn select_vendor(found: impl IntoIterator<Item = Inventory>) -> Inventory {
    let mut chosen = Inventory::default();
    for mut inventory in found {
        chosen.problems.append(&mut inventory.problems);
        match (chosen.gpus.first(), inventory.gpus.first()) {
            (Some(first), Some(other)) => {
                let (count, vendor, first) = (inventory.gpus.len(), other.vendor.word(), first.vendor.word());
                chosen
                    .problems
                    .push(format!("{count} GPUs of {vendor} are ignored: the host also has GPUs of {first}"));
            }
            (None, Some(_)) => {
                chosen.gpus = inventory.gpus;
                chosen.driver_version = inventory.driver_version;
            }
            (_, None) => {}
        }
    }
    chosen
}

/// Returns the usage of GPUs that a tool of this host reports.
pub async fn usage(root: &Path) -> Vec<GpuUsage> {
    let nvidia = nvidia::usage().await;
    if nvidia.is_empty() { amd::usage(root) } else { nvidia }
}

/// Returns the problems of a tool. A missing tool is not a problem: most hosts have no GPU of that vendor.
fn tool_problems(error: &ToolError) -> Vec<String> {
    match error {
        ToolError::Absent { .. } => Vec::new(),
        ToolError::Deadline { .. }
        | ToolError::Failed { .. }
        | ToolError::Start { .. }
        | ToolError::Unreadable { .. } => {
            vec![error.to_string()]
        }
    }
}

/// Reads a small file of the kernel, without the newline.
fn read_sysfs(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_second_vendor_are_reported_and_not_used() {
        let gpu = |vendor, id: &str| Gpu {
            vendor,
            id: id.into(),
            index: 0,
            name: "x".into(),
            memory_mib: 1,
            compute_capability: None,
            devices: vec![],
        };
        let one = |vendor, id| Inventory {
            gpus: vec![gpu(vendor, id)],
            driver_version: Some("9".into()),
            problems: vec![],
        };
        let empty = Inventory { problems: vec!["nvidia-smi is broken".into()], ..Inventory::default() };
        let both = select_vendor([empty, one(Vendor::Amd, "a"), one(Vendor::Intel, "b")]);
        assert_eq!(both.gpus, [gpu(Vendor::Amd, "a")]);
        assert_eq!(
            both.problems,
            ["nvidia-smi is broken", "1 GPUs of intel are ignored: the host also has GPUs of amd"]
        );
    }
}
