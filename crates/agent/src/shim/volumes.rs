//! Volumes of tasks: disks attached to this host, or directories of it.
//!
//! A disk is mounted once however many tasks use it, and unmounted when the last of them is removed. The users of a
//! volume are kept in memory: after a restart each live task registers again, and finds the disk mounted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use parking_lot::Mutex;
use rustix::mount::{MountFlags, UnmountFlags};
use windlass_api::agent::shim::Volume;
use windlass_model::{backend_kind::BackendType, id::SubmissionId};

use crate::digest::sha256_hex;

/// Backend whose volumes are directories of the host.
pub const LOCAL_BACKEND: &str = BackendType::Local.as_str();
/// Directory in which a backend mounts volumes of this host that have a file system already, as LXD does.
const MOUNTED_ROOT: &str = "/var/lib/windlass-volumes";
const BY_ID: &str = "/dev/disk/by-id";
const FILE_SYSTEM: &str = "ext4";
/// Exit status of `blkid` for a disk without any signature.
const BLKID_EXIT_EMPTY: i32 = 2;

#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("invalid volume name `{name}`: expected letters, digits, `.`, `_` and `-`")]
    Name { name: String },
    #[error("volume {name}: this host has no disk with id {volume_id}")]
    NoDevice { name: String, volume_id: String },
    #[error("volume {name}: {device} is not a block device")]
    NotADisk { name: String, device: PathBuf },
    #[error("volume {name}: nothing is mounted at {device}")]
    NotMounted { name: String, device: PathBuf },
    #[error("volume {name}: {device} conflicts with the mount at {at}")]
    InUse { name: String, device: PathBuf, at: PathBuf },
    #[error("volume {name}: {device} has no mountable file system")]
    NoFileSystem { name: String, device: PathBuf },
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("`{program}` failed: {message}")]
    Program { program: &'static str, message: String },
}

/// Tasks that use each volume.
#[derive(Debug)]
pub struct Volumes {
    root: PathBuf,
    wanted: Mutex<BTreeMap<PathBuf, BTreeSet<SubmissionId>>>,
}

impl Volumes {
    pub fn new(home: &Path) -> Self {
        Self { root: home.join("volumes"), wanted: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the path of a volume, once it is attached.
    pub fn place(&self, volume: &Volume) -> Result<PathBuf, VolumeError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let name = &volume.name;
        if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(VolumeError::Name { name: name.clone() });
        }
        // Two projects may use the same name for two volumes.
        let tag = sha256_hex(format!("{}\0{}", volume.backend, volume.volume_id).as_bytes());
        Ok(self.root.join(format!("{name}-{}", &tag[..8])))
    }

    /// Mounts the volume for a task unless it is mounted. Idempotent. Blocks: disks are slow.
    pub fn attach(&self, task: SubmissionId, volume: &Volume) -> Result<PathBuf, VolumeError> {
        let place = self.place(volume)?;
        let mut wanted = self.wanted.lock();
        let cannot_make = |error| io_error(format!("failed to create {}", place.display()))(error);
        if volume.backend == LOCAL_BACKEND {
            create_shared_dir(&self.root, &place).map_err(cannot_make)?;
        } else {
            fs::create_dir_all(&place).map_err(cannot_make)?;
            mount(volume, &place)?;
        }
        wanted.entry(place.clone()).or_default().insert(task);
        Ok(place)
    }

    /// Releases the volumes of a task. An unused volume is unmounted; one that is a directory stays, with its contents.
    pub fn detach(&self, task: SubmissionId) -> Result<(), VolumeError> {
        let mut wanted = self.wanted.lock();
        let mut first = Ok(());
        wanted.retain(|place, tasks| {
            tasks.remove(&task);
            if !tasks.is_empty() {
                return true;
            }
            match unmount(place) {
                Ok(()) => false,
                Err(error) => {
                    first = Err(error);
                    // Kept without a task: the next detach tries again.
                    true
                }
            }
        });
        first
    }

    /// Unmounts unused volumes, after a restart and after every live task has registered.
    pub fn sweep(&self) -> Result<(), VolumeError> {
        let wanted = self.wanted.lock();
        let mounted = read_mounts().map_err(io_error("failed to read the mounts".to_owned()))?;
        let root = fs::canonicalize(&self.root).unwrap_or_else(|_| self.root.clone());
        for mount in mounted.iter().filter(|mount| mount.at.starts_with(&root)) {
            let kept = wanted.keys().any(|place| fs::canonicalize(place).is_ok_and(|real| real == mount.at));
            if !kept {
                unmount(&mount.at)?;
            }
        }
        Ok(())
    }
}

