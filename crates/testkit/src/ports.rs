//! Ports of this machine, for tests of programs that must be told which one to take.

#![expect(clippy::expect_used, reason = "a test that cannot go on should stop")]

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

/// Below are those that well-known programs listen at.
const FIRST_PORT: u16 = 12_000;
/// From here on the kernel gives ports to whoever connects, unless this machine says otherwise.
const FIRST_EPHEMERAL_PORT: u16 = 32_768;
const ATTEMPTS_MAX: usize = 10_000;

/// A port that nobody has, and nobody gets until this process ends: not from the kernel, which gives out higher ones, nor
/// from this function in another process. A listener at port 0 that is closed again has a port that the next connection
/// of anybody may have.
pub fn free() -> u16 {
    let given = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let end =
        given.split_whitespace().next().and_then(|low| low.parse().ok()).unwrap_or(FIRST_EPHEMERAL_PORT);
    let end = if end > FIRST_PORT { end } else { FIRST_EPHEMERAL_PORT };
    let chosen = (0..ATTEMPTS_MAX).find_map(|_| {
        let random = RandomState::new().build_hasher().finish() % u64::from(end - FIRST_PORT);
        let port = FIRST_PORT + u16::try_from(random).ok()?;
        // No name of ours: a test looks for sockets of agents that way.
        let name = SocketAddr::from_abstract_name(format!("port-{port}-of-a-test")).ok()?;
        let claim = UnixDatagram::bind_addr(&name).ok()?;
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()?;
        // It goes with the process, however that ends.
        std::mem::forget(claim);
        Some(port)
    });
    chosen.expect("a free port")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once_and_is_none_of_those_that_the_kernel_gives() {
        let mut all: Vec<u16> = (0..200).map(|_| free()).collect();
        assert!(all.iter().all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 200);
        let kernels = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        assert!(all.iter().all(|port| *port < kernels), "{all:?} {kernels}");
    }
}
