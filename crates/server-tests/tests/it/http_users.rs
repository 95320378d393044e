//! Users, tokens and first starts, over HTTP.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use windlass_server::config::SettingsSource;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    the_first_start_creates_an_admin_a_project_and_a_token_once
    a_token_chosen_by_the_operator_works_after_every_start
    a_token_ends_when_it_is_replaced_or_its_user_is_disabled_or_deleted
    a_user_sees_only_themself_and_an_admin_sees_all_users
    pages_of_users_neither_skip_nor_repeat
    the_ssh_key_of_a_user_ends_with_a_newline_and_can_be_replaced
    public_keys_are_added_listed_and_removed_by_their_owner_alone
    an_admin_can_neither_disable_nor_delete_themself
    a_scoped_token_permits_only_the_operations_of_its_scope
    named_tokens_have_an_expiry_and_are_revoked_individually
    tokens_get_the_configured_default_expiry
}

async fn the_first_start_creates_an_admin_a_project_and_a_token_once(ground: &ServerFixture) {
    let data_dir = ground.dir.path().join("data");
    let given = || SettingsSource { data_dir: Some(data_dir.clone()), admin_token: None, ..ground.given() };
    let server = TestServer::start_with(given()).await;
    let token = server.first_token.clone().expect("a token is shown");
    let me = server.ok(&token, "/api/users/get_my_user", json!({})).await;
    assert_eq!(me["username"], "admin");
    assert_eq!(me["global_role"], "admin");
    assert_eq!(me["creds"]["token"], token.as_str());
    let project = server.ok(&token, "/api/projects/main/get", json!({})).await;
    assert_eq!(project["members"][0]["project_role"], "admin");
    server.stop().await;
    let data = std::fs::metadata(&data_dir).unwrap().permissions().mode();
    let key = std::fs::metadata(data_dir.join("keys/master")).unwrap().permissions().mode();
    assert_eq!((data & 0o777, key & 0o777), (0o700, 0o600));

    let again = TestServer::start_with(given()).await;
    assert_eq!(again.first_token, None);
    let same = again.ok(&token, "/api/users/get_my_user", json!({})).await;
    assert_eq!(same["id"], me["id"]);
    assert_eq!(same["ssh_private_key"], me["ssh_private_key"]);
    again.stop().await;
}

async fn a_token_chosen_by_the_operator_works_after_every_start(ground: &ServerFixture) {
    let server = ground.start().await;
    assert_eq!(server.first_token, None, "whoever chose it knows it");
    let fresh = server.admin("/api/users/refresh_token", json!({ "username": "admin" })).await;
    let fresh = fresh["creds"]["token"].as_str().unwrap().to_owned();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/users/get_my_user", "").await.0, 403);
    server.stop().await;
    let again = ground.start().await;
    again.admin("/api/users/get_my_user", json!({})).await;
    again.ok(&fresh, "/api/users/get_my_user", json!({})).await;
    again.stop().await;
}

async fn a_token_ends_when_it_is_replaced_or_its_user_is_disabled_or_deleted(ground: &ServerFixture) {
    let server = ground.start().await;
    let first = server.user("mira").await;
    // Sent twice: the second response comes from the cache.
    for _ in 0..2 {
        server.ok(&first, "/api/users/get_my_user", json!({})).await;
    }
    let fresh = server.ok(&first, "/api/users/refresh_token", json!({ "username": "mira" })).await;
    let fresh = fresh["creds"]["token"].as_str().unwrap();
    assert!(fresh.starts_with("wl_"));
    assert_eq!(server.post(&first, "/api/users/get_my_user", "").await.0, 403);
    server.ok(fresh, "/api/users/get_my_user", json!({})).await;

    let disable = json!({ "username": "mira", "global_role": "user", "active": false });
    server.admin("/api/users/update", disable).await;
    assert_eq!(server.post(fresh, "/api/users/get_my_user", "").await.0, 403);
    server
        .admin("/api/users/update", json!({ "username": "mira", "global_role": "user", "active": true }))
        .await;
    server.ok(fresh, "/api/users/get_my_user", json!({})).await;
    server.admin("/api/users/delete", json!({ "users": ["mira"] })).await;
    assert_eq!(server.post(fresh, "/api/users/get_my_user", "").await.0, 403);
    // The name is free again, and belongs to another user now.
    let other = server.user("mira").await;
    assert_ne!(other, fresh);
    server.stop().await;
}

