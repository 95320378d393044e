//! NVIDIA GPUs, as reported by `nvidia-smi`.

use std::path::{Path, PathBuf};

use windlass_model::gpu::compute_capability;

use super::{Gpu, GpuUsage, Inventory, Vendor, read_sysfs, tool_problems};
use crate::host::vendor_cli::{self, ToolError};

const TOOL: &str = "nvidia-smi";
const FORMAT: &str = "--format=csv,noheader,nounits";
/// Queries for the newest to the oldest drivers. Before 510 the compute capability is not reported, before 450 nothing
/// about MIG. Columns that a driver lacks are filled with the value that the tool itself uses.
const QUERIES: [(&str, &str); 3] = [
    ("--query-gpu=index,uuid,name,memory.total,driver_version,pci.bus_id,mig.mode.current,compute_cap", ""),
    ("--query-gpu=index,uuid,name,memory.total,driver_version,pci.bus_id,mig.mode.current", ", [N/A]"),
    ("--query-gpu=index,uuid,name,memory.total,driver_version,pci.bus_id", ", [N/A], [N/A]"),
];
const USE_QUERY: &str = "--query-gpu=uuid,memory.used,utilization.gpu";

pub(super) async fn discover(root: &Path) -> Inventory {
    let mut listed = Ok(String::new());
    for (query, missing) in QUERIES {
        listed = vendor_cli::run(TOOL, &[query, FORMAT]).await.map(|text| with_columns(&text, missing));
        let is_unknown = |error: &ToolError| matches!(error, ToolError::Failed { message, .. } if message.contains("not a valid field"));
        if !listed.as_ref().is_err_and(is_unknown) {
            break;
        }
    }
    let listed = match listed {
        Ok(listed) => listed,
        // The tool is installed, but there is neither driver nor GPU: an image for GPU hosts on another host.
        Err(ToolError::Failed { message, .. }) if message.contains("No devices were found") => {
            return Inventory::default();
        }
        Err(error) => return Inventory { problems: tool_problems(&error), ..Inventory::default() },
    };
    let mut parsed = parse(&listed, system_memory_mib(root));
    let split: Vec<String> = parsed.rows.iter().filter(|row| row.mig).map(|row| row.uuid.clone()).collect();
    let instances = if split.is_empty() {
        Vec::new()
    } else {
        match vendor_cli::run(TOOL, &["-L"]).await {
            Ok(text) => parse_mig(&text),
            Err(error) => {
                parsed.problems.extend(tool_problems(&error));
                Vec::new()
            }
        }
    };
    build_inventory(parsed, &instances, |bus| device_file(root, bus))
}

