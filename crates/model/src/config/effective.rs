//! Run specification with the server's defaults, as shown in a plan.
//!
//! Works on the JSON: the response repeats what the client sent, plus the defaults added here.

use serde_json::{Map, Value, json};

use super::{job_spec_builder::infer_vendor, ports::PortMapping, quantities::parse_duration};

/// Adds the defaults: a virtual repository, one node, no priority, the vendor of GPUs. The caller inserts the public
/// key of the user.
#[must_use]
pub fn effective_run_spec(run_spec: &Value) -> Value {
    let mut spec = run_spec.clone();
    if let Some(spec) = spec.as_object_mut() {
        default(spec, "repo_id", || json!("none"));
        default(spec, "repo_data", || json!({ "repo_type": "virtual" }));
        if let Some(configuration) = spec.get_mut("configuration").and_then(Value::as_object_mut) {
            effective_configuration(configuration);
        }
    }
    spec
}

/// Fields that may be written as `2h` and are returned as seconds.
const DURATIONS: [&[&str]; 5] = [
    &["max_duration"],
    &["stop_duration"],
    &["idle_duration"],
    &["retry", "duration"],
    &["utilization_policy", "time_window"],
];

/// Expands short forms that a client may send into the forms that every client can read.
fn normalize(configuration: &mut Map<String, Value>) {
    if configuration.get("type") != Some(&json!("service")) {
        for port in configuration.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
            let text = match &*port {
                Value::Number(number) => number.to_string(),
                Value::String(text) => text.clone(),
                Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => continue,
            };
            if let Ok(mapping) = PortMapping::parse(&text) {
                *port = json!(mapping);
            }
        }
    }
    for path in DURATIONS {
        let (first, rest) = (path[0], &path[1..]);
        let found = rest.iter().fold(configuration.get_mut(first), |value, key| value?.get_mut(key));
        if let Some(value) = found
            && let Some(seconds) = value.as_str().and_then(|text| parse_duration(text).ok())
        {
            *value = json!(seconds);
        }
    }
}

fn effective_configuration(configuration: &mut Map<String, Value>) {
    normalize(configuration);
    default(configuration, "priority", || json!(0));
    let is_set = |configuration: &Map<String, Value>, key| {
        configuration.get(key).is_some_and(|value| !value.is_null())
    };
    if configuration.get("type") == Some(&json!("task")) && !is_set(configuration, "groups") {
        default(configuration, "nodes", || json!(1));
    }
    if let Some(gpu) = gpu_spec(configuration) {
        set_vendor(gpu);
    }
    for group in configuration.get_mut("groups").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(gpu) = group.as_object_mut().and_then(gpu_spec) {
            set_vendor(gpu);
        }
    }
}

fn gpu_spec(owner: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    owner.get_mut("resources")?.get_mut("gpu")?.as_object_mut()
}

fn set_vendor(gpu: &mut Map<String, Value>) {
    let names: Option<Vec<String>> = gpu
        .get("name")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).map(str::to_owned).collect());
    if let Some(vendor) = infer_vendor(names.as_deref()) {
        default(gpu, "vendor", || json!(vendor));
    }
}

fn default(map: &mut Map<String, Value>, key: &str, value: impl FnOnce() -> Value) {
    if map.get(key).is_none_or(Value::is_null) {
        map.insert(key.to_owned(), value());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_spec_expands_short_forms_and_keeps_expanded_ones() {
        let sent = json!({ "configuration": { "type": "task", "ports": [8000, "80:8080", "*:9000", { "local_port": 1, "container_port": 2 }],
            "max_duration": "2h", "stop_duration": 30, "idle_duration": "off", "retry": { "duration": "1d" } } });
        let effective = effective_run_spec(&sent);
        let configuration = &effective["configuration"];
        assert_eq!(
            configuration["ports"],
            json!([
                { "local_port": 8000, "container_port": 8000 }, { "local_port": 80, "container_port": 8080 },
                { "local_port": null, "container_port": 9000 }, { "local_port": 1, "container_port": 2 },
            ])
        );
        let durations =
            ["max_duration", "stop_duration", "idle_duration"].map(|name| configuration[name].clone());
        assert_eq!(durations, [json!(7200), json!(30), json!("off")]);
        assert_eq!(configuration["retry"]["duration"], json!(86_400));
        assert_eq!(effective_run_spec(&effective), effective);
    }
}
