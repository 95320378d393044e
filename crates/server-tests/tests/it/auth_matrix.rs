//! Every operation of the OpenAPI document × every kind of caller.
//!
//! The expectations come from the document's `x-access` alone: an operation without a known level fails here, and so
//! does one that admits a caller it should not.

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use windlass_api::{
    Access, openapi,
    operation::{CallerRole, Ownership},
    operations,
};
use windlass_server::{config::SettingsSource, params};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    every_operation_admits_only_the_callers_it_declares
    access_to_objects_of_others_matches_the_rights_table
    archives_are_read_and_used_by_their_owner_alone
    a_project_is_closed_to_members_of_other_projects
    x6_ids_of_another_project_give_no_access
    x6_no_operation_reads_or_changes_objects_of_another_project
    x7_a_removed_member_loses_access_at_once
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallerKind {
    Anonymous,
    UnknownToken,
    Outsider,
    User,
    Manager,
    ProjectAdmin,
    GlobalAdmin,
}

const ALL_CALLERS: [CallerKind; 7] = [
    CallerKind::Anonymous,
    CallerKind::UnknownToken,
    CallerKind::Outsider,
    CallerKind::User,
    CallerKind::Manager,
    CallerKind::ProjectAdmin,
    CallerKind::GlobalAdmin,
];

impl CallerKind {
    fn role(self) -> CallerRole {
        match self {
            // A caller with an unknown token counts as anonymous.
            Self::Anonymous | Self::UnknownToken => CallerRole::Anonymous,
            Self::Outsider => CallerRole::Outsider,
            Self::User => CallerRole::User,
            Self::Manager => CallerRole::Manager,
            Self::ProjectAdmin => CallerRole::ProjectAdmin,
            Self::GlobalAdmin => CallerRole::GlobalAdmin,
        }
    }
}

/// Returns whether a caller passes the access check. The request in the body may still be refused after it. The project
/// here is not public.
fn is_admitted(access: Access, who: CallerKind) -> bool {
    access.admits(who.role(), Ownership::Own)
}

struct RoleTokens {
    outsider: String,
    user: String,
    manager: String,
    admin: String,
}

impl RoleTokens {
    async fn create(server: &TestServer) -> Self {
        let users = Self {
            outsider: server.user("outsider").await,
            user: server.user("plain").await,
            manager: server.user("manager").await,
            admin: server.user("chief").await,
        };
        server.join("main", &[("plain", "user"), ("manager", "manager"), ("chief", "admin")]).await;
        users
    }

    fn token(&self, who: CallerKind) -> Option<&str> {
        match who {
            CallerKind::Anonymous => None,
            CallerKind::UnknownToken => Some("wl_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            CallerKind::Outsider => Some(&self.outsider),
            CallerKind::User => Some(&self.user),
            CallerKind::Manager => Some(&self.manager),
            CallerKind::ProjectAdmin => Some(&self.admin),
            CallerKind::GlobalAdmin => Some(ADMIN_TOKEN),
        }
    }
}

/// Sends a body on which no operation can act: what it names does not exist.
async fn send_request(server: &TestServer, method: &str, path: &str, token: Option<&str>) -> (u16, Value) {
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

async fn every_operation_admits_only_the_callers_it_declares(ground: &ServerFixture) {
    let server = ground.start().await;
    let users = RoleTokens::create(&server).await;
    let document = openapi::document();
    let mut requested = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let word = operation["x-access"].as_str().expect("x-access");
            let access = Access::ALL.into_iter().find(|access| access.name() == word).expect("a known level");
            let path = path.replace("{project_name}", "main").replace("{run_name}", "nobody");
            for who in ALL_CALLERS {
                let (status, body) =
                    send_request(&server, &method.to_uppercase(), &path, users.token(who)).await;
                requested += 1;
                if is_admitted(access, who) {
                    let by_body = matches!(access, Access::SelfOrAdmin | Access::ProjectSelfOrManager);
                    assert!(
                        ![401, 403].contains(&status) || by_body,
                        "{who:?} is shut out of {path} ({word}): {body}"
                    );
                    assert!(status < 500, "{path} fails with {status}: {body}");
                } else {
                    let refused = if matches!(who, CallerKind::Anonymous) { 401 } else { 403 };
                    assert_eq!(status, refused, "{who:?} gets into {path} ({word}): {body}");
                    assert!(body["detail"]["msg"].is_string() && body["detail"]["code"].is_null(), "{body}");
                }
            }
        }
    }
    assert!(requested > 400, "the matrix is smaller than it was: {requested}");
    server.stop().await;
}

