//! Sessions of browsers, and the requests that their cookies admit.

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use windlass_server::{config::SettingsSource, db::Unit, params};

use crate::http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both};

on_both! {
    a_token_opens_a_session_whose_cookie_admits_the_web_ui
    a_code_opens_one_session
    a_session_ends_with_its_token_and_its_user
    sessions_are_listed_and_revoked_by_their_user
    fuzz_of_cookies_and_login_codes
    a_web_session_ends_after_the_times_of_the_settings
}

const GET_SESSION: &str = "/api/session/get";

/// Response of a browser's request.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
    pub(crate) set_cookie: Vec<String>,
    clear: Option<String>,
}

/// A browser on this machine.
pub(crate) struct TestBrowser<'a> {
    server: &'a TestServer,
    /// `NAME=VALUE`.
    pub(crate) cookie: Option<String>,
}

impl<'a> TestBrowser<'a> {
    pub(crate) fn new(server: &'a TestServer) -> Self {
        Self { server, cookie: None }
    }

    pub(crate) fn origin(&self) -> String {
        format!("http://{}", self.server.authority)
    }

    /// Sends a request with exactly these headers, besides `Host` and the cookie.
    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("host", &self.server.authority);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(cookie) = &self.cookie {
            request = request.header("cookie", format!("theme=dark; {cookie}"));
        }
        let stream = TcpStream::connect(&self.server.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let text = |value: &hyper::header::HeaderValue| value.to_str().unwrap().to_owned();
        let set_cookie = response.headers().get_all("set-cookie").iter().map(text).collect();
        let clear = response.headers().get("clear-site-data").map(text);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        Answer { status, body: serde_json::from_slice(&body).unwrap_or(Value::Null), set_cookie, clear }
    }

    /// Posts as a page of the web UI does.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        let origin = self.origin();
        let headers =
            [("origin", origin.as_str()), ("x-windlass-ui", "1"), ("content-type", "application/json")];
        self.send("POST", path, &headers, &body.to_string()).await
    }

    /// Opens a session and keeps its cookie.
    pub(crate) async fn log_in(&mut self, body: Value) -> Answer {
        let answer = self.post("/api/session/open", body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        self.cookie = Some(answer.set_cookie[0].split(';').next().unwrap().to_owned());
        answer
    }

    async fn status(&self) -> u16 {
        self.post(GET_SESSION, json!({})).await.status
    }
}

async fn a_token_opens_a_session_whose_cookie_admits_the_web_ui(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut browser = TestBrowser::new(&server);
    assert_eq!(browser.status().await, 401);
    let wrong = browser.post("/api/session/open", json!({ "token": "wrong" })).await;
    assert_eq!(
        (wrong.status, wrong.body["detail"]["msg"].as_str().unwrap()),
        (401, "This token is not valid")
    );
    assert_eq!(browser.post("/api/session/open", json!({})).await.status, 400);

    let opened = browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let cookie = &opened.set_cookie[0];
    assert!(cookie.starts_with("__Host-windlass-session=wls_"), "{cookie}");
    for attribute in ["; Path=/;", "; Secure;", "; HttpOnly;", "; SameSite=Strict;"] {
        assert!(cookie.contains(attribute), "{attribute} in {cookie}");
    }
    assert!(!cookie.contains(ADMIN_TOKEN) && !opened.body.to_string().contains("wls_"));

    let session = browser.post(GET_SESSION, json!({})).await;
    assert_eq!((session.status, &session.body["user"]["username"]), (200, &json!("admin")));
    assert_eq!(session.body["projects"][0]["name"], "main");
    assert_eq!(
        (&session.body["projects"][0]["role"], &session.body["insecure"]),
        (&json!("admin"), &json!(false))
    );
    assert_eq!(session.body["opened_at"], opened.body["opened_at"]);
    // Only the hash of the cookie is stored.
    let stored = server.app.db().query("SELECT hash FROM sessions", vec![]).await.unwrap();
    let secret = browser.cookie.as_ref().unwrap().split_once('=').unwrap().1.to_owned();
    assert_eq!((stored.len(), stored[0].text(0).unwrap().len()), (1, 64));
    assert_ne!(stored[0].text(0).unwrap(), secret);
    // The cookie is no token, and no operation shows it.
    assert_eq!(server.post(&secret, "/api/users/get_my_user", "{}").await.0, 403);
    let me = browser.post("/api/users/get_my_user", json!({})).await;
    assert_eq!((me.status, &me.body["creds"]["token"]), (200, &json!("")));

    let closed = browser.post("/api/session/close", json!({})).await;
    assert_eq!((closed.status, closed.clear.as_deref()), (200, Some("\"cache\", \"storage\"")));
    assert!(closed.set_cookie[0].contains("Max-Age=0"), "{:?}", closed.set_cookie);
    assert_eq!(browser.status().await, 401);
    server.stop().await;
}

