//! Client for the server's API: one connection per call, with or without TLS.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, StatusCode,
    client::conn::http1,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use windlass_api::Operation;
use windlass_dial::{DialError, ServerUrl, ServerUrlError};

/// Maximum size of a response: the routes of ten thousand services.
const RESPONSE_MAX: usize = 256 * 1024 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of the error text that is shown of a refusal.
const ERROR_TEXT_MAX: usize = 300;

/// Failure of a call to the server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Place(#[from] ServerUrlError),
    #[error("failed to connect to the server")]
    Dial(#[from] DialError),
    #[error("request to the server failed")]
    Exchange(#[source] hyper::Error),
    #[error("failed to build a request to the server")]
    Build(#[source] hyper::http::Error),
    #[error("failed to encode a request to the server")]
    Encode(#[source] serde_json::Error),
    #[error("failed to parse the server's response")]
    Decode(#[source] serde_json::Error),
    #[error("failed to read the server's response: too long or truncated")]
    Body,
    #[error("the server did not respond within {} s", after.as_secs())]
    Late { after: Duration },
    /// The token does not belong to an existing gateway.
    #[error("the server rejected this gateway's token")]
    Denied,
    #[error("the server responded with {status}: {words}")]
    Refused { status: StatusCode, words: String },
}

/// Address and credential of the server.
pub struct ServerClient {
    url: ServerUrl,
    authorization: HeaderValue,
}

impl std::fmt::Debug for ServerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("place", &self.url).finish_non_exhaustive()
    }
}

impl ServerClient {
    /// `certificate` identifies an `https` server that the machine does not trust by itself.
    pub fn new(url: &str, token: &str, certificate: Option<&str>) -> Result<Self, ServerError> {
        let place = ServerUrl::parse(url, certificate)?;
        let mut authorization =
            HeaderValue::try_from(format!("Bearer {}", token.trim())).map_err(|_| ServerError::Denied)?;
        authorization.set_sensitive(true);
        Ok(Self { url: place, authorization })
    }

    pub async fn call<O: Operation>(
        &self,
        request: &O::Request,
        within: Duration,
    ) -> Result<O::Response, ServerError> {
        let answer = timeout(within, self.exchange::<O>(request)).await;
        let answer = answer.map_err(|_| ServerError::Late { after: within })??;
        serde_json::from_slice(&answer).map_err(ServerError::Decode)
    }

    async fn exchange<O: Operation>(&self, request: &O::Request) -> Result<Bytes, ServerError> {
        let body = serde_json::to_vec(request).map_err(ServerError::Encode)?;
        let request = Request::post(format!("{}{}", self.url.base, O::PATH))
            .header(header::HOST, &self.url.authority)
            .header(header::AUTHORIZATION, self.authorization.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Full::new(Bytes::from(body)))
            .map_err(ServerError::Build)?;
        let stream = TokioIo::new(self.url.endpoint.connect(CONNECT_TIMEOUT).await?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(ServerError::Exchange)?;
        let connection = tokio::spawn(connection);
        let answered = async {
            let answer = sender.send_request(request).await.map_err(ServerError::Exchange)?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), RESPONSE_MAX).collect().await;
            let body = body.map_err(|_| ServerError::Body)?.to_bytes();
            match status {
                status if status.is_success() => Ok(body),
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(ServerError::Denied),
                status => {
                    let words = String::from_utf8_lossy(&body).chars().take(ERROR_TEXT_MAX).collect();
                    Err(ServerError::Refused { status, words })
                }
            }
        };
        let answered = answered.await;
        connection.abort();
        answered
    }
}
