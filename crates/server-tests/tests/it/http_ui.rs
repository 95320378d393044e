//! The web UI: its files and their headers, and the origin of services.

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use windlass_server::config::SettingsSource;

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer};

/// Sends a `GET` with these headers.
async fn get(authority: &str, path: &str, headers: &[(&str, &str)]) -> Response<Bytes> {
    let mut request = Request::get(path).header("host", authority);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let stream = TcpStream::connect(authority).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    Response::from_parts(parts, body.collect().await.unwrap().to_bytes())
}

fn header<'a>(response: &'a Response<Bytes>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Address of the entry script, as the page loads it.
fn entry_script(page: &Response<Bytes>) -> String {
    let page = std::str::from_utf8(page.body()).unwrap();
    let start = page.find("/ui/assets/index-").unwrap();
    page[start..].split('"').next().unwrap().to_owned()
}

#[tokio::test]
async fn the_page_of_the_ui_is_served_with_its_policy_for_every_address() {
    let server = ServerFixture::sqlite().start().await;
    let at = &server.authority;
    let page = get(at, "/ui/", &[]).await;
    assert_eq!((page.status().as_u16(), header(&page, "content-type")), (200, "text/html; charset=utf-8"));
    let policy = header(&page, "content-security-policy");
    for part in [
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types svelte-trusted-html windlass",
    ] {
        assert!(policy.contains(part), "{part} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-cache"),
        ("vary", "accept-encoding"),
    ] {
        assert_eq!(header(&page, name), value, "{name}");
    }
    assert!(page.headers().get("access-control-allow-origin").is_none());
    assert_eq!(get(at, "/ui/runs/main/train", &[]).await.body(), page.body());

    let etag = header(&page, "etag").to_owned();
    let again = get(at, "/ui/jobs", &[("if-none-match", &etag)]).await;
    assert_eq!((again.status().as_u16(), again.body().len()), (304, 0));
    assert!(!header(&again, "content-security-policy").is_empty());
    assert_eq!(get(at, "/ui/", &[("if-none-match", "\"other\"")]).await.status(), 200);
    server.stop().await;
}

#[tokio::test]
async fn files_of_the_ui_are_immutable_and_compressed_if_the_client_accepts_it() {
    let server = ServerFixture::sqlite().start().await;
    let at = &server.authority;
    let script = entry_script(&get(at, "/ui/", &[]).await);
    let plain = get(at, &script, &[]).await;
    assert_eq!(header(&plain, "cache-control"), "public, max-age=31536000, immutable");
    assert_eq!(header(&plain, "content-type"), "text/javascript; charset=utf-8");
    assert_eq!(
        (header(&plain, "content-encoding"), header(&plain, "x-content-type-options")),
        ("", "nosniff")
    );
    let mut sizes = vec![plain.body().len()];
    for (accepted, encoding) in [("gzip, deflate", "gzip"), ("gzip, deflate, br", "br")] {
        let packed = get(at, &script, &[("accept-encoding", accepted)]).await;
        assert_eq!(header(&packed, "content-encoding"), encoding);
        sizes.push(packed.body().len());
    }
    assert!(sizes.is_sorted_by(|one, next| one > next), "{sizes:?}");
    let missing = get(at, "/ui/assets/index-of-another-build.js", &[]).await;
    assert_eq!((missing.status().as_u16(), header(&missing, "content-type")), (404, "application/json"));
    server.stop().await;
}

#[tokio::test]
async fn browsers_are_redirected_to_the_ui_and_other_clients_are_not() {
    let server = ServerFixture::sqlite().start().await;
    let browser = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    for path in ["/", "/ui"] {
        let response = get(&server.authority, path, &browser).await;
        assert_eq!((response.status().as_u16(), header(&response, "location")), (307, "/ui/"), "{path}");
    }
    let other = get(&server.authority, "/", &[("accept", "*/*")]).await;
    assert_eq!((other.status().as_u16(), header(&other, "content-type")), (404, "application/json"));
    server.stop().await;
}

#[tokio::test]
async fn a_server_without_the_ui_serves_none_of_it() {
    let fixture = ServerFixture::sqlite();
    let server = TestServer::start_with(SettingsSource { no_ui: Some(true), ..fixture.given() }).await;
    for path in ["/", "/ui", "/ui/", "/ui/runs"] {
        let response = get(&server.authority, path, &[("accept", "text/html")]).await;
        assert_eq!(response.status(), 404, "{path}");
    }
    let service = get(&server.authority, "/proxy/services/main/none/", &[]).await;
    assert_eq!(header(&service, "content-security-policy"), "", "there is no origin to protect");
    server.stop().await;
}

#[tokio::test]
async fn services_do_not_share_the_origin_of_the_ui() {
    let fixture = ServerFixture::sqlite();
    let server = TestServer::start_with(SettingsSource { services_port: Some(0), ..fixture.given() }).await;
    let bearer = format!("Bearer {ADMIN_TOKEN}");
    for path in ["/proxy/services/main/none/", "/proxy/models/main/v1/models"] {
        for authorization in [&[][..], &[("authorization", bearer.as_str())]] {
            let response = get(&server.authority, path, authorization).await;
            let policy = header(&response, "content-security-policy");
            assert!(
                policy.starts_with("sandbox ") && !policy.contains("allow-same-origin"),
                "{path}: {policy}"
            );
        }
    }
    let services = server.services.unwrap().to_string();
    assert_ne!(services, server.authority);
    let response = get(&services, "/proxy/services/main/none/", &[("authorization", &bearer)]).await;
    assert_eq!((response.status().as_u16(), header(&response, "content-security-policy")), (404, ""));
    for path in ["/", "/ui/", "/api/server/get_info", "/healthcheck"] {
        assert_eq!(get(&services, path, &[("accept", "text/html")]).await.status(), 404, "{path}");
    }
    server.stop().await;
}
