//! Whose rights plain processes may have: confined ones, or those of the server itself.

use windlass_api::agent::shim::ProcessMode;
use windlass_backend::local;
use windlass_model::plan::{offers::Offer, runs_in::Runtimes};

use crate::db::{Db, DbError, users};

/// What plain processes may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessRights {
    /// Confined, everywhere.
    Confined,
    /// On the server's own machine they may have the server's own user.
    ServerUser,
}

impl ProcessRights {
    /// Only a server with one user may share its own with jobs: every second one would have the rights of the first.
    pub(crate) async fn now(db: &Db, local_processes: ProcessMode) -> Result<Self, DbError> {
        match local_processes {
            ProcessMode::Own if users::count_active(db).await? <= 1 => Ok(Self::ServerUser),
            ProcessMode::Own | ProcessMode::Confined | ProcessMode::Refused => Ok(Self::Confined),
        }
    }

    /// The offer as placement may use it.
    pub(crate) fn on(self, offer: Offer) -> Offer {
        if self == Self::ServerUser && is_here(&offer.backend) {
            return offer;
        }
        let mut offer = offer;
        offer.host.runtimes = offer.host.runtimes.map(Runtimes::never_own);
        offer
    }
}

#[cfg(not(feature = "testing"))]
fn is_here(backend: &str) -> bool {
    backend == local::NAME
}

/// With this variable every host is taken for this machine: jobs of tests leave signs in files.
#[cfg(feature = "testing")]
const OWN_PROCESSES: &str = "WINDLASS_TEST_OWN_PROCESSES";

#[cfg(feature = "testing")]
fn is_here(backend: &str) -> bool {
    backend == local::NAME || std::env::var_os(OWN_PROCESSES).is_some()
}
