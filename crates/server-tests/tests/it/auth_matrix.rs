//! Every operation of the OpenAPI document × every kind of caller.
//!
//! What is expected comes from the document's `x-access` alone: an operation without a known level
//! fails here, and so does one that lets in somebody it should not.

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use windlass_api::{Access, openapi};

use crate::http::{ADMIN, Ground, TestServer, on_both};

on_both! {
    every_operation_lets_in_those_it_names_and_nobody_else
    a_project_is_closed_to_people_of_other_projects
    x6_ids_of_another_project_do_not_open_it
    x6_no_operation_answers_or_obeys_to_things_of_another_project
    x7_who_is_taken_out_of_a_project_is_out_at_once
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Anonymous,
    Forged,
    Outsider,
    User,
    Manager,
    ProjectAdmin,
    GlobalAdmin,
}

const ALL: [Who; 7] = [
    Who::Anonymous,
    Who::Forged,
    Who::Outsider,
    Who::User,
    Who::Manager,
    Who::ProjectAdmin,
    Who::GlobalAdmin,
];

/// Whether a caller gets past the door. What the body asks for may still be refused behind it.
fn passes(access: Access, who: Who) -> bool {
    let least = match access {
        // Gateways have tokens of their own, and people have none of them.
        Access::Gateway => return false,
        Access::Open => Who::Anonymous,
        Access::Token | Access::SelfOrAdmin => Who::Outsider,
        Access::GlobalAdmin => Who::GlobalAdmin,
        // The project here is not public.
        Access::ProjectPublic | Access::ProjectUser | Access::ProjectSelfOrManager => Who::User,
        Access::ProjectManager => Who::Manager,
        Access::ProjectAdmin => Who::ProjectAdmin,
    };
    who >= least
}

struct People {
    outsider: String,
    user: String,
    manager: String,
    admin: String,
}

impl People {
    async fn invite(server: &TestServer) -> Self {
        let people = Self {
            outsider: server.user("outsider").await,
            user: server.user("plain").await,
            manager: server.user("manager").await,
            admin: server.user("chief").await,
        };
        server.join("main", &[("plain", "user"), ("manager", "manager"), ("chief", "admin")]).await;
        people
    }

    fn token(&self, who: Who) -> Option<&str> {
        match who {
            Who::Anonymous => None,
            Who::Forged => Some("wl_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            Who::Outsider => Some(&self.outsider),
            Who::User => Some(&self.user),
            Who::Manager => Some(&self.manager),
            Who::ProjectAdmin => Some(&self.admin),
            Who::GlobalAdmin => Some(ADMIN),
        }
    }
}

/// A body that no operation can act on: what is asked for does not exist.
async fn ask(server: &TestServer, method: &str, path: &str, token: Option<&str>) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(path).header("host", &server.authority);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let body = if method == "POST" {
        r#"{"username":"nobody","users":["nobody"],"names":[],"nonsense":1}"#
    } else {
        ""
    };
    let (status, body) = server.send(request.body(Full::new(Bytes::from(body))).unwrap()).await;
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

async fn every_operation_lets_in_those_it_names_and_nobody_else(ground: &Ground) {
    let server = ground.start().await;
    let people = People::invite(&server).await;
    let document = openapi::document();
    let mut asked = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let word = operation["x-access"].as_str().expect("x-access");
            let access = Access::ALL.into_iter().find(|access| access.name() == word).expect("a known level");
            let path = path.replace("{project_name}", "main").replace("{run_name}", "nobody");
            for who in ALL {
                let (status, body) = ask(&server, &method.to_uppercase(), &path, people.token(who)).await;
                asked += 1;
                if passes(access, who) {
                    let by_body = matches!(access, Access::SelfOrAdmin | Access::ProjectSelfOrManager);
                    assert!(
                        ![401, 403].contains(&status) || by_body,
                        "{who:?} is shut out of {path} ({word}): {body}"
                    );
                    assert!(status < 500, "{path} fails with {status}: {body}");
                } else {
                    let refused = if matches!(who, Who::Anonymous) { 401 } else { 403 };
                    assert_eq!(status, refused, "{who:?} gets into {path} ({word}): {body}");
                    assert!(body["detail"]["msg"].is_string() && body["detail"]["code"].is_null(), "{body}");
                }
            }
        }
    }
    assert!(asked > 400, "the matrix is smaller than it was: {asked}");
    server.stop().await;
}

