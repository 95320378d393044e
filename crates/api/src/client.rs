//! Typed HTTP client: calls operations by type, over TCP or a unix socket.
//!
//! Connections are pooled ([`wire`]).

use std::{sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, StatusCode, body::Bytes, header, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::time::timeout;
use windlass_dial::{DialError, ServerUrl, ServerUrlError, TlsRootsError};

use crate::{
    agent::PORT_PROTOCOL,
    error,
    http_pool::{HttpPool, HttpPoolError, ServerAddress},
    log_stream::LogStream,
    logs,
    operation::{Body, Operation},
    operations, runs,
};

/// Longer than any operation of the table may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of attempts for a request with an idempotency key.
const ATTEMPTS_MAX: u32 = 3;
const RETRY_DELAY: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("invalid server address `{url}`")]
    InvalidUrl { url: String },
    #[error("failed to load the trusted certificates")]
    TlsRoots(#[source] TlsRootsError),
    #[error(transparent)]
    Dial(DialError),
    #[error("request to the server failed")]
    Exchange(#[source] hyper::Error),
    #[error("no response within {} s", ANSWER_TIMEOUT.as_secs())]
    TimedOut,
    #[error("failed to encode the request")]
    Encode(#[source] serde_json::Error),
    #[error("failed to build the request")]
    Build(#[source] hyper::http::Error),
    #[error("failed to decode the response")]
    Decode(#[source] serde_json::Error),
    #[error("failed to decode the log data")]
    Base64(#[source] base64::DecodeError),
    #[error("failed to read the stream: a line is too long")]
    LineTooLong,
    #[error("{}", .0.msg)]
    Refused(error::BadRequest),
    /// Status 403, 404, 409 and similar, with a reason.
    #[error("{msg}")]
    Denied { status: u16, msg: String },
    #[error("the server responded with status {status}: {body}")]
    Status { status: u16, body: String },
}

impl CallError {
    /// True if the server reports that the requested object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == error::ApiErrorCode::ResourceNotExists)
    }

    /// True if there was no response, so that it is unknown whether the server received the request.
    pub fn is_unconfirmed(&self) -> bool {
        matches!(self, Self::Exchange(_) | Self::TimedOut | Self::Dial(_))
    }
}

impl From<HttpPoolError> for CallError {
    fn from(error: HttpPoolError) -> Self {
        match error {
            HttpPoolError::Dial(error) => Self::Dial(error),
            HttpPoolError::Exchange(error) => Self::Exchange(error),
        }
    }
}

#[derive(Clone)]
pub struct ApiClient {
    connections: Arc<HttpPool>,
    /// Path prefix of every operation, without a trailing slash.
    base: String,
    authority: String,
    token: Option<String>,
}

impl std::fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("wire", &self.connections).finish_non_exhaustive()
    }
}

impl ApiClient {
    /// Client for a server whose certificate, if it uses TLS, is trusted by this machine.
    pub fn new(url: &str, token: Option<&str>) -> Result<Self, CallError> {
        Self::with_certificate(url, token, None)
    }

    /// Accepts `http://host:port[/base]`, the same with `https`, or `http+unix://` followed by a percent-encoded socket
    /// path. `certificate` identifies an `https` server that the machine does not trust by itself.
    pub fn with_certificate(
        url: &str,
        token: Option<&str>,
        certificate: Option<&str>,
    ) -> Result<Self, CallError> {
        let token = token.map(str::to_owned);
        if let Some(path) = url.strip_prefix("http+unix://") {
            let path = percent_decode(path.trim_end_matches('/'));
            let path = path.ok_or_else(|| CallError::InvalidUrl { url: url.to_owned() })?;
            let wire = Arc::new(HttpPool::new(ServerAddress::Unix(path.into())));
            return Ok(Self {
                connections: wire,
                base: String::new(),
                authority: "localhost".to_owned(),
                token,
            });
        }
        let ServerUrl { endpoint: peer, authority, base } =
            ServerUrl::parse(url, certificate).map_err(|error| match error {
                ServerUrlError::Address { url } => CallError::InvalidUrl { url },
                ServerUrlError::TlsRoots(error) => CallError::TlsRoots(error),
            })?;
        Ok(Self { connections: Arc::new(HttpPool::new(ServerAddress::Tcp(peer))), base, authority, token })
    }

    /// Calls an operation. `path` contains the value of each parameter of its path, in order.
    pub async fn call<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
    ) -> Result<O::Response, CallError> {
        self.call_keyed::<O>(path, request, None).await
    }

    /// Calls an operation that the server performs once per key. A request without a response is sent again.
    pub async fn call_once<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
        key: &str,
    ) -> Result<O::Response, CallError> {
        let mut tries = 1;
        loop {
            let answer = self.call_keyed::<O>(path, request, Some(key)).await;
            let lost = answer.as_ref().is_err_and(CallError::is_unconfirmed);
            if !lost || tries == ATTEMPTS_MAX {
                return answer;
            }
            tries += 1;
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn call_keyed<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
        key: Option<&str>,
    ) -> Result<O::Response, CallError> {
        let mut uri = self.uri(O::PATH, path);
        let body = match O::BODY {
            Body::Json => serde_json::to_vec(request).map_err(CallError::Encode)?,
            Body::File | Body::Query | Body::Text | Body::Bytes | Body::Events | Body::Stream => {
                append_query(&mut uri, request)?;
                Vec::new()
            }
        };
        let kind = "application/json";
        let message = OutgoingRequest {
            method: O::METHOD.name(),
            uri: &uri,
            body: body.into(),
            content_type: kind,
            idempotency_key: key,
        };
        let answer = self.exchange(message).await?;
        serde_json::from_slice(&answer).map_err(CallError::Decode)
    }

    /// Calls an operation whose body is a file.
    pub async fn upload<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
        name: &str,
        content: &[u8],
    ) -> Result<O::Response, CallError> {
        // The boundary only has to be absent from the content, so a hash is not needed.
        let mut boundary = String::from("windlass-part");
        while content.windows(boundary.len()).any(|window| window == boundary.as_bytes()) {
            boundary.push('x');
        }
        let mut body = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        )
        .into_bytes();
        body.extend_from_slice(content);
        body.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
        let mut uri = self.uri(O::PATH, path);
        append_query(&mut uri, request)?;
        let kind = format!("multipart/form-data; boundary={boundary}");
        let message = OutgoingRequest {
            method: O::METHOD.name(),
            uri: &uri,
            body: body.into(),
            content_type: &kind,
            idempotency_key: None,
        };
        let answer = self.exchange(message).await?;
        serde_json::from_slice(&answer).map_err(CallError::Decode)
    }

    /// Follows a log, on a separate connection.
    pub async fn stream_logs(
        &self,
        project: &str,
        request: &logs::StreamRequest,
    ) -> Result<LogStream, CallError> {
        let mut uri = self.uri(operations::StreamLogs::PATH, &[project]);
        append_query(&mut uri, request)?;
        let kind = "application/json";
        let message = OutgoingRequest {
            method: "GET",
            uri: &uri,
            body: Bytes::new(),
            content_type: kind,
            idempotency_key: None,
        };
        let mut sender = self.connections.connect().await?;
        let sent = timeout(ANSWER_TIMEOUT, sender.send_request(self.request(&message)?));
        let response = sent.await.map_err(|_| CallError::TimedOut)?.map_err(CallError::Exchange)?;
        let status = response.status();
        if !status.is_success() {
            let answer = response.into_body().collect().await.map_err(CallError::Exchange)?.to_bytes();
            return Err(error_from_response(status, &answer));
        }
        Ok(LogStream::new(response.into_body(), request.offset))
    }

    /// Connects to a port of a job, on a separate connection, which is closed when the returned stream is dropped.
    pub async fn connect_job(
        &self,
        project: &str,
        request: &runs::ConnectRequest,
    ) -> Result<TokioIo<Upgraded>, CallError> {
        let mut uri = self.uri(operations::ConnectJob::PATH, &[project]);
        append_query(&mut uri, request)?;
        let kind = "application/json";
        let message = OutgoingRequest {
            method: "GET",
            uri: &uri,
            body: Bytes::new(),
            content_type: kind,
            idempotency_key: None,
        };
        let mut requested = self.request(&message)?;
        let headers = requested.headers_mut();
        headers.insert(header::CONNECTION, header::HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, header::HeaderValue::from_static(PORT_PROTOCOL));
        let mut sender = self.connections.connect().await?;
        let sent = timeout(ANSWER_TIMEOUT, sender.send_request(requested));
        let response = sent.await.map_err(|_| CallError::TimedOut)?.map_err(CallError::Exchange)?;
        let status = response.status();
        if status != StatusCode::SWITCHING_PROTOCOLS {
            let answer = response.into_body().collect().await.map_err(CallError::Exchange)?.to_bytes();
            return Err(error_from_response(status, &answer));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(CallError::Exchange)
    }

    fn uri(&self, template: &str, values: &[&str]) -> String {
        let mut uri = self.base.clone();
        let mut values = values.iter();
        for part in template.split('/').skip(1) {
            uri.push('/');
            match part.strip_prefix('{') {
                Some(_) => percent_encode(&mut uri, values.next().copied().unwrap_or_default()),
                None => uri.push_str(part),
            }
        }
        uri
    }

    async fn exchange(&self, message: OutgoingRequest<'_>) -> Result<Bytes, CallError> {
        timeout(ANSWER_TIMEOUT, self.try_exchange(message)).await.map_err(|_| CallError::TimedOut)?
    }

    async fn try_exchange(&self, message: OutgoingRequest<'_>) -> Result<Bytes, CallError> {
        let (status, answer) = self.connections.exchange(self.request(&message)?).await?;
        if status.is_success() { Ok(answer) } else { Err(error_from_response(status, &answer)) }
    }

    fn request(&self, message: &OutgoingRequest<'_>) -> Result<Request<Full<Bytes>>, CallError> {
        let mut request =
            Request::builder().method(message.method).uri(message.uri).header(header::HOST, &self.authority);
        if !message.body.is_empty() {
            request = request.header(header::CONTENT_TYPE, message.content_type);
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(key) = message.idempotency_key {
            request = request.header("idempotency-key", key);
        }
        request.body(Full::new(message.body.clone())).map_err(CallError::Build)
    }
}

struct OutgoingRequest<'a> {
    method: &'a str,
    uri: &'a str,
    body: Bytes,
    content_type: &'a str,
    idempotency_key: Option<&'a str>,
}

