//! OpenAI-compatible endpoint.

use windlass_gateway::route::{ServedModel, Service};

use crate::support::{TestProxy, Upstream, path_settings, service};

fn model_service(model: &str, prefix: &str, created: i64, upstream: &Upstream) -> Service {
    let mut service = service(vec![upstream.replica("a")]);
    service.run = format!("run-{created}");
    service.domains.clear();
    service.model = Some(ServedModel { name: model.to_owned(), prefix: prefix.to_owned(), created });
    service
}

const TOKEN: (&str, &str) = ("Authorization", "Bearer good");

#[tokio::test]
async fn models_are_listed_for_members_only() {
    let upstream = Upstream::echo().await;
    let mut foreign = model_service("secret", "/v1", 9, &upstream);
    foreign.project = "other".to_owned();
    let services = vec![
        model_service("b", "/v1", 2, &upstream),
        model_service("a", "/v1", 1, &upstream),
        model_service("b", "/v1", 3, &upstream),
        foreign,
    ];
    let bed = TestProxy::with(path_settings(), services).await;
    let got = bed.request("GET", "/proxy/models/main/models", &[TOKEN], "").await;
    assert_eq!((got.status, got.field("content-type")), (200, "application/json"));
    let expect = r#"{"object":"list","data":[{"object":"model","id":"a","created":1,"owned_by":"main"},{"object":"model","id":"b","created":3,"owned_by":"main"}]}"#;
    assert_eq!(got.body, expect);
    assert_eq!(bed.get("/proxy/models/main/models").await.status, 401);
    assert_eq!(bed.request("GET", "/proxy/models/other/models", &[TOKEN], "").await.status, 403);
}

#[tokio::test]
async fn a_model_request_is_routed_to_the_service_of_that_model() {
    let (a, b) = (Upstream::echo().await, Upstream::echo().await);
    let mut second = model_service("b", "/openai/v1/", 2, &b);
    second.auth = true;
    let bed = TestProxy::with(path_settings(), vec![model_service("a", "/v1", 1, &a), second]).await;
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"model":"b"}"#;
    let got = bed.request("POST", "/proxy/models/main/chat/completions", &[TOKEN], body).await;
    assert_eq!(got.status, 200, "{}", got.body);
    assert!(got.body.starts_with("POST /openai/v1/chat/completions\n"), "{}", got.body);
    assert!(got.body.ends_with(body) && !got.body.contains("good"), "{}", got.body);
    assert!(got.body.contains("x-windlass-identity: ann.sig"), "{}", got.body);
}

#[tokio::test]
async fn an_unroutable_model_request_gets_an_openai_style_error() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::with(path_settings(), vec![model_service("a", "/v1", 1, &upstream)]).await;
    for (method, path, body, status, words) in [
        ("POST", "main/chat/completions", r#"{"model":"zzz"}"#, 404, "serves the model `zzz`"),
        ("POST", "main/chat/completions", "nonsense", 400, "must be JSON"),
        ("POST", "main/chat/completions", r#"{"messages":[]}"#, 400, "missing field `model`"),
        ("GET", "main/chat/completions", "", 405, "POST"),
        ("POST", "main/admin", "{}", 404, "chat/completions"),
        ("POST", "other/chat/completions", r#"{"model":"a"}"#, 403, "member"),
    ] {
        let got = bed.request(method, &format!("/proxy/models/{path}"), &[TOKEN], body).await;
        assert_eq!(got.status, status, "{method} {path} {body}");
        let error: serde_json::Value = serde_json::from_str(&got.body).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    }
}
