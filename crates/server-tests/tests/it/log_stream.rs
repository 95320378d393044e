//! Streamed logs, over real HTTP.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use windlass_api::{
    client::ApiClient,
    log_stream::{LogStream, LogStreamEvent},
    logs::StreamRequest,
};
use windlass_model::id::SubmissionId;
use windlass_server::{
    config::SettingsSource,
    db::{Unit, jobs},
    hints::Hint,
    logs::{Log, LogSource, LogStore},
    params,
};
use windlass_testkit::wait::TIMEOUT;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    o4_hundreds_of_readers_see_the_same_bytes_and_the_end
    a_reconnecting_reader_resumes_where_it_stopped
    a_log_stream_ends_if_the_job_has_ended_or_it_is_not_followed
    o5_a_log_stream_requires_access_to_the_run
    f34_a_reader_who_loses_access_is_disconnected
    log_appends_of_another_replica_reach_readers_of_this_one
    secret_values_are_masked_for_readers_however_they_are_split
}

/// A server with a run and its log.
pub(crate) struct LogTestEnv {
    pub(crate) server: TestServer,
    pub(crate) log: Log,
}

impl LogTestEnv {
    pub(crate) async fn new(ground: &ServerFixture) -> Self {
        Self::on(ground.start().await).await
    }

    pub(crate) async fn on(server: TestServer) -> Self {
        let run = json!({ "run_name": "train-1", "configuration": { "type": "task", "commands": ["true"] } });
        let plan = json!({ "plan": { "run_spec": run }, "force": false });
        let run = server.admin("/api/project/main/runs/apply", plan).await;
        let submission = run["latest_job_submission"]["id"].as_str().unwrap().parse().unwrap();
        let job = jobs::find(server.app.db(), SubmissionId(submission)).await.unwrap().unwrap();
        let log =
            Log { project: job.project_id, run: job.run_id, submission: job.id, stream: LogSource::Job };
        Self { server, log }
    }

    pub(crate) fn requested(&self) -> StreamRequest {
        StreamRequest {
            run_name: "train-1".into(),
            job_submission_id: self.log.submission.0,
            offset: 0,
            start_time: None,
            follow: true,
            diagnose: false,
        }
    }