/// Each line is a request that another page can cause in a browser with a session.
#[tokio::test]
async fn a_cookie_admits_no_request_of_another_page() {
    let server = ServerFixture::sqlite().start().await;
    let mut browser = TestBrowser::new(&server);
    browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let own = browser.origin();
    let other_port = "http://127.0.0.1:1";
    let (ui, json) = (("x-windlass-ui", "1"), ("content-type", "application/json"));
    let rejected: [(&str, &[(&str, &str)]); 7] = [
        ("a page of another site", &[("origin", "https://evil.example"), ui, json]),
        ("a page on another port of this host", &[("origin", other_port), ui, json]),
        ("a sandboxed page of a service", &[("origin", "null"), ui, json]),
        ("a form", &[("origin", &own), ("content-type", "application/x-www-form-urlencoded")]),
        ("a simple request of a script", &[("origin", &own), ("content-type", "text/plain")]),
        ("a script without the header", &[("origin", &own), json]),
        ("no origin", &[ui, json]),
    ];
    for (what, headers) in rejected {
        let answer = browser.send("POST", GET_SESSION, headers, "{}").await;
        assert_eq!(answer.status, 403, "{what}: {}", answer.body);
        assert!(answer.body["detail"]["msg"].is_string(), "{what}");
    }
    let logs =
        "/api/project/main/logs/stream?run_name=x&job_submission_id=00000000-0000-0000-0000-000000000000";
    for (headers, status) in [
        (&[ui][..], 400),
        (&[ui, ("sec-fetch-site", "same-origin")], 400),
        (&[ui, ("sec-fetch-site", "same-site")], 403),
        (&[ui, ("sec-fetch-site", "cross-site")], 403),
        (&[("sec-fetch-site", "same-origin")], 403),
    ] {
        assert_eq!(browser.send("GET", logs, headers, "").await.status, status, "{headers:?}");
    }
    // A token needs none of it, and takes precedence.
    let bearer = format!("Bearer {ADMIN_TOKEN}");
    let headers = [("authorization", bearer.as_str()), ("origin", "https://evil.example")];
    assert_eq!(browser.send("POST", "/api/runs/list", &headers, "{}").await.status, 200);
    assert_eq!(
        browser.send("POST", "/api/runs/list", &[("authorization", "Bearer wrong")], "{}").await.status,
        403
    );
    // No response permits other origins anything.
    let preflight = [("origin", other_port), ("access-control-request-method", "POST")];
    let answer = browser.send("OPTIONS", GET_SESSION, &preflight, "").await;
    assert_eq!(answer.status, 405);
    server.stop().await;
}

