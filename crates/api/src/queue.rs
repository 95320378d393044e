//! A client of the container queue: one call, one answer, for dispatchers, executors and people.

use std::{pin::Pin, sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1::handshake};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};

/// Kept of what one attempt writes to one stream.
pub const STREAM_BYTES_MAX: u64 = 64 * 1024 * 1024;
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error("read server address `{url}`: want http://HOST:PORT")]
    Address { url: String },
    #[error("connect to {target}")]
    Connect {
        target: String,
        #[source]
        source: std::io::Error,
    },
    /// Nobody knows whether it was done.
    #[error("exchange with the server")]
    Exchange(#[source] hyper::Error),
    #[error("no answer from the server")]
    Silent,
    #[error("build the request")]
    Build(#[source] hyper::http::Error),
    #[error("decode the answer")]
    Decode(#[source] serde_json::Error),
    #[error("{why}")]
    Refused { status: u16, why: String },
}

impl QueueError {
    /// What the server answered, if it did.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Address { .. }
            | Self::Connect { .. }
            | Self::Exchange(_)
            | Self::Silent
            | Self::Build(_)
            | Self::Decode(_) => None,
        }
    }

    /// The server said no, and would say it again.
    pub fn is_refusal(&self) -> bool {
        self.status().is_some_and(|status| (400..500).contains(&status) && status != 408 && status != 429)
    }
}

/// Status and body of what a server said.
pub type Carried<'a> = Pin<Box<dyn Future<Output = Result<(u16, Bytes), QueueError>> + Send + 'a>>;

/// Another way to a server than a connection of this machine.
pub trait Carry: Send + Sync {
    fn carry(&self, request: Request<Full<Bytes>>) -> Carried<'_>;
}

/// Where the queue is, and a token for it.
#[derive(Clone)]
pub struct Client {
    authority: String,
    token: String,
    way: Option<Arc<dyn Carry>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Client {
    pub fn new(url: &str, token: &str) -> Result<Self, QueueError> {
        let wrong = || QueueError::Address { url: url.to_owned() };
        let authority = url.strip_prefix("http://").ok_or_else(wrong)?.trim_end_matches('/');
        if authority.is_empty() || authority.contains('/') {
            return Err(wrong());
        }
        let authority =
            if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Self { authority, token: token.trim().to_owned(), way: None })
    }

    /// Over a way of its own.
    pub fn over(way: Arc<dyn Carry>, token: &str) -> Self {
        Self { authority: "queue".to_owned(), token: token.to_owned(), way: Some(way) }
    }

    /// The same server, for somebody else.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: token.to_owned(), ..self.clone() }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Where events are heard: whom to connect to, and what to ask for there.
    pub fn events(&self) -> (&str, String) {
        let token = encoded(&self.token);
        (&self.authority, format!("ws://{}/websocket?api_token={token}", self.authority))
    }

    pub async fn get(&self, path: &str) -> Result<Value, QueueError> {
        decode(&self.send("GET", path, "application/json", Bytes::new(), None).await?)
    }

    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, QueueError> {
        self.send("GET", path, "application/json", Bytes::new(), None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        decode(&self.send("POST", path, "application/json", body, None).await?)
    }

    pub async fn put(&self, path: &str, body: &Value) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        decode(&self.send("PUT", path, "application/json", body, None).await?)
    }

    /// As `post` and `put`, under a name by which the server knows a repeat.
    pub async fn named(
        &self,
        method: &str,
        path: &str,
        body: &Value,
        name: &str,
    ) -> Result<Value, QueueError> {
        let body = Bytes::from(body.to_string());
        decode(&self.send(method, path, "application/json", body, Some(name)).await?)
    }

    pub async fn post_bytes(&self, path: &str, bytes: Bytes) -> Result<Value, QueueError> {
        decode(&self.send("POST", path, "application/octet-stream", bytes, None).await?)
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
        let carried = match &self.way {
            Some(way) => timeout(ANSWER_WITHIN, way.carry(request)).await,
            None => timeout(ANSWER_WITHIN, self.connect_and_carry(request)).await,
        };
        let (status, body) = carried.map_err(|_| QueueError::Silent)??;
        if status == 200 {
            return Ok(body);
        }
        let said: Option<Value> = serde_json::from_slice(&body).ok();
        let why = said.as_ref().and_then(|said| said["errors"][0].as_str()).map(str::to_owned);
        Err(QueueError::Refused {
            status,
            why: why.unwrap_or_else(|| format!("the server answered {status}")),
        })
    }
}

impl Client {
    async fn connect_and_carry(&self, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), QueueError> {
        let failed = |source| QueueError::Connect { target: self.authority.clone(), source };
        let stream = timeout(CONNECT_WITHIN, TcpStream::connect(&self.authority))
            .await
            .map_err(|_| QueueError::Silent)?
            .map_err(failed)?;
        // A socket that refuses is about to fail anyway.
        let _ = stream.set_nodelay(true);
        exchange(stream, request).await.map_err(QueueError::Exchange)
    }
}

/// One request over a connection of its own.
pub async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let carrying = tokio::spawn(connection);
    let answer = sender.send_request(request).await?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await?.to_bytes();
    carrying.abort();
    Ok((status, body))
}

fn decode(body: &Bytes) -> Result<Value, QueueError> {
    serde_json::from_slice(body).map_err(QueueError::Decode)
}

/// A value of a query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
