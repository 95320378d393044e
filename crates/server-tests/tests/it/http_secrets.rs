//! Secrets, repos and files over HTTP, and their traces on disk.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use windlass_server::services::secrets::rotate_keys;

use crate::http::{ADMIN_TOKEN, ServerFixture, on_both};

on_both! {
    secrets_are_set_read_listed_and_deleted
    a_secret_can_be_used_only_by_its_permitted_users
    all_sealed_values_are_readable_after_key_rotation
    repo_credentials_are_stored_per_user
    archives_are_stored_once_per_user_and_content
    events_record_the_action_and_the_actor
    a_server_without_the_keys_of_its_database_does_not_start
    a_registry_password_appears_in_no_response_and_no_row
    plain_passwords_of_an_earlier_version_are_sealed_at_startup
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

const SECRET_VALUE: &str = "canary-4f9d2c-value";

async fn secrets_are_set_read_listed_and_deleted(ground: &ServerFixture) {
    let server = ground.start().await;
    let base = "/api/project/main/secrets";
    let set = |value: &str| json!({ "name": "KEY", "value": value });
    let first = server.admin(&format!("{base}/create_or_update"), set("one")).await;
    let second = server.admin(&format!("{base}/create_or_update"), set("two")).await;
    assert_eq!(first["id"], second["id"]);
    assert_eq!(second["value"], Value::Null);
    let listed = server.admin(&format!("{base}/list"), json!({})).await;
    assert_eq!(listed, json!([{ "id": first["id"], "name": "KEY", "value": null, "users": "everyone" }]));
    let read = server.admin(&format!("{base}/get"), json!({ "name": "KEY" })).await;
    assert_eq!(read["value"], "two");
    server.refused(ADMIN_TOKEN, &format!("{base}/create_or_update"), set(&"x".repeat(5001)), "error").await;
    server.admin(&format!("{base}/delete"), json!({ "secrets_names": ["KEY"] })).await;
    server
        .refused(ADMIN_TOKEN, &format!("{base}/get"), json!({ "name": "KEY" }), "resource_not_exists")
        .await;
    server
        .refused(
            ADMIN_TOKEN,
            &format!("{base}/delete"),
            json!({ "secrets_names": ["KEY"] }),
            "resource_not_exists",
        )
        .await;
    server.stop().await;
}

#[tokio::test]
async fn x3_no_secret_token_or_private_key_is_stored_in_plain_text() {
    let ground = ServerFixture::sqlite();
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "manager")]).await;
    let me = server.ok(&mira, "/api/users/get_my_user", json!({})).await;
    server
        .ok(
            &mira,
            "/api/project/main/secrets/create_or_update",
            json!({ "name": "KEY", "value": SECRET_VALUE }),
        )
        .await;
    let creds = json!({ "repo_id": "r", "repo_info": { "repo_type": "remote", "repo_name": "r" },
        "repo_creds": { "clone_url": "https://x/r.git", "oauth_token": SECRET_VALUE } });
    server.ok(&mira, "/api/project/main/repos/init", creds).await;
    let right = json!({ "project_name": "main", "username": "mira", "can_manage_ssh_fleets": true });
    server.admin("/api/projects/set_member_rights", right).await;
    let key = crate::http_fleets::private_key();
    let fleet = json!({ "plan": { "spec": { "profile": { "name": "default" }, "configuration": { "type": "fleet", "name": "own",
        "ssh_config": { "user": "u", "identity_file": "f", "ssh_key": { "public": "p", "private": key },
            "hosts": ["10.0.0.1", { "hostname": "10.0.0.2", "ssh_key": { "public": "p", "private": key } }] } } } } });
    let fleet = server.ok(&mira, "/api/project/main/fleets/apply", fleet).await;
    assert!(!fleet.to_string().contains("PRIVATE KEY"), "a private key comes back: {fleet}");
    let nodes = json!({ "plan": { "run_spec": { "configuration": { "type": "task", "nodes": 2, "commands": ["true"],
        "image": "registry.example/private", "registry_auth": { "username": "u", "password": SECRET_VALUE } } } } });
    let run = server.ok(&mira, "/api/project/main/runs/apply", nodes).await;
    assert!(!run.to_string().contains("PRIVATE KEY"), "{run}");
    server.stop().await;
    let private = me["ssh_private_key"].as_str().unwrap().lines().nth(2).unwrap().to_owned();
    let of_fleet = key.lines().nth(2).unwrap();
    let mut seen = 0;
    for entry in std::fs::read_dir(ground.dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_file() {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        seen += bytes.len();
        for needle in
            [SECRET_VALUE, mira.as_str(), ADMIN_TOKEN, private.as_str(), of_fleet, "OPENSSH PRIVATE KEY"]
        {
            let found = bytes.windows(needle.len()).any(|window| window == needle.as_bytes());
            assert!(!found, "{} holds a secret", path.display());
        }
    }
    assert!(seen > 10_000, "the database was not looked at");
}

