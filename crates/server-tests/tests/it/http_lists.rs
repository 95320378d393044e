//! Filters and pages of lists: what each of them leaves in, and what it leaves out.

use serde_json::{Value, json};
use windlass_server::config::{Settings, SettingsSource};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    events_are_filtered_by_the_object_that_they_are_about
    runs_are_filtered_by_project_user_repository_and_state
    fleets_instances_and_volumes_are_listed_in_pages_in_both_orders
    managed_jobs_are_filtered_by_status_time_and_user
}

/// Id of no object.
const UNKNOWN: &str = "5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10";

/// Starts a server on which nothing changes by itself.
async fn start_idle(ground: &ServerFixture) -> TestServer {
    let source = SettingsSource { no_local: Some(false), port: Some(0), ..ground.given() };
    let mut settings = Settings::new(source, None).unwrap();
    settings.pipelines = false;
    TestServer::start_with_settings(settings).await
}

async fn create_fleet(server: &TestServer, name: &str, hosts: &[&str]) -> Value {
    let configuration = json!({ "type": "fleet", "name": name,
        "ssh_config": { "user": "u", "identity_file": "f", "hosts": hosts } });
    let spec = json!({ "profile": { "name": "default" }, "configuration": configuration });
    server.admin("/api/project/main/fleets/apply", json!({ "plan": { "spec": spec } })).await
}

async fn create_run(server: &TestServer, token: &str, project: &str, name: &str) -> Value {
    let spec = json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"] },
        "profile": { "name": "default" } });
    let path = format!("/api/project/{project}/runs/apply");
    server.ok(token, &path, json!({ "plan": { "run_spec": spec } })).await
}

fn names<'a>(list: &'a Value, field: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|one| one.pointer(field).unwrap().as_str().unwrap()).collect()
}

async fn events_are_filtered_by_the_object_that_they_are_about(ground: &ServerFixture) {
    let server = start_idle(ground).await;
    let mira = server.user("mira").await;
    let base = "/api/project/main";
    let fleet = create_fleet(&server, "own", &["10.0.0.1"]).await;
    let run = create_run(&server, ADMIN_TOKEN, "main", "train").await;
    let volume = json!({ "configuration": { "type": "volume", "name": "data", "backend": "local" } });
    let volume = server.admin(&format!("{base}/volumes/create"), volume).await;
    let gateway = json!({ "type": "gateway", "name": "edge", "backend": "remote", "region": "", "domain": "a.example" });
    let gateway = server.admin(&format!("{base}/gateways/create"), json!({ "configuration": gateway })).await;
    let secret = json!({ "name": "KEY", "value": "v" });
    let secret = server.admin(&format!("{base}/secrets/create_or_update"), secret).await;
    let job = server.admin(&format!("{base}/jobs/launch"), json!({ "text": "run: echo\n" })).await;
    let project = server.admin("/api/projects/main/get", json!({})).await;
    let other = server.admin("/api/projects/create", json!({ "project_name": "other" })).await;
    let user = server.ok(&mira, "/api/users/get_my_user", json!({})).await;
    let list = async |filter: Value| server.admin("/api/events/list", filter).await;
    let submission = &run["jobs"][0]["job_submissions"][0]["id"];
    for (filter, id) in [
        ("target_fleets", &fleet["id"]),
        ("target_instances", &fleet["instances"][0]["id"]),
        ("target_runs", &run["id"]),
        ("target_jobs", submission),
        ("target_volumes", &volume["id"]),
        ("target_gateways", &gateway["id"]),
        ("target_secrets", &secret["id"]),
        ("target_managed_jobs", &job["jobs"][0]["id"]),
        ("target_projects", &other["project_id"]),
        ("target_users", &user["id"]),
    ] {
        let found = list(json!({ filter: [id] })).await;
        let found = found.as_array().unwrap();
        assert!(!found.is_empty(), "{filter} finds nothing for {id}");
        for event in found {
            let is_it = |target: &Value| target["id"] == *id;
            assert!(event["targets"].as_array().unwrap().iter().any(is_it), "{filter}: {event}");
        }
        assert_eq!(
            list(json!({ filter: [UNKNOWN] })).await,
            json!([]),
            "{filter} of an object without events"
        );
    }
    // Within an object: its own events and those of what belongs to it.
    for (filter, id, inner) in [
        ("within_fleets", &fleet["id"], "instance"),
        ("within_runs", &run["id"], "job"),
        ("within_gateways", &gateway["id"], "gateway"),
        ("within_projects", &project["project_id"], "run"),
    ] {
        let found = list(json!({ filter: [id], "include_target_types": [inner] })).await;
        assert!(!found.as_array().unwrap().is_empty(), "{filter} has no event of a {inner}");
        assert_eq!(list(json!({ filter: [UNKNOWN] })).await, json!([]), "{filter}");
    }
    let admin = server.admin("/api/users/get_my_user", json!({})).await;
    let by_admin = list(json!({ "actors": [admin["id"]] })).await;
    assert!(by_admin.as_array().unwrap().iter().all(|event| event["actor_user"] == "admin"), "{by_admin}");
    assert_eq!(list(json!({ "actors": [user["id"]] })).await, json!([]), "mira has done nothing");
    let mut newest_first = list(json!({ "within_projects": [project["project_id"]] })).await;
    let oldest_first = list(json!({ "within_projects": [project["project_id"]], "ascending": true })).await;
    newest_first.as_array_mut().unwrap().reverse();
    assert_eq!(newest_first, oldest_first);
    server.stop().await;
}

