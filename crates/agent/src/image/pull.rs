//! Pulls: layers in parallel, each verified, unpacked and stored once.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures_util::future::try_join_all;
use ring::digest::{Context, SHA256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufWriter};
use windlass_api::agent::shim::PullProgress;
use windlass_registry::{
    Credentials, Image, ImageName, Layer, LayerHosts, Platform, RegistryError,
    local::{self, LayerLocation, LocalError, LocalName},
};

use super::{
    ImageStore, StoredImage,
    layer::{
        LayerSummary,
        subprocess::{self, UnpackError},
    },
    store::{LayerRecord, sync_dir, write_json},
};
use crate::{
    isolation::user_map,
    safe_open::{LandlockStatus, has_landlock},
    shim::runtime::ProgressCallback,
};

const WRITE_BUFFER_BYTES: usize = 1 << 20;
/// Layers of an image: more than an overlay mount can have.
const LAYERS_MAX: usize = 500;
/// Mark of a directory that hides those of lower layers.
const OPAQUE_XATTR: &std::ffi::CStr = c"trusted.overlay.opaque";
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Local(#[from] LocalError),
    #[error("invalid image: {0}")]
    Invalid(String),
    #[error("failed to unpack layer {digest}")]
    Unpack {
        digest: String,
        #[source]
        source: UnpackError,
    },
    /// All images together would exceed their maximum.
    #[error(
        "it needs {bytes} bytes more, and all images of this host may have {bytes_max}: see `max_size` of `images` in its policy"
    )]
    Full { bytes: u64, bytes_max: u64 },
    #[error("no data received for {secs} s")]
    Stalled { secs: u64 },
    #[error("{what}")]
    Io {
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

impl PullError {
    /// Returns whether the registry could not be reached, which proves nothing about the image.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Stalled { .. } => true,
            Self::Registry(error) => !error.is_final(),
            Self::Local(_) | Self::Invalid(_) | Self::Full { .. } | Self::Unpack { .. } | Self::Io { .. } => {
                false
            }
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> PullError {
    move |source| PullError::Io { what, source }
}

/// Source of the layers of an image.
enum LayerSource<'a> {
    Registry { name: &'a ImageName, credentials: Option<&'a Credentials> },
    Local { layers: Vec<LayerLocation>, has_uncompressed_digests: bool },
}

/// Sums of one pull, for its progress reports.
struct ProgressCounter {
    total: u64,
    downloaded: AtomicU64,
    extracted: AtomicU64,
    /// Changes with every step forward.
    activity: AtomicU64,
    report: ProgressCallback,
}

impl ProgressCounter {
    fn add(&self, downloaded: u64, extracted: u64) {
        self.downloaded.fetch_add(downloaded, Ordering::Relaxed);
        self.extracted.fetch_add(extracted, Ordering::Relaxed);
        self.activity.fetch_add(1, Ordering::Relaxed);
        (self.report)(PullProgress {
            downloaded_bytes: self.downloaded.load(Ordering::Relaxed),
            extracted_bytes: self.extracted.load(Ordering::Relaxed),
            total_bytes: self.total,
            is_total_bytes_final: true,
        });
    }
}

impl ImageStore {
    /// Requests the image's documents from its registry, which shows whether the caller has access.
    pub async fn resolve(
        &self,
        name: &ImageName,
        credentials: Option<&Credentials>,
    ) -> Result<Image, PullError> {
        Ok(self.client.resolve_image(name, &Platform::current(), credentials).await?)
    }

    /// Pulls an image from its registry. Dropping the future cancels the pull; what was downloaded is kept.
    pub async fn pull(
        &self,
        name: &ImageName,
        credentials: Option<&Credentials>,
        progress: ProgressCallback,
    ) -> Result<StoredImage, PullError> {
        let _pull = self.pulls.read().await;
        let image = self.resolve(name, credentials).await?;
        let source = LayerSource::Registry { name, credentials };
        self.store_image(&name.to_string(), image, &source, progress).await
    }

    /// Adds an image of this host to the store.
    pub async fn import(
        &self,
        name: &LocalName,
        progress: ProgressCallback,
    ) -> Result<StoredImage, PullError> {
        let _pull = self.pulls.read().await;
        let (full, named) = (name.to_string(), name.clone());
        let read = tokio::task::spawn_blocking(move || local::read(&named, &Platform::current())).await;
        let found = read.map_err(|error| io_error("failed to read the image")(io::Error::other(error)))??;
        let source = LayerSource::Local {
            layers: found.layers,
            has_uncompressed_digests: found.has_uncompressed_digests,
        };
        self.store_image(&full, found.image, &source, progress).await
    }

    async fn store_image(
        &self,
        name: &str,
        image: Image,
        source: &LayerSource<'_>,
        progress: ProgressCallback,
    ) -> Result<StoredImage, PullError> {
        if image.layers.len() != image.config.diff_ids.len() {
            let problem = format!(
                "it has {} layers and digests of {}",
                image.layers.len(),
                image.config.diff_ids.len()
            );
            return Err(PullError::Invalid(problem));
        }
        if image.layers.is_empty() || image.layers.len() > LAYERS_MAX {
            return Err(PullError::Invalid(format!(
                "it has {} layers; expected 1 to {LAYERS_MAX}",
                image.layers.len()
            )));
        }
        self.check_space(&image.layers)?;
        let counter = ProgressCounter {
            total: image.size(),
            downloaded: AtomicU64::new(0),
            extracted: AtomicU64::new(0),
            activity: AtomicU64::new(0),
            report: progress,
        };
        let layers = image.layers.iter().zip(&image.config.diff_ids).enumerate();
        let stored =
            layers.map(|(index, (layer, diff_id))| self.store_layer(index, layer, diff_id, source, &counter));
        let layers = tokio::select! {
            stored = try_join_all(stored) => stored?,
            stalled = self.watch_stall(&counter) => return Err(stalled),
        };
        self.check_size(&layers)?;
        let image = StoredImage { digest: image.digest, config: image.config, layers };
        self.add_image(name, &image).map_err(io_error("failed to record the image"))?;
        Ok(image)
    }

    /// Checks before the download whether the layers that are missing can fit. Their files have at least half the size of
    /// the layer; what they really have is checked when they are unpacked.
    fn check_space(&self, layers: &[Layer]) -> Result<(), PullError> {
        let failed = || io_error("failed to measure the stored images");
        let (mut missing, bytes_max) = (0_u64, self.bytes_max().map_err(failed())?);
        for layer in layers {
            let record = self.layer_record(&layer_key(&layer.digest)?).map_err(failed())?;
            // A size that cannot be true is found by the download.
            let is_counted = record.is_none() && layer.size <= bytes_max;
            missing = missing.saturating_add(if is_counted { layer.size / 2 } else { 0 });
        }
        if missing == 0 {
            return Ok(());
        }
        match self.reserve("", missing).map_err(failed())? {
            Ok(_) => Ok(()),
            Err(bytes_max) => Err(PullError::Full { bytes: missing, bytes_max }),
        }
    }

    fn check_size(&self, layers: &[String]) -> Result<(), PullError> {
        let Some(bytes_max) = self.settings.bytes_max else { return Ok(()) };
        let mut bytes = 0_u64;
        for key in layers.iter().collect::<BTreeSet<_>>() {
            let record = self.layer_record(key).map_err(io_error("failed to read the record of a layer"))?;
            bytes = bytes.saturating_add(record.map_or(0, |record| record.bytes));
        }
        if bytes <= bytes_max {
            return Ok(());
        }
        let problem = format!(
            "it has {bytes} bytes, and all images of this host may have {bytes_max}: the host's policy may raise \
             `max_size` of `images`"
        );
        Err(PullError::Invalid(problem))
    }

    /// Returns when nothing has moved for too long.
    async fn watch_stall(&self, counter: &ProgressCounter) -> PullError {
        let mut last = (counter.activity.load(Ordering::Relaxed), tokio::time::Instant::now());
        loop {
            tokio::time::sleep(STALL_CHECK_INTERVAL.min(self.settings.stall)).await;
            let activity = counter.activity.load(Ordering::Relaxed);
            if activity != last.0 {
                last = (activity, tokio::time::Instant::now());
            } else if last.1.elapsed() >= self.settings.stall && self.downloads_in_progress() {
                return PullError::Stalled { secs: self.settings.stall.as_secs() };
            }
        }
    }

    /// Returns whether any layer is being downloaded, as opposed to being unpacked.
    fn downloads_in_progress(&self) -> bool {
        self.downloading.load(Ordering::Relaxed) > 0
    }

    /// Downloads and unpacks one layer unless it is here; returns its key.
    async fn store_layer(
        &self,
        index: usize,
        layer: &Layer,
        diff_id: &str,
        source: &LayerSource<'_>,
        counter: &ProgressCounter,
    ) -> Result<String, PullError> {
        let key = layer_key(&layer.digest)?;
        let lock = self.layer_lock(&key);
        let _one_at_a_time = lock.lock().await;
        let record = self.layer_record(&key).map_err(io_error("failed to read the record of a layer"))?;
        if let Some(record) = record {
            check_diff_id(layer, diff_id, &record.diff_id)?;
            counter.add(layer.size, layer.size);
            return Ok(key);
        }
        let _permit = self.downloads.acquire().await;
        let file = self.download_path(&key);
        let has_uncompressed_digest = match source {
            LayerSource::Registry { name, credentials } => {
                self.download(name, *credentials, layer, &file, counter).await?;
                false
            }
            LayerSource::Local { layers, has_uncompressed_digests } => {
                let location = layers.get(index).cloned();
                let location = location.ok_or_else(|| PullError::Invalid("a layer is missing".to_owned()))?;
                let digest = (!has_uncompressed_digests).then_some(layer.digest.as_str());
                copy_layer(&location, &file, digest, counter).await?;
                *has_uncompressed_digests
            }
        };
        let expected = if has_uncompressed_digest { layer.digest.as_str() } else { diff_id };
        self.unpack_layer(&key, layer, expected, &file).await?;
        counter.add(0, layer.size);
        Ok(key)
    }

    fn download_path(&self, key: &str) -> PathBuf {
        self.root.join("downloads").join(key)
    }

    async fn download(
        &self,
        name: &ImageName,
        credentials: Option<&Credentials>,
        layer: &Layer,
        file: &Path,
        counter: &ProgressCounter,
    ) -> Result<(), PullError> {
        let _active = ActiveDownload::new(&self.downloading);
        let from = |hosts| self.try_download(name, credentials, layer, hosts, file, counter);
        match from(LayerHosts::MirrorsFirst).await {
            // The rest did not fit to what an earlier process had received, the registry sends no parts, or a mirror sent
            // something else.
            Err((PullError::Registry(error @ RegistryError::Invalid { .. }), received))
                if received > 0 || self.client.has_mirrors(name) =>
            {
                tracing::warn!(%error, layer = layer.digest, "downloading a layer again from its registry");
                remove_file(file)?;
                from(LayerHosts::Registry).await.map_err(|(error, _)| error)
            }
            other => other.map_err(|(error, _)| error),
        }
    }

    /// Downloads a layer from the byte that an earlier attempt reached. The error comes with that byte.
    async fn try_download(
        &self,
        name: &ImageName,
        credentials: Option<&Credentials>,
        layer: &Layer,
        hosts: LayerHosts,
        file: &Path,
        counter: &ProgressCounter,
    ) -> Result<(), (PullError, u64)> {
        let (out, from, hash) = open_partial(file, layer.size)
            .await
            .map_err(|source| (io_error("failed to open a download")(source), 0))?;
        let fail = |error: PullError| (error, from);
        counter.add(from, 0);
        let opened = self.client.download_layer(name, layer, credentials, hosts, (from, Some(hash))).await;
        let mut download = opened.map_err(|error| fail(error.into()))?;
        let mut out = BufWriter::with_capacity(WRITE_BUFFER_BYTES, out);
        loop {
            match download.next_chunk().await {
                Ok(Some(chunk)) => {
                    let written = out.write_all(&chunk).await;
                    written.map_err(|source| fail(io_error("failed to write a download")(source)))?;
                    counter.add(chunk.len() as u64, 0);
                }
                Ok(None) => break,
                Err(error @ RegistryError::Invalid { .. }) => {
                    // Wrong bytes are not to be resumed.
                    drop(out);
                    let _ = fs::remove_file(file);
                    return Err(fail(error.into()));
                }
                Err(error) => {
                    let _ = out.flush().await;
                    return Err(fail(error.into()));
                }
            }
        }
        out.flush().await.map_err(|source| fail(io_error("failed to write a download")(source)))
    }

    /// Unpacks a downloaded layer, verifies it and moves it to its place.
    async fn unpack_layer(
        &self,
        key: &str,
        layer: &Layer,
        diff_id: &str,
        file: &Path,
    ) -> Result<(), PullError> {
        let failed = |what| io_error(what);
        let temp = TempTree(self.temp_path().map_err(failed("failed to create a directory"))?);
        let files = temp.0.join("fs");
        fs::create_dir_all(&files).map_err(failed("failed to create a directory"))?;
        let limits = self.unpack_limits(layer.size).map_err(failed("failed to measure the free space"))?;
        let source = fs::File::open(file).map_err(failed("failed to open a download"))?;
        let unpacked = subprocess::run(&self.agent, source, &files, limits.limits).await;
        let (summary, landlock) = unpacked.map_err(|source| {
            let source = if let UnpackError::TooLarge { excess, message } = &source
                && limits.is_full(*excess)
            {
                UnpackError::NoSpace(message.clone())
            } else {
                source
            };
            PullError::Unpack { digest: layer.digest.clone(), source }
        })?;
        if landlock == LandlockStatus::Absent && has_landlock() {
            tracing::warn!(
                layer = layer.digest,
                "a layer was unpacked without Landlock, which this kernel has"
            );
        }
        tracing::debug!(layer = layer.digest, ?landlock, entries = summary.entries, "unpacked a layer");
        if summary.diff_id != diff_id {
            remove_file(file)?;
        }
        check_diff_id(layer, diff_id, &summary.diff_id)?;
        // Until it has its name, and counts as stored.
        let reserved =
            self.reserve(key, summary.bytes).map_err(failed("failed to measure the stored images"))?;
        let _reserved = reserved.map_err(|bytes_max| PullError::Full { bytes: summary.bytes, bytes_max })?;
        let (place, download) = (self.layer_dir(key), file.to_owned());
        let published =
            tokio::task::spawn_blocking(move || publish_layer(&temp, &place, &summary, &download));
        let published = published.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        published.map_err(failed("failed to store a layer"))
    }
}

/// Counts a download while it is in progress.
struct ActiveDownload<'a>(&'a AtomicU64);

