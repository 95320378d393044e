//! Account, directory and variables of processes that users start next to the job.

use std::{ffi::OsString, path::PathBuf, sync::Arc};

use super::user::Account;

/// Settings of a process started next to the job: the job's user, variables and working directory once the job was
/// started, before that the container's own user and the base environment.
#[derive(Clone, Debug)]
pub struct Session {
    pub account: Account,
    /// The whole environment, sorted by name; no other variables are inherited.
    pub env: Vec<(OsString, OsString)>,
    pub dir: PathBuf,
}

/// Called for each process, because the result changes when the job starts.
pub type SessionProvider = Arc<dyn Fn() -> Session + Send + Sync>;
