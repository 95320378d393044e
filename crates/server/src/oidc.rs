//! Client of an OpenID Connect provider: its description, and identities in exchange for codes.
//!
//! This is the authorization code flow with PKCE (RFC 7636) and nothing else. An identity counts if its token is signed
//! with a key of the provider, and names the provider, this server and the login.
//!
//! The provider is named by the operator of the server, as are the endpoints in its description: they are connected to
//! without restriction, but without following redirects.

mod id_token;

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, header};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};
use windlass_api::queue_client::percent_encode;
use windlass_dial::{DialError, ServerUrl, ServerUrlError};
use windlass_model::time::Timestamp;

use self::id_token::{Expected, Key};
pub(crate) use self::id_token::{TokenError, VerifiedIdentity};
use crate::config::OidcSettings;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
const RESPONSE_BYTES_MAX: usize = 1 << 20;
/// Time for which the description and the keys of the provider are kept. Keys that are missing are asked for at once.
const METADATA_TTL: Duration = Duration::from_secs(600);
/// Claims beside the subject: name and address of the user, and with many providers the groups.
const SCOPE: &str = "openid profile email";
/// Path of the description below the issuer.
const DESCRIPTION_PATH: &str = "/.well-known/openid-configuration";
const BASIC: &str = "client_secret_basic";

