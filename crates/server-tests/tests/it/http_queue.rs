//! The container queue over HTTP: requests, containers, locks, tokens, lists and the log.

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Value, json};
use windlass_model::time::Span;
use windlass_server::logs::retention;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    a_container_is_locked_run_and_completed_and_its_tokens_end_with_it
    an_admin_locks_runs_and_completes_a_container_with_their_own_token
    one_of_many_concurrent_locks_succeeds_and_the_others_get_422
    r13_container_priority_follows_its_requests_and_every_change_is_logged
    r14_ten_failed_locks_end_a_container_and_its_request_gets_another
    identical_requests_share_a_container_within_one_user_only
    lists_are_filtered_ordered_and_counted
    attributes_that_describe_a_request_are_stored_and_shown
    a_repeated_request_id_is_executed_once
    container_output_is_stored_byte_for_byte
}

pub(crate) struct QueueClient<'a> {
    pub(crate) server: &'a TestServer,
}

impl QueueClient<'_> {
    pub(crate) async fn call(&self, token: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(format!("/arvados/v1/{path}"))
            .header("host", &self.server.authority)
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let (status, body) = self.server.send(request).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    #[track_caller]
    pub(crate) fn ok<'a>(
        &'a self,
        token: &'a str,
        method: &'a str,
        path: &'a str,
        body: Value,
    ) -> impl Future<Output = Value> + 'a {
        let from = std::panic::Location::caller();
        async move {
            let (status, answer) = self.call(token, method, path, body).await;
            assert_eq!(status, 200, "{method} {path} at {from}: {answer}");
            answer
        }
    }

    pub(crate) async fn dispatcher(&self) -> String {
        let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
        let made = self.ok(ADMIN_TOKEN, "POST", "api_client_authorizations", body).await;
        format!("v2/{}/{}", made["uuid"].as_str().unwrap(), made["api_token"].as_str().unwrap())
    }

    pub(crate) async fn submit(&self, token: &str, more: Value) -> Value {
        let mut request = json!({
            "state": "Committed", "priority": 5, "container_image": "debian:12", "command": ["true"],
            "output_path": "/out", "mounts": { "/out": { "kind": "tmp" } },
            "runtime_constraints": { "vcpus": 1, "ram": 1024 }, "use_existing": false,
        });
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        self.ok(token, "POST", "container_requests", json!({ "container_request": request })).await
    }

    /// A request of the admin, and its container.
    pub(crate) async fn requested(&self, more: Value) -> (String, String) {
        let request = self.submit(ADMIN_TOKEN, more).await;
        (text_field(&request, "uuid"), text_field(&request, "container_uuid"))
    }

    pub(crate) async fn container(&self, uuid: &str) -> Value {
        self.ok(ADMIN_TOKEN, "GET", &format!("containers/{uuid}"), Value::Null).await
    }

    async fn logs(&self, uuid: &str) -> Vec<Value> {
        let path = format!("logs?filters=[[%22object_uuid%22,%22=%22,%22{uuid}%22]]&order=id%20asc");
        let page = self.ok(ADMIN_TOKEN, "GET", &path, Value::Null).await;
        page["items"].as_array().unwrap().clone()
    }
}

pub(crate) fn text_field(record: &Value, name: &str) -> String {
    record[name].as_str().unwrap_or_else(|| panic!("no {name} in {record}")).to_owned()
}

