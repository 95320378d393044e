//! Rights, expiry and rate limits of the queue's API.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use windlass_model::time::{Span, Timestamp};
use windlass_server::{
    config::{Settings, SettingsSource},
    db::{Unit, Val},
    rate_limit::{Rate, RateLimits},
};

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_queue::{QueueClient, text_field},
};

on_both! {
    a_queue_token_ends_with_the_users_token_or_at_its_expiry
    migrated_queue_tokens_are_bound_to_their_user
    the_queue_requires_a_granted_permission
    a_container_token_cannot_manage_tokens_and_sees_only_its_own_work
}

async fn create_token(queue: &QueueClient<'_>, token: &str, request: Value) -> (u16, Value) {
    queue
        .call(token, "POST", "api_client_authorizations", json!({ "api_client_authorization": request }))
        .await
}

fn full_token(record: &Value) -> String {
    format!("v2/{}/{}", text_field(record, "uuid"), text_field(record, "api_token"))
}

fn time_field(record: &Value, name: &str) -> Timestamp {
    Timestamp::parse(&text_field(record, name)).unwrap()
}

async fn a_queue_token_ends_with_the_users_token_or_at_its_expiry(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let ann = server.create_queue_user("ann").await;
    let (status, made) = create_token(&queue, &ann, json!({})).await;
    assert_eq!(status, 200, "{made}");
    assert_eq!(
        time_field(&made, "expires_at").since(time_field(&made, "created_at")),
        Span::days(14),
        "{made}"
    );
    let first = full_token(&made);
    // A token that was created with it expires no later.
    let far = json!({ "expires_at": "2999-01-01T00:00:00Z" });
    let (status, second) = create_token(&queue, &first, far.clone()).await;
    assert_eq!((status, &second["expires_at"]), (200, &made["expires_at"]), "{second}");
    let (_, long) = create_token(&queue, &ann, far).await;
    assert!(text_field(&long, "expires_at").starts_with("2999-01-01"), "{long}");
    // A token that permits nothing, or that has already expired, is not created.
    for request in [
        json!({ "scopes": [] }),
        json!({ "scopes": ["GET /"] }),
        json!({ "expires_at": "2001-01-01T00:00:00Z" }),
        json!({ "expires_at": "soon" }),
    ] {
        let (status, why) = create_token(&queue, &ann, request.clone()).await;
        assert_eq!(status, 422, "{request}: {why}");
    }
    let second = full_token(&second);
    for good in [&first, &second] {
        queue.ok(good, "GET", "users/current", Value::Null).await;
    }
    // A token expires by itself.
    let past = "UPDATE queue_tokens SET expires_at = now_us() - 1 WHERE uuid = $1";
    let over = full_token(&long);
    queue.ok(&over, "GET", "users/current", Value::Null).await;
    let unit = Unit::new().exec(past, vec![Val::from(text_field(&long, "uuid").as_str())]);
    server.app.db().write(unit).await.unwrap();
    assert_eq!(queue.call(&over, "GET", "users/current", Value::Null).await.0, 401);
    // Tokens end with the user's own token, including those created with another token of the queue.
    server.ok(&ann, "/api/users/refresh_token", json!({ "username": "ann" })).await;
    for dead in [&ann, &first, &second] {
        assert_eq!(
            queue.call(dead, "GET", "users/current", Value::Null).await.0,
            401,
            "it outlived the user's"
        );
    }
    // A dispatcher is a service: its token expires only with that of its creator.
    let (_, dispatcher) = create_token(&queue, ADMIN_TOKEN, json!({ "scopes": ["dispatch"] })).await;
    assert_eq!(dispatcher["expires_at"], Value::Null, "{dispatcher}");
}

/// The statements of the migration, on rows from before it.
async fn migrated_queue_tokens_are_bound_to_their_user(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let ann = server.create_queue_user("ann").await;
    let (_, made) = create_token(&queue, &ann, json!({})).await;
    let dispatcher = queue.dispatcher().await;
    let db = server.app.db();
    let before = "UPDATE queue_tokens SET made_with = NULL, expires_at = NULL";
    db.write(Unit::new().exec(before, vec![])).await.unwrap();
    assert_eq!(queue.call(&full_token(&made), "GET", "users/current", Value::Null).await.0, 401);
    let migration = include_str!("../../../db/migrations/0019_queue_rights.sql");
    let statements =
        migration.split(';').filter_map(|text| text.find("UPDATE queue_tokens").map(|at| &text[at..]));
    let statements: Vec<&'static str> = statements.collect();
    assert_eq!(statements.len(), 2);
    for statement in statements {
        db.write(Unit::new().exec(statement, vec![])).await.unwrap();
    }
    let own = queue.ok(&full_token(&made), "GET", "api_client_authorizations/current", Value::Null).await;
    assert!(time_field(&own, "expires_at") > time_field(&made, "created_at"), "{own}");
    let own = queue.ok(&dispatcher, "GET", "api_client_authorizations/current", Value::Null).await;
    assert_eq!(own["expires_at"], Value::Null);
    server.ok(&ann, "/api/users/refresh_token", json!({ "username": "ann" })).await;
    assert_eq!(queue.call(&full_token(&made), "GET", "users/current", Value::Null).await.0, 401);
}

