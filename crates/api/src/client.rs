//! One typed HTTP client: operations are called by type, over TCP or a unix socket.
//!
//! One connection is kept and used again; a call on a connection that died meanwhile is sent once
//! more on a fresh one if nothing of it can have arrived.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use http_body_util::{BodyExt, Full};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
    header,
    upgrade::Upgraded,
};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::{net::TcpStream, sync::Mutex, time::timeout};

use crate::{
    agent::PORT_PROTOCOL,
    error,
    log_stream::LogStream,
    logs,
    operation::{Body, Operation},
    operations, runs, unix,
};

/// A server that does not take a connection by then is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer than any operation of the table may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a request with a key is sent before its failure counts.
const TRIES_MAX: u32 = 3;
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("read server address `{url}`")]
    Address { url: String },
    #[error("connect to {target}")]
    Connect {
        target: String,
        #[source]
        source: std::io::Error,
    },
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
        matches!(self, Self::Exchange(_) | Self::Silent | Self::Connect { .. })
    }
}

#[derive(Clone, Debug)]
enum Target {
    Tcp { host: String, port: u16, addresses: Vec<SocketAddr> },
    Unix(PathBuf),
}

pub struct Client {
    target: Target,
    /// Path before every operation, without a slash at the end.
    base: String,
    authority: String,
    token: Option<String>,
    idle: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("target", &self.target).finish_non_exhaustive()
    }
}

impl Client {
    /// `http://host:port[/base]`, or `http+unix://` followed by a percent-encoded socket path.
    pub fn new(url: &str, token: Option<&str>) -> Result<Self, CallError> {
        let wrong = || CallError::Address { url: url.to_owned() };
        let (target, authority, base) = if let Some(path) = url.strip_prefix("http+unix://") {
            let path = decode(path.trim_end_matches('/')).ok_or_else(wrong)?;
            (Target::Unix(path.into()), "localhost".to_owned(), String::new())
        } else {
            let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
            let (authority, base) = rest.split_once('/').unwrap_or((rest, ""));
            let parsed: hyper::http::uri::Authority = authority.parse().map_err(|_| wrong())?;
            let host = parsed.host().trim_start_matches('[').trim_end_matches(']').to_owned();
            let base = base.trim_end_matches('/');
            let base = if base.is_empty() { String::new() } else { format!("/{base}") };
            let port = parsed.port_u16().unwrap_or(80);
            (Target::Tcp { host, port, addresses: Vec::new() }, authority.to_owned(), base)
        };
        Ok(Self { target, base, authority, token: token.map(str::to_owned), idle: Mutex::new(None) })
    }

    /// The host and port that somebody must look up, unless the address is a socket's.
    pub fn host(&self) -> Option<(&str, u16)> {
        match &self.target {
            Target::Tcp { host, port, .. } => Some((host, *port)),
            Target::Unix(_) => None,
        }
    }

    /// Connects to the first of these that answers instead of looking up the host.
    #[must_use]
    pub fn at(mut self, found: Vec<SocketAddr>) -> Self {
        if let Target::Tcp { addresses, .. } = &mut self.target {
            *addresses = found;
        }
        self
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
        let mut sender = self.connect().await?;
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
        let mut sender = self.connect().await?;
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
        let kept = self.idle.lock().await.take().filter(SendRequest::is_ready);
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let sent = sender.send_request(self.request(&message)?).await;
        let response = match sent {
            Ok(response) => response,
            Err(error) if error.is_canceled() || error.is_closed() => {
                sender = self.connect().await?;
                sender.send_request(self.request(&message)?).await.map_err(CallError::Exchange)?
            }
            Err(error) => return Err(CallError::Exchange(error)),
        };
        let status = response.status();
        let answer = response.into_body().collect().await.map_err(CallError::Exchange)?.to_bytes();
        *self.idle.lock().await = Some(sender);
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

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, CallError> {
        match &self.target {
            Target::Tcp { host, port, addresses } => {
                let failed = |source| CallError::Connect { target: format!("{host}:{port}"), source };
                let connecting = async {
                    if addresses.is_empty() {
                        TcpStream::connect((host.as_str(), *port)).await
                    } else {
                        TcpStream::connect(addresses.as_slice()).await
                    }
                };
                let late = |_| failed(std::io::ErrorKind::TimedOut.into());
                let stream = timeout(CONNECT_TIMEOUT, connecting).await.map_err(late)?.map_err(failed)?;
                stream.set_nodelay(true).map_err(failed)?;
                join(TokioIo::new(stream)).await
            }
            Target::Unix(path) => {
                let failed = |source| CallError::Connect { target: path.display().to_string(), source };
                join(TokioIo::new(unix::connect(path).await.map_err(failed)?)).await
            }
        }
    }
}

/// One request, as it may have to be sent twice.
struct Message<'a> {
    method: &'a str,
    uri: &'a str,
    body: Bytes,
    kind: &'a str,
    key: Option<&'a str>,
}

async fn join<T>(io: T) -> Result<SendRequest<Full<Bytes>>, CallError>
where
    T: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(io).await.map_err(CallError::Exchange)?;
    // Its errors are seen by whoever waits for an answer on it.
    tokio::spawn(connection.with_upgrades());
    Ok(sender)
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
    }
}
