//! Feed of changes, over real HTTP.

use std::collections::HashMap;

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use windlass_server::{db::Unit, params};
use windlass_testkit::wait::TIMEOUT;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_queue::QueueClient,
    postgres::TestDb,
};

on_both! {
    a_change_reaches_every_reader_with_its_row
    the_feed_is_limited_to_the_projects_and_kinds_requested
    a_reader_that_reconnects_receives_what_it_missed
    a_reader_who_loses_its_token_is_disconnected
    changes_of_the_container_queue_are_sent_to_their_owner
}

/// An event of the feed.
#[derive(Debug)]
struct Received {
    id: u64,
    name: String,
    data: Value,
}

/// A reader of the feed.
struct FeedClient {
    body: hyper::body::Incoming,
    buffer: String,
}

impl FeedClient {
    async fn open(server: &TestServer, token: &str, query: &str) -> Self {
        let request = Request::get(format!("/api/changes/stream{query}"))
            .header("host", &server.authority)
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::new()))
            .unwrap();
        let stream = TcpStream::connect(&server.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        // The connection lives as long as its sender.
        tokio::spawn(async move {
            let _sender = sender;
            std::future::pending::<()>().await;
        });
        Self { body: response.into_body(), buffer: String::new() }
    }

    /// Next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Received> {
        loop {
            if let Some(at) = self.buffer.find("\n\n") {
                let frame: String = self.buffer.drain(..at + 2).collect();
                let field = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
                let Some(name) = field("event: ") else { continue };
                return Some(Received {
                    id: field("id: ").unwrap().parse().unwrap(),
                    name: name.to_owned(),
                    data: serde_json::from_str(field("data: ").unwrap()).unwrap(),
                });
            }
            let frame = timeout(TIMEOUT, self.body.frame()).await.expect("the feed is silent")?;
            self.buffer.push_str(std::str::from_utf8(frame.ok()?.data_ref()?).unwrap());
        }
    }

    /// Skips to the next event that satisfies the condition.
    async fn wait_for(&mut self, wanted: impl Fn(&Received) -> bool) -> Received {
        loop {
            let received = self.next().await.expect("the feed has ended");
            if wanted(&received) {
                return received;
            }
        }
    }

    async fn change_of(&mut self, kind: &str, name: &str) -> Received {
        self.wait_for(|received| {
            received.name == "change" && received.data["kind"] == kind && received.data["name"] == name
        })
        .await
    }
}

async fn submit(server: &TestServer, project: &str, name: &str) -> Value {
    let spec = json!({ "run_name": name, "configuration": { "type": "task", "commands": ["true"] } });
    let path = format!("/api/project/{project}/runs/apply");
    server.admin(&path, json!({ "plan": { "run_spec": spec }, "force": false })).await
}

async fn a_change_reaches_every_reader_with_its_row(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut readers = Vec::new();
    for _ in 0..3 {
        let mut reader = FeedClient::open(&server, ADMIN_TOKEN, "").await;
        let hello = reader.next().await.unwrap();
        assert_eq!(hello.name, "hello");
        assert_eq!(hello.data["server_version"], env!("CARGO_PKG_VERSION"));
        assert!(hello.data["ui_version"].as_str().unwrap().starts_with("index-"), "{hello:?}");
        let counts = reader.next().await.unwrap();
        assert_eq!((counts.name.as_str(), &counts.data["runs"]), ("counts", &json!({})));
        readers.push(reader);
    }
    let run = submit(&server, "main", "train").await;
    for reader in &mut readers {
        let change = reader.change_of("run", "train").await;
        assert_eq!((&change.data["id"], &change.data["project"]), (&run["id"], &json!("main")));
        assert_eq!(
            (&change.data["row"]["name"], &change.data["row"]["status"]),
            (&json!("train"), &json!("submitted"))
        );
        assert!(change.data["message"].is_string() && change.data["as_of"].is_i64(), "{change:?}");
        assert_eq!(change.id, change.data["seq"].as_u64().unwrap());
        let counts = reader.wait_for(|received| received.name == "counts").await;
        assert_eq!(counts.data["runs"], json!({ "submitted": 1 }));
        assert!(counts.data.get("attention").is_none());
    }
    let sql = "UPDATE runs SET status = 'done', finished = TRUE, finished_at = now_us() WHERE name = $1";
    server.app.db().write(Unit::new().exec(sql, params!["train"])).await.unwrap().done().unwrap();
    server.admin("/api/project/main/runs/delete", json!({ "runs_names": ["train"] })).await;
    for reader in &mut readers {
        let gone = reader.wait_for(|received| received.name == "gone").await;
        assert_eq!((&gone.data["kind"], &gone.data["id"]), (&json!("run"), &run["id"]));
    }
    server.stop().await;
}