fn error_from_response(status: StatusCode, body: &[u8]) -> CallError {
    if let Ok(mut refused) = serde_json::from_slice::<error::ErrorBody<Vec<error::BadRequest>>>(body)
        && status == StatusCode::BAD_REQUEST
        && refused.detail.len() == 1
        && let Some(entry) = refused.detail.pop()
    {
        return CallError::Refused(entry);
    }
    if let Ok(denied) = serde_json::from_slice::<error::ErrorBody<error::ErrorDetail>>(body) {
        return CallError::Denied { status: status.as_u16(), msg: denied.detail.msg };
    }
    CallError::Status { status: status.as_u16(), body: String::from_utf8_lossy(body).into_owned() }
}

/// Appends the fields that are set, as a query string.
fn append_query<T: Serialize>(uri: &mut String, request: &T) -> Result<(), CallError> {
    let value = serde_json::to_value(request).map_err(CallError::Encode)?;
    let mut separator = '?';
    for (name, value) in value.as_object().into_iter().flatten() {
        if value.is_null() {
            continue;
        }
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        uri.push(separator);
        separator = '&';
        percent_encode(uri, name);
        uri.push('=');
        percent_encode(uri, &text);
    }
    Ok(())
}

/// Percent-encodes everything but unreserved characters.
fn percent_encode(out: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte as char),
            _ => {
                const HEX: &[u8; 16] = b"0123456789ABCDEF";
                out.push('%');
                out.push(HEX[usize::from(byte >> 4)] as char);
                out.push(HEX[usize::from(byte & 15)] as char);
            }
        }
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::{ApiClient, append_query, percent_decode, percent_encode};

    #[test]
    fn percent_encoded_socket_paths_decode_to_the_original() {
        let mut out = String::new();
        percent_encode(&mut out, "/run/a b%c");
        assert_eq!(out, "%2Frun%2Fa%20b%25c");
        assert_eq!(percent_decode(&out).as_deref(), Some("/run/a b%c"));
        assert_eq!(percent_decode("%2"), None);
    }

    #[test]
    fn unset_fields_are_left_out_of_a_query() {
        let mut uri = String::from("/x");
        let request = crate::metrics::Query {
            replica_num: 0,
            job_num: 1,
            limit: 5,
            after: None,
            before: None,
            run_id: None,
        };
        append_query(&mut uri, &request).unwrap();
        assert_eq!(uri, "/x?replica_num=0&job_num=1&limit=5");
    }

    #[test]
    fn api_client_rejects_unsupported_or_malformed_server_urls() {
        assert!(ApiClient::new("ftp://host", None).is_err());
        assert!(ApiClient::new("http://", None).is_err());
        assert!(ApiClient::new("http://[::1]:3000/base/", None).is_ok());
        assert!(ApiClient::new("http+unix://%2", None).is_err());
    }
}
