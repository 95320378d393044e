//! Encoding of the SFTP protocol, version 3: requests and responses.

/// Maximum size of a packet; a larger one ends the session, as with sshd.
pub(super) const PACKET_MAX: usize = 256 * 1024;
/// Maximum number of data bytes in one response, leaving space for its head.
pub(super) const READ_MAX: usize = PACKET_MAX - 1024;

pub(super) mod kind {
    pub(in super::super) const INIT: u8 = 1;
    pub(in super::super) const VERSION: u8 = 2;
    pub(in super::super) const OPEN: u8 = 3;
    pub(in super::super) const CLOSE: u8 = 4;
    pub(in super::super) const READ: u8 = 5;
    pub(in super::super) const WRITE: u8 = 6;
    pub(in super::super) const LSTAT: u8 = 7;
    pub(in super::super) const FSTAT: u8 = 8;
    pub(in super::super) const SETSTAT: u8 = 9;
    pub(in super::super) const FSETSTAT: u8 = 10;
    pub(in super::super) const OPENDIR: u8 = 11;
    pub(in super::super) const READDIR: u8 = 12;
    pub(in super::super) const REMOVE: u8 = 13;
    pub(in super::super) const MKDIR: u8 = 14;
    pub(in super::super) const RMDIR: u8 = 15;
    pub(in super::super) const REALPATH: u8 = 16;
    pub(in super::super) const STAT: u8 = 17;
    pub(in super::super) const RENAME: u8 = 18;
    pub(in super::super) const READLINK: u8 = 19;
    pub(in super::super) const SYMLINK: u8 = 20;
    pub(in super::super) const STATUS: u8 = 101;
    pub(in super::super) const HANDLE: u8 = 102;
    pub(in super::super) const DATA: u8 = 103;
    pub(in super::super) const NAME: u8 = 104;
    pub(in super::super) const ATTRS: u8 = 105;
    pub(in super::super) const EXTENDED: u8 = 200;
    pub(in super::super) const EXTENDED_REPLY: u8 = 201;
}

/// Status of a request, with its number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok = 0,
    Eof = 1,
    NoSuchFile = 2,
    PermissionDenied = 3,
    Failure = 4,
    BadMessage = 5,
    Unsupported = 8,
}

const HAS_SIZE: u32 = 1;
const HAS_OWNER: u32 = 2;
const HAS_MODE: u32 = 4;
const HAS_TIMES: u32 = 8;
const HAS_EXTENDED: u32 = 0x8000_0000;

/// Attributes of a file, as returned or as requested for a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attrs {
    pub(super) size: Option<u64>,
    pub(super) owner: Option<(u32, u32)>,
    pub(super) mode: Option<u32>,
    /// Times of access and of modification, in seconds.
    pub(super) times: Option<(u32, u32)>,
}

/// Error for a packet that ends too early.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TruncatedPacket;

pub(super) struct PacketReader<'a>(pub(super) &'a [u8]);

impl<'a> PacketReader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], TruncatedPacket> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(TruncatedPacket)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], TruncatedPacket> {
        self.bytes(N)?.try_into().map_err(|_| TruncatedPacket)
    }

    pub(super) fn u8(&mut self) -> Result<u8, TruncatedPacket> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, TruncatedPacket> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, TruncatedPacket> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(super) fn string(&mut self) -> Result<&'a [u8], TruncatedPacket> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).map_err(|_| TruncatedPacket)?)
    }

    pub(super) fn attrs(&mut self) -> Result<Attrs, TruncatedPacket> {
        let flags = self.u32()?;
        let mut attrs = Attrs::default();
        if flags & HAS_SIZE != 0 {
            attrs.size = Some(self.u64()?);
        }
        if flags & HAS_OWNER != 0 {
            attrs.owner = Some((self.u32()?, self.u32()?));
        }
        if flags & HAS_MODE != 0 {
            attrs.mode = Some(self.u32()?);
        }
        if flags & HAS_TIMES != 0 {
            attrs.times = Some((self.u32()?, self.u32()?));
        }
        if flags & HAS_EXTENDED != 0 {
            for _ in 0..self.u32()? {
                self.string()?;
                self.string()?;
            }
        }
        Ok(attrs)
    }
}

/// One response, with its length in front.
pub(super) struct PacketWriter(Vec<u8>);

impl PacketWriter {
    pub(super) fn new(kind: u8, id: u32) -> Self {
        Self(vec![0, 0, 0, 0, kind]).u32(id)
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn string(mut self, bytes: &[u8]) -> Self {
        self.0.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes());
        self.0.extend(bytes);
        self
    }

    pub(super) fn attrs(self, attrs: &Attrs) -> Self {
        let flags = attrs.size.map_or(0, |_| HAS_SIZE)
            | attrs.owner.map_or(0, |_| HAS_OWNER)
            | attrs.mode.map_or(0, |_| HAS_MODE)
            | attrs.times.map_or(0, |_| HAS_TIMES);
        let mut writer = self.u32(flags);
        if let Some(size) = attrs.size {
            writer = writer.u64(size);
        }
        if let Some((one, two)) = attrs.owner {
            writer = writer.u32(one).u32(two);
        }
        if let Some(mode) = attrs.mode {
            writer = writer.u32(mode);
        }
        if let Some((one, two)) = attrs.times {
            writer = writer.u32(one).u32(two);
        }
        writer
    }

    /// Appends a string of up to `count` bytes, filled by the caller; unused space is removed.
    pub(super) fn filled<E>(
        mut self,
        count: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<(Self, usize), E> {
        let head = self.0.len();
        self.0.resize(head + 4 + count, 0);
        let got = fill(&mut self.0[head + 4..])?.min(count);
        self.0.truncate(head + 4 + got);
        self.0[head..head + 4].copy_from_slice(&u32::try_from(got).unwrap_or(u32::MAX).to_be_bytes());
        Ok((self, got))
    }

    pub(super) fn done(mut self) -> Vec<u8> {
        let count = u32::try_from(self.0.len() - 4).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&count.to_be_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_round_trip_through_a_packet() {
        let some = Attrs {
            size: Some(1 << 40),
            owner: Some((1000, 44)),
            mode: Some(0o100_644),
            times: Some((1, 2)),
        };
        for attrs in [some, Attrs::default(), Attrs { owner: None, ..some }, Attrs { times: None, ..some }] {
            let written = PacketWriter::new(kind::ATTRS, 7).attrs(&attrs).done();
            assert_eq!(PacketReader(&written[9..]).attrs(), Ok(attrs));
        }
    }

    #[test]
    fn truncated_packets_are_detected() {
        assert_eq!(PacketReader(&[0, 0, 0, 9, 1, 2]).string(), Err(TruncatedPacket));
        assert_eq!(PacketReader(&[0, 0, 0]).u32(), Err(TruncatedPacket));
        assert_eq!(PacketReader(&[0xff, 0xff, 0xff, 0xff]).attrs(), Err(TruncatedPacket));
        assert_eq!(PacketReader(&0x8000_0000u32.to_be_bytes()).attrs(), Err(TruncatedPacket));
    }
}
