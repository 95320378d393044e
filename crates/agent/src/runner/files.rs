//! Files that a user uploads with a run: one archive each, unpacked at its path.

use std::{fs, io, path::Path};

use super::{
    unpack::{
        CONTENT, TopLevel,
        subprocess::{self, ChildError, UnpackResult},
    },
    user_context::{self, StagingDir, UserContext},
};

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("failed to place files at `{path}`: invalid path")]
    BadPath { path: String },
    #[error("failed to place files at `{path}`")]
    Unpack {
        path: String,
        #[source]
        source: ChildError,
    },
    #[error("failed to place files at `{path}`: {what}")]
    Place {
        path: String,
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

impl FilesError {
    /// Returns whether the cause is a full disk.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::BadPath { .. } => false,
            Self::Unpack { source, .. } => matches!(source, ChildError::NoSpace(_)),
            Self::Place { source, .. } => source.kind() == io::ErrorKind::StorageFull,
        }
    }
}

/// Unpacks the archive at `path` and replaces what was there. The archive's first path component is renamed to the last
/// component of `path`. Dropping the future stops the work and leaves no partial result.
pub async fn unpack_to(site: &UserContext, archive: &Path, path: &str) -> Result<UnpackResult, FilesError> {
    let target = site.resolve(path);
    let Some(parent) = target.parent().filter(|_| !path.is_empty() && !path.contains('\0')) else {
        return Err(FilesError::BadPath { path: path.to_owned() });
    };
    let failed = |what| move |source| FilesError::Place { path: path.to_owned(), what, source };
    site.create_dirs(parent).map_err(failed("create the parent directories"))?;
    let stage = StagingDir::new(site, parent).map_err(failed("create a temporary directory"))?;
    let unpacked = subprocess::run(stage.path(), archive, TopLevel::Rename, site)
        .await
        .map_err(|source| FilesError::Unpack { path: path.to_owned(), source })?;
    replace_target(&stage, &target).map_err(failed("move them into place"))?;
    Ok(unpacked)
}

/// Moves the old target into the staging directory first, so that at any time either the old or the new one exists,
/// except between the two renames.
fn replace_target(stage: &StagingDir, target: &Path) -> io::Result<()> {
    let old = stage.path().join("old");
    match fs::rename(target, &old) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // Another file system is mounted there, or it cannot be renamed: return the error.
        Err(error) => return Err(error),
    }
    fs::rename(stage.path().join(CONTENT), target)?;
    user_context::remove_any(&old)
}
