//! SSH hosts: machines that somebody has, brought into a fleet.

use std::net::IpAddr;

use windlass_tunnel::Target;

/// A host of an SSH fleet, with everything needed to log in and to make it a node.
#[derive(Clone, Debug)]
pub struct Site {
    /// With the pinned host key, once there is one.
    pub target: Target,
    /// The address other nodes use; found in `network` when not given.
    pub internal_ip: Option<IpAddr>,
    /// Private network in CIDR notation, in which the host's internal address is looked for.
    pub network: Option<String>,
}
