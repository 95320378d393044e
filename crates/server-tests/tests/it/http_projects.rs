//! Projects and members over HTTP.

use serde_json::{Value, json};
use windlass_server::config::SettingsSource;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    a_project_keeps_the_address_of_its_templates_until_it_is_reset
    a_project_has_a_default_image_which_precedes_that_of_the_server
    a_project_uses_only_backends_that_it_was_granted
    ssh_fleets_require_a_permission_that_only_admins_grant
    a_project_belongs_to_its_creator_and_names_are_unique
    members_are_added_removed_and_replaced_with_their_roles
    only_admins_appoint_admins_and_the_last_one_cannot_be_removed
    a_public_project_can_be_joined_and_left
    a_project_with_active_runs_cannot_be_deleted
    leaving_a_project_ends_access_at_once
}

fn members(project: &Value) -> Vec<(String, String)> {
    let mut list: Vec<_> = project["members"]
        .as_array()
        .unwrap()
        .iter()
        .map(|member| {
            let name = member["user"]["username"].as_str().unwrap().to_owned();
            (name, member["project_role"].as_str().unwrap().to_owned())
        })
        .collect();
    list.sort();
    list
}

async fn a_project_belongs_to_its_creator_and_names_are_unique(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let project = server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    assert_eq!(project["owner"]["username"], "mira");
    assert_eq!(project["is_public"], false);
    assert_eq!(members(&project), [("mira".into(), "admin".into())]);
    assert_eq!(project["members"][0]["permissions"]["can_manage_ssh_fleets"], false);
    assert_eq!(project["granted_backends"], json!([]), "none before one is granted");
    server
        .refused(ADMIN_TOKEN, "/api/projects/create", json!({ "project_name": "lab" }), "resource_exists")
        .await;
    for n in 0..9 {
        server.ok(&mira, "/api/projects/create", json!({ "project_name": format!("p{n}") })).await;
    }
    server.refused(&mira, "/api/projects/create", json!({ "project_name": "more" }), "error").await;
    let updated = server.ok(&mira, "/api/projects/lab/update", json!({ "is_public": true })).await;
    assert_eq!(updated["is_public"], true);
    let without = server.ok(&mira, "/api/projects/list_only_no_fleets", json!({})).await;
    assert_eq!(without.as_array().unwrap().len(), 10);
    server.stop().await;
}

async fn members_are_added_removed_and_replaced_with_their_roles(ground: &ServerFixture) {
    let server = ground.start().await;
    for name in ["mira", "noor", "otto"] {
        server.user(name).await;
    }
    server.join("main", &[("mira", "manager"), ("noor", "user")]).await;
    let set = json!({ "members": [{ "username": "admin", "project_role": "admin" }, { "username": "otto", "project_role": "user" }] });
    let project = server.admin("/api/projects/main/set_members", set).await;
    assert_eq!(members(&project), [("admin".into(), "admin".into()), ("otto".into(), "user".into())]);
    let removed = server.admin("/api/projects/main/remove_members", json!({ "usernames": ["otto"] })).await;
    assert_eq!(members(&removed), [("admin".into(), "admin".into())]);
    let unknown = json!({ "members": [{ "username": "ghost", "project_role": "user" }] });
    server.refused(ADMIN_TOKEN, "/api/projects/main/add_members", unknown, "resource_not_exists").await;
    server
        .refused(
            ADMIN_TOKEN,
            "/api/projects/main/remove_members",
            json!({ "usernames": ["otto"] }),
            "resource_not_exists",
        )
        .await;
    server.stop().await;
}

