//! Ports for tests of programs that need a port number in advance.

#![expect(clippy::expect_used, reason = "a test that cannot go on should stop")]

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

/// Lower ports are used by well-known programs.
const FIRST_PORT: u16 = 12_000;
/// Start of the kernel's ephemeral ports, unless this machine is configured otherwise.
const FIRST_EPHEMERAL_PORT: u16 = 32_768;
const ATTEMPTS_MAX: usize = 10_000;

/// Returns a port that no other process uses until this process ends: the kernel assigns higher ports, and other
/// processes with this function skip it. In contrast, the port of a closed listener on port 0 may be assigned to the
/// next connection of any process.
pub fn reserve_free_port() -> u16 {
    let given = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let end =
        given.split_whitespace().next().and_then(|low| low.parse().ok()).unwrap_or(FIRST_EPHEMERAL_PORT);
    let end = if end > FIRST_PORT { end } else { FIRST_EPHEMERAL_PORT };
    let chosen = (0..ATTEMPTS_MAX).find_map(|_| {
        let random = RandomState::new().build_hasher().finish() % u64::from(end - FIRST_PORT);
        let port = FIRST_PORT + u16::try_from(random).ok()?;
        // No windlass name: a test finds the sockets of agents by their name.
        let name = SocketAddr::from_abstract_name(format!("port-{port}-of-a-test")).ok()?;
        let claim = UnixDatagram::bind_addr(&name).ok()?;
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()?;
        // Released when the process ends for any reason.
        std::mem::forget(claim);
        Some(port)
    });
    chosen.expect("a free port")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_unique_and_below_the_ephemeral_range() {
        let mut all: Vec<u16> = (0..200).map(|_| reserve_free_port()).collect();
        assert!(all.iter().all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 200);
        let kernels = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        assert!(all.iter().all(|port| *port < kernels), "{all:?} {kernels}");
    }
}
