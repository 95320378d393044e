//! Messages of a managed job: why it waits, why it cannot start, and the origin of its log lines.

use serde_json::json;

use super::{launch, log, wait_until, wait_until_done, with_hosts};
use crate::test_env::{HostMode, IMAGE, TestEnv, engine_socket, load_busybox_image};

#[tokio::test]
async fn a_job_too_large_for_every_host_fails_its_prechecks_with_the_reason() {
    let (mut env, _hosts) = with_hosts(1, 1).await;
    let id = launch(&mut env, "name: huge\nresources: {cpus: 100000+}\nrun: echo\n", json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    let reason = seen["reason"].as_str().unwrap();
    assert_eq!(seen["status"], "FAILED_PRECHECKS", "{seen:#}");
    assert!(reason.starts_with("no instance can ever run it: "), "{reason}");
    assert!(reason.contains("needs at least 100000 CPUs, has "), "{reason}");
    let refusals = seen["tasks"][0]["why"]["refusals"].as_array().unwrap();
    assert_eq!(refusals.len(), 1, "{seen:#}");
}

#[tokio::test]
async fn a_job_waiting_for_a_busy_host_shows_the_reason_everywhere() {
    let (mut env, _hosts) = with_hosts(1, 1).await;
    let first = launch(&mut env, "name: first\nrun: sleep 600\n", json!({})).await;
    wait_until(&mut env, first, "it runs", |job| job["status"] == "RUNNING").await;
    let second = launch(&mut env, "name: second\nrun: echo\n", json!({})).await;
    let seen = wait_until(&mut env, second, "it says why it waits", |job| {
        job["reason"].as_str().is_some_and(|reason| reason.contains("is busy"))
    })
    .await;
    let reason = seen["reason"].as_str().unwrap();
    assert!(reason.starts_with("attempt 1 is waiting for nodes: "), "{reason}");
    let home = env.home().to_owned();
    let why = env.windlass(&home, &["why", "second"]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    // The list has the details, so the reason does not repeat them.
    assert!(why.contains("  why:  attempt 1 is waiting for nodes\n"), "{why}");
    assert!(why.contains("  does not fit:\n    simulated-1: is busy "), "{why}");
    let queue = env.windlass(&home, &["jobs", "queue", "-v"]);
    let queue = String::from_utf8_lossy(&queue.stdout).into_owned();
    assert!(queue.contains("attempt 1 is waiting for nodes"), "{queue}");
    for id in [second, first] {
        env.project("jobs/cancel", &json!({"job_ids": [id]})).await;
        wait_until_done(&mut env, id).await;
    }
}

#[tokio::test]
async fn messages_of_the_shell_itself_are_not_in_the_log() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let text = "setup: |\n  echo ready\n  sleep 0.1 &\n  wait\nrun: |\n  echo out\n  echo err >&2\n  sleep 0.1 &\n  wait\n  exit 3\n";
    let id = launch(&mut env, text, json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "FAILED", "{seen:#}");
    assert_eq!(log(&mut env, &seen, 0).await, "ready\nout\nerr\n");
}

#[tokio::test]
async fn output_of_group_tasks_is_followed_together_with_task_names() {
    let (env, _hosts) = with_hosts(2, 1).await;
    let dir = env.home().join("work");
    std::fs::create_dir_all(&dir).unwrap();
    let go = dir.join("go");
    // The first task ends only when the second has written: followed one after the other, neither would end.
    let text = format!(
        "name: g\nexecution: parallel\n---\nname: a\nrun: |\n  until [ -e {go} ]; do sleep 0.05; done\n  echo last\n\
         ---\nname: b\nrun: |\n  echo first\n  sleep 1\n  touch {go}\n",
        go = go.display()
    );
    std::fs::write(dir.join("group.yaml"), text).unwrap();
    let output = env.windlass(&dir, &["jobs", "launch", "-y", "group.yaml"]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(out, "b | first\na | last\n", "{err}\n{}", env.server_log());
    assert_eq!(output.status.code(), Some(0), "{err}");
}

#[tokio::test]
async fn a_docker_image_without_bash_fails_its_job_at_once_with_the_reason() {
    load_busybox_image(&engine_socket());
    let mut env = TestEnv::new(HostMode::Containers).await;
    let text = format!("name: bare\nresources: {{image_id: 'docker:{IMAGE}'}}\nrun: echo hi\n");
    let id = launch(&mut env, &text, json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    let task = &seen["tasks"][0];
    assert!(matches!(seen["status"].as_str(), Some("FAILED" | "FAILED_SETUP")), "{seen:#}");
    assert_eq!(task["attempt"], 1, "{seen:#}");
    assert!(task["reason"].as_str().is_some_and(|reason| reason.contains("bash")), "{task:#}");
}
