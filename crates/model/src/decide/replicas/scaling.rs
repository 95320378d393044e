//! Autoscaling: the desired number of replicas of a group, from measured traffic.

use std::cmp::Ordering;

use super::{ReplicaGroupView, ScalingState};
use crate::{
    config::traffic::Metric,
    time::{Span, Timestamp},
};

/// Default window of the measurement.
pub const DEFAULT_WINDOW: Span = Span::secs(60);

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingPolicy {
    pub metric: Metric,
    /// Target value of the metric per replica.
    pub target: f64,
    pub window: Span,
    pub scale_up_delay: Span,
    pub scale_down_delay: Span,
    /// Maximum number of concurrent requests per replica, if limited.
    pub max_concurrency: Option<u32>,
}

/// Traffic within a window, over all proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests that were accepted.
    pub requests: u64,
    /// Total time that requests were in flight: two requests for one second are two seconds.
    pub in_flight_us: u64,
    /// Part of that time in which they waited for a replica.
    pub waiting_us: u64,
}

/// A measurement for display, and the replicas that it requires.
struct TrafficMeasurement {
    description: String,
    replicas: u32,
}

fn measure(scaling: &ScalingPolicy, traffic: &Traffic) -> TrafficMeasurement {
    let window = (scaling.window.0 as f64).max(1.0);
    let (target, secs) = (scaling.target, scaling.window.as_secs());
    let (words, replicas) = match scaling.metric {
        Metric::Rps => {
            let rate = traffic.requests as f64 / (window / 1e6);
            (
                format!("{rate:.2} requests per second over {secs} s (target {target} per replica)"),
                (rate / target).ceil(),
            )
        }
        Metric::Concurrency => {
            let at_once = traffic.in_flight_us as f64 / window;
            (
                format!("{at_once:.2} concurrent requests over {secs} s (target {target} per replica)"),
                (at_once / target).ceil(),
            )
        }
        Metric::QueueDepth => {
            let waiting = traffic.waiting_us as f64 / window;
            let served = traffic.in_flight_us.saturating_sub(traffic.waiting_us) as f64 / window;
            // An empty queue does not show how many replicas keep it empty.
            let busy = scaling.max_concurrency.map_or(0.0, |max| (served / f64::from(max.max(1))).ceil());
            (
                format!(
                    "{waiting:.2} requests waiting (target {target} per replica) and {served:.2} in progress over {secs} s"
                ),
                (waiting / target).ceil().max(busy),
            )
        }
    };
    TrafficMeasurement { description: words, replicas: to_replica_count(replicas) }
}

/// Returns the desired number of replicas.
pub(super) fn scale(
    group: &ReplicaGroupView,
    before: ScalingState,
    now: Timestamp,
    why: &mut Vec<String>,
) -> ScalingState {
    let current = before.desired.clamp(group.min, group.max);
    let stays =
        |message: Option<String>| ScalingState { desired: current, scaled_at: before.scaled_at, message };
    let Some(scaling) = group.scaling else { return stays(None) };
    if group.replicas.iter().any(|replica| !replica.is_current) {
        return stays(Some("scaling is paused during a deployment".to_owned()));
    }
    let Some(traffic) = group.traffic else {
        return stays(Some("no request metrics received; keeping the current number of replicas".to_owned()));
    };
    let TrafficMeasurement { description: words, replicas: request } = measure(&scaling, &traffic);
    // A request waits for the first replica, however low the measured value is.
    let wakes = current == 0 && traffic.requests > 0;
    let request = request.max(u32::from(wakes)).clamp(group.min, group.max);
    let delay = match request.cmp(&current) {
        Ordering::Equal => return stays(Some(words)),
        Ordering::Greater if current == 0 => Span::ZERO,
        Ordering::Greater => scaling.scale_up_delay,
        Ordering::Less => scaling.scale_down_delay,
    };
    let ripe = before.scaled_at + delay;
    if now < ripe {
        let left = ripe.since(now).as_secs() + 1;
        return stays(Some(format!("{words}; scaling to {request} in {left} s at the earliest")));
    }
    why.push(format!("group {}: scaling from {current} to {request} replicas: {words}", group.name));
    ScalingState { desired: request, scaled_at: now, message: Some(words) }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it saturates, and is bounded after"
)]
fn to_replica_count(replicas: f64) -> u32 {
    replicas as u32
}
