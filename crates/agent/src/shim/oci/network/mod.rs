//! Networks of containers: each has its own, connected to a bridge of the host. Containers reach the outside by the
//! address of the host; nothing reaches them but by their published ports, which listen on the loopback of the host.
//!
//! The kernel keeps all state. The interface of a container disappears with its last process. The name of the interface
//! on the host contains the address of the container, so the kernel also allocates the addresses: no name exists twice.
//! The bridge and its rules are shared by all containers of a host, and stay.

mod firewall;
mod links;
mod netlink;
mod ports;
mod uplink;

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::fd::{AsFd as _, OwnedFd},
};

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use serde::{Deserialize, Serialize};
use windlass_api::agent::shim::Port;

use self::links::{Links, VethPair};
pub(super) use self::{ports::serve_ports, uplink::Uplink};
use crate::isolation::user_map::OutsideProcess;

const BRIDGE: &str = "windlass0";
/// Networks for the bridge, the first one that overlaps with no other network of the host.
const NETWORKS: [(Ipv4Addr, u8); 6] = [
    (Ipv4Addr::new(10, 213, 0, 0), 16),
    (Ipv4Addr::new(172, 29, 0, 0), 16),
    (Ipv4Addr::new(10, 79, 0, 0), 16),
    (Ipv4Addr::new(172, 22, 0, 0), 16),
    (Ipv4Addr::new(192, 168, 208, 0), 20),
    (Ipv4Addr::new(198, 18, 0, 0), 16),
];
const CONTAINER_INTERFACE: &str = "eth0";
/// Address for the own name of a container whose network is provided by another program.
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 1);
const MTU_DEFAULT: u32 = 1500;
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

fn mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

/// Bridge of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bridge {
    name: String,
    /// Address of the host on the bridge.
    gateway: Ipv4Addr,
    prefix: u8,
    mtu: u32,
}

/// A network that the host can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    interface: String,
    network: u32,
    mask: u32,
}

/// Parses `/proc/net/route`.
fn parse_routes(table: &str) -> Vec<Route> {
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Addresses in the byte order of the network, printed as if they were numbers of the host.
        let word = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok().map(u32::from_be);
        Some(Route { interface: (*words.first()?).to_owned(), network: word(1)?, mask: word(7)? })
    };
    table.lines().skip(1).filter_map(parse).collect()
}

/// Chooses the network of the bridge: the one that it has, or one that overlaps with no other.
fn choose_network(routes: &[Route], others: &[Ipv4Addr]) -> Option<(Ipv4Addr, u8)> {
    let own = routes.iter().find(|route| route.interface == BRIDGE && route.mask != 0);
    if let Some(own) = own {
        return Some((Ipv4Addr::from(own.network), u8::try_from(own.mask.count_ones()).ok()?));
    }
    let is_free = |(network, prefix): &(Ipv4Addr, u8)| {
        let (network, mask) = (u32::from(*network), mask(*prefix));
        let overlaps = |route: &Route| {
            let common = route.mask & mask;
            route.mask != 0 && route.network & common == network & common
        };
        !routes.iter().any(overlaps) && !others.iter().any(|other| u32::from(*other) & mask == network)
    };
    NETWORKS.into_iter().find(is_free)
}

fn nameservers(resolv_conf: &str) -> Vec<Ipv4Addr> {
    let addresses = resolv_conf.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    addresses.filter_map(|address| address.trim().parse().ok()).collect()
}

/// Packet size of the interface that leads outside.
fn uplink_mtu(routes: &[Route]) -> u32 {
    let uplink = routes.iter().find(|route| route.mask == 0);
    let text =
        uplink.and_then(|route| fs::read_to_string(format!("/sys/class/net/{}/mtu", route.interface)).ok());
    text.and_then(|text| text.trim().parse().ok()).map_or(MTU_DEFAULT, |mtu: u32| mtu.min(MTU_DEFAULT))
}

