//! Ports of the host that a task gets for the ports of its program.

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
};

use crate::cgroup::port_rewrite::PortMap;

/// Maximum number of attempts to find a port that no other task has.
const PORT_ATTEMPTS: u32 = 100;

/// Chooses the same port if it is free, so that users find it where they expect it; else any.
pub(super) fn choose_ports(wanted: &[u16], of_others: &BTreeSet<u16>) -> io::Result<PortMap> {
    let mut map = PortMap::new();
    for &port in wanted {
        let own = if !of_others.contains(&port) && is_free(port) {
            port
        } else {
            any_free_port(|port| {
                of_others.contains(&port) || wanted.contains(&port) || map.values().any(|&p| p == port)
            })?
        };
        map.insert(port, own);
    }
    Ok(map)
}

/// Returns whether a program could listen on the port on all addresses.
fn is_free(port: u16) -> bool {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => false,
        // No IPv6 here.
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok(),
    }
}

fn any_free_port(is_taken: impl Fn(u16) -> bool) -> io::Result<u16> {
    for _ in 0..PORT_ATTEMPTS {
        let port = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port();
        if !is_taken(port) {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port found"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_is_kept_and_a_taken_one_is_replaced() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let busy = taken.local_addr().unwrap().port();
        let map = choose_ports(&[busy], &BTreeSet::new()).unwrap();
        assert_ne!(map[&busy], busy, "somebody listens there");
        drop(taken);
        assert_ne!(
            choose_ports(&[busy], &BTreeSet::from([busy])).unwrap()[&busy],
            busy,
            "another task has it"
        );
    }
}
