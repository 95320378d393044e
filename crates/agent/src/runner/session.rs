//! As whom, where and with which variables somebody who comes in beside the job works.

use std::{ffi::OsString, path::PathBuf, sync::Arc};

use super::user::Account;

/// What a process started beside the job gets: the job's user, variables and working directory once the job
/// was started, before that the container's own user and the bare environment.
#[derive(Clone, Debug)]
pub struct Session {
    pub account: Account,
    /// The whole environment, sorted by name; nothing is to be inherited beside it.
    pub env: Vec<(OsString, OsString)>,
    pub dir: PathBuf,
}

/// Asked anew for each process, for the answer changes when the job starts.
pub type SessionProvider = Arc<dyn Fn() -> Session + Send + Sync>;
