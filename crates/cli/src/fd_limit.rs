//! Limit of open files.
//!
//! Every connected host needs one or two of them. The soft limit of most systems, 1,024, exists for programs that
//! cannot handle higher descriptors; the administrator's limit is the hard one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lower limits are too low for a large fleet.
const ENOUGH_FILES: u64 = 8192;

/// Raises the soft limit to the hard one. On failure the server continues with the old limit and logs a warning.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let now = limit.current.unwrap_or(u64::MAX);
    let most = limit.maximum.unwrap_or(u64::MAX);
    if now < most
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        tracing::warn!(%error, now, most, "failed to raise the limit of open files; connections to many hosts will fail");
        return;
    }
    if most < ENOUGH_FILES {
        tracing::info!(most, "low limit of open files; connections to many hosts will fail");
    }
}