async fn all_sealed_values_are_readable_after_key_rotation(ground: &ServerFixture) {
    let server = ground.start().await;
    server
        .admin("/api/project/main/secrets/create_or_update", json!({ "name": "KEY", "value": SECRET_VALUE }))
        .await;
    let creds = json!({ "repo_id": "r", "repo_info": { "repo_type": "remote", "repo_name": "r" },
        "repo_creds": { "clone_url": "https://x/r.git", "oauth_token": SECRET_VALUE } });
    server.admin("/api/project/main/repos/init", creds).await;
    let me = server.admin("/api/users/get_my_user", json!({})).await;
    let file = ground.dir.path().join("keys/master");
    let before = std::fs::read_to_string(&file).unwrap();
    rotate_keys(&server.app).await.unwrap();
    let after = std::fs::read_to_string(&file).unwrap();
    assert_ne!(before, after);
    assert_eq!(after.lines().count(), 1, "the old key is gone");
    server.stop().await;
    // A new process has no cached values.
    let server = ground.start().await;
    let secret = server.admin("/api/project/main/secrets/get", json!({ "name": "KEY" })).await;
    assert_eq!(secret["value"], SECRET_VALUE);
    let repo =
        server.admin("/api/project/main/repos/get", json!({ "repo_id": "r", "include_creds": true })).await;
    assert_eq!(repo["repo_creds"]["oauth_token"], SECRET_VALUE);
    let again = server.admin("/api/users/get_my_user", json!({})).await;
    assert_eq!(again["ssh_private_key"], me["ssh_private_key"]);
    server.stop().await;
}

async fn repo_credentials_are_stored_per_user(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let base = "/api/project/main/repos";
    let get = json!({ "repo_id": "r", "include_creds": true });
    server.refused(&mira, &format!("{base}/get"), get.clone(), "resource_not_exists").await;
    let info = json!({ "repo_type": "remote", "repo_name": "r" });
    let init = json!({ "repo_id": "r", "repo_info": info, "repo_creds": { "clone_url": "https://x", "private_key": "k" } });
    assert_eq!(server.ok(&mira, &format!("{base}/init"), init).await, Value::Null);
    let own = server.ok(&mira, &format!("{base}/get"), get.clone()).await;
    assert_eq!(own["repo_creds"]["private_key"], "k");
    assert_eq!(own["repo_info"], info);
    let other = server.admin(&format!("{base}/get"), get).await;
    assert_eq!(other["repo_creds"], Value::Null, "credentials are their owner's");
    let diff = b"diff --git";
    let path = format!("{base}/upload_code?repo_id=r");
    assert_eq!(server.upload(&mira, &path, &sha256_hex(diff), diff).await.0, 200);
    assert_eq!(
        server.upload(&mira, &path, &sha256_hex(b"other"), diff).await.0,
        400,
        "the name is not the hash"
    );
    assert_eq!(
        server.upload(&mira, &format!("{base}/upload_code?repo_id=x"), &sha256_hex(diff), diff).await.0,
        400
    );
    assert_eq!(server.ok(&mira, &format!("{base}/list"), json!({})).await.as_array().unwrap().len(), 1);
    server.ok(&mira, &format!("{base}/delete"), json!({ "repos_ids": ["r", "unknown"] })).await;
    assert_eq!(server.ok(&mira, &format!("{base}/list"), json!({})).await, json!([]));
    server.stop().await;
}

