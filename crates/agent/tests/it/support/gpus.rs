//! GPUs that a host without any has for a test.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use windlass_agent::host::gpu::{Gpu, Vendor};

/// Group that owns the device of the GPU.
const GROUP: u32 = 61_777;

/// Creates a GPU of AMD, and a script of a task that prints its groups, those of the variable, and that of the device.
pub(crate) fn amd_gpu_with_script(dir: &Path) -> (Gpu, String) {
    let gpu = amd_gpu(dir, GROUP);
    let device = gpu.devices[0].display();
    let script = format!(
        "cd /windlass/run; id -G > out; echo $WINDLASS_DEVICE_GROUPS >> out; stat -c %g {device} >> out; true"
    );
    (gpu, script)
}

/// Checks what the script printed: the task has the group. The runner gives the groups of the variable to a job of another
/// user.
#[track_caller]
pub(crate) fn assert_has_group(printed: &str) {
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].split(' ').any(|group| group == "61777"), "{printed}");
    assert_eq!(lines[1..], ["61777", "61777"]);
}

/// Creates a device file that only root and this group may use, and returns a GPU of AMD with it.
fn amd_gpu(dir: &Path, group: u32) -> Gpu {
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
