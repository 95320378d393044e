//! Login with an identity provider: a real one, which runs beside the test.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use windlass_server::config::{OidcSource, Settings, SettingsSource};

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, TestServer, on_both},
    http_sessions::{Answer, TestBrowser},
};

on_both! {
    an_identity_provider_logs_in_users_by_their_verified_address
    groups_of_the_identity_provider_give_and_take_memberships
}

const PROVIDER_SCRIPT: &str = include_str!("oidc_provider.py");
const START: &str = "/api/session/oidc/start";
const FINISH: &str = "/api/session/oidc/finish";

/// The provider ends when this is dropped.
struct Provider {
    child: Child,
    authority: String,
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Provider {
    async fn start() -> Self {
        tokio::task::spawn_blocking(|| {
            let dir = std::env::var_os("WINDLASS_TEST_OIDC")
                .expect("WINDLASS_TEST_OIDC names no Python environment with a provider; `cargo xtask test` makes one");
            let mut child = Command::new(Path::new(&dir).join("bin/python"))
                .args(["-c", PROVIDER_SCRIPT])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut url = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
            let authority = url.trim().strip_prefix("http://").expect("the provider prints its URL").to_owned();
            Self { child, authority }
        })
        .await
        .unwrap()
    }

    fn source(&self) -> OidcSource {
        OidcSource {
            issuer: Some(format!("http://{}", self.authority)),
            client_id: Some("windlass".into()),
            name: Some("Example".into()),
            ..OidcSource::default()
        }
    }

    /// Status, `Location` and body of a request.
    async fn send(&self, method: &str, path: &str, kind: &str, body: String) -> (u16, String, Vec<u8>) {
        let stream = TcpStream::connect(&self.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("host", &self.authority);
        let request = request.header("content-type", kind).body(Full::new(Bytes::from(body))).unwrap();
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let location = response.headers().get("location").map(|to| to.to_str().unwrap().to_owned());
        let body = response.into_body().collect().await.unwrap().to_bytes().to_vec();
        (status, location.unwrap_or_default(), body)
    }

    async fn set_user(&self, subject: &str, claims: Value) {
        let path = format!("/users/{subject}");
        let (status, _, body) = self.send("PUT", &path, "application/json", claims.to_string()).await;
        assert_eq!(status, 204, "{}", String::from_utf8_lossy(&body));
    }

    /// Logs a user in at the page of the provider. Returns code and state with which it sends the browser back.
    async fn confirm(&self, url: &str, subject: &str) -> (String, String) {
        let path = url.strip_prefix(&format!("http://{}", self.authority)).expect("a page of the provider");
        let form = "application/x-www-form-urlencoded";
        let (status, location, body) = self.send("POST", path, form, format!("sub={subject}")).await;
        assert_eq!(status, 302, "{}", String::from_utf8_lossy(&body));
        assert!(location.contains("/ui/login?"), "{location}");
        (parameter(&location, "code"), parameter(&location, "state"))
    }
}

/// Value of a query parameter that needs no decoding.
fn parameter(url: &str, name: &str) -> String {
    let query = url.split_once('?').unwrap().1;
    let found = query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
    found.unwrap_or_else(|| panic!("no `{name}` in {url}")).to_owned()
}

async fn start_server(fixture: &ServerFixture, oidc: OidcSource) -> TestServer {
    TestServer::start_with(SettingsSource { oidc, ..fixture.given() }).await
}

/// Begins a login; the browser keeps its cookie. Returns the page of the provider.
async fn begin(browser: &mut TestBrowser<'_>) -> String {
    let answer = browser.post(START, json!({})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    browser.cookie = Some(answer.set_cookie[0].split(';').next().unwrap().to_owned());
    answer.body["url"].as_str().unwrap().to_owned()
}

/// Logs a user in. The browser has the cookie of the session if it worked.
async fn log_in(browser: &mut TestBrowser<'_>, provider: &Provider, subject: &str) -> Answer {
    let url = begin(browser).await;
    let (code, state) = provider.confirm(&url, subject).await;
    let answer = browser.post(FINISH, json!({ "code": code, "state": state })).await;
    if answer.status == 200 {
        browser.cookie = Some(answer.set_cookie[0].split(';').next().unwrap().to_owned());
    }
    answer
}

fn message(answer: &Answer) -> &str {
    let detail = &answer.body["detail"];
    // Refusals are a list; those of credentials are not.
    detail["msg"].as_str().or_else(|| detail[0]["msg"].as_str()).unwrap_or_default()
}

async fn add_user(server: &TestServer, name: &str, email: &str) {
    let body = json!({ "username": name, "global_role": "user", "email": email, "active": true });
    let (status, answer) = server.post(ADMIN_TOKEN, "/api/users/create", &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
}

async fn an_identity_provider_logs_in_users_by_their_verified_address(fixture: &ServerFixture) {
    let provider = Provider::start().await;
    // A registered client has a secret, which the exchange must present.
    let port = windlass_testkit::ports::reserve_free_port();
    let redirect = format!("http://127.0.0.1:{port}/ui/login");
    let body = json!({ "redirect_uris": [redirect] }).to_string();
    let (status, _, client) = provider.send("POST", "/oauth2/clients", "application/json", body).await;
    assert_eq!(status, 201);
    let client: Value = serde_json::from_slice(&client).unwrap();
    let secret = fixture.dir.path().join("secret");
    std::fs::write(&secret, format!("{}\n", client["client_secret"].as_str().unwrap())).unwrap();
    let oidc = OidcSource {
        client_id: Some(client["client_id"].as_str().unwrap().to_owned()),
        client_secret_file: Some(secret),
        ..provider.source()
    };
    let given = SettingsSource { oidc, port: Some(port), ..fixture.given() };
    let settings = Settings { pipelines: false, ..Settings::new(given, None).unwrap() };
    let server = TestServer::start_with_settings(settings).await;
    let mut browser = TestBrowser::new(&server);
    let methods = browser.post("/api/session/methods", json!({})).await;
    assert_eq!(methods.body, json!({ "oidc": { "name": "Example" } }));

    add_user(&server, "ada", "Ada@example.org").await;
    provider.set_user("1", json!({ "email": "ada@example.org", "email_verified": true })).await;
    let url = begin(&mut browser).await;
    assert_eq!(parameter(&url, "code_challenge_method"), "S256");
    assert!(parameter(&url, "code_challenge").len() >= 43 && !parameter(&url, "nonce").is_empty(), "{url}");
    let cookie = browser.cookie.clone().unwrap();
    assert!(cookie.starts_with("__Host-windlass-login="), "{cookie}");
    assert!(!cookie.contains(&parameter(&url, "state")), "the cookie can be read: {cookie}");

    let opened = log_in(&mut browser, &provider, "1").await;
    assert_eq!(opened.status, 200, "{}", opened.body);
    assert_eq!(opened.body["user"]["username"], "ada");
    assert!(opened.set_cookie[0].starts_with("__Host-windlass-session=wls_"), "{:?}", opened.set_cookie);
    assert!(opened.set_cookie[1].starts_with("__Host-windlass-login=;"), "{:?}", opened.set_cookie);
    assert_eq!(browser.post("/api/session/get", json!({})).await.status, 200);
    let listed = browser.post("/api/session/list", json!({})).await;
    assert_eq!(listed.body["sessions"].as_array().unwrap().len(), 1);

    // The provider knows the user by the subject, so that the address may change.
    provider.set_user("1", json!({ "email": "lovelace@example.org", "email_verified": true })).await;
    let again = log_in(&mut TestBrowser::new(&server), &provider, "1").await;
    assert_eq!((again.status, &again.body["user"]["username"]), (200, &json!("ada")));
    // Another person with the same address, which the provider did not verify.
    provider.set_user("2", json!({ "email": "ada@example.org", "email_verified": false })).await;
    let other = log_in(&mut TestBrowser::new(&server), &provider, "2").await;
    assert_eq!(other.status, 401, "{}", other.body);
    assert!(message(&other).contains("confirms no e-mail address"), "{}", other.body);
    provider.set_user("3", json!({ "email": "eve@example.org", "email_verified": true })).await;
    let unknown = log_in(&mut TestBrowser::new(&server), &provider, "3").await;
    assert!(
        message(&unknown).contains("`windlass user create NAME --email eve@example.org`"),
        "{}",
        unknown.body
    );

    // The sessions end with the token, which the user sees and revokes.
    let tokens = browser.post("/api/users/tokens/list", json!({})).await;
    assert!(tokens.body.to_string().contains("identity provider"), "{}", tokens.body);
    let revoked = browser.post("/api/users/tokens/revoke", json!({ "names": ["identity provider"] })).await;
    assert_eq!(revoked.status, 200, "{}", revoked.body);
    assert_eq!(browser.post("/api/session/get", json!({})).await.status, 401);
    assert_eq!(log_in(&mut browser, &provider, "1").await.status, 200, "a new login has a new token");

    // Users who may not use the server do not log in.
    let disable = json!({ "username": "ada", "global_role": "user", "active": false }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/users/update", &disable).await.0, 200);
    assert_eq!(browser.post("/api/session/get", json!({})).await.status, 401);
    assert_eq!(message(&log_in(&mut browser, &provider, "1").await), "This user is not active; ask an admin");
    let delete = json!({ "users": ["ada"] }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/users/delete", &delete).await.0, 200);
    assert_eq!(
        message(&log_in(&mut browser, &provider, "1").await),
        "The user of this identity was deleted; ask an admin"
    );
    server.stop().await;
}

#[tokio::test]
async fn an_identity_provider_creates_users_only_if_it_may() {
    let fixture = ServerFixture::sqlite();
    let provider = Provider::start().await;
    let oidc = OidcSource { create_users: Some(true), ..provider.source() };
    let server = start_server(&fixture, oidc).await;
    add_user(&server, "grace-hopper", "other@example.org").await;
    provider
        .set_user(
            "1",
            json!({ "preferred_username": "Grace.Hopper", "email": "g@example.org", "email_verified": true }),
        )
        .await;
    let opened = log_in(&mut TestBrowser::new(&server), &provider, "1").await;
    assert_eq!(opened.status, 200, "{}", opened.body);
    let user = &opened.body["user"];
    assert_eq!((&user["username"], &user["global_role"]), (&json!("grace-hopper-2"), &json!("user")));
    assert_eq!((&user["email"], &opened.body["projects"]), (&json!("g@example.org"), &json!([])));
    let again = log_in(&mut TestBrowser::new(&server), &provider, "1").await;
    assert_eq!(again.body["user"]["username"], "grace-hopper-2");
    // An address that others could claim identifies no user, and is not stored.
    provider.set_user("2", json!({ "preferred_username": "eve", "email": "g@example.org" })).await;
    let eve = log_in(&mut TestBrowser::new(&server), &provider, "2").await;
    assert_eq!((&eve.body["user"]["username"], &eve.body["user"]["email"]), (&json!("eve"), &Value::Null));
    server.stop().await;
}

async fn groups_of_the_identity_provider_give_and_take_memberships(fixture: &ServerFixture) {
    let provider = Provider::start().await;
    let oidc = OidcSource {
        create_users: Some(true),
        groups: Some("ml=research:user,leads=research:manager,ops=main:admin,gone=absent:user".into()),
        groups_claim: Some("roles".into()),
        ..provider.source()
    };
    let server = start_server(fixture, oidc).await;
    let create = json!({ "project_name": "research", "is_public": false }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/projects/create", &create).await.0, 200);
    let projects = async |roles: Value| {
        provider.set_user("1", json!({ "preferred_username": "ada", "roles": roles })).await;
        let mut browser = TestBrowser::new(&server);
        let answer = log_in(&mut browser, &provider, "1").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let projects = answer.body["projects"].as_array().unwrap();
        let text = |project: &Value| {
            format!("{}:{}", project["name"].as_str().unwrap(), project["role"].as_str().unwrap())
        };
        projects.iter().map(text).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(projects(json!(["ml", "gone", "unknown"])).await, "research:user");
    assert_eq!(projects(json!(["ml", "leads"])).await, "research:manager");
    assert_eq!(projects(json!(["ml", "ops"])).await, "main:admin research:user");
    assert_eq!(projects(json!([])).await, "");
    // A member who was added by hand keeps the role, and stays without the group.
    let add = json!({ "members": [{ "username": "ada", "project_role": "manager" }] }).to_string();
    assert_eq!(server.post(ADMIN_TOKEN, "/api/projects/research/add_members", &add).await.0, 200);
    assert_eq!(projects(json!(["ml"])).await, "research:manager");
    assert_eq!(projects(json!([])).await, "research:manager");
    server.stop().await;
}

#[tokio::test]
async fn a_login_belongs_to_the_browser_that_began_it() {
    let fixture = ServerFixture::sqlite();
    let provider = Provider::start().await;
    let server = start_server(&fixture, OidcSource { create_users: Some(true), ..provider.source() }).await;
    provider.set_user("1", json!({ "preferred_username": "ada" })).await;
    let mut victim = TestBrowser::new(&server);
    let mut attacker = TestBrowser::new(&server);
    // The attacker sends the victim the address with which the provider sent the attacker back.
    let url = begin(&mut attacker).await;
    let (code, state) = provider.confirm(&url, "1").await;
    let finish = json!({ "code": code, "state": state });
    let refused = victim.post(FINISH, finish.clone()).await;
    assert_eq!(refused.status, 401, "{}", refused.body);
    assert!(message(&refused).contains("not begun in this browser"), "{}", refused.body);
    // Also if the victim has begun a login.
    begin(&mut victim).await;
    assert_eq!(victim.post(FINISH, finish.clone()).await.status, 401);
    // A page of another origin cannot finish it, nor can a changed cookie.
    let headers =
        [("origin", "https://evil.example"), ("x-windlass-ui", "1"), ("content-type", "application/json")];
    assert_eq!(attacker.send("POST", FINISH, &headers, &finish.to_string()).await.status, 403);
    let cookie = attacker.cookie.clone().unwrap();
    attacker.cookie = Some(format!("{}AAAA", &cookie[..cookie.len() - 4]));
    assert_eq!(attacker.post(FINISH, finish.clone()).await.status, 401);
    attacker.cookie = Some(cookie);
    assert_eq!(attacker.post(FINISH, finish.clone()).await.status, 200);
    // The provider takes a code once.
    let repeated = attacker.post(FINISH, finish).await;
    assert!(message(&repeated).contains("did not confirm this login"), "{}", repeated.body);
    server.stop().await;
}

#[tokio::test]
async fn a_server_without_an_identity_provider_offers_none() {
    let server = ServerFixture::sqlite().start().await;
    let browser = TestBrowser::new(&server);
    assert_eq!(browser.post("/api/session/methods", json!({})).await.body, json!({ "oidc": null }));
    assert_eq!(browser.post(START, json!({})).await.status, 400);
    assert_eq!(browser.post(FINISH, json!({ "code": "x", "state": "y" })).await.status, 400);
    server.stop().await;
}

#[tokio::test]
async fn a_provider_that_does_not_answer_is_reported_without_its_address() {
    let oidc = OidcSource {
        issuer: Some("http://127.0.0.1:1".into()),
        client_id: Some("windlass".into()),
        ..OidcSource::default()
    };
    let server = start_server(&ServerFixture::sqlite(), oidc).await;
    let answer = TestBrowser::new(&server).post(START, json!({})).await;
    assert_eq!(answer.status, 400);
    assert_eq!(
        message(&answer),
        "the identity provider cannot be used; the log of the server has the reason"
    );
    server.stop().await;
}
