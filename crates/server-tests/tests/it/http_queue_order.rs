//! Order of the container queue between users and projects, as dispatchers read it.

use serde_json::{Value, json};
use windlass_model::{
    dispatch::turns::{JobRank, OwnerShare, QueueUsage},
    plan::usage::{HALF_LIFE, weighted_secs_at},
};
use windlass_server::{
    db::Val,
    services::queue::{Requester, object_uuid, requests},
};

use crate::{
    http::{ServerFixture, on_both},
    http_queue::{QueueClient, text_field},
    job_test_env::JobTestEnv,
};

on_both! {
    a_page_in_the_order_of_turns_contains_containers_of_every_user
    what_a_container_held_while_it_ran_is_counted_once_for_its_user
    jobs_of_runs_count_for_their_project_with_its_class_and_share
}

const QUEUED: &str = "containers?count=none&order=[%22turn%22]&filters=[[%22state%22,%22=%22,%22Queued%22]]";

async fn queued(queue: &QueueClient<'_>, dispatcher: &str, limit: usize) -> (Vec<String>, QueueUsage) {
    let page = queue.ok(dispatcher, "GET", &format!("{QUEUED}&limit={limit}"), Value::Null).await;
    let items = page["items"].as_array().unwrap().iter();
    let uuids = items.map(|item| text_field(item, "uuid")).collect();
    (uuids, serde_json::from_value(page["usage"].clone()).unwrap())
}

async fn submit(queue: &QueueClient<'_>, token: &str, priority: u32) -> String {
    text_field(&queue.submit(token, json!({ "priority": priority })).await, "container_uuid")
}

async fn a_page_in_the_order_of_turns_contains_containers_of_every_user(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (ada, bob) = (server.create_queue_user("ada").await, server.create_queue_user("bob").await);
    let mut of_ada = Vec::new();
    for priority in [1000, 999, 998] {
        of_ada.push(submit(&queue, &ada, priority).await);
    }
    let (later, sooner) = (submit(&queue, &bob, 1).await, submit(&queue, &bob, 2).await);
    let dispatcher = queue.dispatcher().await;
    let (first, _) = queued(&queue, &dispatcher, 2).await;
    assert!(first.contains(&of_ada[0]) && first.contains(&sooner), "{first:?}");
    let (all, usage) = queued(&queue, &dispatcher, 100).await;
    assert_eq!(all.len(), 5);
    assert_eq!(all[4], of_ada[2], "{all:?}");
    assert!(usage.owners.is_empty() && usage.jobs.is_empty(), "nothing is used yet: {usage:?}");
    // One that has waited for a week comes before the others of its user.
    let old = "UPDATE containers SET created_at = created_at - 604800000000 WHERE uuid = $1";
    let unit = windlass_server::db::Unit::new().exec(old, vec![Val::from(later.as_str())]);
    server.app.db().write(unit).await.unwrap();
    let (first, _) = queued(&queue, &dispatcher, 2).await;
    assert!(first.contains(&of_ada[0]) && first.contains(&later), "{first:?}");
    // It shows how much others use, so only dispatchers may read it; and nothing can be selected by it.
    assert_eq!(queue.call(&ada, "GET", QUEUED, Value::Null).await.0, 403);
    let by_turn = "containers?filters=[[%22turn%22,%22=%22,1]]";
    assert_eq!(queue.call(&dispatcher, "GET", by_turn, Value::Null).await.0, 422);
    assert_eq!(queue.call(&dispatcher, "GET", "logs?order=[%22turn%22]", Value::Null).await.0, 422);
}