    pub(crate) async fn open_stream(&self, token: &str, requested: &StreamRequest) -> LogStream {
        let client = ApiClient::new(&format!("http://{}", self.server.authority), Some(token)).unwrap();
        client.stream_logs("main", requested).await.unwrap()
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> u64 {
        self.server.app.logs().append_to_files(&self.log, offset, 5, bytes).await.unwrap()
    }

    async fn end_job(&self) {
        let sql = "UPDATE jobs SET status = 'failed', finished = TRUE, finished_at = now_us(), exit_status = 3, \
                   termination_reason = 'container_exited_with_error' WHERE id = $1";
        let unit = Unit::new().expect_one(sql, params![self.log.submission]);
        self.server.app.db().write(unit).await.unwrap().done().unwrap();
        self.server.app.wake(&[Hint::Runs]);
    }
}

/// Reads to the end and returns the bytes and the final event.
async fn read_to_end(stream: &mut LogStream) -> (Vec<u8>, LogStreamEvent) {
    let mut bytes = Vec::new();
    let reading = async {
        loop {
            match stream.next().await.unwrap().expect("an end") {
                LogStreamEvent::Bytes { offset, bytes: part, .. } => {
                    assert_eq!(offset, bytes.len() as u64, "in order, without gaps");
                    bytes.extend(part);
                }
                end @ LogStreamEvent::End { .. } => return end,
            }
        }
    };
    let end = timeout(TIMEOUT, reading).await.expect("an end in time");
    (bytes, end)
}

fn failed_end() -> LogStreamEvent {
    LogStreamEvent::End {
        status: "failed".into(),
        exit_status: Some(3),
        termination_reason: Some("container_exited_with_error".into()),
    }
}

async fn o4_hundreds_of_readers_see_the_same_bytes_and_the_end(ground: &ServerFixture) {
    let scene = Arc::new(LogTestEnv::new(ground).await);
    let mut end = scene.write(0, b"before anybody came\n").await;
    let mut readers = Vec::new();
    for _ in 0..200 {
        let mut stream = scene.open_stream(ADMIN_TOKEN, &scene.requested()).await;
        readers.push(tokio::spawn(async move { read_to_end(&mut stream).await }));
    }
    // These streams are not read: they delay neither the writer nor the others.
    let mut asleep = Vec::new();
    for _ in 0..20 {
        asleep.push(scene.open_stream(ADMIN_TOKEN, &scene.requested()).await);
    }
    let mut whole = b"before anybody came\n".to_vec();
    for n in 0..40_u8 {
        let part = vec![n; 500];
        end = scene.write(end, &part).await;
        whole.extend(part);
    }
    scene.end_job().await;
    for reader in readers {
        let (bytes, message) = reader.await.unwrap();
        assert!(bytes == whole);
        assert_eq!(message, failed_end());
    }
    for mut stream in asleep {
        assert!(read_to_end(&mut stream).await.0 == whole);
    }
    let scene = Arc::into_inner(scene).unwrap();
    let app = scene.server.app.clone();
    scene.server.stop().await;
    assert_eq!(app.logs().open_log_count(), 0, "nothing is remembered of logs nobody follows");
}

/// Requests the stream as a browser does, and returns its text up to `enough`.
async fn read_raw_stream(scene: &LogTestEnv, last: Option<&str>, enough: &str) -> String {
    let path =
        format!("/api/project/main/logs/stream?run_name=train-1&job_submission_id={}", scene.log.submission);
    let mut request = Request::get(path)
        .header("host", &scene.server.authority)
        .header("authorization", format!("Bearer {ADMIN_TOKEN}"));
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let stream = TcpStream::connect(&scene.server.authority).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let (mut body, mut text) = (response.into_body(), String::new());
    while !text.contains(enough) {
        let frame = timeout(TIMEOUT, body.frame()).await.unwrap().expect("more").unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    text
}

async fn a_reconnecting_reader_resumes_where_it_stopped(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    scene.write(0, b"one\n").await;
    let text = read_raw_stream(&scene, None, "\n\n").await;
    let expect = "id: 4\nevent: log\ndata: {\"type\":\"log\",\"offset\":0,\"timestamp\":\"1970-01-01T00:00:00.000005Z\",\
                  \"message\":\"b25lCg==\"}\n\n";
    assert_eq!(text.replace("+00:00", "Z"), expect);
    scene.write(4, b"two\n").await;
    let text = read_raw_stream(&scene, Some("4"), "\n\n").await;
    assert!(text.starts_with("id: 8\n") && text.contains("\"offset\":4"), "{text}");
    // In the middle of a piece.
    let text = read_raw_stream(&scene, Some("5"), "\n\n").await;
    assert!(text.starts_with("id: 8\n") && text.contains("\"offset\":5"), "{text}");
    scene.end_job().await;
    let text = read_raw_stream(&scene, Some("8"), "\n\n").await;
    let end = "id: 8\nevent: end\ndata: {\"type\":\"end\",\"offset\":8,\"status\":\"failed\",\"exit_status\":3,\
               \"termination_reason\":\"container_exited_with_error\"}\n\n";
    assert_eq!(text, end);
    scene.server.stop().await;
}

async fn a_log_stream_ends_if_the_job_has_ended_or_it_is_not_followed(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let long = vec![b'z'; 300_000];
    scene.write(0, &long).await;
    let requested = StreamRequest { follow: false, ..scene.requested() };
    let (bytes, end) = read_to_end(&mut scene.open_stream(ADMIN_TOKEN, &requested).await).await;
    assert!(bytes == long);
    assert_eq!(
        end,
        LogStreamEvent::End { status: "submitted".into(), exit_status: None, termination_reason: None }
    );
    scene.end_job().await;
    let (bytes, end) = read_to_end(&mut scene.open_stream(ADMIN_TOKEN, &scene.requested()).await).await;
    assert!(bytes == long);
    assert_eq!(end, failed_end());
    // The runner's log is separate, and empty.
    let requested = StreamRequest { diagnose: true, ..scene.requested() };
    assert_eq!(
        read_to_end(&mut scene.open_stream(ADMIN_TOKEN, &requested).await).await,
        (Vec::new(), failed_end())
    );
    scene.server.stop().await;
}

async fn o5_a_log_stream_requires_access_to_the_run(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let token = scene.server.user("other").await;
    scene.server.ok(&token, "/api/projects/create", json!({ "project_name": "theirs" })).await;
    let client = ApiClient::new(&format!("http://{}", scene.server.authority), Some(&token)).unwrap();
    assert!(client.stream_logs("main", &scene.requested()).await.is_err());
    // Nor through another project in which they are members.
    assert!(client.stream_logs("theirs", &scene.requested()).await.unwrap_err().is_not_found());
    let admin = ApiClient::new(&format!("http://{}", scene.server.authority), Some(ADMIN_TOKEN)).unwrap();
    let other = StreamRequest { run_name: "train-2".into(), ..scene.requested() };
    assert!(admin.stream_logs("main", &other).await.unwrap_err().is_not_found());
    scene.server.stop().await;
}

async fn f34_a_reader_who_loses_access_is_disconnected(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let token = scene.server.user("member").await;
    scene.server.join("main", &[("member", "user")]).await;
    scene.write(0, b"theirs to read\n").await;
    let mut theirs = scene.open_stream(&token, &scene.requested()).await;
    let mut ours = scene.open_stream(ADMIN_TOKEN, &scene.requested()).await;
    assert!(matches!(theirs.next().await.unwrap(), Some(LogStreamEvent::Bytes { .. })));
    let gone = json!({ "usernames": ["member"] });
    scene.server.admin("/api/projects/main/remove_members", gone).await;
    let ended = timeout(Duration::from_secs(5), theirs.next()).await.expect("cut off in time");
    assert_eq!(ended.unwrap(), None);
    scene.write(15, b"not theirs\n").await;
    scene.end_job().await;
    assert_eq!(read_to_end(&mut ours).await.0, b"theirs to read\nnot theirs\n");
    scene.server.stop().await;
}

async fn log_appends_of_another_replica_reach_readers_of_this_one(ground: &ServerFixture) {
    let scene = LogTestEnv::new(ground).await;
    let mut stream = scene.open_stream(ADMIN_TOKEN, &scene.requested()).await;
    let elsewhere = windlass_server::logs::files::FileLogStore::new(ground.dir.path().join("logs"));
    elsewhere.append_to_files(&scene.log, 0, 5, b"from afar").await.unwrap();
    let next = timeout(TIMEOUT, stream.next()).await.unwrap().unwrap();
    assert!(matches!(next, Some(LogStreamEvent::Bytes { bytes, .. }) if bytes == b"from afar"));
    // A server that stops does not wait for its readers.
    let stopping = timeout(Duration::from_secs(5), scene.server.stop());
    stopping.await.expect("streams end with the server");
    assert_eq!(stream.next().await.unwrap(), None);
}

async fn secret_values_are_masked_for_readers_however_they_are_split(ground: &ServerFixture) {
    const VALUE: &str = "hunter22-and-more";
    let scene = LogTestEnv::new(ground).await;
    let server = &scene.server;
    let set = json!({ "name": "KEY", "value": VALUE });
    server.admin("/api/project/main/secrets/create_or_update", set).await;
    let mut stream = scene.open_stream(ADMIN_TOKEN, &scene.requested()).await;
    let (mut end, mut wanted) = (0, String::new());
    for cut in 1..VALUE.len() {
        let (one, two) = VALUE.split_at(cut);
        end = scene.write(end, format!("<{one}").as_bytes()).await;
        end = scene.write(end, format!("{two}>\n").as_bytes()).await;
        wanted.push_str(&format!("<{}>\n", "*".repeat(VALUE.len())));
    }
    // A value that is written letter by letter.
    end = scene.write(end, b"<").await;
    for letter in VALUE.bytes() {
        end = scene.write(end, &[letter]).await;
    }
    end = scene.write(end, b">\n").await;
    wanted.push_str(&format!("<{}>\n", "*".repeat(VALUE.len())));
    // The beginning of a value that turns out to be none.
    end = scene.write(end, b"hunter").await;
    end = scene.write(end, b"s\n").await;
    wanted.push_str("hunters\n");
    let polled = async |limit: usize| {
        let (mut text, mut next) = (Vec::new(), Value::Null);
        loop {
            let requested = json!({ "run_name": "train-1", "job_submission_id": scene.log.submission.0, "limit": limit,
                "next_token": next, "raw": true });
            let page = server.admin("/api/project/main/logs/poll", requested).await;
            for event in page["logs"].as_array().unwrap() {
                text.extend(STANDARD.decode(event["message"].as_str().unwrap()).unwrap());
            }
            next = page["next_token"].clone();
            if next.is_null() {
                return String::from_utf8(text).unwrap();
            }
        }
    };
    assert_eq!(polled(1000).await, wanted);
    assert_eq!(polled(1).await, wanted, "each piece is a page of its own");
    // A secret that was stored a moment ago is masked, too.
    for name in ["FRESH", "NEW"] {
        let value = format!("value of {name}");
        let set = json!({ "name": name, "value": value });
        server.admin("/api/project/main/secrets/create_or_update", set).await;
        end = scene.write(end, format!("<{value}>\n").as_bytes()).await;
        wanted.push_str(&format!("<{}>\n", "*".repeat(value.len())));
        assert_eq!(polled(1000).await, wanted);
    }
    scene.end_job().await;
    assert_eq!(String::from_utf8(read_to_end(&mut stream).await.0).unwrap(), wanted);
    let from = StreamRequest { offset: 5, ..scene.requested() };
    let mut stream = scene.open_stream(ADMIN_TOKEN, &from).await;
    let Some(LogStreamEvent::Bytes { bytes, offset, .. }) = stream.next().await.unwrap() else {
        panic!("no bytes")
    };
    assert_eq!(offset, 5);
    assert!(wanted.as_bytes()[5..].starts_with(&bytes), "from the middle of a value");
    drop(stream);
    scene.server.stop().await;

    let open = TestServer::start_with(SettingsSource { mask_secrets: Some(false), ..ground.given() }).await;
    let requested = json!({ "run_name": "train-1", "job_submission_id": scene.log.submission.0, "limit": 2, "raw": true });
    let page = open.admin("/api/project/main/logs/poll", requested).await;
    let first = STANDARD.decode(page["logs"][0]["message"].as_str().unwrap()).unwrap();
    assert_eq!(first, b"<h", "who wants every byte gets it");
    open.stop().await;
}