/// Every operation of a project, requested by a member of another one.
async fn a_project_is_closed_to_members_of_other_projects(ground: &ServerFixture) {
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
    // Lists over all projects contain only her own.
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

async fn x6_ids_of_another_project_give_no_access(ground: &ServerFixture) {
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
    let archive = server
        .upload(ADMIN_TOKEN, "/api/files/upload_archive", &crate::http_secrets::sha256_hex(b"x"), b"x")
        .await
        .1;
    let stolen = json!({ "configuration": { "type": "task", "commands": ["true"] },
        "file_archives": [{ "id": archive["id"], "path": "/x" }] });
    server
        .refused(&mira, "/api/project/lab/runs/apply", json!({ "plan": { "run_spec": stolen } }), absent)
        .await;
    server.stop().await;
}

/// Each operation of her own project, requested for the objects of another one: by every name and id, in every field
/// that accepts one, in the body and in the query.
async fn x6_no_operation_reads_or_changes_objects_of_another_project(ground: &ServerFixture) {
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
    let mut requested = 0;
    for (path, methods) in openapi::document()["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            // Operations that create something create it in her own project.
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
                requested += 1;
                assert!(status < 500, "{id}: {status} {answer}");
                for needle in ["canary-of-main", submission, instance, run["id"].as_str().unwrap()] {
                    assert!(!answer.contains(needle), "{id} tells of another project: {status} {answer}");
                }
            }
        }
    }
    assert!(requested > 100, "the sweep is smaller than it was: {requested}");
    // Nothing has changed.
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

async fn x7_a_removed_member_loses_access_at_once(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let list = "/api/project/main/repos/list";
    server.ok(&mira, list, json!({})).await;
    server.admin("/api/projects/main/remove_members", json!({ "usernames": ["mira"] })).await;
    assert_eq!(server.post(&mira, list, "{}").await.0, 403);
    server.stop().await;
}

/// Users of one test, each with a unique name.
pub(crate) struct TestUsers<'a> {
    pub(crate) server: &'a TestServer,
    made: std::cell::Cell<u32>,
}

/// A user with a token, or an anonymous caller.
pub(crate) struct TestUser {
    pub(crate) name: String,
    pub(crate) token: Option<String>,
}

impl<'a> TestUsers<'a> {
    pub(crate) fn new(server: &'a TestServer) -> Self {
        Self { server, made: std::cell::Cell::default() }
    }

    fn name(&self, kind: &str) -> String {
        self.made.set(self.made.get() + 1);
        format!("{kind}-{}", self.made.get())
    }

    /// A new user with this role in `main`.
    pub(crate) async fn with_role(&self, role: CallerRole) -> TestUser {
        let (global, word) = match role {
            CallerRole::Anonymous => return TestUser { name: "nobody".into(), token: None },
            CallerRole::GlobalAdmin => ("admin", None),
            CallerRole::Outsider => ("user", None),
            CallerRole::User => ("user", Some("user")),
            CallerRole::Manager => ("user", Some("manager")),
            CallerRole::ProjectAdmin => ("user", Some("admin")),
        };
        let name = self.name("person");
        let made = json!({ "username": name, "global_role": global });
        let made = self.server.admin("/api/users/create", made).await;
        if let Some(word) = word {
            self.server.join("main", &[(&name, word)]).await;
        }
        TestUser { name, token: made["creds"]["token"].as_str().map(str::to_owned) }
    }