async fn only_admins_appoint_admins_and_the_last_one_cannot_be_removed(ground: &ServerFixture) {
    let server = ground.start().await;
    let manager = server.user("mira").await;
    server.user("noor").await;
    server.join("main", &[("mira", "manager")]).await;
    let make = |role: &str| json!({ "members": [{ "username": "noor", "project_role": role }] }).to_string();
    assert_eq!(server.post(&manager, "/api/projects/main/add_members", &make("admin")).await.0, 403);
    assert_eq!(server.post(&manager, "/api/projects/main/add_members", &make("manager")).await.0, 200);
    let promote = json!({ "members": [{ "username": "mira", "project_role": "admin" }] }).to_string();
    assert_eq!(server.post(&manager, "/api/projects/main/add_members", &promote).await.0, 403);
    assert_eq!(
        server.post(&manager, "/api/projects/main/remove_members", r#"{"usernames":["admin"]}"#).await.0,
        403
    );
    assert_eq!(server.post(&manager, "/api/projects/main/set_members", &make("user")).await.0, 403);
    server
        .refused(ADMIN_TOKEN, "/api/projects/main/remove_members", json!({ "usernames": ["admin"] }), "error")
        .await;
    server.refused(ADMIN_TOKEN, "/api/projects/main/set_members", json!({ "members": [] }), "error").await;
    server.stop().await;
}

async fn a_public_project_can_be_joined_and_left(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.user("noor").await;
    let join = |name: &str, role: &str| {
        json!({ "members": [{ "username": name, "project_role": role }] }).to_string()
    };
    assert_eq!(server.post(&mira, "/api/projects/main/get", "").await.0, 403);
    assert_eq!(server.post(&mira, "/api/projects/main/add_members", &join("mira", "user")).await.0, 403);
    server.admin("/api/projects/main/update", json!({ "is_public": true })).await;
    server.ok(&mira, "/api/projects/main/get", json!({})).await;
    assert_eq!(server.post(&mira, "/api/project/main/runs/get", "{}").await.0, 403, "seen is not joined");
    assert_eq!(server.post(&mira, "/api/projects/main/add_members", &join("mira", "admin")).await.0, 403);
    assert_eq!(server.post(&mira, "/api/projects/main/add_members", &join("noor", "user")).await.0, 403);
    assert_eq!(server.post(&mira, "/api/projects/main/add_members", &join("mira", "user")).await.0, 200);
    server.ok(&mira, "/api/project/main/fleets/list", json!({})).await;
    assert_eq!(
        server.post(&mira, "/api/projects/main/remove_members", r#"{"usernames":["admin"]}"#).await.0,
        403
    );
    assert_eq!(
        server.post(&mira, "/api/projects/main/remove_members", r#"{"usernames":["mira"]}"#).await.0,
        200
    );
    assert_eq!(server.post(&mira, "/api/project/main/fleets/list", "{}").await.0, 403);
    server.stop().await;
}

async fn a_project_keeps_the_address_of_its_templates_until_it_is_reset(ground: &ServerFixture) {
    let server = ground.start().await;
    let (first, second) = ("https://git.example/a.git", "https://git.example/b.git");
    let create = json!({ "project_name": "lab", "templates_repo": first });
    assert_eq!(server.admin("/api/projects/create", create).await["templates_repo"], first);
    let update = async |body: Value| server.admin("/api/projects/lab/update", body).await;
    assert_eq!(update(json!({ "is_public": true })).await["templates_repo"], first, "unchanged");
    assert_eq!(update(json!({ "templates_repo": second })).await["templates_repo"], second);
    assert_eq!(server.admin("/api/projects/lab/get", json!({})).await["templates_repo"], second);
    assert_eq!(update(json!({ "reset_templates_repo": true })).await["templates_repo"], Value::Null);
    server.stop().await;
}

async fn a_project_with_active_runs_cannot_be_deleted(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    for name in ["lab", "empty"] {
        server.ok(&mira, "/api/projects/create", json!({ "project_name": name })).await;
    }
    let task =
        json!({ "plan": { "run_spec": { "configuration": { "type": "task", "commands": ["true"] } } } });
    server.ok(&mira, "/api/project/lab/runs/apply", task).await;
    let both = json!({ "projects_names": ["empty", "lab"] });
    server.refused(&mira, "/api/projects/delete", both, "error").await;
    server.ok(&mira, "/api/projects/empty/get", json!({})).await;
    server.ok(&mira, "/api/projects/delete", json!({ "projects_names": ["empty"] })).await;
    assert_eq!(server.post(&mira, "/api/projects/empty/get", "").await.0, 404);
    assert_eq!(server.post(&mira, "/api/projects/delete", r#"{"projects_names":["main"]}"#).await.0, 403);
    assert_eq!(server.post(&mira, "/api/projects/delete", r#"{"projects_names":["none"]}"#).await.0, 403);
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "empty" })).await;
    server.stop().await;
}

async fn leaving_a_project_ends_access_at_once(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    for _ in 0..3 {
        server.ok(&mira, "/api/project/main/fleets/list", json!({})).await;
    }
    server.admin("/api/projects/main/remove_members", json!({ "usernames": ["mira"] })).await;
    assert_eq!(server.post(&mira, "/api/project/main/fleets/list", "{}").await.0, 403);
    server.stop().await;
}

async fn a_project_uses_only_backends_that_it_was_granted(ground: &ServerFixture) {
    let server = TestServer::start_with(SettingsSource { no_local: Some(false), ..ground.given() }).await;
    let main = server.admin("/api/projects/main/get", json!({})).await;
    assert_eq!(
        main["granted_backends"],
        json!(["local", "slurm"]),
        "the first project has what the server has"
    );
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let (status, answer) =
        server.post(&mira, "/api/project/main/fleets/delete", r#"{"names":["local"]}"#).await;
    let message = answer["detail"]["msg"].as_str().unwrap();
    assert!(
        status == 403 && message.contains("fleet `local` was created by the server"),
        "{status} {message}"
    );
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    let spec = json!({ "configuration": { "type": "fleet", "name": "own", "backends": ["local"], "nodes": 1 },
        "profile": { "name": "default" } });
    let volume = json!({ "configuration": { "type": "volume", "name": "data", "backend": "local" } });
    let tries = [
        ("fleets/get_plan", json!({ "spec": spec })),
        ("fleets/apply", json!({ "plan": { "spec": spec } })),
        ("volumes/create", volume),
    ];
    for (path, body) in &tries {
        let message = server.refused(&mira, &format!("/api/project/lab/{path}"), body.clone(), "error").await;
        let hint = "windlass project grant-backend lab local";
        assert!(
            message.contains("may not use backend `local`") && message.contains(hint),
            "{path}: {message}"
        );
    }
    let grant = json!({ "project_name": "lab", "backend": "local" });
    assert_eq!(server.post(&mira, "/api/backends/grant", &grant.to_string()).await.0, 403);
    let project = server.admin("/api/backends/grant", grant.clone()).await;
    assert_eq!(project["granted_backends"], json!(["local"]));
    for (path, body) in &tries {
        server.ok(&mira, &format!("/api/project/lab/{path}"), body.clone()).await;
    }
    assert_eq!(server.post(&mira, "/api/backends/revoke", &grant.to_string()).await.0, 403);
    let project = server.admin("/api/backends/revoke", grant.clone()).await;
    assert_eq!(project["granted_backends"], json!([]));
    let message =
        server.refused(&mira, "/api/project/lab/fleets/get_plan", tries[0].1.clone(), "error").await;
    assert!(message.contains("may not use backend"), "{message}");
    server.refused(ADMIN_TOKEN, "/api/backends/revoke", grant, "resource_not_exists").await;
    for (backend, word) in [("aws", "has no backend `aws`"), ("remote", "require no grant")] {
        let grant = json!({ "project_name": "lab", "backend": backend });
        let message = server.refused(ADMIN_TOKEN, "/api/backends/grant", grant, "error").await;
        assert!(message.contains(word), "{message}");
    }
    server.stop().await;
}

async fn a_project_has_a_default_image_which_precedes_that_of_the_server(ground: &ServerFixture) {
    let given = SettingsSource { default_image: Some("server:1".into()), ..ground.given() };
    let server = TestServer::start_with(given).await;
    let plan = async |more: Value| {
        let mut configuration = json!({ "type": "task", "commands": ["true"] });
        configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let body = json!({ "run_spec": { "configuration": configuration } });
        let plan = server.admin("/api/project/main/runs/get_plan", body).await;
        let job = &plan["job_plans"][0]["job_spec"];
        (job["default_image"].clone(), job["default_image_from"].clone())
    };
    assert_eq!(plan(json!({})).await, (json!("server:1"), json!("server")));
    let update = "/api/projects/main/update";
    let project = server.admin(update, json!({ "default_image": "project:1" })).await;
    assert_eq!(project["default_image"], "project:1");
    assert_eq!(plan(json!({})).await, (json!("project:1"), json!("project")));
    assert_eq!(plan(json!({ "default_image": "run:1" })).await, (json!("run:1"), json!("run")));
    assert_eq!(plan(json!({ "image": "own:1" })).await, (Value::Null, Value::Null));
    // Another change of the project leaves it.
    server.admin(update, json!({ "is_public": true })).await;
    assert_eq!(plan(json!({})).await.0, "project:1");
    for wrong in ["", "none", "UPPER", "http://x"] {
        let body = json!({ "default_image": wrong }).to_string();
        assert_eq!(server.post(ADMIN_TOKEN, update, &body).await.0, 422, "{wrong}");
    }
    server.admin(update, json!({ "reset_default_image": true })).await;
    assert_eq!(plan(json!({})).await, (json!("server:1"), json!("server")));
    server.stop().await;
}

async fn ssh_fleets_require_a_permission_that_only_admins_grant(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    server.join("main", &[("mira", "manager")]).await;
    let plan = |host: Value| {
        let ssh = json!({ "user": "u", "identity_file": "f", "hosts": [host],
            "ssh_key": { "public": "p", "private": crate::http_fleets::private_key() } });
        json!({ "plan": { "spec": { "configuration": { "type": "fleet", "name": "own", "ssh_config": ssh },
            "profile": { "name": "default" } } } })
    };
    let apply = "/api/project/lab/fleets/apply";
    for path in [apply, "/api/project/main/fleets/apply"] {
        let (status, answer) = server.post(&mira, path, &plan(json!("10.4.0.7")).to_string()).await;
        assert_eq!(status, 403, "neither a project of one's own nor a role gives it: {answer}");
        assert!(answer["detail"]["msg"].as_str().unwrap().contains("--allow-ssh-fleets mira"), "{answer}");
    }
    let right =
        |can: bool| json!({ "project_name": "lab", "username": "mira", "can_manage_ssh_fleets": can });
    let path = "/api/projects/set_member_rights";
    assert_eq!(
        server.post(&mira, path, &right(true).to_string()).await.0,
        403,
        "nor does one give it to oneself"
    );
    let project = server.admin(path, right(true)).await;
    assert_eq!(project["members"][0]["permissions"]["can_manage_ssh_fleets"], true);
    let mut hidden = plan(json!("10.4.0.7"));
    hidden["plan"]["spec"]["configuration"]["ssh_config"]["proxy_jump"] = json!({ "hostname": "127.0.0.1",
        "user": "u", "identity_file": "f", "ssh_key": { "public": "p", "private": crate::http_fleets::private_key() } });
    let mut denied = vec![hidden];
    denied.extend(
        ["127.0.0.1", "169.254.169.254", "::1", "0.0.0.0", "224.0.0.1"].map(|host| plan(json!(host))),
    );
    for body in denied {
        let message = server.refused(&mira, apply, body, "error").await;
        assert!(message.contains("is not allowed; hint: the operator of the server"), "{message}");
    }
    server.ok(&mira, apply, plan(json!("10.4.0.7"))).await;
    // A new list of members keeps the permission, and a role does not restore it.
    let members = json!({ "members": [{ "username": "mira", "project_role": "admin" }] });
    let project = server.ok(&mira, "/api/projects/lab/set_members", members.clone()).await;
    assert_eq!(project["members"][0]["permissions"]["can_manage_ssh_fleets"], true);
    server.admin(path, right(false)).await;
    let project = server.ok(&mira, "/api/projects/lab/set_members", members).await;
    assert_eq!(project["members"][0]["permissions"]["can_manage_ssh_fleets"], false);
    let (status, _) = server.post(&mira, apply, &plan(json!("10.4.0.8")).to_string()).await;
    assert_eq!(status, 403);
    // The creator may still delete the fleet.
    server.ok(&mira, "/api/project/lab/fleets/delete", json!({ "names": ["own"] })).await;
    let main = server.admin("/api/projects/main/get", json!({})).await;
    assert_eq!(main["members"][0]["user"]["username"], "admin");
    assert_eq!(
        main["members"][0]["permissions"]["can_manage_ssh_fleets"], true,
        "a global admin has the right"
    );
    let absent = json!({ "project_name": "lab", "username": "admin", "can_manage_ssh_fleets": true });
    server.refused(ADMIN_TOKEN, path, absent, "resource_not_exists").await;
    server.stop().await;
}
