//! One typed HTTP client: operations are called by type, over TCP or a unix socket.
//!
//! Connections are kept and used again ([`wire`]).

use std::{sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, StatusCode, body::Bytes, header, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::time::timeout;
use windlass_dial::{DialError, Place, PlaceError, TrustError};

use crate::{
    agent::PORT_PROTOCOL,
    error,
    log_stream::LogStream,
    logs,
    operation::{Body, Operation},
    operations, runs,
    wire::{Way, Wire, WireError},
};

/// Longer than any operation of the table may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a request with a key is sent before its failure counts.
const TRIES_MAX: u32 = 3;
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("read server address `{url}`")]
    Address { url: String },
    #[error("know the server by its certificate")]
    Trust(#[source] TrustError),
    #[error(transparent)]
    Dial(DialError),
    #[error("exchange with the server")]
    Exchange(#[source] hyper::Error),
    #[error("no answer after {} s", ANSWER_TIMEOUT.as_secs())]
    Silent,
    #[error("encode the request")]
    Encode(#[source] serde_json::Error),
    #[error("build the request")]
    Build(#[source] hyper::http::Error),
    #[error("decode the answer")]
    Decode(#[source] serde_json::Error),
    #[error("decode the bytes of a log")]
    Base64(#[source] base64::DecodeError),
    #[error("read a stream: one of its lines is too long")]
    LongLine,
    #[error("{}", .0.msg)]
    Refused(error::BadRequest),
    /// 403, 404, 409 and the like, with a reason.
    #[error("{msg}")]
    Denied { status: u16, msg: String },
    #[error("the server answered {status}: {body}")]
    Status { status: u16, body: String },
}

impl CallError {
    /// True when the server says that the thing asked for does not exist.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == error::Code::ResourceNotExists)
    }

    /// True when it is not known whether the server got it: nobody answered.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Exchange(_) | Self::Silent | Self::Dial(_))
    }
}

impl From<WireError> for CallError {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Dial(error) => Self::Dial(error),
            WireError::Exchange(error) => Self::Exchange(error),
        }
    }
}

#[derive(Clone)]
pub struct Client {
    wire: Arc<Wire>,
    /// Path before every operation, without a slash at the end.
    base: String,
    authority: String,
    token: Option<String>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("wire", &self.wire).finish_non_exhaustive()
    }
}

impl Client {
    /// A server that this machine trusts, if it is one with TLS.
    pub fn new(url: &str, token: Option<&str>) -> Result<Self, CallError> {
        Self::knowing(url, token, None)
    }

    /// `http://host:port[/base]`, the same with `https`, or `http+unix://` followed by a percent-encoded socket path.
    /// `certificate` is what an `https` server is known by, where the machine does not trust it anyway.
    pub fn knowing(url: &str, token: Option<&str>, certificate: Option<&str>) -> Result<Self, CallError> {
        let token = token.map(str::to_owned);
        if let Some(path) = url.strip_prefix("http+unix://") {
            let path = decode(path.trim_end_matches('/'));
            let path = path.ok_or_else(|| CallError::Address { url: url.to_owned() })?;
            let wire = Arc::new(Wire::new(Way::Unix(path.into())));
            return Ok(Self { wire, base: String::new(), authority: "localhost".to_owned(), token });
        }
        let Place { peer, authority, base } = Place::read(url, certificate).map_err(|error| match error {
            PlaceError::Address { url } => CallError::Address { url },
            PlaceError::Trust(error) => CallError::Trust(error),
        })?;
        Ok(Self { wire: Arc::new(Wire::new(Way::Tcp(peer))), base, authority, token })
    }

