//! Unpacking of one layer of an image into a directory, as overlay mounts expect it.
//!
//! Layers come from anyone, and root unpacks them. There are three layers of protection, of which each suffices: names
//! are checked and everything is created relative to handles that cannot leave the target directory ([`tree`]); the
//! reader is our own and strict ([`reader`]); and all of it runs in a separate process without the rights that the work
//! does not need and, where the kernel has Landlock, without access to other directories ([`subprocess`]).
//!
//! Removed files (`.wh.NAME`) become the character devices 0/0 of overlay mounts. Directories that hide those of lower
//! layers (`.wh..wh..opq`) are reported to the parent process, because the mark on them needs rights that the child does
//! not have.

mod decompress;
mod reader;
pub mod subprocess;
mod tree;

#[cfg(test)]
mod tests;

use std::io;

use serde::{Deserialize, Serialize};

/// Limits of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLimits {
    /// Number of headers of any kind.
    pub entries: u64,
    /// Uncompressed size in bytes, headers included.
    pub bytes: u64,
}

impl Default for LayerLimits {
    fn default() -> Self {
        Self { entries: 4_000_000, bytes: 256 << 30 }
    }
}

/// Owners that the entries of a layer can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerIds {
    /// Every id: the process is root of the host.
    Any,
    /// Ids below this number exist in the user namespace of the process.
    Below(u32),
    /// Only root exists there: all entries belong to it.
    RootOnly,
}

impl OwnerIds {
    /// Returns the owner of an entry that the layer gives to `uid` and `gid`.
    fn map(self, uid: u32, gid: u32, shown: &str) -> Result<(u32, u32), LayerError> {
        match self {
            Self::RootOnly => Ok((0, 0)),
            Self::Below(count) if uid >= count || gid >= count => Err(refused(format!(
                "`{shown}`: its owner {uid}:{gid} is beyond the {count} ids of containers on this host (see \
                 /etc/subuid and /etc/subgid)"
            ))),
            Self::Below(_) | Self::Any => Ok((uid, gid)),
        }
    }
}

/// Maximum length of one path in bytes, as in the kernel.
const PATH_BYTES_MAX: usize = 4095;
/// Number of directories above one entry.
const DEPTH_MAX: usize = 256;
/// Maximum size of one extended header in bytes.
const EXTENDED_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of directories that hide those of lower layers.
const OPAQUE_MAX: usize = 50_000;

/// Result of unpacking.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSummary {
    pub entries: u64,
    /// Size of the files in bytes.
    pub bytes: u64,
    /// Digest of the uncompressed layer.
    pub diff_id: String,
    /// Directories that hide those of lower layers, relative to the root. Bytes, since names need not be text.
    pub opaque: Vec<Vec<u8>>,
}

/// Limit that a layer exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Excess {
    Entries,
    Bytes,
}

/// Reason for which a layer is refused. Names in the messages are escaped.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("{0}")]
    Refused(String),
    #[error("{message}")]
    TooLarge { excess: Excess, message: String },
    #[error("failed to read the layer")]
    Read(#[source] io::Error),
    #[error("failed to write `{entry}`")]
    Write {
        entry: String,
        #[source]
        source: io::Error,
    },
}

fn refused(message: impl Into<String>) -> LayerError {
    LayerError::Refused(message.into())
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

pub use reader::unpack;