    /// Creates the object of the operation as `creator`, and builds the request for it.
    async fn request(&self, operation: &str, creator: &TestUser) -> TestRequest {
        let server = self.server;
        let token = creator.token.as_deref().unwrap_or(ADMIN_TOKEN);
        let name = self.name("thing");
        let task = |command: &str| json!({ "run_name": name, "configuration": { "type": "task", "commands": [command] } });
        let fleet = |most: u32| {
            json!({ "configuration": { "type": "fleet", "name": name, "nodes": { "min": 0, "max": most } },
                "profile": { "name": "default" } })
        };
        let main = |path: &str| format!("/api/project/main/{path}");
        let post = |path: String, body: Value| TestRequest { method: "POST", path, body };
        match operation {
            "apply_run" | "stop_runs" | "delete_runs" | "connect_job" | "open_terminal"
            | "redeploy_service" => {
                let run = json!({ "plan": { "run_spec": task("true") } });
                let run = server.ok(token, &main("runs/apply"), run).await;
                let names = json!({ "runs_names": [name], "abort": false });
                match operation {
                    "apply_run" => {
                        let changed = json!({ "plan": { "run_spec": task("false") }, "force": true });
                        post(main("runs/apply"), changed)
                    }
                    "stop_runs" => post(main("runs/stop"), names),
                    "delete_runs" => post(main("runs/delete"), names),
                    "redeploy_service" => post(main("runs/redeploy"), json!({ "run_name": name, "num": 0 })),
                    "open_terminal" => {
                        let job = run["latest_job_submission"]["id"].as_str().unwrap();
                        let query = format!("run_name={name}&job_submission_id={job}");
                        let path = format!("{}?{query}", main("runs/terminal"));
                        TestRequest { method: "GET", path, body: Value::Null }
                    }
                    _ => {
                        let job = run["latest_job_submission"]["id"].as_str().unwrap();
                        let query = format!("run_name={name}&job_submission_id={job}&port=8000");
                        let path = format!("{}?{query}", main("runs/connect"));
                        TestRequest { method: "GET", path, body: Value::Null }
                    }
                }
            }
            "cancel_managed_jobs" => {
                let launched = server.ok(token, &main("jobs/launch"), json!({ "text": "run: echo\n" })).await;
                post(main("jobs/cancel"), json!({ "job_ids": [launched["jobs"][0]["job_id"]] }))
            }
            "resume_managed_job" => {
                let launched = server.ok(token, &main("jobs/launch"), json!({ "text": "run: echo\n" })).await;
                let number = launched["jobs"][0]["job_id"].as_i64().unwrap();
                let over = windlass_server::db::Unit::new().exec(
                    "UPDATE managed_jobs SET finished = TRUE, status = 'FAILED' WHERE number = $1",
                    params![number],
                );
                server.app.db().write(over).await.unwrap().done().unwrap();
                post(main("jobs/resume"), json!({ "job_id": number }))
            }
            "apply_fleet" | "delete_fleets" | "delete_fleet_instances" => {
                server.ok(token, &main("fleets/apply"), json!({ "plan": { "spec": fleet(1) } })).await;
                match operation {
                    "apply_fleet" => {
                        post(main("fleets/apply"), json!({ "plan": { "spec": fleet(2) }, "force": true }))
                    }
                    "delete_fleets" => post(main("fleets/delete"), json!({ "names": [name] })),
                    _ => {
                        let body = json!({ "name": name, "instance_nums": [0] });
                        post(main("fleets/delete_instances"), body)
                    }
                }
            }
            "delete_volumes" => {
                let volume =
                    json!({ "configuration": { "type": "volume", "name": name, "backend": "local" } });
                server.ok(token, &main("volumes/create"), volume).await;
                post(main("volumes/delete"), json!({ "names": [name] }))
            }
            "delete_repos" => {
                let creds = json!({ "clone_url": "https://example.com/x.git", "oauth_token": "t" });
                let repo = json!({ "repo_id": name, "repo_info": { "repo_type": "remote", "repo_name": "x" },
                    "repo_creds": creds });
                server.ok(token, &main("repos/init"), repo).await;
                post(main("repos/delete"), json!({ "repos_ids": [name] }))
            }
            "read_user" => post("/api/users/get_user".into(), json!({ "username": creator.name })),
            "refresh_token" => post("/api/users/refresh_token".into(), json!({ "username": creator.name })),
            "refresh_ssh_key" => {
                post("/api/users/refresh_ssh_key".into(), json!({ "username": creator.name }))
            }
            "remove_members" => {
                post("/api/projects/main/remove_members".into(), json!({ "usernames": [creator.name] }))
            }
            "add_members" => {
                let members = json!([{ "username": creator.name, "project_role": "user" }]);
                post("/api/projects/main/add_members".into(), json!({ "members": members }))
            }
            other => panic!("there is no object for `{other}` yet: add one"),
        }
    }
}

