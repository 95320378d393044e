//! Effects of a changed configuration.

use serde_json::{Value, json};
use windlass_model::plan::diff::{self, FieldChange, ForbiddenChange, UpdateMode};

fn words(changes: Result<Vec<FieldChange>, ForbiddenChange>) -> String {
    match changes {
        Ok(changes) => {
            let word = |change: &FieldChange| match change.mode {
                UpdateMode::InPlace => change.path.clone(),
                UpdateMode::Rolling => format!("{} (rolling)", change.path),
            };
            changes.iter().map(word).collect::<Vec<_>>().join(", ")
        }
        Err(forbidden) => format!("no: {}", forbidden.path),
    }
}

fn with(mut base: Value, changes: Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

fn service() -> Value {
    json!({"type": "service", "port": 8000, "commands": ["serve"], "replicas": {"min": 1, "max": 1}, "auth": true})
}

#[track_caller]
fn check_run(base: Value, changes: Value, expect: &str) {
    let new = with(base.clone(), changes);
    assert_eq!(words(diff::diff_run_configuration(&base, &new)), expect);
}

#[test]
fn equal_configurations_have_no_diff_and_null_equals_absent() {
    check_run(service(), json!({}), "");
    check_run(service(), json!({"gateway": null, "replicas": {"min": 1.0, "max": 1, "x": null}}), "");
}

#[test]
fn a_service_updates_some_fields_in_place_and_rolls_out_others() {
    check_run(service(), json!({"replicas": {"min": 2, "max": 2}, "priority": 7}), "replicas, priority");
    check_run(
        service(),
        json!({"commands": ["serve", "-v"], "image": "x"}),
        "commands (rolling), image (rolling)",
    );
}

#[test]
fn the_first_field_that_cannot_be_updated_is_named() {
    check_run(service(), json!({"commands": ["x"], "auth": false, "nodes": 2}), "no: auth");
    check_run(service(), json!({"type": "task"}), "no: type");
    let open = with(service(), json!({"auth": false}));
    let gone = with(service(), json!({"auth": null}));
    assert_eq!(words(diff::diff_run_configuration(&open, &gone)), "no: auth");
}

#[test]
fn a_default_that_is_spelt_out_changes_nothing() {
    let short = json!({"type": "service", "port": 8000, "commands": ["serve"], "replicas": "1..1"});
    assert_eq!(words(diff::diff_run_configuration(&service(), &short)), "");
    let spec = |profile: Value| json!({"configuration": short, "profile": profile});
    let unlike = |old: Value, new: Value| words(diff::diff_run_spec(&spec(old), &spec(new)));
    assert_eq!(unlike(json!({"name": "default", "backends": null}), Value::Null), "");
    assert_eq!(unlike(json!({"name": "default"}), json!({"name": "cheap"})), "");
    assert_eq!(unlike(json!({"name": "cheap", "max_price": 1}), json!({"name": "default"})), "no: profile");
}

#[test]
fn tasks_and_dev_environments_have_little_to_update() {
    let task = json!({"type": "task", "commands": ["a"]});
    check_run(task.clone(), json!({"priority": 3}), "priority");
    check_run(task.clone(), json!({"commands": ["b"]}), "no: commands");
    check_run(task, json!({"inactivity_duration": 60}), "no: inactivity_duration");
    let dev = json!({"type": "dev-environment", "ide": "vscode"});
    check_run(dev.clone(), json!({"inactivity_duration": 60}), "inactivity_duration");
    check_run(dev, json!({"ide": "cursor"}), "no: ide");
}

#[test]
fn new_code_is_rolled_out_to_services_only() {
    let spec = |configuration: Value, hash: &str| json!({"run_name": "r", "configuration": configuration, "repo_code_hash": hash, "configuration_path": hash});
    let message =
        words(diff::diff_run_spec(&spec(service(), "a"), &spec(with(service(), json!({"port": 1})), "b")));
    assert_eq!(message, "configuration.port (rolling), repo_code_hash (rolling)");
    let task = json!({"type": "task", "commands": ["a"]});
    assert_eq!(
        words(diff::diff_run_spec(&spec(task.clone(), "a"), &spec(task.clone(), "b"))),
        "no: repo_code_hash"
    );
    let other = with(task.clone(), json!({"nodes": 2}));
    assert_eq!(words(diff::diff_run_spec(&spec(task, "a"), &spec(other, "a"))), "no: configuration.nodes");
}

#[test]
fn a_fleet_updates_its_limits_and_its_hosts() {
    let cloud = json!({"type": "fleet", "nodes": {"min": 1, "max": 2}, "placement": "any"});
    let new = with(cloud.clone(), json!({"nodes": {"min": 0, "max": 3}, "max_price": 2.0}));
    assert_eq!(words(diff::diff_fleet(&cloud, &new)), "nodes, max_price");
    let new = with(cloud.clone(), json!({"placement": "cluster"}));
    assert_eq!(words(diff::diff_fleet(&cloud, &new)), "no: placement");

    let ssh =
        |hosts: Value, user: &str| json!({"type": "fleet", "ssh_config": {"user": user, "hosts": hosts}});
    let old = ssh(json!(["a", {"hostname": "b", "port": 22}]), "root");
    let message = |new: Value| words(diff::diff_fleet(&old, &new));
    assert_eq!(message(ssh(json!(["c", {"hostname": "b", "port": 22}]), "root")), "ssh_config");
    assert_eq!(message(ssh(json!(["a", {"hostname": "b", "port": 23}]), "root")), "no: ssh_config.hosts[1]");
    assert_eq!(message(ssh(json!(["a"]), "me")), "no: ssh_config.user");
    assert_eq!(words(diff::diff_fleet(&cloud, &ssh(json!(["a"]), "me"))), "no: ssh_config");
}

#[test]
fn a_rollback_restores_rolled_out_fields_and_keeps_the_replica_count() {
    let applied = json!({"configuration": service(), "repo_code_hash": "a"});
    let mut current = applied.clone();
    current["configuration"]["commands"] = json!(["broken"]);
    current["configuration"]["image"] = json!("new");
    current["configuration"]["replicas"] = json!({"min": 3, "max": 3});
    current["repo_code_hash"] = json!("b");
    let mut expected = applied.clone();
    expected["configuration"]["replicas"] = json!({"min": 3, "max": 3});
    let back = diff::roll_back_spec(&current, &applied);
    assert_eq!(back, expected);
    // No field that requires a rollout differs: a rollback changes nothing.
    assert_eq!(diff::roll_back_spec(&back, &applied), back);
}
