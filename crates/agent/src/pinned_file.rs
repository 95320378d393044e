//! A program whose content is known by its digest, and verified before each use.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use ring::digest::{Context, SHA256};

const CHUNK_BYTES: usize = 256 * 1024;

#[derive(Debug)]
pub struct PinnedFile {
    path: PathBuf,
    /// Hexadecimal.
    sha256: String,
    /// Stamp of the file when its content was last verified.
    trusted: Mutex<Option<FileStamp>>,
}

/// Changes with every write to the file, also with one that resets the modification time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl PinnedFile {
    pub fn new(path: PathBuf, sha256: String) -> Self {
        Self { path, sha256, trusted: Mutex::new(None) }
    }

    /// The file was hashed while it was written; `file` is open on it.
    pub fn from_written(path: PathBuf, sha256: String, file: &File) -> io::Result<Self> {
        let trusted = Mutex::new(Some(FileStamp::from_file(file)?));
        Ok(Self { path, sha256, trusted })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails if the file has another digest. The content is read only if the file was modified since the last verification.
    pub fn verify(&self) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        let stamp = FileStamp::from_file(&file)?;
        if *self.trusted.lock() == Some(stamp) {
            return Ok(());
        }
        let found = hash_to(&mut file, &mut io::sink())?;
        if !found.eq_ignore_ascii_case(&self.sha256) {
            let why = format!(
                "{} was modified: its SHA-256 is {found}, expected {}",
                self.path.display(),
                self.sha256
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        *self.trusted.lock() = Some(stamp);
        Ok(())
    }
}

impl FileStamp {
    fn from_file(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        let changed = (meta.ctime(), meta.ctime_nsec());
        Ok(Self { device: meta.dev(), inode: meta.ino(), size: meta.size(), changed })
    }
}

/// Copies all bytes, and returns their digest in hexadecimal.
pub fn hash_to(from: &mut impl Read, target: &mut impl Write) -> io::Result<String> {
    let mut context = Context::new(&SHA256);
    let mut chunk = vec![0u8; CHUNK_BYTES];
    loop {
        let read = from.read(&mut chunk)?;
        let Some(piece) = chunk.get(..read).filter(|piece| !piece.is_empty()) else { break };
        context.update(piece);
        target.write_all(piece)?;
    }
    Ok(hex::encode(context.finish().as_ref()))
}
