//! The store on disk: what it has, and what is removed from it.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Weak, atomic::AtomicU64},
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{RwLock, Semaphore};
use windlass_registry::{Client, ImageConfig, Settings};

use super::layer::{Excess, LayerLimits};
use crate::{clock, digest::sha256_hex, isolation::user_map, shim::policy::Policy};

/// Layers of one pull that are downloaded at the same time.
const DOWNLOADS_MAX: usize = 3;
/// Unused images are removed after this time.
const AGE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// An image that was used this recently is never removed: a task may be about to use it.
const AGE_MIN: Duration = Duration::from_secs(60 * 60);
/// The same while there is no space for another image: the time between a pull and the start of its container.
const AGE_MIN_FULL: Duration = Duration::from_secs(60);
/// Space of the file system that unpacking leaves free.
pub(super) const FREE_BYTES_MIN: u64 = 256 << 20;

/// Number of files that unpacking leaves free on the file system.
const FREE_FILES_MIN: u64 = 100_000;
/// Size that a layer may always have uncompressed, and what it may have for each compressed byte beyond that. Files of
/// programs and data shrink to a quarter; only layers that were made for it shrink more than this.
const EXPANDED_BYTES_MIN: u64 = 4 << 30;
const EXPANSION_MAX: u64 = 200;

fn expanded_bytes_max(compressed: u64) -> u64 {
    compressed.saturating_mul(EXPANSION_MAX).max(EXPANDED_BYTES_MIN)
}

#[derive(Clone, Debug)]
pub struct StoreSettings {
    pub limits: LayerLimits,
    /// Maximum size of all layers; unused images are removed beyond it, the longest unused first, and a larger image is
    /// refused. `None`: half of the file system.
    pub bytes_max: Option<u64>,
    /// Unused images are removed after this time.
    pub age_max: Duration,
    /// An image that was used this recently is not removed.
    pub age_min: Duration,
    /// Maximum time of a pull without progress.
    pub stall: Duration,
    pub registry: Settings,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            limits: LayerLimits::default(),
            bytes_max: None,
            age_max: AGE_MAX,
            age_min: AGE_MIN,
            stall: Duration::from_secs(120),
            registry: Settings::default(),
        }
    }
}

impl StoreSettings {
    /// Applies the settings of the host's policy.
    pub fn apply(&mut self, policy: &Policy) {
        let rules = policy.images();
        self.registry.plain_http = policy.plain_http_registries().to_vec();
        self.registry.mirrors = rules.mirrors.clone().into_iter().collect();
        self.bytes_max = rules.max_size;
        self.age_max = rules.max_age.unwrap_or(self.age_max);
    }
}

/// An image whose layers are all in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredImage {
    /// Digest of the manifest, or of the configuration if it came from an archive without one.
    pub digest: String,
    pub config: ImageConfig,
    /// Keys of the layers, base layer first.
    pub layers: Vec<String>,
}

/// Facts about an unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayerRecord {
    pub(super) diff_id: String,
    /// Size of its files in bytes.
    pub(super) bytes: u64,
    pub(super) entries: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NameRecord {
    name: String,
    digest: String,
}

/// Objects that a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GarbageSummary {
    pub images: usize,
    pub layers: usize,
    pub bytes: u64,
}

/// Image store of one shim.
#[derive(Debug)]
pub struct ImageStore {
    pub(super) root: PathBuf,
    /// The agent's binary, which unpacks layers in a child process.
    pub(super) agent: PathBuf,
    pub(super) settings: StoreSettings,
    pub(super) client: Client,
    pub(super) downloads: Semaphore,
    /// Number of layers that are being downloaded.
    pub(super) downloading: AtomicU64,
    /// One lock for each layer that is being pulled, so that concurrent pulls share the work.
    layer_locks: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
    /// Sizes of the layers that are being stored, by key.
    reserved: Mutex<HashMap<String, u64>>,
    /// Held for reading by pulls: a collection must not remove layers that belong to no image yet.
    pub(super) pulls: RwLock<()>,
}

