//! Images without a registry: a directory or an archive in the layout of the OCI, or an archive of `docker save`.
//!
//! The documents are small and are verified here. Layers are only located: the caller reads them and verifies their
//! digests, because it must copy them anyway.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tar::Archive;

use crate::{
    Image, ImageConfig, Layer, Platform,
    client::{sha256, verify_digest},
    image::{Descriptor, Document},
    name::is_digest,
};

/// Flag of `open`: does not wait for the writer of a pipe.
const O_NONBLOCK: i32 = 0o4000;
/// Size limit of an index, a manifest or a configuration.
const DOCUMENT_BYTES_MAX: u64 = 8 << 20;
/// Number of indexes inside one another.
const INDEX_DEPTH_MAX: usize = 3;
/// Number of entries of an archive that are examined.
const ARCHIVE_ENTRIES_MAX: usize = 100_000;
/// Annotation of an image in the index of a layout with its tag.
const TAG_ANNOTATION: &str = "org.opencontainers.image.ref.name";

/// Name of an image on this host: `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]` or `docker-archive:FILE[:TAG]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalName {
    pub kind: LocalKind,
    pub path: PathBuf,
    pub tag: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalKind {
    /// A directory in the layout of the OCI.
    OciDirectory,
    /// An archive of such a directory.
    OciArchive,
    /// An archive as `docker save` writes it.
    DockerArchive,
}

impl LocalName {
    /// Returns `None` for the name of an image in a registry.
    pub fn parse(text: &str) -> Option<Result<Self, LocalError>> {
        let prefixes = [
            ("oci:", LocalKind::OciDirectory),
            ("oci-archive:", LocalKind::OciArchive),
            ("docker-archive:", LocalKind::DockerArchive),
        ];
        let (kind, rest) =
            prefixes.into_iter().find_map(|(prefix, kind)| Some((kind, text.strip_prefix(prefix)?)))?;
        // A colon after the last slash starts the tag.
        let last = rest.rfind('/').map_or(0, |slash| slash + 1);
        let (path, tag) = match rest[last..].find(':') {
            Some(colon) => (&rest[..last + colon], Some(&rest[last + colon + 1..])),
            None => (rest, None),
        };
        let is_plain = Path::new(path).is_absolute()
            && !path.split('/').any(|part| part == "..")
            && !path.contains('\0')
            && tag != Some("");
        Some(if is_plain {
            Ok(Self { kind, path: PathBuf::from(path), tag: tag.map(str::to_owned) })
        } else {
            Err(LocalError::InvalidName { name: text.to_owned() })
        })
    }
}

impl fmt::Display for LocalName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            LocalKind::OciDirectory => "oci",
            LocalKind::OciArchive => "oci-archive",
            LocalKind::DockerArchive => "docker-archive",
        };
        write!(f, "{kind}:{}", self.path.display())?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(
        "invalid image name `{name}`: expected `oci:DIR`, `oci-archive:FILE` or `docker-archive:FILE` with an absolute path \
         without `..`"
    )]
    InvalidName { name: String },
    #[error("failed to read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} has no image{}", tag.as_ref().map_or(String::new(), |tag| format!(" with the tag `{tag}`")))]
    NotFound { path: PathBuf, tag: Option<String> },
    #[error("{path} has no image for {wanted}")]
    NoPlatform { path: PathBuf, wanted: Platform },
    #[error("{path} has several images: add a tag to the name, one of {}", tags.join(", "))]
    Ambiguous { path: PathBuf, tags: Vec<String> },
    #[error("invalid image in {path}: {problem}")]
    Invalid { path: PathBuf, problem: String },
}

/// Position of a layer on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLocation {
    pub path: PathBuf,
    pub offset: u64,
    pub size: u64,
}

