//! Selection of the address of a host that other nodes use.

use std::net::IpAddr;

use crate::{BackendError, remote::RemoteHost};

/// Selects the internal address: the given one, otherwise one in the given network, otherwise the address that was
/// dialled if it is private, otherwise the host's first private one. `addresses` have prefix lengths.
pub(super) fn select_internal_ip(
    site: &RemoteHost,
    addresses: &[String],
    local: &str,
) -> Result<Option<IpAddr>, BackendError> {
    let refuse = |message: String| BackendError::Refused { what: "find the internal address", message };
    if site.internal_ip.is_some() {
        return Ok(site.internal_ip);
    }
    let own: Vec<IpAddr> = addresses.iter().filter_map(|text| text.split('/').next()?.parse().ok()).collect();
    let Some(network) = &site.network else {
        let came_to = local.parse().ok().filter(|address| own.contains(address));
        let candidates = came_to.into_iter().chain(own.iter().copied());
        return Ok({ candidates }.find(|address| is_private(*address)));
    };
    let Some(within) = Network::parse(network) else {
        return Err(refuse(format!(
            "invalid `network` value `{network}`: expected a network such as `10.0.0.0/24`"
        )));
    };
    match own.iter().find(|address| within.contains(**address)) {
        Some(address) => Ok(Some(*address)),
        None => Err(refuse(format!(
            "the host has no address in `network: {network}`. It has: {}",
            addresses.join(", ")
        ))),
    }
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.is_unique_local(),
    }
}

#[derive(Clone, Copy, Debug)]
struct Network {
    address: IpAddr,
    prefix: u32,
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.trim().split_once('/')?;
        let (address, prefix) = (address.parse().ok()?, prefix.parse().ok()?);
        let longest = if matches!(address, IpAddr::V4(_)) { 32 } else { 128 };
        (prefix <= longest).then_some(Self { address, prefix })
    }

    fn contains(self, address: IpAddr) -> bool {
        let differ = match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => u128::from(ours.to_bits() ^ theirs.to_bits()) << 96,
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => ours.to_bits() ^ theirs.to_bits(),
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
        };
        differ.leading_zeros() >= self.prefix
    }
}

#[cfg(test)]
mod tests {
    use windlass_tunnel::{HostKeyPin, SshDestination};

    use super::*;

    #[track_caller]
    fn check(given: Option<&str>, network: Option<&str>, local: &str, expected: &str) {
        let (keys, pin, via) = (Vec::new(), HostKeyPin::FirstUse, None);
        let target = SshDestination { host: "h".into(), port: 22, user: "u".into(), keys, pin, via };
        let internal_ip = given.map(|text| text.parse().unwrap());
        let site = RemoteHost { target, internal_ip, network: network.map(str::to_owned) };
        let has =
            ["203.0.113.5/24", "172.17.0.1/16", "10.1.2.3/24", "fd00::7/64", "fe80::1/64"].map(str::to_owned);
        let found = match select_internal_ip(&site, &has, local) {
            Ok(found) => found.map_or("none".to_owned(), |address| address.to_string()),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{found}");
    }

    #[test]
    fn internal_address_prefers_configuration_then_network_then_a_private_address() {
        check(Some("10.9.9.9"), Some("10.1.2.0/24"), "", "10.9.9.9");
        check(None, Some("10.1.0.0/16"), "203.0.113.5", "10.1.2.3");
        check(None, Some("fd00::/8"), "", "fd00::7");
        check(None, Some("0.0.0.0/0"), "", "203.0.113.5");
        check(None, Some("10.1.2.3/32"), "", "10.1.2.3");
        check(None, None, "10.1.2.3", "10.1.2.3");
        check(None, None, "203.0.113.5", "172.17.0.1");
        check(None, None, "192.168.0.1", "172.17.0.1");
    }

    #[test]
    fn a_network_that_is_invalid_or_has_no_host_address_is_rejected_with_a_reason() {
        check(None, Some("192.168.0.0/16"), "", "It has: 203.0.113.5/24, 172.17.0.1/16");
        for bad in ["10.0.0.0", "10.0.0.0/33", "fd00::/129", "x/8", "10.0.0.0/-1", ""] {
            check(None, Some(bad), "", "expected a network");
        }
    }
}