/// Creates a directory that tasks of any user may write; a user without such a task cannot reach it.
fn create_shared_dir(root: &Path, place: &Path) -> io::Result<()> {
    if place.is_dir() {
        return Ok(());
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
    fs::DirBuilder::new().recursive(true).create(place)?;
    // Not by the mode above: the umask of this process would clear some bits.
    fs::set_permissions(place, fs::Permissions::from_mode(0o777))
}

fn io_error(what: String) -> impl FnOnce(io::Error) -> VolumeError {
    move |source| VolumeError::Io { what, source }
}

fn mount(volume: &Volume, place: &Path) -> Result<(), VolumeError> {
    let name = || volume.name.clone();
    let mounted = read_mounts().map_err(io_error("failed to read the mounts".to_owned()))?;
    let real = fs::canonicalize(place).map_err(io_error(format!("cannot resolve {}", place.display())))?;
    if let Some(source) = mounted_by_backend(volume) {
        return bind_mounted(volume, &source, &real, &mounted);
    }
    let device = find_device(volume)?;
    let meta = fs::metadata(&device).map_err(io_error(format!("cannot inspect {}", device.display())))?;
    if !meta.file_type().is_block_device() {
        return Err(VolumeError::NotADisk { name: name(), device });
    }
    let number = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    if mounted.iter().any(|mount| mount.at == real && mount.device == number) {
        return Ok(());
    }
    if let Some(other) = mounted.iter().find(|mount| mount.device == number || mount.at == real) {
        return Err(VolumeError::InUse { name: name(), device, at: other.at.clone() });
    }
    let kind = match probe_content(&device)? {
        DiskContent::FileSystem(kind) => kind,
        DiskContent::Empty if volume.init_fs => {
            run_program("mkfs.ext4", Command::new("mkfs.ext4").arg("-q").arg("--").arg(&device))?;
            FILE_SYSTEM.to_owned()
        }
        DiskContent::Empty | DiskContent::Unknown => {
            return Err(VolumeError::NoFileSystem { name: name(), device });
        }
    };
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    rustix::mount::mount(&device, &real, kind.as_str(), flags, None::<&std::ffi::CStr>)
        .map_err(|error| io_error(format!("failed to mount {}", device.display()))(error.into()))
}

/// Returns the directory in which the backend mounts the volume; `None` for one that is a disk of this host.
fn mounted_by_backend(volume: &Volume) -> Option<PathBuf> {
    let path = Path::new(volume.device_name.as_deref()?);
    let name = path.strip_prefix(MOUNTED_ROOT).ok()?.to_str()?;
    let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
    is_name.then(|| path.to_owned())
}

/// Mounts a directory in which the backend has mounted a volume. Without that mount, a task would write to the host's
/// own disk, and its data would be lost with the host.
fn bind_mounted(
    volume: &Volume,
    source: &Path,
    place: &Path,
    mounted: &[MountEntry],
) -> Result<(), VolumeError> {
    let name = || volume.name.clone();
    let not_mounted = || VolumeError::NotMounted { name: name(), device: source.to_owned() };
    let Some(found) = mounted.iter().find(|mount| mount.at == source) else { return Err(not_mounted()) };
    match mounted.iter().find(|mount| mount.at == place) {
        Some(own) if own.device == found.device => return Ok(()),
        Some(own) => {
            return Err(VolumeError::InUse { name: name(), device: source.to_owned(), at: own.at.clone() });
        }
        None => {}
    }
    if volume.init_fs {
        open_empty(source).map_err(io_error(format!("failed to prepare {}", source.display())))?;
    }
    rustix::mount::mount_bind(source, place)
        .map_err(|error| io_error(format!("failed to mount {}", source.display()))(error.into()))
}

/// Lets tasks of any user write to a new volume. One with contents keeps the mode that its tasks gave it.
fn open_empty(source: &Path) -> io::Result<()> {
    if fs::read_dir(source)?.next().is_some() {
        return Ok(());
    }
    fs::set_permissions(source, fs::Permissions::from_mode(0o777))
}

/// Unmounts the path if it is a mount point; then also removes the directory if it is empty.
fn unmount(place: &Path) -> Result<(), VolumeError> {
    let mounted = read_mounts().map_err(io_error("failed to read the mounts".to_owned()))?;
    let Ok(real) = fs::canonicalize(place) else { return Ok(()) };
    if !mounted.iter().any(|mount| mount.at == real) {
        return Ok(());
    }
    rustix::mount::unmount(&real, UnmountFlags::NOFOLLOW)
        .map_err(|error| io_error(format!("failed to unmount {}", real.display()))(error.into()))?;
    // This only removes an empty directory.
    let _ = fs::remove_dir(&real);
    Ok(())
}

/// Finds the disk by its id, else by its device name.
fn find_device(volume: &Volume) -> Result<PathBuf, VolumeError> {
    let none = || VolumeError::NoDevice { name: volume.name.clone(), volume_id: volume.volume_id.clone() };
    let names = fs::read_dir(BY_ID)
        .map(|entries| {
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
        })
        .unwrap_or_default();
    // The id first: names of disks change when another driver attaches them.
    if let Some(name) = find_by_id(&names, &volume.volume_id, volume.device_name.as_deref()) {
        return fs::canonicalize(Path::new(BY_ID).join(name))
            .map_err(io_error(format!("cannot follow {name}")));
    }
    let given = volume.device_name.as_deref().filter(|name| !name.is_empty()).ok_or_else(none)?;
    let path = Path::new("/dev").join(given);
    match fs::canonicalize(&path) {
        Ok(real) if real.starts_with("/dev") => Ok(real),
        Ok(_) | Err(_) => Err(none()),
    }
}

/// Returns the link under `/dev/disk/by-id` that names the volume: clouds use the id without its dashes, or the name
/// under which the disk was attached.
fn find_by_id<'a>(names: &'a [String], volume_id: &str, device_name: Option<&str>) -> Option<&'a str> {
    let squeezed: String = volume_id.chars().filter(char::is_ascii_alphanumeric).collect();
    let is_whole = |name: &&String| !name.contains("-part");
    let ends_with = |name: &&String, id: &str| {
        !id.is_empty() && name.strip_suffix(id).is_some_and(|rest| rest.ends_with(['-', '_']))
    };
    let found = names.iter().filter(is_whole).find(|name| {
        ends_with(name, volume_id)
            || ends_with(name, &squeezed)
            || device_name.is_some_and(|device| ends_with(name, device))
    });
    found.map(String::as_str)
}