impl LayerLocation {
    /// Opens the layer for reading: exactly its bytes.
    pub fn open(&self) -> io::Result<io::Take<File>> {
        let mut file = open_file(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        Ok(file.take(self.size))
    }
}

/// An image of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalImage {
    pub image: Image,
    /// In the order of the image's layers.
    pub layers: Vec<LayerLocation>,
    /// True if the digests of the layers are those of their uncompressed contents.
    pub has_uncompressed_digests: bool,
}

/// Reads the documents of an image. Blocks.
pub fn read(name: &LocalName, platform: &Platform) -> Result<LocalImage, LocalError> {
    match name.kind {
        LocalKind::OciDirectory => read_layout(name, &Layout::Directory(&name.path), platform),
        LocalKind::OciArchive => {
            read_layout(name, &Layout::Archive(ArchiveIndex::read(&name.path)?), platform)
        }
        LocalKind::DockerArchive => read_archive(name, platform),
    }
}

fn invalid(path: &Path, problem: impl Into<String>) -> LocalError {
    LocalError::Invalid { path: path.to_owned(), problem: problem.into() }
}

/// Opens a regular file. Others may write to the directory: a pipe there must not stop the caller.
fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

fn read_document(path: &Path) -> Result<Vec<u8>, LocalError> {
    let failed = |source| LocalError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = open_file(path).map_err(failed)?;
    file.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(invalid(path, format!("a document exceeds {} MiB", DOCUMENT_BYTES_MAX >> 20)));
    }
    Ok(bytes)
}

fn parse_document(path: &Path, bytes: &[u8]) -> Result<Document, LocalError> {
    serde_json::from_slice(bytes).map_err(|error| invalid(path, format!("malformed manifest: {error}")))
}

/// Files in the layout of the OCI.
enum Layout<'a> {
    Directory(&'a Path),
    Archive(ArchiveIndex<'a>),
}

/// Returns the name of a blob in a layout.
fn blob_name(root: &Path, digest: &str) -> Result<String, LocalError> {
    match digest.strip_prefix("sha256:").filter(|_| is_digest(digest)) {
        Some(hex) => Ok(format!("blobs/sha256/{hex}")),
        None => Err(invalid(root, format!("`{digest}` is not a sha256 digest"))),
    }
}

impl Layout<'_> {
    fn root(&self) -> &Path {
        match self {
            Self::Directory(root) => root,
            Self::Archive(index) => index.path,
        }
    }

    fn document(&self, name: &str) -> Result<Vec<u8>, LocalError> {
        match self {
            Self::Directory(root) => read_document(&root.join(name)),
            Self::Archive(index) => index.document(name),
        }
    }

    fn blob(&self, digest: &str) -> Result<Vec<u8>, LocalError> {
        let name = blob_name(self.root(), digest)?;
        let bytes = self.document(&name)?;
        verify_digest(&bytes, digest)
            .map_err(|problem| invalid(self.root(), format!("`{name}`: {problem}")))?;
        Ok(bytes)
    }

    /// Finds a layer. Its size is that which the manifest declares: the caller reads no more, and notices if it has less.
    fn layer(&self, layer: &Layer) -> Result<LayerLocation, LocalError> {
        let name = blob_name(self.root(), &layer.digest)?;
        match self {
            Self::Directory(root) => Ok(LayerLocation { path: root.join(name), offset: 0, size: layer.size }),
            Self::Archive(index) => {
                let found = index.find(&name)?;
                // What follows in the archive is another file.
                if found.size != layer.size {
                    let (size, declared) = (found.size, layer.size);
                    let problem = format!("`{name}` has {size} bytes, and its manifest declares {declared}");
                    return Err(invalid(self.root(), problem));
                }
                Ok(found.clone())
            }
        }
    }
}

