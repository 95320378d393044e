//! Addresses of the host, read from the kernel directly: the C library's function is not safe in a static binary on
//! every system.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// Flags of a request for all entries.
const REQUEST_DUMP: u16 = 0x301;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Maximum number of chunks of a response; no host has this many addresses.
const CHUNKS_MAX: usize = 256;

/// Returns all addresses except those of the loopback, with their prefix lengths, in the kernel's order.
pub fn interface_addresses() -> io::Result<Vec<(IpAddr, u8)>> {
    // `None` is protocol 0: the kernel's tables of addresses and routes.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    send(&socket, &dump_request(), SendFlags::empty())?;
    let mut found = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    for _ in 0..CHUNKS_MAX {
        let (count, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if parse_chunk(&buffer[..count], &mut found)? {
            break;
        }
    }
    found.retain(|(parse_address, _)| !parse_address.is_loopback());
    Ok(found)
}

/// Returns a header and an `ifaddrmsg` for any family.
fn dump_request() -> [u8; HEADER + 8] {
    let mut bytes = [0; HEADER + 8];
    let length = u32::try_from(bytes.len()).unwrap_or_default();
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes[4..6].copy_from_slice(&RTM_GETADDR.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST_DUMP.to_ne_bytes());
    bytes[8..12].copy_from_slice(&1u32.to_ne_bytes());
    bytes
}

/// Parses one chunk of the response. Returns `true` after the last.
fn parse_chunk(mut bytes: &[u8], found: &mut Vec<(IpAddr, u8)>) -> io::Result<bool> {
    while let Some((kind, body, rest)) = split_message(bytes) {
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => return Err(io::Error::other("the kernel failed to list the network addresses")),
            RTM_NEWADDR => found.extend(parse_address(body)),
            _ => {}
        }
        bytes = rest;
    }
    Ok(false)
}

/// Splits off the first message: its kind, its body and what follows it.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok()?;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(HEADER..length)?;
    Some((kind, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Parses the address of one `ifaddrmsg`. On a point-to-point link, `IFA_ADDRESS` is the peer and `IFA_LOCAL` the own
/// address.
fn parse_address(body: &[u8]) -> Option<(IpAddr, u8)> {
    let prefix = *body.get(1)?;
    let mut attributes = body.get(8..)?;
    let mut found = None;
    while attributes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        let kind = u16::from_ne_bytes([attributes[2], attributes[3]]);
        let value = attributes.get(4..length)?;
        let ip = || -> Option<IpAddr> {
            match value.len() {
                4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?).into()),
                16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into()),
                _ => None,
            }
        };
        match kind {
            IFA_LOCAL => found = ip(),
            IFA_ADDRESS if found.is_none() => found = ip(),
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some((found?, prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn parse_with(prefix: u8, attributes: &[Vec<u8>]) -> Option<(IpAddr, u8)> {
        let mut body = vec![2, prefix, 0, 0, 1, 0, 0, 0];
        body.extend(attributes.concat());
        parse_address(&body)
    }

    #[test]
    fn netlink_address_messages_are_parsed_and_truncated_ones_skipped() {
        let (ours, peer) = (attribute(IFA_LOCAL, &[10, 4, 0, 7]), attribute(IFA_ADDRESS, &[10, 4, 0, 1]));
        let expected = Some(("10.4.0.7".parse().unwrap(), 24));
        assert_eq!(parse_with(24, &[peer.clone(), attribute(3, b"eth0\0"), ours.clone()]), expected);
        assert_eq!(parse_with(24, &[ours, peer]), expected);
        let six: Ipv6Addr = "fd00::1".parse().unwrap();
        assert_eq!(parse_with(64, &[attribute(IFA_ADDRESS, &six.octets())]), Some((six.into(), 64)));
        assert_eq!(parse_with(24, &[]), None);
        assert_eq!(parse_with(24, &[vec![200, 0, 2, 0]]), None);
        for length in 0..8 {
            assert_eq!(parse_address(&[0; 8][..length]), None);
        }
        assert_eq!(split_message(&[255; 20]), None);
    }

    #[test]
    fn interface_addresses_exclude_loopback() {
        let addresses = interface_addresses().unwrap();
        assert!(
            addresses.iter().all(|(parse_address, prefix)| !parse_address.is_loopback() && *prefix <= 128),
            "{addresses:?}"
        );
    }
}
