//! One record for each request, handed to whoever writes it down.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::{Method, StatusCode, Uri, Version};

/// A request that is over. Carries no credential: neither header nor body. The query may contain one, so who
/// writes records down takes the path only.
#[derive(Clone, Debug)]
pub struct AccessRecord {
    /// `project/run`.
    pub service: Arc<str>,
    /// Who answered; absent when it was the proxy itself.
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
    /// Replicas asked.
    pub tries: u32,
    /// The answer ended before it was whole.
    pub cut: bool,
}

/// Where records go. Called at the end of each request, on the thread that served it: it must not block.
pub trait AccessLog: Send + Sync + 'static {
    fn record(&self, record: AccessRecord);
}

/// One line of the process's log for each request. Never the query: it may hold somebody's credential.
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
            tries = record.tries,
            cut = record.cut,
            "request"
        );
    }
}
