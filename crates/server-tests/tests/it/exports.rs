//! Fleets and gateways that projects share: who may export, which jobs are placed where, and what ends with an export.

use serde_json::{Value, json};
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    job_test_env::JobTestEnv,
};

on_both! {
    a_job_runs_on_a_fleet_that_another_project_exports
    a_fleet_that_is_not_exported_is_neither_used_nor_named
    freed_blocks_wake_jobs_of_all_projects_that_share_the_fleet
    a_job_on_an_exported_fleet_ends_when_the_export_does
    an_exported_volume_is_mounted_by_name_until_the_export_ends
    an_import_is_ended_by_the_importing_project
    exports_are_created_changed_listed_and_deleted
    an_export_requires_an_admin_of_both_projects
    an_export_to_all_projects_is_changed_by_global_admins_alone
    a_job_on_an_imported_fleet_is_subject_to_the_host_policy_of_its_own_project
    members_of_one_project_see_no_job_of_the_other_on_a_shared_instance
    imported_fleets_and_gateways_are_listed_and_hide_jobs_of_others
}

/// A server with one host of project `main`, and a project `other` without any.
async fn two_projects(ground: &ServerFixture) -> JobTestEnv {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.server.admin("/api/projects/create", json!({"project_name": "other"})).await;
    env
}

async fn export(env: &JobTestEnv) {
    let sent = json!({"name": "shared", "importer_projects": ["other"], "exported_fleets": ["hosts"]});
    env.server.admin("/api/project/main/exports/create", sent).await;
}

/// Applies a task in project `other`.
async fn apply(env: &JobTestEnv, name: &str, more: Value) -> Value {
    let plan = json!({"plan": {"run_spec": JobTestEnv::spec(name, more)}, "force": true});
    env.server.admin("/api/project/other/runs/apply", plan).await
}

async fn wait_for(env: &JobTestEnv, project: &str, name: &str, status: &str) -> Value {
    eventually_ok_async(&format!("{name} is {status}"), async || {
        let run =
            env.server.admin(&format!("/api/project/{project}/runs/get"), json!({"run_name": name})).await;
        if run["status"] == status { Ok(run) } else { Err(run) }
    })
    .await
}

async fn a_job_runs_on_a_fleet_that_another_project_exports(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    export(&env).await;
    let named = ["", "main/hosts", "hosts"];
    for (number, fleet) in named.iter().enumerate() {
        let name = format!("guest-{number}");
        let fleets = if fleet.is_empty() { json!({}) } else { json!({"fleets": [fleet]}) };
        apply(&env, &name, fleets).await;
        let run = wait_for(&env, "other", &name, "running").await;
        let place = &run["latest_job_submission"]["job_provisioning_data"]["hostname"];
        assert_eq!(place, "host-0", "{run:#}");
        env.hosts.finish_all();
        env.mark_due().await;
        wait_for(&env, "other", &name, "done").await;
    }
    env.end().await;
}

async fn a_fleet_that_is_not_exported_is_neither_used_nor_named(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    let body = json!({"run_spec": JobTestEnv::spec("guest", json!({}))});
    let plan = env.server.admin("/api/project/other/runs/get_plan", body).await;
    assert_eq!(plan["job_plans"][0]["offers"], json!([]), "{plan:#}");
    assert!(!plan.to_string().contains("hosts"), "{plan:#}");
    apply(&env, "guest", json!({})).await;
    let run = wait_for(&env, "other", "guest", "failed").await;
    assert!(!run.to_string().contains("hosts"), "{run:#}");
    let spec = JobTestEnv::spec("named", json!({"fleets": ["main/hosts"]}));
    let path = "/api/project/other/runs/get_plan";
    let message = env.server.refused(ADMIN_TOKEN, path, json!({"run_spec": spec}), "error").await;
    assert!(message.contains("not exported to `other`"), "{message}");
    export(&env).await;
    let plan = env.server.admin(path, json!({"run_spec": spec})).await;
    assert_eq!(plan["job_plans"][0]["total_offers"], 1, "{plan:#}");
    env.end().await;
}