fn read_layout(name: &LocalName, files: &Layout<'_>, platform: &Platform) -> Result<LocalImage, LocalError> {
    let root = files.root();
    let index = parse_document(root, &files.document("index.json")?)?;
    let chosen = choose_tagged(name, &index.manifests)?;
    let mut digest = chosen.digest.clone();
    let mut document = parse_document(root, &files.blob(&digest)?)?;
    let mut depth = 0;
    while document.is_index("") {
        depth += 1;
        if depth > INDEX_DEPTH_MAX {
            return Err(invalid(root, "too many indexes inside one another"));
        }
        let build = document.platforms().find(|(has, _)| platform.can_run(has));
        let Some((_, build)) = build else {
            return Err(LocalError::NoPlatform { path: root.to_owned(), wanted: platform.clone() });
        };
        digest = build.digest.clone();
        document = parse_document(root, &files.blob(&digest)?)?;
    }
    let config = document.config.ok_or_else(|| invalid(root, "the manifest has no configuration"))?;
    let config = parse_config(root, &files.blob(&config.digest)?, platform)?;
    let layers = document.layers.iter().map(|layer| files.layer(layer)).collect::<Result<_, _>>()?;
    let platforms = config.platform.iter().cloned().collect();
    let image = Image { digest, platforms, config, layers: document.layers };
    Ok(LocalImage { image, layers, has_uncompressed_digests: false })
}

fn parse_config(path: &Path, bytes: &[u8], platform: &Platform) -> Result<ImageConfig, LocalError> {
    let config = ImageConfig::parse(bytes)
        .map_err(|error| invalid(path, format!("malformed configuration: {error}")))?;
    match &config.platform {
        Some(has) if !platform.can_run(has) => {
            Err(LocalError::NoPlatform { path: path.to_owned(), wanted: platform.clone() })
        }
        Some(_) | None => Ok(config),
    }
}

fn choose_tagged<'a>(name: &LocalName, manifests: &'a [Descriptor]) -> Result<&'a Descriptor, LocalError> {
    let tag_of = |entry: &Descriptor| entry.annotations.get(TAG_ANNOTATION).cloned();
    let missing = || LocalError::NotFound { path: name.path.clone(), tag: name.tag.clone() };
    match (&name.tag, manifests) {
        (Some(tag), all) => all.iter().find(|entry| tag_of(entry).as_ref() == Some(tag)).ok_or_else(missing),
        (None, []) => Err(missing()),
        (None, [only]) => Ok(only),
        (None, several) => Err(LocalError::Ambiguous {
            path: name.path.clone(),
            tags: several.iter().filter_map(tag_of).collect(),
        }),
    }
}

/// One image of `manifest.json` in an archive.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ArchivedImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

/// Positions of the files of an archive, by name.
struct ArchiveIndex<'a> {
    path: &'a Path,
    files: std::collections::HashMap<String, LayerLocation>,
}

impl<'a> ArchiveIndex<'a> {
    fn read(path: &'a Path) -> Result<Self, LocalError> {
        let failed = |source| LocalError::Read { path: path.to_owned(), source };
        let mut archive = Archive::new(open_file(path).map_err(failed)?);
        let mut files = std::collections::HashMap::new();
        let mut links = Vec::new();
        for (count, entry) in archive.entries_with_seek().map_err(failed)?.enumerate() {
            if count >= ARCHIVE_ENTRIES_MAX {
                return Err(invalid(path, format!("more than {ARCHIVE_ENTRIES_MAX} entries")));
            }
            let entry = entry.map_err(failed)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_owned();
            if entry.header().entry_type().is_file() {
                let (offset, size) = (entry.raw_file_position(), entry.size());
                files.insert(name, LayerLocation { path: path.to_owned(), offset, size });
            } else if let Some(target) = entry.link_name_bytes() {
                // `docker save` of older versions stores a layer that occurs twice as a link to the first.
                links.push((name, String::from_utf8_lossy(&target).trim_start_matches("../").to_owned()));
            }
        }
        for (name, target) in links {
            if let Some(found) = files.get(&target).cloned() {
                files.entry(name).or_insert(found);
            }
        }
        Ok(Self { path, files })
    }

    fn find(&self, name: &str) -> Result<&LayerLocation, LocalError> {
        self.files.get(name).ok_or_else(|| invalid(self.path, format!("`{name}` is missing")))
    }

