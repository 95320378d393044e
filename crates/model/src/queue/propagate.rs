//! Consequences of a change: requests whose container ended, a new container for a lost one, priorities.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Container, ContainerRequest, ContainerSpec, REFUSED_REASON, RequestState};
use crate::{container::Status, time::Timestamp};

/// Rows around a change. For each container here all its requests are here, and all requests it made.
#[derive(Clone, Debug, Default)]
pub struct QueueRows {
    pub containers: BTreeMap<String, Container>,
    pub requests: BTreeMap<String, ContainerRequest>,
    /// Containers that only made requests of the others: whether they are alive, and their priority.
    pub parents: BTreeMap<String, (bool, u64)>,
}

/// Updates all dependent rows. `fresh` generates names of new containers.
pub fn propagate(rows: &mut QueueRows, now: Timestamp, fresh: &mut dyn FnMut() -> String) {
    // Each round propagates the changes one level further down; the tree is no deeper than this.
    for _ in 0..=rows.containers.len() + rows.requests.len() {
        let before = rows.clone();
        end_requests(rows, now, fresh);
        end_child_requests(rows);
        update_priorities(rows);
        drop_unwanted(rows, now);
        if before.containers == rows.containers && before.requests == rows.requests {
            break;
        }
    }
}

impl QueueRows {
    fn parent_state(&self, request: &ContainerRequest) -> Option<(bool, u64)> {
        let uuid = request.requesting_container_uuid.as_ref()?;
        let here = self.containers.get(uuid).map(|parent| (!parent.is_final(), parent.priority));
        here.or_else(|| self.parents.get(uuid).copied())
    }

    /// Returns the priority that a request contributes to its container.
    fn effective_priority(&self, request: &ContainerRequest) -> u64 {
        match (request.priority, self.parent_state(request)) {
            (0, _) | (_, Some((false, _))) => 0,
            (_, Some((true, priority))) => priority,
            (own, None) => own,
        }
    }

    fn live_requests(&self, container: &str) -> Vec<String> {
        let of = |request: &&ContainerRequest| {
            request.state == RequestState::Committed && request.container_uuid.as_deref() == Some(container)
        };
        self.requests.values().filter(of).map(|request| request.uuid.clone()).collect()
    }
}

fn end_requests(rows: &mut QueueRows, now: Timestamp, fresh: &mut dyn FnMut() -> String) {
    let ended: Vec<Container> = rows.containers.values().filter(|one| one.is_final()).cloned().collect();
    for container in ended {
        let live = rows.live_requests(&container.uuid);
        let is_refused =
            container.runtime_status.get("reason").is_some_and(|reason| reason == REFUSED_REASON);
        let again = |request: &ContainerRequest| {
            container.state == Status::Cancelled
                && !is_refused
                && request.container_count < request.container_count_max
                && rows.effective_priority(request) > 0
        };
        let (retried, over): (Vec<String>, Vec<String>) =
            live.into_iter().partition(|uuid| rows.requests.get(uuid).is_some_and(again));
        for uuid in over {
            if let Some(request) = rows.requests.get_mut(&uuid) {
                request.state = RequestState::Final;
                request.output_uuid.clone_from(&container.output);
                request.log_uuid.clone_from(&container.log);
                request.cumulative_cost += container.cost;
            }
        }
        if retried.is_empty() {
            continue;
        }
        let works: Vec<ContainerSpec> =
            retried.iter().filter_map(|uuid| rows.requests.get(uuid)).map(|one| one.work.clone()).collect();
        let next = Container {
            runtime_auth_scopes: container.runtime_auth_scopes.clone(),
            secret_mounts_digest: container.secret_mounts_digest.clone(),
            ..Container::new(fresh(), merge_specs(&works), &container.runtime_user_uuid, now)
        };
        for uuid in retried {
            if let Some(request) = rows.requests.get_mut(&uuid) {
                request.container_uuid = Some(next.uuid.clone());
                request.container_count += 1;
                request.cumulative_cost += container.cost;
            }
        }
        rows.containers.insert(next.uuid.clone(), next);
    }
}

