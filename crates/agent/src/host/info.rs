//! Hardware of the host, as reported to the server.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use windlass_api::agent::shim::{HostInfo, InstanceInfo, ProcessesInfo};

use super::{
    addresses,
    gpu::{Gpu, Inventory},
};
use crate::cgroup::Group;

/// File that dstack's server waits for.
pub const FILE: &str = "host_info.json";

/// Reads processors, memory, addresses and the disk that contains `data` (the directory of images and scratch files).
pub fn gather(data: &Path, gpus: &Inventory, processes: ProcessesInfo) -> io::Result<HostInfo> {
    let disk = rustix::fs::statvfs(data)?;
    let of_meminfo = meminfo_field(&fs::read_to_string("/proc/meminfo")?, "MemTotal").unwrap_or(0);
    let offered = most_common_kind(&gpus.gpus);
    Ok(HostInfo {
        gpu_vendor: offered.first().map_or("none", |gpu| gpu.vendor.word()).to_owned(),
        gpu_name: offered.first().map(|gpu| gpu.name.clone()).unwrap_or_default(),
        gpu_memory: offered.iter().map(|gpu| gpu.memory_mib).min().unwrap_or(0),
        gpu_count: u32::try_from(offered.len()).unwrap_or(u32::MAX),
        gpu_compute_capability: offered.iter().filter_map(|gpu| gpu.compute_capability).min(),
        addresses: addresses::interface_addresses()?
            .into_iter()
            .map(|(address, prefix)| format!("{address}/{prefix}"))
            .collect(),
        disk_size: disk.f_blocks.saturating_mul(disk.f_frsize),
        // Respects the affinity and the quotas of control groups.
        cpus: std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
        memory: memory_limit().map_or(of_meminfo, |limit| limit.min(of_meminfo)),
        processes: Some(processes),
    })
}

/// Returns what a server requests from hosts with GPUs.
pub fn instance_info(gpus: &Inventory) -> InstanceInfo {
    InstanceInfo {
        gpu_vendor: gpus.gpus.first().map(|gpu| gpu.vendor.word().to_owned()),
        gpu_driver_version: gpus.driver_version.clone().filter(|_| !gpus.gpus.is_empty()),
    }
}

/// Returns the GPUs of one model, because a host is reported with a single one. If there are several, the most frequent
/// one counts; the first of equals.
pub fn most_common_kind(gpus: &[Gpu]) -> Vec<&Gpu> {
    let like = |one: &Gpu| -> Vec<&Gpu> { gpus.iter().filter(|gpu| gpu.name == one.name).collect() };
    gpus.iter().map(like).fold(Vec::new(), |best, kind| if kind.len() > best.len() { kind } else { best })
}

/// Returns the memory limit of the control group of this process, or of one above it.
fn memory_limit() -> Option<u64> {
    let group = Group::own().ok()?;
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let v1 = group.v1_of("memory").and_then(|dir| {
        let stat = fs::read_to_string(dir.join("memory.stat")).ok()?;
        stat.lines().find_map(|line| line.strip_prefix("hierarchical_memory_limit ")?.parse().ok())
    });
    let v2 = group
        .v2
        .iter()
        .flat_map(|dir| dir.ancestors())
        .filter_map(|dir| number(&dir.join("memory.max")))
        .min();
    v1.into_iter().chain(v2).min()
}

/// Reads a line of `/proc/meminfo`, in bytes.
pub(super) fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Writes `host_info.json` into `home` unless it exists. The file appears atomically.
pub fn write_once(home: &Path, info: &HostInfo) -> io::Result<()> {
    let file = home.join(FILE);
    if fs::symlink_metadata(&file).is_ok() {
        return Ok(());
    }
    let part = home.join(format!(".{FILE}.{}", std::process::id()));
    let written = (|| {
        let mut whole = fs::File::create(&part)?;
        whole.write_all(&serde_json::to_vec(info)?)?;
        whole.sync_all()?;
        match fs::hard_link(&part, &file) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    })();
    let removed = fs::remove_file(&part);
    written.and(removed)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{fixture::Fixture, gpu::Vendor},
        *,
    };

    fn gpu(name: &str, id: &str, memory_mib: u64) -> Gpu {
        Gpu {
            vendor: Vendor::Nvidia,
            id: id.into(),
            index: 0,
            name: name.into(),
            memory_mib,
            compute_capability: None,
            devices: vec![],
        }
    }

    fn processes() -> ProcessesInfo {
        let mode = windlass_api::agent::shim::ProcessMode::default();
        ProcessesInfo { mode, confined_by: None, problem: None }
    }

    #[test]
    fn host_info_lists_the_resources_of_the_host() {
        let gpus = vec![gpu("A", "1", 10), gpu("B", "2", 20), gpu("B", "3", 19)];
        let inventory = Inventory { gpus, driver_version: Some("570".into()), problems: vec![] };
        let info = gather(Path::new("/"), &inventory, processes()).unwrap();
        assert!(info.cpus > 0 && info.memory > 1 << 20 && info.disk_size > 1 << 20, "{info:?}");
        assert!(info.addresses.iter().all(|address| address.contains('/')), "{info:?}");
        assert_eq!((info.gpu_vendor.as_str(), info.gpu_name.as_str()), ("nvidia", "B"));
        assert_eq!(
            (info.gpu_count, info.gpu_memory),
            (2, 19),
            "the kind there is most of, as small as its smallest"
        );
        assert_eq!(instance_info(&inventory).gpu_driver_version.as_deref(), Some("570"));

        let none = gather(Path::new("/"), &Inventory::default(), processes()).unwrap();
        assert_eq!((none.gpu_vendor.as_str(), none.gpu_count), ("none", 0));
        assert_eq!(instance_info(&Inventory::default()), InstanceInfo::default());
        assert!(gather(Path::new("/nonexistent"), &Inventory::default(), processes()).is_err());
    }

    #[test]
    fn the_host_info_file_is_written_atomically_and_once() {
        let fixture = Fixture::new();
        let mut info = gather(Path::new("/"), &Inventory::default(), processes()).unwrap();
        write_once(fixture.path(), &info).unwrap();
        let read =
            || -> HostInfo { serde_json::from_slice(&fs::read(fixture.path().join(FILE)).unwrap()).unwrap() };
        assert_eq!(read(), info);
        let before = info.clone();
        info.cpus += 1;
        write_once(fixture.path(), &info).unwrap();
        assert_eq!(read(), before);
        assert_eq!(fs::read_dir(fixture.path()).unwrap().count(), 1);
    }
}
