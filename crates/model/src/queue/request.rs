//! Changes of one request, and its validation before it receives a container.

use serde_json::{Map, Value};

use super::{
    ContainerRequest, ContainerSpec, PRIORITY_MAX, QueueRefusal, RequestState, apply_patch, refuse_invalid,
};

/// Attributes that may change while nothing runs for the request.
const UNCOMMITTED_ATTRIBUTES: [&str; 22] = [
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
const COMMITTED_ATTRIBUTES: [&str; 5] =
    ["name", "description", "properties", "priority", "container_count_max"];
const FINAL_ATTRIBUTES: [&str; 3] = ["name", "description", "properties"];
/// Type of a field. Null means that it is not set.
#[derive(Clone, Copy)]
enum FieldType {
    /// A whole number, at least this.
    Integer(u64),
    Boolean,
    Text,
    /// One identifier, or none.
    Identifier,
    Identifiers,
    Object(&'static [(&'static str, FieldType)]),
}

const CONSTRAINTS: [(&str, FieldType); 7] = [
    ("ram", FieldType::Integer(1)),
    ("vcpus", FieldType::Integer(1)),
    ("keep_cache_ram", FieldType::Integer(0)),
    ("keep_cache_disk", FieldType::Integer(0)),
    ("API", FieldType::Boolean),
    ("gpu", FieldType::Object(&GPU)),
    ("cuda", FieldType::Object(&CUDA)),
];
const GPU: [(&str, FieldType); 5] = [
    ("stack", FieldType::Identifier),
    ("device_count", FieldType::Integer(0)),
    ("driver_version", FieldType::Text),
    ("hardware_target", FieldType::Identifiers),
    ("vram", FieldType::Integer(0)),
];
const CUDA: [(&str, FieldType); 3] = [
    ("device_count", FieldType::Integer(0)),
    ("driver_version", FieldType::Text),
    ("hardware_capability", FieldType::Text),
];
const SCHEDULING: [(&str, FieldType); 8] = [
    ("partitions", FieldType::Identifiers),
    ("features", FieldType::Identifiers),
    ("preemptible", FieldType::Boolean),
    ("max_run_time", FieldType::Integer(0)),
    ("stop_duration", FieldType::Integer(0)),
    ("supervisor", FieldType::Boolean),
    ("dispatcher", FieldType::Identifier),
    ("gpu_type", FieldType::Identifier),
];
const MOUNT_KINDS: [&str; 6] = ["collection", "tmp", "keep", "file", "json", "text"];
/// Maximum number of containers for one request.
const CONTAINERS_MAX: u32 = 100;

/// Returns every field that a client may set, as a path.
pub fn known_fields() -> Vec<String> {
    fn below(above: &str, fields: &[(&str, FieldType)], all: &mut Vec<String>) {
        for (name, form) in fields {
            let path = format!("{above}.{name}");
            if let FieldType::Object(inner) = form {
                below(&path, inner, all);
            }
            all.push(path);
        }
    }
    let mut all: Vec<String> = UNCOMMITTED_ATTRIBUTES.iter().map(|&name| name.to_owned()).collect();
    below("runtime_constraints", &CONSTRAINTS, &mut all);
    below("scheduling_parameters", &SCHEDULING, &mut all);
    all
}

