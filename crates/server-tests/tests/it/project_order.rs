//! Order of the jobs of projects that share a fleet: classes, shares, and usage.

use serde_json::{Value, json};
use windlass_model::plan::usage;
use windlass_server::db::Unit;
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ServerFixture, on_both},
    job_test_env::JobTestEnv,
};

/// Token of leases by which a test keeps jobs from being placed.
const HOLDER: &str = "held";

on_both! {
    an_urgent_run_starts_before_others_and_an_idle_one_after_them
    a_project_within_its_share_starts_before_one_that_borrows
    the_project_that_used_less_for_its_weight_starts_first
    usage_is_counted_once_by_day_user_and_class
}

/// A host with four blocks, which the projects `main`, `left` and `right` share, and which `main` occupies.
async fn full_house(ground: &ServerFixture) -> JobTestEnv {
    let env = JobTestEnv::new(ground, 1, 4).await;
    for project in ["left", "right"] {
        env.server.admin("/api/projects/create", json!({"project_name": project})).await;
    }
    let importers =
        json!({"name": "shared", "importer_projects": ["left", "right"], "exported_fleets": ["hosts"]});
    env.server.admin("/api/project/main/exports/create", importers).await;
    for number in 0..4 {
        let name = format!("first-{number}");
        apply(&env, "main", &name, json!({})).await;
        env.wait_for_job(&name, "running").await;
    }
    env
}

/// Applies a task that holds one block: 8 CPUs and a GPU.
pub(crate) async fn apply(env: &JobTestEnv, project: &str, name: &str, more: Value) {
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null});
    let mut configuration = json!({"resources": resources});
    configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let plan = json!({"plan": {"run_spec": JobTestEnv::spec(name, configuration)}, "force": true});
    env.server.admin(&format!("/api/project/{project}/runs/apply"), plan).await;
}

/// Waits until so many jobs were evaluated and wait for capacity.
pub(crate) async fn wait_for_queue(env: &JobTestEnv, count: i64) {
    eventually_ok_async("the jobs wait", async || {
        let sql =
            "SELECT count(*) FROM jobs WHERE status = 'submitted' AND (shortfalls IS NOT NULL OR parked)";
        let waiting = env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap();
        if waiting == count { Ok(()) } else { Err(waiting) }
    })
    .await;
}

/// Names of the runs that run, sorted, once `count` of them do and none of the earlier ones.
async fn running(env: &JobTestEnv, count: usize, earlier: &[&str]) -> Vec<String> {
    eventually_ok_async("the freed blocks are used", async || {
        let sql = "SELECT r.name FROM runs r JOIN jobs j ON j.run_id = r.id WHERE j.status = 'running' ORDER BY r.name";
        let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
        let names: Vec<String> = rows.iter().map(|row| row.text(0).unwrap()).collect();
        if names.len() == count && names.iter().all(|name| !earlier.iter().any(|prefix| name.starts_with(prefix))) { Ok(names) } else { Err(names.join(" ")) }
    })
    .await
}

/// Ends everything that runs. Nothing is placed before all blocks are free: a round in which only one is free sees the
/// evaluated jobs that no other round holds, and not all of the queue.
async fn finish(env: &JobTestEnv) {
    const EVALUATED: &str = "status = 'submitted' AND parked = FALSE";
    let db = env.server.app.db();
    eventually_ok_async("the queue is held", async || {
        let hold = format!(
            "UPDATE jobs SET lock_token = '{HOLDER}', lock_owner = 'test', lock_expires_at = now_us() + 3600000000 \
             WHERE {EVALUATED} AND lock_token IS NULL"
        );
        db.write(Unit::new().exec(hold, vec![])).await.unwrap().done().unwrap();
        let others = format!("SELECT count(*) FROM jobs WHERE {EVALUATED} AND lock_token <> '{HOLDER}'");
        let others = db.query(others, vec![]).await.unwrap()[0].int(0).unwrap();
        if others == 0 { Ok(()) } else { Err(others) }
    })
    .await;
    env.hosts.finish_all();
    env.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
    eventually_ok_async("all blocks are free", async || {
        let busy = "SELECT count(*) FROM instances WHERE busy_blocks > 0";
        let busy = db.query(busy, vec![]).await.unwrap()[0].int(0).unwrap();
        if busy == 0 { Ok(()) } else { Err(busy) }
    })
    .await;
    let release = format!(
        "UPDATE jobs SET lock_token = NULL, lock_owner = NULL, lock_expires_at = NULL, due_at = NULL \
         WHERE lock_token = '{HOLDER}'"
    );
    env.write(&release, vec![]).await;
}

