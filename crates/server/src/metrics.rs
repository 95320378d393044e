//! Counters of the server itself, for `GET /metrics`.
//!
//! Labels are operation ids and statuses: both are closed sets, so the number of series is bounded. The usage of
//! running jobs is added by `job_metrics::prometheus`, which has its own bound.

use std::{fmt::Write as _, sync::OnceLock, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use windlass_engine::status::{Monitor, Snapshot};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    operation: &'static str,
    status: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeletedLabels {
    kind: &'static str,
}

/// A series of the pipelines: name, kind, help text, and the function that reads its value.
type PipelineSeries = (&'static str, &'static str, &'static str, fn(&Snapshot) -> f64);

const PIPELINE_SERIES: &[PipelineSeries] = &[
    ("queued", "gauge", "Rows claimed and waiting for a worker", |s| s.queued as f64),
    ("in_work", "gauge", "Rows in progress", |s| s.in_work as f64),
    ("oldest_seconds", "gauge", "Age of the oldest claim", |s| {
        s.oldest_age.unwrap_or_default().as_secs_f64()
    }),
    ("applied_last_minute", "gauge", "Passes applied during the last minute", |s| {
        s.applied_last_minute as f64
    }),
    ("claimed", "counter", "Rows claimed", |s| s.totals.claimed as f64),
    ("applied", "counter", "Passes applied", |s| s.totals.applied as f64),
    ("stale", "counter", "Passes whose row was no longer held when they wrote", |s| s.totals.stale as f64),
    ("reset", "counter", "Rows released because a related row was busy", |s| s.totals.reset as f64),
    ("lost", "counter", "Leases that expired while their row was queued or in progress", |s| {
        s.totals.lost as f64
    }),
    ("errors", "counter", "Passes that failed", |s| s.totals.errors as f64),
    ("store_errors", "counter", "Failed database calls", |s| s.totals.store_errors as f64),
];

#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    answers: Family<ResponseLabels, Counter>,
    seconds: Family<OperationLabels, Histogram, fn() -> Histogram>,
    connections: Gauge,
    deleted: Family<DeletedLabels, Counter>,
    /// Monitor of the pipelines, once they run.
    pipelines: OnceLock<Monitor>,
}

fn latency_histogram() -> Histogram {
    Histogram::new([0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0])
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("windlass");
        let answers = Family::<ResponseLabels, Counter>::default();
        let seconds =
            Family::<OperationLabels, Histogram, fn() -> Histogram>::new_with_constructor(latency_histogram);
        let connections = Gauge::default();
        registry.register("http_requests", "Requests answered", answers.clone());
        registry.register("http_request_seconds", "Time to answer a request", seconds.clone());
        registry.register("http_connections", "Open connections", connections.clone());
        let deleted = Family::<DeletedLabels, Counter>::default();
        registry.register("deleted", "Expired events, runs and uploads that were deleted", deleted.clone());
        // A counter that exists from the start has a rate; one that appears with its first value has none.
        for kind in ["events", "runs", "uploads"] {
            drop(deleted.get_or_create(&DeletedLabels { kind }));
        }
        Self { registry, answers, seconds, connections, deleted, pipelines: OnceLock::new() }
    }

    pub fn answered(&self, operation: &'static str, status: u16, took: Duration) {
        self.answers.get_or_create(&ResponseLabels { operation, status: status.into() }).inc();
        self.seconds.get_or_create(&OperationLabels { operation }).observe(took.as_secs_f64());
    }

    /// Counts rows of a kind that retention deleted.
    pub fn deleted(&self, kind: &'static str, number: usize) {
        self.deleted.get_or_create(&DeletedLabels { kind }).inc_by(number as u64);
    }

    /// Sets the source of pipeline metrics. Later calls have no effect.
    pub fn watch(&self, pipelines: Monitor) {
        let _ = self.pipelines.set(pipelines);
    }

    /// Snapshots of all pipelines; empty before they run.
    pub fn pipelines(&self) -> Vec<Snapshot> {
        self.pipelines.get().map(Monitor::snapshots).unwrap_or_default()
    }

    pub fn connected(&self) {
        self.connections.inc();
    }

    pub fn disconnected(&self) {
        self.connections.dec();
    }

    /// Renders the Prometheus text, with `more` appended.
    pub fn text(&self, more: &str) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
        // The engine holds the counters of the pipelines; one snapshot of them is rendered here.
        let end = "# EOF\n";
        if out.ends_with(end) {
            out.truncate(out.len() - end.len());
        }
        for (name, kind, help, read) in PIPELINE_SERIES {
            let _ = writeln!(
                out,
                "# HELP windlass_pipeline_{name} {help}.\n# TYPE windlass_pipeline_{name} {kind}"
            );
            let total = if *kind == "counter" { "_total" } else { "" };
            for one in self.pipelines() {
                let _ = writeln!(
                    out,
                    "windlass_pipeline_{name}{total}{{pipeline=\"{}\"}} {}",
                    one.pipeline,
                    read(&one)
                );
            }
        }
        out.push_str(more);
        out.push_str(end);
        out
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