async fn a_user_sees_only_themself_and_an_admin_sees_all_users(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.user("noor").await;
    let names = |list: &Value| -> Vec<String> {
        let mut names: Vec<_> = list
            .as_array()
            .unwrap()
            .iter()
            .map(|user| user["username"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&server.ok(&mira, "/api/users/list", json!({})).await), ["mira"]);
    assert_eq!(names(&server.admin("/api/users/list", json!({})).await), ["admin", "mira", "noor"]);
    let counted = server.admin("/api/users/list", json!({ "return_total_count": true, "limit": 1 })).await;
    assert_eq!(counted["total_count"], 3);
    assert_eq!(counted["users"].as_array().unwrap().len(), 1);
    let found = server.admin("/api/users/list", json!({ "name_pattern": "OO" })).await;
    assert_eq!(names(&found), ["noor"]);
    assert_eq!(server.post(&mira, "/api/users/get_user", r#"{"username":"noor"}"#).await.0, 403);
    let read = server.admin("/api/users/get_user", json!({ "username": "noor" })).await;
    assert_eq!(read["creds"]["token"], "", "a token is not known to anybody but its owner");
    server.stop().await;
}

async fn pages_of_users_neither_skip_nor_repeat(ground: &ServerFixture) {
    let server = ground.start().await;
    for n in 0..7 {
        server.user(&format!("user{n}")).await;
    }
    for ascending in [false, true] {
        let mut seen = Vec::new();
        let (mut at, mut id) = (Value::Null, Value::Null);
        loop {
            let request = json!({ "limit": 3, "prev_created_at": at, "prev_id": id, "ascending": ascending });
            let page = server.admin("/api/users/list", request).await;
            let page = page.as_array().unwrap();
            let Some(last) = page.last() else { break };
            (at, id) = (last["created_at"].clone(), last["id"].clone());
            seen.extend(page.iter().map(|user| user["id"].as_str().unwrap().to_owned()));
        }
        assert_eq!(seen.len(), 8);
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 8);
    }
    server.stop().await;
}

async fn the_ssh_key_of_a_user_ends_with_a_newline_and_can_be_replaced(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let me = server.ok(&mira, "/api/users/get_my_user", json!({})).await;
    let public = me["ssh_public_key"].as_str().unwrap();
    assert!(public.starts_with("ssh-ed25519 ") && public.ends_with(" mira\n"), "{public:?}");
    assert!(me["ssh_private_key"].as_str().unwrap().starts_with("-----BEGIN OPENSSH PRIVATE KEY-----\n"));
    let other = server.ok(&mira, "/api/users/refresh_ssh_key", json!({ "username": "mira" })).await;
    assert_ne!(other["ssh_public_key"], me["ssh_public_key"]);
    assert_eq!(other["creds"]["token"], mira.as_str());
    assert!(other["ssh_private_key"].is_string());
    // No other user ever receives it.
    let name = json!({ "username": "mira" });
    for path in ["/api/users/get_user", "/api/users/refresh_ssh_key", "/api/users/refresh_token"] {
        let read = server.admin(path, name.clone()).await;
        assert_eq!((&read["username"], &read["ssh_private_key"]), (&json!("mira"), &Value::Null), "{path}");
    }
    let made = server.admin("/api/users/create", json!({ "username": "noor", "global_role": "user" })).await;
    assert_eq!(made["ssh_private_key"], Value::Null);
    server.stop().await;
}

async fn public_keys_are_added_listed_and_removed_by_their_owner_alone(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let noor = server.user("noor").await;
    let me = server.ok(&noor, "/api/users/get_my_user", json!({})).await;
    let key = me["ssh_public_key"].as_str().unwrap();
    let added = server.ok(&mira, "/api/users/public_keys/add", json!({ "key": key })).await;
    assert_eq!(added["type"], "ssh-ed25519");
    assert_eq!(added["name"], "noor");
    assert!(added["fingerprint"].as_str().unwrap().starts_with("SHA256:"));
    server.refused(&mira, "/api/users/public_keys/add", json!({ "key": key }), "resource_exists").await;
    server.refused(&mira, "/api/users/public_keys/add", json!({ "key": "ssh-rsa nonsense" }), "error").await;
    let ids = json!({ "ids": [added["id"]] });
    server.ok(&noor, "/api/users/public_keys/delete", ids.clone()).await;
    let listed = server.ok(&mira, "/api/users/public_keys/list", json!({})).await;
    assert_eq!(listed.as_array().unwrap().len(), 1, "nobody removes another's key");
    assert_eq!(server.ok(&mira, "/api/users/public_keys/delete", ids).await, Value::Null);
    assert_eq!(server.ok(&mira, "/api/users/public_keys/list", json!({})).await, json!([]));
    server.stop().await;
}

async fn an_admin_can_neither_disable_nor_delete_themself(ground: &ServerFixture) {
    let server = ground.start().await;
    let demote = json!({ "username": "admin", "global_role": "user" });
    server.refused(ADMIN_TOKEN, "/api/users/update", demote, "error").await;
    server.refused(ADMIN_TOKEN, "/api/users/delete", json!({ "users": ["admin"] }), "error").await;
    server
        .refused(ADMIN_TOKEN, "/api/users/delete", json!({ "users": ["nobody"] }), "resource_not_exists")
        .await;
    server
        .refused(
            ADMIN_TOKEN,
            "/api/users/create",
            json!({ "username": "admin", "global_role": "user" }),
            "resource_exists",
        )
        .await;
    server.stop().await;
}

async fn create_token(server: &TestServer, owner: &str, requested: Value) -> String {
    let made = server.ok(owner, "/api/users/tokens/create", requested).await;
    made["token"].as_str().unwrap().to_owned()
}

async fn a_scoped_token_permits_only_the_operations_of_its_scope(ground: &ServerFixture) {
    let server = ground.start().await;
    let first = server.user("mira").await;
    server.join("main", &[("mira", "admin")]).await;
    let mut of = Vec::new();
    for scope in ["all", "read", "submit", "services"] {
        of.push((scope, create_token(&server, &first, json!({ "name": scope, "scope": scope })).await));
    }
    let run =
        json!({ "plan": { "run_spec": { "configuration": { "type": "task", "commands": ["true"] } } } });
    let secret = json!({ "name": "KEY", "value": "a-secret-value" });
    server.ok(&first, "/api/project/main/secrets/create_or_update", secret.clone()).await;
    for (path, body, allowed) in [
        ("/api/users/get_my_user", json!({}), vec!["all", "read", "submit"]),
        ("/api/runs/list", json!({}), vec!["all", "read", "submit"]),
        ("/api/project/main/runs/apply", run, vec!["all", "submit"]),
        ("/api/project/main/secrets/get", json!({ "name": "KEY" }), vec!["all"]),
        ("/api/project/main/secrets/create_or_update", secret, vec!["all"]),
        ("/api/users/tokens/create", json!({ "name": "more" }), vec!["all"]),
        ("/api/users/refresh_ssh_key", json!({ "username": "mira" }), vec!["all"]),
    ] {
        for (scope, token) in &of {
            let (status, message) = server.post(token, path, &body.to_string()).await;
            let expected = if allowed.contains(scope) { 200 } else { 403 };
            assert_eq!(status, expected, "{path} with {scope}: {message}");
        }
    }
    // A read-only token does not receive the key that opens jobs.
    for (scope, token) in &of {
        if *scope == "services" {
            continue;
        }
        let me = server.ok(token, "/api/users/get_my_user", json!({})).await;
        assert_eq!(me["ssh_private_key"].is_string(), *scope == "all", "{scope}");
    }
    // The queue knows no scopes.
    for (scope, token) in &of {
        let (status, _) = server.get(token, "/arvados/v1/users/current").await;
        assert_eq!(status, if *scope == "all" { 200 } else { 401 }, "{scope}");
    }
    server.stop().await;
}

async fn named_tokens_have_an_expiry_and_are_revoked_individually(ground: &ServerFixture) {
    let server = ground.start().await;
    let first = server.user("mira").await;
    let ci =
        create_token(&server, &first, json!({ "name": "ci", "scope": "read", "expires_in": 86400 })).await;
    let app = create_token(&server, &first, json!({ "name": "app" })).await;
    assert!(ci.starts_with("wl_") && ci != app);
    let taken = json!({ "name": "ci" });
    server.refused(&first, "/api/users/tokens/create", taken, "resource_exists").await;
    for bad in [json!({ "name": "a b" }), json!({ "name": "x", "expires_in": 0 })] {
        server.refused(&first, "/api/users/tokens/create", bad, "error").await;
    }
    let listed = server.ok(&first, "/api/users/tokens/list", json!({})).await;
    assert_eq!((&listed[0]["name"], &listed[0]["scope"]), (&json!("app"), &json!("all")));
    assert_eq!((&listed[1]["name"], &listed[1]["scope"]), (&json!("ci"), &json!("read")));
    assert!(listed[1]["expires_at"].is_string() && listed[0]["expires_at"].is_null(), "{listed}");
    assert!(!listed.to_string().contains(&ci), "a list holds no token");
    let others = server.user("noor").await;
    assert_eq!(server.ok(&others, "/api/users/tokens/list", json!({})).await, json!([]));
    let name = json!({ "names": ["ci"] });
    server.refused(&others, "/api/users/tokens/revoke", name.clone(), "resource_not_exists").await;
    server.ok(&ci, "/api/users/get_my_user", json!({})).await;
    server.ok(&first, "/api/users/tokens/revoke", name).await;
    assert_eq!(server.post(&ci, "/api/users/get_my_user", "").await.0, 403);
    server.ok(&app, "/api/users/get_my_user", json!({})).await;
    // The name is free again; replacing the first token ends all of them.
    let again = create_token(&server, &first, json!({ "name": "ci" })).await;
    server.ok(&first, "/api/users/refresh_token", json!({ "username": "mira" })).await;
    for token in [&first, &app, &again] {
        assert_eq!(server.post(token, "/api/users/get_my_user", "").await.0, 403);
    }
    server.stop().await;
}

async fn tokens_get_the_configured_default_expiry(ground: &ServerFixture) {
    let server =
        TestServer::start_with(SettingsSource { token_expiry: Some("30d".into()), ..ground.given() }).await;
    let first = server.user("mira").await;
    create_token(&server, &first, json!({ "name": "usual" })).await;
    create_token(&server, &first, json!({ "name": "short", "expires_in": 3600 })).await;
    let sql = "SELECT name, (expires_at - created_at) / 1000000 FROM tokens \
               WHERE user_id = (SELECT id FROM users WHERE name = $1)";
    let lifetimes = async |user: &str| {
        let rows = server.app.db().query(sql, windlass_server::params![user]).await.unwrap();
        let mut lifetimes: Vec<(Option<String>, Option<i64>)> =
            rows.iter().map(|row| (row.opt_text(0).unwrap(), row.opt_int(1).unwrap())).collect();
        lifetimes.sort();
        lifetimes
    };
    let named = |name: &str, secs| (Some(name.to_owned()), Some(secs));
    assert_eq!(
        lifetimes("mira").await,
        [(None, Some(30 * 86400)), named("short", 3600), named("usual", 30 * 86400)]
    );
    assert_eq!(lifetimes("admin").await, [(None, None)], "what an operator chose does not expire");
    server.stop().await;
}
