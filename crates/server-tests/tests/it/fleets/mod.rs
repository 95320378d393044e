//! Fleets and their instances with running pipelines, a fake cloud and scripted agents.

mod ssh_hosts;
mod test_env;

use std::{collections::BTreeSet, time::Duration};

use serde_json::json;
use windlass_server::db::Unit;
use windlass_testkit::wait::eventually_ok_async;

use self::test_env::{FakeCloud, FleetTestEnv, instance_id, offer};
use crate::http::{ServerFixture, on_both};

on_both! {
    a_fleet_creates_its_minimum_and_shows_its_instances
    a_job_creates_its_instance_and_runs_on_it
    offers_are_tried_in_price_order
    a_job_holds_what_was_created_for_it_and_not_what_else_was_offered
    a_job_fails_with_the_reasons_if_every_offer_is_refused
    a_lost_write_creates_no_second_instance_at_any_backend
    concurrent_placement_by_two_replicas_respects_the_fleet_maximum
    nodes_of_a_replica_are_created_at_one_backend
    idle_instances_are_terminated_down_to_the_fleet_minimum
    a_lost_instance_is_replaced_after_a_delay
    deleting_a_fleet_deletes_all_its_instances
    a_preempted_instance_interrupts_its_job
    four_tasks_share_one_instance_by_blocks
    stopping_a_job_during_provisioning_leaves_no_instance
    creation_policy_reuse_creates_no_instance_and_is_named_in_the_message
    a_changed_fleet_spec_replaces_idle_instances
    deleting_one_instance_keeps_the_others
    no_instance_is_created_at_a_backend_not_granted_to_the_project
}

const SMALL_TYPE: &str = "small";

async fn start_with_one_cloud(ground: &ServerFixture) -> (FleetTestEnv, std::sync::Arc<FakeCloud>) {
    let offers = vec![offer("aws", SMALL_TYPE, 4, 1.0), offer("aws", "spot", 4, 2.0)];
    let (env, mut clouds) = FleetTestEnv::set(ground, 1, |db| vec![FakeCloud::new("aws", db, offers)]).await;
    (env, clouds.remove(0))
}

async fn a_fleet_creates_its_minimum_and_shows_its_instances(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 2, "max": 3}, "tags": {"team": "a"}})).await;
    let instances = env.wait_for_instances("pool", &["idle", "idle"]).await;
    assert_eq!(instances[0]["instance_type"]["name"], SMALL_TYPE);
    assert_eq!((&instances[0]["backend"], &instances[0]["region"]), (&json!("aws"), &json!("here")));
    assert_eq!((&instances[0]["price"], &instances[0]["total_blocks"]), (&json!(1.0), &json!(1)));
    assert_eq!(instances[0]["hostname"], format!("host-{}", instance_id(&instances[0])));
    assert_eq!(cloud.book.lock().made.len(), 2);
    let sql = "SELECT agent_version, seen_at FROM instances";
    let seen = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(seen[0].str(0).unwrap(), "1.2.3");
    assert!(seen[0].opt_int(1).unwrap().is_some());
    let path = "/api/project/main/fleets/get";
    let body = json!({"name": "pool"});
    env.until("no message", path, body, |fleet| fleet["status_message"].is_null()).await;
    env.stop().await;
}

async fn a_job_creates_its_instance_and_runs_on_it(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}})).await;
    env.run("train", json!({})).await;
    env.wait_for_run("train", "running").await;
    let instances = env.wait_for_instances("pool", &["busy"]).await;
    assert_eq!((&instances[0]["busy_blocks"], &instances[0]["name"]), (&json!(1), &json!("pool-0")));
    assert_eq!(cloud.book.lock().requested.len(), 1);
    env.hosts.finish_all();
    env.mark_due("jobs").await;
    env.wait_for_run("train", "done").await;
    let instances = env.wait_for_instances("pool", &["idle"]).await;
    assert_eq!(instances[0]["busy_blocks"], 0);
    env.stop().await;
}

