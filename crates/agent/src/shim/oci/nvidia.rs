//! NVIDIA GPUs of a container: by a specification of the Container Device Interface, which NVIDIA's toolkit generates,
//! and without one by device files and the driver's libraries found on the host.
//!
//! Neither `crun` nor `runc` reads such specifications, so they are applied here. `tests/try_gpu_container.py` tries both
//! ways on a machine with GPUs.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use windlass_model::config::yaml::{self, Node};

use super::{config::DeviceNode, devices::add_devices};
use crate::{host::gpu::Gpu, isolation::user_map::find_program, shim::runtime::BindMount};

const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
const SPEC_KIND: &str = "nvidia.com/gpu";
/// Device files that all GPUs share.
const COMMON_DEVICES: [&str; 4] =
    ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];
/// Libraries of the driver, by the beginning of their names.
const LIBRARIES: [&str; 8] = [
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-",
    "libnvcuvid.so",
    "libnvoptix.so",
    "libEGL_nvidia.so",
    "libGLX_nvidia.so",
    "libnvidia_",
];
const PROGRAMS: [&str; 3] = ["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced"];
/// Directories with the programs of the driver; some installations keep everything of it in one place.
const PROGRAM_DIRS: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin"];
/// Directory of the driver's libraries in a container; images of NVIDIA search it by default.
const LIBRARY_DIR: &str = "/usr/local/nvidia/lib64";

/// Changes of a container's configuration for its GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GpuEdits {
    pub(super) devices: Vec<DeviceNode>,
    pub(super) mounts: Vec<BindMount>,
    pub(super) env: Vec<String>,
    /// Hooks by the step at which they run.
    pub(super) hooks: BTreeMap<String, Vec<Value>>,
    /// Directory to search for libraries in addition to those of the image.
    pub(super) library_dir: Option<&'static str>,
}

/// Returns the changes for these GPUs, or the reason why they cannot be given to a container.
pub(super) fn gpu_edits(gpus: &[&Gpu]) -> Result<GpuEdits, String> {
    if gpus.is_empty() {
        return Ok(GpuEdits::default());
    }
    match find_spec(&SPEC_DIRS.map(PathBuf::from)) {
        Some(spec) => edits_from_spec(&spec, gpus),
        None => edits_from_driver(gpus),
    }
}

fn find_spec(dirs: &[PathBuf]) -> Option<Value> {
    let entries = dirs.iter().flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
    let paths = entries.map(|entry| entry.path());
    let specs = paths.filter_map(|path| {
        let name = path.extension()?.to_str()?;
        let bytes = matches!(name, "json" | "yaml" | "yml").then(|| fs::read(&path).ok())??;
        // JSON is also YAML.
        let (_, node) = yaml::read_bytes(&bytes).ok()?;
        Some(to_json(&node))
    });
    { specs }.find(|spec| spec["kind"] == SPEC_KIND)
}

