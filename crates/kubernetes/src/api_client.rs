//! Client of one API server: JSON requests over reused connections, and connections that are upgraded.

use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, StatusCode, Uri,
    body::{Bytes, Incoming},
    client::conn::http1::{SendRequest, handshake},
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use windlass_dial::Stream;
use windlass_model::error_chain::format_chain;

use crate::{
    kubeconfig::ClusterAccess,
    objects::{List, Status},
    settings::SettingsError,
    tls,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time from a request to the end of its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections that are kept, and for how long: balancers drop idle ones without notice.
const IDLE_MAX: usize = 16;
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of an answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Number of items that are requested at once.
const PAGE_ITEMS: usize = 500;
const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;

type Sender = SendRequest<Full<Bytes>>;

/// Failure of a request.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// The API server answered with an error.
    #[error("{message}")]
    Refused { code: u16, message: String },
    /// No answer, or no usable one.
    #[error("{message}")]
    Connection { message: String },
    #[error("failed to log in: {message}")]
    Login { message: String },
}

impl ApiError {
    pub(crate) fn is_not_found(&self) -> bool {
        self.code() == Some(StatusCode::NOT_FOUND.as_u16())
    }

    pub(crate) fn is_conflict(&self) -> bool {
        self.code() == Some(StatusCode::CONFLICT.as_u16())
    }

    pub(crate) fn is_forbidden(&self) -> bool {
        self.code() == Some(StatusCode::FORBIDDEN.as_u16())
    }

    /// Returns whether the same request may succeed later.
    pub(crate) fn is_temporary(&self) -> bool {
        match self {
            Self::Refused { code, .. } => *code >= 500 || matches!(*code, 401 | 408 | 409 | 410 | 429),
            Self::Connection { .. } | Self::Login { .. } => true,
        }
    }

    fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            Self::Connection { .. } | Self::Login { .. } => None,
        }
    }

    pub(crate) fn connection(message: impl Into<String>) -> Self {
        Self::Connection { message: message.into() }
    }

    /// Reads the error of an answer.
    pub(crate) fn from_answer(code: StatusCode, body: &[u8]) -> Self {
        let status: Status = serde_json::from_slice(body).unwrap_or_default();
        let message = if status.message.is_empty() {
            let text = String::from_utf8_lossy(body);
            format!("the API server answered {code}: {}", text.trim())
        } else {
            status.message
        };
        Self::Refused { code: code.as_u16(), message }
    }
}

/// One API server.
pub(crate) struct ApiClient {
    access: ClusterAccess,
    host: String,
    port: u16,
    /// Path before `/api`, without a slash at its end.
    base_path: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    idle: Mutex<Vec<(Instant, Sender)>>,
}

impl std::fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ApiClient").field(&self.access).finish()
    }
}

