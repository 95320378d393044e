//! Admission: tokens, rate limits, origins.

use windlass_gateway::route::{Cors, LimitKey, RouteLimit};

use crate::support::{TestProxy, Upstream, service};

#[tokio::test]
async fn a_service_with_auth_admits_members_and_never_receives_their_tokens() {
    let upstream = Upstream::echo().await;
    let mut closed = service(vec![upstream.replica("a")]);
    closed.auth = true;
    let bed = TestProxy::new(vec![closed]).await;
    for (value, status) in [
        ("Bearer good", 200),
        ("bearer good", 200),
        ("Bearer bad", 403),
        ("Basic good", 401),
        ("Bearer away", 503),
    ] {
        let fields = [("Authorization", value), ("X-Windlass-Identity", "root")];
        let got = bed.request("GET", "/", &fields, "").await;
        assert_eq!(got.status, status, "{value}: {}", got.body);
        if status == 200 {
            assert!(!got.body.contains("authorization") && !got.body.contains("good"), "{}", got.body);
            assert!(got.body.contains("x-windlass-identity: ann.sig\n"), "{}", got.body);
        }
    }
    let got = bed.get("/").await;
    assert_eq!((got.status, got.field("www-authenticate")), (401, "Bearer"));
    let cookie = [("Cookie", "a=1; __Host-windlass-session=good"), ("Authorization", "Basic theirs")];
    let got = bed.request("GET", "/", &cookie, "").await;
    assert!(
        got.body.contains("cookie: a=1\n") && got.body.contains("authorization: Basic theirs"),
        "{}",
        got.body
    );
}

#[tokio::test]
async fn a_service_without_auth_receives_its_own_tokens_but_never_windlass_tokens() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let got = bed.request("GET", "/", &[("Authorization", "Bearer theirs")], "").await;
    assert!(got.body.contains("authorization: Bearer theirs"), "{}", got.body);
    // With any prefix, and also tokens that an operator chose.
    for ours in [
        "Bearer wl_0123",
        "Bearer v2/wlass-gj3su-0123/abc",
        "OAuth2 v2/wlass-gj3su-0123/abc",
        "Bearer chosen",
    ] {
        let got = bed.request("GET", "/", &[("Authorization", ours)], "").await;
        let token = ours.split(' ').nth(1).unwrap();
        assert!(got.status == 200 && !got.body.contains(token), "{ours}: {}", got.body);
    }
}

#[tokio::test]
async fn requests_above_the_rate_limit_get_429_with_retry_after() {
    let upstream = Upstream::echo().await;
    let mut limited = service(vec![upstream.replica("a")]);
    limited.limits =
        vec![RouteLimit { prefix: "/api".into(), key: LimitKey::IpAddress, rps: 0.02, burst: 1 }];
    let bed = TestProxy::new(vec![limited.clone()]).await;
    assert_eq!(bed.get("/api/x").await.status, 200);
    assert_eq!(bed.get("/api/y").await.status, 200);
    let got = bed.get("/x/..//%61pi").await;
    let wait: u64 = got.field("retry-after").parse().unwrap();
    assert!(got.status == 429 && (20..=50).contains(&wait), "{got:?}");
    assert_eq!(bed.get("/other").await.status, 200);
    // New routes with the same limits do not reset them.
    bed.replace(vec![limited]);
    assert_eq!(bed.get("/api").await.status, 429);
}

#[tokio::test]
async fn cors_headers_allow_only_the_configured_origins() {
    let upstream = Upstream::echo().await;
    let mut open = service(vec![upstream.replica("a")]);
    open.auth = true;
    open.cors =
        Some(Cors { origins: vec!["https://ui.example".to_owned()], credentials: true, max_age_s: 600 });
    let bed = TestProxy::new(vec![open]).await;
    let request = |origin: &'static str| {
        let bed = &bed;
        async move {
            let fields = [
                ("Origin", origin),
                ("Access-Control-Request-Method", "POST"),
                ("Access-Control-Request-Headers", "authorization"),
            ];
            bed.request("OPTIONS", "/v1", &fields, "").await
        }
    };
    let got = request("https://ui.example").await;
    assert_eq!(got.status, 204);
    assert_eq!(got.field("access-control-allow-origin"), "https://ui.example");
    assert_eq!(got.field("access-control-allow-headers"), "authorization");
    assert_eq!(got.field("access-control-max-age"), "600");
    assert_eq!(request("https://evil.example").await.status, 403);
    // Responses have the headers too, including refusals.
    let fields = [("Origin", "https://ui.example"), ("Authorization", "Bearer good")];
    let got = bed.request("GET", "/", &fields, "").await;
    assert_eq!((got.status, got.field("access-control-allow-origin")), (200, "https://ui.example"));
    let got = bed.request("GET", "/", &fields[..1], "").await;
    assert_eq!((got.status, got.field("access-control-allow-credentials")), (401, "true"));
}
