//! Certificates by ACME (RFC 8555), validated over HTTP (HTTP-01).
//!
//! No crate is used: the existing ones add a second HTTP client and a certificate library, while the required part of
//! the protocol fits into this file. Keys and orders belong to the caller, so several gateways can share them.

mod der;
mod jws;
pub(crate) mod validity;

pub use der::self_signed;

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request, Response, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use parking_lot::RwLock;
use serde::Deserialize;
use serde_json::{Value, json};

pub use jws::{AccountKey, KeyError};

use crate::{connect::Stream, tls::CertificatePem};

/// Path prefix at which a certificate authority requests the key authorization.
pub const CHALLENGE_PATH: &str = "/.well-known/acme-challenge/";
/// Maximum size of a response of the authority.
const RESPONSE_MAX: usize = 1024 * 1024;
/// Maximum number of polls of an order, and the interval between them.
const POLLS_MAX: u32 = 60;
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of attempts with a new nonce: a nonce may have expired, and the response then contains a new one.
const NONCE_ATTEMPTS_MAX: u32 = 5;

/// Key authorizations to serve, by token.
#[derive(Debug, Default)]
pub struct Challenges(RwLock<HashMap<String, String>>);

impl Challenges {
    pub fn insert(&self, token: String, proof: String) {
        self.0.write().insert(token, proof);
    }

    pub fn remove(&self, token: &str) {
        self.0.write().remove(token);
    }

    /// Returns the response for a path, if it is that of a pending challenge.
    pub(crate) fn find(&self, path: &str) -> Option<String> {
        self.0.read().get(path.strip_prefix(CHALLENGE_PATH)?).cloned()
    }
}

/// Opens connections to the authority. Name resolution, trust and proxies are up to the caller.
pub trait Dialer: Send + Sync + 'static {
    fn dial<'a>(&'a self, https: bool, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<Stream>>;
}

