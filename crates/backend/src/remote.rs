//! SSH hosts: machines that somebody has, brought into a fleet.
//!
//! Everything of ours on a host is in one directory ([`ROOT`]), beside one unit or one line of cron that starts the
//! agent with the machine. Whatever is done there may be done again: a second bring-up finds all in place and changes
//! nothing, and one that was cut off goes on where it stopped.

mod binary;

use std::{net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use windlass_model::{id::InstanceId, plan::offers::Offer};
use windlass_tunnel::{Hosts, Target};

pub use self::binary::{Binaries, BinaryError};
use crate::{Answer, Backend, BackendError, Deleted, Found, Machine, Order};

/// The directory of ours on a host.
pub const ROOT: &str = "/var/lib/windlass";
/// Where its agent answers.
pub const SOCKET: &str = "/var/lib/windlass/door/shim.sock";

/// A host of an SSH fleet, with everything needed to log in and to make it a node.
#[derive(Clone, Debug)]
pub struct Site {
    /// With the pinned host keys, once there are some: those of hosts on the way as well.
    pub target: Target,
    /// The address other nodes use; found in `network` when not given.
    pub internal_ip: Option<IpAddr>,
    /// Private network in CIDR notation, in which the host's internal address is looked for.
    pub network: Option<String>,
}

/// What [`Remote`] keeps in [`Machine::memo`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memo {
    /// SHA-256 of the agent's binary that was brought there.
    #[serde(default)]
    pub agent_sha256: String,
    /// The keys that the host and those on the way have shown, by [`Target::known_as`]: what to pin from now on.
    #[serde(default)]
    pub host_keys: std::collections::BTreeMap<String, String>,
    /// What starts the agent again after a reboot, for people.
    #[serde(default)]
    pub keeper: String,
}

impl Memo {
    /// What was remembered of a machine; empty for one of another backend.
    pub fn of(machine: &Machine) -> Self {
        serde_json::from_value(machine.memo.clone()).unwrap_or_default()
    }
}

/// The backend `remote`.
pub struct Remote {
    hosts: Arc<Hosts<InstanceId>>,
    binaries: Binaries,
}

impl Remote {
    /// `hosts` are the connections that calls to agents use as well: one connection per host serves both.
    pub fn new(hosts: Arc<Hosts<InstanceId>>, binaries: Binaries) -> Self {
        Self { hosts, binaries }
    }
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("hosts", &self.hosts).field("binaries", &self.binaries).finish()
    }
}

impl Backend for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    /// Hosts are given, not offered.
    fn offers(&self) -> Answer<'_, Vec<Offer>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn create<'a>(&'a self, _order: &'a Order) -> Answer<'a, Machine> {
        let said = "not part of this version yet".to_owned();
        Box::pin(std::future::ready(Err(BackendError::Unavailable { what: "bring up the host", said })))
    }

    fn find<'a>(&'a self, _order: &'a Order, _machine: &'a Machine) -> Answer<'a, Found> {
        let said = "not part of this version yet".to_owned();
        Box::pin(std::future::ready(Err(BackendError::Unavailable { what: "look for the host", said })))
    }

    fn delete<'a>(&'a self, _order: &'a Order, _machine: Option<&'a Machine>) -> Answer<'a, Deleted> {
        let said = "not part of this version yet".to_owned();
        Box::pin(std::future::ready(Err(BackendError::Unavailable { what: "leave the host", said })))
    }

    fn progress(&self, _instance: InstanceId) -> Option<String> {
        None
    }
}
