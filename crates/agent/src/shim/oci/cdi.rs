//! Specifications of the Container Device Interface: what a vendor's devices need in a container. Neither `crun` nor `runc`
//! reads them, so they are applied here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use windlass_model::config::yaml::{self, Node};

use super::{config::DeviceNode, devices::add_devices};
use crate::{host::gpu::Gpu, shim::runtime::BindMount};

/// Directories of specifications; files of a later one take precedence.
pub(super) const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Kinds of changes that a specification may contain.
const KNOWN_EDITS: [&str; 5] = ["env", "deviceNodes", "mounts", "hooks", "additionalGids"];

/// Changes of a container's configuration for its GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GpuEdits {
    pub(super) devices: Vec<DeviceNode>,
    pub(super) mounts: Vec<BindMount>,
    pub(super) env: Vec<String>,
    /// Hooks by the step at which they run.
    pub(super) hooks: BTreeMap<String, Vec<Value>>,
    /// Additional groups of the first process.
    pub(super) groups: BTreeSet<u32>,
    /// Directory to search for libraries in addition to those of the image.
    pub(super) library_dir: Option<&'static str>,
}

/// Reads all specifications of devices of a kind, those with precedence first.
pub(super) fn read_specs(dirs: &[PathBuf], kind: &str) -> Vec<Value> {
    let mut specs = Vec::new();
    for dir in dirs.iter().rev() {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.path()).collect();
        specs.extend(paths.iter().filter_map(|path| read_spec(path)).filter(|spec| spec["kind"] == kind));
    }
    specs
}

