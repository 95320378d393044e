//! The data plane for services: routes, proxy, rate limits, statistics.
//!
//! One library, two users: the server carries requests to services below its own address, and a gateway does on a
//! host of its own. Both give it routes, a way to reach replicas, and somebody who knows tokens.

mod access;
pub mod acme;
mod alarm;
mod answer;
mod auth;
mod body;
mod connect;
#[cfg(feature = "testing")]
pub mod corpus;
mod cors;
mod forward;
mod headers;
mod hold;
mod limit;
pub mod metrics;
pub mod models;
pub mod node;
mod paced;
mod proxy;
mod replica;
mod reply;
pub mod route;
mod serve;
pub mod state;
pub mod stats;
mod table;
pub mod tls;
mod tunnel;
mod upstream;
pub mod way;

pub use access::{AccessLog, Lines, Record};
pub use auth::{COOKIE, COOKIE_PREFIX, Cached, Gatekeeper, IDENTITY, Trust, Verdict};
pub use body::Outgoing;
pub use connect::{Connector, Direct, Io, Stream};
pub use headers::Origin;
pub use hold::{Nobody, Wake};
pub use proxy::{Bounds, Proxy};
pub use replica::{Drained, Replica};
pub use reply::{CutShort, Reply};
pub use serve::{Door, Listening, Own, Patience, http2, serve, speaks_http2};
pub use table::{Live, Routes, Stale};
