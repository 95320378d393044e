//! SSH connections to hosts: in process, many channels as plain streams, host keys pinned.
//!
//! One connection per host carries control ([`Hosts::control`]); people's traffic has a second one
//! ([`Hosts::traffic`]), so a forwarded download never delays a stop. Within a connection one reader that stalls
//! would freeze all others, because the SSH library hands out data in order; so each channel is drained by a pump
//! of its own with a cap in bytes, and a reader that falls that far behind loses its channel.

mod connection;
mod error;
mod hosts;
mod key;
mod pump;
mod run;
mod target;

pub use connection::{Connection, Learned};
pub use error::TunnelError;
pub use hosts::{Backoff, Hosts};
pub use key::{HostKey, Key, KeyError};
pub use pump::Stream;
pub use run::{Output, Uploaded};
pub use target::{Pin, Target};