enum DiskContent {
    FileSystem(String),
    /// No content at all: safe to write to.
    Empty,
    /// Content without a file system: a partition table, a part of an array.
    Unknown,
}

fn probe_content(device: &Path) -> Result<DiskContent, VolumeError> {
    let mut command = Command::new("blkid");
    command.args(["-p", "-o", "export"]).arg("--").arg(device);
    let output = command.output().map_err(io_error("failed to run blkid".to_owned()))?;
    if output.status.code() == Some(BLKID_EXIT_EMPTY) {
        return Ok(DiskContent::Empty);
    }
    let output = check_success("blkid", output)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    Ok(match (value("USAGE"), value("TYPE")) {
        (Some("filesystem") | None, Some(kind)) => DiskContent::FileSystem(kind.to_owned()),
        (_, _) => DiskContent::Unknown,
    })
}

fn run_program(program: &'static str, command: &mut Command) -> Result<Output, VolumeError> {
    let output = command.output().map_err(io_error(format!("failed to run {program}")))?;
    check_success(program, output)
}

fn check_success(program: &'static str, output: Output) -> Result<Output, VolumeError> {
    if output.status.success() {
        return Ok(output);
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let message = message.lines().last().unwrap_or_default().to_owned();
    Err(VolumeError::Program { program, message: format!("{}: {message}", output.status) })
}

#[derive(Debug, PartialEq, Eq)]
struct MountEntry {
    device: (u32, u32),
    at: PathBuf,
}

fn read_mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse_mounts(&fs::read_to_string("/proc/self/mountinfo")?))
}

/// Parses lines of `mountinfo`: `36 35 98:0 /root /where options…`, with special characters in octal.
fn parse_mounts(text: &str) -> Vec<MountEntry> {
    let parse = |line: &str| {
        let mut words = line.split(' ').skip(2);
        let (major, minor) = words.next()?.split_once(':')?;
        let at = unescape(words.nth(1)?);
        Some(MountEntry { device: (major.parse().ok()?, minor.parse().ok()?), at })
    };
    text.lines().filter_map(parse).collect()
}