async fn a_job_holds_what_was_created_for_it_and_not_what_else_was_offered(ground: &ServerFixture) {
    let offers = |db: &_| {
        let offers = vec![offer("aws", "cheap", 4, 1.0), offer("aws", "dear", 16, 30.0)];
        vec![FakeCloud::new("aws", db, offers)]
    };
    let (env, clouds) = FleetTestEnv::set(ground, 1, offers).await;
    clouds[0].book.lock().hold = true;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}})).await;
    env.run("train", json!({})).await;
    let held = async || {
        let rows = env
            .server
            .app
            .db()
            .query("SELECT held_cpus, held_price, status FROM jobs", vec![])
            .await
            .unwrap();
        (rows[0].int(0).unwrap(), rows[0].int(1).unwrap())
    };
    // Any of them may be granted.
    eventually_ok_async("the largest counts", async || match held().await {
        (16, 30_000_000) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    clouds[0].book.lock().hold = false;
    env.wait_for_run("train", "running").await;
    assert_eq!(held().await, (4, 1_000_000));
    env.stop().await;
}

async fn offers_are_tried_in_price_order(ground: &ServerFixture) {
    let (env, clouds) = FleetTestEnv::set(ground, 1, |db| {
        let aws = vec![offer("aws", "cheap", 4, 1.0), offer("aws", "dear", 4, 3.0)];
        vec![FakeCloud::new("aws", db, aws), FakeCloud::new("gcp", db, vec![offer("gcp", "middle", 4, 2.0)])]
    })
    .await;
    clouds[0].book.lock().none_of.insert("cheap".into());
    clouds[1].book.lock().none_of.insert("middle".into());
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}})).await;
    env.run("train", json!({})).await;
    env.wait_for_run("train", "running").await;
    let types = |cloud: &FakeCloud| {
        cloud.book.lock().requested.iter().map(|(_, kind)| kind.clone()).collect::<Vec<_>>()
    };
    assert_eq!(types(&clouds[0]), ["cheap", "dear"]);
    assert_eq!(types(&clouds[1]), ["middle"]);
    let instances = env.wait_for_instances("pool", &["busy"]).await;
    assert_eq!(
        (&instances[0]["instance_type"]["name"], &instances[0]["price"]),
        (&json!("dear"), &json!(3.0))
    );
    env.stop().await;
}

async fn a_job_fails_with_the_reasons_if_every_offer_is_refused(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    cloud.book.lock().none_of.extend([SMALL_TYPE.to_owned(), "spot".to_owned()]);
    // Both kinds: the run does not set `spot_policy`, so the fleet's value counts.
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}, "spot_policy": "auto"})).await;
    env.run("train", json!({})).await;
    let run = env.wait_for_run("train", "failed").await;
    let submission = &run["latest_job_submission"];
    assert_eq!(submission["termination_reason"], "failed_to_start_due_to_no_capacity");
    let message = submission["termination_reason_message"].as_str().unwrap();
    assert!(
        message.contains("2 offers were tried")
            && message.contains("no small")
            && message.contains("no spot"),
        "{message}"
    );
    env.wait_for_instances("pool", &[]).await;
    assert!(cloud.book.lock().made.is_empty());
    env.stop().await;
}

async fn a_lost_write_creates_no_second_instance_at_any_backend(ground: &ServerFixture) {
    let (env, clouds) = FleetTestEnv::set(ground, 1, |db| {
        vec![
            FakeCloud::new("aws", db, vec![offer("aws", "cheap", 4, 1.0)]),
            FakeCloud::new("gcp", db, vec![offer("gcp", "dear", 4, 2.0)]),
        ]
    })
    .await;
    clouds[0].book.lock().none_of.insert("cheap".into());
    clouds[1].book.lock().lose_locks = 2;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 1}})).await;
    let instances = env.wait_for_instances("pool", &["idle"]).await;
    assert_eq!(clouds[1].book.lock().requested.len(), 3, "two answers were lost");
    assert_eq!(clouds[1].book.lock().made.len(), 1);
    assert_eq!(clouds[0].book.lock().requested.len(), 1, "what another backend made, it cannot find again");
    assert_eq!(instances[0]["instance_type"]["name"], "dear");
    env.stop().await;
}

async fn concurrent_placement_by_two_replicas_respects_the_fleet_maximum(ground: &ServerFixture) {
    let offers = vec![offer("aws", SMALL_TYPE, 4, 1.0)];
    let (env, clouds) = FleetTestEnv::set(ground, 2, |db| vec![FakeCloud::new("aws", db, offers)]).await;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 2}})).await;
    for n in 0..6 {
        env.run(&format!("train-{n}"), json!({})).await;
    }
    env.wait_for_instances("pool", &["busy", "busy"]).await;
    assert_eq!(clouds[0].book.lock().made.len(), 2);
    let requested: BTreeSet<_> = clouds[0].book.lock().requested.iter().map(|(id, _)| *id).collect();
    assert_eq!(requested.len(), 2, "no third was ever asked for");
    env.stop().await;
}

async fn nodes_of_a_replica_are_created_at_one_backend(ground: &ServerFixture) {
    let (env, clouds) = FleetTestEnv::set(ground, 1, |db| {
        let aws = vec![offer("aws", SMALL_TYPE, 4, 1.0)];
        let gcp = vec![offer("gcp", SMALL_TYPE, 4, 2.0)];
        vec![FakeCloud::new("aws", db, aws), FakeCloud::new("gcp", db, gcp)]
    })
    .await;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 3}, "placement": "cluster"})).await;
    env.run("train", json!({"nodes": 3})).await;
    let instances = env.wait_for_instances("pool", &["busy", "busy", "busy"]).await;
    let places: BTreeSet<_> = instances.iter().map(|one| one["backend"].as_str().unwrap()).collect();
    assert_eq!(places.len(), 1);
    assert_eq!(clouds.iter().map(|cloud| cloud.book.lock().made.len()).sum::<usize>(), 3);
    env.wait_for_run("train", "running").await;
    env.stop().await;
}