/// Space for a layer, until it is dropped.
pub(super) struct Reservation<'a> {
    store: &'a ImageStore,
    key: String,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.store.reserved.lock().remove(&self.key);
    }
}

impl ImageStore {
    /// Opens the store, and removes what an earlier process left unfinished.
    pub fn open(root: PathBuf, agent: PathBuf, settings: StoreSettings) -> io::Result<Self> {
        for part in ["downloads", "layers", "images", "names"] {
            create_private_dir(&root.join(part))?;
        }
        let unfinished = root.join("tmp");
        match user_map::remove_tree(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => create_private_dir(&unfinished)?,
        }
        Ok(Self {
            root,
            agent,
            client: Client::new(settings.registry.clone()),
            settings,
            downloads: Semaphore::new(DOWNLOADS_MAX),
            downloading: AtomicU64::new(0),
            layer_locks: Mutex::default(),
            reserved: Mutex::default(),
            pulls: RwLock::default(),
        })
    }

    pub(super) fn layer_lock(&self, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.layer_locks.lock();
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(key.to_owned(), Arc::downgrade(&lock));
        lock
    }

    /// Directory with the files of a layer.
    pub fn layer_files(&self, key: &str) -> PathBuf {
        self.layer_dir(key).join("fs")
    }

    pub(super) fn layer_dir(&self, key: &str) -> PathBuf {
        self.root.join("layers").join(key)
    }

    pub(super) fn layer_record(&self, key: &str) -> io::Result<Option<LayerRecord>> {
        read_json(&self.layer_dir(key).join("layer.json"))
    }

    fn image_path(&self, digest: &str) -> PathBuf {
        self.root.join("images").join(format!("{}.json", sha256_hex(digest.as_bytes())))
    }

    fn name_path(&self, name: &str) -> PathBuf {
        self.root.join("names").join(format!("{}.json", sha256_hex(name.as_bytes())))
    }

    /// Finds the image that a name referred to when it was last pulled, if all of it is here.
    pub fn find(&self, name: &str) -> io::Result<Option<StoredImage>> {
        let Some(record) = read_json::<NameRecord>(&self.name_path(name))? else { return Ok(None) };
        self.find_digest(&record.digest)
    }

    pub(super) fn find_digest(&self, digest: &str) -> io::Result<Option<StoredImage>> {
        let image = read_json::<StoredImage>(&self.image_path(digest))?;
        let is_whole = |image: &StoredImage| image.layers.iter().all(|key| self.layer_dir(key).is_dir());
        Ok(image.filter(|image| image.digest == digest && is_whole(image)))
    }

    /// Records a use of the image, which keeps it from being removed for lack of use.
    pub fn touch(&self, image: &StoredImage) -> io::Result<()> {
        let file = fs::File::open(self.image_path(&image.digest))?;
        file.set_modified(now())
    }

    /// Records an image whose layers are all on disk, and the name by which it was pulled.
    pub(super) fn add_image(&self, name: &str, image: &StoredImage) -> io::Result<()> {
        // An image of this host is imported before every start, and rarely changes.
        if self.find(name)?.as_ref() == Some(image) {
            return self.touch(image);
        }
        write_json(&self.image_path(&image.digest), image)?;
        self.touch(image)?;
        let record = NameRecord { name: name.to_owned(), digest: image.digest.clone() };
        write_json(&self.name_path(name), &record)
    }

    /// Removes images that were not used for long, those beyond the size limit, and layers of no image. Layers in
    /// `in_use` stay. Does nothing while a pull is in progress. Blocks.
    pub fn collect_garbage(&self, in_use: &BTreeSet<String>) -> io::Result<GarbageSummary> {
        let Ok(_no_pulls) = self.pulls.try_write() else { return Ok(GarbageSummary::default()) };
        self.collect(in_use, 0, self.settings.age_min)
    }

