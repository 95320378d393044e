//! SSH connections to hosts: in process, many channels as plain streams, host keys pinned.
//!
//! One connection per host carries control ([`Hosts::control`]); people's traffic has a second one
//! ([`Hosts::traffic`]), so a forwarded download never delays a stop. Within a connection one reader that stalls
//! would freeze all others, because the SSH library hands out data in order; so each channel is drained by a pump
//! of its own with a cap in bytes, and a reader that falls that far behind loses its channel.

mod channel_stream;
mod connection;
mod error;
mod exec;
mod key;
mod pool;
mod target;

pub use channel_stream::Stream;
pub use connection::{Connection, HostKeyEntry};
pub use error::TunnelError;
pub use exec::{CommandOutput, UploadedFile};
pub use key::{HostKey, KeyError, LoginKey};
pub use pool::{Backoff, SshPool};
pub use target::{HostKeyPin, SshDestination};
