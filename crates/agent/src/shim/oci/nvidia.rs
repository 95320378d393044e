//! NVIDIA GPUs of a container: by a specification of the Container Device Interface, which NVIDIA's toolkit generates,
//! and without one by device files and the driver's libraries found on the host.
//!
//! Neither `crun` nor `runc` reads such specifications, so they are applied here. `tests/try_gpu_container.py` tries both
//! ways on a machine with GPUs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read as _,
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
/// Directories with programs that every image contains itself.
const SYSTEM_DIRS: [&str; 4] = ["/bin", "/sbin", "/usr/bin", "/usr/sbin"];
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const SCRIPT_BYTES_MAX: u64 = 64 << 10;
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
    let programs = driver_programs(&program_dirs(&edits.mounts));
    edits.mounts.extend(programs);
    // A hook of the toolkit, if there is one, must not add other GPUs.
    edits.env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    Ok(edits)
}

/// Directories in which the programs of the driver may be: the usual ones, and those beside its libraries.
fn program_dirs(libraries: &[BindMount]) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = PROGRAM_DIRS.map(PathBuf::from).to_vec();
    for library in libraries {
        // The path that the linker knows may be a link to where the driver was installed.
        for path in
            [Some(library.source.clone()), fs::canonicalize(&library.source).ok()].into_iter().flatten()
        {
            let programs = path.parent().and_then(Path::parent).map(|root| root.join("bin"));
            dirs.extend(programs.filter(|dir| !dirs.contains(dir)));
        }
    }
    dirs
}

/// Finds the programs of the driver; containers have them in `/usr/bin`. Some hosts have scripts of the same names that
/// run the programs: these are not what a container needs.
fn driver_programs(dirs: &[PathBuf]) -> Vec<BindMount> {
    let mut mounts: Vec<BindMount> = Vec::new();
    for program in PROGRAMS {
        let found = || dirs.iter().map(|dir| dir.join(program)).filter(|path| path.is_file());
        let mut source = found().find(|path| is_elf(path));
        let mut needed = Vec::new();
        if source.is_none() {
            source = found().next();
            needed = source.as_deref().map(paths_in_script).unwrap_or_default();
            if let Some(at) = needed.iter().position(|path| path.ends_with(program) && is_elf(path)) {
                source = Some(needed.swap_remove(at));
                needed.clear();
            }
        }
        let target = |path: &Path| path.to_string_lossy().into_owned();
        let needed =
            needed.into_iter().map(|path| BindMount { target: target(&path), source: path, read_only: true });
        mounts.extend(source.map(|source| BindMount {
            source,
            target: format!("/usr/bin/{program}"),
            read_only: true,
        }));
        mounts.extend(needed);
    }
    let mut seen = BTreeSet::new();
    mounts.retain(|mount| seen.insert(mount.target.clone()));
    mounts
}

fn is_elf(path: &Path) -> bool {
    let mut start = [0; ELF_MAGIC.len()];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == ELF_MAGIC
}