fn unescape(text: &str) -> PathBuf {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        match after.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &after[3..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    PathBuf::from(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(backend: &str, name: &str, id: &str) -> Volume {
        let (name, volume_id) = (name.to_owned(), id.to_owned());
        Volume { backend: backend.to_owned(), name, volume_id, init_fs: false, device_name: None }
    }

    #[test]
    fn a_disk_is_found_by_its_volume_id() {
        let names = [
            "ata-DISK_1",
            "google-data-1",
            "google-data-1-part1",
            "nvme-Amazon_Elastic_Block_Store_vol0abc",
            "nvme-Amazon_Elastic_Block_Store_vol0abc-part1",
            "scsi-0DO_Volume_set",
        ]
        .map(str::to_owned);
        let found = |id, device| find_by_id(&names, id, device);
        assert_eq!(found("vol-0abc", None), Some("nvme-Amazon_Elastic_Block_Store_vol0abc"));
        assert_eq!(found("12345", Some("data-1")), Some("google-data-1"));
        assert_eq!(found("set", None), Some("scsi-0DO_Volume_set"));
        assert_eq!(found("abc", None), None);
        assert_eq!(found("", Some("")), None);
        assert_eq!(found("other", Some("/dev/sdf")), None);
    }

    #[test]
    fn a_volume_that_the_backend_should_have_mounted_is_refused_if_it_is_not_mounted() {
        let at = |device: &str| Volume { device_name: Some(device.to_owned()), ..volume("lxd", "data", "v") };
        let one = at("/var/lib/windlass-volumes/windlass-1");
        assert_eq!(mounted_by_backend(&one), Some("/var/lib/windlass-volumes/windlass-1".into()));
        for other in [
            "/dev/sdf",
            "/var/lib/windlass-volumes",
            "/var/lib/windlass-volumes/../x",
            "/etc",
            "/var/lib/windlass-volumes/a/b",
        ] {
            assert_eq!(mounted_by_backend(&at(other)), None, "{other}");
        }
        let refused =
            bind_mounted(&one, Path::new("/var/lib/windlass-volumes/windlass-1"), Path::new("/p"), &[]);
        assert!(matches!(refused, Err(VolumeError::NotMounted { .. })), "{refused:?}");
    }

    #[test]
    fn escaped_characters_in_mount_points_are_decoded() {
        let text = "36 35 98:0 / /mnt/a\\040b rw,noatime master:1 - ext3 /dev/root rw\nbroken\n";
        assert_eq!(parse_mounts(text), [MountEntry { device: (98, 0), at: "/mnt/a b".into() }]);
    }

    #[test]
    fn a_local_volume_is_a_directory_that_outlives_its_tasks() {
        let home = windlass_testkit::temp_dir("volumes").unwrap();
        let volumes = Volumes::new(home.path());
        let (one, two) = (SubmissionId(uuid::Uuid::from_u128(1)), SubmissionId(uuid::Uuid::from_u128(2)));
        let place = volumes.attach(one, &volume(LOCAL_BACKEND, "data", "v1")).unwrap();
        assert_eq!(fs::metadata(&place).unwrap().mode() & 0o777, 0o777, "whoever the task runs as");
        assert_eq!(fs::metadata(home.path().join("volumes")).unwrap().mode() & 0o777, 0o700);
        fs::write(place.join("kept"), "x").unwrap();
        assert_eq!(volumes.attach(two, &volume(LOCAL_BACKEND, "data", "v1")).unwrap(), place);
        assert_ne!(volumes.attach(two, &volume(LOCAL_BACKEND, "data", "v2")).unwrap(), place);
        volumes.detach(one).unwrap();
        volumes.detach(two).unwrap();
        volumes.detach(two).unwrap();
        volumes.sweep().unwrap();
        assert_eq!(fs::read_to_string(place.join("kept")).unwrap(), "x");
        for name in ["", "..", ".hidden", "a/b", "a\0", "ü"] {
            assert!(matches!(
                volumes.attach(one, &volume(LOCAL_BACKEND, name, "v")),
                Err(VolumeError::Name { .. })
            ));
        }
        assert!(matches!(
            volumes.attach(one, &volume("aws", "data", "vol-none")),
            Err(VolumeError::NoDevice { .. })
        ));
    }
}
