//! Devices of containers: given ones, those of privileged containers, and those of specifications.

use std::{fs, os::unix::fs::FileTypeExt as _, path::PathBuf};

use serde_json::json;
use windlass_agent::host::gpu::{Gpu, Vendor};
use windlass_api::agent::shim::GpuDevice;

use super::OciHost;
use crate::support::gpus;

/// Device files that every container has.
const USUAL: [&str; 8] = ["console", "full", "null", "ptmx", "random", "tty", "urandom", "zero"];

fn gpu(id: &str, index: u32) -> Gpu {
    let (vendor, name) = (Vendor::Nvidia, "Test".to_owned());
    Gpu {
        vendor,
        id: id.to_owned(),
        index,
        name,
        memory_mib: 1,
        compute_capability: None,
        devices: Vec::new(),
    }
}

#[tokio::test]
async fn oci_tasks_use_the_devices_that_they_are_given_and_no_others() {
    let host = OciHost::new();
    let script =
        "cd /windlass/run; ls /dev/mine /dev/other > out 2>/dev/null; echo x > /dev/mine 2>> out; true";
    let mut task = host.task(script).await;
    let device = json!({"path_on_host": "/dev/full", "path_in_container": "/dev/mine"});
    task.spec.gpu_devices = vec![serde_json::from_value::<GpuDevice>(device).unwrap()];
    let text = host.message(&task).await;
    assert!(text.starts_with("/dev/mine") && text.contains("No space left"), "{text}");
    assert!(!text.contains("/dev/other"), "{text}");
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_privileged_tasks_have_the_devices_of_the_host_and_may_mount() {
    let host = OciHost::new();
    let devices = fs::read_dir("/dev").unwrap().flatten();
    let devices = devices.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_char_device()));
    let mut names = devices.filter_map(|entry| entry.file_name().into_string().ok());
    let other = names.find(|name| !USUAL.contains(&name.as_str())).expect("the host has a device");
    let script = format!(
        "cd /windlass/run; ls -d /dev/{other} > out 2>/dev/null
        mkdir -p /tmp/at && mount -t tmpfs none /tmp/at 2>/dev/null && echo mounted >> out; echo end >> out"
    );
    for (privileged, expected) in [(true, format!("/dev/{other}\nmounted\nend")), (false, "end".to_owned())] {
        let mut task = host.task(&script).await;
        task.spec.privileged = privileged;
        assert_eq!(host.message(&task).await, expected);
        host.remove(&task).await;
    }
}

#[tokio::test]
async fn oci_tasks_get_what_the_specification_of_their_gpu_contains() {
    let specs = crate::support::temp_dir("cdi").unwrap();
    let library = specs.path().join("library");
    fs::write(&library, "of the driver").unwrap();
    let edits = |device: &str| {
        let node = json!({"path": format!("/dev/{device}"), "hostPath": "/dev/full"});
        json!({"deviceNodes": [node], "env": [format!("GPU={device}")]})
    };
    let spec = json!({
        "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu",
        "containerEdits": {
            "deviceNodes": [{"path": "/dev/control", "hostPath": "/dev/null"}],
            "mounts": [{"hostPath": library, "containerPath": "/usr/lib/libdriver", "options": ["ro"]}],
            "additionalGids": [61_777],
        },
        "devices": [{"name": "GPU-1", "containerEdits": edits("one")}],
    });
    fs::write(specs.path().join("a.json"), spec.to_string()).unwrap();
    let second = json!({
        "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu",
        "devices": [
            {"name": "GPU-2", "containerEdits": edits("two")},
            {"name": "GPU-3", "containerEdits": {"intelRdt": {"closID": "a"}}},
        ],
    });
    fs::write(specs.path().join("b.json"), second.to_string()).unwrap();
    let dirs = vec![PathBuf::from("/nonexistent"), specs.path().to_owned()];
    let host = OciHost::with(|settings| settings.cdi_dirs = dirs);
    let script = "cd /windlass/run; for d in one two control; do [ -c /dev/$d ] && echo $d; done > out
        echo x > /dev/$GPU 2>> out; cat /usr/lib/libdriver >> out; echo >> out; id -G >> out; true";
    let mut task = host.task(script).await;
    task.gpus = vec![gpu("GPU-1", 1)];
    let text = host.message(&task).await;
    assert!(text.starts_with("one\ncontrol\n") && text.contains("No space left"), "{text}");
    assert!(text.contains("of the driver"), "{text}");
    assert!(text.lines().last().unwrap().split(' ').any(|group| group == "61777"), "{text}");
    host.remove(&task).await;
    // A device of another file.
    let mut other = host.task("cd /windlass/run; ls /dev/one /dev/two > out 2>/dev/null; true").await;
    other.gpus = vec![gpu("GPU-2", 2)];
    assert_eq!(host.message(&other).await, "/dev/two");
    host.remove(&other).await;
    for (id, why) in [("GPU-3", "`intelRdt`"), ("GPU-9", "GPU-9 is not in the CDI specification")] {
        let mut refused = host.task("true").await;
        refused.gpus = vec![gpu(id, 9)];
        let error = windlass_agent::shim::runtime::Runtime::create(&host.oci, &refused).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[tokio::test]
async fn oci_tasks_have_the_groups_that_own_the_devices_of_amd_gpus() {
    let host = OciHost::new();
    let (gpu, script) = gpus::amd_gpu_with_script(host.scratch.path());
    let mut task = host.task(&script).await;
    task.gpus = vec![gpu];
    gpus::assert_has_group(&host.message(&task).await);
    host.remove(&task).await;
}
