//! Effect of a changed configuration on an existing resource: updated in place, rolled out, or rejected because it
//! requires a new one.
//!
//! Works on the JSON as stored. An absent field, a null one and one that is set to its default are the same.

use serde_json::{Map, Value};

use crate::config::Configuration;

/// Effect of a changed field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpdateMode {
    /// At once, without a restart.
    InPlace,
    /// Replica by replica.
    Rolling,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// Path of the field, such as `configuration.commands`.
    pub path: String,
    pub mode: UpdateMode,
}

/// First changed field that cannot be updated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot update `{path}` in place; stop the run or delete the fleet first")]
pub struct ForbiddenChange {
    pub path: String,
}

const RUN_IN_PLACE: [&str; 1] = ["priority"];
const DEV_ENVIRONMENT_IN_PLACE: [&str; 1] = ["inactivity_duration"];
const SERVICE_IN_PLACE: [&str; 8] =
    ["replicas", "groups", "scaling", "gateway", "deployment", "balance", "max_concurrency", "cors"];
const SERVICE_ROLLING: [&str; 18] = [
    "port",
    "probes",
    "resources",
    "volumes",
    "docker",
    "files",
    "image",
    "user",
    "privileged",
    "entrypoint",
    "working_dir",
    "python",
    "nvcc",
    "single_branch",
    "env",
    "shell",
    "commands",
    "repos",
];
/// Fields of a run spec next to the configuration: the state of the code.
const REPO_STATE: [&str; 4] = ["repo_id", "repo_data", "repo_code_hash", "file_archives"];
/// Fields of the client that applied the run, of the server's settings or of a registry, not of the run.
const CLIENT_ONLY: [&str; 3] = ["configuration_path", "default_images", "image_architectures"];
const FLEET_IN_PLACE: [&str; 11] = [
    "preemption",
    "nodes",
    "reservation",
    "tags",
    "resources",
    "backends",
    "regions",
    "availability_zones",
    "instance_types",
    "spot_policy",
    "max_price",
];

/// Returns the changes of a run's configuration (the object with `type`), in the order of the new one.
pub fn diff_run_configuration(old: &Value, new: &Value) -> Result<Vec<FieldChange>, ForbiddenChange> {
    let kind = field(new, "type").as_str().unwrap_or_default();
    classify_changes(&with_defaults(old), &with_defaults(new), |name| {
        let how = match kind {
            "service" if SERVICE_IN_PLACE.contains(&name) => Some(UpdateMode::InPlace),
            "service" if SERVICE_ROLLING.contains(&name) => Some(UpdateMode::Rolling),
            "dev-environment" if DEV_ENVIRONMENT_IN_PLACE.contains(&name) => Some(UpdateMode::InPlace),
            _ if RUN_IN_PLACE.contains(&name) => Some(UpdateMode::InPlace),
            _ => None,
        };
        how.ok_or_else(|| name.to_owned())
    })
}

/// Returns the changes of a run spec: its configuration, and the state of the code of a service.
pub fn diff_run_spec(old: &Value, new: &Value) -> Result<Vec<FieldChange>, ForbiddenChange> {
    let (before, after) = (field(old, "configuration"), field(new, "configuration"));
    let service = field(after, "type").as_str() == Some("service");
    let mut changes = classify_changes(old, new, |name| match name {
        "configuration" => Ok(UpdateMode::InPlace),
        "profile"
            if is_equivalent(&profile_choices(field(old, name)), &profile_choices(field(new, name))) =>
        {
            Ok(UpdateMode::InPlace)
        }
        _ if CLIENT_ONLY.contains(&name) => Ok(UpdateMode::InPlace),
        _ if service && REPO_STATE.contains(&name) => Ok(UpdateMode::Rolling),
        _ => Err(name.to_owned()),
    })?;
    changes.retain(|change| {
        !["configuration", "profile"].contains(&change.path.as_str())
            && !CLIENT_ONLY.contains(&change.path.as_str())
    });
    let under = |path: String| format!("configuration.{path}");
    let inner = diff_run_configuration(before, after)
        .map_err(|forbidden| ForbiddenChange { path: under(forbidden.path) })?;
    let inner = inner.into_iter().map(|change| FieldChange { path: under(change.path), ..change });
    Ok(inner.chain(changes).collect())
}

/// Returns a configuration with its defaults, with every field in its normal form. Unknown fields stay unchanged.
pub fn with_defaults(configuration: &Value) -> Value {
    let mut full = configuration.clone();
    let known =
        Configuration::from_json(configuration).ok().and_then(|known| serde_json::to_value(known).ok());
    if let (Some(full), Some(Value::Object(known))) = (full.as_object_mut(), known) {
        full.extend(known);
    }
    full
}