async fn archives_are_stored_once_per_user_and_content(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let (hash, path) = (sha256_hex(b"tar"), "/api/files/upload_archive");
    let first = server.upload(&mira, path, &hash, b"tar").await.1;
    assert_eq!(server.upload(&mira, path, &hash, b"tar").await.1, first);
    assert_ne!(server.upload(ADMIN_TOKEN, path, &hash, b"tar").await.1["id"], first["id"]);
    let found = server.ok(&mira, "/api/files/get_archive_by_hash", json!({ "hash": hash })).await;
    assert_eq!(found, first);
    let none = json!({ "hash": sha256_hex(b"none") });
    server.refused(&mira, "/api/files/get_archive_by_hash", none, "resource_not_exists").await;
    server.stop().await;
}

async fn events_record_the_action_and_the_actor(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "manager")]).await;
    let secret = server
        .ok(&mira, "/api/project/main/secrets/create_or_update", json!({ "name": "KEY", "value": "v" }))
        .await;
    let request = json!({ "target_secrets": [secret["id"]] });
    let events = server.ok(&mira, "/api/events/list", request).await;
    assert_eq!(events.as_array().unwrap().len(), 1, "{events}");
    assert_eq!(events[0]["message"], "Secret created");
    assert_eq!(events[0]["actor_user"], "mira");
    let target = &events[0]["targets"][0];
    assert_eq!(
        (&target["type"], &target["name"], &target["project_name"]),
        (&json!("secret"), &json!("KEY"), &json!("main"))
    );
    let project = server.ok(&mira, "/api/projects/main/get", json!({})).await;
    let within = json!({ "within_projects": [project["project_id"]], "include_target_types": ["secret"] });
    assert_eq!(server.ok(&mira, "/api/events/list", within).await, events);
    let system = server.admin("/api/events/list", json!({ "actors": [null] })).await;
    assert!(system.as_array().unwrap().iter().all(|event| event["actor_user"].is_null()), "{system}");
    // Two filters of a kind contradict each other.
    let two = r#"{"target_runs":["5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10"],"target_users":["5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10"]}"#;
    assert_eq!(server.post(&mira, "/api/events/list", two).await.0, 422);
    // Kinds of objects that this server does not have are accepted, and match nothing.
    for kind in ["target_gateway_replicas", "target_presets"] {
        let filter = json!({ kind: ["5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10"] });
        assert_eq!(server.admin("/api/events/list", filter).await, json!([]), "{kind}");
    }
    // Pages neither skip nor repeat.
    let all = server.admin("/api/events/list", json!({})).await;
    let mut seen = Vec::new();
    let (mut at, mut id) = (Value::Null, Value::Null);
    loop {
        let page = server
            .admin("/api/events/list", json!({ "limit": 2, "prev_recorded_at": at, "prev_id": id }))
            .await;
        let Some(last) = page.as_array().unwrap().last() else { break };
        (at, id) = (last["recorded_at"].clone(), last["id"].clone());
        seen.extend(page.as_array().unwrap().clone());
    }
    assert_eq!(Value::Array(seen), all);
    server.stop().await;
}

async fn a_server_without_the_keys_of_its_database_does_not_start(ground: &ServerFixture) {
    use windlass_server::{
        Server,
        config::{Settings, SettingsSource},
    };
    let server = ground.start().await;
    server.stop().await;
    let other = ground.dir.path().join("other-keys");
    let given = SettingsSource { port: Some(0), key_file: Some(other), ..ground.given() };
    let refused = Server::start(Settings::new(given, None).unwrap()).await.err().expect("it must not start");
    let mut message = refused.to_string();
    let mut cause = std::error::Error::source(&refused);
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    assert!(message.contains("not in the key file"), "{message}");
    ground.start().await.stop().await;
}