fn in_context(what: &str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

impl Bridge {
    /// Address of the host on the bridge.
    pub(super) fn gateway(&self) -> Ipv4Addr {
        self.gateway
    }

    /// Finds the bridge, and creates it and its rules as far as they are missing. Blocks for a few milliseconds.
    pub(super) fn ensure() -> io::Result<Self> {
        let routes = parse_routes(&fs::read_to_string("/proc/net/route").unwrap_or_default());
        let servers = nameservers(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
        let (network, prefix) = choose_network(&routes, &servers).ok_or_else(|| {
            io::Error::other("all networks for the bridge of containers are in use on this host")
        })?;
        let gateway = Ipv4Addr::from(u32::from(network) + 1);
        let bridge = Self { name: BRIDGE.to_owned(), gateway, prefix, mtu: uplink_mtu(&routes) };
        let mut links = Links::open()?;
        let exists = routes.iter().any(|route| route.interface == BRIDGE);
        if !exists {
            links
                .ensure_bridge(&bridge.name, gateway, prefix, bridge.mtu)
                .map_err(in_context("failed to create a bridge"))?;
        }
        // Containers reach the host and each other by no other protocol.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{BRIDGE}/disable_ipv6"), "1");
        firewall::ensure(&bridge).map_err(in_context("failed to add the packet rules of containers"))?;
        let forwarding = fs::read_to_string(FORWARDING)?;
        if forwarding.trim() == "0" {
            firewall::guard_forwarding(&bridge)
                .map_err(in_context("failed to restrict the forwarding of packets"))?;
            fs::write(FORWARDING, "1").map_err(in_context("failed to enable the forwarding of packets"))?;
        }
        if !exists {
            firewall::permit_forwarding(&bridge);
        }
        Ok(bridge)
    }

    /// Tries in a temporary network namespace whether this process can create a bridge and its rules. Blocks.
    pub(super) fn probe() -> io::Result<()> {
        let attempt = || -> io::Result<()> {
            #[expect(unsafe_code, reason = "a network namespace affects sockets that are opened later")]
            // SAFETY: this thread has no sockets and ends afterwards; other threads keep their network.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            let [(network, prefix), ..] = NETWORKS;
            let gateway = Ipv4Addr::from(u32::from(network) + 1);
            let bridge = Self { name: BRIDGE.to_owned(), gateway, prefix, mtu: MTU_DEFAULT };
            Links::open()?
                .ensure_bridge(BRIDGE, gateway, prefix, MTU_DEFAULT)
                .map_err(in_context("failed to create a bridge"))?;
            firewall::ensure(&bridge).map_err(in_context("failed to add the packet rules of containers"))
        };
        std::thread::spawn(attempt).join().unwrap_or_else(|_| Err(io::Error::other("failed to run a thread")))
    }

    /// Returns whether this host has the bridge.
    pub(super) fn exists() -> bool {
        std::path::Path::new("/sys/class/net").join(BRIDGE).exists()
    }

    /// Repeats what another program may have undone since: at the start of the shim, and now and then.
    pub(super) fn refresh() -> io::Result<Self> {
        let bridge = Self::ensure()?;
        firewall::permit_forwarding(&bridge);
        Ok(bridge)
    }

    fn address(&self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from((u32::from(self.gateway) & mask(self.prefix)) + offset)
    }
}

/// Request for the network of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NetworkRequest {
    pub(super) bridge: Bridge,
    /// Ports of the container that are published.
    pub(super) publish: Vec<u16>,
}

/// Request for the network of a container of a user that is not root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UserNetworkRequest {
    pub(super) uplink: Uplink,
    /// Ports of the container that are published on the loopback of the host.
    pub(super) publish: Vec<u16>,
}

/// Network of a container.
#[derive(Debug)]
pub(super) struct ContainerNetwork {
    /// `None`: that of the calling process.
    pub(super) namespace: Option<OwnedFd>,
    pub(super) address: Ipv4Addr,
    /// Listeners on the loopback of the host, and where they lead to.
    pub(super) listeners: Vec<(TcpListener, SocketAddr)>,
}

impl ContainerNetwork {
    /// Creates the network namespace of a container and connects it to the bridge. The calling process must have one
    /// thread; it remains in its own namespace.
    pub(super) fn create(request: &NetworkRequest) -> io::Result<Self> {
        let own = fs::File::open(OWN_NAMESPACE)?;
        let mut links = Links::open()?;
        let bridge = links.index(&request.bridge.name).map_err(in_context("failed to find the bridge"))?;
        #[expect(unsafe_code, reason = "a network namespace affects sockets that are opened later")]
        // SAFETY: memory and open files stay shared as they are; only the network of this thread changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        let inside = inside_namespace();
        move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Network))?;
        let (namespace, mut inside) = inside?;
        let address = connect(&mut links, bridge, &request.bridge, &namespace)?;
        inside.set_up_loopback()?;
        let index = inside.index(CONTAINER_INTERFACE)?;
        inside.add_address(index, address, request.bridge.prefix)?;
        inside.set_up(index)?;
        inside
            .add_default_route(index, request.bridge.gateway)
            .map_err(in_context("failed to add the route of a container"))?;
        let listen = |port: &u16| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            Ok((listener, SocketAddr::from((address, *port))))
        };
        let listeners = request.publish.iter().map(listen).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { namespace: Some(namespace), address, listeners })
    }

    /// Enters the network namespace of a container, and connects it to the outside by a program of the host. The calling
    /// process must have one thread, and remains in that namespace.
    pub(super) fn enter(request: &UserNetworkRequest, outside: &mut OutsideProcess) -> io::Result<Self> {
        let listen = |port: &u16| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            Ok((listener, SocketAddr::from((Ipv4Addr::LOCALHOST, *port))))
        };
        let listeners = request.publish.iter().map(listen).collect::<io::Result<Vec<_>>>()?;
        #[expect(unsafe_code, reason = "a network namespace affects sockets that are opened later")]
        // SAFETY: memory and open files stay shared as they are; only the network of this thread changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        let (_namespace, mut inside) = inside_namespace()?;
        inside.set_up_loopback()?;
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        outside
            .start_program(request.uplink.words(pid))
            .map_err(in_context("failed to connect the container to the outside"))?;
        for address in firewall::METADATA_ADDRESSES {
            inside.block_address(address).map_err(in_context("failed to block an address"))?;
        }
        Ok(Self { namespace: None, address: OWN_ADDRESS, listeners })
    }

    /// Published ports.
    pub(super) fn ports(&self) -> io::Result<Vec<Port>> {
        let port = |(listener, target): &(TcpListener, SocketAddr)| {
            Ok(Port { host: listener.local_addr()?.port(), container: target.port() })
        };
        self.listeners.iter().map(port).collect()
    }
}

