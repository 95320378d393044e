//! What can go wrong between us and a host, in the words a person needs.

use std::{sync::Arc, time::Duration};

use crate::HostKey;

#[derive(Clone, Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("look up the address of {host}: {said}")]
    Lookup { host: String, said: String },
    /// The server may not dial it: it is an address of the server's own machine, or one that only that machine has.
    #[error("{host} cannot be reached: its address is not allowed for hosts")]
    NotAllowed { host: String },
    #[error("connect to {host}")]
    Connect {
        host: String,
        #[source]
        source: Arc<std::io::Error>,
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
        source: Arc<russh::Error>,
    },
    #[error("run `{command}` on {host}: it ended with {status}: {said}")]
    Command { host: String, command: String, status: String, said: String },
    #[error("upload to {host}: the copy there has SHA-256 {there}, not {here}")]
    ChecksumMismatch { host: String, here: String, there: String },
    /// The last attempt failed and the next one is not due yet.
    #[error("{last}; the next try is in {} s", wait.as_secs())]
    BackingOff { last: Arc<TunnelError>, wait: Duration },
}

impl TunnelError {
    /// Trying again will not help before a person changed something.
    pub fn is_final(&self) -> bool {
        match self {
            Self::HostKeyChanged { .. } | Self::Denied { .. } | Self::NotAllowed { .. } => true,
            Self::BackingOff { last, .. } => last.is_final(),
            Self::Lookup { .. }
            | Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Protocol { .. }
            | Self::Command { .. }
            | Self::ChecksumMismatch { .. } => false,
        }
    }

    /// The host's SSH server is told not to do this.
    pub fn is_forbidden(&self) -> bool {
        use russh::{ChannelOpenFailure::AdministrativelyProhibited, Error::ChannelOpenFailure};
        let Self::Protocol { source, .. } = self else { return false };
        matches!(**source, ChannelOpenFailure(AdministrativelyProhibited))
    }

    /// What happened, where this only says that it is too early to try again.
    pub fn cause(&self) -> &Self {
        if let Self::BackingOff { last, .. } = self { last.cause() } else { self }
    }

    /// Which host it is about, as [`crate::Target::name`] says: on the way to a host it may be another one.
    pub fn host(&self) -> &str {
        match self {
            Self::Lookup { host, .. }
            | Self::NotAllowed { host }
            | Self::Connect { host, .. }
            | Self::Timeout { host, .. }
            | Self::HostKeyChanged { host, .. }
            | Self::Denied { host, .. }
            | Self::Protocol { host, .. }
            | Self::Command { host, .. }
            | Self::ChecksumMismatch { host, .. } => host,
            Self::BackingOff { last, .. } => last.host(),
        }
    }
}
