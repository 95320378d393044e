//! What a mock cloud offers and what goes wrong in it: a document that tests, settings and people write.

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
    #[error("read the script of the mock cloud {path}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("understand the script of the mock cloud: {0}")]
    Yaml(String),
    #[error("understand the script of the mock cloud")]
    Shape(#[source] serde_json::Error),
}

/// All of it. Everything but the offers has a default: a cloud without faults.
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

/// What goes wrong by chance, whatever is asked for. Each that happened is counted among the books.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRates {
    /// The same numbers come out for the same seed.
    #[serde(default)]
    pub seed: u64,
    /// In percent: a creation, or a deletion, fails before anything happened.
    #[serde(default)]
    pub create_error: u64,
    #[serde(default)]
    pub delete_error: u64,
    /// In percent: too many requests, says the cloud.
    #[serde(default)]
    pub throttled: u64,
    /// In percent: the machine is there, and the answer is an error.
    #[serde(default)]
    pub half_way: u64,
    /// In percent, for machines younger than two seconds: the cloud does not know of it yet.
    #[serde(default)]
    pub stale: u64,
    /// No more machines at once.
    #[serde(default)]
    pub quota: Option<usize>,
}

/// What runs tasks on the machines of this cloud.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MockRuntime {
    /// Jobs are clocks: nothing runs.
    #[default]
    Hollow,
    /// Jobs are processes of this machine.
    Process,
}

/// A kind of machine, and how asking for one goes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfferScript {
    pub instance_type: String,
    #[serde(default = "region")]
    pub region: String,
    #[serde(default)]
    pub zones: Vec<String>,
    /// Dollars an hour.
    pub price: f64,
    #[serde(default)]
    pub spot: bool,
    pub cpus: u32,
    pub memory_gb: f64,
    #[serde(default)]
    pub disk_gb: f64,
    #[serde(default)]
    pub gpus: Option<GpuScript>,
    /// So many creations find no capacity; `-1`: all of them.
    #[serde(default)]
    pub no_capacity: i64,
    /// From creation to the first answer of its agent.
    #[serde(default)]
    pub boot_ms: i64,
    /// The answer to a creation takes so long.
    #[serde(default)]
    pub late_ms: u64,
    /// So many creations happen and their answer is lost; `-1`: all of them.
    #[serde(default)]
    pub lost_answers: i64,
    /// A spot machine is taken back this long after its creation.
    #[serde(default)]
    pub preempt_after_ms: Option<i64>,
    /// So many times a deletion is only under way.
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

/// How network volumes behave.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeScript {
    /// Dollars a month for a gigabyte.
    #[serde(default)]
    pub price_gb: f64,
    #[serde(default)]
    pub ready_ms: i64,
    #[serde(default)]
    pub attach_ms: i64,
    /// So many attachments fail first; `-1`: all of them.
    #[serde(default)]
    pub attach_fails: i64,
    /// Only force ends an attachment.
    #[serde(default)]
    pub detach_hangs: bool,
}

fn region() -> String {
    "nowhere".to_owned()
}

impl MockScript {
    /// JSON or YAML.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let tree = yaml::read(text).map_err(|problem| ScriptError::Yaml(problem.to_string()))?;
        serde_json::from_value(json(&tree)).map_err(ScriptError::Shape)
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

fn json(node: &Node) -> serde_json::Value {
    match &node.value {
        Value::Null => serde_json::Value::Null,
        // What JSON would take for a number or a boolean is one; the rest is text.
        Value::Scalar(word) if word.plain => {
            serde_json::from_str(&word.text).unwrap_or_else(|_| word.text.clone().into())
        }
        Value::Scalar(word) => word.text.clone().into(),
        Value::Seq(list) => list.iter().map(json).collect(),
        Value::Map(entries) => entries.iter().map(|entry| (entry.key.clone(), json(&entry.value))).collect(),
    }
}

impl OfferScript {
    /// Tells kinds apart, also in the names of files.
    pub(super) fn key(&self) -> String {
        let market = if self.spot { "spot" } else { "on-demand" };
        format!("{} {} {market}", self.instance_type, self.region)
    }

    pub(super) fn offer(&self) -> Offer {
        let mib = |gb: f64| (gb * MIB_PER_GB) as u64;
        let gpus = self.gpus.iter().flat_map(|gpus| {
            let vendor = gpus.vendor.as_deref().and_then(GpuVendor::parse);
            let gpu = Gpu::known(vendor, &gpus.name, mib(gpus.memory_gb), None);
            std::iter::repeat_n(gpu, gpus.count as usize)
        });
        Offer {
            backend: super::NAME.into(),
            region: self.region.clone(),
            zones: self.zones.clone(),
            instance_type: self.instance_type.clone(),
            price: Price::dollars(self.price),
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
    fn a_script_is_yaml_or_json_and_strange_words_are_named() {
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
