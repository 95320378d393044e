//! Request metrics of each service through this process, as text for Prometheus.
//!
//! Project and run names are labels. The number of series is bounded: only services with a current route have any, up
//! to a maximum number of services.

use std::{fmt::Write as _, sync::Arc};

use crate::{
    route_table::{Routes, ServiceState},
    stats::{BUCKETS_US, StatsSnapshot},
};

/// Maximum number of services with series.
const SERVICES_MAX: usize = 1_000;

/// Name, type, help and the function that reads the value.
type Series = (&'static str, &'static str, &'static str, fn(&ServiceState, &StatsSnapshot) -> u64);

const SERIES: &[Series] = &[
    ("in_flight", "gauge", "Requests in flight", |_, read| read.in_flight),
    ("held", "gauge", "Requests waiting for a replica", |_, read| read.held),
    ("replicas", "gauge", "Replicas that receive requests", |live, _| live.replicas().len() as u64),
    ("received_bytes_total", "counter", "Bytes of request bodies received", |_, read| read.bytes_in),
    ("sent_bytes_total", "counter", "Bytes of response bodies sent", |_, read| read.bytes_out),
];

pub fn render(routes: &Routes) -> String {
    let mut services: Vec<Arc<ServiceState>> = routes.services();
    services.sort_by(|a, b| service_key(a).cmp(&service_key(b)));
    services.truncate(SERVICES_MAX);
    let read: Vec<(String, Arc<ServiceState>, StatsSnapshot)> = services
        .into_iter()
        .map(|live| {
            let (project, run) = service_key(&live);
            let read = live.stats().read();
            // Both consist of characters that need no escaping.
            (format!("project=\"{project}\",run=\"{run}\""), live, read)
        })
        .collect();
    // Writing to a string cannot fail.
    let mut out = String::new();
    let head = |out: &mut String, name: &str, kind: &str, help: &str| {
        let family = name.strip_suffix("_total").unwrap_or(name);
        let _ = writeln!(
            out,
            "# HELP windlass_service_{family} {help}.\n# TYPE windlass_service_{family} {kind}"
        );
    };
    for (name, kind, help, value) in SERIES {
        head(&mut out, name, kind, help);
        for (labels, live, read) in &read {
            let _ = writeln!(out, "windlass_service_{name}{{{labels}}} {}", value(live, read));
        }
    }
    head(&mut out, "requests_total", "counter", "Requests answered, by status class");
    for (labels, _, read) in &read {
        for (class, count) in (1..).zip(read.classes) {
            let _ = writeln!(out, "windlass_service_requests_total{{{labels},class=\"{class}xx\"}} {count}");
        }
    }
    head(&mut out, "request_seconds", "histogram", "Time until the complete response was sent");
    for (labels, _, read) in &read {
        write_histogram(&mut out, labels, read);
    }
    out
}

fn service_key(live: &ServiceState) -> (&str, &str) {
    (&live.service().project, &live.service().run)
}

fn write_histogram(out: &mut String, labels: &str, read: &StatsSnapshot) {
    let name = "windlass_service_request_seconds";
    let mut sum = 0;
    for (end, count) in BUCKETS_US.iter().zip(read.buckets) {
        sum += count;
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{}\"}} {sum}", *end as f64 / 1e6);
    }
    let all: u64 = read.buckets.iter().sum();
    let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {all}");
    let _ = writeln!(out, "{name}_sum{{{labels}}} {}", read.latency_us as f64 / 1e6);
    let _ = writeln!(out, "{name}_count{{{labels}}} {all}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{RouteSnapshot, Service};

    #[test]
    fn metrics_have_a_series_and_a_full_histogram_per_service() {
        let routes = Routes::default();
        let services = vec![Service::new("main", "b"), Service::new("main", "a")];
        routes.replace(RouteSnapshot { generation: 1, services }).unwrap();
        let text = render(&routes);
        let first = text.find("windlass_service_replicas{project=\"main\",run=\"a\"} 0").unwrap();
        assert!(first < text.find("windlass_service_replicas{project=\"main\",run=\"b\"} 0").unwrap());
        let buckets = text.lines().filter(|line| line.contains("_bucket{project=\"main\",run=\"a\""));
        assert_eq!(buckets.count(), BUCKETS_US.len() + 1);
        assert!(
            text.contains("windlass_service_requests_total{project=\"main\",run=\"a\",class=\"5xx\"} 0\n")
        );
    }
}
