//! State of a pod, as the server uses it: starting and why it waits, running, or over and why.

use crate::{
    objects::{ContainerStatus, Pod, Terminated, Waiting},
    pod_manifest::{AGENT_CONTAINER, JOB_CONTAINER},
};

/// Reasons why an image is never there, however long one waits.
const IMAGE_ERRORS: [&str; 4] =
    ["ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"];
/// Reasons of a container that cannot be created as it is.
const CONTAINER_ERRORS: [&str; 3] =
    ["CreateContainerConfigError", "CreateContainerError", "RunContainerError"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodState {
    /// It waits for a node, an image or its first container.
    Waiting { message: Option<String> },
    /// The init container waits for the agent.
    WaitingForAgent,
    /// The container of the job runs.
    Running,
    /// It is over, or never starts.
    Over { message: String },
}

/// Returns the state of a pod.
pub(crate) fn read(pod: &Pod) -> PodState {
    let status = &pod.status;
    if let Some(message) = over(pod) {
        return PodState::Over { message };
    }
    let job = container(&status.container_statuses, JOB_CONTAINER);
    let agent = container(&status.init_container_statuses, AGENT_CONTAINER);
    if job.is_some_and(|job| job.state.running.is_some()) {
        return PodState::Running;
    }
    for one in [agent, job].into_iter().flatten() {
        if let Some(waiting) = &one.state.waiting {
            if let Some(message) = hopeless(waiting) {
                return PodState::Over { message };
            }
            if !matches!(waiting.reason.as_str(), "" | "PodInitializing" | "ContainerCreating") {
                return PodState::Waiting { message: Some(describe(waiting)) };
            }
        }
    }
    if agent.is_some_and(|agent| agent.state.running.is_some()) {
        return PodState::WaitingForAgent;
    }
    let unscheduled =
        status.conditions.iter().find(|one| one.kind == "PodScheduled" && one.status == "False");
    PodState::Waiting { message: unscheduled.map(|one| translate_scheduler(&one.reason, &one.message)) }
}

fn container<'a>(all: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    all.iter().find(|one| one.name == name)
}

/// Returns the reason why the pod is over, if it is.
fn over(pod: &Pod) -> Option<String> {
    let status = &pod.status;
    let reason = match (status.reason.as_str(), status.message.as_str()) {
        ("", "") => None,
        ("", message) => Some(message.to_owned()),
        (reason, "") => Some(reason.to_owned()),
        (reason, message) => Some(format!("{reason}: {message}")),
    };
    let disrupted =
        status.conditions.iter().find(|one| one.kind == "DisruptionTarget" && one.status == "True");
    let disrupted = disrupted.map(|one| format!("{}: {}", one.reason, one.message));
    if pod.metadata.deletion_timestamp.is_some() {
        let why = disrupted.or(reason).map(|why| format!(": {why}")).unwrap_or_default();
        return Some(format!("the pod is being deleted{why}"));
    }
    if !matches!(status.phase.as_str(), "Succeeded" | "Failed") {
        return None;
    }
    let ended = status.container_statuses.iter().chain(&status.init_container_statuses);
    let ended = ended.filter_map(|one| Some((one, one.state.terminated.as_ref()?)));
    let failed = ended.filter(|(_, end)| end.exit_code != 0).map(|(one, end)| describe_end(one, end)).next();
    let why = disrupted.or(reason).or(failed).unwrap_or_else(|| "its agent ended".to_owned());
    Some(format!("the pod ended: {why}"))
}

fn describe_end(container: &ContainerStatus, end: &Terminated) -> String {
    let mut text = format!("container `{}` exited with {}", container.name, end.exit_code);
    if !matches!(end.reason.as_str(), "" | "Error") {
        text.push_str(&format!(" ({})", end.reason));
    }
    if !end.message.trim().is_empty() {
        text.push_str(&format!(": {}", end.message.trim()));
    }
    if container.name == AGENT_CONTAINER && end.exit_code == 127 {
        text.push_str("; an image without a shell needs `helper_image` or `agent_image` in `config.yml`");
    }
    text
}

/// Returns the message of a container that never starts.
fn hopeless(waiting: &Waiting) -> Option<String> {
    if IMAGE_ERRORS.contains(&waiting.reason.as_str()) {
        return Some(format!("failed to pull the image: {}", describe(waiting)));
    }
    if CONTAINER_ERRORS.contains(&waiting.reason.as_str()) {
        return Some(format!("failed to start the container: {}", describe(waiting)));
    }
    None
}

fn describe(waiting: &Waiting) -> String {
    if waiting.message.is_empty() { waiting.reason.clone() } else { waiting.message.clone() }
}

/// Returns what the scheduler says about a pod, in the words of `why`: how many nodes there are, and what each group of
/// them lacks.
pub(crate) fn translate_scheduler(reason: &str, message: &str) -> String {
    if reason != "Unschedulable" {
        let text = if message.is_empty() { reason } else { message };
        return format!("the cluster's scheduler holds the pod back: {text}");
    }
    // The rest is about preemption, which these pods do not ask for.
    let message = message.split(" preemption: ").next().unwrap_or(message).trim().trim_end_matches('.');
    let Some((nodes, reasons)) = message.split_once(" nodes are available: ") else {
        return format!("no node takes the pod now: {message}");
    };
    let total = nodes.rsplit('/').next().unwrap_or(nodes);
    let reasons = reasons.split(". ").next().unwrap_or(reasons);
    let reasons: Vec<String> = split_reasons(reasons).into_iter().map(translate_reason).collect();
    format!("no node of {total} takes the pod now: {}", reasons.join("; "))
}