async fn a_container_is_locked_run_and_completed_and_its_tokens_end_with_it(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (request, uuid) =
        queue.requested(json!({ "secret_mounts": { "/k": { "kind": "text", "content": "c4nary" } } })).await;
    let dispatcher = queue.dispatcher().await;
    let locked = queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
    assert_eq!((locked["state"].as_str(), locked["attempt"].as_u64()), (Some("Locked"), Some(1)));
    assert!(!locked.to_string().contains("c4nary"), "{locked}");
    let executor = text_field(&locked, "executor_token");
    let path = format!("containers/{uuid}");

    let mine = queue.ok(&dispatcher, "GET", "containers/current", Value::Null).await;
    assert_eq!(mine["items"][0]["uuid"], uuid.as_str());
    let (status, _) = queue.call(ADMIN_TOKEN, "GET", "containers/current", Value::Null).await;
    assert_eq!(status, 404);
    let auth = queue.ok(&executor, "GET", &format!("{path}/auth"), Value::Null).await;
    let inside = format!("v2/{}/{}/{uuid}", text_field(&auth, "uuid"), text_field(&auth, "api_token"));
    let own = queue.ok(&inside, "GET", "containers/current", Value::Null).await;
    assert_eq!(own["uuid"], uuid.as_str());
    let secrets = queue.ok(&inside, "GET", &format!("{path}/secret_mounts"), Value::Null).await;
    assert_eq!(secrets["secret_mounts"]["/k"]["content"], "c4nary");
    let (status, _) = queue.call(&dispatcher, "GET", &format!("{path}/secret_mounts"), Value::Null).await;
    assert_eq!(status, 403);

    let run = json!({ "container": { "state": "Running", "attempt": 1 } });
    queue.ok(&executor, "PUT", &path, run.clone()).await;
    let (status, again) = queue.call(&executor, "PUT", &path, run).await;
    assert_eq!(status, 422, "{again}");
    queue.ok(&inside, "PUT", &path, json!({ "container": { "progress": 0.5 } })).await;
    let done = json!({ "container": { "state": "Complete", "exit_code": 3, "attempt": 1 } });
    let done = queue.ok(&executor, "PUT", &path, done).await;
    assert_eq!((done["exit_code"].as_i64(), done["auth_uuid"].as_str()), (Some(3), None));

    for dead in [&executor, &inside] {
        let (status, _) = queue.call(dead, "GET", &path, Value::Null).await;
        assert_eq!(status, 401, "x1: a token outlived its attempt");
    }
    let request = queue.ok(ADMIN_TOKEN, "GET", &format!("container_requests/{request}"), Value::Null).await;
    assert_eq!(request["state"], "Final");
    let states: Vec<String> = queue
        .logs(&uuid)
        .await
        .iter()
        .filter_map(|row| row["properties"]["new_attributes"]["state"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(states, ["Queued", "Locked", "Running", "Running", "Complete"]);
}

async fn an_admin_locks_runs_and_completes_a_container_with_their_own_token(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (_, uuid) = queue.requested(json!({})).await;
    let path = format!("containers/{uuid}");
    let own = queue.ok(ADMIN_TOKEN, "GET", "api_client_authorizations/current", Value::Null).await;
    let locked = queue.ok(ADMIN_TOKEN, "POST", &format!("{path}/lock"), Value::Null).await;
    assert_eq!((&locked["state"], &locked["locked_by_uuid"]), (&json!("Locked"), &own["uuid"]));
    let held = queue.ok(ADMIN_TOKEN, "GET", "containers/current?scope=dispatch", Value::Null).await;
    assert_eq!(held["items"][0]["uuid"], uuid.as_str());
    let auth = queue.ok(ADMIN_TOKEN, "GET", &format!("{path}/auth"), Value::Null).await;
    assert_eq!(auth["uuid"], locked["auth_uuid"]);
    // A lock of another user is not released.
    let dispatcher = queue.dispatcher().await;
    let (status, _) = queue.call(&dispatcher, "POST", &format!("{path}/unlock"), Value::Null).await;
    assert_eq!(status, 403);
    queue.ok(ADMIN_TOKEN, "POST", &format!("{path}/unlock?release=true"), Value::Null).await;
    queue.ok(&dispatcher, "POST", &format!("{path}/lock"), Value::Null).await;
    let (status, _) = queue.call(ADMIN_TOKEN, "POST", &format!("{path}/unlock"), Value::Null).await;
    assert_eq!(status, 403);
    queue.ok(&dispatcher, "POST", &format!("{path}/unlock?release=true"), Value::Null).await;

    queue.ok(ADMIN_TOKEN, "POST", &format!("{path}/lock"), Value::Null).await;
    for patch in [json!({ "state": "Running" }), json!({ "state": "Complete", "exit_code": 0 })] {
        queue.ok(ADMIN_TOKEN, "PUT", &path, json!({ "container": patch })).await;
    }
    assert_eq!(queue.container(&uuid).await["state"], "Complete");
}

async fn one_of_many_concurrent_locks_succeeds_and_the_others_get_422(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (_, uuid) = queue.requested(json!({})).await;
    let (one, two) = (queue.dispatcher().await, queue.dispatcher().await);
    let path = format!("containers/{uuid}/lock");
    let tries =
        (0..16).map(|at| queue.call(if at % 2 == 0 { &one } else { &two }, "POST", &path, Value::Null));
    let answers = futures_util::future::join_all(tries).await;
    let mut statuses: Vec<u16> = answers.iter().map(|(status, _)| *status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [&[200][..], &[422; 15][..]].concat(), "{answers:?}");
    let container = queue.container(&uuid).await;
    assert_eq!((container["lock_count"].as_u64(), container["attempt"].as_u64()), (Some(1), Some(1)));
}

async fn r13_container_priority_follows_its_requests_and_every_change_is_logged(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (request, uuid) = queue.requested(json!({})).await;
    let dispatcher = queue.dispatcher().await;
    let put = |priority: u64| json!({ "container_request": { "priority": priority } });
    let path = format!("container_requests/{request}");
    queue.ok(ADMIN_TOKEN, "PUT", &path, put(0)).await;
    assert_eq!(queue.container(&uuid).await["priority"], 0);
    let (status, why) =
        queue.call(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
    assert_eq!(status, 422, "{why}");
    queue.ok(ADMIN_TOKEN, "PUT", &path, put(700)).await;
    // A container requests another one, which inherits its priority.
    let locked = queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
    let auth = queue.ok(&dispatcher, "GET", &format!("containers/{uuid}/auth"), Value::Null).await;
    let inside = format!("v2/{}/{}", text_field(&auth, "uuid"), text_field(&auth, "api_token"));
    let child = queue.submit(&inside, json!({ "priority": 1 })).await;
    let child = text_field(&child, "container_uuid");
    assert_eq!(queue.container(&child).await["priority"], 700);
    queue.ok(ADMIN_TOKEN, "PUT", &path, put(3)).await;
    let priorities: Vec<u64> = queue
        .logs(&child)
        .await
        .iter()
        .filter_map(|row| row["properties"]["new_attributes"]["priority"].as_u64())
        .collect();
    assert_eq!(priorities, [700, 3], "a cascaded change has a row of its own");
    // The end of a container ends the containers that it requested.
    let executor = text_field(&locked, "executor_token");
    let cancel = json!({ "container": { "state": "Cancelled" } });
    queue.ok(ADMIN_TOKEN, "PUT", &path, put(0)).await;
    queue.ok(&executor, "PUT", &format!("containers/{uuid}"), cancel).await;
    assert_eq!(queue.container(&child).await["state"], "Cancelled");
}

async fn r14_ten_failed_locks_end_a_container_and_its_request_gets_another(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (request, uuid) = queue.requested(json!({ "container_count_max": 2 })).await;
    let dispatcher = queue.dispatcher().await;
    let lock = format!("containers/{uuid}/lock");
    // A released lock without a failure does not count.
    queue.ok(&dispatcher, "POST", &lock, Value::Null).await;
    queue
        .ok(&dispatcher, "POST", &format!("containers/{uuid}/unlock?attempt=1&release=true"), Value::Null)
        .await;
    for round in 1..=10 {
        queue.ok(&dispatcher, "POST", &lock, Value::Null).await;
        let free = queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/unlock"), Value::Null).await;
        assert_eq!(free["state"], if round == 10 { "Cancelled" } else { "Queued" });
    }
    let ended = queue.container(&uuid).await;
    assert_eq!(
        (ended["attempt"].as_u64(), &ended["runtime_status"]["reason"]),
        (Some(11), &json!("attempts"))
    );
    let request = queue.ok(ADMIN_TOKEN, "GET", &format!("container_requests/{request}"), Value::Null).await;
    assert_eq!(
        (request["state"].as_str(), request["container_count"].as_u64()),
        (Some("Committed"), Some(2))
    );
    assert_ne!(text_field(&request, "container_uuid"), uuid);
    let (status, _) =
        queue.call(&dispatcher, "POST", &format!("containers/{uuid}/unlock"), Value::Null).await;
    assert_eq!(status, 422);
}

async fn identical_requests_share_a_container_within_one_user_only(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let ann = server.create_queue_user("ann").await;
    let same = json!({ "use_existing": true, "command": ["reuse", "me"] });
    let first = text_field(&queue.submit(ADMIN_TOKEN, same.clone()).await, "container_uuid");
    assert_eq!(text_field(&queue.submit(ADMIN_TOKEN, same.clone()).await, "container_uuid"), first);
    assert_ne!(text_field(&queue.submit(&ann, same.clone()).await, "container_uuid"), first);
    let dispatcher = queue.dispatcher().await;
    queue.ok(&dispatcher, "POST", &format!("containers/{first}/lock"), Value::Null).await;
    for patch in
        [json!({ "state": "Running" }), json!({ "state": "Complete", "exit_code": 0, "output": "o1" })]
    {
        queue.ok(&dispatcher, "PUT", &format!("containers/{first}"), json!({ "container": patch })).await;
    }
    let later = queue.submit(ADMIN_TOKEN, same).await;
    assert_eq!(
        (text_field(&later, "container_uuid"), later["state"].as_str()),
        (first.clone(), Some("Final"))
    );
    assert_eq!(later["output_uuid"], "o1");
    // Ann sees neither the container nor its log entries.
    let (status, _) = queue.call(&ann, "GET", &format!("containers/{first}"), Value::Null).await;
    assert_eq!(status, 404);
    let (status, _) = queue.call(&ann, "POST", &format!("containers/{first}/lock"), Value::Null).await;
    assert_eq!(status, 403);
    let seen = queue.ok(&ann, "GET", "logs?limit=1000", Value::Null).await;
    assert!(!seen.to_string().contains(&first));
}

async fn attributes_that_describe_a_request_are_stored_and_shown(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let described = json!({ "name": "align", "description": "aligns reads", "output_name": "aligned",
        "output_ttl": 3600, "properties": { "lab": "a" } });
    let request = queue.submit(ADMIN_TOKEN, described.clone()).await;
    let path = format!("container_requests/{}", text_field(&request, "uuid"));
    let shown = queue.ok(ADMIN_TOKEN, "GET", &path, Value::Null).await;
    for (name, value) in described.as_object().unwrap() {
        assert_eq!(&shown[name], value, "{name}");
    }
    let change = json!({ "container_request": { "description": "aligned all reads" } });
    let changed = queue.ok(ADMIN_TOKEN, "PUT", &path, change).await;
    assert_eq!(changed["description"], "aligned all reads");
}

async fn lists_are_filtered_ordered_and_counted(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    for (at, name) in ["a", "b", "c"].iter().enumerate() {
        let more =
            json!({ "name": format!("list-{name}"), "priority": at + 1, "properties": { "kind": name } });
        queue.submit(ADMIN_TOKEN, more).await;
    }
    let names = |filters: Value, order: &'static str| {
        let filters: String = filters.to_string().bytes().map(|byte| format!("%{byte:02X}")).collect();
        let queue = &queue;
        async move {
            let path = format!("container_requests?filters={filters}&order={order}");
            let page = queue.ok(ADMIN_TOKEN, "GET", &path, Value::Null).await;
            let items = page["items"].as_array().unwrap();
            assert_eq!(page["items_available"].as_u64(), Some(items.len() as u64));
            items.iter().map(|item| text_field(item, "name").replace("list-", "")).collect::<String>()
        }
    };
    let ours = json!(["name", "like", "list-%"]);
    for (filter, order, want) in [
        (json!(["priority", ">", 1]), "priority%20desc", "cb"),
        (json!(["priority", "in", [1, "3"]]), "priority", "ac"),
        (json!(["name", "!=", "list-b"]), "name", "ac"),
        (json!(["container.state", "=", "Queued"]), "name%20desc", "cba"),
        (json!(["properties.kind", "=", "b"]), "name", "b"),
        (json!(["properties", "exists", "kind"]), "name", "abc"),
        (json!(["properties", "contains", { "kind": "c" }]), "name", "c"),
        (json!(["uuid", "is_a", "arvados#container"]), "name", ""),
        (json!(["requesting_container_uuid", "=", null]), "created_at", "abc"),
        (json!(["container_count", "=", 1]), "name", "abc"),
    ] {
        assert_eq!(names(json!([ours, filter]), order).await, want, "{filter}");
    }
    for bad in ["filters=[[%22colour%22,%22=%22,1]]", "filters=7", "order=colour", "limit=x"] {
        let (status, why) = queue.call(ADMIN_TOKEN, "GET", &format!("containers?{bad}"), Value::Null).await;
        assert_eq!(status, 422, "{bad}: {why}");
        assert!(why["errors"][0].is_string(), "{why}");
    }
    // A time from a response finds its row again.
    let page = queue.ok(ADMIN_TOKEN, "GET", "containers?limit=1", Value::Null).await;
    let at = text_field(&page["items"][0], "created_at");
    let path =
        format!("containers?filters=[[%22created_at%22,%22=%22,%22{at}%22]]&select=[%22uuid%22]&count=none");
    let found = queue.ok(ADMIN_TOKEN, "GET", &path, Value::Null).await;
    assert!(found["items"].to_string().contains(&text_field(&page["items"][0], "uuid")), "{found}");
    assert!(found.get("items_available").is_none() && found["items"][0].get("state").is_none());
}

async fn a_repeated_request_id_is_executed_once(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let dispatcher = queue.dispatcher().await;
    let send = |token: String, path: String, body: Value, id: &'static str| async move {
        let request = Request::post(format!("/arvados/v1/{path}"))
            .header("host", &server.authority)
            .header("content-type", "application/json")
            .header("x-request-id", id)
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let (status, body) = server.send(request).await;
        (status, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let body = json!({ "container_request": { "name": "once" } });
    let path = "container_requests".to_owned();
    let (_, first) = send(ADMIN_TOKEN.into(), path.clone(), body.clone(), "req-same").await;
    let (_, second) = send(ADMIN_TOKEN.into(), path.clone(), body.clone(), "req-same").await;
    assert_eq!(first["uuid"], second["uuid"]);
    let (_, third) = send(ADMIN_TOKEN.into(), path, body, "req-other").await;
    assert_ne!(first["uuid"], third["uuid"]);

    let (_, uuid) = queue.requested(json!({})).await;
    let lock = format!("containers/{uuid}/lock");
    let (status, taken) = send(dispatcher.clone(), lock.clone(), Value::Null, "req-lock").await;
    assert_eq!(status, 200);
    let (status, again) = send(dispatcher.clone(), lock.clone(), Value::Null, "req-lock").await;
    assert_eq!((status, &again["executor_token"]), (200, &taken["executor_token"]));
    let (status, _) = send(dispatcher, lock, Value::Null, "req-next").await;
    assert_eq!(status, 422);
}

async fn container_output_is_stored_byte_for_byte(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let (_, uuid) = queue.requested(json!({})).await;
    let dispatcher = queue.dispatcher().await;
    let locked = queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
    let executor = text_field(&locked, "executor_token");
    let send = |at: usize, bytes: &'static [u8]| {
        let (uuid, executor) = (uuid.clone(), executor.clone());
        async move {
            let request =
                Request::post(format!("/arvados/v1/containers/{uuid}/output?stream=stderr&offset={at}"))
                    .header("host", &server.authority)
                    .header("content-type", "application/octet-stream")
                    .header("authorization", format!("Bearer {executor}"))
                    .body(Full::new(Bytes::from_static(bytes)))
                    .unwrap();
            server.send(request).await.0
        }
    };
    assert_eq!(send(0, b"\xff\x00ab").await, 200);
    assert_eq!(send(0, b"\xff\x00ab").await, 200, "a repeat");
    assert_eq!(send(9, b"x").await, 422, "a hole");
    assert_eq!(send(2, b"abcd\n").await, 200, "an overlap");
    let path = format!("/arvados/v1/containers/{uuid}/output?stream=stderr&offset=1");
    let (status, bytes) = server.get(ADMIN_TOKEN, &path).await;
    assert_eq!((status, bytes.as_slice()), (200, &b"\x00abcd\n"[..]));
    // Output is deleted after its retention period once the container has ended; the record stays.
    let forget = || retention::delete_container_logs(server.app.db(), Span::secs(-60));
    forget().await.unwrap();
    let (_, bytes) = server.get(ADMIN_TOKEN, &path).await;
    assert_eq!(bytes.len(), 6, "it is not over");
    assert_eq!(queue.logs(&uuid).await.len(), 0, "rows of the log go by their age");
    queue
        .ok(&executor, "PUT", &format!("containers/{uuid}"), json!({ "container": { "state": "Cancelled" } }))
        .await;
    forget().await.unwrap();
    let (status, bytes) = server.get(ADMIN_TOKEN, &path).await;
    assert_eq!((status, bytes.as_slice()), (200, &b""[..]));
    assert_eq!(queue.container(&uuid).await["state"], "Cancelled");
}