impl<'a> ActiveDownload<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for ActiveDownload<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A directory that is removed unless it was renamed. In a separate thread: it may be large.
struct TempTree(PathBuf);

impl Drop for TempTree {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.0);
        if path.exists() {
            std::thread::spawn(move || user_map::remove_tree(&path));
        }
    }
}

/// Marks the opaque directories, waits until everything is on disk, and gives the layer its name.
fn publish_layer(temp: &TempTree, place: &Path, summary: &LayerSummary, download: &Path) -> io::Result<()> {
    let files = fs::File::open(temp.0.join("fs"))?;
    subprocess::mark_opaque(&files, &summary.opaque, OPAQUE_XATTR)?;
    rustix::fs::syncfs(&files)?;
    let record =
        LayerRecord { diff_id: summary.diff_id.clone(), bytes: summary.bytes, entries: summary.entries };
    write_json(&temp.0.join("layer.json"), &record)?;
    match fs::rename(&temp.0, place) {
        // A directory of this name without a record is the rest of a layer that was removed.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            user_map::remove_tree(place)?;
            fs::rename(&temp.0, place)?;
        }
        done => done?,
    }
    sync_dir(place.parent().unwrap_or(place))?;
    fs::remove_file(download)
}

fn layer_key(digest: &str) -> Result<String, PullError> {
    let hex = digest.strip_prefix("sha256:").filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
    match hex.filter(|hex| hex.len() == 64) {
        Some(hex) => Ok(hex.to_owned()),
        None => Err(PullError::Invalid(format!("`{digest}` is not a sha256 digest"))),
    }
}