async fn what_a_container_held_while_it_ran_is_counted_once_for_its_user(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let ada = server.create_queue_user("ada").await;
    let more = json!({ "runtime_constraints": { "vcpus": 1, "ram": 1024, "gpu": { "stack": "cuda", "device_count": 2 } } });
    let running = text_field(&queue.submit(&ada, more).await, "container_uuid");
    let waiting = submit(&queue, &ada, 5).await;
    let dispatcher = queue.dispatcher().await;
    let lock = queue.ok(&dispatcher, "POST", &format!("containers/{running}/lock"), Value::Null).await;
    // Locked, it is held and not used.
    let (_, usage) = queued(&queue, &dispatcher, 10).await;
    let owner = usage.owners.first().unwrap();
    assert_eq!((owner.held, owner.used, owner.weight), (2_000, 0.0, 1), "{usage:?}");
    let executor = text_field(&lock, "executor_token");
    let path = format!("containers/{running}");
    let change = |state: &str| json!({ "container": { "state": state, "attempt": 1, "exit_code": 0 } });
    let run = json!({ "container": { "state": "Running", "attempt": 1 } });
    queue.ok(&executor, "PUT", &path, run).await;
    // It has run for the time after which usage counts half.
    let earlier = "UPDATE containers SET held_weighted = 2000 * CAST($1 AS DOUBLE PRECISION) WHERE uuid = $2";
    let now = server.app.db().now().await.unwrap();
    let since = weighted_secs_at(now - HALF_LIFE);
    let unit =
        windlass_server::db::Unit::new().exec(earlier, vec![Val::Real(since), Val::from(running.as_str())]);
    server.app.db().write(unit).await.unwrap();
    // Use since ever would be worth the mean life of usage; use for the half-life is worth half of that.
    let mean_life = HALF_LIFE.0 as f64 / 1e6 / std::f64::consts::LN_2;
    let expected = 2_000.0 * mean_life / 2.0;
    let is_close = |used: f64| (used / expected - 1.0).abs() < 0.001;
    let (_, usage) = queued(&queue, &dispatcher, 10).await;
    let owner = usage.owners.first().unwrap();
    assert!(owner.held == 2_000 && is_close(owner.used), "{owner:?}, expected {expected}");
    queue.ok(&executor, "PUT", &path, change("Complete")).await;
    let (uuids, usage) = queued(&queue, &dispatcher, 10).await;
    assert_eq!(uuids, [waiting]);
    let owner = usage.owners.first().unwrap();
    assert!(owner.held == 0 && is_close(owner.used), "{owner:?}, expected {expected}");
}

async fn jobs_of_runs_count_for_their_project_with_its_class_and_share(ground: &ServerFixture) {
    // Jobs that hold three of four blocks; two of them are in the queue of containers instead.
    let env = JobTestEnv::new(ground, 1, 4).await;
    let queue = QueueClient { server: &env.server };
    for name in ["runs", "waits", "idle"] {
        let more = if name == "idle" { json!({ "class": "idle" }) } else { json!({}) };
        env.apply(name, more).await;
        env.wait_for_job(name, "running").await;
    }
    let quota = json!({ "resource": "cpu", "share": 9, "max": 100 });
    env.server.admin("/api/project/main/quotas/set", quota).await;
    let sql = "SELECT r.name, j.id, j.held_cpus, j.held_units, p.id, r.user_id FROM jobs j JOIN runs r ON r.id = j.run_id \
               JOIN projects p ON p.id = j.project_id";
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    let project = rows[0].text(4).unwrap();
    let (cpus, units) = (rows[0].int(2).unwrap(), rows[0].int(3).unwrap());
    let mut containers = Vec::new();
    for row in rows.iter().filter(|row| row.text(0).unwrap() != "runs") {
        let job = row.id(1).unwrap();
        let request = json!({
            "state": "Committed", "priority": 7, "container_image": "none", "command": ["true"],
            "output_path": "/out", "mounts": { "/out": { "kind": "tmp" } },
            "runtime_constraints": { "vcpus": 1, "ram": 1024 }, "use_existing": false,
        });
        let asker = Requester::for_user(row.id(5).unwrap());
        let uuid = object_uuid("xvhdp", row.text(1).unwrap().as_bytes());
        let made =
            requests::create_for_job(&env.server.app, &asker, &uuid, job, request.as_object().unwrap());
        containers.push((row.text(0).unwrap(), made.await.unwrap().container_uuid.unwrap()));
    }
    let dispatcher = queue.dispatcher().await;
    let (listed, usage) = queued(&queue, &dispatcher, 10).await;
    assert_eq!(listed.len(), 2);
    for (name, uuid) in containers {
        let rank: &JobRank = &usage.jobs[&uuid];
        assert_eq!(
            (rank.owner.as_str(), rank.class.as_str()),
            (project.as_str(), if name == "idle" { "idle" } else { "normal" })
        );
        assert_eq!(rank.amounts["cpu"], u64::try_from(cpus).unwrap());
    }
    let [owner] = &usage.owners[..] else { panic!("{usage:?}") };
    assert_eq!(owner.owner, project);
    // What waits is neither held nor counted for the share.
    assert_eq!(owner.held, u64::try_from(units).unwrap(), "{usage:?}");
    let used = u64::try_from(cpus).unwrap();
    assert_eq!(owner.shares, [OwnerShare { resource: "cpu".into(), share: 9, used }]);
    // A variable does not make a container a job.
    let forged = json!({ "environment": { "WINDLASS_JOB_ID": rows[0].text(1).unwrap() } });
    let ada = env.server.create_queue_user("ada").await;
    let forged = text_field(&queue.submit(&ada, forged).await, "container_uuid");
    let (listed, usage) = queued(&queue, &dispatcher, 10).await;
    assert!(listed.contains(&forged) && !usage.jobs.contains_key(&forged), "{usage:?}");
    env.end().await;
}
