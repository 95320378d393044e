//! Rights on rows that exist: containers of the queue, archives, managed jobs, volumes, keys, tokens, views and projects
//! × every role × own and foreign objects, and the operations across projects.

use std::collections::BTreeSet;

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use windlass_api::{
    operation::{CallerRole, Entry, Method, Ownership},
    operations,
    rights::{self, QUEUE_OPERATIONS, QueueRole, TokenRights},
};
use windlass_server::{config::SettingsSource, db::Unit, params};

use crate::{
    auth_matrix::{TestUser, TestUsers},
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_queue::{QueueClient, text_field},
    http_rows::add_instance,
};

on_both! {
    queue_containers_are_accessible_to_their_owner_and_global_admins
    queue_operations_match_the_rights_table
    objects_of_a_caller_are_changed_only_by_those_whom_the_table_admits
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

async fn queue_operations_match_the_rights_table(ground: &ServerFixture) {
    let server = &ground.start().await;
    let (users, queue) = (TestUsers::new(server), QueueClient { server });
    let cell = async |operation: &rights::QueueOperation, role: QueueRole, object: Ownership| {
        let of_role = match role {
            QueueRole::Anonymous => CallerRole::Anonymous,
            QueueRole::WithoutRight | QueueRole::User => CallerRole::Outsider,
            QueueRole::GlobalAdmin => CallerRole::GlobalAdmin,
        };
        let caller = match role {
            QueueRole::Anonymous => users.with_role(of_role).await,
            QueueRole::WithoutRight | QueueRole::User | QueueRole::GlobalAdmin => {
                queue_user(&users, of_role).await
            }
        };
        let other = queue_user(&users, CallerRole::Outsider).await;
        let creator = if object == Ownership::Own { &caller } else { &other };
        let made = queue.submit(token(creator), json!({})).await;
        let (request, container) = (text_field(&made, "uuid"), text_field(&made, "container_uuid"));
        if operation.path.ends_with("unlock") {
            let holder = if role == QueueRole::GlobalAdmin { token(&caller) } else { ADMIN_TOKEN };
            queue.ok(holder, "POST", &format!("containers/{container}/lock"), Value::Null).await;
        }
        if role == QueueRole::WithoutRight {
            let revoke = json!({ "username": caller.name, "global_role": "user", "can_use_queue": false });
            server.admin("/api/users/update", revoke).await;
        }
        let path = operation.path.replace("{request}", &request).replace("{container}", &container);
        let body = match (operation.method, operation.path) {
            ("POST", "container_requests") => json!({ "container_request": { "name": "draft" } }),
            ("PUT", _) => json!({ "container_request": { "priority": 1 } }),
            _ => Value::Null,
        };
        let (status, answer) = queue.call(token(&caller), operation.method, &path, body).await;
        let is_list = operation.method == "GET" && !operation.path.contains('{');
        // A list admits everybody with a token, and shows the objects that they may see.
        let is_allowed = match is_list {
            true => answer.to_string().contains(&request) || answer.to_string().contains(&container),
            false => status == 200,
        };
        let is_admitted = operation.admits(role, object);
        assert_eq!(is_allowed, is_admitted, "{operation:?} by {role:?}, {object:?}: {status} {answer}");
        let refused: &[u16] = match (role, is_list) {
            (QueueRole::Anonymous, _) => &[401],
            (_, true) => &[200],
            (_, false) => &[403, 404],
        };
        assert!(is_admitted || refused.contains(&status), "{operation:?} by {role:?}: {status} {answer}");
    };
    for operation in &QUEUE_OPERATIONS {
        for role in QueueRole::ALL {
            for object in [Ownership::Own, Ownership::Foreign] {
                // An anonymous caller has nothing, and a request is always the caller's own.
                let has_own = role != QueueRole::Anonymous;
                let is_creation = (operation.method, operation.path) == ("POST", "container_requests");
                let exists = if object == Ownership::Own { has_own } else { !is_creation };
                if exists {
                    cell(operation, role, object).await;
                }
            }
        }
    }
}

/// Creates an object of this user, and returns the request that ends it.
async fn create_object(server: &TestServer, operation: &str, creator: &TestUser) -> (String, Value) {
    let by = token(creator);
    let id = async |path: &str, body: Value| server.ok(by, path, body).await["id"].clone();
    let (path, body) = match operation {
        "delete_public_keys" => {
            let own = server.ok(by, "/api/users/get_my_user", json!({})).await;
            let key = id("/api/users/public_keys/add", json!({ "key": own["ssh_public_key"] })).await;
            ("users/public_keys/delete", json!({ "ids": [key] }))
        }
        "revoke_tokens" => {
            let name = json!({ "name": "theirs", "scope": "read" });
            server.ok(by, "/api/users/tokens/create", name).await;
            ("users/tokens/revoke", json!({ "names": ["theirs"] }))
        }
        "set_view" | "delete_view" => {
            let view = json!({ "name": "mine", "page": "runs", "query": "q=1", "project": "main" });
            let view = id("/api/views/set", view).await;
            match operation {
                "delete_view" => ("views/delete", json!({ "id": view })),
                _ => {
                    let changed =
                        json!({ "name": "mine", "page": "runs", "query": "q=2", "project": "main" });
                    ("views/set", changed)
                }
            }
        }
        "revoke_sessions" => {
            crate::http_sessions::TestBrowser::new(server).log_in(json!({ "token": by })).await;
            let sessions = server.ok(by, "/api/session/list", json!({})).await;
            ("session/revoke", json!({ "ids": [sessions["sessions"][0]["id"]] }))
        }
        other => panic!("there is no object for `{other}` yet: add one"),
    };
    (format!("/api/{path}"), body)
}

/// What its owner sees of the object.
async fn shown_object(server: &TestServer, operation: &str, creator: &TestUser) -> String {
    let path = match operation {
        "delete_public_keys" => "users/public_keys/list",
        "revoke_tokens" => "users/tokens/list",
        "set_view" | "delete_view" => "views/list",
        "revoke_sessions" => "session/list",
        other => panic!("no list for `{other}`"),
    };
    let list = server.ok(token(creator), &format!("/api/{path}"), json!({})).await;
    let all = list.as_array().or(list["views"].as_array()).or(list["sessions"].as_array()).unwrap().clone();
    // Times of last use change, and views of others are shown to members of their project.
    let own = all.iter().filter(|one| one.get("user").is_none_or(|user| *user == creator.name.as_str()));
    let parts = own.map(|one| format!("{} {} {}", one["id"], one["name"], one["query"]));
    parts.collect::<Vec<_>>().join("\n")
}

/// Operations with access `token` that change objects of one user.
async fn objects_of_a_caller_are_changed_only_by_those_whom_the_table_admits(ground: &ServerFixture) {
    let server = &ground.start().await;
    let users = TestUsers::new(server);
    let changing = operations::table().into_iter().filter(|entry| {
        let is_read = ["list_", "read_", "close_"].iter().any(|verb| entry.id.starts_with(verb));
        TokenRights::of(entry.id) == Some(TokenRights::Caller) && !is_read
    });
    let changing: Vec<Entry> = changing.collect();
    assert_eq!(changing.len(), 5);
    for entry in &changing {
        for role in WITH_TOKEN {
            for object in [Ownership::Own, Ownership::Foreign] {
                // The views are those of a project.
                if entry.id.ends_with("_view") && object == Ownership::Own && role == CallerRole::Outsider {
                    continue;
                }
                let caller = users.with_role(role).await;
                let other = users.with_role(CallerRole::User).await;
                let creator = if object == Ownership::Own { &caller } else { &other };
                let (path, body) = create_object(server, entry.id, creator).await;
                let before = shown_object(server, entry.id, creator).await;
                assert!(!before.is_empty());
                let (status, answer) = server.post(token(&caller), &path, &body.to_string()).await;
                let cell = format!("{} by {role:?}, {object:?}: {status} {answer}", entry.id);
                let is_changed = shown_object(server, entry.id, creator).await != before;
                assert_eq!(is_changed, rights::admits(entry, role, object), "{cell}");
            }
        }
    }
    let delete = operations::table().into_iter().find(|entry| entry.id == "delete_projects").unwrap();
    for role in WITH_TOKEN {
        let (caller, owner) = (users.with_role(role).await, users.with_role(CallerRole::Outsider).await);
        let project = format!("of-{}", owner.name);
        server.ok(token(&owner), "/api/projects/create", json!({ "project_name": project })).await;
        let word = match role {
            CallerRole::User => Some("user"),
            CallerRole::Manager => Some("manager"),
            CallerRole::ProjectAdmin => Some("admin"),
            CallerRole::Anonymous | CallerRole::Outsider | CallerRole::GlobalAdmin => None,
        };
        if let Some(word) = word {
            server.join(&project, &[(&caller.name, word)]).await;
        }
        let body = json!({ "projects_names": [project] }).to_string();
        let status = server.post(token(&caller), "/api/projects/delete", &body).await.0;
        let is_admitted = rights::admits(&delete, role, Ownership::Foreign);
        assert_eq!(status, if is_admitted { 200 } else { 403 }, "delete_projects by {role:?}");
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

/// Operations with access `token` that only read, and end.
fn reading_operations() -> Vec<Entry> {
    const READS: [&str; 3] = ["list_", "read_", "search_"];
    let all = operations::table().into_iter().filter(|entry| {
        matches!(TokenRights::of(entry.id), Some(TokenRights::Members | TokenRights::CallerOrGlobalAdmin))
    });
    all.filter(|entry| READS.iter().any(|verb| entry.id.starts_with(verb))).collect()
}

/// A project with rows of every kind, whose names contain the canary.
async fn create_project_rows(server: &TestServer, creator: &TestUser) {
    create_rows(server, creator).await;
    let by = token(creator);
    let task = json!({ "run_name": CANARY, "configuration": { "type": "task", "commands": ["true"] } });
    let plan = json!({ "plan": { "run_spec": task } });
    let run = server.ok(by, "/api/project/main/runs/apply", plan).await;
    let fleet = json!({ "configuration": { "type": "fleet", "name": CANARY, "nodes": { "min": 0, "max": 1 } },
        "profile": { "name": "default" } });
    let fleet = server.ok(by, "/api/project/main/fleets/apply", json!({ "plan": { "spec": fleet } })).await;
    add_instance(server, CANARY, &fleet["id"], "idle").await;
    let queue = QueueClient { server };
    queue.submit(by, json!({ "name": CANARY })).await;
    // Users without the right to use the queue see no dispatchers.
    let announced = json!({ "dispatcher": { "kind": "slurm", "nodes": [] } });
    queue.ok(&queue.dispatcher().await, "PUT", &format!("dispatchers/{CANARY}"), announced).await;
    let view = json!({ "name": CANARY, "page": "runs", "query": "", "project": "main" });
    server.ok(by, "/api/views/set", view).await;
    let day = server.app.db().now().await.unwrap().0.div_euclid(86_400_000_000);
    let usage = Unit::new().expect_one(
        "INSERT INTO usage_days (day, project_id, user_id, class, jobs, gpu_ms, cpu_ms, cost, weighted) \
         SELECT $1, p.id, u.id, 'normal', 1, 0, 3600000, 1000000, 0 FROM projects p, users u \
         WHERE p.name = 'main' AND u.name = $2",
        params![day, creator.name.as_str()],
    );
    server.app.db().write(usage).await.unwrap().done().unwrap();
    // A run that failed today, which a summary names.
    let fail = Unit::new().expect_one(
        "UPDATE runs SET status = 'failed', finished = TRUE, finished_at = now_us() WHERE id = $1",
        params![run["id"].as_str().unwrap()],
    );
    server.app.db().write(fail).await.unwrap().done().unwrap();
    // A second one waits.
    let waiting = json!({ "run_name": format!("{CANARY}-2"),
        "configuration": { "type": "task", "commands": ["true"] } });
    let plan = json!({ "plan": { "run_spec": waiting } });
    server.ok(by, "/api/project/main/runs/apply", plan).await;
}

async fn operations_across_projects_show_no_rows_of_other_projects(ground: &ServerFixture) {
    let given = SettingsSource { no_local: Some(false), ..ground.given() };
    let server = &TestServer::start_with(given).await;
    let users = TestUsers::new(server);
    let creator = queue_user(&users, CallerRole::User).await;
    create_project_rows(server, &creator).await;
    let outsider = users.with_role(CallerRole::Outsider).await;
    let mut shown = BTreeSet::new();
    for entry in reading_operations() {
        let method = if entry.method == Method::Get { "GET" } else { "POST" };
        let body = json!({ "text": "canary", "limit": 50 });
        let body = match entry.id {
            "list_events" => json!({ "limit": 100 }),
            "list_usage" => json!({ "by": ["user"] }),
            "list_projects_without_fleets" | "list_users" => json!({}),
            _ => body,
        };
        for who in [&outsider, &creator] {
            let request = Request::builder()
                .method(method)
                .uri(entry.path)
                .header("host", &server.authority)
                .header("authorization", format!("Bearer {}", token(who)))
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(if method == "GET" { String::new() } else { body.to_string() })))
                .unwrap();
            let (status, answer) = server.send(request).await;
            let answer = String::from_utf8_lossy(&answer).into_owned();
            assert_eq!(status, 200, "{}: {answer}", entry.id);
            // Names of projects and users are what some lists consist of.
            let is_shown = [CANARY, "\"main\"", &creator.name].iter().any(|word| answer.contains(word));
            assert!(!is_shown || who.name == creator.name, "{}: {status} {answer}", entry.id);
            if is_shown {
                shown.insert(entry.id);
            }
        }
    }
    // The member sees what the other user does not: the requests are good ones. The project has a fleet.
    let wanted: BTreeSet<&str> = reading_operations()
        .iter()
        .map(|entry| entry.id)
        .filter(|id| *id != "list_projects_without_fleets")
        .collect();
    assert_eq!(shown, wanted, "operations that show rows to the member");
    let counts = async |who: &TestUser| {
        let summary = server.ok(token(who), "/api/summary", json!({})).await;
        ["runs", "managed_jobs", "instances", "containers", "fleets", "volumes"]
            .map(|kind| summary[kind].as_object().unwrap().values().filter_map(Value::as_i64).sum::<i64>())
    };
    assert_eq!(counts(&outsider).await, [0; 6]);
    assert!(counts(&creator).await.iter().all(|count| *count > 0));
}