async fn the_feed_is_limited_to_the_projects_and_kinds_requested(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.ok(&mira, "/api/projects/create", json!({ "project_name": "lab" })).await;
    let mut member = FeedClient::open(&server, &mira, "").await;
    let mut only_jobs = FeedClient::open(&server, ADMIN_TOKEN, "?kinds=job").await;
    let mut only_lab = FeedClient::open(&server, ADMIN_TOKEN, "?projects=lab").await;
    submit(&server, "main", "hidden").await;
    submit(&server, "lab", "shown").await;
    let changes = |received: &Received| received.name == "change";
    for reader in [&mut member, &mut only_lab] {
        let first = reader.wait_for(changes).await;
        assert_eq!(first.data["project"], "lab", "{first:?}");
    }
    let first = only_jobs.wait_for(changes).await;
    assert_eq!(first.data["kind"], "job");
    assert!(
        first.data["row"].is_null() && first.data["name"].as_str().unwrap().starts_with("hidden"),
        "{first:?}"
    );
    let (status, answer) = server.get(ADMIN_TOKEN, "/api/changes/stream?kinds=run,cat").await;
    assert_eq!(status, 400, "{}", String::from_utf8_lossy(&answer));
    server.stop().await;
}

async fn a_reader_that_reconnects_receives_what_it_missed(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut reader = FeedClient::open(&server, ADMIN_TOKEN, "").await;
    submit(&server, "main", "first").await;
    let seen = reader.change_of("run", "first").await.id;
    drop(reader);
    submit(&server, "main", "second").await;
    let mut again = FeedClient::open(&server, ADMIN_TOKEN, &format!("?since={seen}")).await;
    assert!(again.next().await.unwrap().id > seen);
    again.change_of("run", "second").await;
    // A position that this database never had.
    let mut lost = FeedClient::open(&server, ADMIN_TOKEN, "?since=1000000").await;
    assert_eq!(lost.next().await.unwrap().name, "hello");
    assert_eq!(lost.next().await.unwrap().name, "resync");
    server.stop().await;
}

async fn a_reader_who_loses_its_token_is_disconnected(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let created = server.ok(&mira, "/api/users/tokens/create", json!({ "name": "t", "scope": "read" })).await;
    let mut reader = FeedClient::open(&server, created["token"].as_str().unwrap(), "").await;
    assert_eq!(reader.next().await.unwrap().name, "hello");
    server.ok(&mira, "/api/users/tokens/revoke", json!({ "names": ["t"] })).await;
    let ended = timeout(TIMEOUT, async { while reader.next().await.is_some() {} }).await;
    assert!(ended.is_ok(), "it is still open");
    server.stop().await;
}

async fn changes_of_the_container_queue_are_sent_to_their_owner(ground: &ServerFixture) {
    let server = ground.start().await;
    let queue = QueueClient { server: &server };
    let mira = server.create_queue_user("mira").await;
    let mut reader = FeedClient::open(&server, &mira, "").await;
    reader.wait_for(|received| received.name == "counts").await;
    queue.submit(ADMIN_TOKEN, json!({ "name": "hidden" })).await;
    queue.submit(&mira, json!({ "name": "shown" })).await;
    let change = reader.wait_for(|received| received.name == "change").await;
    assert_eq!((&change.data["kind"], &change.data["row"]["name"]), (&json!("container"), &json!("shown")));
    server.stop().await;
}

