//! Device files that a container receives.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use super::{
    cdi::{self, GpuEdits},
    config::DeviceNode,
    nvidia, refused,
};
use crate::{
    host::gpu::{Gpu, Vendor},
    shim::runtime::{PreparedTask, RuntimeError},
};

const INFINIBAND: &str = "/dev/infiniband";
/// Directories below `/dev` that a privileged container has its own of.
const OWN_DIRECTORIES: [&str; 4] = ["/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/fd"];
/// Number of device files of one container.
const DEVICES_MAX: usize = 4096;

pub(super) fn has_infiniband() -> bool {
    Path::new(INFINIBAND).is_dir()
}

/// Device files of a task and the changes for its GPUs. `spec_dirs` are those with specifications of the Container Device
/// Interface.
pub(super) fn task_devices(task: &PreparedTask, spec_dirs: &[PathBuf]) -> Result<GpuEdits, RuntimeError> {
    let failed = |why| refused("failed to give GPUs to a container", why);
    let (nvidia, others): (Vec<&Gpu>, Vec<&Gpu>) =
        task.gpus.iter().partition(|gpu| gpu.vendor == Vendor::Nvidia);
    let mut edits = nvidia::gpu_edits(&nvidia, spec_dirs).map_err(failed)?;
    if nvidia.is_empty()
        && let Some(first) = others.first()
    {
        let kind = format!("{}.com/gpu", first.vendor.word());
        let specs = cdi::read_specs(spec_dirs, &kind);
        edits = cdi::edits_by_device_file(&specs, &others).map_err(failed)?.unwrap_or_default();
    }
    let mut paths: Vec<(PathBuf, String)> = Vec::new();
    if task.spec.privileged {
        paths.push((PathBuf::from("/dev"), "/dev".to_owned()));
    }
    let given = task.spec.gpu_devices.iter();
    paths.extend(given.map(|one| (PathBuf::from(&one.path_on_host), one.path_in_container.clone())));
    if has_infiniband() {
        paths.push((PathBuf::from(INFINIBAND), INFINIBAND.to_owned()));
    }
    let of_gpus = task.gpus.iter().filter(|gpu| gpu.vendor != Vendor::Nvidia).flat_map(|gpu| &gpu.devices);
    paths.extend(of_gpus.map(|path| (path.clone(), path.to_string_lossy().into_owned())));
    for (host, inside) in paths {
        add_devices(&host, &inside, &mut edits.devices)
            .map_err(|error| refused(format!("device {}", host.display()), error.to_string()))?;
    }
    let mut seen = BTreeSet::new();
    edits.devices.retain(|one| seen.insert(one.path.clone()));
    // The host's groups `video` and `render`, by number: an image may use other numbers for them.
    let amd = task.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Amd).flat_map(|gpu| &gpu.devices);
    let owners = amd.filter_map(|path| fs::metadata(path).ok()).map(|meta| meta.gid());
    edits.groups.extend(owners.filter(|gid| *gid != 0));
    Ok(edits)
}

/// Adds a device file, or all those below a directory.
pub(super) fn add_devices(host: &Path, inside: &str, devices: &mut Vec<DeviceNode>) -> io::Result<()> {
    let meta = fs::metadata(host)?;
    let kind = meta.file_type();
    if kind.is_dir() {
        if OWN_DIRECTORIES.iter().any(|own| host == Path::new(own)) {
            return Ok(());
        }
        for entry in fs::read_dir(host)? {
            let entry = entry?;
            // Links lead to other entries, or away.
            let kind = entry.file_type()?;
            if kind.is_dir() || kind.is_char_device() || kind.is_block_device() {
                let name = entry.file_name();
                add_devices(&entry.path(), &format!("{inside}/{}", name.to_string_lossy()), devices)?;
            }
        }
        return Ok(());
    }
    if !kind.is_char_device() && !kind.is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a device file"));
    }
    if devices.len() >= DEVICES_MAX {
        return Err(io::Error::other(format!("more than {DEVICES_MAX} device files")));
    }
    devices.push(DeviceNode {
        path: inside.to_owned(),
        kind: if kind.is_char_device() { 'c' } else { 'b' },
        major: rustix::fs::major(meta.rdev()),
        minor: rustix::fs::minor(meta.rdev()),
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
    });
    Ok(())
}