fn to_json(node: &Node) -> Value {
    match &node.value {
        yaml::Value::Null => Value::Null,
        yaml::Value::Scalar(scalar) if scalar.plain => {
            serde_json::from_str(&scalar.text).unwrap_or_else(|_| scalar.text.clone().into())
        }
        yaml::Value::Scalar(scalar) => scalar.text.clone().into(),
        yaml::Value::Seq(nodes) => nodes.iter().map(to_json).collect(),
        yaml::Value::Map(entries) => entries
            .iter()
            .map(|entry| (entry.key.clone(), to_json(&entry.value)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
    }
}

fn edits_from_spec(spec: &Value, gpus: &[&Gpu]) -> Result<GpuEdits, String> {
    let mut edits = GpuEdits::default();
    add_edits(&spec["containerEdits"], &mut edits)?;
    for gpu in gpus {
        let names = [gpu.id.clone(), gpu.index.to_string()];
        let devices = spec["devices"].as_array().into_iter().flatten();
        let has_name = |one: &&Value| {
            let name = &one["name"];
            // A name that is a number may be written without quotes.
            let name = name.as_str().map_or_else(|| name.to_string(), str::to_owned);
            names.contains(&name)
        };
        let device = { devices }.find(has_name);
        let device =
            device.ok_or_else(|| format!("GPU {} is not in the CDI specification of {SPEC_KIND}", gpu.id))?;
        add_edits(&device["containerEdits"], &mut edits)?;
    }
    Ok(edits)
}

fn add_edits(from: &Value, edits: &mut GpuEdits) -> Result<(), String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    for node in from["deviceNodes"].as_array().into_iter().flatten() {
        let path = text(&node["path"]).ok_or("a device of the CDI specification has no path")?;
        let host = text(&node["hostPath"]).unwrap_or_else(|| path.clone());
        add_devices(Path::new(&host), &path, &mut edits.devices)
            .map_err(|error| format!("{host}: {error}"))?;
    }
    for mount in from["mounts"].as_array().into_iter().flatten() {
        let (Some(source), Some(target)) = (text(&mount["hostPath"]), text(&mount["containerPath"])) else {
            return Err("a mount of the CDI specification has no path".to_owned());
        };
        edits.mounts.push(BindMount { source: source.into(), target, read_only: true });
    }
    edits.env.extend(from["env"].as_array().into_iter().flatten().filter_map(text));
    for hook in from["hooks"].as_array().into_iter().flatten() {
        let Some(step) = text(&hook["hookName"]) else { continue };
        let entry = json!({"path": hook["path"], "args": hook["args"], "env": hook["env"]});
        edits.hooks.entry(step).or_default().push(entry);
    }
    Ok(())
}

/// Without a specification: device files, and the libraries that the host's linker knows.
fn edits_from_driver(gpus: &[&Gpu]) -> Result<GpuEdits, String> {
    let mut edits = GpuEdits { library_dir: Some(LIBRARY_DIR), ..GpuEdits::default() };
    let own = gpus.iter().flat_map(|gpu| gpu.devices.clone());
    let common = COMMON_DEVICES.iter().map(PathBuf::from).filter(|path| path.exists());
    for path in own.chain(common) {
        add_devices(&path, &path.to_string_lossy(), &mut edits.devices)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    // Users other than root rarely have it in their path.
    let ldconfig = find_program("ldconfig").unwrap_or_else(|| PathBuf::from("ldconfig"));
    let listed = Command::new(ldconfig).arg("-p").stdin(Stdio::null()).output();
    let listed = listed.map_err(|error| format!("failed to list the driver's libraries: {error}"))?;
    edits.mounts = driver_libraries(&String::from_utf8_lossy(&listed.stdout));
    if edits.mounts.is_empty() {
        return Err("the libraries of NVIDIA's driver were not found on this host".to_owned());
    }
    edits.mounts.extend(driver_programs(&PROGRAM_DIRS.map(Path::new)));
    // A hook of the toolkit, if there is one, must not add other GPUs.
    edits.env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    Ok(edits)
}

/// Finds the programs of the driver; containers have them in `/usr/bin`.
fn driver_programs(dirs: &[&Path]) -> Vec<BindMount> {
    let find = |program: &&str| {
        let source = dirs.iter().map(|dir| dir.join(program)).find(|path| path.is_file())?;
        Some(BindMount { source, target: format!("/usr/bin/{program}"), read_only: true })
    };
    PROGRAMS.iter().filter_map(find).collect()
}

/// Finds the libraries of the driver in the output of `ldconfig -p`. Those for other architectures are left out.
fn driver_libraries(listed: &str) -> Vec<BindMount> {
    let architecture = if cfg!(target_arch = "aarch64") { "AArch64" } else { "x86-64" };
    let mut mounts: Vec<BindMount> = Vec::new();
    for line in listed.lines() {
        let Some((left, path)) = line.trim().split_once(" => ") else { continue };
        let name = left.split_whitespace().next().unwrap_or_default();
        let is_driver = LIBRARIES.iter().any(|start| name.starts_with(start)) && name.contains(".so.");
        let target = format!("{LIBRARY_DIR}/{name}");
        if is_driver && left.contains(architecture) && !mounts.iter().any(|mount| mount.target == target) {
            mounts.push(BindMount { source: PathBuf::from(path), target, read_only: true });
        }
    }
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::gpu::Vendor;

    fn gpu(id: &str, index: u32) -> Gpu {
        let (vendor, name, devices) = (Vendor::Nvidia, "G".to_owned(), vec!["/dev/null".into()]);
        Gpu { vendor, id: id.to_owned(), index, name, memory_mib: 1, compute_capability: None, devices }
    }

    const SPEC: &str = "
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
    - path: /dev/nvidiactl
      hostPath: /dev/zero
  env: [NVIDIA_VISIBLE_DEVICES=void]
  mounts:
    - hostPath: /usr/lib/libcuda.so.1
      containerPath: /usr/lib/libcuda.so.1
      options: [ro, nosuid, bind]
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, update-ldcache]
devices:
  - name: 0
    containerEdits:
      deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/null}]
  - name: GPU-1
    containerEdits:
      deviceNodes: [{path: /dev/nvidia1, hostPath: /dev/full}]
