//! SSH destination: address of a host and how to log in.

use crate::{HostKey, LoginKey};

const SSH_PORT: u16 = 22;

#[derive(Clone, Debug)]
pub struct SshDestination {
    /// Name or address.
    pub host: String,
    pub port: u16,
    pub user: String,
    /// Tried in order.
    pub keys: Vec<LoginKey>,
    pub pin: HostKeyPin,
    /// Jump host to connect through.
    pub via: Option<Box<SshDestination>>,
}

/// Expected host key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKeyPin {
    Known(HostKey),
    /// No key is known yet: any key is accepted and reported, to be stored.
    FirstUse,
}

impl SshDestination {
    /// Returns the name under which the host key is stored, as in `known_hosts`: `HOST`, or `[HOST]:PORT` if the port
    /// is not 22.
    pub fn known_hosts_name(&self) -> String {
        Self::known_hosts_name_for(&self.host, self.port)
    }

    /// Returns that name for a host and a port.
    pub fn known_hosts_name_for(host: &str, port: u16) -> String {
        if port == SSH_PORT { host.to_owned() } else { format!("[{host}]:{port}") }
    }

    /// Returns `USER@HOST:PORT`, for messages.
    pub fn name(&self) -> String {
        format!("{}@{}:{}", self.user, self.host, self.port)
    }
}
