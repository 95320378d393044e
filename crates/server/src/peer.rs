//! The other end of a connection.

use std::net::IpAddr;

/// Address of the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Marker of an encrypted connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncryptedConnection;