fn container_request() -> Value {
    json!({ "container_request": {
        "state": "Committed", "priority": 1, "container_image": "debian:12", "command": ["true"], "output_path": "/out",
        "mounts": { "/out": { "kind": "tmp" } }, "runtime_constraints": { "vcpus": 1, "ram": 1024 },
    } })
}

async fn the_queue_requires_a_granted_permission(ground: &ServerFixture) {
    let server = ground.start().await;
    let queue = QueueClient { server: &server };
    let ann = server.user("ann").await;
    let own = server.ok(&ann, "/api/users/get_my_user", json!({})).await;
    assert_eq!(own["permissions"]["can_use_queue"], false, "a new user has no such right");
    let submit = || queue.call(&ann, "POST", "container_requests", container_request());
    let (status, why) = submit().await;
    assert_eq!(status, 403, "{why}");
    assert!(why.to_string().contains("windlass user grant"), "{why}");
    let draft = json!({ "container_request": { "name": "later" } });
    assert_eq!(queue.call(&ann, "POST", "container_requests", draft.clone()).await.0, 403);
    assert_eq!(create_token(&queue, &ann, json!({})).await.0, 403);
    // Every user may read, and sees only their own requests.
    queue.ok(&ann, "GET", "container_requests", Value::Null).await;

    let grant = |can: bool| json!({ "username": "ann", "global_role": "user", "can_use_queue": can });
    server.admin("/api/users/update", grant(true)).await;
    let (status, made) = submit().await;
    assert_eq!(status, 200, "{made}");
    let draft = queue.ok(&ann, "POST", "container_requests", draft).await;
    // An update without the field does not change it.
    server.admin("/api/users/update", json!({ "username": "ann", "global_role": "user" })).await;
    assert_eq!(submit().await.0, 200);

    server.admin("/api/users/update", grant(false)).await;
    assert_eq!(submit().await.0, 403);
    let mut commit = container_request();
    commit["container_request"]["name"] = "now".into();
    let path = format!("container_requests/{}", text_field(&draft, "uuid"));
    assert_eq!(queue.call(&ann, "PUT", &path, commit).await.0, 403, "committed without the right");
    // Users can still cancel their requests.
    let path = format!("container_requests/{}", text_field(&made, "uuid"));
    queue.ok(&ann, "PUT", &path, json!({ "container_request": { "priority": 0 } })).await;
    // Users cannot grant it to themselves.
    assert_eq!(server.post(&ann, "/api/users/update", &grant(true).to_string()).await.0, 403);
    server.stop().await;

    let given = SettingsSource { queue_for_everyone: Some(true), ..ground.given() };
    let server = TestServer::start_with(given).await;
    let queue = QueueClient { server: &server };
    let (status, made) = queue.call(&ann, "POST", "container_requests", container_request()).await;
    assert_eq!(status, 200, "{made}");
    server.stop().await;
}