async fn idle_instances_are_terminated_down_to_the_fleet_minimum(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 2}, "idle_duration": "1s"})).await;
    env.wait_for_instances("pool", &["idle"]).await;
    env.run("first", json!({})).await;
    env.wait_for_run("first", "running").await;
    env.run("second", json!({})).await;
    env.wait_for_run("second", "running").await;
    env.wait_for_instances("pool", &["busy", "busy"]).await;
    env.hosts.finish_all();
    env.mark_due("jobs").await;
    let left = env.wait_for_instances("pool", &["idle"]).await;
    assert_eq!(cloud.book.lock().made.len(), 1);
    assert_eq!(cloud.book.lock().deleted.len(), 1);
    let sql = "SELECT termination_reason FROM instances WHERE finished";
    let over = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(over.iter().map(|row| row.str(0).unwrap()).collect::<Vec<_>>(), ["idle_timeout"]);
    env.mark_due("instances").await;
    assert_eq!(env.wait_for_instances("pool", &["idle"]).await[0]["id"], left[0]["id"]);
    env.stop().await;
}

async fn a_lost_instance_is_replaced_after_a_delay(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 1}})).await;
    let first = instance_id(&env.wait_for_instances("pool", &["idle"]).await[0]);
    // Only an instance that the fleet has counted is replaced at once; otherwise the loss counts as another failed
    // attempt.
    env.wait_for_fleet("pool").await;
    cloud.book.lock().none_of.insert(SMALL_TYPE.into());
    cloud.book.lock().none_of.insert("spot".into());
    preempt(&env, &cloud, first).await;
    // The first attempt to replace it fails with a message; the next one waits for its minute.
    let failed = env.wait_for_instances("pool", &["terminated"]).await;
    assert!(failed[0]["termination_reason_message"].as_str().unwrap().contains("no small"), "{failed:?}");
    let path = "/api/project/main/fleets/get";
    let message = env
        .until("a fleet that says why", path, json!({"name": "pool"}), |seen| {
            seen["status_message"].as_str().is_some_and(|message| message.contains("no small"))
        })
        .await;
    assert_eq!(message["status"], "active");
    env.mark_due("fleets").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(env.wait_for_instances("pool", &["terminated"]).await[0]["id"], failed[0]["id"]);
    cloud.book.lock().none_of.clear();
    let earlier =
        Unit::new().exec("UPDATE fleets SET last_consolidated_at = last_consolidated_at - 61000000", vec![]);
    env.server.app.db().write(earlier).await.unwrap().done().unwrap();
    env.mark_due("fleets").await;
    let back = env.wait_for_instances("pool", &["idle"]).await;
    assert_ne!(instance_id(&back[0]), first);
    env.stop().await;
}

async fn preempt(env: &FleetTestEnv, cloud: &FakeCloud, id: windlass_model::id::InstanceId) {
    cloud.book.lock().taken_back.insert(id);
    env.hosts.silent.lock().insert(id);
    env.mark_due("instances").await;
}

async fn deleting_a_fleet_deletes_all_its_instances(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 2, "max": 2}})).await;
    let instances = env.wait_for_instances("pool", &["idle", "idle"]).await;
    env.server.admin("/api/project/main/fleets/delete", json!({"names": ["pool"]})).await;
    env.until("no fleets", "/api/project/main/fleets/list", json!({}), |seen| seen == &json!([])).await;
    assert!(cloud.book.lock().made.is_empty());
    for instance in &instances {
        assert!(env.hosts.forgotten.lock().contains(&instance_id(instance)));
    }
    let sql = "SELECT count(*) FROM instances WHERE NOT finished OR NOT deleted";
    let left = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(left[0].int(0).unwrap(), 0);
    env.stop().await;
}

async fn a_preempted_instance_interrupts_its_job(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}, "spot_policy": "spot"})).await;
    env.run("train", json!({"spot_policy": "spot"})).await;
    env.wait_for_run("train", "running").await;
    let id = instance_id(&env.wait_for_instances("pool", &["busy"]).await[0]);
    preempt(&env, &cloud, id).await;
    let run = env.wait_for_run("train", "failed").await;
    let submission = &run["latest_job_submission"];
    assert_eq!(submission["termination_reason"], "interrupted_by_no_capacity", "{submission:#}");
    env.wait_for_instances("pool", &[]).await;
    env.stop().await;
}