    fn document(&self, name: &str) -> Result<Vec<u8>, LocalError> {
        let location = self.find(name)?;
        if location.size > DOCUMENT_BYTES_MAX {
            return Err(invalid(self.path, format!("`{name}` exceeds {} MiB", DOCUMENT_BYTES_MAX >> 20)));
        }
        let mut bytes = Vec::new();
        let read = location.open().and_then(|mut from| from.read_to_end(&mut bytes));
        read.map_err(|source| LocalError::Read { path: self.path.to_owned(), source })?;
        Ok(bytes)
    }
}

fn read_archive(name: &LocalName, platform: &Platform) -> Result<LocalImage, LocalError> {
    let path = name.path.as_path();
    let index = ArchiveIndex::read(path)?;
    let manifest = index.document("manifest.json")?;
    let images: Vec<ArchivedImage> = serde_json::from_slice(&manifest)
        .map_err(|error| invalid(path, format!("malformed manifest.json: {error}")))?;
    let image = choose_archived(name, &images)?;
    let bytes = index.document(&image.config)?;
    let digest = sha256(&bytes);
    let config = parse_config(path, &bytes, platform)?;
    if config.diff_ids.len() != image.layers.len() {
        return Err(invalid(path, "the numbers of layers and of their digests differ"));
    }
    let layers: Vec<LayerLocation> =
        image.layers.iter().map(|layer| index.find(layer).cloned()).collect::<Result<_, _>>()?;
    let mut described = Vec::new();
    for (digest, location) in config.diff_ids.iter().zip(&layers) {
        if !is_digest(digest) {
            return Err(invalid(path, format!("`{digest}` is not a sha256 digest")));
        }
        let media_type = "application/vnd.oci.image.layer.v1.tar".to_owned();
        described.push(Layer { media_type, digest: digest.clone(), size: location.size });
    }
    let platforms = config.platform.iter().cloned().collect();
    let image = Image { digest, platforms, config, layers: described };
    Ok(LocalImage { image, layers, has_uncompressed_digests: true })
}

fn choose_archived<'a>(
    name: &LocalName,
    images: &'a [ArchivedImage],
) -> Result<&'a ArchivedImage, LocalError> {
    let missing = || LocalError::NotFound { path: name.path.clone(), tag: name.tag.clone() };
    let tags = |image: &ArchivedImage| image.repo_tags.clone().unwrap_or_default();
    match (&name.tag, images) {
        (Some(tag), all) => {
            let has_tag = |image: &&ArchivedImage| {
                tags(image).iter().any(|full| full.rsplit(':').next() == Some(tag.as_str()))
            };
            all.iter().find(has_tag).ok_or_else(missing)
        }
        (None, []) => Err(missing()),
        (None, [only]) => Ok(only),
        (None, several) => Err(LocalError::Ambiguous {
            path: name.path.clone(),
            tags: several.iter().flat_map(tags).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_local_images_are_distinguished_from_names_in_registries() {
        let name = |text: &str| LocalName::parse(text).map(|parsed| parsed.map(|name| name.to_string()));
        assert!(name("debian:12").is_none() && name("ghcr.io/oci:1").is_none());
        for text in [
            "oci:/images/a",
            "oci:/images/a:1.0",
            "oci-archive:/a.tar:1",
            "docker-archive:/x.tar",
            "docker-archive:/x.tar:v1",
        ] {
            assert_eq!(name(text).unwrap().unwrap(), text);
        }
        let tagged = LocalName::parse("oci:/images/a:1.0").unwrap().unwrap();
        assert_eq!((tagged.path.as_path(), tagged.tag.as_deref()), (Path::new("/images/a"), Some("1.0")));
        for wrong in ["oci:", "oci:relative", "oci:/a/../b", "docker-archive:/a:", "oci:/a\0b"] {
            assert!(name(wrong).unwrap().is_err(), "{wrong}");
        }
    }
}
