//! Name resolution, TCP connections and TLS.
//!
//! Works in a static binary, which cannot load the C library's name service.

mod allowed_addresses;
mod endpoint;
mod resolver;
mod server_url;
mod tls_roots;

pub use allowed_addresses::{AddressError, AllowedAddresses, Network, NetworkError};
pub use endpoint::{DialError, Endpoint, Io, Stream, connect, connect_first};
pub use resolver::{LookupError, lookup};
pub use server_url::{ServerUrl, ServerUrlError};
pub use tls_roots::{ClientIdentity, TlsRoots, TlsRootsError, system_certificates};