/// Returns the files that a script names by their absolute paths. The system's programs are left out: every image has its
/// own.
fn paths_in_script(script: &Path) -> Vec<PathBuf> {
    let mut bytes = Vec::new();
    if File::open(script).and_then(|file| file.take(SCRIPT_BYTES_MAX).read_to_end(&mut bytes)).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    let is_separator = |sign: char| sign.is_whitespace() || "\"'`=;:()&|<>$".contains(sign);
    let paths =
        text.lines().skip_while(|line| line.starts_with("#!")).flat_map(|line| line.split(is_separator));
    let paths = paths.filter(|word| word.starts_with('/')).map(PathBuf::from);
    let is_system =
        |path: &PathBuf| path.parent().is_some_and(|dir| SYSTEM_DIRS.iter().any(|one| dir == Path::new(one)));
    paths.filter(|path| !is_system(path) && path.is_file()).collect()
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

    const ELF: &str = "\x7fELF and the rest";

    /// Writes files and returns their directories in this order, and the mounts for them as pairs of paths.
    fn find_programs(root: &Path, files: &[(&str, String)]) -> Vec<(String, String)> {
        let mut dirs: Vec<PathBuf> = Vec::new();
        for (name, text) in files {
            let path = root.join(name);
            let dir = path.parent().unwrap().to_owned();
            fs::create_dir_all(&dir).unwrap();
            fs::write(&path, text).unwrap();
            if !dir.ends_with("hidden") && !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        let name = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned();
        let mounts = driver_programs(&dirs);
        assert!(mounts.iter().all(|mount| mount.read_only));
        mounts.into_iter().map(|mount| (name(&mount.source), name(Path::new(&mount.target)))).collect()
    }

    fn pair(source: &str, target: &str) -> (String, String) {
        (source.to_owned(), target.to_owned())
    }

    #[test]
    fn programs_of_the_driver_are_found_where_it_was_installed() {
        let dir = windlass_testkit::temp_dir("driver").unwrap();
        let found = find_programs(
            dir.path(),
            &[
                ("bin/nvidia-smi", ELF.to_owned()),
                ("nvidia/nvidia-smi", ELF.to_owned()),
                ("nvidia/nvidia-debugdump", ELF.to_owned()),
                ("nvidia/other", ELF.to_owned()),
            ],
        );
        let expected = [
            pair("bin/nvidia-smi", "/usr/bin/nvidia-smi"),
            pair("nvidia/nvidia-debugdump", "/usr/bin/nvidia-debugdump"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_script_that_runs_a_program_of_the_driver_is_not_given_instead_of_it() {
        let dir = windlass_testkit::temp_dir("driver").unwrap();
        let root = dir.path().to_string_lossy().into_owned();
        let run = |program: &str| format!("#!/bin/sh\n# /usr/bin/env\nexec \"{root}/{program}\" \"$@\"\n");
        // In a known directory, in one that only the script knows, and under another name.
        let found = find_programs(
            dir.path(),
            &[
                ("bin/nvidia-smi", run("nvidia/nvidia-smi")),
                ("nvidia/nvidia-smi", ELF.to_owned()),
                ("bin/nvidia-debugdump", run("hidden/nvidia-debugdump")),
                ("hidden/nvidia-debugdump", ELF.to_owned()),
                ("bin/nvidia-persistenced", run("hidden/persistenced.real")),
                ("hidden/persistenced.real", ELF.to_owned()),
            ],
        );
        let expected = [
            pair("nvidia/nvidia-smi", "/usr/bin/nvidia-smi"),
            pair("hidden/nvidia-debugdump", "/usr/bin/nvidia-debugdump"),
            pair("bin/nvidia-persistenced", "/usr/bin/nvidia-persistenced"),
            pair("hidden/persistenced.real", "hidden/persistenced.real"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn programs_are_also_searched_near_the_libraries_of_the_driver() {
        let dir = windlass_testkit::temp_dir("driver").unwrap();
        let real = dir.path().canonicalize().unwrap().join("opt/lib64");
        let link = dir.path().join("usr/lib");
        for dir in [&real, &link] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(real.join("libcuda.so.1"), "").unwrap();
        std::os::unix::fs::symlink(real.join("libcuda.so.1"), link.join("libcuda.so.1")).unwrap();
        let library = BindMount {
            source: link.join("libcuda.so.1"),
            target: "/libs/libcuda.so.1".into(),
            read_only: true,
        };
        let dirs = program_dirs(&[library.clone(), library]);
        let expected = [dir.path().join("usr/bin"), real.with_file_name("bin")];
        assert_eq!(dirs[PROGRAM_DIRS.len()..], expected);
        assert_eq!(dirs[..PROGRAM_DIRS.len()], PROGRAM_DIRS.map(PathBuf::from));
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
