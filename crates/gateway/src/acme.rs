//! Certificates by ACME (RFC 8555), validated over HTTP (HTTP-01).
//!
//! `instant-acme` speaks the protocol, over connections that the caller opens. Keys and challenges belong to the caller,
//! so several gateways can share them.

use std::{collections::HashMap, io, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, Uri,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use instant_acme::{
    AuthorizationStatus, BodyWrapper, BytesResponse, ChallengeType, HttpClient, Identifier, Key, NewOrder,
    Order, OrderStatus, RetryPolicy,
};
use parking_lot::RwLock;
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;

use crate::{connect::Stream, tls::CertificatePem};

/// Path prefix at which a certificate authority requests the key authorization.
pub const CHALLENGE_PATH: &str = "/.well-known/acme-challenge/";
/// Maximum size of a response of the authority.
const RESPONSE_MAX: usize = 1024 * 1024;
/// Interval between two polls of an order, and the time after which it is given up.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const POLL_TIMEOUT: Duration = Duration::from_secs(120);

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
    #[error("failed to obtain a certificate from `{directory}`")]
    Protocol {
        directory: String,
        #[source]
        source: instant_acme::Error,
    },
    #[error("the certificate authority returned no HTTP challenge for `{name}`")]
    NoHttpChallenge { name: String },
    #[error("the certificate authority could not verify `{name}`: {detail}")]
    Unproven { name: String, detail: String },
    #[error("failed to create the key of a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("failed to create or load the key of the account")]
    AccountKey(#[source] instant_acme::Error),
}

/// Failed request to the authority.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("invalid URL of the certificate authority: `{url}`")]
    Url { url: Uri },
    #[error("failed to connect to the certificate authority at `{url}`")]
    Dial {
        url: Uri,
        #[source]
        source: io::Error,
    },
    #[error("request to the certificate authority at `{url}` failed")]
    Http {
        url: Uri,
        #[source]
        source: hyper::Error,
    },
    #[error("failed to read the response of the certificate authority at `{url}`")]
    Body {
        url: Uri,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Key of an ACME account, as PKCS #8.
pub struct AccountKey(Vec<u8>);

impl std::fmt::Debug for AccountKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AccountKey(…)")
    }
}

impl AccountKey {
    pub fn generate() -> Result<Self, AcmeError> {
        let (_, pkcs8) = Key::generate_pkcs8().map_err(AcmeError::AccountKey)?;
        Ok(Self(pkcs8.secret_pkcs8_der().to_vec()))
    }

    pub fn load(pkcs8: &[u8]) -> Result<Self, AcmeError> {
        let key = Self(pkcs8.to_vec());
        key.parse().map_err(AcmeError::AccountKey)?;
        Ok(key)
    }

    /// Returns the secret key, to be stored and loaded again.
    pub fn pkcs8(&self) -> &[u8] {
        &self.0
    }

    fn parse(&self) -> Result<(Key, rustls::pki_types::PrivateKeyDer<'static>), instant_acme::Error> {
        let der = PrivatePkcs8KeyDer::from(self.0.clone());
        Ok((Key::from_pkcs8_der(der.clone_key())?, der.into()))
    }
}

/// Account at an authority.
pub struct Account {
    account: instant_acme::Account,
    directory: String,
    poll_interval: Duration,
}

impl Account {
    /// Opens the account of this key; creates it if necessary.
    pub async fn open(
        dialer: Arc<dyn Dialer>,
        directory: &str,
        key: &AccountKey,
        contact: Option<&str>,
    ) -> Result<Self, AcmeError> {
        let key = key.parse().map_err(AcmeError::AccountKey)?;
        let failed = |source| AcmeError::Protocol { directory: directory.to_owned(), source };
        let builder = instant_acme::Account::builder_with_http(Box::new(AuthorityClient(dialer)));
        let (account, _) = builder.create_from_key(key, directory.to_owned()).await.map_err(failed)?;
        if let Some(contact) = contact {
            account.update_contacts(&[&format!("mailto:{contact}")]).await.map_err(failed)?;
        }
        Ok(Self { account, directory: directory.to_owned(), poll_interval: POLL_INTERVAL })
    }

    /// Sets the interval between two polls of an order.
    #[must_use]
    pub const fn with_poll_interval(mut self, pause: Duration) -> Self {
        self.poll_interval = pause;
        self
    }