async fn a_secret_can_be_used_only_by_its_permitted_users(ground: &ServerFixture) {
    let server = ground.start().await;
    let (mira, noor, otto) =
        (server.user("mira").await, server.user("noor").await, server.user("otto").await);
    server.join("main", &[("mira", "user"), ("noor", "user"), ("otto", "manager")]).await;
    let set = |users: Value| json!({ "name": "KEY", "value": SECRET_VALUE, "users": users });
    let path = "/api/project/main/secrets/create_or_update";
    let mut number = 0;
    let mut may = async |token: &str| {
        number += 1;
        let spec = json!({ "run_name": format!("run-{number}"), "configuration": { "type": "task",
            "commands": ["true"], "env": { "X": "${{ secrets.KEY }}" } } });
        let auth = json!({ "run_name": format!("auth-{number}"), "configuration": { "type": "task", "image": "i",
            "commands": ["true"], "registry_auth": { "username": "u", "password": "${{ secrets.KEY }}" } } });
        let mut answers = Vec::new();
        for (path, body) in [
            ("runs/get_plan", json!({ "run_spec": spec })),
            ("runs/apply", json!({ "plan": { "run_spec": spec } })),
            ("runs/apply", json!({ "plan": { "run_spec": auth } })),
            ("jobs/launch", json!({ "text": "run: echo\nenvs:\n  X: ${{ secrets.KEY }}\n" })),
        ] {
            let (status, answer) =
                server.post(token, &format!("/api/project/main/{path}"), &body.to_string()).await;
            let message = answer.to_string();
            assert!(
                status == 200 || (status == 400 && message.contains("secret `KEY`")),
                "{path}: {message}"
            );
            assert!(!message.contains(SECRET_VALUE), "{message}");
            answers.push(status == 200);
        }
        assert!(answers.iter().all(|one| one == &answers[0]), "{answers:?}");
        answers[0]
    };
    server.admin(path, json!({ "name": "KEY", "value": SECRET_VALUE })).await;
    assert!(may(&mira).await && may(&noor).await, "everyone, unless somebody says otherwise");
    let kept = server.admin(path, set(json!("managers"))).await;
    assert_eq!(kept["users"], "managers");
    assert!(!may(&mira).await && may(&otto).await && may(ADMIN_TOKEN).await);
    server.admin(path, json!({ "name": "KEY", "value": SECRET_VALUE })).await;
    assert!(!may(&mira).await, "a new value is for the same people");
    let named = server.admin(path, set(json!(["noor"]))).await;
    assert_eq!(named["users"], json!(["noor"]));
    assert!(!may(&mira).await && may(&noor).await && may(&otto).await);
    let listed = server.admin("/api/project/main/secrets/list", json!({})).await;
    assert_eq!(listed[0]["users"], json!(["noor"]));
    server.refused(ADMIN_TOKEN, path, set(json!(["nobody"])), "error").await;
    assert_eq!(server.post(ADMIN_TOKEN, path, &set(json!([])).to_string()).await.0, 422);
    assert_eq!(server.post(ADMIN_TOKEN, path, &set(json!("some")).to_string()).await.0, 422);
    // A manager cannot use it in a run of a user who has no access to it.
    let service = |env: Value| {
        json!({ "run_name": "web", "ssh_key_pub": "k", "configuration": { "type": "service", "port": 80,
        "commands": ["serve"], "env": env } })
    };
    let apply = "/api/project/main/runs/apply";
    server.ok(&mira, apply, json!({ "plan": { "run_spec": service(json!({})) } })).await;
    let changed =
        json!({ "plan": { "run_spec": service(json!({ "X": "${{ secrets.KEY }}" })) }, "force": true });
    let message = server.refused(&otto, apply, changed, "error").await;
    assert!(message.contains("secret `KEY`"), "{message}");
    server.stop().await;
}
fn private_image_spec(password: &str) -> Value {
    json!({ "run_name": "private", "configuration": { "type": "task", "commands": ["true"],
        "image": "registry.example/private", "registry_auth": { "username": "mira", "password": password } } })
}

/// All documents of runs and jobs.
async fn stored_documents(server: &crate::http::TestServer) -> String {
    let mut all = String::new();
    for sql in ["SELECT spec FROM runs", "SELECT job_spec FROM jobs", "SELECT message FROM events"] {
        for row in server.app.db().query(sql, vec![]).await.unwrap() {
            all.push_str(&row.text(0).unwrap());
        }
    }
    all
}