    /// Calls an operation. `path` gives a value to each parameter of its path, in order.
    pub async fn call<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
    ) -> Result<O::Response, CallError> {
        self.call_keyed::<O>(path, request, None).await
    }

    /// Calls an operation that the server does once for each key: what got lost on the way is sent again.
    pub async fn call_once<O: Operation>(
        &self,
        path: &[&str],
        request: &O::Request,
        key: &str,
    ) -> Result<O::Response, CallError> {
        let mut tries = 1;
        loop {
            let answer = self.call_keyed::<O>(path, request, Some(key)).await;
            let lost = answer.as_ref().is_err_and(CallError::is_lost);
            if !lost || tries == TRIES_MAX {
                return answer;
            }
            tries += 1;
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
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
            Body::File | Body::Query | Body::Text | Body::Events | Body::Stream => {
                query(&mut uri, request)?;
                Vec::new()
            }
        };
        let kind = "application/json";
        let message = Message { method: O::METHOD.name(), uri: &uri, body: body.into(), kind, key };
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
        // The name of the boundary only has to be absent from the content; a hash is not needed for it.
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
        query(&mut uri, request)?;
        let kind = format!("multipart/form-data; boundary={boundary}");
        let message =
            Message { method: O::METHOD.name(), uri: &uri, body: body.into(), kind: &kind, key: None };
        let answer = self.exchange(message).await?;
        serde_json::from_slice(&answer).map_err(CallError::Decode)
    }

    /// Follows a log, on a connection of its own.
    pub async fn stream_logs(
        &self,
        project: &str,
        request: &logs::StreamRequest,
    ) -> Result<LogStream, CallError> {
        let mut uri = self.uri(operations::StreamLogs::PATH, &[project]);
        query(&mut uri, request)?;
        let kind = "application/json";
        let message = Message { method: "GET", uri: &uri, body: Bytes::new(), kind, key: None };
        let mut sender = self.wire.connect().await?;
        let sent = timeout(ANSWER_TIMEOUT, sender.send_request(self.request(&message)?));
        let response = sent.await.map_err(|_| CallError::Silent)?.map_err(CallError::Exchange)?;
        let status = response.status();
        if !status.is_success() {
            let answer = response.into_body().collect().await.map_err(CallError::Exchange)?.to_bytes();
            return Err(refusal(status, &answer));
        }
        Ok(LogStream::new(response.into_body(), request.offset))
    }

    /// Connects to a port of a job, on a connection of its own. It goes away with what is returned.
    pub async fn connect_job(
        &self,
        project: &str,
        request: &runs::ConnectRequest,
    ) -> Result<TokioIo<Upgraded>, CallError> {
        let mut uri = self.uri(operations::ConnectJob::PATH, &[project]);
        query(&mut uri, request)?;
        let kind = "application/json";
        let message = Message { method: "GET", uri: &uri, body: Bytes::new(), kind, key: None };
        let mut asked = self.request(&message)?;
        let headers = asked.headers_mut();
        headers.insert(header::CONNECTION, header::HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, header::HeaderValue::from_static(PORT_PROTOCOL));
        let mut sender = self.wire.connect().await?;
        let sent = timeout(ANSWER_TIMEOUT, sender.send_request(asked));
        let response = sent.await.map_err(|_| CallError::Silent)?.map_err(CallError::Exchange)?;
        let status = response.status();
        if status != StatusCode::SWITCHING_PROTOCOLS {
            let answer = response.into_body().collect().await.map_err(CallError::Exchange)?.to_bytes();
            return Err(refusal(status, &answer));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(CallError::Exchange)
    }

    fn uri(&self, template: &str, values: &[&str]) -> String {
        let mut uri = self.base.clone();
        let mut values = values.iter();
        for part in template.split('/').skip(1) {
            uri.push('/');
            match part.strip_prefix('{') {
                Some(_) => encode(&mut uri, values.next().copied().unwrap_or_default()),
                None => uri.push_str(part),
            }
        }
        uri
    }

    async fn exchange(&self, message: Message<'_>) -> Result<Bytes, CallError> {
        timeout(ANSWER_TIMEOUT, self.try_exchange(message)).await.map_err(|_| CallError::Silent)?
    }

    async fn try_exchange(&self, message: Message<'_>) -> Result<Bytes, CallError> {
        let (status, answer) = self.wire.exchange(self.request(&message)?).await?;
        if status.is_success() { Ok(answer) } else { Err(refusal(status, &answer)) }
    }

    fn request(&self, message: &Message<'_>) -> Result<Request<Full<Bytes>>, CallError> {
        let mut request =
            Request::builder().method(message.method).uri(message.uri).header(header::HOST, &self.authority);
        if !message.body.is_empty() {
            request = request.header(header::CONTENT_TYPE, message.kind);
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(key) = message.key {
            request = request.header("idempotency-key", key);
        }
        request.body(Full::new(message.body.clone())).map_err(CallError::Build)
    }
}

/// One request.
struct Message<'a> {
    method: &'a str,
    uri: &'a str,
    body: Bytes,
    kind: &'a str,
    key: Option<&'a str>,
}

fn refusal(status: StatusCode, body: &[u8]) -> CallError {
    if let Ok(mut refused) = serde_json::from_slice::<error::Body<Vec<error::BadRequest>>>(body)
        && status == StatusCode::BAD_REQUEST
        && refused.detail.len() == 1
        && let Some(entry) = refused.detail.pop()
    {
        return CallError::Refused(entry);
    }
    if let Ok(denied) = serde_json::from_slice::<error::Body<error::Refusal>>(body) {
        return CallError::Denied { status: status.as_u16(), msg: denied.detail.msg };
    }
    CallError::Status { status: status.as_u16(), body: String::from_utf8_lossy(body).into_owned() }
}

/// Appends the fields that are set as a query.
fn query<T: Serialize>(uri: &mut String, request: &T) -> Result<(), CallError> {
    let value = serde_json::to_value(request).map_err(CallError::Encode)?;
    let mut separator = '?';
    for (name, value) in value.as_object().into_iter().flatten() {
        if value.is_null() {
            continue;
        }
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        uri.push(separator);
        separator = '&';
        encode(uri, name);
        uri.push('=');
        encode(uri, &text);
    }
    Ok(())
}

/// Percent-encodes everything but unreserved characters.
fn encode(out: &mut String, text: &str) {
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

fn decode(text: &str) -> Option<String> {
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
    use super::{Client, decode, encode, query};

    #[test]
    fn socket_paths_and_names_survive_encoding() {
        let mut out = String::new();
        encode(&mut out, "/run/a b%c");
        assert_eq!(out, "%2Frun%2Fa%20b%25c");
        assert_eq!(decode(&out).as_deref(), Some("/run/a b%c"));
        assert_eq!(decode("%2"), None);
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
        query(&mut uri, &request).unwrap();
        assert_eq!(uri, "/x?replica_num=0&job_num=1&limit=5");
    }

    #[test]
    fn addresses_that_cannot_be_reached_are_refused() {
        assert!(Client::new("ftp://host", None).is_err());
        assert!(Client::new("http://", None).is_err());
        assert!(Client::new("http://[::1]:3000/base/", None).is_ok());
        assert!(Client::new("http+unix://%2", None).is_err());
    }
}
