//! Where a host is and how to log in there.

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
    /// The host to go through.
    pub via: Option<Box<SshDestination>>,
}

/// Which host key is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKeyPin {
    Known(HostKey),
    /// Nobody has been there before: whatever it shows is taken and reported, to be kept.
    FirstUse,
}

impl SshDestination {
    /// The name its host key is kept under, as in `known_hosts`: `HOST`, or `[HOST]:PORT` where the port is not 22.
    pub fn known_hosts_name(&self) -> String {
        Self::known_hosts_name_for(&self.host, self.port)
    }

    /// That name, of a host and a port.
    pub fn known_hosts_name_for(host: &str, port: u16) -> String {
        if port == SSH_PORT { host.to_owned() } else { format!("[{host}]:{port}") }
    }

    /// `USER@HOST:PORT`, for people.
    pub fn name(&self) -> String {
        format!("{}@{}:{}", self.user, self.host, self.port)
    }
}