/// Merges the specifications of several requests: the least restrictive partitions and run time, all features, and
/// preemptible only if every request is.
fn merge_specs(works: &[ContainerSpec]) -> ContainerSpec {
    let Some(first) = works.first() else { return ContainerSpec::default() };
    let mut all = first.clone();
    let anywhere = works.iter().any(|work| work.partitions().is_empty());
    let mut partitions: Vec<String> =
        if anywhere { Vec::new() } else { works.iter().flat_map(ContainerSpec::partitions).collect() };
    partitions.sort();
    partitions.dedup();
    let mut features: Vec<String> = works.iter().flat_map(ContainerSpec::features).collect();
    features.sort();
    features.dedup();
    let times: Vec<u64> = works.iter().map(ContainerSpec::max_run_time).collect();
    let longest = if times.contains(&0) { 0 } else { times.into_iter().max().unwrap_or(0) };
    let mut set = |name: &str, value: Value| {
        if all.scheduling_parameters.contains_key(name) || works.len() > 1 {
            all.scheduling_parameters.insert(name.to_owned(), value);
        }
    };
    set("partitions", partitions.into());
    if !features.is_empty() {
        set("features", features.into());
    }
    set("preemptible", works.iter().all(ContainerSpec::is_preemptible).into());
    set("max_run_time", longest.into());
    all
}

/// Ends the requests that an ended container made.
fn end_child_requests(rows: &mut QueueRows) {
    let orphans: Vec<String> = rows
        .requests
        .values()
        .filter(|request| {
            request.state == RequestState::Committed && matches!(rows.parent_state(request), Some((false, _)))
        })
        .map(|request| request.uuid.clone())
        .collect();
    for uuid in orphans {
        let Some(request) = rows.requests.get(&uuid) else { continue };
        let container = request.container_uuid.as_ref().and_then(|uuid| rows.containers.get(uuid));
        let runs = container.is_some_and(|one| one.state == Status::Running);
        if let Some(request) = rows.requests.get_mut(&uuid) {
            request.priority = 0;
            if !runs {
                request.state = RequestState::Final;
            }
        }
    }
}

fn update_priorities(rows: &mut QueueRows) {
    let uuids: Vec<String> = rows.containers.keys().cloned().collect();
    for uuid in uuids {
        let is_requested =
            rows.requests.values().any(|request| request.container_uuid.as_deref() == Some(&uuid));
        let live = rows.live_requests(&uuid);
        let weights =
            live.iter().filter_map(|uuid| rows.requests.get(uuid)).map(|one| rows.effective_priority(one));
        let weight = weights.max().unwrap_or(0);
        if let Some(container) = rows.containers.get_mut(&uuid)
            && is_requested
            && !container.is_final()
        {
            container.priority = weight;
        }
    }
}