#[tokio::test]
async fn sessions_are_opened_only_by_the_web_ui_of_this_server() {
    let server = ServerFixture::sqlite().start().await;
    let browser = TestBrowser::new(&server);
    let (ui, json) = (("x-windlass-ui", "1"), ("content-type", "application/json"));
    let body = json!({ "token": ADMIN_TOKEN }).to_string();
    let own = browser.origin();
    let rejected: [&[(&str, &str)]; 4] = [
        &[("origin", "https://evil.example"), ui, json],
        &[("origin", "null"), ui, json],
        &[ui, json],
        &[("origin", &own), json],
    ];
    for headers in rejected {
        let answer = browser.send("POST", "/api/session/open", headers, &body).await;
        assert_eq!((answer.status, answer.set_cookie.len()), (403, 0), "{headers:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_login_without_encryption_from_another_machine_needs_a_setting() {
    let fixture = ServerFixture::sqlite();
    let (ui, json) = (("x-windlass-ui", "1"), ("content-type", "application/json"));
    let body = json!({ "token": ADMIN_TOKEN }).to_string();
    // As a browser sends it that opened `http://windlass.example`.
    let headers = [("host", "windlass.example"), ("origin", "http://windlass.example"), ui, json];
    let send = async |server: &TestServer| {
        let mut request = Request::post("/api/session/open");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let (status, body) = server.send(request.body(Full::new(Bytes::from(body.clone()))).unwrap()).await;
        (status, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let server = fixture.start().await;
    let (status, answer) = send(&server).await;
    assert_eq!(status, 403);
    assert!(answer["detail"]["msg"].as_str().unwrap().contains("`--insecure-web-login`"), "{answer}");
    server.stop().await;
    let server =
        TestServer::start_with(SettingsSource { insecure_web_login: Some(true), ..fixture.given() }).await;
    let (status, answer) = send(&server).await;
    assert_eq!((status, &answer["insecure"]), (200, &json!(true)));
    server.stop().await;
}

#[tokio::test]
async fn a_server_without_the_ui_opens_no_sessions() {
    let fixture = ServerFixture::sqlite();
    let server = fixture.start().await;
    let mut browser = TestBrowser::new(&server);
    browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let cookie = browser.cookie.clone();
    server.stop().await;
    let server = TestServer::start_with(SettingsSource { no_ui: Some(true), ..fixture.given() }).await;
    let browser = TestBrowser { server: &server, cookie };
    assert_eq!(browser.status().await, 401);
    assert_eq!(browser.post("/api/session/open", json!({ "token": ADMIN_TOKEN })).await.status, 403);
    server.refused(ADMIN_TOKEN, "/api/session/code", json!({}), "error").await;
    server.stop().await;
}

async fn a_code_opens_one_session(ground: &ServerFixture) {
    let server = ground.start().await;
    let mut browser = TestBrowser::new(&server);
    let code = server.admin("/api/session/code", json!({})).await;
    let text = code["code"].as_str().unwrap();
    assert!(
        text.len() >= 32 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)),
        "{text}"
    );
    let opened = browser.log_in(json!({ "code": text })).await;
    assert_eq!(opened.body["user"]["username"], "admin");
    let again = TestBrowser::new(&server).post("/api/session/open", json!({ "code": text })).await;
    assert_eq!(again.status, 401);
    assert!(again.body["detail"]["msg"].as_str().unwrap().contains("`windlass ui`"), "{}", again.body);
    // A session opens no other one.
    assert_eq!(browser.post("/api/session/code", json!({})).await.status, 403);
    // An old code has no effect.
    let code = server.admin("/api/session/code", json!({})).await;
    server
        .app
        .db()
        .write(windlass_server::db::Unit::new().exec("UPDATE login_codes SET expires_at = 1", vec![]))
        .await
        .unwrap()
        .done()
        .unwrap();
    let late = TestBrowser::new(&server).post("/api/session/open", json!({ "code": code["code"] })).await;
    assert_eq!(late.status, 401);
    server.stop().await;
}

async fn a_session_ends_with_its_token_and_its_user(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let expire = async |column: &str| {
        let sql = format!("UPDATE sessions SET {column} = 1");
        server
            .app
            .db()
            .write(windlass_server::db::Unit::new().exec(sql, vec![]))
            .await
            .unwrap()
            .done()
            .unwrap();
        server.app.access().forget();
    };
    let mut browser = TestBrowser::new(&server);
    for column in ["last_seen_at", "expires_at"] {
        browser.log_in(json!({ "token": mira })).await;
        assert_eq!(browser.status().await, 200);
        expire(column).await;
        assert_eq!(browser.status().await, 401, "{column}");
    }
    let created =
        server.ok(&mira, "/api/users/tokens/create", json!({ "name": "laptop", "scope": "read" })).await;
    browser.log_in(json!({ "token": created["token"] })).await;
    assert_eq!(browser.post("/api/runs/list", json!({})).await.status, 200);
    let beyond = browser.post("/api/projects/create", json!({ "project_name": "lab" })).await;
    assert_eq!(beyond.status, 403, "the session has the scope of its token");
    server.ok(&mira, "/api/users/tokens/revoke", json!({ "names": ["laptop"] })).await;
    assert_eq!(browser.status().await, 401);

    let only_services =
        server.ok(&mira, "/api/users/tokens/create", json!({ "name": "s", "scope": "services" })).await;
    let answer = browser.post("/api/session/open", json!({ "token": only_services["token"] })).await;
    assert_eq!(answer.status, 401);

    browser.log_in(json!({ "token": mira })).await;
    let disabled = json!({ "username": "mira", "global_role": "user", "active": false });
    server.admin("/api/users/update", disabled).await;
    assert_eq!(browser.status().await, 401);
    server.stop().await;
}

async fn sessions_are_listed_and_revoked_by_their_user(ground: &ServerFixture) {
    let server = ground.start().await;
    let mira = server.user("mira").await;
    let (mut one, mut two, mut admin) =
        (TestBrowser::new(&server), TestBrowser::new(&server), TestBrowser::new(&server));
    one.log_in(json!({ "token": mira })).await;
    two.log_in(json!({ "token": mira })).await;
    admin.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let listed = one.post("/api/session/list", json!({})).await.body;
    let listed = listed["sessions"].as_array().unwrap();
    assert_eq!(listed.len(), 2, "only those of the caller: {listed:?}");
    assert_eq!(listed.iter().filter(|session| session["current"] == true).count(), 1);
    assert_eq!(listed[0]["address"], "127.0.0.1");
    let other = listed.iter().find(|session| session["current"] == false).unwrap()["id"].clone();
    let foreign = admin.post("/api/session/list", json!({})).await.body["sessions"][0]["id"].clone();
    let revoked = one.post("/api/session/revoke", json!({ "ids": [other, foreign] })).await;
    assert_eq!(revoked.status, 200);
    assert_eq!((one.status().await, two.status().await, admin.status().await), (200, 401, 200));
    server.stop().await;
}

#[tokio::test]
async fn events_have_details_for_browsers_and_more_filters() {
    let server = ServerFixture::sqlite().start().await;
    let mut browser = TestBrowser::new(&server);
    browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    server.admin("/api/project/main/secrets/create_or_update", json!({ "name": "key", "value": "v" })).await;
    let list =
        async |body: Value| browser.post("/api/events/list", body).await.body.as_array().unwrap().clone();
    let found = list(json!({ "entities": ["secret"], "kinds": ["note"], "text": "SECRET cre" })).await;
    assert_eq!(
        (found.len(), &found[0]["entity"], &found[0]["reason"]),
        (1, &json!("secret"), &json!("created"))
    );
    assert!(
        found[0]["seq"].is_i64() && found[0]["to"].is_null() && found[0]["is_final"] == false,
        "{found:?}"
    );
    for body in [
        json!({ "entities": ["run"] }),
        json!({ "reasons": ["nothing"] }),
        json!({ "kinds": ["refused"] }),
        json!({ "until": "2001-01-01T00:00:00Z" }),
        json!({ "since": "2101-01-01T00:00:00Z" }),
    ] {
        assert!(list(body.clone()).await.is_empty(), "{body}");
    }
    let plain = server.admin("/api/events/list", json!({})).await;
    assert!(plain[0].get("seq").is_none(), "other clients see what they know: {plain}");
    server.stop().await;
}

#[tokio::test]
async fn a_run_has_its_row_for_browsers() {
    let server = ServerFixture::sqlite().start().await;
    let mut browser = TestBrowser::new(&server);
    browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let spec = json!({ "run_name": "train", "configuration": { "type": "task", "commands": ["true"] } });
    server
        .admin("/api/project/main/runs/apply", json!({ "plan": { "run_spec": spec }, "force": false }))
        .await;
    let run = browser.post("/api/project/main/runs/get", json!({ "run_name": "train" })).await.body;
    assert_eq!((&run["row"]["name"], &run["row"]["id"]), (&json!("train"), &run["id"]));
    assert!(run["as_of"].is_i64());
    let plain = server.admin("/api/project/main/runs/get", json!({ "run_name": "train" })).await;
    assert!(plain.get("row").is_none());
    server.stop().await;
}

/// A service that does not exist is 404 for members of the project and 401 for callers that are not known.
#[tokio::test]
async fn a_session_opens_services_only_from_the_web_ui() {
    let fixture = ServerFixture::sqlite();
    let server = TestServer::start_with(SettingsSource { services_port: Some(0), ..fixture.given() }).await;
    let mut browser = TestBrowser::new(&server);
    browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    let service = "/proxy/services/main/none/";
    for (site, status) in [("same-origin", 404), ("none", 404), ("same-site", 401), ("cross-site", 401)] {
        let answer = browser.send("GET", service, &[("sec-fetch-site", site)], "").await;
        assert_eq!(answer.status, status, "{site}");
    }
    assert_eq!(browser.send("GET", service, &[], "").await.status, 401, "an old browser does not tell");
    let cookie = browser.cookie.clone().unwrap();
    let request = Request::get(service)
        .header("host", &server.authority)
        .header("sec-fetch-site", "same-origin")
        .header("cookie", cookie)
        .body(Full::new(Bytes::new()))
        .unwrap();
    let stream = TcpStream::connect(server.services.unwrap()).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    assert_eq!(
        sender.send_request(request).await.unwrap().status(),
        401,
        "the port of services takes no cookie"
    );
    server.stop().await;
}

async fn a_web_session_ends_after_the_times_of_the_settings(ground: &ServerFixture) {
    let mut given = ground.given();
    *given.limits.named("web_session_idle").unwrap() = Some("1h".to_owned());
    *given.limits.named("web_session_life").unwrap() = Some("2d".to_owned());
    let server = TestServer::start_with(given).await;
    let mut browser = TestBrowser::new(&server);
    let opened = browser.log_in(json!({ "token": ADMIN_TOKEN })).await;
    assert!(opened.set_cookie[0].contains("; Max-Age=172800"), "{:?}", opened.set_cookie);
    let sql = "SELECT expires_at - opened_at FROM sessions";
    assert_eq!(server.app.db().query(sql, vec![]).await.unwrap()[0].int(0).unwrap(), 172_800_000_000);
    let idle = async |browser: &TestBrowser<'_>, minutes: i64| {
        let aged = "UPDATE sessions SET last_seen_at = now_us() - $1";
        let aged = Unit::new().exec(aged, params![minutes * 60_000_000]);
        server.app.db().write(aged).await.unwrap().done().unwrap();
        // The server does not read the row of a session at every request.
        server.app.access().forget();
        browser.status().await
    };
    // A request is recorded some time after it was answered, so the session that ends comes first.
    assert_eq!(idle(&browser, 61).await, 401);
    assert_eq!(idle(&browser, 59).await, 200);
    server.stop().await;
}

/// Headers and bodies of a stranger's browser.
async fn fuzz_of_cookies_and_login_codes(ground: &ServerFixture) {
    let server =
        TestServer::start_with(SettingsSource { insecure_web_login: Some(true), ..ground.given() }).await;
    let pieces = [
        "__Host-windlass-session=",
        "windlass-insecure-session=",
        "wls_",
        "wl_",
        ";",
        "=",
        " ",
        ",",
        "\"",
        "%00",
        "\t",
        "\u{e9}",
        "A",
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "__Host-windlass-login=",
        "../",
        "'",
        "\\",
    ];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(random >> 33).unwrap() % below
    };
    for _ in 0..windlass_testkit::fuzz_cases() / 3 {
        let count = draw(12);
        let text: String = (0..count).map(|_| pieces[draw(pieces.len())]).collect();
        let mut browser = TestBrowser::new(&server);
        browser.cookie = Some(text.clone());
        let answer = browser.post(GET_SESSION, json!({})).await;
        assert!([400, 401].contains(&answer.status), "cookie {text:?}: {} {}", answer.status, answer.body);
        for field in ["token", "code"] {
            let answer = browser.post("/api/session/open", json!({ field: text })).await;
            // The rate of wrong tokens is limited.
            let is_refused = [400, 401, 403, 422, 429].contains(&answer.status);
            assert!(
                is_refused && answer.set_cookie.is_empty(),
                "{field} {text:?}: {} {}",
                answer.status,
                answer.body
            );
        }
    }
    server.stop().await;
}
