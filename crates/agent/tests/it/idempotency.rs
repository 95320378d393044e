//! Every call that changes something, repeated and sixteen at once: one effect, by the journal.

use axum::http::StatusCode;
use futures_util::future::join_all;
use serde_json::json;
use windlass_agent::shim::journal::JournalEvent;
use windlass_api::agent::{
    EPOCH_SEEN_HEADER,
    shim::{TaskInfo, TaskStatus},
};

use crate::support::{
    client::Reply,
    leftover_check::{assert_clean, count_records},
    shim::{Setup, Shim},
};

const CONCURRENT_CALLS: usize = 16;

fn statuses(replies: &[Reply]) -> Vec<StatusCode> {
    let mut statuses: Vec<_> = replies.iter().map(|reply| reply.status).collect();
    statuses.dedup();
    statuses
}

/// Submits, ends and removes one task, each sixteen times at once and once more.
async fn check_concurrent_calls(setup: Setup) {
    let shim = Shim::start(setup);
    let home = shim.home();
    let mut spec = shim.spec("many");
    // All tests share the ports of the host.
    spec["network_mode"] = json!("bridge");
    let replies = join_all((0..CONCURRENT_CALLS).map(|_| shim.try_submit(&spec, 1))).await;
    assert_eq!(statuses(&replies), [200], "{replies:?}");
    let id = shim.submit(&spec, 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    assert_eq!(count_records(&home, id, |kind| *kind == JournalEvent::Submitted), 1);
    assert_eq!(count_records(&home, id, |kind| matches!(kind, JournalEvent::ContainerStarted { .. })), 1);

    let client = shim.client().epoch(1);
    let (remove, nothing) = (format!("/api/tasks/{id}/remove"), json!({}));
    let early = join_all((0..CONCURRENT_CALLS).map(|_| client.post(&remove, &nothing))).await;
    assert_eq!(statuses(&early), [409], "{early:?}");

    let terminate = format!("/api/tasks/{id}/terminate");
    let bodies: Vec<_> =
        (0..CONCURRENT_CALLS).map(|n| json!({"termination_reason": "terminated_by_user", "termination_message": n.to_string(), "timeout": 0})).collect();
    let replies = join_all(bodies.iter().map(|body| client.post(&terminate, body))).await;
    assert_eq!(statuses(&replies), [200], "{replies:?}");
    let ended = shim.wait_for(id, TaskStatus::Terminated).await;
    let again: TaskInfo =
        client.post(&terminate, &json!({"termination_reason": "aborted_by_user"})).await.json();
    assert_eq!(again, ended, "the first reason is kept");
    assert_eq!(count_records(&home, id, |kind| matches!(kind, JournalEvent::TerminateRequested { .. })), 1);
    assert_eq!(count_records(&home, id, |kind| matches!(kind, JournalEvent::Terminated { .. })), 1);
    assert_eq!(count_records(&home, id, |kind| matches!(kind, JournalEvent::ContainerExited { .. })), 1);

    let replies = join_all((0..CONCURRENT_CALLS).map(|_| client.post(&remove, &nothing))).await;
    assert_eq!(statuses(&replies), [200], "{replies:?}");
    assert_eq!(client.post(&remove, &json!({})).await.status, 200);
    assert_eq!(count_records(&home, id, |kind| *kind == JournalEvent::Removed), 1);
    assert_eq!(shim.try_submit(&spec, 2).await.status, 410);
    assert_eq!(client.get(&format!("/api/tasks/{id}")).await.status, 404);
    assert_clean(&home, &[id]).await;
}

#[tokio::test]
async fn a2_f20_sixteen_concurrent_calls_have_one_effect_with_docker() {
    check_concurrent_calls(Setup::docker()).await;
}

#[tokio::test]
async fn a2_f20_sixteen_concurrent_calls_have_one_effect_without_an_engine() {
    check_concurrent_calls(Setup::oci()).await;
}

#[tokio::test]
async fn a2_f20_sixteen_concurrent_calls_have_one_effect_with_processes() {
    check_concurrent_calls(Setup::process()).await;
}

#[tokio::test]
async fn l2_f2_a_server_that_lost_its_lease_changes_nothing() {
    let mut shim = Shim::start(Setup::process());
    let id = shim.submit(&shim.spec("fenced"), 5).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let old = shim.client().epoch(4);
    let late = [
        old.post(&format!("/api/tasks/{id}/terminate"), &json!({"timeout": 0})).await,
        old.post(&format!("/api/tasks/{id}/remove"), &json!({})).await,
        old.post(&format!("/api/tasks/{id}/runner/api/stop"), &json!({})).await,
    ];
    for reply in &late {
        assert_eq!(reply.status, 412, "{reply:?}");
        assert_eq!(reply.headers[EPOCH_SEEN_HEADER], "5");
    }
    assert_eq!(shim.info(id).await.status, TaskStatus::Running);
    let refused = |kind: &JournalEvent| matches!(kind, JournalEvent::RefusedEpoch { .. });
    assert_eq!(count_records(&shim.home(), id, refused), late.len());
    // A newer epoch survives a kill, whatever the call was.
    let newer = shim.client().epoch(9);
    newer.get(&format!("/api/tasks/{id}/runner/api/healthcheck")).await;
    newer.post(&format!("/api/tasks/{id}/runner/api/stop"), &json!({})).await.expect(200);
    shim.kill();
    shim.restart();
    let late =
        shim.client().epoch(5).post(&format!("/api/tasks/{id}/terminate"), &json!({"timeout": 0})).await;
    assert_eq!(late.status, 412, "{late:?}");
    shim.terminate(id, 9, 0).await;
    shim.remove(id, 9).await;
    assert_clean(&shim.home(), &[id]).await;
}

#[tokio::test]
async fn r7_an_id_removed_before_its_submission_never_starts() {
    let mut shim = Shim::start(Setup::process());
    let spec = shim.spec("late");
    let id = spec["id"].as_str().unwrap().parse().unwrap();
    let client = shim.client();
    assert_eq!(client.post(&format!("/api/tasks/{id}/remove"), &json!({})).await.status, 404);
    shim.remove(id, 3).await;
    assert_eq!(shim.try_submit(&spec, 3).await.status, 410);
    shim.kill();
    shim.restart();
    assert_eq!(shim.try_submit(&spec, 4).await.status, 410);
    assert_clean(&shim.home(), &[id]).await;
}
