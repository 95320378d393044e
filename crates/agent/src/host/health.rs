//! Health checks of the host.

use std::{fs, io, path::Path};

use rustix::fs::statvfs;
use serde_json::Value;
use windlass_api::agent::shim::{Dcgm, DcgmIncident};

use super::{
    gpu::{self, Gpu},
    info, vendor_cli,
};

/// Free bytes below which a disk is reported as almost full: images and output come in such sizes.
const LOW_DISK: u64 = 1 << 30;
const LOW_INODES: u64 = 1000;
/// Available bytes below which the kernel will soon kill a process.
const LOW_MEMORY: u64 = 128 << 20;

/// Inputs of the checks.
#[derive(Clone, Debug)]
pub struct HealthInputs<'a> {
    /// Home directory of the shim.
    pub home: &'a Path,
    /// Directory of images, if it is elsewhere.
    pub data: Option<&'a Path>,
    /// Reason for which the container engine does not respond, if it does not.
    pub engine: Option<&'a str>,
    /// GPUs found at start.
    pub gpus: &'a [Gpu],
}

/// Returns the problems as sentences; empty means healthy.
pub async fn find_problems(watched: &HealthInputs<'_>) -> Vec<String> {
    let disks = [Some(watched.home), watched.data]
        .into_iter()
        .flatten()
        .map(|path| (path, free_space(path)))
        .collect();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let now = if watched.gpus.is_empty() { gpu::Inventory::default() } else { gpu::discover().await };
    evaluate(&HealthFacts {
        disks,
        memory: info::meminfo_field(&meminfo, "MemAvailable"),
        engine: watched.engine,
        gpus_before: watched.gpus,
        gpus_now: &now.gpus,
        gpu_problems: &now.problems,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreeSpace {
    bytes: u64,
    inodes: Option<u64>,
}

#[derive(Debug)]
struct HealthFacts<'a> {
    disks: Vec<(&'a Path, io::Result<FreeSpace>)>,
    memory: Option<u64>,
    engine: Option<&'a str>,
    gpus_before: &'a [Gpu],
    gpus_now: &'a [Gpu],
    gpu_problems: &'a [String],
}

fn evaluate(seen: &HealthFacts<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, room) in &seen.disks {
        let path = path.display();
        match room {
            Err(error) => problems.push(format!("failed to read the free space of {path}: {error}")),
            Ok(room) if room.bytes < LOW_DISK => {
                problems.push(format!("the disk of {path} has only {} MiB left", room.bytes >> 20));
            }
            Ok(FreeSpace { inodes: Some(inodes), .. }) if *inodes < LOW_INODES => {
                problems.push(format!("the disk of {path} has only {inodes} free inodes"));
            }
            Ok(_) => {}
        }
    }
    // One disk is reported once, also if two directories are on it.
    problems.dedup_by_key(|problem| problem.rsplit(" has ").next().unwrap_or_default().to_owned());
    if let Some(memory) = seen.memory.filter(|memory| *memory < LOW_MEMORY) {
        problems.push(format!("{} MiB of memory left", memory >> 20));
    }
    if let Some(why) = seen.engine {
        problems.push(format!("the container engine does not respond: {why}"));
    }
    problems.extend_from_slice(seen.gpu_problems);
    for gone in seen.gpus_before.iter().filter(|gpu| !seen.gpus_now.iter().any(|now| now.id == gpu.id)) {
        problems.push(format!("GPU {} ({}, {}) is gone", gone.index, gone.name, gone.id));
    }
    problems
}

fn free_space(path: &Path) -> io::Result<FreeSpace> {
    let disk = statvfs(path)?;
    // Some file systems create inodes on demand and report none.
    let inodes = (disk.f_files > 0).then_some(disk.f_favail);
    Ok(FreeSpace { bytes: disk.f_bavail.saturating_mul(disk.f_frsize), inodes })
}

/// Returns the report of DCGM, if it is installed and runs.
pub async fn dcgm() -> Option<Dcgm> {
    let text = vendor_cli::run("dcgmi", &["health", "--check", "--json"]).await.ok()?;
    parse_dcgm(&text)
}

/// Parses the report, which is a tree of `value` and `children`.
fn parse_dcgm(text: &str) -> Option<Dcgm> {
    let (pass, warn, fail) = (0, 10, 20);
    let report: Value = serde_json::from_str(text).ok()?;
    let overall = report.pointer("/body/Overall Health")?;
    let overall_health = match overall.get("value")?.as_str()? {
        "Healthy" => pass,
        "Warning" => warn,
        _ => fail,
    };
    let mut incidents = Vec::new();
    if overall_health != pass {
        let mut message = Vec::new();
        collect_text(overall.get("children").unwrap_or(&Value::Null), &mut message);
        let error_message = message.join(" ");
        incidents.push(DcgmIncident {
            system: 0,
            health: overall_health,
            error_message,
            error_code: 0,
            entity_group_id: 0,
            entity_id: 0,
        });
    }
    Some(Dcgm { overall_health, incidents })
}

fn collect_text(value: &Value, message: &mut Vec<String>) {
    match value {
        Value::String(text) => message.push(text.clone()),
        Value::Object(fields) => {
            for (name, value) in fields {
                if !matches!(name.as_str(), "value" | "children") {
                    message.push(format!("{name}:"));
                }
                collect_text(value, message);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect_text(value, message)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::{super::gpu::Vendor, *};

    fn healthy_facts<'a>() -> HealthFacts<'a> {
        let room = FreeSpace { bytes: 5 << 30, inodes: Some(1 << 20) };
        HealthFacts {
            disks: vec![(Path::new("/home"), Ok(room))],
            memory: Some(4 << 30),
            engine: None,
            gpus_before: &[],
            gpus_now: &[],
            gpu_problems: &[],
        }
    }

    fn free_disk(bytes: u64, inodes: u64) -> io::Result<FreeSpace> {
        Ok(FreeSpace { bytes, inodes: Some(inodes) })
    }

    #[test]
    fn health_checks_report_each_problem_and_nothing_else() {
        assert_eq!(evaluate(&healthy_facts()), Vec::<String>::new());
        let (home, data) = (Path::new("/home"), Path::new("/data"));
        let gpu = |id: &str| Gpu {
            vendor: Vendor::Nvidia,
            id: id.into(),
            index: 1,
            name: "T4".into(),
            memory_mib: 1,
            compute_capability: None,
            devices: vec![],
        };
        let both = [gpu("GPU-a"), gpu("GPU-b")];
        let message = ["nvidia-smi: Unknown Error".to_owned()];
        for (seen, expected) in [
            (
                HealthFacts { disks: vec![(home, free_disk(100 << 20, 9999))], ..healthy_facts() },
                vec!["the disk of /home has only 100 MiB left"],
            ),
            (
                HealthFacts {
                    disks: vec![(home, free_disk(3 << 20, 9999)), (data, free_disk(3 << 20, 9999))],
                    ..healthy_facts()
                },
                vec!["the disk of /home has only 3 MiB left"],
            ),
            (
                HealthFacts { disks: vec![(home, free_disk(5 << 30, 3))], ..healthy_facts() },
                vec!["the disk of /home has only 3 free inodes"],
            ),
            (HealthFacts { memory: Some(9 << 20), ..healthy_facts() }, vec!["9 MiB of memory left"]),
            (HealthFacts { memory: None, ..healthy_facts() }, vec![]),
            (
                HealthFacts { engine: Some("refused"), ..healthy_facts() },
                vec!["the container engine does not respond: refused"],
            ),
            (
                HealthFacts {
                    gpus_before: &both,
                    gpus_now: &both[..1],
                    gpu_problems: &message,
                    ..healthy_facts()
                },
                vec!["nvidia-smi: Unknown Error", "GPU 1 (T4, GPU-b) is gone"],
            ),
        ] {
            assert_eq!(evaluate(&seen), expected);
        }
    }

    #[test]
    fn the_dcgm_health_report_is_parsed() {
        let report = |health: &str, rest: &str| {
            format!(
                r#"{{"body":{{"Overall Health":{{"children":{rest},"value":"{health}"}}}},"header":["Health Monitor Report"]}}"#
            )
        };
        let healthy = parse_dcgm(&report("Healthy", "{}")).unwrap();
        assert_eq!((healthy.overall_health, healthy.incidents.len()), (0, 0));
        let rest = r#"{"GPU":{"children":{"0":{"children":{"PCIe system":{"value":"Warning"},"error":{"value":"replays"}}}}}}"#;
        let warned = parse_dcgm(&report("Warning", rest)).unwrap();
        assert_eq!((warned.overall_health, warned.incidents[0].health), (10, 10));
        assert!(warned.incidents[0].error_message.contains("PCIe system: Warning"), "{warned:?}");
        assert_eq!(parse_dcgm("Error: unable to connect"), None);
    }
}