struct TestRequest {
    method: &'static str,
    path: String,
    body: Value,
}

impl TestRequest {
    async fn send(&self, server: &TestServer, token: Option<&str>) -> (u16, Value) {
        let mut request = Request::builder()
            .method(self.method)
            .uri(&self.path)
            .header("host", &server.authority)
            .header("content-type", "application/json");
        if self.method == "GET" {
            request = request
                .header("upgrade", "tcp")
                .header("connection", "upgrade")
                .header("sec-websocket-key", "x3JJHMbDL1EzLkh9GBhXDw==")
                .header("sec-websocket-protocol", "windlass.terminal.v1");
        }
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let body = if self.body.is_null() { String::new() } else { self.body.to_string() };
        let (status, answer) = server.send(request.body(Full::new(Bytes::from(body))).unwrap()).await;
        (status, serde_json::from_slice(&answer).unwrap_or(Value::Null))
    }
}

/// Each operation whose access depends on the creator × each role × own and foreign objects: every one of these cells
/// of `docs/reference/rights.md`.
async fn access_to_objects_of_others_matches_the_rights_table(ground: &ServerFixture) {
    let server = TestServer::start_with(SettingsSource { no_local: Some(false), ..ground.given() }).await;
    let users = TestUsers::new(&server);
    let mut tried = 0;
    for entry in operations::table().into_iter().filter(|entry| entry.access.depends_on_owner()) {
        for role in CallerRole::ALL {
            for object in [Ownership::Own, Ownership::Foreign] {
                // An anonymous caller creates nothing, and a non-member has nothing in the project.
                let in_project = entry.access.in_project();
                let has_own = role >= if in_project { CallerRole::User } else { CallerRole::Outsider };
                // A member does not join; a non-member joins public projects, which another test covers.
                if object == Ownership::Own && (!has_own || entry.id == "add_members") {
                    continue;
                }
                let caller = users.with_role(role).await;
                let other = users.with_role(CallerRole::User).await;
                let creator = if object == Ownership::Own { &caller } else { &other };
                let requested = users.request(entry.id, creator).await;
                let (status, answer) = requested.send(&server, caller.token.as_deref()).await;
                let cell = format!("{} by {role:?}, {object:?}: {status} {answer}", entry.id);
                tried += 1;
                if entry.access.admits(role, object) {
                    assert!(![401, 403].contains(&status) && status < 500, "{cell}");
                } else {
                    assert_eq!(status, if role == CallerRole::Anonymous { 401 } else { 403 }, "{cell}");
                }
                if entry.access == Access::ProjectOwnerOrManager && role == CallerRole::User && status == 403
                {
                    let message = answer["detail"]["msg"].as_str().unwrap();
                    assert!(
                        message.contains("belongs to another user; only its creator, managers"),
                        "{message}"
                    );
                }
            }
        }
    }
    assert!(tried > 120, "the matrix is smaller than it was: {tried}");
    server.stop().await;
}

async fn archives_are_read_and_used_by_their_owner_alone(ground: &ServerFixture) {
    let server = ground.start().await;
    let (mira, noor) = (server.user("mira").await, server.user("noor").await);
    server.join("main", &[("mira", "user"), ("noor", "manager")]).await;
    let hash = crate::http_secrets::sha256_hex(b"x");
    let archive = server.upload(&mira, "/api/files/upload_archive", &hash, b"x").await.1;
    server.ok(&mira, "/api/files/get_archive_by_hash", json!({ "hash": hash })).await;
    let absent = "resource_not_exists";
    for other in [&noor, ADMIN_TOKEN] {
        server.refused(other, "/api/files/get_archive_by_hash", json!({ "hash": hash }), absent).await;
        let stolen = json!({ "configuration": { "type": "task", "commands": ["true"] },
            "file_archives": [{ "id": archive["id"], "path": "/x" }] });
        let plan = json!({ "plan": { "run_spec": stolen } });
        server.refused(other, "/api/project/main/runs/apply", plan, absent).await;
        let files = json!([{ "task": 0, "archive_id": archive["id"], "path": "x" }]);
        let launch = json!({ "text": "run: echo\n", "files": files });
        server.refused(other, "/api/project/main/jobs/launch", launch, absent).await;
    }
    server.stop().await;
}
