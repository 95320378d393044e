//! Upload of local files: each entry of `files` becomes one tar archive, identified by its hash and uploaded once.
//!
//! Files that `.gitignore` and `.dstackignore` exclude are not sent. Archives are reproducible: entries are sorted, and
//! contain neither times nor owners.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use ignore::WalkBuilder;
use tar::{Builder, EntryType, Header};
use windlass_api::{
    files::{Archive, HashRequest},
    operations::{ReadArchive, ReadServerInfo, UploadArchive},
    server::EmptyRequest,
};

use super::config_source::ConfigSource;
use crate::{
    context::Context,
    error::{CliError, ErrorCode},
    local_server::sha256,
};

/// Upload limit of a server that does not report one.
const BYTES_MAX: u64 = 2 << 20;
const ENTRIES_MAX: usize = 100_000;
const IGNORE_FILE: &str = ".dstackignore";
/// Maximum number of files that a size error lists, largest first.
const LARGEST_LISTED_MAX: usize = 3;

/// An uploaded archive, and the path to which its content is extracted.
pub(super) struct UploadedArchive {
    pub(super) id: String,
    pub(super) path: String,
}

/// Returns the maximum upload size of the server, in bytes.
pub(crate) async fn fetch_upload_limit(cx: &Context) -> Result<u64, CliError> {
    let info = cx.call::<ReadServerInfo>(&EmptyRequest {}).await?;
    Ok(info.upload_bytes_max.unwrap_or(BYTES_MAX))
}

pub(super) async fn upload(cx: &Context, source: &ConfigSource) -> Result<Vec<UploadedArchive>, CliError> {
    let mut all = Vec::new();
    let files = source.configuration.run().map(|run| run.files.as_slice()).unwrap_or_default();
    if files.is_empty() {
        return Ok(all);
    }
    let bytes_max = fetch_upload_limit(cx).await?;
    for file in files {
        let from = local_path(&source.dir, &file.local_path)?;
        let content = archive_path(&from, bytes_max)
            .map_err(|problem| problem.hint(format!("check `files` in {}", source.file)))?;
        let archive = upload_if_missing(cx, &content).await?;
        all.push(UploadedArchive { id: archive.id.to_string(), path: file.path.clone() });
    }
    Ok(all)
}

/// Uploads a file or a directory.
pub(crate) async fn upload_path(cx: &Context, path: &Path) -> Result<uuid::Uuid, CliError> {
    let bytes_max = fetch_upload_limit(cx).await?;
    Ok(upload_if_missing(cx, &archive_path(path, bytes_max)?).await?.id)
}