/// Everything of a project, asked for by a member of another one.
async fn a_project_is_closed_to_people_of_other_projects(ground: &Ground) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    server.admin("/api/project/main/secrets/create_or_update", json!({ "name": "key", "value": "v" })).await;
    for path in ["runs/get", "secrets/get", "fleets/list", "volumes/list", "gateways/list", "repos/list"] {
        let (status, _) = server.post(&mira, &format!("/api/project/main/{path}"), r#"{"name":"key"}"#).await;
        assert_eq!(status, 403, "{path}");
        let (status, _) = server.post(&mira, &format!("/api/project/none/{path}"), "{}").await;
        assert_eq!(status, 404, "{path}");
    }
    // Lists over all projects hold only what is hers.
    let projects = server.ok(&mira, "/api/projects/list", json!({})).await;
    assert_eq!(projects.as_array().unwrap().len(), 1);
    for path in ["/api/runs/list", "/api/fleets/list", "/api/volumes/list"] {
        assert_eq!(server.ok(&mira, path, json!({ "project_name": "main" })).await, json!([]), "{path}");
        assert_eq!(server.ok(&mira, path, json!({ "project_name": "none" })).await, json!([]), "{path}");
    }
    assert_eq!(
        server.ok(&mira, "/api/instances/list", json!({ "project_names": ["main"] })).await,
        json!([])
    );
    let events = server.ok(&mira, "/api/events/list", json!({})).await;
    for event in events.as_array().unwrap() {
        assert_ne!(event["targets"][0]["project_name"], "main", "{event}");
    }
    server.stop().await;
}

async fn x6_ids_of_another_project_do_not_open_it(ground: &Ground) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    let spec = json!({ "configuration": { "type": "task", "commands": ["true"] } });
    let run = server
        .admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec }, "force": false }))
        .await;
    let fleet = json!({ "configuration": { "type": "fleet", "nodes": 0 }, "profile": { "name": "default" } });
    let fleet = server
        .admin("/api/project/main/fleets/apply", json!({ "plan": { "spec": fleet }, "force": false }))
        .await;
    let absent = "resource_not_exists";
    server.refused(&mira, "/api/project/lab/runs/get", json!({ "id": run["id"] }), absent).await;
    server.refused(&mira, "/api/project/lab/fleets/get", json!({ "id": fleet["id"] }), absent).await;
    let submission = &run["jobs"][0]["job_submissions"][0]["id"];
    let logs = json!({ "run_name": run["run_spec"]["run_name"], "job_submission_id": submission });
    server.refused(&mira, "/api/project/lab/logs/poll", logs.clone(), absent).await;
    server.admin("/api/project/main/logs/poll", logs).await;
    let archive =
        server.upload(ADMIN, "/api/files/upload_archive", &crate::http_secrets::sha256(b"x"), b"x").await.1;
    let stolen = json!({ "configuration": { "type": "task", "commands": ["true"] },
        "file_archives": [{ "id": archive["id"], "path": "/x" }] });
    server
        .refused(&mira, "/api/project/lab/runs/apply", json!({ "plan": { "run_spec": stolen } }), absent)
        .await;
    server.stop().await;
}

