//! A bucket in a directory, on a filesystem that all replicas share.
//!
//! An object is created by linking a complete file to its name, which fails if the name exists: readers never see a
//! partial object, and writers never replace one.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::{Bucket, BucketFuture, ObjectPage};
use crate::encryption::create_private_dirs;

/// Maximum number of objects in one page of a list.
const PAGE_MAX: usize = 1000;
/// Prefix of files that are being written; no object name begins with it.
const UNFINISHED: &str = ".unfinished-";

#[derive(Debug)]
pub struct DirBucket {
    root: Arc<PathBuf>,
}

impl DirBucket {
    pub fn new(root: PathBuf) -> Self {
        Self { root: Arc::new(root) }
    }

    fn work<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(&Path, PathBuf) -> io::Result<T> + Send + 'static,
    ) -> BucketFuture<'static, T> {
        let (root, path) = (Arc::clone(&self.root), self.root.join(name));
        Box::pin(async move {
            tokio::task::spawn_blocking(move || work(&root, path)).await.map_err(io::Error::other)?
        })
    }
}

impl Bucket for DirBucket {
    fn link_new_file<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BucketFuture<'a, bool> {
        self.work(name, move |_, path| put_new(&path, &bytes))
    }

    fn get<'a>(&'a self, name: &'a str, limit: Option<usize>) -> BucketFuture<'a, Option<Vec<u8>>> {
        self.work(name, move |_, path| {
            let file = match File::open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                other => other?,
            };
            let mut bytes = Vec::new();
            file.take(limit.map_or(u64::MAX, |limit| limit as u64)).read_to_end(&mut bytes)?;
            Ok(Some(bytes))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> BucketFuture<'a, ObjectPage> {
        let after = after.map(str::to_owned);
        self.work(prefix, move |root, path| {
            let mut objects = Vec::new();
            list_files(root, &path, after.as_deref(), &mut objects)?;
            objects.sort_unstable();
            let more = objects.len() > PAGE_MAX;
            objects.truncate(PAGE_MAX);
            Ok(ObjectPage { objects, more })
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BucketFuture<'a, ()> {
        self.work(name, |_, path| match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        })
    }

    fn delete_all<'a>(&'a self, prefix: &'a str) -> BucketFuture<'a, ()> {
        self.work(prefix, |_, path| match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        })
    }

    /// A list costs one read of a directory.
    fn fresh_for(&self) -> Duration {
        Duration::from_millis(500)
    }
}

fn put_new(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let Some(parent) = path.parent() else { return Err(ErrorKind::InvalidInput.into()) };
    let unfinished = parent.join(format!("{UNFINISHED}{:016x}", getrandom::u64().map_err(io::Error::other)?));
    let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
    let mut file = match open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            create_private_dirs(parent)?;
            open()?
        }
        other => other?,
    };
    let linked = file
        .write_all(bytes)
        .and_then(|()| file.sync_data())
        .and_then(|()| std::fs::hard_link(&unfinished, path))
        .and_then(|()| File::open(parent)?.sync_all());
    let removed = std::fs::remove_file(&unfinished);
    match linked {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        other => other.and(removed).map(|()| true),
    }
}

/// Lists everything below a directory that sorts after a name.
fn list_files(root: &Path, at: &Path, after: Option<&str>, found: &mut Vec<(String, u64)>) -> io::Result<()> {
    let entries = match std::fs::read_dir(at) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            list_files(root, &entry.path(), after, found)?;
            continue;
        }
        let path = entry.path();
        let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str) else { continue };
        let is_unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        if !is_unfinished && after.is_none_or(|after| name > after) {
            match entry.metadata() {
                Ok(metadata) => found.push((name.to_owned(), metadata.len())),
                // Removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
