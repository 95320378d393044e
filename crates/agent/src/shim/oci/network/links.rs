//! Interfaces, addresses and routes.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
};

use super::netlink::{ACK, CREATE, EXCLUSIVE, Message, NetlinkSocket, attribute, nested, text};

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;

const FLAG_UP: u32 = 1;
const FAMILY_IPV4: u8 = 2;
const MAIN_TABLE: u8 = 254;
const ROUTE_BY_BOOT: u8 = 3;
const ROUTE_UNICAST: u8 = 1;
const ROUTE_UNREACHABLE: u8 = 7;

const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_MTU: u16 = 4;
const LINK_MASTER: u16 = 10;
const LINK_INFO: u16 = 18;
const LINK_NAMESPACE: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const INFO_PORT_KIND: u16 = 4;
const INFO_PORT_DATA: u16 = 5;
const PEER: u16 = 1;
const PORT_ISOLATED: u16 = 33;

const ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;
const ADDRESS_BROADCAST: u16 = 4;
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_INTERFACE: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;

const LOOPBACK_INDEX: u32 = 1;

/// Interfaces of the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Links(NetlinkSocket);

fn link_header(index: u32, flags: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend(index.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes
}

fn ignore_existing(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

/// Hardware address of an interface with this address: unique on the bridge, and locally administered.
fn hardware_address(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0x77, a, b, c, d]
}

/// A pair of interfaces: one on the bridge of the host, one in a container.
pub(super) struct VethPair<'a> {
    /// Name on the host.
    pub(super) name: &'a str,
    pub(super) bridge: u32,
    pub(super) mtu: u32,
    /// Address of the container.
    pub(super) address: Ipv4Addr,
    pub(super) namespace: BorrowedFd<'a>,
}

impl Links {
    pub(super) fn open() -> io::Result<Self> {
        NetlinkSocket::open(None).map(Self)
    }

    /// Returns the number of an interface.
    pub(super) fn index(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(self.0.as_fd(), name)?)
    }

    /// Creates a bridge unless it exists.
    pub(super) fn ensure_bridge(
        &mut self,
        name: &str,
        address: Ipv4Addr,
        prefix: u8,
        mtu: u32,
    ) -> io::Result<()> {
        let attributes = [
            text(LINK_NAME, name),
            attribute(LINK_MTU, &mtu.to_ne_bytes()),
            // Otherwise it changes with the interfaces on the bridge.
            attribute(LINK_ADDRESS, &hardware_address(address)),
            nested(LINK_INFO, &[text(INFO_KIND, "bridge")]),
        ];
        let create = Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link_header(0, FLAG_UP), &attributes);
        ignore_existing(self.0.request(create))?;
        let index = self.index(name)?;
        self.add_address(index, address, prefix)?;
        self.set_up(index)
    }

    /// Creates a pair of interfaces. The one on the host does not exchange packets with others on the bridge. Fails with
    /// `AlreadyExists` if the name is in use.
    pub(super) fn create_pair(&mut self, pair: &VethPair<'_>) -> io::Result<()> {
        let mtu = attribute(LINK_MTU, &pair.mtu.to_ne_bytes());
        let mut peer = link_header(0, 0);
        peer.extend(text(LINK_NAME, super::CONTAINER_INTERFACE));
        peer.extend(&mtu);
        peer.extend(attribute(LINK_ADDRESS, &hardware_address(pair.address)));
        peer.extend(attribute(LINK_NAMESPACE, &pair.namespace.as_raw_fd().to_ne_bytes()));
        let info = [text(INFO_KIND, "veth"), nested(INFO_DATA, &[attribute(PEER, &peer)])];
        let attributes = [
            text(LINK_NAME, pair.name),
            mtu,
            attribute(LINK_MASTER, &pair.bridge.to_ne_bytes()),
            nested(LINK_INFO, &info),
        ];
        self.0.request(Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link_header(0, 0), &attributes))?;
        // It carries no packet before it is isolated.
        let isolated = nested(INFO_PORT_DATA, &[attribute(PORT_ISOLATED, &[1])]);
        let info = nested(LINK_INFO, &[text(INFO_PORT_KIND, "bridge"), isolated]);
        let index = self.index(pair.name)?;
        self.0.request(Message::new(NEW_LINK, 0, &link_header(index, 0), &[info]))?;
        self.set_up(index)
    }

    pub(super) fn set_up_loopback(&mut self) -> io::Result<()> {
        self.set_up(LOOPBACK_INDEX)
    }

    pub(super) fn set_up(&mut self, index: u32) -> io::Result<()> {
        self.0.request(Message::new(NEW_LINK, ACK, &link_header(index, FLAG_UP), &[]))
    }

    /// Adds an address unless the interface has it.
    pub(super) fn add_address(&mut self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut header = vec![FAMILY_IPV4, prefix, 0, 0];
        header.extend(index.to_ne_bytes());
        let broadcast = Ipv4Addr::from(u32::from(address) | !super::mask(prefix));
        let attributes = [
            attribute(ADDRESS, &address.octets()),
            attribute(ADDRESS_LOCAL, &address.octets()),
            attribute(ADDRESS_BROADCAST, &broadcast.octets()),
        ];
        ignore_existing(self.0.request(Message::new(NEW_ADDRESS, CREATE | EXCLUSIVE, &header, &attributes)))
    }

    pub(super) fn add_default_route(&mut self, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
        let mut header = vec![FAMILY_IPV4, 0, 0, 0, MAIN_TABLE, ROUTE_BY_BOOT, 0, ROUTE_UNICAST];
        header.extend([0; 4]);
        let attributes =
            [attribute(ROUTE_GATEWAY, &gateway.octets()), attribute(ROUTE_INTERFACE, &index.to_ne_bytes())];
        self.0.request(Message::new(NEW_ROUTE, CREATE | EXCLUSIVE, &header, &attributes))
    }

    /// Makes an address unreachable.
    pub(super) fn block_address(&mut self, address: Ipv4Addr) -> io::Result<()> {
        let mut header = vec![FAMILY_IPV4, 32, 0, 0, MAIN_TABLE, ROUTE_BY_BOOT, 0, ROUTE_UNREACHABLE];
        header.extend([0; 4]);
        let attributes = [attribute(ROUTE_DESTINATION, &address.octets())];
        self.0.request(Message::new(NEW_ROUTE, CREATE | EXCLUSIVE, &header, &attributes))
    }
}
