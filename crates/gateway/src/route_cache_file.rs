//! Last known routes in a file, so that a gateway serves at once after a restart, even without the server.
//!
//! The file is replaced by a rename, and its first line contains the length and the checksum of the rest: a torn or
//! edited file is detected and never used in part.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

const MAGIC: &str = "windlass-routes 1";
/// A larger file was not written by this program.
const FILE_MAX: u64 = 256 * 1024 * 1024;

/// Failure to store or load routes.
#[derive(Debug, thiserror::Error)]
pub enum RouteFileError {
    #[error("failed to write the routes to `{}`", .path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to read the routes from `{}`", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the routes file `{}` is corrupt: {what}", .path.display())]
    Damaged { path: PathBuf, what: &'static str },
    #[error("failed to parse the routes in `{}`", .path.display())]
    Content {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

/// Stores the routes durably: when this returns, they survive a power failure.
pub fn save<T: Serialize>(path: &Path, known: &T) -> Result<(), RouteFileError> {
    let body = serde_json::to_vec(known)
        .map_err(|source| RouteFileError::Content { path: path.to_owned(), source })?;
    write(path, &body).map_err(|source| RouteFileError::Write { path: path.to_owned(), source })
}

fn write(path: &Path, body: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    // Readable by this user only, because it contains addresses of replicas.
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    writeln!(file, "{MAGIC} {} {:08x}", body.len(), crc32fast::hash(body))?;
    file.write_all(body)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Returns the stored routes; `None` if none were ever stored.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RouteFileError> {
    let damaged = |what| RouteFileError::Damaged { path: path.to_owned(), what };
    let read = |source| RouteFileError::Read { path: path.to_owned(), source };
    let bytes = match fs::metadata(path) {
        Ok(found) if found.len() > FILE_MAX => return Err(damaged("too large")),
        Ok(_) => fs::read(path).map_err(read)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(read(error)),
    };
    let end =
        bytes.iter().take(128).position(|b| *b == b'\n').ok_or_else(|| damaged("missing header line"))?;
    let (line, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| damaged("the header line is not text"))?;
    let mut words =
        line.strip_prefix(MAGIC).ok_or_else(|| damaged("unknown file format"))?.split_whitespace();
    if words.next().and_then(|word| word.parse().ok()) != Some(body.len()) {
        return Err(damaged("unexpected length"));
    }
    if words.next().and_then(|word| u32::from_str_radix(word, 16).ok()) != Some(crc32fast::hash(body)) {
        return Err(damaged("checksum mismatch"));
    }
    serde_json::from_slice(body)
        .map(Some)
        .map_err(|source| RouteFileError::Content { path: path.to_owned(), source })
}