async fn freed_blocks_wake_jobs_of_all_projects_that_share_the_fleet(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    export(&env).await;
    env.apply("first", json!({})).await;
    env.wait_for_job("first", "running").await;
    apply(&env, "second", json!({})).await;
    env.apply("third", json!({})).await;
    // Both have been evaluated, so that both wait for the host.
    eventually_ok_async("both wait", async || {
        let sql = "SELECT count(*) FROM jobs WHERE status = 'submitted' AND shortfalls IS NOT NULL";
        let waiting = env.server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap();
        if waiting == 2 { Ok(()) } else { Err(waiting) }
    })
    .await;
    env.hosts.finish_all();
    env.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
    wait_for(&env, "other", "second", "running").await;
    env.hosts.finish_all();
    env.write("UPDATE jobs SET due_at = NULL WHERE status = 'running'", vec![]).await;
    wait_for(&env, "main", "third", "running").await;
    env.end().await;
}

async fn a_job_on_an_exported_fleet_ends_when_the_export_does(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    export(&env).await;
    apply(&env, "guest", json!({})).await;
    wait_for(&env, "other", "guest", "running").await;
    // A second export of the same fleet keeps it usable.
    let second = json!({"name": "again", "importer_projects": ["other"], "exported_fleets": ["hosts"]});
    env.server.admin("/api/project/main/exports/create", second).await;
    env.server.admin("/api/project/main/exports/delete", json!({"name": "shared"})).await;
    assert_eq!(wait_for(&env, "other", "guest", "running").await["status"], "running");
    let changed = json!({"name": "again", "remove_exported_fleets": ["hosts"]});
    env.server.admin("/api/project/main/exports/update", changed).await;
    let run = wait_for(&env, "other", "guest", "failed").await;
    let reason = &run["latest_job_submission"]["termination_reason"];
    assert_eq!(reason, "instance_access_revoked", "{run:#}");
    // The host is free for jobs of its own project.
    env.apply("own", json!({})).await;
    env.wait_for_job("own", "running").await;
    env.end().await;
}

/// A volume of project `main` with a disk.
async fn create_volume(env: &JobTestEnv) {
    let sql = "INSERT INTO volumes (id, project_id, user_id, name, configuration, external, status, created_at, last_processed_at) \
               SELECT new_uuid(), p.id, u.id, 'data', $1, FALSE, 'active', now_us(), now_us() FROM projects p, users u \
               WHERE p.name = 'main' AND u.name = 'admin'";
    let configuration =
        json!({"type": "volume", "name": "data", "backend": "aws", "region": "eu-west-1", "size": 10.0});
    env.write(sql, vec![configuration.to_string().into()]).await;
}

async fn an_exported_volume_is_mounted_by_name_until_the_export_ends(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    create_volume(&env).await;
    export(&env).await;
    let path = "/api/project/other/runs/get_plan";
    let plan = |mount: &str| json!({"run_spec": JobTestEnv::spec("reader", json!({"volumes": [mount]}))});
    for mount in ["data:/data", "main/data:/data"] {
        let message = env.server.refused(ADMIN_TOKEN, path, plan(mount), "error").await;
        assert!(message.contains("data` does not exist"), "{message}");
    }
    let changed = json!({"name": "shared", "add_exported_volumes": ["data"]});
    let export = env.server.admin("/api/project/main/exports/update", changed).await;
    assert_eq!(export["exported_volumes"][0]["name"], "data");
    let imports = env.server.admin("/api/project/other/imports/list", json!({})).await;
    assert_eq!(imports["imports"][0]["export"]["exported_volumes"][0]["name"], "data", "{imports}");
    for mount in ["data:/data", "main/data:/data"] {
        env.server.admin(path, plan(mount)).await;
    }
    let message = env.server.refused(ADMIN_TOKEN, path, plan("third/data:/data"), "error").await;
    assert!(message.contains("volume `third/data` does not exist"), "{message}");
    // A job that has it loses it with the export, although it may still use the host.
    apply(&env, "guest", json!({})).await;
    wait_for(&env, "other", "guest", "running").await;
    let sql = "INSERT INTO volume_holds (job_id, path, volume_id, instance_id) \
               SELECT j.id, '/data', v.id, j.instance_id FROM jobs j, volumes v WHERE v.name = 'data'";
    env.write(sql, vec![]).await;
    env.mark_due().await;
    let changed = json!({"name": "shared", "remove_exported_volumes": ["data"]});
    env.server.admin("/api/project/main/exports/update", changed).await;
    eventually_ok_async("the job ends", async || {
        let rows = env.server.app.db().query("SELECT termination_reason FROM jobs", vec![]).await.unwrap();
        let reason = rows[0].opt_text(0).unwrap();
        if reason.as_deref() == Some("instance_access_revoked") { Ok(()) } else { Err(format!("{reason:?}")) }
    })
    .await;
    env.end().await;
}