/// Splits at commas that are followed by a number, because taints contain commas.
fn split_reasons(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices(", ") {
        if text[at + 2..].starts_with(|next: char| next.is_ascii_digit()) {
            parts.push(&text[start..at]);
            start = at + 2;
        }
    }
    parts.push(&text[start..]);
    parts
}

fn translate_reason(reason: &str) -> String {
    let (count, what) = reason.split_once(' ').unwrap_or(("", reason));
    let what = what.trim_end_matches('.');
    let text = if let Some(resource) = what.strip_prefix("Insufficient ") {
        let resource = match resource {
            "cpu" => "CPUs",
            "ephemeral-storage" => "disk",
            other => other,
        };
        format!("too few free {resource}")
    } else if what == "Too many pods" {
        "as many pods as it may have".to_owned()
    } else if what.contains("had untolerated taint") {
        match what.split_once('{') {
            Some((_, taint)) => {
                format!("taint `{}` is not tolerated", taint.trim_end_matches(['}', ')', ' ', ':']))
            }
            None => "a taint is not tolerated".to_owned(),
        }
    } else if what.contains("didn't match Pod's node affinity/selector") {
        "not among the nodes that fit the run".to_owned()
    } else if what.contains("were unschedulable") || what.contains("node(s) unschedulable") {
        "cordoned".to_owned()
    } else {
        what.to_owned()
    };
    format!("{count} × {text}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: &Value) -> PodState {
        read(&serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap())
    }

    fn waiting(message: &str) -> PodState {
        PodState::Waiting { message: Some(message.to_owned()) }
    }

    fn over_because(message: &str) -> PodState {
        PodState::Over { message: message.to_owned() }
    }

    #[test]
    fn a_pod_starts_step_by_step() {
        assert_eq!(state(&json!({})), PodState::Waiting { message: None });
        let init = |state: Value| {
            json!({"phase": "Pending", "initContainerStatuses": [{"name": "agent", "state": state}],
            "containerStatuses": [{"name": "job", "state": {"waiting": {"reason": "PodInitializing"}}}]})
        };
        assert_eq!(
            state(&init(json!({"waiting": {"reason": "PodInitializing"}}))),
            PodState::Waiting { message: None }
        );
        assert_eq!(
            state(&init(json!({"waiting": {"reason": "ErrImagePull", "message": "no such host"}}))),
            waiting("no such host")
        );
        assert_eq!(state(&init(json!({"running": {"startedAt": "now"}}))), PodState::WaitingForAgent);
        assert_eq!(
            state(
                &json!({"phase": "Running", "containerStatuses": [{"name": "job", "state": {"running": {}}}]})
            ),
            PodState::Running
        );
    }

    #[test]
    fn a_pod_that_never_starts_is_over() {
        let job = |reason: &str, message: &str| {
            json!({"phase": "Pending", "containerStatuses":
            [{"name": "job", "state": {"waiting": {"reason": reason, "message": message}}}]})
        };
        assert_eq!(
            state(&job("ImagePullBackOff", "not found")),
            over_because("failed to pull the image: not found")
        );
        assert_eq!(
            state(&job("CreateContainerConfigError", "")),
            over_because("failed to start the container: CreateContainerConfigError")
        );
    }

    #[test]
    fn the_end_of_a_pod_says_why() {
        assert_eq!(
            state(&json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"})),
            over_because("the pod ended: Evicted: low on memory")
        );
        let exit = json!({"exitCode": 137, "reason": "OOMKilled"});
        assert_eq!(
            state(
                &json!({"phase": "Failed", "containerStatuses": [{"name": "job", "state": {"terminated": exit}}]})
            ),
            over_because("the pod ended: container `job` exited with 137 (OOMKilled)")
        );
        let PodState::Over { message } = state(&json!({"phase": "Failed", "initContainerStatuses":
            [{"name": "agent", "state": {"terminated": {"exitCode": 127}}}]}))
        else {
            panic!("over")
        };
        assert!(message.contains("`helper_image`"), "{message}");
        let deleted: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True",
                "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}]},
        }))
        .unwrap();
        assert_eq!(
            read(&deleted),
            over_because("the pod is being deleted: EvictionByEvictionAPI: Eviction API: evicting")
        );
    }

    #[test]
    fn the_words_of_the_scheduler_are_translated() {
        let message = "0/5 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint {team: ml, x}, \
                       2 node(s) didn't match Pod's node affinity/selector, 1 Too many pods. \
                       preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling.";
        assert_eq!(
            translate_scheduler("Unschedulable", message),
            "no node of 5 takes the pod now: 1 × too few free CPUs; 1 × taint `team: ml, x` is not tolerated; \
             2 × not among the nodes that fit the run; 1 × as many pods as it may have"
        );
        assert_eq!(
            translate_scheduler(
                "Unschedulable",
                "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 nodes"
            ),
            "no node of 1 takes the pod now: 1 × too few free nvidia.com/gpu"
        );
        assert_eq!(
            translate_scheduler("SchedulingGated", "held by a quota"),
            "the cluster's scheduler holds the pod back: held by a quota"
        );
    }

    #[test]
    fn an_unscheduled_pod_waits_with_the_reason_of_the_scheduler() {
        let status = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient memory."}]});
        assert_eq!(state(&status), waiting("no node of 1 takes the pod now: 1 × too few free memory"));
    }
}
