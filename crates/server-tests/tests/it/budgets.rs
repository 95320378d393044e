//! Usage of projects over time, and budgets: jobs beyond one wait, and events say so.

use serde_json::{Value, json};
use windlass_model::plan::budget::{day_of, start_of};
use windlass_server::services::budgets;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    job_test_env::JobTestEnv,
    project_order::apply,
    quotas::{finish, wait_for_message},
};

on_both! {
    usage_is_listed_by_project_user_class_and_time
    what_runs_counts_for_usage_until_now
    a_run_over_a_budget_waits_and_starts_when_it_is_raised
    a_run_that_cannot_end_within_a_budget_is_refused
    a_budget_records_its_warning_and_its_cap_once
    budgets_of_a_project_are_set_by_global_admins_and_those_of_members_by_managers
}

async fn today(env: &JobTestEnv) -> i64 {
    day_of(env.server.app.db().now().await.unwrap())
}

/// Adds usage of a user: hours of GPUs and dollars.
async fn spend(
    env: &JobTestEnv,
    (project, user, class): (&str, &str, &str),
    day: i64,
    hours: i64,
    dollars: i64,
) {
    let sql = format!(
        "INSERT INTO usage_days (day, project_id, user_id, class, jobs, gpu_ms, cpu_ms, cost, weighted) \
         SELECT {day}, p.id, u.id, '{class}', 1, {}, {}, {}, 0 FROM projects p, users u \
         WHERE p.name = '{project}' AND u.name = '{user}'",
        hours * 3_600_000,
        hours * 8 * 3_600_000,
        dollars * 1_000_000
    );
    env.write(&sql, vec![]).await;
}

async fn set(env: &JobTestEnv, budget: Value) -> Value {
    env.server.admin("/api/project/main/budgets/set", budget).await["budgets"][0].clone()
}

async fn usage_is_listed_by_project_user_class_and_time(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 0, 1).await;
    let mira = env.server.user("mira").await;
    env.server.admin("/api/projects/create", json!({"project_name": "lab"})).await;
    env.server.join("main", &[("mira", "user")]).await;
    let today = today(&env).await;
    spend(&env, ("main", "admin", "normal"), today, 1, 10).await;
    spend(&env, ("main", "mira", "normal"), today, 2, 4).await;
    spend(&env, ("main", "mira", "idle"), today - 1, 4, 1).await;
    spend(&env, ("main", "mira", "idle"), today - 40, 100, 100).await;
    spend(&env, ("lab", "admin", "urgent"), today, 8, 3).await;
    let list = async |token: &str, body: Value| env.server.ok(token, "/api/usage/list", body).await;
    let rows = |report: &Value, fields: &[&str]| -> Vec<Vec<Value>> {
        let row = |row: &Value| fields.iter().map(|field| row[field].clone()).collect();
        report["rows"].as_array().unwrap().iter().map(row).collect()
    };
    let by_user = list(ADMIN_TOKEN, json!({"projects": ["main"], "by": ["user", "class"]})).await;
    assert_eq!(
        rows(&by_user, &["user", "class", "gpu_hours", "cpu_hours", "cost", "jobs"]),
        [
            vec![json!("admin"), json!("normal"), json!(1.0), json!(8.0), json!(10.0), json!(1)],
            vec![json!("mira"), json!("normal"), json!(2.0), json!(16.0), json!(4.0), json!(1)],
            vec![json!("mira"), json!("idle"), json!(4.0), json!(32.0), json!(1.0), json!(1)],
        ]
    );
    assert_eq!(by_user["total"]["gpu_hours"], 7.0);
    let all = list(ADMIN_TOKEN, json!({"by": ["project"]})).await;
    assert_eq!(rows(&all, &["project", "cost", "from"]).len(), 2, "{all}");
    // Members see their projects only, and nothing of others.
    let seen = list(&mira, json!({"by": ["project", "day"]})).await;
    let day = |day: i64| json!(start_of(day));
    let days = rows(&seen, &["project", "from", "cost"]);
    assert_eq!(
        days,
        [vec![json!("main"), day(today - 1), json!(1.0)], vec![json!("main"), day(today), json!(14.0)]]
    );
    let path = "/api/usage/list";
    env.server.refused(&mira, path, json!({"projects": ["lab"]}), "resource_not_exists").await;
    let since = json!({"projects": ["main"], "since": start_of(today - 40), "until": start_of(today - 40)});
    let old = list(ADMIN_TOKEN, since).await;
    assert_eq!(rows(&old, &["gpu_hours", "user"]), [vec![json!(100.0), Value::Null]]);
    for wrong in [json!({"by": ["day", "month"]}), json!({"since": start_of(today + 2)})] {
        assert_eq!(env.server.post(ADMIN_TOKEN, path, &wrong.to_string()).await.0, 422, "{wrong}");
    }
    env.end().await;
}

