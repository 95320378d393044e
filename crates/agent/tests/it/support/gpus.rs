//! GPUs that a host without any has for a test.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use windlass_agent::host::gpu::{Gpu, Vendor};

/// Creates a device file that only root and this group may use, and returns a GPU of AMD with it.
pub(crate) fn amd_gpu(dir: &Path, group: u32) -> Gpu {
    let device = dir.join("renderD128");
    // The same as `/dev/full`.
    mknodat(CWD, &device, FileType::CharacterDevice, Mode::empty(), makedev(1, 7)).unwrap();
    fs::set_permissions(&device, fs::Permissions::from_mode(0o660)).unwrap();
    std::os::unix::fs::chown(&device, Some(0), Some(group)).unwrap();
    Gpu {
        vendor: Vendor::Amd,
        id: "0000:26:00.0".to_owned(),
        index: 0,
        name: "Test".to_owned(),
        memory_mib: 1,
        compute_capability: None,
        devices: vec![device],
    }
}