/// Failure to obtain a certificate.
#[derive(Debug, thiserror::Error)]
pub enum AcmeError {
    #[error("invalid URL of the certificate authority: `{url}`")]
    Url { url: String },
    #[error("failed to connect to the certificate authority at `{url}`")]
    Dial {
        url: String,
        #[source]
        source: io::Error,
    },
    #[error("request to the certificate authority at `{url}` failed")]
    Http {
        url: String,
        #[source]
        source: hyper::Error,
    },
    #[error("failed to read the response of the certificate authority at `{url}`")]
    Body {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("failed to parse the response of the certificate authority at `{url}`")]
    Json {
        url: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("the certificate authority rejected the request: {detail} ({kind}, status {status})")]
    Refused { status: u16, kind: String, detail: String },
    #[error("the certificate authority returned no {what}")]
    Missing { what: &'static str },
    #[error("the certificate authority could not verify `{name}`: {detail}")]
    Unproven { name: String, detail: String },
    #[error("timed out waiting for the certificate of `{name}`")]
    Late { name: String },
    #[error(transparent)]
    Key(#[from] KeyError),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Directory {
    new_nonce: String,
    new_account: String,
    new_order: String,
}

#[derive(Deserialize)]
struct Order {
    status: String,
    #[serde(default)]
    authorizations: Vec<String>,
    finalize: String,
    certificate: Option<String>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Authorization {
    status: String,
    identifier: Identifier,
    challenges: Vec<Challenge>,
}

#[derive(Deserialize)]
struct Identifier {
    value: String,
}

#[derive(Deserialize)]
struct Challenge {
    #[serde(rename = "type")]
    kind: String,
    url: String,
    #[serde(default)]
    token: String,
    error: Option<Value>,
}

/// Account at an authority.
pub struct Account {
    dialer: Arc<dyn Dialer>,
    directory: Directory,
    key: AccountKey,
    url: Option<String>,
    nonce: Option<String>,
    poll_interval: Duration,
}

struct AcmeResponse {
    status: StatusCode,
    location: Option<String>,
    body: Bytes,
}

impl Account {
    /// Opens the account of this key; creates it if necessary.
    pub async fn open(
        dialer: Arc<dyn Dialer>,
        directory: &str,
        key: AccountKey,
        contact: Option<&str>,
    ) -> Result<Self, AcmeError> {
        let request = |url: &str| build_request(Method::GET, url, Bytes::new());
        let answer =
            read_body(directory, send_request(&*dialer, directory, request(directory)?).await?).await?;
        let directory: Directory = parse_json(directory, &answer.1)?;
        let new_account = directory.new_account.clone();
        let mut account =
            Self { dialer, directory, key, url: None, nonce: None, poll_interval: POLL_INTERVAL };
        let contact: Vec<String> = contact.iter().map(|mail| format!("mailto:{mail}")).collect();
        let payload = json!({ "termsOfServiceAgreed": true, "contact": contact });
        let answer = account.post(&new_account, Some(&payload)).await?;
        account.url = Some(answer.location.ok_or(AcmeError::Missing { what: "account URL" })?);
        Ok(account)
    }

    /// Sets the interval between two polls of an order.
    #[must_use]
    pub const fn with_poll_interval(mut self, pause: Duration) -> Self {
        self.poll_interval = pause;
        self
    }

    pub const fn key(&self) -> &AccountKey {
        &self.key
    }

    /// Obtains a certificate for these names; the first becomes its name. `challenges` must be served on port 80 of all
    /// of them.
    pub async fn order_certificate(
        &mut self,
        names: &[String],
        challenges: &Challenges,
    ) -> Result<CertificatePem, AcmeError> {
        let name = names.first().cloned().unwrap_or_default();
        let identifiers: Vec<Value> =
            names.iter().map(|name| json!({ "type": "dns", "value": name })).collect();
        let new_order = self.directory.new_order.clone();
        let answer = self.post(&new_order, Some(&json!({ "identifiers": identifiers }))).await?;
        let order_url = answer.location.ok_or(AcmeError::Missing { what: "order URL" })?;
        let order: Order = parse_json(&order_url, &answer.body)?;
        for url in &order.authorizations {
            self.complete_authorization(url, challenges).await?;
        }
        let key = der::new_key().map_err(|_| KeyError)?;
        let csr = der::certificate_request(&key, names).map_err(|_| KeyError)?;
        self.post(&order.finalize, Some(&json!({ "csr": jws::base64url(&csr) }))).await?;
        let url = self.await_order(&order_url, &name).await?;
        let chain = self.post(&url, None).await?.body.to_vec();
        Ok(CertificatePem { name, chain, key: key_pem(&key) })
    }

    /// Proves control of a name.
    async fn complete_authorization(&mut self, url: &str, challenges: &Challenges) -> Result<(), AcmeError> {
        let authorization: Authorization = parse_json(url, &self.post(url, None).await?.body)?;
        if authorization.status == "valid" {
            return Ok(());
        }
        let challenge = authorization.challenges.into_iter().find(|challenge| challenge.kind == "http-01");
        let challenge = challenge.ok_or(AcmeError::Missing { what: "HTTP challenge" })?;
        challenges.insert(challenge.token.clone(), self.key.key_authorization(&challenge.token));
        let proven = self.await_validation(url, &challenge.url, &authorization.identifier.value).await;
        challenges.remove(&challenge.token);
        proven
    }

    async fn await_validation(&mut self, url: &str, challenge: &str, name: &str) -> Result<(), AcmeError> {
        self.post(challenge, Some(&json!({}))).await?;
        for _ in 0..POLLS_MAX {
            let seen: Authorization = parse_json(url, &self.post(url, None).await?.body)?;
            match seen.status.as_str() {
                "valid" => return Ok(()),
                "pending" | "processing" => tokio::time::sleep(self.poll_interval).await,
                other => {
                    let error = seen.challenges.into_iter().find_map(|challenge| challenge.error);
                    let detail = error.as_ref().and_then(|error| error["detail"].as_str()).unwrap_or(other);
                    return Err(AcmeError::Unproven { name: name.to_owned(), detail: detail.to_owned() });
                }
            }
        }
        Err(AcmeError::Late { name: name.to_owned() })
    }

    /// Waits for an order and returns the URL of the certificate.
    async fn await_order(&mut self, url: &str, name: &str) -> Result<String, AcmeError> {
        for _ in 0..POLLS_MAX {
            let order: Order = parse_json(url, &self.post(url, None).await?.body)?;
            match order.status.as_str() {
                "valid" => return order.certificate.ok_or(AcmeError::Missing { what: "certificate" }),
                "pending" | "ready" | "processing" => tokio::time::sleep(self.poll_interval).await,
                other => {
                    let detail =
                        order.error.as_ref().and_then(|error| error["detail"].as_str()).unwrap_or(other);
                    return Err(AcmeError::Unproven { name: name.to_owned(), detail: detail.to_owned() });
                }
            }
        }
        Err(AcmeError::Late { name: name.to_owned() })
    }

    /// Sends a signed request; without a payload it is a read.
    async fn post(&mut self, url: &str, payload: Option<&Value>) -> Result<AcmeResponse, AcmeError> {
        for _ in 0..NONCE_ATTEMPTS_MAX {
            let nonce = match self.nonce.take() {
                Some(nonce) => nonce,
                None => self.new_nonce().await?,
            };
            let body = self.key.sign(url, &nonce, self.url.as_deref(), payload)?;
            let response =
                send_request(&*self.dialer, url, build_request(Method::POST, url, Bytes::from(body))?)
                    .await?;
            self.nonce = header_text(&response, "replay-nonce");
            let location = header_text(&response, "location");
            let (status, body) = read_body(url, response).await?;
            if status.is_success() {
                return Ok(AcmeResponse { status, location, body });
            }
            let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
            let kind = problem["type"].as_str().unwrap_or("no type");
            if !kind.ends_with(":badNonce") {
                let detail = problem["detail"].as_str().unwrap_or("no details").to_owned();
                return Err(AcmeError::Refused { status: status.as_u16(), kind: kind.to_owned(), detail });
            }
        }
        Err(AcmeError::Missing { what: "nonce that it accepts" })
    }

    async fn new_nonce(&self) -> Result<String, AcmeError> {
        let url = &self.directory.new_nonce;
        let response =
            send_request(&*self.dialer, url, build_request(Method::HEAD, url, Bytes::new())?).await?;
        header_text(&response, "replay-nonce").ok_or(AcmeError::Missing { what: "nonce" })
    }
}

impl std::fmt::Debug for AcmeResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({})", self.status)
    }
}

fn header_text(response: &Response<hyper::body::Incoming>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(ToOwned::to_owned)
}

fn build_request(method: Method, url: &str, body: Bytes) -> Result<Request<Full<Bytes>>, AcmeError> {
    let wrong = || AcmeError::Url { url: url.to_owned() };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.authority().ok_or_else(wrong)?.to_string();
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, host)
        .header(header::USER_AGENT, concat!("windlass/", env!("CARGO_PKG_VERSION")))
        .header(header::CONTENT_TYPE, "application/jose+json")
        .body(Full::new(body))
        .map_err(|_| wrong())
}