async fn a_container_token_cannot_manage_tokens_and_sees_only_its_own_work(ground: &ServerFixture) {
    let server = &ground.start().await;
    let queue = QueueClient { server };
    let ann = server.create_queue_user("ann").await;
    let (_, kept) = create_token(&queue, &ann, json!({})).await;
    let other = queue.submit(&ann, json!({ "name": "other", "environment": { "KEY": "c4nary" } })).await;
    let foreign = queue.submit(ADMIN_TOKEN, json!({})).await;
    let mine = queue.submit(&ann, json!({ "name": "mine" })).await;
    let uuid = text_field(&mine, "container_uuid");
    let dispatcher = queue.dispatcher().await;
    let locked = queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
    let executor = text_field(&locked, "executor_token");
    let auth = queue.ok(&executor, "GET", &format!("containers/{uuid}/auth"), Value::Null).await;
    let inside = format!("{}/{uuid}", full_token(&auth));

    // They have no access to tokens: neither to list, nor to create, nor to delete.
    let keep = format!("api_client_authorizations/{}", text_field(&kept, "uuid"));
    for (who, token) in [("inside", &inside), ("executor", &executor), ("dispatcher", &dispatcher)] {
        let list = queue.call(token, "GET", "api_client_authorizations", Value::Null).await;
        assert_eq!(list.0, 403, "{who}: {}", list.1);
        assert_eq!(queue.call(token, "DELETE", &keep, Value::Null).await.0, 403, "{who}");
        assert_eq!(create_token(&queue, token, json!({})).await.0, 403, "{who}");
        assert_eq!(queue.call(token, "GET", &keep, Value::Null).await.0, 403, "{who}");
    }
    queue.ok(&full_token(&kept), "GET", "users/current", Value::Null).await;

    // They have access to their own work: the record, its user, and the requests that they make with their results.
    let own = queue.ok(&inside, "GET", "containers/current", Value::Null).await;
    assert_eq!(own["uuid"], uuid.as_str());
    queue.ok(&inside, "GET", "users/current", Value::Null).await;
    queue.ok(&inside, "GET", "api_client_authorizations/current", Value::Null).await;
    queue.ok(&inside, "GET", &format!("container_requests/{}", text_field(&mine, "uuid")), Value::Null).await;
    let child = queue.submit(&inside, json!({ "name": "child" })).await;
    assert_eq!(
        (&child["requesting_container_uuid"], &child["owner_uuid"]),
        (&json!(uuid), &mine["owner_uuid"])
    );
    let below = text_field(&child, "container_uuid");
    queue.ok(&inside, "GET", &format!("containers/{below}"), Value::Null).await;
    queue
        .ok(&inside, "GET", &format!("container_requests/{}", text_field(&child, "uuid")), Value::Null)
        .await;
    queue.ok(&inside, "GET", &format!("containers/{uuid}/secret_mounts"), Value::Null).await;
    let rows = queue.ok(&inside, "GET", "logs?limit=1000", Value::Null).await;
    assert!(rows.to_string().contains(&below) && rows.to_string().contains(&uuid), "{rows}");
    let put = json!({ "container_request": { "priority": 7 } });
    queue
        .ok(&inside, "PUT", &format!("container_requests/{}", text_field(&child, "uuid")), put.clone())
        .await;
    let page = queue.ok(&inside, "GET", "containers?limit=1000", Value::Null).await;
    assert_eq!(page["items_available"], 2, "{page}");

    // They have no access to the rest, whether of the same owner or of another user.
    for request in [&other, &foreign] {
        let (request, container) = (text_field(request, "uuid"), text_field(request, "container_uuid"));
        for (method, path) in [
            ("GET", format!("containers/{container}")),
            ("GET", format!("containers/{container}/output")),
            ("POST", format!("containers/{container}/update_priority")),
            ("GET", format!("container_requests/{request}")),
            ("DELETE", format!("container_requests/{request}")),
        ] {
            assert_eq!(queue.call(&inside, method, &path, Value::Null).await.0, 404, "{method} {path}");
        }
        let path = format!("container_requests/{request}");
        assert_eq!(queue.call(&inside, "PUT", &path, put.clone()).await.0, 404);
        assert!(!rows.to_string().contains(&container), "{rows}");
    }
    assert!(!page.to_string().contains("c4nary"), "{page}");
    let own = format!("container_requests/{}", text_field(&mine, "uuid"));
    assert_eq!(queue.call(&inside, "PUT", &own, put).await.0, 404, "its own request is its owner's");
    // A user who requests the priority of another user's container to be computed learns nothing about it.
    let path = format!("containers/{}/update_priority", text_field(&foreign, "container_uuid"));
    assert_eq!(queue.call(&ann, "POST", &path, Value::Null).await.0, 404);

    // It makes requests with its owner's rights, for as long as the owner has them.
    server
        .admin(
            "/api/users/update",
            json!({ "username": "ann", "global_role": "user", "can_use_queue": false }),
        )
        .await;
    assert_eq!(queue.call(&inside, "POST", "container_requests", container_request()).await.0, 403);
}

fn settings_with_limits(ground: &ServerFixture, paces: RateLimits) -> Settings {
    let given = SettingsSource { port: Some(0), ..ground.given() };
    Settings { pipelines: false, paces, ..Settings::new(given, None).unwrap() }
}

fn burst_only(burst: u32) -> Rate {
    Rate { burst, per_second: 0 }
}