async fn a_registry_password_appears_in_no_response_and_no_row(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let noor = server.user("noor").await;
    server.join("main", &[("mira", "user"), ("noor", "user")]).await;
    let base = "/api/project/main/runs";
    let plan = server
        .ok(&mira, &format!("{base}/get_plan"), json!({ "run_spec": private_image_spec(SECRET_VALUE) }))
        .await;
    assert!(!plan.to_string().contains(SECRET_VALUE), "{plan:#}");
    // Clients send back what they received.
    let shown = plan["run_spec"].clone();
    let run = server.ok(&mira, &format!("{base}/apply"), json!({ "plan": { "run_spec": shown } })).await;
    let password = run["run_spec"]["configuration"]["registry_auth"]["password"].as_str().unwrap().to_owned();
    assert!(password.starts_with("sealed:"), "{password}");
    assert_eq!(run["jobs"][0]["job_spec"]["registry_auth"]["username"], "mira");
    for (token, path, body) in [
        (&noor, format!("{base}/get"), json!({ "run_name": "private" })),
        (&noor, "/api/runs/list".to_owned(), json!({})),
        (&mira, format!("{base}/get_plan"), json!({ "run_spec": private_image_spec(SECRET_VALUE) })),
    ] {
        let answer = server.ok(token, &path, body).await.to_string();
        assert!(answer.contains(&password) && !answer.contains(SECRET_VALUE), "{path}: {answer}");
    }
    let stored = stored_documents(&server).await;
    assert!(stored.contains(&password) && !stored.contains(SECRET_VALUE), "{stored}");
    // The same password results in the same specification; a reference to a secret is not a password.
    let again = server
        .ok(&mira, &format!("{base}/get_plan"), json!({ "run_spec": private_image_spec(SECRET_VALUE) }))
        .await;
    assert_eq!(again["run_spec"]["configuration"]["registry_auth"]["password"], password.as_str());
    let named = private_image_spec("${{ secrets.registry }}");
    let named = server.ok(&mira, &format!("{base}/get_plan"), json!({ "run_spec": named })).await;
    let kept = &named["effective_run_spec"]["configuration"]["registry_auth"]["password"];
    assert_eq!(kept, "${{ secrets.registry }}");
    // The user who names the image chooses the registry that receives the password.
    let stolen = json!({ "run_spec": private_image_spec(&password) });
    let message = server.refused(&noor, &format!("{base}/get_plan"), stolen, "error").await;
    assert!(message.contains("of another user"), "{message}");
    rotate_keys(&server.app).await.unwrap();
    server.stop().await;
}

async fn plain_passwords_of_an_earlier_version_are_sealed_at_startup(ground: &ServerFixture) {
    let server = ground.start().await;
    let run = json!({ "plan": { "run_spec": private_image_spec("${{ secrets.registry }}") } });
    server.admin("/api/project/main/runs/apply", run).await;
    // As earlier versions stored it.
    for sql in [
        "UPDATE runs SET spec = replace(spec, '${{ secrets.registry }}', $1)",
        "UPDATE jobs SET job_spec = replace(job_spec, '${{ secrets.registry }}', $1)",
    ] {
        let unit = windlass_server::db::Unit::new().exec(sql, windlass_server::params![SECRET_VALUE]);
        server.app.db().write(unit).await.unwrap();
    }
    let unit = windlass_server::db::Unit::new().exec("DELETE FROM chores", vec![]);
    server.app.db().write(unit).await.unwrap();
    assert_eq!(stored_documents(&server).await.matches(SECRET_VALUE).count(), 2);
    server.stop().await;
    let again = ground.start().await;
    let stored = stored_documents(&again).await;
    assert!(!stored.contains(SECRET_VALUE) && stored.matches("sealed:").count() == 2, "{stored}");
    let run = again.admin("/api/project/main/runs/get", json!({ "run_name": "private" })).await;
    assert_eq!(
        run["run_spec"]["configuration"]["registry_auth"]["password"],
        run["jobs"][0]["job_spec"]["registry_auth"]["password"]
    );
    again.stop().await;
}