/// Returns the request after this write. One that becomes Committed has been checked, and has no container yet.
pub fn update(
    request: &ContainerRequest,
    patch: &Map<String, Value>,
) -> Result<ContainerRequest, QueueRefusal> {
    let mut patch = patch.clone();
    // Repeating the current state is no change.
    if patch.get("state").and_then(Value::as_str) == Some(request.state.as_str()) {
        patch.remove("state");
    }
    let allowed: &[&str] = match request.state {
        RequestState::Uncommitted => &UNCOMMITTED_ATTRIBUTES,
        RequestState::Committed => &COMMITTED_ATTRIBUTES,
        RequestState::Final => &FINAL_ATTRIBUTES,
    };
    // Absent and null mean the same to clients.
    patch.retain(|name, value| !(value.is_null() && name != "description" && name != "output_name"));
    let next = apply_patch(request, &patch, allowed)?;
    if next.owner_uuid != request.owner_uuid {
        return Err(QueueRefusal::Denied("owner_uuid must be the creator of the request".to_owned()));
    }
    if next.requesting_container_uuid != request.requesting_container_uuid {
        return Err(QueueRefusal::Denied(
            "requesting_container_uuid is set from the token and cannot be changed".to_owned(),
        ));
    }
    if next.priority > PRIORITY_MAX {
        return refuse_invalid(format!("priority must be between 0 and {PRIORITY_MAX}"));
    }
    if !(1..=CONTAINERS_MAX).contains(&next.container_count_max) {
        return refuse_invalid(format!("container_count_max must be between 1 and {CONTAINERS_MAX}"));
    }
    if request.state == RequestState::Uncommitted {
        match next.state {
            RequestState::Uncommitted => {}
            RequestState::Committed => check(&next.work)?,
            RequestState::Final => return refuse_invalid("a request becomes Final when its container ends"),
        }
    }
    Ok(next)
}