fn read_spec(path: &Path) -> Option<Value> {
    let extension = path.extension()?.to_str()?;
    let bytes = matches!(extension, "json" | "yaml" | "yml").then(|| fs::read(path).ok())??;
    // JSON is also YAML.
    let (_, node) = yaml::read_bytes(&bytes).ok()?;
    Some(to_json(&node))
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

fn devices(spec: &Value) -> impl Iterator<Item = &Value> {
    spec["devices"].as_array().into_iter().flatten()
}

/// Returns the changes for these GPUs, which the specifications name by their ids or indexes.
pub(super) fn edits_by_name(specs: &[Value], gpus: &[&Gpu], kind: &str) -> Result<GpuEdits, String> {
    let has_name = |gpu: &Gpu, device: &Value| {
        let name = &device["name"];
        // A name that is a number may be written without quotes.
        let name = name.as_str().map_or_else(|| name.to_string(), str::to_owned);
        name == gpu.id || name == gpu.index.to_string()
    };
    edits_for(specs, gpus, has_name)?
        .map_err(|gpu| format!("GPU {gpu} is not in the CDI specification of {kind}"))
}

/// Returns the changes for these GPUs, which are found by their device files; `None` if one of them is not found. Vendors
/// count their GPUs differently.
pub(super) fn edits_by_device_file(specs: &[Value], gpus: &[&Gpu]) -> Result<Option<GpuEdits>, String> {
    let has_file = |gpu: &Gpu, device: &Value| {
        let nodes = device["containerEdits"]["deviceNodes"].as_array();
        let paths = { nodes.into_iter().flatten() }.filter_map(|node| {
            let host = node["hostPath"].as_str().or_else(|| node["path"].as_str())?;
            Some(PathBuf::from(host))
        });
        let paths: BTreeSet<PathBuf> = paths.collect();
        !gpu.devices.is_empty() && gpu.devices.iter().all(|path| paths.contains(path))
            // One that stands for all GPUs has the files of others too.
            && device["name"] != "all"
    };
    Ok(edits_for(specs, gpus, has_file)?.ok())
}

/// The inner error is the id of a GPU that no specification contains.
fn edits_for(
    specs: &[Value],
    gpus: &[&Gpu],
    is_device: impl Fn(&Gpu, &Value) -> bool,
) -> Result<Result<GpuEdits, String>, String> {
    let mut edits = GpuEdits::default();
    let mut used = BTreeSet::new();
    for gpu in gpus {
        let found = specs.iter().enumerate().find_map(|(at, spec)| {
            let device = devices(spec).find(|device| is_device(gpu, device))?;
            Some((at, spec, device))
        });
        let Some((at, spec, device)) = found else { return Ok(Err(gpu.id.clone())) };
        if used.insert(at) {
            add_edits(&spec["containerEdits"], &mut edits)?;
        }
        add_edits(&device["containerEdits"], &mut edits)?;
    }
    Ok(Ok(edits))
}

fn add_edits(from: &Value, edits: &mut GpuEdits) -> Result<(), String> {
    let mut names = from.as_object().into_iter().flatten().map(|(name, _)| name);
    if let Some(unknown) = names.find(|name| !KNOWN_EDITS.contains(&name.as_str())) {
        return Err(format!("the CDI specification requests `{unknown}`, which is not supported"));
    }
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
    for group in from["additionalGids"].as_array().into_iter().flatten() {
        let id = group.as_u64().and_then(|id| u32::try_from(id).ok());
        edits.groups.insert(id.ok_or_else(|| format!("`{group}` of `additionalGids` is no group id"))?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::gpu::Vendor;

    const KIND: &str = "nvidia.com/gpu";

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
  additionalGids: [44]
devices:
  - name: 0
    containerEdits:
      deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/null}]
  - name: GPU-1
    containerEdits:
      deviceNodes: [{path: /dev/nvidia1, hostPath: /dev/full}]
      additionalGids: [44, 109]
";

    #[test]
    fn specifications_give_exactly_the_gpus_of_the_task() {
        let dir = windlass_testkit::temp_dir("cdi").unwrap();
        fs::write(dir.path().join("other.json"), r#"{"kind": "vendor.com/nic", "devices": []}"#).unwrap();
        fs::write(dir.path().join("nvidia.yaml"), SPEC).unwrap();
        let more = r#"{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-2", "containerEdits": {"env": ["B=2"]}}]}"#;
        fs::write(dir.path().join("more.json"), more).unwrap();
        let specs = read_specs(&[dir.path().join("none"), dir.path().to_owned()], KIND);
        assert_eq!(specs.len(), 2);
        let edits = edits_by_name(&specs, &[&gpu("GPU-1", 1)], KIND).unwrap();
        let paths: Vec<&str> = edits.devices.iter().map(|one| one.path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia1"]);
        assert_eq!((edits.devices[1].major, edits.devices[1].minor), (1, 7), "those of the host's file");
        assert_eq!(edits.mounts[0].target, "/usr/lib/libcuda.so.1");
        assert_eq!(edits.hooks["createContainer"][0]["args"][1], "update-ldcache");
        assert_eq!(edits.env, ["NVIDIA_VISIBLE_DEVICES=void"]);
        assert_eq!(edits.groups, BTreeSet::from([44, 109]));
        let by_index = edits_by_name(&specs, &[&gpu("GPU-0", 0)], KIND).unwrap();
        assert_eq!(by_index.devices[1].path, "/dev/nvidia0");
        let in_two_files = edits_by_name(&specs, &[&gpu("GPU-1", 1), &gpu("GPU-2", 2)], KIND).unwrap();
        assert_eq!(in_two_files.env, ["NVIDIA_VISIBLE_DEVICES=void", "B=2"]);
        assert!(edits_by_name(&specs, &[&gpu("GPU-9", 9)], KIND).unwrap_err().contains("GPU-9"));
    }

    #[test]
    fn a_specification_of_a_later_directory_takes_precedence() {
        let dir = windlass_testkit::temp_dir("cdi").unwrap();
        let dirs = ["etc", "run"].map(|name| dir.path().join(name));
        for dir in &dirs {
            fs::create_dir(dir).unwrap();
            let from = dir.file_name().unwrap().to_str().unwrap();
            let spec = json!({"kind": KIND, "devices": [{"name": "0", "containerEdits": {"env": [from]}}]});
            fs::write(dir.join("gpu.json"), spec.to_string()).unwrap();
        }
        let edits = edits_by_name(&read_specs(&dirs, KIND), &[&gpu("GPU-0", 0)], KIND).unwrap();
        assert_eq!(edits.env, ["run"]);
    }

    #[test]
    fn gpus_of_another_vendor_are_found_by_their_device_files() {
        let device = |name: &str, paths: &[&str]| {
            let nodes: Vec<Value> = paths.iter().map(|path| json!({"path": path})).collect();
            json!({"name": name, "containerEdits": {"deviceNodes": nodes, "env": [name]}})
        };
        let all = device("all", &["/dev/null", "/dev/zero"]);
        let specs = [
            json!({"kind": "amd.com/gpu", "devices": [all, device("0", &["/dev/zero"]), device("1", &["/dev/null"])]}),
        ];
        let edits = edits_by_device_file(&specs, &[&gpu("0000:01", 0)]).unwrap().unwrap();
        assert_eq!(edits.env, ["1"]);
        let other = Gpu { devices: vec!["/dev/full".into()], ..gpu("0000:02", 0) };
        assert_eq!(edits_by_device_file(&specs, &[&other]).unwrap(), None);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        let spec =
            |edits: Value| [json!({"kind": KIND, "containerEdits": edits, "devices": [{"name": "0"}]})];
        for (edits, name) in [
            (json!({"intelRdt": {"closID": "a"}}), "`intelRdt`"),
            (json!({"netDevices": []}), "`netDevices`"),
            (json!({"additionalGids": ["video"]}), "`additionalGids`"),
        ] {
            let why = edits_by_name(&spec(edits), &[&gpu("GPU-0", 0)], KIND).unwrap_err();
            assert!(why.contains(name), "{why}");
        }
    }
}