async fn an_urgent_run_starts_before_others_and_an_idle_one_after_them(ground: &ServerFixture) {
    let env = full_house(ground).await;
    let class = |class: &str| json!({"class": class, "priority": if class == "idle" { 100 } else { 0 }});
    apply(&env, "left", "idle", class("idle")).await;
    for name in ["normal-1", "normal-2", "normal-3"] {
        apply(&env, "right", name, class("normal")).await;
    }
    apply(&env, "right", "urgent", class("urgent")).await;
    wait_for_queue(&env, 5).await;
    finish(&env).await;
    assert_eq!(running(&env, 4, &["first"]).await, ["normal-1", "normal-2", "normal-3", "urgent"]);
    finish(&env).await;
    assert_eq!(running(&env, 1, &["first", "normal", "urgent"]).await, ["idle"]);
    // Only managers may get ahead of other projects.
    let mira = env.server.user("mira").await;
    env.server.join("left", &[("mira", "user")]).await;
    let spec = JobTestEnv::spec("mine", json!({"class": "urgent"}));
    let body = json!({"plan": {"run_spec": spec}, "force": true});
    let message = env.server.refused(&mira, "/api/project/left/runs/apply", body.clone(), "error").await;
    assert!(message.contains("only managers of the project may run in class `urgent`"), "{message}");
    env.server.join("left", &[("mira", "manager")]).await;
    env.server.ok(&mira, "/api/project/left/runs/apply", body).await;
    env.end().await;
}

async fn a_project_within_its_share_starts_before_one_that_borrows(ground: &ServerFixture) {
    let env = full_house(ground).await;
    env.server.admin("/api/project/right/quotas/set", json!({"resource": "gpu", "share": 3})).await;
    for number in 0..5 {
        apply(&env, "left", &format!("left-{number}"), json!({})).await;
    }
    for number in 0..5 {
        apply(&env, "right", &format!("right-{number}"), json!({})).await;
    }
    wait_for_queue(&env, 10).await;
    finish(&env).await;
    assert_eq!(running(&env, 4, &["first"]).await, ["left-0", "right-0", "right-1", "right-2"]);
    env.end().await;
}

async fn the_project_that_used_less_for_its_weight_starts_first(ground: &ServerFixture) {
    let env = full_house(ground).await;
    // `left` used four GPUs for a day, and `right` three.
    let now = env.server.app.db().now().await.unwrap();
    let day = now.0 / 86_400_000_000;
    let admin = "(SELECT id FROM users WHERE name = 'admin')";
    for (project, gpus) in [("left", 4), ("right", 3)] {
        // Decayed, it is the time of so many thousandths of units.
        let weighted = f64::from(gpus) * 86_400_000.0 / usage::decayed_secs(1.0, now);
        let sql = format!(
            "INSERT INTO usage_days (day, project_id, user_id, class, jobs, gpu_ms, cpu_ms, cost, weighted) \
             SELECT {day}, p.id, {admin}, 'normal', 1, 0, 0, 0, {weighted:e} FROM projects p WHERE p.name = '{project}'"
        );
        env.write(&sql, vec![]).await;
    }
    for project in ["left", "right"] {
        for number in 0..6 {
            apply(&env, project, &format!("{project}-{number}"), json!({})).await;
        }
    }
    wait_for_queue(&env, 12).await;
    finish(&env).await;
    assert_eq!(running(&env, 4, &["first"]).await, ["right-0", "right-1", "right-2", "right-3"]);
    let update = |weight: i64| json!({"weight": weight});
    env.server.admin("/api/projects/left/update", update(2)).await;
    finish(&env).await;
    assert_eq!(running(&env, 4, &["first", "right"]).await, ["left-0", "left-1", "left-2", "left-3"]);
    env.end().await;
}

async fn usage_is_counted_once_by_day_user_and_class(ground: &ServerFixture) {
    let env = full_house(ground).await;
    apply(&env, "left", "idle", json!({"class": "idle"})).await;
    wait_for_queue(&env, 1).await;
    finish(&env).await;
    assert_eq!(running(&env, 1, &["first", "normal", "urgent"]).await, ["idle"]);
    finish(&env).await;
    let rows = eventually_ok_async("the usage is written", async || {
        let sql = "SELECT p.name, d.class, d.jobs, d.gpu_ms, d.cpu_ms, d.weighted FROM usage_days d \
                   JOIN projects p ON p.id = d.project_id ORDER BY p.name";
        let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
        if rows.len() == 2 { Ok(rows) } else { Err(rows.len()) }
    })
    .await;
    let jobs = |at: usize| -> (String, String, i64) {
        (rows[at].text(0).unwrap(), rows[at].text(1).unwrap(), rows[at].int(2).unwrap())
    };
    assert_eq!(jobs(0), ("left".to_owned(), "idle".to_owned(), 1));
    assert_eq!(jobs(1), ("main".to_owned(), "normal".to_owned(), 4));
    for row in &rows {
        assert!(row.int(3).unwrap() >= 0 && row.real(5).unwrap() > 0.0);
        // Eight CPUs for each GPU.
        assert!((row.int(4).unwrap() - 8 * row.int(3).unwrap()).abs() <= 32);
    }
    env.end().await;
}