fn check_diff_id(layer: &Layer, expected: &str, found: &str) -> Result<(), PullError> {
    if expected == found {
        return Ok(());
    }
    Err(PullError::Invalid(format!(
        "layer {} has the uncompressed digest {found}, expected {expected}",
        layer.digest
    )))
}

fn remove_file(path: &Path) -> Result<(), PullError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("failed to remove a download")(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Opens a download at its end; returns the number of bytes that it has and their hash.
async fn open_partial(path: &Path, size: u64) -> io::Result<(tokio::fs::File, u64, Context)> {
    let mut options = tokio::fs::OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(false).open(path).await?;
    let mut hash = Context::new(&SHA256);
    let mut have = 0_u64;
    // A whole file is read again too: only a download that ends verifies the digest.
    if file.metadata().await?.len() >= size {
        file.set_len(0).await?;
        return Ok((file, 0, hash));
    }
    let mut buffer = vec![0; WRITE_BUFFER_BYTES];
    loop {
        let count = file.read(&mut buffer).await?;
        if count == 0 {
            return Ok((file, have, hash));
        }
        hash.update(&buffer[..count]);
        have += count as u64;
    }
}

/// Copies a layer of this host into the store's own file, and verifies its digest if it has one: the source may change
/// while it is read.
async fn copy_layer(
    location: &LayerLocation,
    file: &Path,
    digest: Option<&str>,
    counter: &ProgressCounter,
) -> Result<(), PullError> {
    let (location, file) = (location.clone(), file.to_owned());
    let size = location.size;
    let copied = tokio::task::spawn_blocking(move || {
        let mut from = location.open()?;
        let mut out = fs::File::create(&file)?;
        let mut hash = Context::new(&SHA256);
        let mut buffer = vec![0; WRITE_BUFFER_BYTES];
        let mut copied = 0;
        loop {
            let count = io::Read::read(&mut from, &mut buffer)?;
            if count == 0 {
                return Ok((format!("sha256:{}", hex::encode(hash.finish())), copied));
            }
            copied += count as u64;
            hash.update(&buffer[..count]);
            io::Write::write_all(&mut out, &buffer[..count])?;
        }
    });
    let copied = copied.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let (found, copied) = copied.map_err(io_error("failed to copy a layer"))?;
    if copied != size {
        return Err(PullError::Invalid(format!(
            "a layer has {copied} bytes, and its manifest declares {size}"
        )));
    }
    match digest.filter(|digest| *digest != found) {
        Some(expected) => {
            Err(PullError::Invalid(format!("layer digest mismatch: read {found}, expected {expected}")))
        }
        None => {
            counter.add(size, 0);
            Ok(())
        }
    }
}
