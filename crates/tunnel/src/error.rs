//! What can go wrong between us and a host, in the words a person needs.

use std::time::Duration;

use crate::HostKey;

#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("connect to {host}")]
    Connect {
        host: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{what} on {host}: no answer within {} s", limit.as_secs())]
    Timeout { host: String, what: &'static str, limit: Duration },
    /// The host proves to be another one than it was. Nobody goes on before a person has looked.
    #[error("the host key of {host} changed: expected {expected}, it shows {shown}")]
    HostKeyChanged { host: String, expected: Box<HostKey>, shown: Box<HostKey> },
    #[error("log in to {host} as {user}: none of the {offered} keys is accepted")]
    Denied { host: String, user: String, offered: usize },
    #[error("{what} on {host}")]
    Protocol {
        host: String,
        what: &'static str,
        #[source]
        source: russh::Error,
    },
    #[error("run `{command}` on {host}: it ended with {status}: {said}")]
    Command { host: String, command: String, status: String, said: String },
    #[error("upload to {host}: the copy there has SHA-256 {there}, not {here}")]
    Damaged { host: String, here: String, there: String },
    /// The last attempt failed and the next one is not due yet.
    #[error("connect to {host}: {last}; the next try is in {} s", wait.as_secs())]
    Waiting { host: String, last: String, wait: Duration },
}

impl TunnelError {
    /// Trying again will not help before a person changed something.
    pub fn is_final(&self) -> bool {
        match self {
            Self::HostKeyChanged { .. } | Self::Denied { .. } => true,
            Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Protocol { .. }
            | Self::Command { .. }
            | Self::Damaged { .. }
            | Self::Waiting { .. } => false,
        }
    }
}
