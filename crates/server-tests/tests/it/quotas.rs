//! Quotas: what a project and its members may hold at once.

use serde_json::{Value, json};
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    job_test_env::JobTestEnv,
};

on_both! {
    a_quota_of_any_resource_keeps_the_second_job_waiting
    quotas_limit_what_a_project_and_its_members_hold
    a_run_larger_than_a_quota_is_refused_when_it_is_submitted
    quotas_of_a_project_are_set_by_global_admins_and_those_of_members_by_managers
    jobs_that_are_placed_at_the_same_time_do_not_exceed_a_quota
    a_quota_of_a_member_does_not_limit_others
    a_plan_does_not_count_blocks_that_are_no_longer_kept
}

async fn set(env: &JobTestEnv, quota: Value) -> Value {
    env.server.admin("/api/project/main/quotas/set", quota).await
}

/// Applies a task that holds one of the four blocks: 8 CPUs, 16 GB and one GPU.
async fn apply(env: &JobTestEnv, name: &str) {
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null});
    env.apply(name, json!({"resources": resources})).await;
}

pub(crate) async fn wait_for_message(env: &JobTestEnv, name: &str, text: &str) {
    eventually_ok_async(text, async || {
        let run = env.run(name).await;
        let message = run["latest_job_submission"]["status_message"].as_str().unwrap_or_default();
        if message.contains(text) { Ok(()) } else { Err(run) }
    })
    .await;
}

pub(crate) async fn finish(env: &JobTestEnv) {
    env.hosts.finish_all();
    env.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
}

async fn quotas_limit_what_a_project_and_its_members_hold(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    let listed = set(&env, json!({"resource": "gpu:A100", "max": 2})).await;
    let want = json!({"username": null, "resource": "gpu:a100", "max": 2.0, "share": null, "used": 0.0});
    assert_eq!(listed["quotas"][0], want);
    for name in ["one", "two"] {
        apply(&env, name).await;
        env.wait_for_job(name, "running").await;
    }
    apply(&env, "three").await;
    wait_for_message(&env, "three", "of which the project holds 2 and may hold 2").await;
    let listed = env.server.admin("/api/project/main/quotas/list", json!({})).await;
    assert_eq!(listed["quotas"][0]["used"], 2.0);
    // It starts when others end.
    finish(&env).await;
    env.wait_for_job("three", "running").await;
    // A quota of the member, in CPUs.
    set(&env, json!({"resource": "cpu", "max": 8, "username": "admin"})).await;
    apply(&env, "four").await;
    wait_for_message(&env, "four", "needs 8 of `cpu`, of which the member holds 8 and may hold 8").await;
    // It starts when the quota is deleted.
    let named = json!({"resource": "cpu", "username": "admin"});
    env.server.admin("/api/project/main/quotas/delete", named.clone()).await;
    env.wait_for_job("four", "running").await;
    let path = "/api/project/main/quotas/delete";
    env.server.refused(ADMIN_TOKEN, path, named, "resource_not_exists").await;
    env.end().await;
}

async fn a_quota_of_any_resource_keeps_the_second_job_waiting(ground: &ServerFixture) {
    // A block is a GPU with 8 CPUs and 16 GB, for an eighth of a dollar per hour.
    let env = JobTestEnv::new(ground, 1, 4).await;
    for (at, (resource, max)) in
        [("gpu", 1.0), ("gpu:A100", 1.0), ("cpu", 8.0), ("memory", 16.0), ("price", 0.125)].iter().enumerate()
    {
        set(&env, json!({"resource": resource, "max": max})).await;
        let names = [format!("runs-{at}"), format!("waits-{at}")];
        apply(&env, &names[0]).await;
        env.wait_for_job(&names[0], "running").await;
        apply(&env, &names[1]).await;
        wait_for_message(&env, &names[1], &format!("of `{}`", resource.to_lowercase())).await;
        env.server.admin("/api/project/main/quotas/delete", json!({"resource": resource})).await;
        env.wait_for_job(&names[1], "running").await;
        finish(&env).await;
        for name in &names {
            env.wait_for_run(name, "done").await;
        }
    }
    env.end().await;
}

async fn a_run_larger_than_a_quota_is_refused_when_it_is_submitted(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 2, 1).await;
    set(&env, json!({"resource": "gpu", "max": 2})).await;
    set(&env, json!({"resource": "memory", "max": 32})).await;
    // A host costs half a dollar per hour.
    set(&env, json!({"resource": "price", "max": 0.4})).await;
    let base = json!({"cpu": "1..", "memory": "1GB..", "disk": null});
    for (more, word) in [
        (
            json!({}),
            "needs $0.5/h of `price`, but the project may hold at most $0.4/h by its quota, and holds $0/h now",
        ),
        (
            json!({"gpu": "3.."}),
            "needs 3 of `gpu`, but the project may hold at most 2 by its quota, and holds 0 now",
        ),
        (
            json!({"memory": "64GB.."}),
            "needs 64GB of `memory`, but the project may hold at most 32GB by its quota, and holds 0GB now",
        ),
    ] {
        let mut resources = base.clone();
        resources.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = JobTestEnv::spec("big", json!({"resources": resources}));
        for path in ["get_plan", "apply"] {
            let body = json!({"run_spec": spec, "plan": {"run_spec": spec}, "force": true});
            let path = format!("/api/project/main/runs/{path}");
            let message = env.server.refused(ADMIN_TOKEN, &path, body, "error").await;
            assert!(message.contains(word), "{message}");
        }
    }
    env.server.admin("/api/project/main/quotas/delete", json!({"resource": "price"})).await;
    // It requests little, but no host is small enough: it can never start.
    apply(&env, "whole").await;
    let run = env.wait_for_run("whole", "failed").await;
    assert!(run.to_string().contains("needs 4 of `gpu`"), "{run:#}");
    env.end().await;
}