    /// Removes unused images until there is space for this many bytes, also those that were used a short time ago. Waits for
    /// the end of other pulls, and then requests the layers that stay. Blocks.
    pub fn make_space(
        &self,
        bytes: u64,
        in_use: impl FnOnce() -> Option<BTreeSet<String>>,
    ) -> io::Result<GarbageSummary> {
        let _no_pulls = self.pulls.blocking_write();
        match in_use() {
            Some(in_use) => self.collect(&in_use, bytes, self.settings.age_min.min(AGE_MIN_FULL)),
            None => Ok(GarbageSummary::default()),
        }
    }

    /// Returns the maximum size of all layers.
    pub(super) fn bytes_max(&self) -> io::Result<u64> {
        if let Some(bytes) = self.settings.bytes_max {
            return Ok(bytes);
        }
        let stat = rustix::fs::statvfs(&self.root)?;
        Ok(stat.f_blocks.saturating_mul(stat.f_frsize) / 2)
    }

    /// Reserves space for a layer while it is being stored. Fails with the maximum size of all layers if they would exceed
    /// it.
    pub(super) fn reserve(&self, key: &str, bytes: u64) -> io::Result<Result<Reservation<'_>, u64>> {
        let mut reserved = self.reserved.lock();
        let mut sum = reserved.values().fold(bytes, |sum, bytes| sum.saturating_add(*bytes));
        for stored in dir_names(&self.root.join("layers"))? {
            if !reserved.contains_key(&stored) && stored != key {
                sum = sum.saturating_add(self.layer_record(&stored)?.map_or(0, |record| record.bytes));
            }
        }
        let bytes_max = self.bytes_max()?;
        if sum > bytes_max {
            return Ok(Err(bytes_max));
        }
        reserved.insert(key.to_owned(), bytes);
        Ok(Ok(Reservation { store: self, key: key.to_owned() }))
    }

    fn collect(&self, in_use: &BTreeSet<String>, free: u64, age_min: Duration) -> io::Result<GarbageSummary> {
        let mut summary = GarbageSummary::default();
        let mut images = self.images()?;
        images.sort_by_key(|image| image.used_at);
        let mut sizes: HashMap<String, u64> = HashMap::new();
        for key in dir_names(&self.root.join("layers"))? {
            let bytes = self.layer_record(&key)?.map_or(0, |record| record.bytes);
            sizes.insert(key, bytes);
        }
        let bytes_max = self.bytes_max()?;
        let now = now();
        let mut kept: Vec<ImageEntry> = Vec::new();
        let mut removable: Vec<ImageEntry> = Vec::new();
        for image in images {
            let age = now.duration_since(image.used_at).unwrap_or_default();
            let is_used = image.image.layers.iter().any(|key| in_use.contains(key));
            if is_used || age < age_min {
                kept.push(image);
            } else if age > self.settings.age_max {
                self.remove_image(&image, &mut summary)?;
            } else {
                removable.push(image);
            }
        }
        let needed = |kept: &[ImageEntry], removable: &[ImageEntry]| -> u64 {
            let all = kept.iter().chain(removable).flat_map(|image| &image.image.layers);
            let keys: BTreeSet<&String> = all.chain(in_use).collect();
            keys.into_iter().filter_map(|key| sizes.get(key)).sum()
        };
        let mut removable = std::collections::VecDeque::from(removable);
        while needed(&kept, removable.make_contiguous()).saturating_add(free) > bytes_max {
            // The longest unused comes first.
            let Some(image) = removable.pop_front() else { break };
            self.remove_image(&image, &mut summary)?;
        }
        kept.extend(removable);
        let referenced: BTreeSet<&String> =
            kept.iter().flat_map(|image| &image.image.layers).chain(in_use).collect();
        for (key, bytes) in &sizes {
            if !referenced.contains(key) {
                self.remove_layer(key)?;
                summary.layers += 1;
                summary.bytes += bytes;
            }
        }
        self.remove_old_downloads(now)?;
        Ok(summary)
    }

    fn remove_image(&self, image: &ImageEntry, summary: &mut GarbageSummary) -> io::Result<()> {
        fs::remove_file(&image.path)?;
        summary.images += 1;
        Ok(())
    }

    /// Removes a layer: renamed first, so that a crash leaves no half of it under its name.
    fn remove_layer(&self, key: &str) -> io::Result<()> {
        let away = self.temp_path()?;
        fs::rename(self.layer_dir(key), &away)?;
        user_map::remove_tree(&away)
    }

    fn remove_old_downloads(&self, now: SystemTime) -> io::Result<()> {
        for name in dir_names(&self.root.join("downloads"))? {
            let path = self.root.join("downloads").join(name);
            let age = fs::metadata(&path)?.modified()?;
            if now.duration_since(age).unwrap_or_default() > self.settings.age_min {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    fn images(&self) -> io::Result<Vec<ImageEntry>> {
        let dir = self.root.join("images");
        let mut found = Vec::new();
        for name in dir_names(&dir)? {
            let path = dir.join(&name);
            if !name.ends_with(".json") {
                fs::remove_file(&path)?;
                continue;
            }
            let used_at = fs::metadata(&path)?.modified()?;
            if let Some(image) = read_json(&path)? {
                found.push(ImageEntry { image, path, used_at });
            }
        }
        Ok(found)
    }

    /// Returns a path for something unfinished.
    pub(super) fn temp_path(&self) -> io::Result<PathBuf> {
        let mut random = [0_u8; 12];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        Ok(self.root.join("tmp").join(hex::encode(random)))
    }

    /// Limits of a layer of this compressed size: never more than the file system can hold, or the setting permits.
    pub(super) fn unpack_limits(&self, compressed: u64) -> io::Result<UnpackLimits> {
        let stat = rustix::fs::statvfs(&self.root)?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(FREE_BYTES_MIN);
        let allowed = self.settings.limits.bytes.min(expanded_bytes_max(compressed));
        let allowed = allowed.min(self.settings.bytes_max.unwrap_or(u64::MAX));
        // A file system without a fixed number of files reports none.
        let files = if stat.f_files == 0 { u64::MAX } else { stat.f_favail.saturating_sub(FREE_FILES_MIN) };
        Ok(UnpackLimits {
            limits: LayerLimits {
                bytes: allowed.min(free),
                entries: self.settings.limits.entries.min(files),
            },
            lacks_bytes: free < allowed,
            lacks_files: files < self.settings.limits.entries,
        })
    }
}

/// Limits of a layer, and which of them are those of the file system at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnpackLimits {
    pub(super) limits: LayerLimits,
    lacks_bytes: bool,
    lacks_files: bool,
}

impl UnpackLimits {
    /// Returns whether a layer that exceeds the limit would fit on an empty disk.
    pub(super) fn is_full(&self, excess: Excess) -> bool {
        match excess {
            Excess::Bytes => self.lacks_bytes,
            Excess::Entries => self.lacks_files,
        }
    }
}

fn now() -> SystemTime {
    let micros = u64::try_from(clock::now_us()).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_micros(micros)
}

struct ImageEntry {
    image: StoredImage,
    path: PathBuf,
    used_at: SystemTime,
}

fn create_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn dir_names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.extend(entry?.file_name().into_string());
    }
    Ok(names)
}

/// Reads a record. One that cannot be parsed counts as absent: it is written again by the next pull.
fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a record. Returns when it is on disk; concurrent readers see the old record or the new one.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut random = [0_u8; 6];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let half = path.with_extension(hex::encode(random));
    let mut file = fs::File::create_new(&half)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    fs::rename(&half, path)?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_layers_may_expand_to_a_multiple_of_their_compressed_size_only() {
        assert_eq!(expanded_bytes_max(0), 4 << 30, "small ones need no proportion");
        assert_eq!(expanded_bytes_max(20 << 20), 4 << 30);
        assert_eq!(expanded_bytes_max(1 << 30), 200 << 30);
        assert_eq!(expanded_bytes_max(u64::MAX), u64::MAX);
    }
}
