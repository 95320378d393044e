//! Access records, one per request, passed to an access log.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::{Method, StatusCode, Uri, Version};

/// Completed request. Contains no credentials: neither headers nor body. The query may contain one, so an access log
/// must write the path only.
#[derive(Clone, Debug)]
pub struct AccessRecord {
    /// `project/run`.
    pub service: Arc<str>,
    /// Replica that answered; absent if the proxy itself did.
    pub replica: Option<Arc<str>>,
    pub peer: IpAddr,
    pub method: Method,
    pub uri: Uri,
    pub version: Version,
    pub status: StatusCode,
    pub began: Instant,
    pub took: Duration,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Replicas that were tried.
    pub attempts: u32,
    /// True if the response ended before it was complete.
    pub is_truncated: bool,
}

/// Receiver of records. Called at the end of each request, on the thread that served it, so it must not block.
pub trait AccessLog: Send + Sync + 'static {
    fn record(&self, record: AccessRecord);
}

/// Writes one tracing event per request. Never writes the query, which may contain a credential.
#[derive(Clone, Copy, Debug)]
pub struct TracingAccessLog;

impl AccessLog for TracingAccessLog {
    fn record(&self, record: AccessRecord) {
        tracing::info!(
            target: "windlass::access",
            service = %record.service,
            replica = record.replica.as_deref().unwrap_or("-"),
            peer = %record.peer,
            method = %record.method,
            path = record.uri.path(),
            status = record.status.as_u16(),
            took_us = u64::try_from(record.took.as_micros()).unwrap_or(u64::MAX),
            bytes_in = record.bytes_in,
            bytes_out = record.bytes_out,
            tries = record.attempts,
            cut = record.is_truncated,
            "request completed"
        );
    }
}
