//! Rights of plain processes: confined, or those of the server's user.

use windlass_api::agent::shim::ProcessMode;
use windlass_model::{
    backend_kind::is_server_machine,
    plan::{execution_mode::Runtimes, offers::Offer},
};

use crate::db::{Db, DbError, users};

/// Rights that plain processes may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessRights {
    /// Confined on every instance.
    Confined,
    /// On the server's own machine they may run as the server's user.
    ServerUser,
}

impl ProcessRights {
    /// Determines the present rights. Only a server with one user may share its system user with jobs: with a second
    /// user, each would have the rights of the other.
    pub(crate) async fn now(db: &Db, local_processes: ProcessMode) -> Result<Self, DbError> {
        match local_processes {
            ProcessMode::Own if users::count_active(db).await? <= 1 => Ok(Self::ServerUser),
            ProcessMode::Own | ProcessMode::Confined | ProcessMode::Refused => Ok(Self::Confined),
        }
    }

    /// Restricts the runtimes of an offer to those that placement may use.
    pub(crate) fn on(self, offer: Offer) -> Offer {
        if self == Self::ServerUser && is_here(&offer.backend) {
            return offer;
        }
        let mut offer = offer;
        offer.host.runtimes = offer.host.runtimes.map(Runtimes::without_own_user);
        offer
    }
}

#[cfg(not(feature = "testing"))]
fn is_here(backend: &str) -> bool {
    is_server_machine(backend)
}

/// If this variable is set, every host is treated as the server's own machine: jobs of tests leave traces in files.
#[cfg(feature = "testing")]
const OWN_PROCESSES: &str = "WINDLASS_TEST_OWN_PROCESSES";

#[cfg(feature = "testing")]
fn is_here(backend: &str) -> bool {
    is_server_machine(backend) || std::env::var_os(OWN_PROCESSES).is_some()
}
