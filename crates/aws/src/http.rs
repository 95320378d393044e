//! HTTP client: connections to the endpoints of AWS, kept while they are used.

use std::{collections::BTreeMap, time::Duration};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request,
    body::{Bytes, Incoming},
    client::conn::http1::{SendRequest, handshake},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use windlass_dial::ServerUrl;
use windlass_model::error_chain::format_chain;

use crate::errors::ApiError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A page of a hundred instance types is about a megabyte.
const ANSWER_BYTES_MAX: usize = 32 * 1024 * 1024;
/// AWS closes idle connections after some time; younger ones are used again.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
const IDLE_MAX: usize = 8;

type Sender = SendRequest<Full<Bytes>>;

/// Request to one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct HttpRequest<'a> {
    /// URL of the endpoint, without a path.
    pub(crate) origin: &'a str,
    pub(crate) method: &'static str,
    /// Path with its query.
    pub(crate) path: &'a str,
    /// Without `host`.
    pub(crate) headers: &'a [(&'a str, &'a str)],
    pub(crate) body: Bytes,
    pub(crate) limit: Duration,
}

pub(crate) struct HttpAnswer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl HttpAnswer {
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    pub(crate) fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }
}

#[derive(Default)]
pub(crate) struct HttpClient {
    servers: Mutex<BTreeMap<String, ServerUrl>>,
    idle: Mutex<BTreeMap<String, Vec<(Instant, Sender)>>>,
}

impl HttpClient {
    /// Host and port of a URL, as the header `host` has them.
    pub(crate) fn authority(&self, origin: &str) -> Result<String, ApiError> {
        Ok(self.server(origin)?.authority)
    }

    fn server(&self, origin: &str) -> Result<ServerUrl, ApiError> {
        let mut servers = self.servers.lock();
        if let Some(server) = servers.get(origin) {
            return Ok(server.clone());
        }
        let server =
            ServerUrl::parse(origin, None).map_err(|error| ApiError::connection(format_chain(&error)))?;
        servers.insert(origin.to_owned(), server.clone());
        Ok(server)
    }

    /// Sends a request. One on a connection that was closed meanwhile is repeated on another: all of them may be.
    pub(crate) async fn send(&self, request: &HttpRequest<'_>) -> Result<HttpAnswer, ApiError> {
        let server = self.server(request.origin)?;
        let exchanged = timeout(request.limit, async {
            while let Some(mut sender) = self.idle_connection(request.origin) {
                if sender.ready().await.is_ok()
                    && let Ok(answer) = sender.send_request(encode(&server, request)?).await
                {
                    return self.read(request.origin, sender, answer).await;
                }
            }
            let stream = server.endpoint.connect(CONNECT_TIMEOUT).await;
            let stream = stream.map_err(|error| ApiError::connection(format_chain(&error)))?;
            let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(exchange_error)?;
            // The caller that waits for an answer receives the connection's errors.
            tokio::spawn(connection);
            let answer = sender.send_request(encode(&server, request)?).await.map_err(exchange_error)?;
            self.read(request.origin, sender, answer).await
        });
        let late = || format!("no answer of {} within {} s", server.authority, request.limit.as_secs());
        exchanged.await.unwrap_or_else(|_| Err(ApiError::connection(late())))
    }

    async fn read(
        &self,
        origin: &str,
        sender: Sender,
        answer: hyper::Response<Incoming>,
    ) -> Result<HttpAnswer, ApiError> {
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body =
            body.map_err(|error| ApiError::connection(format!("failed to read the answer: {error}")))?;
        let mut idle = self.idle.lock();
        let kept = idle.entry(origin.to_owned()).or_default();
        if kept.len() < IDLE_MAX {
            kept.push((Instant::now(), sender));
        }
        Ok(HttpAnswer { status, body: body.to_bytes() })
    }

    fn idle_connection(&self, origin: &str) -> Option<Sender> {
        let mut idle = self.idle.lock();
        let kept = idle.get_mut(origin)?;
        kept.retain(|(since, sender)| since.elapsed() < IDLE_TIMEOUT && !sender.is_closed());
        kept.pop().map(|(_, sender)| sender)
    }
}

fn encode(server: &ServerUrl, request: &HttpRequest<'_>) -> Result<Request<Full<Bytes>>, ApiError> {
    let mut built =
        Request::builder().method(request.method).uri(request.path).header("host", &server.authority);
    for (name, value) in request.headers {
        built = built.header(*name, *value);
    }
    built.body(Full::new(request.body.clone())).map_err(|error| ApiError::connection(error.to_string()))
}

fn exchange_error(error: hyper::Error) -> ApiError {
    ApiError::connection(format!("the connection failed: {}", format_chain(&error)))
}
