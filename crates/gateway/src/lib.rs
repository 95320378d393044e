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

pub use access::{AccessLog, AccessRecord, TracingAccessLog};
pub use auth::{
    COOKIE_PREFIX, CachingGatekeeper, Gatekeeper, IDENTITY_HEADER, SESSION_COOKIE, TokenCacheConfig, Verdict,
};
pub use body::RequestBody;
pub use connect::{Connector, DirectConnector, Io, Stream};
pub use headers::ClientConnection;
pub use hold::{NoWaker, ServiceWaker};
pub use proxy::{Proxy, ProxyLimits};
pub use replica::{DrainOutcome, Replica};
pub use reply::{ResponseBody, ResponseTruncated};
pub use serve::{ListenerConfig, ListenerLimits, OwnHostname, RequestRouting, detect_http2, http2, serve};
pub use table::{Routes, ServiceState, StaleGeneration};