/// Returns all problems of a specification, in one sentence.
pub fn check(work: &ContainerSpec) -> Result<(), QueueRefusal> {
    let mut wrong = Vec::new();
    for name in ["vcpus", "ram"] {
        if work.runtime_constraints.get(name).is_none_or(Value::is_null) {
            wrong.push(format!("runtime_constraints.{name} is required: a whole number above 0"));
        }
    }
    check_fields("runtime_constraints", &work.runtime_constraints, &CONSTRAINTS, &mut wrong);
    check_fields("scheduling_parameters", &work.scheduling_parameters, &SCHEDULING, &mut wrong);
    if work.command.is_empty() {
        wrong.push("command must not be empty".to_owned());
    }
    if work.container_image.is_empty() {
        wrong.push("container_image must not be empty".to_owned());
    }
    if work.container_image.starts_with('-') {
        wrong.push("container_image must not begin with `-`".to_owned());
    }
    if work.service || !work.published_ports.is_empty() {
        wrong.push(
            "service and published_ports are not supported: the ports of a container cannot be reached"
                .to_owned(),
        );
    }
    let stack = work.runtime_constraints.get("gpu").and_then(|gpu| gpu.get("stack")).and_then(Value::as_str);
    if stack.is_some_and(|stack| !matches!(stack, "" | "cuda" | "rocm")) {
        wrong.push("runtime_constraints.gpu.stack must be cuda or rocm".to_owned());
    }
    if !work.mounts.contains_key(&work.output_path) {
        wrong.push(format!("output_path `{}` must be one of the mounts", work.output_path));
    }
    for (target, mount) in &work.mounts {
        let kind = mount.get("kind").and_then(Value::as_str).unwrap_or_default();
        if !MOUNT_KINDS.contains(&kind) {
            wrong.push(format!("mount `{target}` has an unknown kind `{kind}`"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { refuse_invalid(wrong.join("; ")) }
}

/// Returns the initial status of a container: a warning about every field that has no effect here.
pub(super) fn initial_status(work: &ContainerSpec) -> Map<String, Value> {
    let reported = ignored_fields(work);
    let warning = (!reported.is_empty()).then(|| ("warning".to_owned(), reported.join("; ").into()));
    warning.into_iter().collect()
}

fn ignored_fields(work: &ContainerSpec) -> Vec<String> {
    let constraints = Value::Object(work.runtime_constraints.clone());
    let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    let is_size = |value: &Value| value.as_u64().is_some_and(|size| size > 0);
    let cached = "mounts are copied, and nothing is cached";
    let drivers = "driver versions are not compared";
    let supervisor = work.scheduling_parameters.get("supervisor").and_then(Value::as_bool);
    let found = [
        ("runtime_constraints.keep_cache_ram", is_size(&constraints["keep_cache_ram"]), cached),
        ("runtime_constraints.keep_cache_disk", is_size(&constraints["keep_cache_disk"]), cached),
        ("runtime_constraints.gpu.driver_version", is_text(&constraints["gpu"]["driver_version"]), drivers),
        ("runtime_constraints.cuda.driver_version", is_text(&constraints["cuda"]["driver_version"]), drivers),
        (
            "runtime_constraints.gpu.stack",
            is_text(&constraints["gpu"]["stack"]) && constraints["gpu"]["stack"] != "cuda",
            "GPU vendors are not compared; use `scheduling_parameters.gpu_type` to select a model",
        ),
        (
            "scheduling_parameters.supervisor",
            supervisor == Some(true),
            "no nodes are reserved for supervisors",
        ),
    ];
    let found = found.into_iter().filter(|(_, is_set, _)| *is_set);
    found.map(|(path, _, why)| format!("{path} has no effect: {why}")).collect()
}

/// Returns whether the value is an identifier that no scheduler interprets specially.
fn is_identifier(value: &Value) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    value.as_str().is_some_and(|word| !word.is_empty() && word.chars().all(plain))
}

/// Collects every field that is unknown or has the wrong type.
fn check_fields(of: &str, given: &Map<String, Value>, known: &[(&str, FieldType)], wrong: &mut Vec<String>) {
    for (name, value) in given {
        let path = format!("{of}.{name}");
        match known.iter().find(|(known, _)| known == name) {
            None => wrong.push(format!("{of} has no field `{name}`")),
            Some(_) if value.is_null() => {}
            Some((_, FieldType::Object(inner))) => match value.as_object() {
                Some(map) => check_fields(&path, map, inner, wrong),
                None => wrong.push(format!("{path} must be an object, not {value}")),
            },
            Some((_, form)) => {
                if let Some(must) = form.mismatch(value) {
                    wrong.push(format!("{path} must be {must}, not {value}"));
                }
            }
        }
    }
}

impl FieldType {
    /// Returns the expected type if the value does not match.
    fn mismatch(self, value: &Value) -> Option<&'static str> {
        let (fits, must) = match self {
            Self::Integer(0) => (value.is_u64(), "a whole number"),
            Self::Integer(least) => {
                (value.as_u64().is_some_and(|number| number >= least), "a whole number above 0")
            }
            Self::Boolean => (value.is_boolean(), "true or false"),
            Self::Text => (value.is_string(), "a string"),
            Self::Identifier => {
                (value == "" || is_identifier(value), "a string of letters, digits, `-`, `_` and `.`")
            }
            Self::Identifiers => (
                value.as_array().is_some_and(|list| list.iter().all(is_identifier)),
                "a list of strings of letters, digits, `-`, `_` and `.`",
            ),
            Self::Object(_) => (value.is_object(), "an object"),
        };
        (!fits).then_some(must)
    }
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

    fn write(request: &ContainerRequest, patch: &Value) -> Result<ContainerRequest, QueueRefusal> {
        update(request, patch.as_object().unwrap())
    }

    fn fresh() -> ContainerRequest {
        ContainerRequest::new("r".into(), "u", Timestamp(1))
    }

    #[test]
    fn a_committed_request_allows_only_changes_of_priority() {
        let committed = write(&fresh(), &complete()).unwrap();
        assert_eq!((committed.state, committed.priority), (RequestState::Committed, 5));
        assert_eq!(write(&committed, &json!({ "priority": 0, "state": "Committed" })).unwrap().priority, 0);
        assert!(write(&committed, &json!({ "command": ["false"] })).is_err());
        assert!(write(&committed, &json!({ "state": "Final" })).is_err());
    }

    #[test]
    fn a_refused_commit_lists_every_problem_at_once() {
        let mut patch = complete();
        patch["runtime_constraints"] = json!({ "vcpus": "two", "disk": 1 });
        patch["output_path"] = json!("/elsewhere");
        patch["mounts"]["/x"] = json!({ "kind": "odd" });
        patch["scheduling_parameters"] = json!({ "features": ["fast|any"], "partitions": "main" });
        let Err(QueueRefusal::Invalid(why)) = write(&fresh(), &patch) else { panic!("taken") };
        for part in
            ["vcpus", "ram", "no field `disk`", "/elsewhere", "kind `odd`", ".features", ".partitions"]
        {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn constraints_of_the_wrong_type_are_refused_and_not_ignored() {
        for (of, name, value) in [
            ("runtime_constraints", "ram", json!("8")),
            ("runtime_constraints", "vcpus", json!(0)),
            ("runtime_constraints", "keep_cache_ram", json!(-1)),
            ("runtime_constraints", "API", json!("yes")),
            ("runtime_constraints", "gpu", json!(1)),
            ("runtime_constraints", "cuda", json!({ "device_count": "1" })),
            ("runtime_constraints", "gpu", json!({ "device_count": 1.5 })),
            ("runtime_constraints", "gpu", json!({ "vram": "80GB" })),
            ("runtime_constraints", "gpu", json!({ "hardware_target": "9.0" })),
            ("scheduling_parameters", "max_run_time", json!("2")),
            ("scheduling_parameters", "max_run_time", json!(-5)),
            ("scheduling_parameters", "stop_duration", json!("2m")),
            ("scheduling_parameters", "preemptible", json!("yes")),
            ("scheduling_parameters", "supervisor", json!(1)),
            ("scheduling_parameters", "dispatcher", json!(["a"])),
            ("scheduling_parameters", "gpu_type", json!("a b")),
        ] {
            let mut patch = complete();
            patch[of][name] = value.clone();
            let Err(QueueRefusal::Invalid(why)) = write(&fresh(), &patch) else {
                panic!("{name} {value} was taken")
            };
            assert!(why.contains(&format!("{of}.{name}")), "{why}");
        }
        let mut patch = complete();
        // As clients send them.
        patch["runtime_constraints"]["cuda"] =
            json!({ "device_count": 0, "driver_version": "", "hardware_capability": "" });
        patch["runtime_constraints"]["gpu"] = json!({
            "stack": "cuda", "device_count": 1, "driver_version": "12.0", "hardware_target": ["9.0"], "vram": 8_000_000_000_u64,
        });
        patch["scheduling_parameters"] = json!({ "max_run_time": 0, "preemptible": null, "partitions": [] });
        write(&fresh(), &patch).unwrap();
    }

    #[test]
    fn constraints_without_effect_become_a_warning_on_the_container() {
        let mut patch = complete();
        patch["runtime_constraints"]["keep_cache_ram"] = json!(1 << 20);
        patch["runtime_constraints"]["gpu"] =
            json!({ "stack": "rocm", "device_count": 1, "driver_version": "6.1" });
        patch["scheduling_parameters"] = json!({ "supervisor": true });
        let requested = write(&fresh(), &patch).unwrap();
        let made = super::super::Container::new("c".into(), requested.work, "u", Timestamp(1));
        let warning = made.runtime_status["warning"].as_str().unwrap();
        for part in ["keep_cache_ram", "gpu.driver_version", "gpu.stack", "supervisor"] {
            assert!(warning.contains(part), "{warning}");
        }
        let plain = write(&fresh(), &complete()).unwrap();
        let plain = super::super::Container::new("c".into(), plain.work, "u", Timestamp(1));
        assert!(plain.runtime_status.is_empty());
    }

    #[test]
    fn published_ports_and_unknown_gpu_stacks_are_refused() {
        for (name, value, part) in [
            ("service", json!(true), "published_ports"),
            ("published_ports", json!({ "80": {} }), "published_ports"),
        ] {
            let mut patch = complete();
            patch[name] = value;
            let Err(QueueRefusal::Invalid(why)) = write(&fresh(), &patch) else { panic!("{name} was taken") };
            assert!(why.contains(part), "{why}");
        }
        let mut patch = complete();
        patch["runtime_constraints"]["gpu"] = json!({ "stack": "tpu", "device_count": 1 });
        let Err(QueueRefusal::Invalid(why)) = write(&fresh(), &patch) else { panic!("taken") };
        assert!(why.contains("gpu.stack"), "{why}");
    }

    #[test]
    fn owner_and_requesting_container_of_a_request_cannot_be_changed() {
        for name in ["owner_uuid", "requesting_container_uuid"] {
            let refused = write(&fresh(), &json!({ name: "somebody" }));
            assert!(matches!(refused, Err(QueueRefusal::Denied(_))), "{name}: {refused:?}");
        }
    }

    #[test]
    fn refusal_names_the_unknown_or_invalid_request_attribute() {
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