async fn runs_are_filtered_by_project_user_repository_and_state(ground: &ServerFixture) {
    let server = start_idle(ground).await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    server.admin("/api/projects/create", json!({ "project_name": "other" })).await;
    create_run(&server, ADMIN_TOKEN, "main", "one").await;
    create_run(&server, &mira, "main", "two").await;
    create_run(&server, ADMIN_TOKEN, "other", "three").await;
    let repository = json!({ "repo_id": "app", "repo_info": { "repo_type": "remote", "repo_name": "app" },
        "repo_creds": { "clone_url": "https://git.example/app.git" } });
    server.admin("/api/project/main/repos/init", repository).await;
    let spec = json!({ "run_name": "four", "configuration": { "type": "task", "commands": ["true"] },
        "profile": { "name": "default" }, "repo_id": "app",
        "repo_data": { "repo_type": "remote", "repo_name": "app", "repo_branch": "main", "repo_hash": null } });
    server.admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec } })).await;
    let list = async |filter: Value| server.admin("/api/runs/list", filter).await;
    for (filter, want) in [
        (json!({}), vec!["four", "three", "two", "one"]),
        (json!({ "ascending": true }), vec!["one", "two", "three", "four"]),
        (json!({ "project_name": "other" }), vec!["three"]),
        (json!({ "username": "mira" }), vec!["two"]),
        (json!({ "project_name": "main", "repo_id": "app" }), vec!["four"]),
    ] {
        let found = list(filter.clone()).await;
        assert_eq!(names(&found, "/run_spec/run_name"), want, "{filter}");
    }
    let ended = "UPDATE runs SET status = 'done', finished = TRUE WHERE name = 'one'";
    let unit = windlass_server::db::Unit::new().exec(ended, vec![]);
    server.app.db().write(unit).await.unwrap().done().unwrap();
    let active = list(json!({ "only_active": true, "project_name": "main" })).await;
    assert_eq!(names(&active, "/run_spec/run_name"), ["four", "two"]);
    let without = list(json!({ "include_jobs": false, "username": "mira" })).await;
    assert_eq!(without[0]["jobs"], json!([]));
    let with = list(json!({ "include_jobs": true, "username": "mira", "job_submissions_limit": 0 })).await;
    assert_eq!(with[0]["jobs"][0]["job_submissions"], json!([]), "{with}");
    server.stop().await;
}

