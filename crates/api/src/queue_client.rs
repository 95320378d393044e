//! Client for the container queue, used by dispatchers, executors and commands.

use std::{pin::Pin, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{Request, body::Bytes};
use serde_json::Value;
use tokio::time::timeout;
use windlass_dial::{DialError, ServerUrl, ServerUrlError, Stream};

use crate::http_pool::{CONNECT_TIMEOUT, HttpPool, HttpPoolError, ServerAddress};

/// Maximum number of bytes that are kept of one stream of one attempt.
pub const STREAM_BYTES_MAX: u64 = 64 * 1024 * 1024;
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error(transparent)]
    ServerUrl(#[from] ServerUrlError),
    #[error(transparent)]
    Dial(#[from] DialError),
    /// It is unknown whether the request was performed.
    #[error("request to the server failed")]
    Exchange(#[source] hyper::Error),
    #[error("no response from the server")]
    TimedOut,
    #[error("failed to build the request")]
    Build(#[source] hyper::http::Error),
    #[error("failed to decode the response")]
    Decode(#[source] serde_json::Error),
    #[error("{why}")]
    Refused { status: u16, why: String },
}

impl From<HttpPoolError> for QueueError {
    fn from(error: HttpPoolError) -> Self {
        match error {
            HttpPoolError::Dial(error) => Self::Dial(error),
            HttpPoolError::Exchange(error) => Self::Exchange(error),
        }
    }
}

impl QueueError {
    /// Returns the status of the server's response, if there was one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::ServerUrl(_)
            | Self::Dial(_)
            | Self::Exchange(_)
            | Self::TimedOut
            | Self::Build(_)
            | Self::Decode(_) => None,
        }
    }

    /// True if the server refused the request and would refuse it again.
    pub fn is_refusal(&self) -> bool {
        self.status().is_some_and(|status| (400..500).contains(&status) && status != 408 && status != 429)
    }
}

/// Status and body of a response.
pub type TransportFuture<'a> = Pin<Box<dyn Future<Output = Result<(u16, Bytes), QueueError>> + Send + 'a>>;

/// Transport to a server other than a network connection from this machine.
pub trait QueueTransport: Send + Sync {
    fn send(&self, request: Request<Full<Bytes>>) -> TransportFuture<'_>;
}

/// Transport to the server.
#[derive(Clone)]
enum ServerTransport {
    Http { place: ServerUrl, wire: Arc<HttpPool> },
    Custom(Arc<dyn QueueTransport>),
}

/// Client for the queue of one server, with a token.
#[derive(Clone)]
pub struct QueueHttpClient {
    transport: ServerTransport,
    authority: String,
    token: String,
}

impl std::fmt::Debug for QueueHttpClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl QueueHttpClient {
    /// Client for a server whose certificate, if it uses TLS, is trusted by this machine.
    pub fn new(url: &str, token: &str) -> Result<Self, QueueError> {
        Self::with_certificate(url, token, None)
    }

    /// `certificate` identifies an `https` server that the machine does not trust by itself.
    pub fn with_certificate(url: &str, token: &str, certificate: Option<&str>) -> Result<Self, QueueError> {
        let place = ServerUrl::parse(url, certificate)?;
        if !place.base.is_empty() {
            return Err(ServerUrlError::Address { url: url.to_owned() }.into());
        }
        let authority = place.authority.clone();
        let wire = Arc::new(HttpPool::new(ServerAddress::Tcp(place.endpoint.clone())));
        Ok(Self {
            transport: ServerTransport::Http { place, wire },
            authority,
            token: token.trim().to_owned(),
        })
    }

    /// Client over a custom transport.
    pub fn with_transport(way: Arc<dyn QueueTransport>, token: &str) -> Self {
        Self {
            transport: ServerTransport::Custom(way),
            authority: "queue".to_owned(),
            token: token.to_owned(),
        }
    }

    /// Returns a client for the same server with another token.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: token.to_owned(), ..self.clone() }
    }

    pub fn url(&self) -> String {
        match &self.transport {
            ServerTransport::Http { place, .. } => place.origin(),
            ServerTransport::Custom(_) => format!("http://{}", self.authority),
        }
    }

    /// Returns host and port.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Opens a stream for events, and returns it with the URL to request there. `None` for a custom transport.
    pub async fn connect_events(&self) -> Result<Option<(Stream, String)>, DialError> {
        let ServerTransport::Http { place, .. } = &self.transport else { return Ok(None) };
        let stream = place.endpoint.connect(CONNECT_TIMEOUT).await?;
        Ok(Some((
            stream,
            format!("ws://{}/websocket?api_token={}", self.authority, percent_encode(&self.token)),
        )))
    }

    pub async fn get(&self, path: &str) -> Result<Value, QueueError> {
        parse_json(&self.send("GET", path, "application/json", Bytes::new(), None).await?)
    }

    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, QueueError> {
        self.send("GET", path, "application/json", Bytes::new(), None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        parse_json(&self.send("POST", path, "application/json", body, None).await?)
    }

    pub async fn put(&self, path: &str, body: &Value) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        parse_json(&self.send("PUT", path, "application/json", body, None).await?)
    }

    /// As `post` and `put`, with an idempotency key by which the server recognises a repeat.
    pub async fn send_idempotent(
        &self,
        method: &str,
        path: &str,
        body: &Value,
        name: &str,
    ) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        parse_json(&self.send(method, path, "application/json", body, Some(name)).await?)
    }

    pub async fn post_bytes(&self, path: &str, bytes: Bytes) -> Result<Value, QueueError> {
        parse_json(&self.send("POST", path, "application/octet-stream", bytes, None).await?)
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: Bytes,
        name: Option<&str>,
    ) -> Result<Bytes, QueueError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("/arvados/v1/{path}"))
            .header("host", &self.authority)
            .header("content-type", kind)
            .header("authorization", format!("Bearer {}", self.token));
        if let Some(name) = name {
            request = request.header("x-request-id", name);
        }
        let request = request.body(Full::new(body)).map_err(QueueError::Build)?;
        let carried = async {
            match &self.transport {
                ServerTransport::Custom(way) => way.send(request).await,
                ServerTransport::Http { wire, .. } => {
                    let (status, body) = wire.exchange(request).await?;
                    Ok((status.as_u16(), body))
                }
            }
        };
        let (status, body) = timeout(RESPONSE_TIMEOUT, carried).await.map_err(|_| QueueError::TimedOut)??;
        if status == 200 {
            return Ok(body);
        }
        let message: Option<Value> = serde_json::from_slice(&body).ok();
        let why = message.as_ref().and_then(|message| message["errors"][0].as_str()).map(str::to_owned);
        Err(QueueError::Refused {
            status,
            why: why.unwrap_or_else(|| format!("the server responded with status {status}")),
        })
    }
}

fn parse_json(body: &Bytes) -> Result<Value, QueueError> {
    serde_json::from_slice(body).map_err(QueueError::Decode)
}

/// Percent-encodes a value of a query.
pub fn percent_encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
