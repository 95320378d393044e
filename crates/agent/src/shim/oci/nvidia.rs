//! NVIDIA GPUs of a container: by a specification of the Container Device Interface (`cdi`), which NVIDIA's toolkit
//! generates, and without one by device files and the driver's libraries found on the host. `tests/try_gpu_container.py` tries both
//! ways on a machine with GPUs.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    cdi::{self, GpuEdits},
    devices::add_devices,
};
use crate::{host::gpu::Gpu, isolation::user_map::find_program, shim::runtime::BindMount};

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

/// Returns the changes for these GPUs, or the reason why they cannot be given to a container.
pub(super) fn gpu_edits(gpus: &[&Gpu], spec_dirs: &[PathBuf]) -> Result<GpuEdits, String> {
    if gpus.is_empty() {
        return Ok(GpuEdits::default());
    }
    let specs = cdi::read_specs(spec_dirs, SPEC_KIND);
    if specs.is_empty() { edits_from_driver(gpus) } else { cdi::edits_by_name(&specs, gpus, SPEC_KIND) }
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