async fn fleets_instances_and_volumes_are_listed_in_pages_in_both_orders(ground: &ServerFixture) {
    let server = start_idle(ground).await;
    for (name, host) in [("aa", "10.0.0.1"), ("bb", "10.0.0.2"), ("cc", "10.0.0.3")] {
        create_fleet(&server, name, &[host]).await;
        let volume = json!({ "type": "volume", "name": name, "backend": "local" });
        server.admin("/api/project/main/volumes/create", json!({ "configuration": volume })).await;
    }
    for (path, name, created) in [
        ("/api/fleets/list", "/name", "/created_at"),
        ("/api/volumes/list", "/name", "/created_at"),
        ("/api/instances/list", "/name", "/created"),
    ] {
        for ascending in [true, false] {
            let whole = server.admin(path, json!({ "ascending": ascending })).await;
            let mut known = names(&whole, name);
            known.retain(|name| !name.starts_with("local"));
            let mut want = vec!["aa", "bb", "cc"];
            if !ascending {
                want.reverse();
            }
            let starts: Vec<&str> = known.iter().map(|name| &name[..2]).collect();
            assert_eq!(starts, want, "{path} {ascending}");
            let (mut at, mut id, mut seen) = (Value::Null, Value::Null, Vec::new());
            loop {
                let page =
                    json!({ "ascending": ascending, "limit": 1, "prev_created_at": at, "prev_id": id });
                let page = server.admin(path, page).await;
                let Some(last) = page.as_array().unwrap().last() else { break };
                assert_eq!(page.as_array().unwrap().len(), 1, "{path}");
                (at, id) = (last.pointer(created).unwrap().clone(), last["id"].clone());
                seen.push(last.clone());
            }
            assert_eq!(Value::Array(seen), whole, "{path} {ascending}: pages neither skip nor repeat");
        }
    }
    let fleets = server.admin("/api/fleets/list", json!({ "ascending": true })).await;
    let second = fleets.as_array().unwrap().iter().find(|fleet| fleet["name"] == "bb").unwrap();
    let found = server.admin("/api/instances/list", json!({ "fleet_ids": [second["id"]] })).await;
    assert_eq!(names(&found, "/name"), ["bb-0"]);
    server.admin("/api/projects/create", json!({ "project_name": "other" })).await;
    let of_project = async |name: &str| {
        server
            .admin("/api/instances/list", json!({ "project_names": [name] }))
            .await
            .as_array()
            .unwrap()
            .len()
    };
    assert_eq!((of_project("other").await, of_project("main").await >= 3), (0, true));
    server.stop().await;
}

async fn managed_jobs_are_filtered_by_status_time_and_user(ground: &ServerFixture) {
    let server = start_idle(ground).await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "manager")]).await;
    let base = "/api/project/main/jobs";
    let launch = async |token: &str, name: &str| {
        let body = json!({ "text": "run: echo\n", "name": name });
        server.ok(token, &format!("{base}/launch"), body).await["jobs"][0]["job_id"].clone()
    };
    launch(ADMIN_TOKEN, "one").await;
    let two = launch(ADMIN_TOKEN, "two").await;
    let of_mira = launch(&mira, "hers").await;
    let list = async |filter: Value| server.admin(&format!("{base}/list"), filter).await;
    assert_eq!(names(&list(json!({})).await, "/name"), ["two", "one"], "one's own");
    assert_eq!(names(&list(json!({ "all_users": true })).await, "/name"), ["hers", "two", "one"]);
    let ended =
        "UPDATE managed_jobs SET status = 'SUCCEEDED', finished = TRUE, submitted_at = 5 WHERE name = 'one'";
    let unit = windlass_server::db::Unit::new().exec(ended, vec![]);
    server.app.db().write(unit).await.unwrap().done().unwrap();
    assert_eq!(names(&list(json!({ "skip_finished": true })).await, "/name"), ["two"]);
    assert_eq!(names(&list(json!({ "statuses": ["SUCCEEDED"] })).await, "/name"), ["one"]);
    let recent = list(json!({ "since": "2020-01-01T00:00:00Z" })).await;
    assert_eq!(names(&recent, "/name"), ["two"], "the other was launched in 1970");
    let cancelled = server.admin(&format!("{base}/cancel"), json!({ "all_users": true })).await;
    assert_eq!(cancelled["job_ids"], json!([two, of_mira]));
    server.stop().await;
}