/// Prepares the namespace that the thread is in.
fn inside_namespace() -> io::Result<(OwnedFd, Links)> {
    let settings = [
        // As with Docker: a container has its own ports, and the host none below 1024 to protect there.
        ("ipv4/ip_unprivileged_port_start", "0"),
        ("ipv4/ping_group_range", "0 2147483647"),
        ("ipv6/conf/default/disable_ipv6", "1"),
    ];
    for (name, value) in settings {
        let _ = fs::write(format!("/proc/sys/net/{name}"), value);
    }
    Ok((fs::File::open(OWN_NAMESPACE)?.into(), Links::open()?))
}

/// Connects the namespace to the bridge, under the first free address.
fn connect(links: &mut Links, index: u32, bridge: &Bridge, namespace: &OwnedFd) -> io::Result<Ipv4Addr> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let first = u32::from_ne_bytes(random);
    // The network itself, the gateway and the broadcast address are taken.
    let count = !mask(bridge.prefix) - 2;
    for attempt in 0..count {
        let offset = first.wrapping_add(attempt) % count + 2;
        let address = bridge.address(offset);
        let name = format!("wl-{offset:x}");
        let (mtu, namespace) = (bridge.mtu, namespace.as_fd());
        match links.create_pair(&VethPair { name: &name, bridge: index, mtu, address, namespace }) {
            Ok(()) => return Ok(address),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(in_context("failed to create the interface of a container")(error)),
        }
    }
    Err(io::Error::other("all addresses of the bridge are in use"))
}

/// Name service of a container: that of the host, except for servers that listen on its loopback.
pub(super) fn container_resolv_conf(host: &str, upstream: &str) -> String {
    let is_local = |line: &&str| {
        let address = line.trim().strip_prefix("nameserver").map(str::trim);
        address.is_some_and(|address| {
            address
                .split('%')
                .next()
                .and_then(|address| address.parse::<std::net::IpAddr>().ok())
                .is_some_and(|address| address.is_loopback())
        })
    };
    let without_local = |text: &str| {
        text.lines().filter(|line| !is_local(line)).map(|line| format!("{line}\n")).collect::<String>()
    };
    let has_server = |text: &str| text.lines().any(|line| line.trim_start().starts_with("nameserver"));
    let kept = without_local(host);
    if has_server(&kept) {
        return kept;
    }
    // A service on the host's loopback, such as that of systemd, has the servers that it asks in a separate file.
    let upstream = without_local(upstream);
    if has_server(&upstream) { upstream } else { kept }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
";

    #[test]
    fn the_network_of_the_bridge_overlaps_with_no_other() {
        let free = parse_routes(ROUTES);
        assert_eq!(free[1].network, u32::from(Ipv4Addr::new(192, 0, 2, 0)));
        assert_eq!(choose_network(&free, &[]).unwrap().0, Ipv4Addr::new(10, 213, 0, 0));
        let server = [Ipv4Addr::new(10, 213, 7, 1)];
        assert_eq!(choose_network(&free, &server).unwrap().0, Ipv4Addr::new(172, 29, 0, 0));
        let route = |interface: &str, network: Ipv4Addr, prefix| Route {
            interface: interface.to_owned(),
            network: network.into(),
            mask: mask(prefix),
        };
        let mut taken = free.clone();
        taken.push(route("vpn", Ipv4Addr::new(10, 0, 0, 0), 8));
        taken.push(route("lan", Ipv4Addr::new(172, 29, 3, 0), 24));
        assert_eq!(choose_network(&taken, &[]).unwrap().0, Ipv4Addr::new(172, 22, 0, 0));
        taken.push(route(BRIDGE, Ipv4Addr::new(10, 79, 0, 0), 16));
        assert_eq!(choose_network(&taken, &[]), Some((Ipv4Addr::new(10, 79, 0, 0), 16)), "the one it has");
        let all: Vec<Route> = NETWORKS.map(|(network, prefix)| route("x", network, prefix)).to_vec();
        assert_eq!(choose_network(&all, &[]), None);
    }

    #[test]
    fn containers_use_no_name_service_on_the_loopback_of_the_host() {
        let stub = "# local\nnameserver 127.0.0.53\noptions edns0\n";
        let upstream = "nameserver 10.0.0.2\nsearch lan\n";
        assert_eq!(container_resolv_conf(stub, upstream), upstream);
        let mixed = "nameserver ::1\nnameserver 10.0.0.3\nsearch x\n";
        assert_eq!(container_resolv_conf(mixed, upstream), "nameserver 10.0.0.3\nsearch x\n");
        assert_eq!(container_resolv_conf(stub, ""), "# local\noptions edns0\n");
    }
}
