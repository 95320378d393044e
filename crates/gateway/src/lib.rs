//! Data plane for services: routes, proxy, rate limits, statistics.
//!
//! One library with two users: the server, which proxies requests to services below its own address, and the gateway,
//! which does so on a separate host. Both provide routes, a connector to replicas, and a gatekeeper for tokens.

mod access;
pub mod acme;
mod auth;
mod body;
mod connect;
#[cfg(feature = "testing")]
pub mod corpus;
mod cors;
mod error_response;
mod forward;
pub mod gateway_config;
mod headers;
mod lazy_timer;
pub mod metrics;
pub mod models;
pub mod node;
mod proxy;
mod rate_limit;
mod replica;
mod response_body;
pub mod route;
pub mod route_cache_file;
mod route_table;
mod scale_from_zero;
mod serve;
pub mod stats;
pub mod tls;
mod upgrade;
mod upstream;
mod write_timeout;

pub use access::{AccessLog, AccessRecord, TracingAccessLog};
pub use auth::{
    COOKIE_PREFIXES, CachingGatekeeper, Gatekeeper, IDENTITY_HEADER, SESSION_COOKIE, TokenCacheConfig,
    Verdict,
};
pub use body::RequestBody;
pub use connect::{Connector, DirectConnector, Io, Stream};
pub use headers::ClientConnection;
pub use proxy::{Proxy, ProxyLimits};
pub use replica::{DrainOutcome, Replica};
pub use response_body::{ResponseBody, ResponseTruncated};
pub use route_table::{Routes, ServiceState, StaleGeneration};
pub use scale_from_zero::{NoWaker, ServiceWaker};
pub use serve::{
    ListenerConfig, ListenerLimits, OwnHostname, RequestRouting, detect_http2, http2_builder, serve,
};
