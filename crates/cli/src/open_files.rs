//! How many files this process may have open.
//!
//! Every host that is connected is one or two of them. The soft limit of most systems, 1,024, is there for programs
//! that cannot count further; what the administrator allows is the hard one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Fewer are too few for a large fleet.
const ENOUGH_FILES: u64 = 8192;

/// Raises the soft limit to the hard one. A server with the old limit works too, up to a point: it goes on, and says
/// so in its log.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let now = limit.current.unwrap_or(u64::MAX);
    let most = limit.maximum.unwrap_or(u64::MAX);
    if now < most
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        tracing::warn!(%error, now, most, "raise the limit of open files: with many hosts connections will fail");
        return;
    }
    if most < ENOUGH_FILES {
        tracing::info!(most, "few files may be open at once: with many hosts connections will fail");
    }
}
