//! Connections to others: a name becomes addresses, an address a connection, and a connection one that nobody reads along.
//!
//! All of it works in a static binary, which cannot load the C library's name service.

mod names;
mod peer;
mod place;
mod trust;

pub use names::{LookupError, lookup};
pub use peer::{DialError, Io, Peer, Stream, connect};
pub use place::{Place, PlaceError};
pub use trust::{Trust, TrustError, of_this_machine};
