//! Changes of one request, and what must be true of it before it gets a container.

use serde_json::{Map, Value};

use super::{PRIORITY_MAX, Refusal, Request, Stage, Work, invalid, overlay};

/// May change while nothing runs for it.
const OPEN: [&str; 22] = [
    "name",
    "description",
    "properties",
    "state",
    "priority",
    "container_count_max",
    "use_existing",
    "output_name",
    "output_ttl",
    "command",
    "cwd",
    "environment",
    "container_image",
    "mounts",
    "output_path",
    "output_glob",
    "service",
    "published_ports",
    "runtime_constraints",
    "scheduling_parameters",
    "requesting_container_uuid",
    "owner_uuid",
];
const COMMITTED: [&str; 5] = ["name", "description", "properties", "priority", "container_count_max"];
const FINAL: [&str; 3] = ["name", "description", "properties"];
const CONSTRAINTS: [&str; 7] = ["ram", "vcpus", "keep_cache_ram", "keep_cache_disk", "API", "gpu", "cuda"];
const GPU: [&str; 5] = ["stack", "device_count", "driver_version", "hardware_target", "vram"];
const SCHEDULING: [&str; 6] =
    ["partitions", "features", "preemptible", "max_run_time", "supervisor", "dispatcher"];
const MOUNTS: [&str; 6] = ["collection", "tmp", "keep", "file", "json", "text"];
/// How often one request may be given a new container.
const CONTAINERS_MAX: u32 = 100;

/// The request after this write. One that becomes Committed has been checked, and has no container yet.
pub fn update(request: &Request, patch: &Map<String, Value>) -> Result<Request, Refusal> {
    let mut patch = patch.clone();
    // Saying again what is true already is no change.
    if patch.get("state").and_then(Value::as_str) == Some(request.state.as_str()) {
        patch.remove("state");
    }
    let allowed: &[&str] = match request.state {
        Stage::Uncommitted => &OPEN,
        Stage::Committed => &COMMITTED,
        Stage::Final => &FINAL,
    };
    // Absent and null mean the same to clients.
    patch.retain(|name, value| !(value.is_null() && name != "description" && name != "output_name"));
    let next = overlay(request, &patch, allowed)?;
    if next.owner_uuid != request.owner_uuid {
        return Err(Refusal::Denied("requests belong to who made them".to_owned()));
    }
    if next.requesting_container_uuid != request.requesting_container_uuid {
        return Err(Refusal::Denied("a container makes requests with its own token".to_owned()));
    }
    if next.priority > PRIORITY_MAX {
        return invalid(format!("priority must be 0 to {PRIORITY_MAX}"));
    }
    if !(1..=CONTAINERS_MAX).contains(&next.container_count_max) {
        return invalid(format!("container_count_max must be 1 to {CONTAINERS_MAX}"));
    }
    if request.state == Stage::Uncommitted {
        match next.state {
            Stage::Uncommitted => {}
            Stage::Committed => check(&next.work)?,
            Stage::Final => return invalid("a request becomes Final when its container ends"),
        }
    }
    Ok(next)
}

/// Everything that is wrong with it, in one sentence.
pub fn check(work: &Work) -> Result<(), Refusal> {
    let mut wrong = Vec::new();
    for name in ["vcpus", "ram"] {
        if work.runtime_constraints.get(name).and_then(Value::as_u64).is_none_or(|number| number == 0) {
            wrong.push(format!("runtime_constraints.{name} must be a whole number above 0"));
        }
    }
    unknown("runtime_constraints", &work.runtime_constraints, &CONSTRAINTS, &mut wrong);
    if let Some(gpu) = work.runtime_constraints.get("gpu").and_then(Value::as_object) {
        unknown("runtime_constraints.gpu", gpu, &GPU, &mut wrong);
    }
    unknown("scheduling_parameters", &work.scheduling_parameters, &SCHEDULING, &mut wrong);
    for name in ["partitions", "features"] {
        if work.scheduling_parameters.get(name).is_some_and(|value| !are_words(value)) {
            wrong.push(format!("scheduling_parameters.{name} must be a list of words"));
        }
    }
    if work.command.is_empty() {
        wrong.push("command must not be empty".to_owned());
    }
    if work.container_image.is_empty() {
        wrong.push("container_image must not be empty".to_owned());
    }
    if !work.mounts.contains_key(&work.output_path) {
        wrong.push(format!("output_path `{}` must be one of the mounts", work.output_path));
    }
    for (target, mount) in &work.mounts {
        let kind = mount.get("kind").and_then(Value::as_str).unwrap_or_default();
        if !MOUNTS.contains(&kind) {
            wrong.push(format!("mount `{target}` has the unknown kind `{kind}`"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { invalid(wrong.join("; ")) }
}

/// Words that mean nothing but themselves to any scheduler.
fn are_words(value: &Value) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let is_word =
        |value: &Value| value.as_str().is_some_and(|word| !word.is_empty() && word.chars().all(plain));
    value.is_null() || value.as_array().is_some_and(|list| list.iter().all(is_word))
}

fn unknown(of: &str, given: &Map<String, Value>, known: &[&str], wrong: &mut Vec<String>) {
    wrong.extend(
        given
            .keys()
            .filter(|name| !known.contains(&name.as_str()))
            .map(|name| format!("{of} has no `{name}`")),
    );
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::time::Timestamp;

    fn complete() -> Value {
        json!({
            "command": ["true"], "container_image": "debian:12", "output_path": "/out",
            "mounts": { "/out": { "kind": "tmp" } }, "runtime_constraints": { "vcpus": 1, "ram": 1 },
            "state": "Committed", "priority": 5,
        })
    }

    fn write(request: &Request, patch: &Value) -> Result<Request, Refusal> {
        update(request, patch.as_object().unwrap())
    }

    fn fresh() -> Request {
        Request::new("r".into(), "u", Timestamp(1))
    }

    #[test]
    fn what_is_committed_is_whole_and_then_stands_still() {
        let committed = write(&fresh(), &complete()).unwrap();
        assert_eq!((committed.state, committed.priority), (Stage::Committed, 5));
        assert_eq!(write(&committed, &json!({ "priority": 0, "state": "Committed" })).unwrap().priority, 0);
        assert!(write(&committed, &json!({ "command": ["false"] })).is_err());
        assert!(write(&committed, &json!({ "state": "Final" })).is_err());
    }

    #[test]
    fn a_commit_is_told_everything_that_is_wrong_at_once() {
        let mut patch = complete();
        patch["runtime_constraints"] = json!({ "vcpus": "two", "disk": 1 });
        patch["output_path"] = json!("/elsewhere");
        patch["mounts"]["/x"] = json!({ "kind": "odd" });
        patch["scheduling_parameters"] = json!({ "features": ["fast|any"], "partitions": "main" });
        let Err(Refusal::Invalid(why)) = write(&fresh(), &patch) else { panic!("taken") };
        for part in ["vcpus", "ram", "no `disk`", "/elsewhere", "kind `odd`", ".features", ".partitions"] {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn attributes_that_do_not_exist_or_are_of_another_kind_are_named() {
        for (patch, part) in [
            (json!({ "colour": 1 }), "`colour`"),
            (json!({ "command": "true" }), "command"),
            (json!({ "priority": 1001 }), "1000"),
            (json!({ "environment": { "A": 1 } }), "environment"),
        ] {
            let why = write(&fresh(), &patch).unwrap_err().to_string();
            assert!(why.contains(part), "{why}");
        }
    }
}
