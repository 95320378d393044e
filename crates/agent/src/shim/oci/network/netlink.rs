//! Messages to the kernel about its network: interfaces, addresses, routes (`links`) and rules (`firewall`).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with},
};

pub(super) const REQUEST: u16 = 1;
pub(super) const ACK: u16 = 4;
pub(super) const EXCLUSIVE: u16 = 0x200;
pub(super) const CREATE: u16 = 0x400;
pub(super) const APPEND: u16 = 0x800;

const HEADER_LEN: usize = 16;
const ERROR_KIND: u16 = 2;
const NESTED: u16 = 0x8000;
const REPLY_BYTES_MAX: usize = 64 << 10;

/// One message. The kernel copies its sequence number into the reply.
#[derive(Clone, Debug)]
pub(super) struct Message {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl Message {
    /// `header` is the fixed part of this kind of message.
    pub(super) fn new(kind: u16, flags: u16, header: &[u8], attributes: &[Vec<u8>]) -> Self {
        let mut body = header.to_vec();
        body.extend(attributes.iter().flatten());
        Self { kind, flags: flags | REQUEST, body }
    }

    fn encode(&self, sequence: u32, flags: u16) -> Vec<u8> {
        let length = u32::try_from(HEADER_LEN + self.body.len()).unwrap_or(u32::MAX);
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend((self.flags | flags).to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&self.body);
        pad(&mut bytes);
        bytes
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

pub(super) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    pad(&mut bytes);
    bytes
}

/// A text that ends in a zero byte.
pub(super) fn text(kind: u16, value: &str) -> Vec<u8> {
    let mut bytes = value.as_bytes().to_vec();
    bytes.push(0);
    attribute(kind, &bytes)
}

pub(super) fn nested(kind: u16, parts: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NESTED, &parts.concat())
}

/// Socket to one part of the kernel, in the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct NetlinkSocket {
    socket: OwnedFd,
    sequence: u32,
}

impl NetlinkSocket {
    /// `None` is the protocol of interfaces, addresses and routes.
    pub(super) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends messages at once and waits until the last one is acknowledged. Returns the first error.
    pub(super) fn send(&mut self, messages: &[Message], acknowledged: usize) -> io::Result<()> {
        let first = self.sequence + 1;
        let mut bytes = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            self.sequence += 1;
            bytes.extend(message.encode(self.sequence, if at == acknowledged { ACK } else { 0 }));
        }
        rustix::io::write(&self.socket, &bytes)?;
        let last = first + u32::try_from(acknowledged).unwrap_or(u32::MAX);
        let mut result = Ok(());
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        loop {
            let count = match rustix::io::read(&self.socket, &mut buffer) {
                Err(Errno::INTR) => continue,
                done => done?,
            };
            for reply in replies(&buffer[..count]) {
                if result.is_ok() && reply.error != 0 {
                    result = Err(io::Error::from_raw_os_error(reply.error));
                }
                if reply.sequence == last {
                    return result;
                }
            }
        }
    }

    pub(super) fn request(&mut self, message: Message) -> io::Result<()> {
        self.send(&[message], 0)
    }
}

impl AsFd for NetlinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

struct Reply {
    sequence: u32,
    /// Number of the error; 0 is an acknowledgement, or an object that was found.
    error: i32,
}

fn replies(mut bytes: &[u8]) -> Vec<Reply> {
    let mut found = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() {
        let word =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let error = match rest.first_chunk::<4>() {
            Some(code) if kind == ERROR_KIND => i32::from_ne_bytes(*code).saturating_neg(),
            _ => 0,
        };
        found.push(Reply { sequence: word(8), error });
        let length = usize::try_from(word(0)).unwrap_or(usize::MAX).max(HEADER_LEN).next_multiple_of(4);
        bytes = bytes.get(length..).unwrap_or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_and_messages_are_padded_to_four_bytes() {
        assert_eq!(attribute(3, b"ab"), [6_u16.to_ne_bytes(), 3_u16.to_ne_bytes(), *b"ab", [0, 0]].concat());
        assert_eq!(text(3, "ab").len(), 8);
        let message = Message::new(16, CREATE, &[0; 4], &[attribute(1, b"x")]);
        let bytes = message.encode(7, ACK);
        assert_eq!(bytes.len(), 28);
        assert_eq!(bytes[..4], 28_u32.to_ne_bytes());
        assert_eq!(bytes[6..8], (REQUEST | ACK | CREATE).to_ne_bytes());
    }

    #[test]
    fn errors_and_acknowledgements_are_distinguished() {
        let reply = |sequence: u32, code: i32| {
            let body = code.to_ne_bytes();
            Message { kind: ERROR_KIND, flags: 0, body: body.to_vec() }.encode(sequence, 0)
        };
        let bytes = [reply(1, -17), reply(2, 0)].concat();
        let found: Vec<_> = replies(&bytes).iter().map(|one| (one.sequence, one.error)).collect();
        assert_eq!(found, [(1, 17), (2, 0)]);
    }
}