async fn an_import_is_ended_by_the_importing_project(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    export(&env).await;
    let listed = env.server.admin("/api/project/other/imports/list", json!({})).await;
    let import = &listed["imports"][0]["export"];
    assert_eq!((&import["project_name"], &import["name"]), (&json!("main"), &json!("shared")));
    assert_eq!(import["exported_fleets"][0]["name"], "hosts");
    let named = json!({"export_name": "shared", "export_project_name": "main"});
    env.server.admin("/api/project/other/imports/delete", named.clone()).await;
    assert_eq!(env.server.admin("/api/project/other/imports/list", json!({})).await["imports"], json!([]));
    let path = "/api/project/other/imports/delete";
    env.server.refused(ADMIN_TOKEN, path, named.clone(), "resource_not_exists").await;
    let global = json!({"name": "shared", "set_global": true});
    env.server.admin("/api/project/main/exports/update", global).await;
    let message = env.server.refused(ADMIN_TOKEN, path, named, "error").await;
    assert!(message.contains("for all projects"), "{message}");
    env.end().await;
}

async fn exports_are_created_changed_listed_and_deleted(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    env.server.admin("/api/projects/create", json!({"project_name": "third"})).await;
    export(&env).await;
    let again = json!({"name": "shared"});
    env.server.refused(ADMIN_TOKEN, "/api/project/main/exports/create", again, "resource_exists").await;
    let list =
        async || env.server.admin("/api/project/main/exports/list", json!({})).await["exports"].clone();
    let listed = list().await;
    assert_eq!(listed[0]["imports"], json!([{"project_name": "other"}]));
    assert_eq!(listed[0]["is_global"], false);
    let changed = json!({"name": "shared", "add_importer_projects": ["third"],
        "remove_importer_projects": ["other"], "set_global": true});
    let export = env.server.admin("/api/project/main/exports/update", changed).await;
    assert_eq!(export["imports"], json!([{"project_name": "third"}]));
    assert_eq!(export["is_global"], true);
    let back = json!({"name": "shared", "unset_global": true, "remove_exported_fleets": ["hosts"]});
    let export = env.server.admin("/api/project/main/exports/update", back).await;
    assert_eq!((&export["is_global"], &export["exported_fleets"]), (&json!(false), &json!([])));
    let back = json!({"name": "shared", "add_exported_fleets": ["hosts"]});
    let export = env.server.admin("/api/project/main/exports/update", back).await;
    assert_eq!(export["exported_fleets"][0]["name"], "hosts");
    for (wrong, word) in [
        (json!({"name": "x1", "exported_fleets": ["none"]}), "fleet `none` does not exist"),
        (json!({"name": "x1", "exported_gateways": ["none"]}), "gateway `none` does not exist"),
        (json!({"name": "x1", "exported_volumes": ["none"]}), "volume `none` does not exist"),
        (json!({"name": "x1", "importer_projects": ["none"]}), "project `none` does not exist"),
        (json!({"name": "x1", "importer_projects": ["main"]}), "cannot import its own"),
        (json!({"name": "UP"}), "invalid name"),
    ] {
        let path = "/api/project/main/exports/create";
        let message = env.server.refused(ADMIN_TOKEN, path, wrong, "error").await;
        assert!(message.contains(word), "{message}");
    }
    env.server.admin("/api/project/main/exports/delete", json!({"name": "shared"})).await;
    assert_eq!(list().await, json!([]));
    env.end().await;
}