pub(super) async fn usage() -> Vec<GpuUsage> {
    match vendor_cli::run(TOOL, &[USE_QUERY, FORMAT]).await {
        Ok(text) => parse_usage(&text),
        Err(_) => Vec::new(),
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct QueryResult {
    rows: Vec<Row>,
    driver_version: Option<String>,
    problems: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Row {
    index: u32,
    uuid: String,
    name: String,
    memory_mib: u64,
    bus: String,
    mig: bool,
    compute_capability: Option<(u32, u32)>,
}

fn with_columns(text: &str, values: &str) -> String {
    text.lines().map(|line| format!("{line}{values}\n")).collect()
}

/// Parses one GPU per line. A name may contain commas, so the columns are counted from both ends. Any other line (a GPU
/// that has fallen off the bus is reported as text) is a problem.
fn parse(text: &str, system_mib: u64) -> QueryResult {
    let mut parsed = QueryResult::default();
    for line in
        text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "No devices were found")
    {
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        let row =
            (columns.len() >= 8).then(|| columns.split_at(columns.len() - 5)).and_then(|(first, last)| {
                let [memory, driver, bus, mig, capability] = last.try_into().ok()?;
                let (index, uuid) =
                    (first[0].parse().ok()?, Some(first[1]).filter(|uuid| is_reported(uuid))?);
                // A GPU that shares the processor's memory has no memory itself.
                let memory_mib = if is_reported(memory) { memory.parse().ok()? } else { system_mib };
                parsed.driver_version = Some(driver).filter(|text| is_reported(text)).map(str::to_owned);
                let (uuid, name) = (uuid.to_owned(), first[2..].join(", "));
                let (bus, mig) = (bus.to_owned(), mig == "Enabled");
                Some(Row {
                    index,
                    uuid,
                    name,
                    memory_mib,
                    bus,
                    mig,
                    compute_capability: compute_capability(capability),
                })
            });
        match row {
            Some(row) if is_reported(&row.name) => parsed.rows.push(row),
            _ => parsed.problems.push(format!("nvidia-smi: {}", line.chars().take(200).collect::<String>())),
        }
    }
    parsed
}

/// Returns whether the tool reports a value, and not `[N/A]`, `[Not Supported]`, `[Unknown Error]`, `[GPU is lost]` or
/// similar.
fn is_reported(value: &str) -> bool {
    !value.is_empty() && !value.starts_with('[') && value != "N/A"
}

/// Partition of a GPU, as its owner configured it.
#[derive(Debug, PartialEq, Eq)]
struct MigInstance {
    /// UUID of the whole GPU.
    parent: String,
    uuid: String,
    /// `3g.20gb`
    profile: String,
}

/// Parses the lines of `nvidia-smi -L`: GPUs, and indented below them their MIG devices.
fn parse_mig(text: &str) -> Vec<MigInstance> {
    let uuid = |line: &str| Some(line.split_once("(UUID: ")?.1.trim_end().trim_end_matches(')').to_owned());
    let mut parent = None;
    let mut instances = Vec::new();
    for line in text.lines() {
        let Some(uuid) = uuid(line) else { continue };
        if line.starts_with("GPU ") {
            parent = Some(uuid);
        } else if let (Some(rest), Some(parent)) = (line.trim_start().strip_prefix("MIG "), &parent) {
            let profile = rest.split_whitespace().next().unwrap_or_default().to_owned();
            instances.push(MigInstance { parent: parent.clone(), uuid, profile });
        }
    }
    instances
}

/// Returns the memory in a profile's name.
fn profile_memory_mib(profile: &str) -> Option<u64> {
    let size = profile.split('.').find_map(|part| part.split('+').next()?.strip_suffix("gb"))?;
    Some(size.parse::<u64>().ok()? * 1024)
}

/// Builds the inventory. A partitioned GPU is offered as its partitions; one in MIG mode without partitions cannot be
/// used.
fn build_inventory(
    parsed: QueryResult,
    instances: &[MigInstance],
    device: impl Fn(&str) -> Option<PathBuf>,
) -> Inventory {
    let QueryResult { rows, driver_version, mut problems } = parsed;
    let mut gpus = Vec::new();
    for row in rows {
        let devices: Vec<PathBuf> = device(&row.bus).into_iter().collect();
        let gpu = |id: &str, name: String, memory_mib| Gpu {
            vendor: Vendor::Nvidia,
            id: id.to_owned(),
            index: row.index,
            name,
            memory_mib,
            compute_capability: row.compute_capability,
            devices: devices.clone(),
        };
        if !row.mig {
            gpus.push(gpu(&row.uuid, row.name.clone(), row.memory_mib));
            continue;
        }
        let before = gpus.len();
        for part in instances.iter().filter(|part| part.parent == row.uuid) {
            match profile_memory_mib(&part.profile) {
                Some(memory) => {
                    gpus.push(gpu(&part.uuid, format!("{} MIG {}", row.name, part.profile), memory))
                }
                None => problems.push(format!("{}: unknown MIG profile `{}`", part.uuid, part.profile)),
            }
        }
        if gpus.len() == before {
            problems.push(format!("GPU {} ({}) is in MIG mode but has no instances", row.index, row.uuid));
        }
    }
    Inventory { gpus, driver_version, problems }
}

/// Returns the device file, which has the driver's minor number and not necessarily the index.
fn device_file(root: &Path, bus: &str) -> Option<PathBuf> {
    let bus = bus.to_ascii_lowercase();
    let short = bus.get(bus.len().checked_sub(12)?..)?;
    let information = read_sysfs(&root.join("proc/driver/nvidia/gpus").join(short).join("information"))?;
    let minor = information.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
    let minor: u32 = minor.trim().parse().ok()?;
    Some(PathBuf::from(format!("/dev/nvidia{minor}")))
}

fn system_memory_mib(root: &Path) -> u64 {
    let text = read_sysfs(&root.join("proc/meminfo")).unwrap_or_default();
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    total.unwrap_or(0) / 1024
}

fn parse_usage(text: &str) -> Vec<GpuUsage> {
    let row = |line: &str| {
        let mut columns = line.split(',').map(str::trim);
        let id = columns.next().filter(|id| is_reported(id))?.to_owned();
        // In MIG mode the utilisation of the whole GPU is not reported.
        let mut number = || columns.next().and_then(|text| text.parse().ok()).unwrap_or(0);
        Some(GpuUsage { id, memory_mib: number(), percent: number() })
    };
    text.lines().filter(|line| line.contains(',')).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, instances: &str, expected: &[&str], problems: &[&str]) {
        let found = build_inventory(parse(text, 122_570), &parse_mig(instances), |_| None);
        let gpus: Vec<String> = found
            .gpus
            .iter()
            .map(|gpu| format!("{} {} {} {}", gpu.index, gpu.id, gpu.name, gpu.memory_mib))
            .collect();
        assert_eq!(gpus, expected);
        assert_eq!(found.problems, problems);
    }

    #[test]
    fn nvidia_smi_output_of_several_drivers_is_parsed() {
        check(
            "0, GPU-6f1d, NVIDIA H200, 143771, 570.172.08, 00000000:19:00.0, Disabled, 9.0\n\
             1, GPU-77aa, NVIDIA H200, 143771, 570.172.08, 00000000:3B:00.0, Disabled, 9.0\n",
            "",
            &["0 GPU-6f1d NVIDIA H200 143771", "1 GPU-77aa NVIDIA H200 143771"],
            &[],
        );
        check(
            "0, GPU-1, Tesla T4, 15360, 535.183.01, 00000000:00:04.0, [N/A], 9.0\n",
            "",
            &["0 GPU-1 Tesla T4 15360"],
            &[],
        );
        check(
            "0, GPU-2, NVIDIA GB10, [N/A], 580.95.05, 0000000F:01:00.0, [N/A], 9.0\n",
            "",
            &["0 GPU-2 NVIDIA GB10 122570"],
            &[],
        );
        check(
            "0, GPU-3, Some Card, Limited, Edition, 8192, 418.40, 00000000:01:00.0, [N/A], 9.0\n",
            "",
            &["0 GPU-3 Some Card, Limited, Edition 8192"],
            &[],
        );
        check("No devices were found\n", "", &[], &[]);
        check("", "", &[], &[]);
    }

    #[test]
    fn compute_capability_is_parsed_for_each_gpu_and_may_be_unknown() {
        let text = "0, GPU-1, Tesla T4, 15360, 535.183.01, 00000000:00:04.0, [N/A], 7.5\n\
                    1, GPU-2, NVIDIA H200, 143771, 570.172.08, 00000000:19:00.0, Disabled, 9.0\n\
                    2, GPU-3, NVIDIA B300, 275040, 580.95.05, 00000000:3B:00.0, Disabled, 10.3\n\
                    3, GPU-4, GeForce GTX 650, 1024, 418.40, 00000000:01:00.0, [N/A], [Not Supported]\n";
        let found = build_inventory(parse(text, 0), &parse_mig(""), |_| None);
        let capabilities: Vec<_> = found.gpus.iter().map(|gpu| gpu.compute_capability).collect();
        assert_eq!(capabilities, [Some((7, 5)), Some((9, 0)), Some((10, 3)), None]);
        assert!(found.problems.is_empty(), "{:?}", found.problems);
    }

    #[test]
    fn a_lost_gpu_is_reported_as_a_problem_and_the_others_are_kept() {
        check(
            "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n\
             1, GPU-1, NVIDIA A10, 23028, 550.90, 00000000:5E:00.0, [N/A], 9.0\n\
             2, [GPU is lost], [GPU is lost], [GPU is lost], 550.90, 00000000:60:00.0, [N/A], 9.0\n",
            "",
            &["1 GPU-1 NVIDIA A10 23028"],
            &[
                "nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
                "nvidia-smi: 2, [GPU is lost], [GPU is lost], [GPU is lost], 550.90, 00000000:60:00.0, [N/A], 9.0",
            ],
        );
    }

    #[test]
    fn a_gpu_in_mig_mode_is_listed_as_its_partitions() {
        let listed = "0, GPU-a, NVIDIA A100-SXM4-40GB, 40960, 535.54, 00000000:07:00.0, Enabled, 9.0\n\
                      1, GPU-b, NVIDIA A100-SXM4-40GB, 40960, 535.54, 00000000:0F:00.0, Disabled, 9.0\n\
                      2, GPU-c, NVIDIA A100-SXM4-40GB, 40960, 535.54, 00000000:47:00.0, Enabled, 9.0\n";
        let instances = "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)\n  \
                         MIG 3g.20gb     Device  0: (UUID: MIG-1111)\n  \
                         MIG 1g.5gb+me   Device  1: (UUID: MIG-2222)\n\
                         GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b)\n\
                         GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-c)\n";
        check(
            listed,
            instances,
            &[
                "0 MIG-1111 NVIDIA A100-SXM4-40GB MIG 3g.20gb 20480",
                "0 MIG-2222 NVIDIA A100-SXM4-40GB MIG 1g.5gb+me 5120",
                "1 GPU-b NVIDIA A100-SXM4-40GB 40960",
            ],
            &["GPU 2 (GPU-c) is in MIG mode but has no instances"],
        );
        // Before driver 470 the partitions were named after the whole GPU.
        let old = "GPU 0: A100-SXM4-40GB (UUID: GPU-a)\n  MIG 2g.10gb Device 0: (UUID: MIG-GPU-a/3/0)\n";
        assert_eq!(parse_mig(old)[0].uuid, "MIG-GPU-a/3/0");
    }

    #[test]
    fn gpu_usage_is_parsed_and_missing_values_count_as_zero() {
        let used = parse_usage("GPU-1, 1024, 97\nGPU-2, [N/A], [N/A]\nNo devices were found\n");
        let expected = |id: &str, memory_mib, percent| GpuUsage { id: id.into(), memory_mib, percent };
        assert_eq!(used, [expected("GPU-1", 1024, 97), expected("GPU-2", 0, 0)]);
    }
}
