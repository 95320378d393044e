//! Errors of SSH connections, with messages for users.

use std::{sync::Arc, time::Duration};

use crate::HostKey;

#[derive(Clone, Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("failed to resolve {host}: {message}")]
    Lookup { host: String, message: String },
    /// The server may not dial it: it is an address of the server's own machine, or one that only that machine can
    /// reach.
    #[error("{host} cannot be reached: its address is not allowed for hosts")]
    NotAllowed { host: String },
    #[error("failed to connect to {host}")]
    Connect {
        host: String,
        #[source]
        source: Arc<std::io::Error>,
    },
    #[error("{host}: failed to {what}: no response within {} s", limit.as_secs())]
    Timeout { host: String, what: &'static str, limit: Duration },
    /// The host key differs from the pinned one. No connection is made until a person has checked it.
    #[error("the host key of {host} changed: expected {expected}, found {shown}")]
    HostKeyChanged { host: String, expected: Box<HostKey>, shown: Box<HostKey> },
    #[error("failed to log in to {host} as {user}: none of the {offered} keys was accepted")]
    Denied { host: String, user: String, offered: usize },
    #[error("{host}: failed to {what}")]
    Protocol {
        host: String,
        what: &'static str,
        #[source]
        source: Arc<russh::Error>,
    },
    #[error("failed to run `{command}` on {host}: it ended with {status}: {message}")]
    Command { host: String, command: String, status: String, message: String },
    #[error("failed to upload to {host}: expected SHA-256 {here}, found {there}")]
    ChecksumMismatch { host: String, here: String, there: String },
    /// The last attempt failed and the next one is not due yet.
    #[error("{last}; next attempt in {} s", wait.as_secs())]
    BackingOff { last: Arc<TunnelError>, wait: Duration },
}

impl TunnelError {
    /// True if a retry does not help until a person has changed something.
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

    /// True if the configuration of the host's SSH server prohibits the operation.
    pub fn is_forbidden(&self) -> bool {
        use russh::{ChannelOpenFailure::AdministrativelyProhibited, Error::ChannelOpenFailure};
        let Self::Protocol { source, .. } = self else { return false };
        matches!(**source, ChannelOpenFailure(AdministrativelyProhibited))
    }

    /// Returns the original error behind `BackingOff`.
    pub fn cause(&self) -> &Self {
        if let Self::BackingOff { last, .. } = self { last.cause() } else { self }
    }

    /// Returns the host that the error is about, as [`crate::SshDestination::name`]: it may be a jump host.
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
