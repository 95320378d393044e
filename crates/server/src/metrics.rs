//! Counters of the server itself, for `GET /metrics`.
//!
//! Labels are operation ids and statuses: both are closed sets, so the number of series is bounded.
//! Nothing a user names ever becomes a label.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    operation: &'static str,
    status: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    operation: &'static str,
}

#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    answers: Family<Answer, Counter>,
    seconds: Family<Asked, Histogram, fn() -> Histogram>,
    connections: Gauge,
}

fn seconds() -> Histogram {
    Histogram::new([0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0])
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("windlass");
        let answers = Family::<Answer, Counter>::default();
        let seconds = Family::<Asked, Histogram, fn() -> Histogram>::new_with_constructor(seconds);
        let connections = Gauge::default();
        registry.register("http_requests", "Requests answered", answers.clone());
        registry.register("http_request_seconds", "Time to answer", seconds.clone());
        registry.register("http_connections", "Open connections", connections.clone());
        Self { registry, answers, seconds, connections }
    }

    pub fn answered(&self, operation: &'static str, status: u16, took: Duration) {
        self.answers.get_or_create(&Answer { operation, status: status.into() }).inc();
        self.seconds.get_or_create(&Asked { operation }).observe(took.as_secs_f64());
    }

    pub fn connected(&self) {
        self.connections.inc();
    }

    pub fn disconnected(&self) {
        self.connections.dec();
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
        out
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
