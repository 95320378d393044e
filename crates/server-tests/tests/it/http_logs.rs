//! Logs by offset, the search in logs and the times of their offsets, over real HTTP.

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use windlass_server::logs::LogStore as _;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    log_stream::LogTestEnv,
};

on_both! {
    a_log_is_read_by_offset_and_downloaded
    a_log_is_searched_for_text_and_expressions
    marks_of_a_log_have_the_times_of_its_offsets
}

async fn get(env: &LogTestEnv, path: &str, query: &str) -> Response<Bytes> {
    let at = format!(
        "/api/project/main/logs/{path}?run_name=train-1&job_submission_id={}{query}",
        env.log.submission.0
    );
    let request = Request::get(at)
        .header("host", &env.server.authority)
        .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
        .body(Full::new(Bytes::new()))
        .unwrap();
    let stream = TcpStream::connect(&env.server.authority).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    Response::from_parts(parts, body.collect().await.unwrap().to_bytes())
}

async fn write(env: &LogTestEnv, text: &str, at: i64) {
    let end = env.server.app.logs().end(&env.log).await.unwrap();
    env.server.app.logs().append_to_files(&env.log, end, at, text.as_bytes()).await.unwrap();
}

async fn a_log_is_read_by_offset_and_downloaded(ground: &ServerFixture) {
    let env = LogTestEnv::new(ground).await;
    env.server
        .admin("/api/project/main/secrets/create_or_update", json!({ "name": "key", "value": "hunter22" }))
        .await;
    write(&env, "0123456789\x1b[31m", 1).await;
    write(&env, "<script>hunter22\n", 2).await;
    let header = |response: &Response<Bytes>, name: &str| {
        response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
    };
    let all = get(&env, "raw", "").await;
    assert_eq!((all.status().as_u16(), &all.body()[..]), (200, &b"0123456789\x1b[31m<script>********\n"[..]));
    assert_eq!(header(&all, "x-log-size").as_deref(), Some("32"));
    assert_eq!(header(&all, "content-type").as_deref(), Some("application/octet-stream"));
    assert_eq!(header(&all, "x-content-type-options").as_deref(), Some("nosniff"));
    assert_eq!(&get(&env, "raw", "&offset=8&limit=4").await.body()[..], b"89\x1b[");
    for (query, body) in [("&limit=0", 0), ("&offset=32", 0), ("&offset=1000", 0), ("&offset=31", 1)] {
        let part = get(&env, "raw", query).await;
        assert_eq!(
            (part.body().len(), header(&part, "x-log-size").as_deref()),
            (body, Some("32")),
            "{query}"
        );
    }
    assert_eq!(get(&env, "raw", "&limit=9999999").await.status(), 400);
    assert_eq!(get(&env, "raw", "&diagnose=true").await.body().len(), 0, "the runner wrote nothing");
    let file = get(&env, "raw", "&download=1").await;
    assert_eq!(file.body(), all.body());
    assert_eq!(header(&file, "content-disposition").as_deref(), Some("attachment; filename=\"train-1.log\""));
    env.server.stop().await;
}

/// Events of a search: names and data.
fn events(response: &Response<Bytes>) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(response.body()).unwrap();
    let event = |frame: &str| {
        let field = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        (field("event: ").to_owned(), serde_json::from_str(field("data: ")).unwrap())
    };
    text.split("\n\n").filter(|frame| frame.contains("event: ")).map(event).collect()
}

async fn a_log_is_searched_for_text_and_expressions(ground: &ServerFixture) {
    let env = LogTestEnv::new(ground).await;
    write(&env, "one\ntwo Err", 1_000_000).await;
    write(&env, "or\n\x1b[31mthree\x1b[0m\nerror 42\nfive", 2_000_000).await;
    let search = async |query: &str| {
        let all = events(&get(&env, "search", query).await);
        let hits: Vec<Value> =
            all.iter().filter(|(name, _)| name == "hit").map(|(_, hit)| hit.clone()).collect();
        let (last, end) = all.last().unwrap().clone();
        assert_eq!(last, "end", "{query}");
        (hits, end)
    };
    let (hits, end) = search("&q=error").await;
    assert_eq!((hits.len(), &hits[0]["text"], &hits[0]["offset"]), (1, &json!("error 42"), &hits[0]["line"]));
    assert_eq!((&end["hits"], &end["more"]), (&json!(1), &json!(false)));
    let (hits, _) = search("&q=ERROR&ignore_case=true").await;
    let shown: Vec<_> = hits.iter().map(|hit| hit["text"].as_str().unwrap()).collect();
    assert_eq!(shown, ["two Error", "error 42"], "a line that was written in two parts is one line");
    assert_eq!((&hits[0]["offset"], &hits[0]["line"], &hits[0]["length"]), (&json!(8), &json!(4), &json!(5)));
    assert_eq!(hits[0]["timestamp"], "1970-01-01T00:00:01Z");
    let (hits, _) = search("&q=%5B0-9%5D%2B%24&regex=true&context=1").await;
    assert_eq!((&hits[0]["before"], &hits[0]["after"]), (&json!(["three"]), &json!(["five"])));
    let (hits, end) = search("&q=e&limit=1").await;
    assert_eq!((hits.len(), &end["more"]), (1, &json!(true)));
    assert_eq!(search("&q=one&from=3").await.0.len(), 0);
    assert_eq!(search("&q=.").await.0.len(), 0, "a text is no expression");
    let wrong = get(&env, "search", "&q=%28a&regex=true").await;
    assert_eq!(wrong.status(), 400);
    assert!(String::from_utf8_lossy(wrong.body()).contains("invalid expression"));
    env.server.stop().await;
}

async fn marks_of_a_log_have_the_times_of_its_offsets(ground: &ServerFixture) {
    let env = LogTestEnv::new(ground).await;
    write(&env, "first\n", 1_000_000).await;
    write(&env, "second\n", 5_000_000).await;
    let body = json!({ "run_name": "train-1", "job_submission_id": env.log.submission.0 });
    let marks = env.server.admin("/api/project/main/logs/marks", body).await;
    assert_eq!((&marks["size"], &marks["first"]), (&json!(13), &json!(0)));
    assert_eq!(marks["marks"], json!([[0, "1970-01-01T00:00:01Z"], [6, "1970-01-01T00:00:05Z"]]));
    env.server.stop().await;
}