#[derive(Debug, thiserror::Error)]
pub(crate) enum OidcError {
    #[error("invalid URL of the identity provider")]
    Url(#[from] ServerUrlError),
    #[error("failed to connect to the identity provider")]
    Dial(#[from] DialError),
    #[error("the connection to the identity provider failed")]
    Http(#[from] hyper::Error),
    #[error("failed to read the response of the identity provider")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("failed to parse the response of the identity provider")]
    Json(#[from] serde_json::Error),
    #[error("the identity provider did not respond in time")]
    Timeout,
    #[error("the identity provider answered {path} with {status}")]
    Status { path: String, status: StatusCode },
    #[error("invalid request to the identity provider")]
    Request(#[from] hyper::http::Error),
    #[error(
        "the identity provider describes itself as `{issuer}`; set `oidc_issuer` to exactly that if it is right"
    )]
    OtherIssuer { issuer: String },
    #[error("failed to generate random bytes")]
    Random(#[from] getrandom::Error),
    #[error("the identity provider refused the code: {0}")]
    Exchange(String),
    #[error("the identity provider returned no valid identity")]
    Token(#[from] TokenError),
}

/// Description of a provider.
#[derive(Clone, Debug, Deserialize)]
struct Description {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    /// `None`: only `client_secret_basic`.
    #[serde(default)]
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
}

/// A provider with its present keys.
#[derive(Clone, Debug)]
struct Provider {
    description: Description,
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

/// Response to a code.
#[derive(Deserialize)]
struct Tokens {
    id_token: String,
}

/// Refusal of a code.
#[derive(Deserialize)]
struct Refusal {
    error: String,
}

/// Secrets of one login, between its two halves.
#[derive(Serialize, Deserialize)]
pub(crate) struct PendingLogin {
    pub(crate) state: String,
    nonce: String,
    verifier: String,
    redirect: String,
}

impl PendingLogin {
    fn new(redirect: String) -> Result<Self, getrandom::Error> {
        Ok(Self { state: draw()?, nonce: draw()?, verifier: draw()?, redirect })
    }

    /// Hash of the verifier, which the provider compares with the verifier of the exchange.
    fn challenge(&self) -> String {
        URL_SAFE_NO_PAD.encode(Sha256::digest(self.verifier.as_bytes()))
    }
}

/// 256 random bits as text.
fn draw() -> Result<String, getrandom::Error> {
    let mut bits = [0_u8; 32];
    getrandom::fill(&mut bits)?;
    Ok(URL_SAFE_NO_PAD.encode(bits))
}

/// Client of the provider in the settings.
#[derive(Debug)]
pub(crate) struct OidcClient {
    settings: OidcSettings,
    provider: Mutex<Option<(Instant, Provider)>>,
}

impl OidcClient {
    pub(crate) fn new(settings: OidcSettings) -> Self {
        Self { settings, provider: Mutex::default() }
    }

    pub(crate) fn settings(&self) -> &OidcSettings {
        &self.settings
    }

    /// Page of the provider for a new login that returns to `redirect`.
    pub(crate) async fn start(&self, redirect: String) -> Result<(String, PendingLogin), OidcError> {
        let endpoint = self.provider(false).await?.description.authorization_endpoint;
        let login = PendingLogin::new(redirect)?;
        let challenge = login.challenge();
        let query = encode_form(&[
            ("response_type", "code"),
            ("client_id", self.settings.client_id.as_str()),
            ("redirect_uri", login.redirect.as_str()),
            ("scope", SCOPE),
            ("state", login.state.as_str()),
            ("nonce", login.nonce.as_str()),
            ("code_challenge", challenge.as_str()),
            ("code_challenge_method", "S256"),
        ]);
        let separator = if endpoint.contains('?') { '&' } else { '?' };
        Ok((format!("{endpoint}{separator}{query}"), login))
    }

    /// Exchanges a code for the identity of its user.
    pub(crate) async fn finish(
        &self,
        login: PendingLogin,
        code: &str,
        now: Timestamp,
    ) -> Result<VerifiedIdentity, OidcError> {
        let provider = self.provider(false).await?;
        let token = self.exchange(&provider.description, &login, code).await?;
        let expected = Expected {
            issuer: &provider.description.issuer,
            client_id: &self.settings.client_id,
            nonce: &login.nonce,
            groups_claim: &self.settings.groups_claim,
            now,
        };
        match id_token::verify(&token, &provider.keys, &expected) {
            // The provider may have new keys.
            Err(TokenError::UnknownKey | TokenError::Signature) => {
                let keys = self.provider(true).await?.keys;
                Ok(id_token::verify(&token, &keys, &expected)?)
            }
            verified => Ok(verified?),
        }
    }

    /// Returns the ID token for a code.
    async fn exchange(
        &self,
        at: &Description,
        login: &PendingLogin,
        code: &str,
    ) -> Result<String, OidcError> {
        let settings = &self.settings;
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", login.redirect.as_str()),
            ("code_verifier", login.verifier.as_str()),
        ];
        let methods = at.token_endpoint_auth_methods_supported.as_deref();
        let has_basic = methods.is_none_or(|methods| methods.iter().any(|method| method == BASIC));
        let mut authorization = None;
        match &settings.client_secret {
            Some(secret) if has_basic => {
                let pair = format!("{}:{}", percent_encode(&settings.client_id), percent_encode(secret));
                authorization =
                    Some(format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair)));
            }
            Some(secret) => {
                form.extend([("client_id", settings.client_id.as_str()), ("client_secret", secret.as_str())])
            }
            None => form.push(("client_id", settings.client_id.as_str())),
        }
        let (status, body) = send(&at.token_endpoint, authorization, Some(encode_form(&form))).await?;
        if status.is_success() {
            return Ok(serde_json::from_slice::<Tokens>(&body)?.id_token);
        }
        let refusal = serde_json::from_slice(&body).map(|Refusal { error }| error);
        Err(OidcError::Exchange(refusal.unwrap_or_else(|_| status.to_string())))
    }

    async fn provider(&self, is_fresh: bool) -> Result<Provider, OidcError> {
        let kept = self.provider.lock().clone();
        if let Some((_, provider)) = kept.filter(|(at, _)| !is_fresh && at.elapsed() < METADATA_TTL) {
            return Ok(provider);
        }
        let issuer = &self.settings.issuer;
        let description: Description =
            read(&format!("{}{DESCRIPTION_PATH}", issuer.trim_end_matches('/'))).await?;
        if description.issuer != *issuer {
            return Err(OidcError::OtherIssuer { issuer: description.issuer });
        }
        let set: KeySet = read(&description.jwks_uri).await?;
        let provider = Provider { description, keys: set.keys.iter().filter_map(Key::parse).collect() };
        *self.provider.lock() = Some((Instant::now(), provider.clone()));
        Ok(provider)
    }
}

/// Reads a JSON document.
async fn read<T: serde::de::DeserializeOwned>(url: &str) -> Result<T, OidcError> {
    let (status, body) = send(url, None, None).await?;
    if !status.is_success() {
        return Err(OidcError::Status { path: url.to_owned(), status });
    }
    Ok(serde_json::from_slice(&body)?)
}

/// Sends a GET request over a new connection, or a POST request with a form.
async fn send(
    url: &str,
    authorization: Option<String>,
    form: Option<String>,
) -> Result<(StatusCode, Bytes), OidcError> {
    let authority = url.find("://").map_or(0, |at| at + 3);
    let path = url[authority..].find(['/', '?']).map_or(url.len(), |at| authority + at);
    let (origin, path) = url.split_at(path);
    let server = ServerUrl::parse(origin, None)?;
    let target = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let method = if form.is_some() { Method::POST } else { Method::GET };
    let mut request = Request::builder()
        .method(method)
        .uri(target)
        .header(header::HOST, &server.authority)
        .header(header::ACCEPT, "application/json")
        .header(header::USER_AGENT, concat!("windlass/", env!("CARGO_PKG_VERSION")));
    if form.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
    }
    if let Some(authorization) = authorization {
        request = request.header(header::AUTHORIZATION, authorization);
    }
    let request = request.body(Full::new(Bytes::from(form.unwrap_or_default())))?;
    let stream = server.endpoint.connect(CONNECT_TIMEOUT).await?;
    let exchange = async {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await?;
        // Ends when the body is read or dropped.
        tokio::spawn(connection);
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
        Ok((status, body.map_err(OidcError::Body)?.to_bytes()))
    };
    timeout(RESPONSE_TIMEOUT, exchange).await.map_err(|_| OidcError::Timeout)?
}

fn encode_form(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> =
        pairs.iter().map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
    pairs.join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_challenge_is_the_hash_of_the_verifier() {
        // Appendix B of RFC 7636.
        let login = PendingLogin {
            verifier: "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk".into(),
            ..PendingLogin::new("http://localhost/ui/login".into()).unwrap()
        };
        assert_eq!(login.challenge(), "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM");
        assert_eq!(login.state.len(), 43);
        assert_ne!(login.state, login.nonce);
    }

    #[test]
    fn values_of_forms_are_encoded() {
        assert_eq!(
            encode_form(&[("a", "x y&z"), ("b", "http://h/ü")]),
            "a=x%20y%26z&b=http%3A%2F%2Fh%2F%C3%BC"
        );
    }
}
