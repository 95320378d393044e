//! Instance types of a region with their hardware, and the zones that have them.

use std::collections::{BTreeMap, BTreeSet};

use windlass_model::{
    plan::offers::{Gpu, HostSpec},
    resources::{CpuArch, GpuVendor},
};

use crate::{
    api::{Api, Params},
    errors::ApiError,
    xml::Element,
};

/// Page of `DescribeInstanceTypes`: the maximum.
const TYPES_PAGE: &str = "100";
const OFFERINGS_PAGE: &str = "1000";
/// Maximum number of values of one filter.
const FILTER_VALUES_MAX: usize = 200;

/// Instance type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct InstanceType {
    pub(crate) name: String,
    /// Its hardware, without a disk.
    pub(crate) host: HostSpec,
    pub(crate) on_demand: bool,
    pub(crate) spot: bool,
    /// Number of network interfaces with EFA.
    pub(crate) efa_interfaces: u32,
}

/// Types of a region.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RegionTypes {
    pub(crate) types: Vec<InstanceType>,
    /// Zones by the name of the type.
    pub(crate) zones: BTreeMap<String, BTreeSet<String>>,
}

impl RegionTypes {
    /// Reads the types of a region whose names match.
    pub(crate) async fn fetch(api: &Api, region: &str, patterns: &[String]) -> Result<Self, ApiError> {
        let query = Params::new().with("MaxResults", TYPES_PAGE).with_filter("instance-type", patterns);
        let described = api.list(region, "DescribeInstanceTypes", query, "instanceTypeSet").await?;
        let is_wanted = |name: &str| patterns.iter().any(|pattern| matches_pattern(pattern, name));
        let types = described.iter().filter_map(InstanceType::read);
        let mut types: Vec<InstanceType> = types.filter(|one| is_wanted(&one.name)).collect();
        types.sort_by(|left, right| left.name.cmp(&right.name));
        let mut zones: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for some in types.chunks(FILTER_VALUES_MAX) {
            let query = Params::new()
                .with("MaxResults", OFFERINGS_PAGE)
                .with("LocationType", "availability-zone")
                .with_filter("instance-type", some.iter().map(|one| &one.name));
            let action = "DescribeInstanceTypeOfferings";
            for offering in api.list(region, action, query, "instanceTypeOfferingSet").await? {
                if let (Some(name), Some(zone)) = (offering.text("instanceType"), offering.text("location")) {
                    zones.entry(name.to_owned()).or_default().insert(zone.to_owned());
                }
            }
        }
        Ok(Self { types, zones })
    }
}

impl InstanceType {
    /// Reads an entry of `DescribeInstanceTypes`. `None` for one that cannot run jobs, or only as hardware that requests
    /// cannot name: a part of a GPU, an accelerator for inference.
    fn read(item: &Element) -> Option<Self> {
        let name = item.text("instanceType")?.to_owned();
        let has_other_accelerator =
            ["fpgaInfo", "inferenceAcceleratorInfo", "neuronInfo"].iter().any(|key| item.at(key).is_some());
        if has_other_accelerator || (item.is_true("bareMetal") && !name.contains("metal")) {
            return None;
        }
        let mut architectures = item.texts("processorInfo/supportedArchitectures");
        let arch = architectures.find_map(|arch| match arch {
            "x86_64" => Some(CpuArch::X86),
            "arm64" => Some(CpuArch::Arm),
            _ => None,
        })?;
        let mut gpus = Vec::new();
        for gpu in item.items("gpuInfo/gpus") {
            let count: usize = gpu.number("count").unwrap_or_default();
            if count == 0 {
                return None;
            }
            let vendor = gpu.text("manufacturer").and_then(GpuVendor::parse);
            let memory = gpu.number("memoryInfo/sizeInMiB").unwrap_or_default();
            let one = Gpu::from_name(vendor, gpu.text("name")?, memory, None);
            gpus.extend(std::iter::repeat_n(one, count));
        }
        let markets: Vec<&str> = item.texts("supportedUsageClasses").collect();
        let supports = |market| markets.is_empty() || markets.contains(&market);
        let efa = item.is_true("networkInfo/efaSupported");
        let interfaces = item.number("networkInfo/efaInfo/maximumEfaInterfaces").unwrap_or(1);
        Some(Self {
            name,
            host: HostSpec {
                cpus: item.number("vCpuInfo/defaultVCpus")?,
                arch: Some(arch),
                memory_mib: item.number("memoryInfo/sizeInMiB")?,
                disk_mib: 0,
                gpus,
                spot: false,
                runtimes: None,
            },
            on_demand: supports("on-demand"),
            spot: supports("spot"),
            efa_interfaces: if efa { interfaces } else { 0 },
        })
    }
}

/// Compares a name with a pattern in which `*` stands for any text.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<InstanceType> {
        InstanceType::read(&Element::parse(text).unwrap())
    }

    #[test]
    fn the_hardware_of_a_type_with_gpus_is_read() {
        let text = "<item><instanceType>p5.48xlarge</instanceType><bareMetal>false</bareMetal>
            <supportedUsageClasses><item>on-demand</item><item>capacity-block</item></supportedUsageClasses>
            <processorInfo><supportedArchitectures><item>x86_64</item></supportedArchitectures></processorInfo>
            <vCpuInfo><defaultVCpus>192</defaultVCpus></vCpuInfo>
            <memoryInfo><sizeInMiB>2097152</sizeInMiB></memoryInfo>
            <gpuInfo><gpus><item><name>H100</name><manufacturer>NVIDIA</manufacturer><count>8</count>
            <memoryInfo><sizeInMiB>81920</sizeInMiB></memoryInfo></item></gpus></gpuInfo>
            <networkInfo><efaSupported>true</efaSupported><efaInfo><maximumEfaInterfaces>32</maximumEfaInterfaces>
            </efaInfo></networkInfo></item>";
        let found = read(text).unwrap();
        assert_eq!((found.host.cpus, found.host.memory_mib, found.host.gpus.len()), (192, 2_097_152, 8));
        assert_eq!((found.host.gpus[0].name.as_str(), found.host.gpus[0].memory_mib), ("H100", 81_920));
        assert_eq!((found.on_demand, found.spot, found.efa_interfaces), (true, false, 32));
        assert_eq!(found.host.arch, Some(CpuArch::X86));
        assert_eq!(read(&text.replace("<count>8<", "<count>0<")), None, "a part of a GPU");
        assert_eq!(read(&text.replace("gpuInfo", "neuronInfo")), None);
        assert_eq!(read(&text.replace("x86_64", "i386")), None);
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("g5.*", "g5.xlarge", true),
            ("g5.*", "g5g.xlarge", false),
            ("g5.xlarge", "g5.xlarge", true),
            ("g5.xlarge", "g5.xlarge2", false),
            ("*.metal*", "g5.metal-24xl", true),
            ("g*.4x*e", "g5.4xlarge", true),
            ("g*.4x*e", "g5.4xlarg", false),
            ("*", "", true),
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }
}