/// Each operation of her own project, asked for the things of another one: by every name and id, in every field that
/// takes one, in the body and in the query.
async fn x6_no_operation_answers_or_obeys_to_things_of_another_project(ground: &Ground) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    let task = json!({ "run_name": "theirs", "configuration": { "type": "task", "commands": ["echo canary-of-main"] } });
    let run = server.admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": task } })).await;
    let hosts = json!({ "user": "u", "identity_file": "f", "ssh_key": { "public": "p", "private": crate::http_fleets::private_key() }, "hosts": ["10.0.0.1"] });
    let spec = json!({ "configuration": { "type": "fleet", "name": "theirs", "ssh_config": hosts }, "profile": { "name": "default" } });
    let fleet = server.admin("/api/project/main/fleets/apply", json!({ "plan": { "spec": spec } })).await;
    let secret = json!({ "name": "theirs", "value": "canary-of-main" });
    server.admin("/api/project/main/secrets/create_or_update", secret.clone()).await;
    let repo =
        json!({ "repo_id": "theirs", "repo_info": { "repo_type": "remote", "repo_name": "canary-of-main" } });
    server.admin("/api/project/main/repos/init", repo).await;
    let submission = run["jobs"][0]["job_submissions"][0]["id"].as_str().unwrap();
    let instance = fleet["instances"][0]["id"].as_str().unwrap();
    let mut asked = 0;
    for (path, methods) in openapi::document()["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            // What makes something new makes it in her own project.
            let id = operation["operationId"].as_str().unwrap();
            let makes = ["apply_", "create_", "set_", "init_", "plan_", "add_", "update_"];
            if !path.contains("{project_name}") || makes.iter().any(|verb| id.starts_with(verb)) {
                continue;
            }
            for own in [&run["id"], &fleet["id"], &json!(instance), &json!(submission)] {
                let body = json!({
                    "id": own, "ids": [own], "run_id": run["id"], "run_name": "theirs", "runs_names": ["theirs"],
                    "name": "theirs", "names": ["theirs"], "fleet_name": "theirs", "secrets_names": ["theirs"],
                    "repo_id": "theirs", "repos_ids": ["theirs"], "include_creds": true, "instance_nums": [0],
                    "instance_id": instance, "job_submission_id": submission, "project_name": "main",
                    "project_id": run["project_id"], "abort": true, "force": true,
                });
                let query = format!(
                    "run_name=theirs&job_submission_id={submission}&repo_id=theirs&project_name=main"
                );
                let path = path.replace("{project_name}", "lab").replace("{run_name}", "theirs");
                let request = Request::builder()
                    .method(method.to_uppercase().as_str())
                    .uri(format!("{path}?{query}"))
                    .header("host", &server.authority)
                    .header("authorization", format!("Bearer {mira}"))
                    .header("content-type", "application/json")
                    .body(Full::new(Bytes::from(if method == "post" {
                        body.to_string()
                    } else {
                        String::new()
                    })))
                    .unwrap();
                let (status, answer) = server.send(request).await;
                let answer = String::from_utf8_lossy(&answer).into_owned();
                asked += 1;
                assert!(status < 500, "{id}: {status} {answer}");
                for needle in ["canary-of-main", submission, instance, run["id"].as_str().unwrap()] {
                    assert!(!answer.contains(needle), "{id} tells of another project: {status} {answer}");
                }
            }
        }
    }
    assert!(asked > 100, "the sweep is smaller than it was: {asked}");
    // Everything is as it was.
    let kept = server.admin("/api/project/main/runs/get", json!({ "run_name": "theirs" })).await;
    assert_eq!((&kept["id"], &kept["status"]), (&run["id"], &run["status"]));
    let kept = server.admin("/api/project/main/fleets/get", json!({ "name": "theirs" })).await;
    assert_eq!(
        (&kept["id"], &kept["instances"][0]["status"]),
        (&fleet["id"], &fleet["instances"][0]["status"])
    );
    let kept = server.admin("/api/project/main/secrets/get", json!({ "name": "theirs" })).await;
    assert_eq!(kept["value"], secret["value"]);
    assert_eq!(server.admin("/api/project/main/repos/list", json!({})).await.as_array().unwrap().len(), 1);
    server.stop().await;
}

async fn x7_who_is_taken_out_of_a_project_is_out_at_once(ground: &Ground) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let list = "/api/project/main/repos/list";
    server.ok(&mira, list, json!({})).await;
    server.admin("/api/projects/main/remove_members", json!({ "usernames": ["mira"] })).await;
    assert_eq!(server.post(&mira, list, "{}").await.0, 403);
    server.stop().await;
}
