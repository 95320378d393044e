//! Certificates from a test authority, which checks everything that the protocol requires of a client.

use std::{
    collections::HashSet,
    io::{self, Write as _},
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use futures_util::future::BoxFuture;
use http_body_util::BodyExt as _;
use hyper::{Method, Request, body::Incoming};
use parking_lot::Mutex;
use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpStream;
use windlass_gateway::{
    Stream,
    acme::{Account, AccountKey, AcmeError, Challenges, Dialer},
    tls::{self, CertificatePem, Certificates},
};
use windlass_testkit::{TempDir, temp_dir};

use crate::{
    listener::tls_connect,
    support::{
        self, TestProxy, TestSettings, Upstream, UpstreamResponse, default_settings, service, text_response,
    },
};

/// Dialer for plain connections on this machine.
struct PlainDialer;

impl Dialer for PlainDialer {
    fn dial<'a>(&'a self, https: bool, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<Stream>> {
        assert!(!https);
        let address = format!("{host}:{port}");
        Box::pin(async move { Ok(Box::new(TcpStream::connect(address).await?) as Stream) })
    }
}

#[derive(Default)]
struct AuthorityState {
    nonces: HashSet<String>,
    drawn: u64,
    refused: u64,
    key: Option<Value>,
    contact: Value,
    names: Vec<String>,
    authorization: &'static str,
    detail: String,
    chain: Option<String>,
}

/// Test authority.
pub(crate) struct Authority {
    pub(crate) folder: TempDir,
    /// Address at which it requests key authorizations, for any name.
    gateway: SocketAddr,
    book: Mutex<AuthorityState>,
}

fn openssl(arguments: &[&str], folder: &Path, input: &[u8]) -> Vec<u8> {
    let mut child = Command::new("openssl")
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("openssl is needed: apt-get install openssl");
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn decode(text: &Value) -> Vec<u8> {
    URL_SAFE_NO_PAD.decode(text.as_str().unwrap()).unwrap()
}

impl Authority {
    pub(crate) fn new(name: &str, gateway: SocketAddr) -> Arc<Self> {
        let folder = temp_dir(name).unwrap();
        let made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let named = ["-days", "2", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"];
        openssl(&[made.as_slice(), &named].concat(), folder.path(), b"");
        let book = Mutex::new(AuthorityState { authorization: "pending", ..AuthorityState::default() });
        Arc::new(Self { folder, gateway, book })
    }

    pub(crate) async fn serve(self: &Arc<Self>) -> Upstream {
        let this = Arc::clone(self);
        Upstream::http(move |request| {
            let this = Arc::clone(&this);
            async move { this.answer(request).await }
        })
        .await
    }

    async fn answer(&self, request: Request<Incoming>) -> UpstreamResponse {
        let host = request.headers()["host"].to_str().unwrap().to_owned();
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let base = format!("http://{host}");
        let mut response = if method == Method::POST {
            match self.verify(&format!("{base}{path}"), &body) {
                Ok(payload) => self.act(&base, &path, payload).await,
                Err(problem) => refuse(problem),
            }
        } else {
            let directory = json!({ "newNonce": format!("{base}/nonce"), "newAccount": format!("{base}/account"),
                "newOrder": format!("{base}/order") });
            text_response(directory.to_string())
        };
        let mut book = self.book.lock();
        book.drawn += 1;
        let nonce = format!("nonce-{}", book.drawn);
        book.nonces.insert(nonce.clone());
        response.headers_mut().insert("replay-nonce", nonce.parse().unwrap());
        response
    }

    /// Returns the payload of a request, if its signature, nonce and URL are valid.
    fn verify(&self, url: &str, body: &[u8]) -> Result<Value, Value> {
        let mut book = self.book.lock();
        let document: Value = serde_json::from_slice(body).unwrap();
        let protected: Value = serde_json::from_slice(&decode(&document["protected"])).unwrap();
        assert_eq!((protected["alg"].as_str(), protected["url"].as_str()), (Some("ES256"), Some(url)));
        let known = book.nonces.remove(protected["nonce"].as_str().unwrap());
        // Occasionally rejects a valid nonce, as real authorities do.
        book.refused += u64::from(book.drawn % 4 == 3);
        if !known || book.drawn % 4 == 3 {
            return Err(json!({ "type": "urn:ietf:params:acme:error:badNonce", "detail": "too old" }));
        }
        if url.ends_with("/account") {
            book.key = Some(protected["jwk"].clone());
        } else {
            assert!(protected["kid"].as_str().unwrap().ends_with("/account/1"));
        }
        let key = book.key.clone().unwrap();
        let point = [vec![4], decode(&key["x"]), decode(&key["y"])].concat();
        let signed =
            format!("{}.{}", document["protected"].as_str().unwrap(), document["payload"].as_str().unwrap());
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)
            .verify(signed.as_bytes(), &decode(&document["signature"]))
            .expect("a good signature");
        Ok(serde_json::from_slice(&decode(&document["payload"])).unwrap_or(Value::Null))
    }

    async fn act(&self, base: &str, path: &str, payload: Value) -> UpstreamResponse {
        match path {
            "/account" => {
                assert_eq!(payload["termsOfServiceAgreed"], json!(true));
                with_location(json!({ "status": "valid" }), &format!("{base}/account/1"))
            }
            "/account/1" => {
                self.book.lock().contact = payload["contact"].clone();
                text_response(json!({ "status": "valid" }).to_string())
            }
            "/order" => {
                let names = payload["identifiers"].as_array().unwrap();
                let mut book = self.book.lock();
                book.names = names.iter().map(|name| name["value"].as_str().unwrap().to_owned()).collect();
                (book.authorization, book.chain) = ("pending", None);
                drop(book);
                with_location(self.order(base), &format!("{base}/order/1"))
            }
            "/order/1" => text_response(self.order(base).to_string()),
            "/authorization" => text_response(self.authorization(base).to_string()),
            "/challenge" => {
                self.fetch_proof().await;
                let challenge = json!({ "type": "http-01", "status": "processing", "token": "tok-1",
                    "url": format!("{base}/challenge") });
                text_response(challenge.to_string())
            }
            "/finalize" => {
                assert_eq!(self.book.lock().authorization, "valid");
                let chain = self.sign(&decode(&payload["csr"]));
                self.book.lock().chain = Some(chain);
                text_response(self.order(base).to_string())
            }
            "/certificate" => text_response(self.book.lock().chain.clone().unwrap()),
            other => panic!("asked for {other}"),
        }
    }

    fn order(&self, base: &str) -> Value {
        let book = self.book.lock();
        let status = match book.authorization {
            _ if book.chain.is_some() => "valid",
            "valid" => "ready",
            other => other,
        };
        json!({ "status": status, "authorizations": [format!("{base}/authorization")],
            "finalize": format!("{base}/finalize"), "certificate": format!("{base}/certificate") })
    }

    fn authorization(&self, base: &str) -> Value {
        let book = self.book.lock();
        json!({ "status": book.authorization, "identifier": { "type": "dns", "value": book.names[0] },
            "challenges": [
                { "type": "dns-01", "status": "pending", "url": format!("{base}/dns"), "token": "x" },
                { "type": "http-01", "status": book.authorization, "url": format!("{base}/challenge"),
                  "token": "tok-1", "error": { "detail": book.detail } },
            ] })
    }

    /// Requests the key authorization as a real authority would.
    async fn fetch_proof(&self) {
        let (name, key) = {
            let book = self.book.lock();
            (book.names[0].clone(), book.key.clone().unwrap())
        };
        let request = format!(
            "GET /.well-known/acme-challenge/tok-1 HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
        );
        let got = support::TestResponse::parse(&support::raw(self.gateway, request).await);
        let canonical = format!(r#"{{"crv":"P-256","kty":"EC","x":{},"y":{}}}"#, key["x"], key["y"]);
        let expect = format!("tok-1.{}", URL_SAFE_NO_PAD.encode(Sha256::digest(canonical)));
        let mut book = self.book.lock();
        book.authorization = if got.body == expect { "valid" } else { "invalid" };
        book.detail = format!("found status {}", got.status);
    }

    fn sign(&self, csr: &[u8]) -> String {
        std::fs::write(self.folder.path().join("csr.der"), csr).unwrap();
        openssl(&["req", "-inform", "DER", "-in", "csr.der", "-verify", "-noout"], self.folder.path(), b"");
        let sign = ["x509", "-req", "-inform", "DER", "-in", "csr.der", "-CA", "ca.pem", "-CAkey", "ca.key"];
        let rest = ["-CAcreateserial", "-days", "1", "-copy_extensions", "copy"];
        let leaf = openssl(&[sign.as_slice(), &rest].concat(), self.folder.path(), b"");
        let root = std::fs::read_to_string(self.folder.path().join("ca.pem")).unwrap();
        format!("{}{root}", String::from_utf8(leaf).unwrap())
    }
}

fn refuse(problem: Value) -> UpstreamResponse {
    let mut response = text_response(problem.to_string());
    *response.status_mut() = hyper::StatusCode::BAD_REQUEST;
    response
}

fn with_location(body: Value, location: &str) -> UpstreamResponse {
    let mut response = text_response(body.to_string());
    *response.status_mut() = hyper::StatusCode::CREATED;
    response.headers_mut().insert("location", location.parse().unwrap());
    response
}

async fn open(authority: &Upstream) -> Account {
    let directory = format!("http://{}/directory", authority.address);
    let key = AccountKey::load(AccountKey::generate().unwrap().pkcs8()).unwrap();
    let account =
        Account::open(Arc::new(PlainDialer), &directory, &key, Some("ops@example.org")).await.unwrap();
    account.with_poll_interval(Duration::from_millis(10))
}

#[tokio::test]
async fn an_acme_certificate_is_ordered_validated_and_served() {
    let challenges = Arc::new(Challenges::default());
    let upstream = Upstream::echo().await;
    let mut secure = service(vec![upstream.replica("a")]);
    secure.https = true;
    let plain = TestSettings { challenges: Some(Arc::clone(&challenges)), ..default_settings() };
    let bed = TestProxy::with(plain, vec![secure.clone()]).await;
    let authority = Authority::new("good", bed.address);
    let serving = authority.serve().await;
    let account = open(&serving).await;
    assert_eq!(authority.book.lock().contact, json!(["mailto:ops@example.org"]));
    let pem = account.order_certificate(&["llm.test".to_owned()], &challenges).await.unwrap();
    assert!(authority.book.lock().refused > 0, "no nonce was ever refused");
    // The challenge is removed again, and the path belongs to the service.
    assert_eq!(bed.get("/.well-known/acme-challenge/tok-1").await.status, 308);

    let certificates = Arc::new(Certificates::default());
    certificates.put(&pem).unwrap();
    let tls = Some(tls::server_config(Arc::clone(&certificates)).unwrap());
    let listener = TestProxy::with(TestSettings { tls, ..default_settings() }, vec![secure]).await;
    let root = std::fs::read(authority.folder.path().join("ca.pem")).unwrap();
    let trust = CertificatePem { name: String::new(), chain: root, key: vec![] };
    tls_connect(&listener, "llm.test", &trust, b"http/1.1").await.unwrap();
}

#[tokio::test]
async fn a_failed_domain_validation_reports_the_reason() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let authority = Authority::new("bad", bed.address);
    let serving = authority.serve().await;
    let account = open(&serving).await;
    // The key authorization is stored where it is not served.
    let error =
        account.order_certificate(&["llm.test".to_owned()], &Challenges::default()).await.unwrap_err();
    let AcmeError::Unproven { name, detail } = error else { panic!("{error}") };
    assert_eq!((name.as_str(), detail.as_str()), ("llm.test", "found status 200"));
}