async fn an_export_requires_an_admin_of_both_projects(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "admin")]).await;
    let path = "/api/project/main/exports/create";
    let to_other = json!({"name": "shared", "importer_projects": ["other"], "exported_fleets": ["hosts"]});
    // A project that she cannot see does not exist for her.
    let message = env.server.refused(&mira, path, to_other.clone(), "error").await;
    assert!(message.contains("project `other` does not exist"), "{message}");
    env.server.join("other", &[("mira", "manager")]).await;
    let message = env.server.refused(&mira, path, to_other.clone(), "error").await;
    assert!(message.contains("only an admin of project `other`"), "{message}");
    let global = json!({"name": "all", "is_global": true, "exported_fleets": ["hosts"]});
    let message = env.server.refused(&mira, path, global, "error").await;
    assert!(message.contains("only a global admin"), "{message}");
    env.server.join("other", &[("mira", "admin")]).await;
    env.server.ok(&mira, path, to_other).await;
    env.server.join("main", &[("mira", "user")]).await;
    let delete = json!({"name": "shared"}).to_string();
    assert_eq!(env.server.post(&mira, "/api/project/main/exports/delete", &delete).await.0, 403);
    env.end().await;
}

async fn imported_fleets_and_gateways_are_listed_and_hide_jobs_of_others(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    let edge = json!({"configuration": {"type": "gateway", "name": "edge", "backend": "remote",
        "region": "here", "domain": "d.example"}});
    env.server.admin("/api/project/main/gateways/create", edge).await;
    let sent = json!({"name": "shared", "importer_projects": ["other"], "exported_fleets": ["hosts"],
        "exported_gateways": ["edge"]});
    env.server.admin("/api/project/main/exports/create", sent).await;
    env.apply("private-name", json!({})).await;
    env.wait_for_job("private-name", "running").await;
    for (kind, name) in [("fleets", "hosts"), ("gateways", "edge")] {
        let path = format!("/api/project/other/{kind}/list");
        assert_eq!(env.server.admin(&path, json!({})).await, json!([]));
        let listed = env.server.admin(&path, json!({"include_imported": true})).await;
        assert_eq!((&listed[0]["name"], &listed[0]["project_name"]), (&json!(name), &json!("main")));
        let own = env.server.admin(&format!("/api/project/main/{kind}/list"), json!({})).await;
        assert_eq!(own[0]["name"], name);
    }
    env.hosts.finish_all();
    env.mark_due().await;
    env.wait_for_run("private-name", "done").await;
    apply(&env, "guest", json!({})).await;
    wait_for(&env, "other", "guest", "running").await;
    let own = env.server.admin("/api/project/main/fleets/list", json!({})).await;
    assert_eq!(own[0]["instances"][0]["busy_blocks"], 1);
    assert!(!own.to_string().contains("guest"), "{own:#}");
    // A service of the other project may use the gateway.
    let service = json!({"type": "service", "name": "web", "port": 80, "commands": ["x"], "image": "busybox",
        "user": "root", "gateway": "main/edge"});
    let spec = json!({"run_name": "web", "configuration": service, "profile": {"name": "default"}});
    let spec = json!({"plan": {"run_spec": spec}, "force": true});
    let path = "/api/project/other/runs/apply";
    let message = env.server.refused(ADMIN_TOKEN, path, spec, "gateway_error").await;
    assert!(message.contains("gateway `edge` is offline"), "{message}");
    env.end().await;
}

