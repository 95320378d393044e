//! Rights on rows that exist: containers of the queue, archives, managed jobs and volumes × every role × own and foreign
//! objects, and the operations across projects.

use std::collections::BTreeSet;

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use windlass_api::{
    Access,
    operation::{CallerRole, Entry, Method},
    operations,
};
use windlass_server::config::SettingsSource;

use crate::{
    auth_matrix::{TestUser, TestUsers},
    http::{ServerFixture, TestServer, on_both},
    http_queue::{QueueClient, text_field},
};

on_both! {
    queue_containers_are_accessible_to_their_owner_and_global_admins
    an_archive_is_accessible_to_its_owner_alone_whatever_the_role
    managed_jobs_and_volumes_are_shown_to_members_alone
    operations_across_projects_show_no_rows_of_other_projects
}

const CANARY: &str = "canary-of-main";
const WITH_TOKEN: [CallerRole; 5] = [
    CallerRole::Outsider,
    CallerRole::User,
    CallerRole::Manager,
    CallerRole::ProjectAdmin,
    CallerRole::GlobalAdmin,
];

fn token(user: &TestUser) -> &str {
    user.token.as_deref().unwrap_or("unknown")
}

/// A new user with this role in `main` who may use the queue.
async fn queue_user(users: &TestUsers<'_>, role: CallerRole) -> TestUser {
    let user = users.with_role(role).await;
    let global = if role == CallerRole::GlobalAdmin { "admin" } else { "user" };
    let grant = json!({ "username": user.name, "global_role": global, "can_use_queue": true });
    users.server.admin("/api/users/update", grant).await;
    user
}

async fn queue_containers_are_accessible_to_their_owner_and_global_admins(ground: &ServerFixture) {
    let server = &ground.start().await;
    let (users, queue) = (TestUsers::new(server), QueueClient { server });
    for role in WITH_TOKEN {
        let (caller, other) =
            (queue_user(&users, role).await, queue_user(&users, CallerRole::ProjectAdmin).await);
        for creator in [&caller, &other] {
            let made = queue.submit(token(creator), json!({ "environment": { "KEY": CANARY } })).await;
            let (request, container) = (text_field(&made, "uuid"), text_field(&made, "container_uuid"));
            let is_allowed = creator.name == caller.name || role == CallerRole::GlobalAdmin;
            let lists = ["container_requests?limit=1000", "containers?limit=1000", "logs?limit=1000"];
            for list in lists {
                let page = queue.ok(token(&caller), "GET", list, Value::Null).await.to_string();
                let is_shown = page.contains(&request) || page.contains(&container);
                assert_eq!(is_shown, is_allowed, "{list} by {role:?}: {page}");
                assert!(is_allowed || !page.contains(&container), "{list} by {role:?}: {page}");
            }
            let rows = server.ok(token(&caller), "/api/containers/rows", json!({})).await.to_string();
            assert_eq!(rows.contains(&container), is_allowed, "rows by {role:?}: {rows}");
            let priority = json!({ "container_request": { "priority": 1 } });
            for (method, path, body) in [
                ("GET", format!("containers/{container}"), Value::Null),
                ("GET", format!("container_requests/{request}"), Value::Null),
                ("PUT", format!("container_requests/{request}"), priority),
                ("DELETE", format!("container_requests/{request}"), Value::Null),
            ] {
                let (status, answer) = queue.call(token(&caller), method, &path, body).await;
                let cell = format!("{method} {path} by {role:?}: {status} {answer}");
                assert_eq!(status, if is_allowed { 200 } else { 404 }, "{cell}");
                assert!(is_allowed || !answer.to_string().contains(CANARY), "{cell}");
            }
        }
    }
    for (method, path) in
        [("GET", "containers"), ("GET", "container_requests"), ("POST", "container_requests")]
    {
        assert_eq!(queue.call("unknown", method, path, Value::Null).await.0, 401, "{method} {path}");
    }
}

async fn an_archive_is_accessible_to_its_owner_alone_whatever_the_role(ground: &ServerFixture) {
    let server = &ground.start().await;
    let users = TestUsers::new(server);
    let absent = "resource_not_exists";
    for (number, role) in WITH_TOKEN.into_iter().enumerate() {
        let (caller, other) = (users.with_role(role).await, users.with_role(CallerRole::User).await);
        let bytes = format!("{number}");
        let hash = crate::http_secrets::sha256_hex(bytes.as_bytes());
        let by_hash = json!({ "hash": hash });
        let upload = "/api/files/upload_archive";
        let archive = server.upload(token(&other), upload, &hash, bytes.as_bytes()).await.1;
        server.refused(token(&caller), "/api/files/get_archive_by_hash", by_hash.clone(), absent).await;
        if role > CallerRole::Outsider {
            let stolen = json!({ "configuration": { "type": "task", "commands": ["true"] },
                "file_archives": [{ "id": archive["id"], "path": "/x" }] });
            let plan = json!({ "plan": { "run_spec": stolen } });
            server.refused(token(&caller), "/api/project/main/runs/apply", plan, absent).await;
            let files = json!([{ "task": 0, "archive_id": archive["id"], "path": "x" }]);
            let launch = json!({ "text": "run: echo\n", "files": files });
            server.refused(token(&caller), "/api/project/main/jobs/launch", launch, absent).await;
        }
        // The same bytes, uploaded by the caller, are an archive of the caller.
        let own = server.upload(token(&caller), upload, &hash, bytes.as_bytes()).await.1;
        assert_ne!(own["id"], archive["id"], "{role:?}");
        let found = server.ok(token(&caller), "/api/files/get_archive_by_hash", by_hash).await;
        assert_eq!(found["id"], own["id"], "{role:?}");
    }
}