/// Cancels queued containers that no request needs.
fn drop_unwanted(rows: &mut QueueRows, now: Timestamp) {
    let idle: Vec<String> = rows
        .containers
        .values()
        // A locked one has not started. Its holder finds it cancelled; if it were unlocked, no request would need it.
        .filter(|one| matches!(one.state, Status::Queued | Status::Locked))
        .filter(|one| rows.live_requests(&one.uuid).is_empty())
        .filter(|one| {
            rows.requests.values().any(|request| request.container_uuid.as_ref() == Some(&one.uuid))
        })
        .map(|one| one.uuid.clone())
        .collect();
    for uuid in idle {
        if let Some(container) = rows.containers.get_mut(&uuid) {
            container.state = Status::Cancelled;
            container.finished_at = Some(now);
            container.auth_uuid = None;
            container.runtime_status.insert("reason".to_owned(), "priority_zero".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container(uuid: &str, state: Status) -> Container {
        Container { state, ..Container::new(uuid.into(), ContainerSpec::default(), "u", Timestamp(1)) }
    }

    fn request(uuid: &str, container: &str, priority: u64) -> ContainerRequest {
        ContainerRequest {
            state: RequestState::Committed,
            container_uuid: Some(container.into()),
            container_count: 1,
            priority,
            ..ContainerRequest::new(uuid.into(), "u", Timestamp(1))
        }
    }

    fn rows(containers: &[Container], requests: &[ContainerRequest]) -> QueueRows {
        QueueRows {
            containers: containers.iter().map(|one| (one.uuid.clone(), one.clone())).collect(),
            requests: requests.iter().map(|one| (one.uuid.clone(), one.clone())).collect(),
            parents: BTreeMap::new(),
        }
    }

    fn applied(mut rows: QueueRows) -> QueueRows {
        let mut number = 0;
        propagate(&mut rows, Timestamp(9), &mut || {
            number += 1;
            format!("new{number}")
        });
        rows
    }

    #[test]
    fn a_container_has_the_highest_priority_of_its_open_requests() {
        let over = ContainerRequest { state: RequestState::Final, ..request("c", "k", 900) };
        let all = [request("a", "k", 5), request("b", "k", 7), over];
        let rows = applied(rows(&[container("k", Status::Queued)], &all));
        assert_eq!(rows.containers["k"].priority, 7);
    }

    #[test]
    fn a_child_request_inherits_the_priority_of_its_requesting_container() {
        let inner = ContainerRequest { requesting_container_uuid: Some("k".into()), ..request("i", "m", 1) };
        let held = ContainerRequest { requesting_container_uuid: Some("k".into()), ..request("h", "n", 0) };
        let containers =
            [container("k", Status::Running), container("m", Status::Queued), container("n", Status::Queued)];
        let rows = applied(rows(&containers, &[request("a", "k", 40), inner, held]));
        assert_eq!((rows.containers["m"].priority, rows.containers["n"].priority), (40, 0));
    }

    #[test]
    fn a_cancelled_container_is_replaced_until_its_requests_reach_their_limit() {
        let lost = container("k", Status::Cancelled);
        let spent = ContainerRequest { container_count: 3, ..request("b", "k", 5) };
        let unwanted = request("c", "k", 0);
        let rows = applied(rows(&[lost], &[request("a", "k", 5), spent, unwanted]));
        assert_eq!(rows.requests["a"].container_uuid.as_deref(), Some("new1"));
        assert_eq!(rows.requests["a"].container_count, 2);
        assert_eq!(
            (rows.requests["b"].state, rows.requests["c"].state),
            (RequestState::Final, RequestState::Final)
        );
        assert_eq!((rows.containers["new1"].state, rows.containers["new1"].priority), (Status::Queued, 5));
    }

    #[test]
    fn a_refused_container_is_not_retried() {
        let mut refused = container("k", Status::Cancelled);
        refused.runtime_status.insert("reason".into(), REFUSED_REASON.into());
        let rows = applied(rows(&[refused], &[request("a", "k", 5)]));
        assert_eq!((rows.requests["a"].state, rows.requests["a"].container_count), (RequestState::Final, 1));
        assert_eq!(rows.containers.len(), 1);
    }

    #[test]
    fn a_complete_container_makes_its_request_final_at_any_exit_code() {
        let done =
            Container { exit_code: Some(1), output: Some("o".into()), ..container("k", Status::Complete) };
        let rows = applied(rows(&[done], &[request("a", "k", 5)]));
        assert_eq!(
            (rows.requests["a"].state, rows.requests["a"].output_uuid.as_deref()),
            (RequestState::Final, Some("o"))
        );
        assert_eq!(rows.containers.len(), 1);
    }

    #[test]
    fn child_requests_end_when_their_requesting_container_ends() {
        let child = |uuid: &str, of: &str| ContainerRequest {
            requesting_container_uuid: Some("k".into()),
            ..request(uuid, of, 5)
        };
        let containers = [
            container("k", Status::Complete),
            Container { priority: 5, ..container("waits", Status::Queued) },
            Container { priority: 5, ..container("runs", Status::Running) },
        ];
        let rows = applied(rows(&containers, &[child("w", "waits"), child("r", "runs")]));
        assert_eq!(
            (rows.requests["w"].state, rows.containers["waits"].state),
            (RequestState::Final, Status::Cancelled)
        );
        assert_eq!((rows.requests["r"].state, rows.requests["r"].priority), (RequestState::Committed, 0));
        assert_eq!((rows.containers["runs"].state, rows.containers["runs"].priority), (Status::Running, 0));
    }

    #[test]
    fn a_shared_container_merges_the_scheduling_parameters_of_its_requests() {
        let with = |uuid: &str, scheduling: Value| ContainerRequest {
            work: ContainerSpec {
                scheduling_parameters: scheduling.as_object().cloned().unwrap_or_default(),
                ..ContainerSpec::default()
            },
            ..request(uuid, "k", 5)
        };
        let a = with("a", json!({ "partitions": ["x"], "preemptible": true, "max_run_time": 10 }));
        let b = with("b", json!({ "partitions": ["y"], "preemptible": false, "max_run_time": 20 }));
        let rows = applied(rows(&[container("k", Status::Cancelled)], &[a, b]));
        let both = &rows.containers["new1"].work.scheduling_parameters;
        assert_eq!(
            Value::Object(both.clone()),
            json!({ "partitions": ["x", "y"], "preemptible": false, "max_run_time": 20 })
        );
    }

    #[test]
    fn a_queued_or_locked_container_without_open_requests_is_cancelled() {
        let mut gone = request("r", "c", 5);
        gone.state = RequestState::Final;
        for state in [Status::Queued, Status::Locked] {
            let mut rows = rows(&[container("c", state)], &[gone.clone()]);
            propagate(&mut rows, Timestamp(9), &mut || unreachable!("nothing new is wanted"));
            assert_eq!(rows.containers["c"].state, Status::Cancelled, "{state}");
        }
        let mut runs = rows(&[container("c", Status::Running)], &[gone]);
        propagate(&mut runs, Timestamp(9), &mut || unreachable!("nothing new is wanted"));
        assert_eq!(runs.containers["c"].state, Status::Running, "what runs is ended by who runs it");
    }
}
