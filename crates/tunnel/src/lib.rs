//! SSH connections to hosts: in process, with channels as plain streams and pinned host keys.
//!
//! One connection per host carries control ([`SshPool::control_connection`]); user traffic has a second one
//! ([`SshPool::traffic_connection`]), so that a forwarded download never delays a stop. Within a connection, one
//! stalled reader would block all others, because the SSH library delivers data in order. Therefore a separate pump
//! drains each channel, with a cap in bytes; a reader that falls further behind loses its channel.

mod channel_stream;
mod connection;
mod error;
mod exec;
mod key;
mod pool;
mod shell;
mod target;

pub use channel_stream::Stream;
pub use connection::{Connection, HostKeyEntry};
pub use error::TunnelError;
pub use exec::{CommandOutput, UploadedFile};
pub use key::{HostKey, KeyError, LoginKey};
pub use pool::{Backoff, SshPool};
pub use shell::{ShellEvent, ShellInput, ShellOutput, TerminalSize};
pub use target::{HostKeyPin, SshDestination};
