//! Text about a service as a whole: its deployment and its number of replicas. Pure.

use windlass_api::runs::{Deployment, Run};
use windlass_model::time::Timestamp;

use crate::output::format::{span, timestamp};

/// The newest deployment, once the server has processed it.
pub(crate) fn deployment(run: &Run) -> Option<&Deployment> {
    run.deployment.as_ref().filter(|one| one.num == run.deployment_num)
}

/// Describes the newest deployment. The first deployment is described by its replicas.
pub(crate) fn format_deployment(run: &Run) -> Option<String> {
    let one = deployment(run).filter(|one| one.num > 0)?;
    let num = one.num;
    let took = format!("{} of {} new replicas ready, {} old remaining", one.ready, one.wanted, one.old);
    let waits = one.message.as_deref().map(|what| format!("; {what}")).unwrap_or_default();
    let words = match (one.state.as_str(), &one.rolled_back) {
        ("asleep", _) => return None,
        ("complete", Some(undone)) => {
            format!("deployment {} was rolled back: {}", undone.num, undone.message)
        }
        ("complete", None) => format!("deployment {num} is complete"),
        ("failed", _) => {
            format!(
                "deployment {num} failed: {}; {took}",
                one.message.as_deref().unwrap_or("no reason reported")
            )
        }
        (_, Some(undone)) => {
            format!("deployment {} is being rolled back: {}; {took}{waits}", undone.num, undone.message)
        }
        (_, None) => format!("deployment {num}: {took}{waits}"),
    };
    Some(words)
}

/// URL of a service. `server` is the URL of the server, which acts as the gateway if there is none.
pub(crate) fn url(run: &Run, server: &str) -> Option<String> {
    let service = run.service.as_ref()?.value().ok()?;
    let url = service["url"].as_str()?;
    Some(if url.starts_with('/') { format!("{}{url}", server.trim_end_matches('/')) } else { url.to_owned() })
}

/// URL of a service, with its authentication.
pub(crate) fn format_address(run: &Run, server: &str) -> Option<String> {
    let url = url(run, server)?;
    let spec = run.run_spec.value().unwrap_or_default();
    let is_open = spec["configuration"]["auth"] == false;
    let header = if is_open { "" } else { "-H \"Authorization: Bearer $(windlass login --show-token)\" " };
    Some(format!("{url}   (curl {header}{url})"))
}

/// Next start of a run with a schedule.
pub(crate) fn next_start(run: &Run, now: Timestamp) -> Option<String> {
    let next = run.next_triggered_at.filter(|_| run.status == "pending")?;
    Some(format!("{} (in {})", timestamp(next), span(next.since(now))))
}

/// Returns whether the deployment is complete.
pub(crate) fn is_complete(run: &Run) -> bool {
    deployment(run).is_some_and(|one| one.state == "complete")
}

/// Returns whether the service has no replicas because it receives no requests.
pub(crate) fn is_scaled_to_zero(run: &Run) -> bool {
    run.status == "pending" && !run.scaling.is_empty() && run.scaling.iter().all(|group| group.desired == 0)
}

/// Desired number of replicas of each group, with the measured load.
pub(crate) fn format_scaling(run: &Run) -> Vec<String> {
    let line = |group: &windlass_api::runs::GroupScaling| {
        let message = group.message.as_ref()?;
        Some(format!(
            "group {}: {} desired; {message}",
            group.group,
            crate::output::format::count(group.desired as usize, "replica")
        ))
    };
    run.scaling.iter().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use windlass_api::runs::Run;

    use super::*;

    fn run(num: i64, deployment: Value) -> Run {
        let time = "2026-11-20T09:00:00Z";
        let mut run = json!({
            "id": uuid::Uuid::nil(), "project_name": "main", "user": "admin", "submitted_at": time,
            "last_processed_at": time, "status": "running", "run_spec": {"run_name": "page"}, "jobs": [],
            "deployment_num": num,
        });
        run["deployment"] = deployment;
        serde_json::from_value(run).unwrap()
    }

    #[test]
    fn deployment_status_is_described_from_rollout_to_end() {
        let reported = |state: &str, message: Value, rolled_back: Value| {
            format_deployment(&run(
                2,
                json!({"num": 2, "state": state, "ready": 1, "wanted": 2, "old": 1, "message": message,
                       "rolled_back": rolled_back}),
            ))
        };
        assert_eq!(
            reported("rolling", json!("replica 2 starts"), Value::Null).unwrap(),
            "deployment 2: 1 of 2 new replicas ready, 1 old remaining; replica 2 starts"
        );
        assert_eq!(reported("complete", Value::Null, Value::Null).unwrap(), "deployment 2 is complete");
        assert_eq!(
            reported("failed", json!("replica 2 ended"), Value::Null).unwrap(),
            "deployment 2 failed: replica 2 ended; 1 of 2 new replicas ready, 1 old remaining"
        );
        let undone = json!({"num": 1, "message": "replica 2 ended"});
        let back = reported("complete", Value::Null, undone).unwrap();
        assert_eq!(back, "deployment 1 was rolled back: replica 2 ended");
        assert_eq!(reported("asleep", Value::Null, Value::Null), None);
        // A deployment that the server has not processed yet is not described.
        let before = run(3, json!({"num": 2, "state": "complete", "ready": 1, "wanted": 1, "old": 0}));
        assert_eq!((format_deployment(&before), is_complete(&before)), (None, false));
    }

    #[test]
    fn an_idle_service_is_reported_as_scaled_to_zero_with_its_metric() {
        let mut run = run(0, Value::Null);
        run.status = "pending".to_owned();
        run.scaling = serde_json::from_value(
            json!([{"group": "0", "desired": 0, "message": "0.00 requests per second over 60 s (target 1 each)"}]),
        )
        .unwrap();
        assert!(is_scaled_to_zero(&run));
        assert_eq!(
            format_scaling(&run),
            ["group 0: 0 replicas desired; 0.00 requests per second over 60 s (target 1 each)"]
        );
        run.status = "running".to_owned();
        assert!(!is_scaled_to_zero(&run));
    }
}
