//! A run specification with the server's defaults, as a plan shows it.
//!
//! Works on the JSON itself: what the client sent comes back as it came, but for what is added here.

use serde_json::{Map, Value, json};

use super::derive::infer_vendor;

/// Adds the defaults: a virtual repository, one node, no priority, the vendor of GPUs. The caller puts in the
/// public key of the user.
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

fn effective_configuration(configuration: &mut Map<String, Value>) {
    default(configuration, "priority", || json!(0));
    let is_set = |configuration: &Map<String, Value>, key| {
        configuration.get(key).is_some_and(|value| !value.is_null())
    };
    if configuration.get("type") == Some(&json!("task")) && !is_set(configuration, "groups") {
        default(configuration, "nodes", || json!(1));
    }
    if let Some(gpu) = gpu_of(configuration) {
        set_vendor(gpu);
    }
    for group in configuration.get_mut("groups").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(gpu) = group.as_object_mut().and_then(gpu_of) {
            set_vendor(gpu);
        }
    }
}

fn gpu_of(owner: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
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