/// Returns the settings of a profile; its name does not matter, and a profile without settings is the same as none.
fn profile_choices(profile: &Value) -> Value {
    let mut chosen = profile.clone();
    if let Some(chosen) = chosen.as_object_mut() {
        chosen.retain(|name, value| !["name", "default"].contains(&name.as_str()) && !value.is_null());
    }
    if chosen.as_object().is_some_and(Map::is_empty) { Value::Null } else { chosen }
}

/// Returns a run spec whose replicas are created as by `settled` again. Fields that change in place are kept: a
/// rollback does not undo the number of replicas.
pub fn roll_back_spec(current: &Value, applied: &Value) -> Value {
    let mut back = current.clone();
    let restore = |into: &mut Value, from: &Value, names: &[&str]| {
        let Some(into) = into.as_object_mut() else { return };
        for name in names {
            match from.get(name) {
                Some(value) => into.insert((*name).to_owned(), value.clone()),
                None => into.remove(*name),
            };
        }
    };
    restore(&mut back, applied, &REPO_STATE);
    if let Some(configuration) = back.get_mut("configuration") {
        restore(configuration, field(applied, "configuration"), &SERVICE_ROLLING);
    }
    back
}

/// Returns the changes of a fleet's configuration. Hosts of an SSH fleet may be added and removed, not changed.
pub fn diff_fleet(old: &Value, new: &Value) -> Result<Vec<FieldChange>, ForbiddenChange> {
    classify_changes(old, new, |name| match name {
        "ssh_config" => diff_ssh_config(field(old, name), field(new, name)),
        _ if FLEET_IN_PLACE.contains(&name) => Ok(UpdateMode::InPlace),
        _ => Err(name.to_owned()),
    })
}

fn diff_ssh_config(old: &Value, new: &Value) -> Result<UpdateMode, String> {
    if old.is_null() || new.is_null() {
        return Err("ssh_config".to_owned());
    }
    let only_hosts = classify_changes(old, new, |name| match name {
        "hosts" => Ok(UpdateMode::InPlace),
        _ => Err(format!("ssh_config.{name}")),
    });
    only_hosts.map_err(|forbidden| forbidden.path)?;
    let hosts = |value: &Value| field(value, "hosts").as_array().cloned().unwrap_or_default();
    let before = hosts(old);
    for (at, host) in hosts(new).iter().enumerate() {
        let same_name = before.iter().find(|other| hostname(other) == hostname(host));
        if same_name.is_some_and(|other| !is_equivalent(other, host)) {
            return Err(format!("ssh_config.hosts[{at}]"));
        }
    }
    Ok(UpdateMode::InPlace)
}

/// Returns the hostname of a host, which is a text or an object.
fn hostname(host: &Value) -> Option<&str> {
    host.as_str().or_else(|| field(host, "hostname").as_str())
}

fn classify_changes(
    old: &Value,
    new: &Value,
    mut rule: impl FnMut(&str) -> Result<UpdateMode, String>,
) -> Result<Vec<FieldChange>, ForbiddenChange> {
    let empty = Map::new();
    let (before, after) = (old.as_object().unwrap_or(&empty), new.as_object().unwrap_or(&empty));
    let removed = before.keys().filter(|name| !after.contains_key(*name));
    let mut changes = Vec::new();
    for name in after.keys().chain(removed) {
        if is_equivalent(field(old, name), field(new, name)) {
            continue;
        }
        let how = rule(name).map_err(|path| ForbiddenChange { path })?;
        changes.push(FieldChange { path: name.clone(), mode: how });
    }
    Ok(changes)
}

const ABSENT: Value = Value::Null;

fn field<'a>(value: &'a Value, name: &str) -> &'a Value {
    value.get(name).unwrap_or(&ABSENT)
}

/// Compares two values, ignoring nulls that one side omits, and 1 against 1.0.
fn is_equivalent(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => {
            let names = left.keys().chain(right.keys().filter(|name| !left.contains_key(*name)));
            names.into_iter().all(|name| {
                is_equivalent(left.get(name).unwrap_or(&ABSENT), right.get(name).unwrap_or(&ABSENT))
            })
        }
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len()
                && left.iter().zip(right).all(|(left, right)| is_equivalent(left, right))
        }
        (Value::Number(left), Value::Number(right)) => left.as_f64() == right.as_f64(),
        (left, right) => left == right,
    }
}
