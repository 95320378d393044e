//! Selection of an existing container that can serve a request.

use serde_json::{Map, Value, json};

use super::{Container, ContainerSpec};
use crate::container::Status;

/// Returns the identity of a specification: two with the same identity produce the same result.
pub fn reuse_key(work: &ContainerSpec, secrets: Option<&str>) -> String {
    // Cache sizes affect the speed, not the result.
    let caches = ["keep_cache_ram", "keep_cache_disk"];
    let constraints = work.runtime_constraints.iter().filter(|(name, _)| !caches.contains(&name.as_str()));
    let parts = json!([
        work.command,
        work.cwd,
        work.environment,
        work.output_path,
        work.output_glob,
        work.container_image,
        sort_keys(&Value::Object(work.mounts.clone())),
        sort_keys(&Value::Object(constraints.map(|(name, value)| (name.clone(), value.clone())).collect())),
        secrets,
    ]);
    parts.to_string()
}

/// Returns the value with object keys in order.
fn sort_keys(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut names: Vec<&String> = map.keys().collect();
            names.sort();
            let in_order: Map<String, Value> =
                names.into_iter().map(|name| (name.clone(), sort_keys(&map[name]))).collect();
            Value::Object(in_order)
        }
        Value::Array(items) => Value::Array(items.iter().map(sort_keys).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

/// Returns the best of those with the same identity: successful, else in progress.
pub fn pick_reusable<'a>(candidates: &'a [Container], wanted: &ContainerSpec) -> Option<&'a Container> {
    candidates
        .iter()
        .filter_map(|one| Some((rank(one, wanted)?, one)))
        .min_by(|a, b| a.0.cmp(&b.0))
        .map(|it| it.1)
}

/// Returns the rank, lower is better; `None` if it cannot be reused.
fn rank(one: &Container, wanted: &ContainerSpec) -> Option<(u8, i64, i64)> {
    let age = one.created_at.0;
    let preempts = one.work.is_preemptible() && !wanted.is_preemptible();
    let is_wanted = one.priority > 0 && !preempts && !one.runtime_status.contains_key("error");
    let first = |number: u64| -i64::try_from(number).unwrap_or(i64::MAX);
    match one.state {
        Status::Complete if one.reusable && one.exit_code == Some(0) && !has_ignored_image(one) => {
            Some((0, age, 0))
        }
        #[expect(clippy::cast_possible_truncation, reason = "progress is a fraction")]
        Status::Running if is_wanted => Some((1, -((one.progress * 1e6) as i64), age)),
        Status::Locked if is_wanted => Some((2, first(one.priority), age)),
        Status::Queued if is_wanted => Some((3, first(one.priority), age)),
        Status::Complete | Status::Running | Status::Locked | Status::Queued | Status::Cancelled => None,
    }
}

/// Key in `runtime_status` of a container that ran as a plain process although it names an image.
pub const IMAGE_IGNORED: &str = "imageIgnored";

/// Returns whether it ran outside of its image: its result may differ from the requested one.
fn has_ignored_image(one: &Container) -> bool {
    one.runtime_status.contains_key(IMAGE_IGNORED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Timestamp;

    fn one(uuid: &str, state: Status) -> Container {
        let fresh = Container::new(uuid.into(), ContainerSpec::default(), "u", Timestamp(1));
        Container { state, priority: 5, exit_code: Some(0), ..fresh }
    }

    fn picked(candidates: &[Container]) -> Option<&str> {
        pick_reusable(candidates, &ContainerSpec::default()).map(|one| one.uuid.as_str())
    }

    #[test]
    fn reuse_prefers_complete_containers_then_running_locked_and_queued_ones() {
        let all = [
            one("q", Status::Queued),
            one("l", Status::Locked),
            Container { progress: 0.2, ..one("slow", Status::Running) },
            Container { progress: 0.7, ..one("fast", Status::Running) },
            Container { created_at: Timestamp(9), ..one("late", Status::Complete) },
            one("done", Status::Complete),
        ];
        for (rest, best) in [(6, "done"), (4, "fast"), (2, "l"), (1, "q")] {
            assert_eq!(picked(&all[..rest]), Some(best));
        }
    }

    #[test]
    fn failed_cancelled_and_priority_zero_containers_are_not_reused() {
        let failed = Container { exit_code: Some(1), ..one("f", Status::Complete) };
        let forbidden = Container { reusable: false, ..one("n", Status::Complete) };
        let held = Container { priority: 0, ..one("h", Status::Queued) };
        assert_eq!(picked(&[failed, forbidden, held, one("c", Status::Cancelled)]), None);
        let mut outside = one("o", Status::Complete);
        outside.runtime_status.insert(IMAGE_IGNORED.to_owned(), "true".into());
        assert_eq!(picked(&[outside]), None, "it did not run in its image");
    }

    #[test]
    fn reuse_key_ignores_key_order_and_cache_size() {
        let work = |constraints: Value| ContainerSpec {
            runtime_constraints: constraints.as_object().cloned().unwrap_or_default(),
            ..ContainerSpec::default()
        };
        let a = reuse_key(&work(json!({ "vcpus": 1, "ram": 2, "keep_cache_ram": 3 })), None);
        assert_eq!(a, reuse_key(&work(json!({ "ram": 2, "vcpus": 1 })), None));
        assert_ne!(a, reuse_key(&work(json!({ "ram": 3, "vcpus": 1 })), None));
        assert_ne!(a, reuse_key(&work(json!({ "ram": 2, "vcpus": 1 })), Some("x")));
    }
}