impl ApiClient {
    pub(crate) fn new(access: ClusterAccess) -> Result<Self, SettingsError> {
        let invalid = |message: &str| SettingsError::Kubeconfig {
            message: format!("invalid `server` value `{}`: {message}", access.server),
        };
        let uri: Uri = access.server.parse().map_err(|_| invalid("expected a URL"))?;
        let has_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            Some(_) | None => return Err(invalid("expected `https://…`")),
        };
        let host = uri.host().ok_or_else(|| invalid("it has no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().unwrap_or(if has_tls { HTTPS_PORT } else { HTTP_PORT });
        let base_path = uri.path().trim_end_matches('/').to_owned();
        let tls = if has_tls {
            let failed = |message: String| SettingsError::Tls { cluster: access.name.clone(), message };
            let name = access.tls_name.clone().unwrap_or_else(|| host.clone());
            let name = ServerName::try_from(name).map_err(|error| failed(error.to_string()))?;
            Some((tls::connector(&access).map_err(failed)?, name))
        } else {
            None
        };
        Ok(Self { access, host, port, base_path, tls, idle: Mutex::default() })
    }

    /// Name of the context.
    pub(crate) fn name(&self) -> &str {
        &self.access.name
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.access.namespace
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn create<T: DeserializeOwned>(
        &self,
        path: &str,
        object: &Value,
    ) -> Result<T, ApiError> {
        self.call(Method::POST, path, Some(object)).await
    }

    pub(crate) async fn delete(&self, path: &str, options: &Value) -> Result<(), ApiError> {
        self.call::<Value>(Method::DELETE, path, Some(options)).await.map(drop)
    }

    /// Lists all items, page by page. `query` is empty or ends with `&`.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &str,
    ) -> Result<Vec<T>, ApiError> {
        let mut items = Vec::new();
        let mut page = String::new();
        loop {
            let path = format!("{path}?{query}limit={PAGE_ITEMS}{page}");
            let List { items: more, metadata } = self.get::<List<T>>(&path).await?;
            items.extend(more);
            match metadata.next.filter(|next| !next.is_empty()) {
                Some(next) => page = format!("&continue={next}"),
                None => return Ok(items),
            }
        }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T, ApiError> {
        let body = body.map(ToString::to_string).unwrap_or_default();
        let (code, answer) = self.exchange(&method, path, &body).await?;
        if !code.is_success() {
            return Err(ApiError::from_answer(code, &answer));
        }
        serde_json::from_slice(&answer)
            .map_err(|error| ApiError::connection(format!("unexpected answer of the API server: {error}")))
    }

    /// Sends a request. A login that is refused is renewed once, and a request on a connection that the server has
    /// closed meanwhile is repeated on another one: every request of this backend may be repeated.
    async fn exchange(
        &self,
        method: &Method,
        path: &str,
        body: &str,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let mut renewed = false;
        loop {
            let token = self.token().await?;
            let answer = self.send(method, path, body, token.as_deref()).await?;
            if answer.0 != StatusCode::UNAUTHORIZED || renewed {
                return Ok(answer);
            }
            renewed = true;
            if !self.access.login.reject(token.as_deref()).await {
                return Ok(answer);
            }
        }
    }

    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: &str,
        token: Option<&str>,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let exchanged = timeout(REQUEST_TIMEOUT, async {
            while let Some(mut sender) = self.idle_connection() {
                if sender.ready().await.is_ok()
                    && let Ok(answer) = sender.send_request(self.request(method, path, body, token)?).await
                {
                    return self.read(sender, answer).await;
                }
            }
            let stream = self.connect().await?;
            let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(exchange_error)?;
            // The caller that waits for an answer receives the connection's errors.
            tokio::spawn(connection);
            let request = self.request(method, path, body, token)?;
            let answer = sender.send_request(request).await.map_err(exchange_error)?;
            self.read(sender, answer).await
        });
        let message = || format!("no answer of the API server within {} s", REQUEST_TIMEOUT.as_secs());
        exchanged.await.unwrap_or_else(|_| Err(ApiError::connection(message())))
    }

    async fn read(
        &self,
        sender: Sender,
        answer: hyper::Response<Incoming>,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let code = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| {
            ApiError::connection(format!("failed to read the answer of the API server: {error}"))
        })?;
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push((Instant::now(), sender));
        }
        Ok((code, body.to_bytes()))
    }

    fn idle_connection(&self) -> Option<Sender> {
        let mut idle = self.idle.lock();
        idle.retain(|(since, sender)| since.elapsed() < IDLE_TIMEOUT && !sender.is_closed());
        idle.pop().map(|(_, sender)| sender)
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: &str,
        token: Option<&str>,
    ) -> Result<Request<Full<Bytes>>, ApiError> {
        let built = Request::builder()
            .method(method)
            .uri(self.target(path))
            .header(header::HOST, self.authority())
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_owned())));
        let mut request = built.map_err(|error| ApiError::connection(error.to_string()))?;
        if let Some(token) = token {
            request.headers_mut().insert(header::AUTHORIZATION, bearer(token)?);
        }
        Ok(request)
    }

    /// Path of a request, after the one of the server's URL.
    pub(crate) fn target(&self, path: &str) -> String {
        format!("{}{path}", self.base_path)
    }

    /// Returns `host:port`.
    pub(crate) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    pub(crate) async fn token(&self) -> Result<Option<String>, ApiError> {
        self.access.login.token().await.map_err(|message| ApiError::Login { message })
    }

    /// Opens a separate connection.
    pub(crate) async fn connect(&self) -> Result<Stream, ApiError> {
        let failed = |message: String| ApiError::connection(message);
        let stream = windlass_dial::connect(&self.host, self.port, CONNECT_TIMEOUT).await;
        let stream = stream.map_err(|error| failed(format_chain(&error)))?;
        let Some((tls, name)) = &self.tls else { return Ok(Box::new(stream)) };
        let agreed = timeout(CONNECT_TIMEOUT, tls.connect(name.clone(), stream)).await;
        let agreed =
            agreed.map_err(|_| failed(format!("TLS handshake with {} timed out", self.authority())))?;
        let stream = agreed
            .map_err(|error| failed(format!("TLS handshake with {} failed: {error}", self.authority())))?;
        Ok(Box::new(stream))
    }
}

pub(crate) fn bearer(token: &str) -> Result<HeaderValue, ApiError> {
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| ApiError::Login {
        message: "the token contains characters that no header may have".into(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn exchange_error(error: hyper::Error) -> ApiError {
    ApiError::connection(format!("request to the API server failed: {}", format_chain(&error)))
}