/// Uploads an archive unless the server has it already.
async fn upload_if_missing(cx: &Context, content: &[u8]) -> Result<Archive, CliError> {
    let hash = sha256(content);
    match cx.try_call::<ReadArchive>(&HashRequest { hash: hash.clone() }).await {
        Ok(archive) => Ok(archive),
        Err(error) if error.is_not_found() => {
            match cx.client.upload::<UploadArchive>(&[], &EmptyRequest {}, &hash, content).await {
                Ok(archive) => Ok(archive),
                Err(error) => Err(cx.explain(&error).await),
            }
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Resolves a path of a configuration: `~` is the home directory; other paths are relative to the configuration file.
pub(crate) fn local_path(dir: &Path, path: &str) -> Result<PathBuf, CliError> {
    if let Some(rest) = path.strip_prefix("~/").or_else(|| (path == "~").then_some("")) {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
        let home =
            home.ok_or_else(|| CliError::new(format!("cannot resolve `{path}`")).why("`HOME` is not set"))?;
        return Ok(PathBuf::from(home).join(rest));
    }
    Ok(dir.join(path))
}

/// Archives a file or a directory under its own name.
fn archive_path(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CliError> {
    let failed =
        |error: std::io::Error| CliError::from_error(&format!("failed to read `{}`", path.display()), &error);
    let whole = path.canonicalize().map_err(failed)?;
    let Some(name) = whole.file_name() else {
        return Err(CliError::new("cannot upload the whole file system").code(ErrorCode::TooLarge));
    };
    let top = PathBuf::from(name);
    if whole.is_dir() {
        return archive_directory(&whole, &top, bytes_max);
    }
    let mut tar = ArchiveBuilder::new(path, bytes_max);
    tar.add(&whole, &top)?;
    tar.finish()
}

/// Archives the content of a directory below `top`.
pub(super) fn archive_directory(root: &Path, top: &Path, bytes_max: u64) -> Result<Vec<u8>, CliError> {
    let walk = WalkBuilder::new(root)
        .hidden(false)
        .parents(true)
        .ignore(false)
        .git_global(false)
        .require_git(false)
        .add_custom_ignore_filename(IGNORE_FILE)
        .follow_links(false)
        .filter_entry(|entry| entry.file_name() != ".git")
        .sort_by_file_path(std::cmp::Ord::cmp)
        .build();
    let mut tar = ArchiveBuilder::new(root, bytes_max);
    for entry in walk {
        let entry = entry
            .map_err(|error| CliError::from_error(&format!("failed to read `{}`", root.display()), &error))?;
        let below = entry.path().strip_prefix(root).unwrap_or(entry.path());
        if below.as_os_str().is_empty() && top.as_os_str().is_empty() {
            continue;
        }
        tar.add(entry.path(), &top.join(below))?;
    }
    tar.finish()
}

struct ArchiveBuilder {
    builder: Builder<Vec<u8>>,
    root: PathBuf,
    bytes: u64,
    bytes_max: u64,
    entries: usize,
    largest: Vec<(u64, PathBuf)>,
}

impl ArchiveBuilder {
    fn new(root: &Path, bytes_max: u64) -> Self {
        let mut builder = Builder::new(Vec::new());
        builder.follow_symlinks(false);
        Self { builder, root: root.to_owned(), bytes: 0, bytes_max, entries: 0, largest: Vec::new() }
    }

    fn add(&mut self, path: &Path, name: &Path) -> Result<(), CliError> {
        let failed = |error: std::io::Error| {
            CliError::from_error(&format!("failed to read `{}`", path.display()), &error)
        };
        let data = fs::symlink_metadata(path).map_err(failed)?;
        self.entries += 1;
        if self.entries > ENTRIES_MAX {
            return Err(CliError::new(format!("cannot upload `{}`", self.root.display()))
                .code(ErrorCode::TooLarge)
                .why(format!("it contains more than {ENTRIES_MAX} files"))
                .hint(format!("exclude files with {IGNORE_FILE}")));
        }
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        header.set_mode(if data.permissions().mode() & 0o100 == 0 { 0o644 } else { 0o755 });
        if data.is_symlink() {
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            let target = fs::read_link(path).map_err(failed)?;
            return self.builder.append_link(&mut header, name, target).map_err(failed);
        }
        if data.is_dir() {
            header.set_entry_type(EntryType::Directory);
            header.set_size(0);
            return self.builder.append_data(&mut header, name, std::io::empty()).map_err(failed);
        }
        if !data.is_file() {
            // Sockets, pipes and devices have no content.
            return Ok(());
        }
        self.count(data.len(), path);
        if self.bytes > self.bytes_max {
            // The content is not read any more; the walk continues to find the largest files.
            return Ok(());
        }
        let content = fs::read(path).map_err(failed)?;
        header.set_entry_type(EntryType::Regular);
        header.set_size(content.len() as u64);
        self.builder.append_data(&mut header, name, content.as_slice()).map_err(failed)
    }

    fn count(&mut self, len: u64, path: &Path) {
        self.bytes += len;
        self.largest.push((len, path.to_owned()));
        self.largest.sort_by(|left, right| right.cmp(left));
        self.largest.truncate(LARGEST_LISTED_MAX);
    }

    fn finish(self) -> Result<Vec<u8>, CliError> {
        let root = self.root.display().to_string();
        let content = self
            .builder
            .into_inner()
            .map_err(|error| CliError::from_error(&format!("failed to archive `{root}`"), &error))?;
        if self.bytes > self.bytes_max || content.len() as u64 > self.bytes_max {
            let largest: Vec<String> = self
                .largest
                .iter()
                .map(|(len, path)| {
                    let shown = path.strip_prefix(&self.root).unwrap_or(path).display().to_string();
                    format!("{} ({} KiB)", if shown.is_empty() { &root } else { &shown }, len / 1024)
                })
                .collect();
            return Err(CliError::new(format!("cannot upload `{root}`"))
                .code(ErrorCode::TooLarge)
                .why(format!(
                    "its size of {} KiB exceeds the server's limit of {} KiB; largest files: {}",
                    self.bytes / 1024,
                    self.bytes_max / 1024,
                    largest.join(", ")
                ))
                .hint(format!(
                    "exclude files with {IGNORE_FILE}, put large data on a volume, or increase the server's \
                     setting `upload_max`"
                )));
        }
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use tempfile::TempDir;

    use super::{archive_directory, local_path};

    const MIB: u64 = 1 << 20;

    fn dir(files: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn names(tar: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().unwrap();
        entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect()
    }

    #[test]
    fn archive_excludes_ignored_files_and_the_git_directory() {
        let dir = dir(&[
            (".gitignore", "*.bin\n"),
            (".dstackignore", "private/\n"),
            (".git/config", "x"),
            ("a.bin", "x"),
            ("private/key", "x"),
            (".env", "x"),
            ("src/main.py", "x"),
        ]);
        let found = names(&archive_directory(dir.path(), Path::new("top"), MIB).unwrap());
        assert_eq!(
            found,
            ["top/", "top/.dstackignore", "top/.env", "top/.gitignore", "top/src", "top/src/main.py"]
        );
    }

    #[test]
    fn identical_files_produce_identical_archives() {
        let files = [("b", "2"), ("a", "1")];
        let (one, two) = (dir(&files), dir(&files));
        let packed = |dir: &TempDir| archive_directory(dir.path(), Path::new(""), MIB).unwrap();
        assert_eq!(packed(&one), packed(&two));
    }

    #[test]
    fn an_oversized_archive_is_refused_and_the_largest_file_is_named() {
        let dir = dir(&[("small", "x"), ("large", &"x".repeat(3 << 20))]);
        let message = archive_directory(dir.path(), Path::new(""), MIB).unwrap_err().text();
        for part in ["large (3072 KiB)", ".dstackignore", "the server's limit of 1024 KiB", "`upload_max`"] {
            assert!(message.contains(part), "{message}");
        }
        archive_directory(dir.path(), Path::new(""), 4 * MIB).unwrap();
    }

    #[test]
    fn relative_paths_resolve_against_the_configuration_directory() {
        assert_eq!(local_path(Path::new("/conf"), "a/b").unwrap(), Path::new("/conf/a/b"));
        assert_eq!(local_path(Path::new("/conf"), "/a").unwrap(), Path::new("/a"));
    }
}