async fn quotas_of_a_project_are_set_by_global_admins_and_those_of_members_by_managers(
    ground: &ServerFixture,
) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "manager")]).await;
    let path = "/api/project/main/quotas/set";
    let message = env.server.refused(&mira, path, json!({"resource": "cpu", "max": 1}), "error").await;
    assert!(message.contains("only a global admin"), "{message}");
    env.server.ok(&mira, path, json!({"resource": "cpu", "max": 1, "username": "mira"})).await;
    let unknown = json!({"resource": "cpu", "max": 1, "username": "none"});
    let message = env.server.refused(&mira, path, unknown, "error").await;
    assert!(message.contains("`none` is not a member"), "{message}");
    for wrong in [
        json!({"resource": "disk", "max": 1}),
        json!({"resource": "cpu", "max": -1}),
        json!({"resource": "cpu"}),
        json!({"resource": "cpu", "max": 1, "share": 2}),
        json!({"resource": "cpu", "share": 1, "username": "mira"}),
    ] {
        assert_eq!(env.server.post(ADMIN_TOKEN, path, &wrong.to_string()).await.0, 422, "{wrong}");
    }
    env.server.join("main", &[("mira", "user")]).await;
    let body = json!({"resource": "cpu", "max": 9, "username": "mira"}).to_string();
    assert_eq!(env.server.post(&mira, path, &body).await.0, 403);
    let listed = env.server.ok(&mira, "/api/project/main/quotas/list", json!({})).await;
    assert_eq!(listed["quotas"][0]["max"], 1.0);
    env.end().await;
}

/// Applies such a task as another user.
async fn apply_as(env: &JobTestEnv, token: &str, name: &str) {
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null});
    let spec = JobTestEnv::spec(name, json!({"resources": resources}));
    let body = json!({"plan": {"run_spec": spec}, "force": true});
    env.server.ok(token, "/api/project/main/runs/apply", body).await;
}

async fn a_quota_of_a_member_does_not_limit_others(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    for name in ["one", "two"] {
        apply(&env, name).await;
        env.wait_for_job(name, "running").await;
    }
    // The member holds more than a quota that is set later.
    set(&env, json!({"resource": "gpu", "max": 1, "username": "admin"})).await;
    set(&env, json!({"resource": "gpu", "max": 4})).await;
    apply_as(&env, &mira, "of-mira").await;
    env.wait_for_job("of-mira", "running").await;
    apply(&env, "three").await;
    wait_for_message(&env, "three", "of which the member holds 2 and may hold 1").await;
    let listed = env.server.admin("/api/project/main/quotas/list", json!({})).await;
    let used = |at: usize| (listed["quotas"][at]["username"].clone(), listed["quotas"][at]["used"].clone());
    assert_eq!([used(0), used(1)], [(json!(null), json!(3.0)), (json!("admin"), json!(2.0))], "{listed}");
    env.end().await;
}

async fn a_plan_does_not_count_blocks_that_are_no_longer_kept(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    set(&env, json!({"resource": "gpu", "max": 1, "username": "mira"})).await;
    apply_as(&env, &mira, "one").await;
    env.wait_for_job("one", "running").await;
    apply_as(&env, &mira, "two").await;
    wait_for_message(&env, "two", "of which the member holds 1 and may hold 1").await;
    let promised = "'[{\"job\":\"' || id || '\",\"project\":\"' || project_id || '\",\"instance\":\"' || \
                    (SELECT i.id FROM instances i) || '\",\"blocks\":3}]'";
    let set = |until: &str| format!("promised = {promised}, promised_until = now_us() {until} 60000000");
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null});
    let plan = json!({"run_spec": JobTestEnv::spec("plan", json!({"resources": resources}))});
    for (until, waits) in [("+", true), ("-", false)] {
        env.write_between_passes("jobs", &set(until), "status = 'submitted'").await;
        let plan = env.server.admin("/api/project/main/runs/get_plan", plan.clone()).await;
        assert_eq!(plan["job_plans"][0]["why"].is_object(), waits, "{:#}", plan["job_plans"][0]["why"]);
    }
    env.end().await;
}

async fn jobs_that_are_placed_at_the_same_time_do_not_exceed_a_quota(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 2, 4).await;
    set(&env, json!({"resource": "gpu", "max": 3})).await;
    let names: Vec<String> = (0..6).map(|number| format!("job-{number}")).collect();
    futures_util::future::join_all(names.iter().map(|name| apply(&env, name))).await;
    for round in 0..2 {
        eventually_ok_async("three jobs run", async || {
            let sql = "SELECT count(*) FROM jobs WHERE status = 'running'";
            let running = env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap();
            assert!(running <= 3, "the quota is exceeded in round {round}");
            if running == 3 { Ok(()) } else { Err(running) }
        })
        .await;
        finish(&env).await;
    }
    env.end().await;
}