async fn send_request(
    dialer: &dyn Dialer,
    url: &str,
    request: Request<Full<Bytes>>,
) -> Result<Response<hyper::body::Incoming>, AcmeError> {
    let wrong = || AcmeError::Url { url: url.to_owned() };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let https = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
    let stream = dialer.dial(https, uri.host().ok_or_else(wrong)?, port).await;
    let stream = stream.map_err(|source| AcmeError::Dial { url: url.to_owned(), source })?;
    let http = |source| AcmeError::Http { url: url.to_owned(), source };
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
    // Ends with the response, because the sender is not used elsewhere.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(http)
}

async fn read_body(
    url: &str,
    response: Response<hyper::body::Incoming>,
) -> Result<(StatusCode, Bytes), AcmeError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_MAX).collect().await;
    let body = body.map_err(|source| AcmeError::Body { url: url.to_owned(), source })?;
    Ok((status, body.to_bytes()))
}

fn parse_json<'a, T: Deserialize<'a>>(url: &str, body: &'a [u8]) -> Result<T, AcmeError> {
    serde_json::from_slice(body).map_err(|source| AcmeError::Json { url: url.to_owned(), source })
}

fn key_pem(pkcs8: &[u8]) -> Vec<u8> {
    let text = STANDARD.encode(pkcs8);
    let mut pem = "-----BEGIN PRIVATE KEY-----\n".to_owned();
    for line in text.as_bytes().chunks(64) {
        pem.push_str(&String::from_utf8_lossy(line));
        pem.push('\n');
    }
    pem.push_str("-----END PRIVATE KEY-----\n");
    pem.into_bytes()
}
