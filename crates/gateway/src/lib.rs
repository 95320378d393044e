//! Data plane for services: routes, proxy, rate limits, statistics.
//!
//! One library with two users: the server, which proxies requests to services below its own address, and the gateway,
//! which does so on a separate host. Both provide routes, a connector to replicas, and a gatekeeper for tokens.

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