async fn what_runs_counts_for_usage_until_now(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    apply(&env, "main", "one", json!({"class": "idle"})).await;
    env.wait_for_job("one", "running").await;
    // It holds its GPU since two hours ago, perhaps since yesterday.
    env.write(
        "UPDATE jobs SET held_at = held_at - 7200000000, provisioned_at = provisioned_at - 7200000000",
        vec![],
    )
    .await;
    let body = json!({"projects": ["main"], "by": ["class"]});
    let running = env.server.admin("/api/usage/list", body.clone()).await["rows"][0].clone();
    assert_eq!((&running["class"], &running["jobs"]), (&json!("idle"), &json!(0)));
    let hours = running["gpu_hours"].as_f64().unwrap();
    assert!((2.0..2.2).contains(&hours), "{running}");
    // A quarter of the host's half a dollar per hour.
    assert!((running["cost"].as_f64().unwrap() - hours * 0.125).abs() < 1e-4, "{running}");
    assert!((running["cpu_hours"].as_f64().unwrap() - hours * 8.0).abs() < 1e-3, "{running}");
    finish(&env).await;
    env.wait_for_run("one", "done").await;
    // Once it has ended, it counts once.
    let ended = env.server.admin("/api/usage/list", body).await["rows"][0].clone();
    assert_eq!(ended["jobs"], 1);
    assert!((hours..hours + 0.2).contains(&ended["gpu_hours"].as_f64().unwrap()), "{ended}");
    env.end().await;
}

async fn a_run_over_a_budget_waits_and_starts_when_it_is_raised(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 4).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "user")]).await;
    spend(&env, ("main", "admin", "normal"), today(&env).await, 5, 10).await;
    let listed = set(&env, json!({"unit": "cost", "cap": 10})).await;
    assert_eq!(
        (&listed["spent"], &listed["state"], &listed["period"]),
        (&json!(10.0), &json!("exhausted"), &json!("month"))
    );
    apply(&env, "main", "one", json!({})).await;
    wait_for_message(&env, "one", "the project has spent $10.00 of its budget of $10.00 for this month")
        .await;
    let why = env.server.admin("/api/project/main/runs/why", json!({"run_name": "one"})).await;
    assert_eq!(why["jobs"][0]["refusals"][0]["shortfalls"][0]["kind"], "over_budget", "{why}");
    // It can start with the next month.
    assert_eq!(why["turn"]["starts_at"], listed["ends_at"], "{why}");
    set(&env, json!({"unit": "cost", "cap": 20, "warn": 10})).await;
    env.wait_for_job("one", "running").await;
    // A budget of a member counts what the member used.
    env.server
        .admin(
            "/api/project/main/budgets/set",
            json!({"unit": "gpu-hours", "cap": 5, "period": "day", "username": "admin"}),
        )
        .await;
    apply(&env, "main", "two", json!({})).await;
    wait_for_message(&env, "two", "the member has spent 5.").await;
    let spec = JobTestEnv::spec(
        "hers",
        json!({"resources": {"cpu": "1..", "memory": "0..", "gpu": "1..", "disk": null}}),
    );
    env.server
        .ok(&mira, "/api/project/main/runs/apply", json!({"plan": {"run_spec": spec}, "force": true}))
        .await;
    env.wait_for_job("hers", "running").await;
    let named = json!({"unit": "gpu-hours", "period": "day", "username": "admin"});
    env.server.admin("/api/project/main/budgets/delete", named.clone()).await;
    env.wait_for_job("two", "running").await;
    let path = "/api/project/main/budgets/delete";
    env.server.refused(ADMIN_TOKEN, path, named, "resource_not_exists").await;
    env.end().await;
}

