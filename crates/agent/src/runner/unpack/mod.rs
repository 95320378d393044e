//! Unpacking of untrusted archives: a tar, below one directory handle, within limits.
//!
//! There are three layers of protection. Names are checked before anything is created ([`name`]). Everything is created
//! relative to a handle of its directory, and no link is ever followed ([`extract`]). And all of it runs in a separate
//! child process as the job's user, without new privileges and, where the kernel has Landlock, with access to nothing
//! but the target directory ([`child`]). Each of the first two suffices alone.
//!
//! The tar reader is our own and strict: the size in the header is the size, a record that could be read in two ways is
//! refused, and the end must be marked. Archives hide things where two parsers could read them differently.

mod archive_reader;
mod entry_name;
mod extract;
pub mod subprocess;

#[cfg(test)]
mod tests;

use std::io;

use serde::{Deserialize, Serialize};

pub use archive_reader::unpack;

/// Name of the unpacked contents below the directory that the archive is unpacked in.
pub const CONTENT: &str = "content";

/// Limits of one archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// Number of headers of any kind.
    pub entries: u64,
    /// Total size of all files in bytes.
    pub bytes: u64,
    /// Length of one path in bytes.
    pub path: usize,
    /// Number of directories above one entry.
    pub depth: usize,
}

impl Default for ArchiveLimits {
    fn default() -> Self {
        Self { entries: 250_000, bytes: 16 << 30, path: 4095, depth: 128 }
    }
}

/// Maximum length of one component in bytes, as in file systems.
const MAX_COMPONENT: usize = 255;
/// Maximum size of one extended header in bytes. Names fit many times over; ignored attributes should as well.
const MAX_EXTENDED: u64 = 1 << 20;

/// Treatment of the first component of each path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TopLevel {
    /// Paths are created below [`CONTENT`] as they are.
    Keep,
    /// [`CONTENT`] replaces the first component.
    Rename,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    pub entries: u64,
    pub bytes: u64,
}

/// Reason for which an archive is refused. Names in the messages are escaped.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("more than {limit} entries")]
    TooManyEntries { limit: u64 },
    #[error("more than {limit} bytes of files")]
    TooManyBytes { limit: u64 },
    #[error("`{entry}`: the path is longer than {limit} bytes")]
    PathTooLong { entry: String, limit: usize },
    #[error("`{entry}`: a name is longer than {MAX_COMPONENT} bytes")]
    NameTooLong { entry: String },
    #[error("`{entry}`: nested deeper than {limit} directories")]
    TooDeep { entry: String, limit: usize },
    #[error("`{entry}`: the declared size of {claimed} bytes exceeds the {left} bytes left in the archive")]
    MoreThanArchive { entry: String, claimed: u64, left: u64 },
    #[error("an extended header of {size} bytes exceeds the limit of {MAX_EXTENDED}")]
    ExtendedTooLong { size: u64 },
    #[error("an entry has no name")]
    NoName,
    #[error("`{entry}`: the name contains a NUL byte")]
    Nul { entry: String },
    #[error("`{entry}`: absolute paths are not allowed")]
    Absolute { entry: String },
    #[error("`{entry}`: paths with `..` are not allowed")]
    Parent { entry: String },
    #[error("`{entry}`: the link target `{target}` is outside the archive")]
    LinkOut { entry: String, target: String },
    #[error("`{entry}`: the hard link target `{target}` is not a file of the archive")]
    BadHardLink { entry: String, target: String },
    #[error("`{entry}`: device files are not allowed")]
    Device { entry: String },
    #[error("`{entry}`: FIFOs are not allowed")]
    Fifo { entry: String },
    #[error("`{entry}`: sparse files are not supported")]
    Sparse { entry: String },
    #[error("`{entry}`: unknown entry type `{kind}`")]
    UnknownKind { entry: String, kind: String },
    #[error("`{entry}`: the headers disagree about {what}")]
    Mismatch { entry: String, what: &'static str },
    #[error("`{entry}`: conflicts with an entry of another type, or is below a link or file")]
    Conflict { entry: String },
    #[error("invalid tar header")]
    BadHeader,
    #[error("invalid extended header")]
    BadExtended,
    #[error("the archive is truncated")]
    Truncated,
    #[error("the archive is empty")]
    Empty,
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("failed to unpack the archive: {0}")]
    Refused(#[from] ArchiveError),
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("failed to unpack the archive: cannot write `{entry}`")]
    Write {
        entry: String,
        #[source]
        source: io::Error,
    },
}

/// Formats a name for a message: without control characters, and of limited length.
fn escape_name(name: &[u8]) -> String {
    const SHOWN: usize = 200;
    let mut text: String =
        name.iter().take(SHOWN).flat_map(|byte| byte.escape_ascii()).map(char::from).collect();
    if name.len() > SHOWN {
        text.push('…');
    }
    text
}