    /// Obtains a certificate for these names; the first becomes its name. `challenges` must be served on port 80 of all
    /// of them.
    pub async fn order_certificate(
        &self,
        names: &[String],
        challenges: &Challenges,
    ) -> Result<CertificatePem, AcmeError> {
        let identifiers: Vec<Identifier> = names.iter().cloned().map(Identifier::Dns).collect();
        let mut order = self.account.new_order(&NewOrder::new(&identifiers)).await.map_err(self.failed())?;
        let mut served = ServedChallenges { challenges, tokens: Vec::new() };
        self.answer_challenges(&mut order, &mut served).await?;
        let ready = order.poll_ready(&self.polls()).await;
        if !matches!(ready, Ok(OrderStatus::Ready)) {
            self.explain_refusal(&mut order).await?;
            ready.map_err(self.failed())?;
        }
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = DistinguishedName::new();
        let request = params.serialize_request(&key)?;
        order.finalize_csr(request.der()).await.map_err(self.failed())?;
        let chain = order.poll_certificate(&self.polls()).await.map_err(self.failed())?;
        Ok(CertificatePem {
            name: names.first().cloned().unwrap_or_default(),
            chain: chain.into_bytes(),
            key: key.serialize_pem().into_bytes(),
        })
    }

    /// Serves a key authorization for each name that is not validated yet, and asks the authority to request it.
    async fn answer_challenges(
        &self,
        order: &mut Order,
        served: &mut ServedChallenges<'_>,
    ) -> Result<(), AcmeError> {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization.map_err(self.failed())?;
            if authorization.status == AuthorizationStatus::Valid {
                continue;
            }
            let name = authorization.identifier().to_string();
            let mut challenge =
                authorization.challenge(ChallengeType::Http01).ok_or(AcmeError::NoHttpChallenge { name })?;
            served.add(&challenge.token, challenge.key_authorization().as_str());
            challenge.set_ready().await.map_err(self.failed())?;
        }
        Ok(())
    }

    /// Returns an error that names the first name that could not be validated, and why.
    async fn explain_refusal(&self, order: &mut Order) -> Result<(), AcmeError> {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization.map_err(self.failed())?;
            let state = authorization.refresh().await.map_err(self.failed())?;
            if state.status == AuthorizationStatus::Invalid {
                let problem = state.challenges.iter().find_map(|challenge| challenge.error.as_ref());
                let detail = problem.and_then(|problem| problem.detail.clone());
                return Err(AcmeError::Unproven {
                    name: state.identifier().to_string(),
                    detail: detail.unwrap_or_else(|| "it gave no reason".to_owned()),
                });
            }
        }
        Ok(())
    }

    const fn polls(&self) -> RetryPolicy {
        RetryPolicy::new().initial_delay(self.poll_interval).backoff(1.0).timeout(POLL_TIMEOUT)
    }

    fn failed(&self) -> impl Fn(instant_acme::Error) -> AcmeError + '_ {
        |source| AcmeError::Protocol { directory: self.directory.clone(), source }
    }
}

/// Challenges of one order; they are no longer served when it ends.
struct ServedChallenges<'a> {
    challenges: &'a Challenges,
    tokens: Vec<String>,
}

impl ServedChallenges<'_> {
    fn add(&mut self, token: &str, proof: &str) {
        self.challenges.insert(token.to_owned(), proof.to_owned());
        self.tokens.push(token.to_owned());
    }
}

impl Drop for ServedChallenges<'_> {
    fn drop(&mut self) {
        self.tokens.iter().for_each(|token| self.challenges.remove(token));
    }
}

/// HTTP client of an account: one connection for each request.
struct AuthorityClient(Arc<dyn Dialer>);

impl HttpClient for AuthorityClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, instant_acme::Error>> + Send>> {
        let dialer = Arc::clone(&self.0);
        Box::pin(async move {
            let response = send_request(&*dialer, request).await;
            Ok(BytesResponse::from(response.map_err(|error| instant_acme::Error::Other(Box::new(error)))?))
        })
    }
}

async fn send_request(
    dialer: &dyn Dialer,
    mut request: Request<BodyWrapper<Bytes>>,
) -> Result<Response<Full<Bytes>>, RequestError> {
    let url = request.uri().clone();
    let wrong = || RequestError::Url { url: url.clone() };
    let authority = url.authority().ok_or_else(wrong)?;
    let https = url.scheme_str() == Some("https");
    let port = authority.port_u16().unwrap_or(if https { 443 } else { 80 });
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| wrong())?;
    request.headers_mut().insert(header::HOST, host);
    let agent = HeaderValue::from_static(concat!("windlass/", env!("CARGO_PKG_VERSION")));
    request.headers_mut().insert(header::USER_AGENT, agent);
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse().map_err(|_| wrong())?;

    let stream = dialer.dial(https, authority.host(), port).await;
    let stream = stream.map_err(|source| RequestError::Dial { url: url.clone(), source })?;
    let failed = |source| RequestError::Http { url: url.clone(), source };
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    // Ends with the response, because the sender is not used elsewhere.
    tokio::spawn(connection);
    let (parts, body) = sender.send_request(request).await.map_err(failed)?.into_parts();
    let body = Limited::new(body, RESPONSE_MAX).collect().await;
    let body = body.map_err(|source| RequestError::Body { url: url.clone(), source })?;
    Ok(Response::from_parts(parts, Full::new(body.to_bytes())))
}