#[tokio::test]
async fn queue_token_guesses_are_rate_limited_and_generated_tokens_pass() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(settings_with_limits(&ground, RateLimits::default())).await;
    let queue = QueueClient { server: &server };
    let ann = server.create_queue_user("ann").await;
    let (_, made) = create_token(&queue, &ann, json!({})).await;
    let check = |token: String| {
        let queue = &queue;
        async move { queue.call(&token, "GET", "users/current", Value::Null).await.0 }
    };
    // A name belongs to one token. With another name, or an unknown one, the token is not found.
    let own = queue.ok(ADMIN_TOKEN, "GET", "api_client_authorizations/current", Value::Null).await;
    assert_eq!(check(full_token(&own)).await, 200);
    assert_eq!(check(format!("v2/x/{ADMIN_TOKEN}")).await, 401);
    assert_eq!(check(format!("v2/{}/{ADMIN_TOKEN}", text_field(&made, "uuid"))).await, 401);
    assert_eq!(
        check(format!("v2/{}/{}", text_field(&own, "uuid"), text_field(&made, "api_token"))).await,
        401
    );
    assert_eq!(check(format!("{}/wlass-dz642-000000000000000", full_token(&own))).await, 401);
    server.stop().await;

    let forms: [fn(u32) -> String; 4] = [
        |n| format!("v2/x/guess{n}"),
        |n| format!("v2/wlass-gj3su-{n:015}/{n:050}"),
        |n| format!("{n:050}"),
        |n| format!("guess{n}"),
    ];
    for form in forms {
        let paces = RateLimits { login: burst_only(5), ..RateLimits::default() };
        let server = TestServer::start_with_settings(settings_with_limits(&ground, paces)).await;
        let queue = QueueClient { server: &server };
        let mut statuses = Vec::new();
        for n in 0..8 {
            statuses.push(queue.call(&form(n), "GET", "users/current", Value::Null).await.0);
        }
        assert_eq!(statuses, [401, 401, 401, 401, 401, 429, 429, 429], "{}", form(0));
        let (status, _) =
            queue.call(&format!("v2/x/{ADMIN_TOKEN}"), "GET", "users/current", Value::Null).await;
        assert_eq!(status, 429, "the right one of those that can be guessed is not told from a wrong one");
        for good in [&ann, &full_token(&made)] {
            queue.ok(good, "GET", "users/current", Value::Null).await;
        }
        server.stop().await;
    }
}

#[tokio::test]
async fn queue_writes_are_rate_limited_per_user_but_not_for_dispatchers() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(settings_with_limits(&ground, RateLimits::default())).await;
    let ann = server.create_queue_user("ann").await;
    let queue = QueueClient { server: &server };
    let dispatcher = queue.dispatcher().await;
    server.stop().await;
    let paces = RateLimits { submit: burst_only(3), ..RateLimits::default() };
    let server = TestServer::start_with_settings(settings_with_limits(&ground, paces)).await;
    let queue = QueueClient { server: &server };
    let mut last = Value::Null;
    for _ in 0..3 {
        last = queue.submit(&ann, json!({})).await;
    }
    let (status, why) = queue.call(&ann, "POST", "container_requests", container_request()).await;
    assert_eq!(status, 429, "{why}");
    assert_eq!(create_token(&queue, &ann, json!({})).await.0, 429);
    queue.ok(&ann, "GET", "container_requests", Value::Null).await;
    // A long query is sent as a POST, and does not count as a write.
    queue.ok(&ann, "POST", "container_requests?_method=GET", Value::Null).await;
    let uuid = text_field(&last, "container_uuid");
    for _ in 0..5 {
        queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/lock"), Value::Null).await;
        queue.ok(&dispatcher, "POST", &format!("containers/{uuid}/unlock?release=true"), Value::Null).await;
    }
    queue.submit(ADMIN_TOKEN, json!({})).await;
    server.stop().await;
}

/// Requests events, and returns the status and the connection.
async fn open_event_stream(server: &TestServer, token: &str) -> (String, TcpStream) {
    let mut stream = TcpStream::connect(&server.authority).await.unwrap();
    let head = format!(
        "GET /websocket HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0_u8; 12];
    stream.read_exact(&mut answer).await.unwrap();
    (String::from_utf8_lossy(&answer[9..]).into_owned(), stream)
}

#[tokio::test]
async fn event_streams_are_limited_per_user_and_dispatchers_count_separately() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(settings_with_limits(&ground, RateLimits::default())).await;
    let (ann, bea) = (server.create_queue_user("ann").await, server.create_queue_user("bea").await);
    let queue = QueueClient { server: &server };
    let mut open = Vec::new();
    for _ in 0..64 {
        let (status, stream) = open_event_stream(&server, &ann).await;
        assert_eq!(status, "101");
        open.push(stream);
    }
    assert_eq!(open_event_stream(&server, &ann).await.0, "429");
    // Another token of the same user makes no difference.
    let (_, made) = create_token(&queue, &ann, json!({})).await;
    assert_eq!(open_event_stream(&server, &full_token(&made)).await.0, "429");
    for other in [bea, queue.dispatcher().await] {
        assert_eq!(open_event_stream(&server, &other).await.0, "101");
    }
    // Closing some streams permits others.
    drop(open);
    windlass_testkit::wait::eventually_ok_async("a place is free again", async || {
        match open_event_stream(&server, &ann).await.0.as_str() {
            "101" => Ok(()),
            other => Err(other.to_owned()),
        }
    })
    .await;
    server.stop().await;
}