";

    #[test]
    fn a_specification_gives_exactly_the_gpus_of_the_task() {
        let dir = windlass_testkit::temp_dir("cdi").unwrap();
        fs::write(dir.path().join("other.json"), r#"{"kind": "vendor.com/nic", "devices": []}"#).unwrap();
        fs::write(dir.path().join("nvidia.yaml"), SPEC).unwrap();
        let spec = find_spec(&[dir.path().join("none"), dir.path().to_owned()]).unwrap();
        let edits = edits_from_spec(&spec, &[&gpu("GPU-1", 1)]).unwrap();
        let paths: Vec<&str> = edits.devices.iter().map(|one| one.path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia1"]);
        assert_eq!((edits.devices[1].major, edits.devices[1].minor), (1, 7), "those of the host's file");
        assert_eq!(edits.mounts[0].target, "/usr/lib/libcuda.so.1");
        assert_eq!(edits.hooks["createContainer"][0]["args"][1], "update-ldcache");
        assert_eq!(edits.env, ["NVIDIA_VISIBLE_DEVICES=void"]);
        let by_index = edits_from_spec(&spec, &[&gpu("GPU-0", 0)]).unwrap();
        assert_eq!(by_index.devices[1].path, "/dev/nvidia0");
        assert!(edits_from_spec(&spec, &[&gpu("GPU-9", 9)]).unwrap_err().contains("GPU-9"));
    }

    #[test]
    fn programs_of_the_driver_are_found_where_it_was_installed() {
        let dir = windlass_testkit::temp_dir("driver").unwrap();
        let (first, second) = (dir.path().join("bin"), dir.path().join("nvidia"));
        for (dir, name) in [
            (&first, "nvidia-smi"),
            (&second, "nvidia-smi"),
            (&second, "nvidia-debugdump"),
            (&second, "other"),
        ] {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join(name), "").unwrap();
        }
        let mounts = driver_programs(&[&first, &second]);
        let found: Vec<(PathBuf, String)> =
            mounts.into_iter().map(|mount| (mount.source, mount.target)).collect();
        let expected = vec![
            (first.join("nvidia-smi"), "/usr/bin/nvidia-smi".to_owned()),
            (second.join("nvidia-debugdump"), "/usr/bin/nvidia-debugdump".to_owned()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn libraries_of_the_driver_are_found_in_the_list_of_the_linker() {
        let listed = "\t300 libs found in cache `/etc/ld.so.cache'
\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,AArch64) => /usr/lib/aarch64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6) => /usr/lib32/libcuda.so.1
\tlibcuda.so (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so
\tlibnvidia-ml.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibnvidia-ml.so.1 (libc6,AArch64) => /usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1
\tlibc.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6
";
        let targets: Vec<String> = driver_libraries(listed).into_iter().map(|mount| mount.target).collect();
        assert_eq!(
            targets,
            ["/usr/local/nvidia/lib64/libcuda.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"]
        );
    }
}