/// Two servers on one Postgres, each with clients that write and a reader that opens before, while and after they do: each
/// reader receives every change once or more, and the last row of each run that it receives is the newest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_two_replicas_receive_every_change_of_both_on_postgres() {
    const RUNS: usize = 12;
    let fixture = ServerFixture::postgres().await;
    let (first, second) = (fixture.start().await, fixture.start().await);
    let mut readers = Vec::new();
    for server in [&first, &second] {
        let mut reader = FeedClient::open(server, ADMIN_TOKEN, "?kinds=run").await;
        reader.wait_for(|received| received.name == "counts").await;
        readers.push(reader);
    }
    // Both servers write at the same time, so numbers of events are drawn and committed in different orders.
    let write = async |server: &TestServer, prefix: &str| {
        for n in 0..RUNS {
            let name = format!("{prefix}-{n}");
            submit(server, "main", &name).await;
            server
                .admin("/api/project/main/runs/stop", json!({ "runs_names": [name], "abort": false }))
                .await;
        }
    };
    tokio::join!(write(&first, "one"), write(&second, "two"), write(&first, "three"), write(&second, "four"));
    submit(&second, "main", "last").await;
    let rows = first.admin("/api/runs/rows", json!({ "limit": 500 })).await;
    let rows = rows["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4 * RUNS + 1);
    let is_newest = |row: &Value| {
        let now = rows.iter().find(|other| other["id"] == row["id"]);
        now.is_some_and(|now| (&now["status"], &now["reason"]) == (&row["status"], &row["reason"]))
    };
    let mut last = 0;
    for reader in &mut readers {
        let mut known: HashMap<String, (i64, Value)> = HashMap::new();
        let mut position = 0;
        while known.len() < rows.len() || !known.values().all(|(_, row)| is_newest(row)) {
            let received = reader.next().await.expect("the feed has ended");
            assert_ne!(received.name, "resync", "nothing was left out");
            assert!(received.id >= position, "positions of a reader never run backwards");
            position = received.id;
            if received.name != "change" {
                continue;
            }
            let (id, as_of) = (&received.data["id"], received.data["as_of"].as_i64().unwrap());
            let entry = known.entry(id.as_str().unwrap().to_owned()).or_insert((0, Value::Null));
            // As the web UI does: of two rows the one that was read later stays.
            if as_of > entry.0 {
                *entry = (as_of, received.data["row"].clone());
            }
        }
        last = position;
    }
    // A reader that changes the server continues from where it was.
    submit(&first, "main", "while-away").await;
    let mut moved = FeedClient::open(&second, ADMIN_TOKEN, &format!("?since={last}")).await;
    moved.change_of("run", "while-away").await;
    first.stop().await;
    second.stop().await;
}

/// On Postgres a transaction draws the number of its event before it commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_of_a_slow_transaction_is_not_lost_on_postgres() {
    let database = TestDb::open().await;
    let (client, connection) = tokio_postgres::connect(&database.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let fixture = ServerFixture::postgres_on(database);
    let server = fixture.start().await;
    let mut reader = FeedClient::open(&server, ADMIN_TOKEN, "").await;
    reader.wait_for(|received| received.name == "counts").await;
    let slow = submit(&server, "main", "slow").await;
    reader.change_of("run", "slow").await;
    let insert = "INSERT INTO events (id, entity, entity_id, project_id, kind, reason, message, actor, recorded_at) \
                  SELECT gen_random_uuid()::TEXT, 'run', r.id, r.project_id, 'note', 'late', 'written first', 'test', now_us() \
                  FROM runs r WHERE r.name = 'slow' RETURNING seq";
    client.batch_execute("BEGIN").await.unwrap();
    let early: i64 = client.query_one(insert, &[]).await.unwrap().get(0);
    submit(&server, "main", "quick").await;
    let quick = reader.change_of("run", "quick").await;
    assert!(quick.id > early.unsigned_abs(), "its number was drawn later");
    client.batch_execute("COMMIT").await.unwrap();
    let late = reader.wait_for(|received| received.data["reason"] == "late").await;
    assert_eq!((&late.data["id"], &late.data["message"]), (&slow["id"], &json!("written first")));
    assert_eq!(late.data["seq"], early);
    server.stop().await;
}
