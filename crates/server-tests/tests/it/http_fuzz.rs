//! Requests generated from the OpenAPI document, valid and invalid: the server answers all of them with a status that
//! the document lists, and never with an internal error.

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::{Map, Value, json};
use windlass_api::openapi;
use windlass_testkit::rng::Rng;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    random_requests_get_only_documented_statuses
}

/// Requests for each operation; more with `FUZZ=n`.
const REQUESTS_PER_OPERATION: usize = 40;

const TEXTS: [&str; 16] = [
    "main",
    "admin",
    "train-1",
    "",
    "a",
    "../x",
    "a\u{0}b",
    "\u{202e}",
    "%",
    "_",
    "'; --",
    "${{ secrets.X }}",
    "0 3 * * *",
    "2026-01-01T00:00:00Z",
    "5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10",
    "\u{1f680}",
];
const NUMBERS: [i64; 8] = [0, 1, -1, 2, 100, 1001, i64::MAX, i64::MIN];

/// Valid documents, so that more than the first check is reached.
fn sample_documents() -> Vec<Value> {
    let task = json!({ "type": "task", "commands": ["true"], "image": "debian", "user": "root" });
    let hosts = json!({ "user": "u", "identity_file": "f", "hosts": ["10.0.0.1"] });
    vec![
        json!({ "configuration": task, "run_name": "train-1" }),
        json!({ "configuration": task, "run_name": null, "profile": { "name": "x", "schedule": { "cron": "* * * * *" } } }),
        json!({ "configuration": task, "file_archives": [{ "id": "x" }] }),
        json!({ "configuration": { "type": "fleet", "name": "own", "ssh_config": hosts }, "profile": { "name": "x" } }),
        json!({ "configuration": { "type": "fleet", "nodes": "0..2" } }),
        json!({ "type": "volume", "name": "data", "backend": "aws", "region": "r", "size": 1 }),
        json!({ "type": "gateway", "name": "edge", "backend": "remote", "region": "r" }),
        json!({ "repo_type": "remote", "repo_name": "r" }),
        json!({ "configuration": [1] }),
        nested_lists(90),
        nested_lists(200),
        json!({}),
        task,
    ]
}

/// Lists nested to this depth.
fn nested_lists(levels: usize) -> Value {
    (0..levels).fold(Value::Null, |inner, _| json!([inner]))
}

fn random_value(schema: &Value, rng: &mut Rng, documents: &[Value]) -> Value {
    if rng.below(25) == 0 {
        return rng.pick(&[json!(null), json!([]), json!({}), json!(1.5), json!("x"), json!(true)]).clone();
    }
    if let Some(words) = schema["enum"].as_array() {
        return rng.pick(words).clone();
    }
    if let Some(choices) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
        return random_value(&rng.pick(choices).clone(), rng, documents);
    }
    let kind = schema["type"].as_array().map_or(&schema["type"], |kinds| rng.pick(kinds));
    match kind.as_str().unwrap_or_default() {
        "string" => json!(rng.pick(&TEXTS)),
        "integer" => json!(rng.pick(&NUMBERS)),
        "number" => json!(0.5),
        "boolean" => json!(rng.below(2) == 0),
        "array" => {
            let len = rng.below(4);
            (0..len).map(|_| random_value(&schema["items"], rng, documents)).collect()
        }
        "object" if schema["properties"].is_object() => random_object(schema, rng, documents),
        "object" => rng.pick(documents).clone(),
        _ => Value::Null,
    }
}

fn random_object(schema: &Value, rng: &mut Rng, documents: &[Value]) -> Value {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let mut map = Map::new();
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let is_required = required.iter().any(|one| one == name);
        if (is_required && rng.below(30) > 0) || (!is_required && rng.below(3) == 0) {
            map.insert(name.clone(), random_value(schema, rng, documents));
        }
    }
    Value::Object(map)
}

async fn send_request(
    server: &TestServer,
    token: &str,
    method: &str,
    path: &str,
    body: String,
) -> (u16, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", &server.authority)
        .header("authorization", format!("Bearer {token}"))
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let (status, body) = server.send(request).await;
    (status, String::from_utf8_lossy(&body).into_owned())
}

async fn random_requests_get_only_documented_statuses(ground: &ServerFixture) {
    let rounds = std::env::var("FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(REQUESTS_PER_OPERATION);
    let seed = std::env::var("SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0x5eed);
    let server = ground.start().await;
    let mira = server.user("mira").await;
    server.join("main", &[("mira", "user")]).await;
    let (mut rng, documents, document) = (Rng::new(seed), sample_documents(), openapi::document());
    // The tokens of other callers must stay valid.
    let kept =
        ["refresh_token", "delete_users", "update_user", "set_members", "remove_members", "delete_projects"];
    let projects = ["main", "main", "main", "none", "%00", "..", "%F0%9F%9A%80"];
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            if kept.contains(&id) {
                continue;
            }
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            for round in 0..rounds {
                let path = path
                    .replace("{project_name}", rng.pick::<&str>(&projects))
                    .replace("{run_name}", rng.pick::<&str>(&["train-1", "%00"]));
                let body = if schema.is_object() {
                    random_value(schema, &mut rng, &documents).to_string()
                } else {
                    String::new()
                };
                let token = if rng.below(4) == 0 { mira.as_str() } else { ADMIN_TOKEN };
                let (status, answer) =
                    send_request(&server, token, &method.to_uppercase(), &path, body.clone()).await;
                let known = operation["responses"].get(status.to_string()).is_some();
                assert!(known, "SEED={seed} round {round}: {id} {path} {body}\nanswers {status}: {answer}");
            }
        }
    }
    // The server still works.
    server.admin("/api/users/get_my_user", json!({})).await;
    server.stop().await;
}