async fn an_export_to_all_projects_is_changed_by_global_admins_alone(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    let mira = env.server.user("mira").await;
    env.server.join("main", &[("mira", "admin")]).await;
    let all = json!({"name": "all", "is_global": true});
    env.server.admin("/api/project/main/exports/create", all).await;
    // Every project would run its jobs on her fleet, without the consent of any.
    for change in [
        json!({"name": "all", "add_exported_fleets": ["hosts"]}),
        json!({"name": "all", "remove_exported_fleets": ["hosts"]}),
        json!({"name": "all", "unset_global": true}),
    ] {
        let path = "/api/project/main/exports/update";
        let message = env.server.refused(&mira, path, change.clone(), "error").await;
        assert!(message.contains("only a global admin"), "{message}");
        env.server.admin(path, change).await;
    }
    env.server.ok(&mira, "/api/project/main/exports/delete", json!({"name": "all"})).await;
    env.end().await;
}

async fn a_job_on_an_imported_fleet_is_subject_to_the_host_policy_of_its_own_project(ground: &ServerFixture) {
    let env = two_projects(ground).await;
    export(&env).await;
    // The policy of a host reserves mounts for the project in the signed specification.
    let mount = json!({"volumes": ["/data/vision:/data"]});
    for project in ["other", "main"] {
        let plan = json!({"plan": {"run_spec": JobTestEnv::spec("mounts", mount.clone())}, "force": true});
        env.server.admin(&format!("/api/project/{project}/runs/apply"), plan).await;
        wait_for(&env, project, "mounts", "running").await;
        let spec = env.hosts.specs.lock().last().cloned().unwrap();
        assert_eq!((spec.project.as_str(), spec.instance_mounts.len()), (project, 1));
        env.hosts.finish_all();
        env.mark_due().await;
        wait_for(&env, project, "mounts", "done").await;
    }
    env.end().await;
}

/// What a caller sees of the instances that a project owns or imports.
async fn shared_views(env: &JobTestEnv, token: &str, project: &str) -> Vec<Value> {
    let mut views = Vec::new();
    for path in ["/api/instances/list", "/api/instances/rows", "/api/fleets/list"] {
        views.push(env.server.ok(token, path, json!({"include_imported": true, "limit": 100})).await);
    }
    let path = format!("/api/project/{project}/fleets/list");
    views.push(env.server.ok(token, &path, json!({"include_imported": true})).await);
    views
}

async fn members_of_one_project_see_no_job_of_the_other_on_a_shared_instance(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 2).await;
    env.server.admin("/api/projects/create", json!({"project_name": "other"})).await;
    export(&env).await;
    let (ada, ben) = (env.server.user("ada").await, env.server.user("ben").await);
    env.server.join("main", &[("ada", "admin")]).await;
    env.server.join("other", &[("ben", "admin")]).await;
    let of_a_block = json!({"resources": {"gpu": "2", "cpu": "1..", "memory": "1GB..", "disk": null}});
    env.apply("of-main", of_a_block.clone()).await;
    env.wait_for_job("of-main", "running").await;
    for (token, project) in [(&ada, "main"), (&ben, "other")] {
        for view in shared_views(&env, token, project).await {
            let view = view.to_string();
            assert!(view.contains("hosts-0"), "{project} uses the instance: {view}");
            assert_eq!(view.contains("of-main"), project == "main", "{project}: {view}");
        }
    }
    apply(&env, "of-other", of_a_block).await;
    wait_for(&env, "other", "of-other", "running").await;
    for (token, hidden, shown) in [(&ada, "of-other", "of-main"), (&ben, "of-main", "of-other")] {
        let project = if hidden == "of-other" { "main" } else { "other" };
        for view in shared_views(&env, token, project).await {
            let view = view.to_string();
            assert!(!view.contains(hidden) && view.contains(shown), "{project}: {view}");
        }
    }
    env.end().await;
}
