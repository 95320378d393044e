//! Script of a mock cloud: its offers and faults, written by tests, settings or users.

use std::path::Path;

use serde::Deserialize;
use windlass_model::{
    config::yaml::{self, Node, Value},
    money::Price,
    plan::offers::{Availability, Gpu, HostSpec, Offer},
    resources::{CpuArch, GpuVendor},
};

const MIB_PER_GB: f64 = 1024.0;

#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    #[error("failed to read the script of the mock cloud {path}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("failed to parse the script of the mock cloud: {0}")]
    Yaml(String),
    #[error("failed to parse the script of the mock cloud")]
    Shape(#[source] serde_json::Error),
}

/// Complete script. Everything but the offers has a default: a cloud without faults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MockScript {
    #[serde(default)]
    pub runtime: MockRuntime,
    pub offers: Vec<OfferScript>,
    #[serde(default)]
    pub volumes: VolumeScript,
    #[serde(default)]
    pub faults: FaultRates,
}

/// Random faults, independent of the request. Each occurrence is counted in the records.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRates {
    /// Seed; the same seed results in the same faults.
    #[serde(default)]
    pub seed: u64,
    /// Percentage of creations, and of deletions, that fail before they have any effect.
    #[serde(default)]
    pub create_error: u64,
    #[serde(default)]
    pub delete_error: u64,
    /// Percentage of calls that are throttled.
    #[serde(default)]
    pub throttled: u64,
    /// Percentage of creations that succeed but return an error.
    #[serde(default)]
    pub half_way: u64,
    /// Percentage of lookups of instances younger than two seconds that do not find them.
    #[serde(default)]
    pub stale: u64,
    /// Maximum number of instances at once.
    #[serde(default)]
    pub quota: Option<usize>,
}

/// Runtime of tasks on the instances of this cloud.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MockRuntime {
    /// Simulated jobs: nothing runs.
    #[default]
    Simulated,
    /// Jobs are processes of this machine.
    Process,
}

/// Kind of instance, and the behaviour of its creation.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfferScript {
    pub instance_type: String,
    #[serde(default = "region")]
    pub region: String,
    #[serde(default)]
    pub zones: Vec<String>,
    /// Dollars per hour.
    pub price: f64,
    #[serde(default)]
    pub spot: bool,
    pub cpus: u32,
    pub memory_gb: f64,
    #[serde(default)]
    pub disk_gb: f64,
    #[serde(default)]
    pub gpus: Option<GpuScript>,
    /// Number of creations that find no capacity; `-1`: all.
    #[serde(default)]
    pub no_capacity: i64,
    /// Time from the creation to the first response of its agent.
    #[serde(default)]
    pub boot_ms: i64,
    /// Delay of the response to a creation.
    #[serde(default)]
    pub late_ms: u64,
    /// Number of creations that succeed and lose their response; `-1`: all.
    #[serde(default)]
    pub lost_answers: i64,
    /// Time from the creation of a spot instance to its preemption.
    #[serde(default)]
    pub preempt_after_ms: Option<i64>,
    /// Number of times that a deletion is reported as in progress.
    #[serde(default)]
    pub slow_deletes: i64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuScript {
    pub name: String,
    pub count: u32,
    pub memory_gb: f64,
    #[serde(default)]
    pub vendor: Option<String>,
}

/// Behaviour of network volumes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeScript {
    /// Dollars per gigabyte and month.
    #[serde(default)]
    pub price_gb: f64,
    #[serde(default)]
    pub ready_ms: i64,
    #[serde(default)]
    pub attach_ms: i64,
    /// Number of attachments that fail first; `-1`: all.
    #[serde(default)]
    pub attach_fails: i64,
    /// Attachments end only with force.
    #[serde(default)]
    pub detach_hangs: bool,
}

fn region() -> String {
    "nowhere".to_owned()
}

impl MockScript {
    /// Parses JSON or YAML.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let tree = yaml::read(text).map_err(|problem| ScriptError::Yaml(problem.to_string()))?;
        serde_json::from_value(yaml_to_json(&tree)).map_err(ScriptError::Shape)
    }

    pub fn read(path: &Path) -> Result<Self, ScriptError> {
        let failed = |source| ScriptError::Read { path: path.display().to_string(), source };
        Self::parse(&std::fs::read_to_string(path).map_err(failed)?)
    }

    pub fn kind(&self, instance_type: &str, region: &str, spot: bool) -> Option<&OfferScript> {
        let is = |kind: &&OfferScript| {
            kind.instance_type == instance_type && kind.region == region && kind.spot == spot
        };
        self.offers.iter().find(is)
    }
}

fn yaml_to_json(node: &Node) -> serde_json::Value {
    match &node.value {
        Value::Null => serde_json::Value::Null,
        // What JSON would parse as a number or a boolean is one; the rest is text.
        Value::Scalar(word) if word.plain => {
            serde_json::from_str(&word.text).unwrap_or_else(|_| word.text.clone().into())
        }
        Value::Scalar(word) => word.text.clone().into(),
        Value::Seq(list) => list.iter().map(yaml_to_json).collect(),
        Value::Map(entries) => {
            entries.iter().map(|entry| (entry.key.clone(), yaml_to_json(&entry.value))).collect()
        }
    }
}

impl OfferScript {
    /// Returns a unique key of the kind, usable in file names.
    pub(super) fn key(&self) -> String {
        let market = if self.spot { "spot" } else { "on-demand" };
        format!("{} {} {market}", self.instance_type, self.region)
    }

    pub(super) fn offer(&self) -> Offer {
        let mib = |gb: f64| (gb * MIB_PER_GB) as u64;
        let gpus = self.gpus.iter().flat_map(|gpus| {
            let vendor = gpus.vendor.as_deref().and_then(GpuVendor::parse);
            let gpu = Gpu::from_name(vendor, &gpus.name, mib(gpus.memory_gb), None);
            std::iter::repeat_n(gpu, gpus.count as usize)
        });
        Offer {
            backend: super::NAME.into(),
            region: self.region.clone(),
            zones: self.zones.clone(),
            instance_type: self.instance_type.clone(),
            price: Price::from_dollars(self.price),
            availability: Availability::Available,
            reservation: None,
            host: HostSpec {
                cpus: self.cpus,
                arch: Some(CpuArch::X86),
                memory_mib: mib(self.memory_gb),
                disk_mib: mib(self.disk_gb),
                gpus: gpus.collect(),
                spot: self.spot,
                runtimes: None,
            },
            total_blocks: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mock_script_is_yaml_or_json_and_the_error_names_an_unknown_field() {
        let yaml = "offers:\n  - {instance_type: m, price: 0.5, cpus: 4, memory_gb: 16, spot: true}\n";
        let script = MockScript::parse(yaml).unwrap();
        assert!(script.kind("m", "nowhere", true).is_some());
        assert!(script.kind("m", "nowhere", false).is_none());
        let json = r#"{"offers": [], "volumes": {"attach_fails": -1}}"#;
        assert_eq!(MockScript::parse(json).unwrap().volumes.attach_fails, -1);
        let ScriptError::Shape(source) = MockScript::parse("offers: []\nluck: 1\n").unwrap_err() else {
            panic!()
        };
        assert!(source.to_string().contains("luck"), "{source}");
    }
}