/// A managed job and a volume in `main`, with the canary in both.
async fn create_rows(server: &TestServer, creator: &TestUser) -> (Value, String) {
    let task = json!({ "text": format!("name: {CANARY}\nrun: echo {CANARY}\n") });
    let launched = server.ok(token(creator), "/api/project/main/jobs/launch", task).await;
    let volume = format!("{CANARY}-volume");
    let configuration = json!({ "type": "volume", "name": volume, "backend": "local" });
    let created = json!({ "configuration": configuration });
    server.ok(token(creator), "/api/project/main/volumes/create", created).await;
    (launched["jobs"][0]["job_id"].clone(), volume)
}

async fn managed_jobs_and_volumes_are_shown_to_members_alone(ground: &ServerFixture) {
    let given = SettingsSource { no_local: Some(false), ..ground.given() };
    let server = &TestServer::start_with(given).await;
    let users = TestUsers::new(server);
    let creator = users.with_role(CallerRole::User).await;
    let (job, volume) = create_rows(server, &creator).await;
    let reads = [
        ("jobs/list", json!({ "all_users": true })),
        ("jobs/get", json!({ "job_id": job })),
        ("volumes/list", json!({})),
        ("volumes/get", json!({ "name": volume })),
    ];
    for role in WITH_TOKEN {
        let caller = users.with_role(role).await;
        for (path, body) in &reads {
            let path = format!("/api/project/main/{path}");
            let (status, answer) = server.post(token(&caller), &path, &body.to_string()).await;
            let is_shown = answer.to_string().contains(CANARY);
            let wanted = if role == CallerRole::Outsider { (403, false) } else { (200, true) };
            assert_eq!((status, is_shown), wanted, "{path} by {role:?}: {answer}");
        }
        let of_all = server.ok(token(&caller), "/api/volumes/list", json!({})).await.to_string();
        assert_eq!(of_all.contains(CANARY), role != CallerRole::Outsider, "{role:?}: {of_all}");
    }
}

/// Operations whose access is `token` and that only read.
fn reading_operations() -> Vec<Entry> {
    const READS: [&str; 4] = ["list_", "read_", "search_", "explain_"];
    let all = operations::table().into_iter().filter(|entry| entry.access == Access::Token);
    all.filter(|entry| READS.iter().any(|verb| entry.id.starts_with(verb))).collect()
}

async fn operations_across_projects_show_no_rows_of_other_projects(ground: &ServerFixture) {
    let given = SettingsSource { no_local: Some(false), ..ground.given() };
    let server = &TestServer::start_with(given).await;
    let users = TestUsers::new(server);
    let creator = queue_user(&users, CallerRole::User).await;
    create_rows(server, &creator).await;
    let task = json!({ "run_name": CANARY, "configuration": { "type": "task", "commands": ["true"] } });
    let plan = json!({ "plan": { "run_spec": task } });
    server.ok(token(&creator), "/api/project/main/runs/apply", plan).await;
    let fleet = json!({ "configuration": { "type": "fleet", "name": CANARY, "nodes": { "min": 0, "max": 1 } },
        "profile": { "name": "default" } });
    server.ok(token(&creator), "/api/project/main/fleets/apply", json!({ "plan": { "spec": fleet } })).await;
    QueueClient { server }.submit(token(&creator), json!({ "name": CANARY })).await;
    let outsider = users.with_role(CallerRole::Outsider).await;
    let mut shown = BTreeSet::new();
    for entry in reading_operations() {
        let method = if entry.method == Method::Get { "GET" } else { "POST" };
        let body = json!({ "hash": "x", "text": "canary", "query": "canary", "limit": 100 }).to_string();
        for who in [&outsider, &creator] {
            let request = Request::builder()
                .method(method)
                .uri(format!("{}?query=canary&limit=100", entry.path))
                .header("host", &server.authority)
                .header("authorization", format!("Bearer {}", token(who)))
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(if method == "GET" { String::new() } else { body.clone() })))
                .unwrap();
            let (status, answer) = server.send(request).await;
            let answer = String::from_utf8_lossy(&answer).into_owned();
            assert!(status < 500, "{}: {status} {answer}", entry.id);
            let has_canary = answer.contains(CANARY);
            assert!(!has_canary || who.name == creator.name, "{}: {status} {answer}", entry.id);
            if has_canary {
                shown.insert(entry.id);
            }
        }
    }
    // The member sees what the other user does not: the requests are good ones.
    let wanted = [
        "list_container_rows",
        "list_fleets",
        "list_managed_job_rows",
        "list_queue",
        "list_run_rows",
        "list_runs",
        "list_volumes",
    ];
    assert_eq!(shown, wanted.into(), "operations that show rows to the member");
}