async fn a_run_that_cannot_end_within_a_budget_is_refused(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    set(&env, json!({"unit": "gpu-hours", "cap": 8, "period": "day"})).await;
    let resources = json!({"cpu": "1..", "memory": "0..", "gpu": "4..", "disk": null});
    let spec = |limit: &str| JobTestEnv::spec("long", json!({"resources": resources, "max_duration": limit}));
    let body =
        |limit: &str| json!({"run_spec": spec(limit), "plan": {"run_spec": spec(limit)}, "force": true});
    for path in ["get_plan", "apply"] {
        let path = format!("/api/project/main/runs/{path}");
        let message = env.server.refused(ADMIN_TOKEN, &path, body("3h"), "error").await;
        let want = "may use 12.0 GPU hours until its `max_duration`, but the budget of the project for this day is 8.0 GPU hours, \
                    of which 0.0 GPU hours are spent, until ";
        assert!(message.contains(want), "{message}");
    }
    env.server.admin("/api/project/main/runs/apply", body("2h")).await;
    env.wait_for_job("long", "running").await;
    env.end().await;
}

async fn a_budget_records_its_warning_and_its_cap_once(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 0, 1).await;
    set(&env, json!({"unit": "cost", "warn": 7, "cap": 9, "period": "week"})).await;
    let events = async || {
        budgets::record_levels(&env.server.app).await.unwrap();
        budgets::record_levels(&env.server.app).await.unwrap();
        let sql = "SELECT reason, message FROM events WHERE reason IN ('budget_warning', 'budget_exhausted') ORDER BY seq";
        let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
        rows.iter().map(|row| (row.text(0).unwrap(), row.text(1).unwrap())).collect::<Vec<_>>()
    };
    let today = today(&env).await;
    spend(&env, ("main", "admin", "normal"), today, 0, 6).await;
    assert_eq!(events().await, []);
    spend(&env, ("main", "admin", "idle"), today, 0, 2).await;
    let warned = events().await;
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(
        warned[0].0 == "budget_warning"
            && warned[0].1.starts_with("Budget of $7.00 for this week has reached its warning"),
        "{warned:?}"
    );
    spend(&env, ("main", "admin", "urgent"), today, 0, 2).await;
    let used_up = events().await;
    assert_eq!((used_up.len(), used_up[1].0.as_str()), (2, "budget_exhausted"));
    assert!(used_up[1].1.contains("is used up") && used_up[1].1.ends_with("($10.00 spent)"), "{used_up:?}");
    env.end().await;
}

async fn budgets_of_a_project_are_set_by_global_admins_and_those_of_members_by_managers(
    ground: &ServerFixture,
) {
    let env = JobTestEnv::new(ground, 0, 1).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "manager")]).await;
    let path = "/api/project/main/budgets/set";
    let message = env.server.refused(&mira, path, json!({"unit": "cost", "cap": 1}), "error").await;
    assert!(message.contains("only a global admin can set a budget"), "{message}");
    env.server.ok(&mira, path, json!({"unit": "cost", "cap": 1, "username": "mira"})).await;
    for wrong in [
        json!({"unit": "euros", "cap": 1}),
        json!({"unit": "cost"}),
        json!({"unit": "cost", "cap": -1}),
        json!({"unit": "cost", "cap": 1, "warn": 2}),
        json!({"unit": "cost", "cap": 1, "period": "year"}),
    ] {
        assert_eq!(env.server.post(ADMIN_TOKEN, path, &wrong.to_string()).await.0, 422, "{wrong}");
    }
    env.server.join("main", &[("mira", "user")]).await;
    let body = json!({"unit": "cost", "cap": 9, "username": "mira"}).to_string();
    assert_eq!(env.server.post(&mira, path, &body).await.0, 403);
    let listed = env.server.ok(&mira, "/api/project/main/budgets/list", json!({})).await;
    assert_eq!(
        (&listed["budgets"][0]["cap"], &listed["budgets"][0]["state"]),
        (&json!(1.0), &json!("within"))
    );
    env.end().await;
}
