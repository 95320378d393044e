//! Projects and members over HTTP.

use serde_json::{Value, json};

use crate::http::{ADMIN, Ground, on_both};

on_both! {
    a_project_belongs_to_who_made_it_and_names_are_taken_once
    members_are_added_removed_and_replaced_with_their_roles
    only_admins_decide_who_is_admin_and_one_remains
    a_public_project_can_be_joined_and_left
    a_project_with_something_alive_in_it_stays
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

async fn a_project_belongs_to_who_made_it_and_names_are_taken_once(ground: &Ground) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let project = server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    assert_eq!(project["owner"]["username"], "mira");
    assert_eq!(project["is_public"], false);
    assert_eq!(members(&project), [("mira".into(), "admin".into())]);
    assert_eq!(project["members"][0]["permissions"]["can_manage_ssh_fleets"], true);
    server.refused(ADMIN, "/api/projects/create", json!({ "project_name": "lab" }), "resource_exists").await;
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

async fn members_are_added_removed_and_replaced_with_their_roles(ground: &Ground) {
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
    server.refused(ADMIN, "/api/projects/main/add_members", unknown, "resource_not_exists").await;
    server
        .refused(
            ADMIN,
            "/api/projects/main/remove_members",
            json!({ "usernames": ["otto"] }),
            "resource_not_exists",
        )
        .await;
    server.stop().await;
}

async fn only_admins_decide_who_is_admin_and_one_remains(ground: &Ground) {
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
        .refused(ADMIN, "/api/projects/main/remove_members", json!({ "usernames": ["admin"] }), "error")
        .await;
    server.refused(ADMIN, "/api/projects/main/set_members", json!({ "members": [] }), "error").await;
    server.stop().await;
}

async fn a_public_project_can_be_joined_and_left(ground: &Ground) {
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

async fn a_project_with_something_alive_in_it_stays(ground: &Ground) {
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

async fn leaving_a_project_ends_access_at_once(ground: &Ground) {
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