async fn four_tasks_share_one_instance_by_blocks(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 1}, "blocks": 4})).await;
    env.wait_for_instances("pool", &["idle"]).await;
    for n in 0..5 {
        env.run(&format!("train-{n}"), json!({})).await;
    }
    for n in 0..4 {
        env.wait_for_run(&format!("train-{n}"), "running").await;
    }
    let instances = env.wait_for_instances("pool", &["busy"]).await;
    assert_eq!((&instances[0]["busy_blocks"], &instances[0]["total_blocks"]), (&json!(4), &json!(4)));
    assert_eq!(env.hosts.tasks_on(instance_id(&instances[0])), 4);
    assert_eq!(
        env.wait_for_run("train-4", "submitted").await["status"],
        "submitted",
        "there is no fifth block"
    );
    env.hosts.finish_all();
    env.mark_due("jobs").await;
    env.wait_for_run("train-4", "running").await;
    assert_eq!(cloud.book.lock().made.len(), 1);
    env.stop().await;
}

async fn stopping_a_job_during_provisioning_leaves_no_instance(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    cloud.book.lock().hold = true;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}})).await;
    env.run("train", json!({})).await;
    env.wait_for_instances("pool", &["pending"]).await;
    env.stop_run("train").await;
    env.wait_for_run("train", "terminated").await;
    cloud.book.lock().hold = false;
    env.wait_for_instances("pool", &[]).await;
    assert!(cloud.book.lock().made.is_empty());
    let sql = "SELECT termination_reason, busy_blocks FROM instances";
    let over = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!((over[0].str(0).unwrap(), over[0].int(1).unwrap()), ("job_finished", 0));
    env.stop().await;
}

async fn creation_policy_reuse_creates_no_instance_and_is_named_in_the_message(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 0, "max": 1}})).await;
    env.run("train", json!({"creation_policy": "reuse"})).await;
    let run = env.wait_for_run("train", "failed").await;
    let message = run["latest_job_submission"]["termination_reason_message"].as_str().unwrap();
    assert!(message.contains("reuse"), "{message}");
    assert!(cloud.book.lock().requested.is_empty());
    env.stop().await;
}

async fn a_changed_fleet_spec_replaces_idle_instances(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 2}})).await;
    let first = env.wait_for_instances("pool", &["idle"]).await;
    env.fleet(
        "pool",
        json!({"nodes": {"min": 1, "max": 2}, "instance_types": ["spot"], "spot_policy": "auto"}),
    )
    .await;
    let path = "/api/project/main/fleets/get";
    let is_other = |seen: &serde_json::Value| {
        let all = seen["instances"].as_array().unwrap();
        all.len() == 1 && all[0]["status"] == "idle" && all[0]["instance_type"]["name"] == "spot"
    };
    env.until("another instance", path, json!({"name": "pool"}), is_other).await;
    assert!(cloud.book.lock().deleted.contains(&instance_id(&first[0])));
    let sql = "SELECT termination_reason FROM instances WHERE finished";
    let over = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(over[0].str(0).unwrap(), "fleet_spec_mismatch");
    env.stop().await;
}

async fn deleting_one_instance_keeps_the_others(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.fleet("pool", json!({"nodes": {"min": 0, "target": 2, "max": 2}})).await;
    env.wait_for_instances("pool", &["idle", "idle"]).await;
    let body = json!({"name": "pool", "instance_nums": [0]});
    env.server.admin("/api/project/main/fleets/delete_instances", body).await;
    let left = env.wait_for_instances("pool", &["idle"]).await;
    assert_eq!(left[0]["instance_num"], 1);
    assert_eq!(cloud.book.lock().made.len(), 1);
    env.stop().await;
}

/// Also for a fleet that names no backend at all.
async fn no_instance_is_created_at_a_backend_not_granted_to_the_project(ground: &ServerFixture) {
    let (env, cloud) = start_with_one_cloud(ground).await;
    env.server.admin("/api/backends/revoke", json!({"project_name": "main", "backend": "aws"})).await;
    env.fleet("pool", json!({"nodes": {"min": 1, "max": 2}})).await;
    let path = "/api/project/main/fleets/get";
    env.until("a fleet that says why", path, json!({"name": "pool"}), |seen| {
        seen["status_message"].as_str().is_some_and(|message| message.contains("grant-backend"))
    })
    .await;
    env.run("train", json!({"creation_policy": "reuse-or-create"})).await;
    let run = env.wait_for_run("train", "failed").await;
    assert!(run["latest_job_submission"]["instance_id"].is_null(), "{run:#}");
    assert!(cloud.book.lock().made.is_empty());
    env.server.grant("main", "aws").await;
    env.mark_due("fleets").await;
    env.wait_for_instances("pool", &["idle"]).await;
    env.stop().await;
}
