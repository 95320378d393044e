//! Client for the buckets of an S3-compatible store: AWS, MinIO, Ceph and others.
//!
//! Only a few calls are needed; a library would bring fifty more packages and a second TLS implementation.

mod connect;
mod location;
mod upload;

use std::{io, time::Duration};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, body::Bytes};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use windlass_dial::Endpoint;
pub use windlass_sigv4::AwsCredentials as S3Credentials;
use windlass_sigv4::{
    CanonicalRequest, Scope, amz_date, authorization, canonical_query, percent_encode, sha256_hex,
};

use self::connect::S3Sender;
pub use self::location::{CredentialsError, LocationError, S3Location};

const SERVICE: &str = "s3";

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of one response. A list of a thousand names takes about half a megabyte.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;
const PAGE_MAX: usize = 1000;
/// Maximum number of idle connections that are kept.
const IDLE_MAX: usize = 16;
const ATTEMPTS_MAX: u32 = 4;
const RETRY_DELAY: Duration = Duration::from_millis(100);

pub struct S3Bucket {
    place: S3Location,
    identity: S3Credentials,
    peer: Endpoint,
    idle: Mutex<Vec<S3Sender>>,
}

/// Object names in order, with the length of each object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectPage {
    pub objects: Vec<(String, u64)>,
    /// True if there are more after the last.
    pub more: bool,
}

struct S3Answer {
    status: StatusCode,
    etag: Option<String>,
    body: Bytes,
}

impl S3Answer {
    fn expect_ok(self, what: &str) -> io::Result<Self> {
        if self.status == StatusCode::OK {
            Ok(self)
        } else {
            Err(response_error(what, self.status, &self.body))
        }
    }
}

struct S3Call<'a> {
    method: &'static str,
    /// Includes the prefix; empty for the bucket itself.
    name: &'a str,
    query: Vec<(String, String)>,
    headers: Vec<(&'static str, String)>,
    body: Bytes,
}

impl S3Bucket {
    pub fn new(place: S3Location, identity: S3Credentials) -> io::Result<Self> {
        let peer = connect::store_endpoint(&place)?;
        Ok(Self { place, identity, peer, idle: Mutex::default() })
    }

    /// Writes a new object. Returns false, and writes nothing, if the name exists; for stores that support
    /// `If-None-Match: *` on writes.
    pub async fn put_new(&self, name: &str, bytes: Vec<u8>) -> io::Result<bool> {
        let name = self.full_name(name);
        let headers = vec![("if-none-match", "*".to_owned())];
        let call = S3Call { method: "PUT", name: &name, query: vec![], headers, body: bytes.into() };
        let answer = self.send_with_retries(&call).await?;
        match answer.status {
            StatusCode::OK => Ok(true),
            // A retried write whose first response was lost finds its own object.
            StatusCode::PRECONDITION_FAILED => Ok(false),
            status => Err(response_error("write an object", status, &answer.body)),
        }
    }

    /// Reads the first `limit` bytes of an object; `None` if it does not exist.
    pub async fn get(&self, name: &str, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let name = self.full_name(name);
        let headers = vec![("range", format!("bytes=0-{}", limit.max(1) - 1))];
        let call = S3Call { method: "GET", name: &name, query: vec![], headers, body: Bytes::new() };
        let answer = self.send_with_retries(&call).await?;
        match answer.status {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
                Ok(Some(answer.body[..answer.body.len().min(limit)].to_vec()))
            }
            StatusCode::NOT_FOUND => Ok(None),
            status => Err(response_error("read an object", status, &answer.body)),
        }
    }

    /// Lists objects whose names begin with `prefix` and sort after `after`.
    pub async fn list(&self, prefix: &str, after: Option<&str>) -> io::Result<ObjectPage> {
        let pair = |name: &str, value: String| (name.to_owned(), value);
        let mut query = vec![
            pair("list-type", "2".into()),
            pair("max-keys", PAGE_MAX.to_string()),
            pair("prefix", self.full_name(prefix)),
        ];
        if let Some(after) = after {
            query.push(pair("start-after", self.full_name(after)));
        }
        let call = S3Call { method: "GET", name: "", query, headers: vec![], body: Bytes::new() };
        let answer = self.send_with_retries(&call).await?.expect_ok("list objects")?;
        let text = std::str::from_utf8(&answer.body).map_err(io::Error::other)?;
        // The names of logs need no XML escapes: they consist of ids, words and digits.
        let objects = xml_elements(text, "Contents")
            .filter_map(|object| {
                let name = xml_elements(object, "Key").next()?.strip_prefix(&self.place.prefix)?;
                Some((name.to_owned(), xml_elements(object, "Size").next()?.parse().ok()?))
            })
            .collect();
        Ok(ObjectPage { objects, more: xml_elements(text, "IsTruncated").next() == Some("true") })
    }

    /// Deletes an object. Succeeds if it does not exist.
    pub async fn delete(&self, name: &str) -> io::Result<()> {
        let name = self.full_name(name);
        let call =
            S3Call { method: "DELETE", name: &name, query: vec![], headers: vec![], body: Bytes::new() };
        let answer = self.send_with_retries(&call).await?;
        match answer.status {
            StatusCode::OK | StatusCode::NO_CONTENT | StatusCode::NOT_FOUND => Ok(()),
            status => Err(response_error("delete an object", status, &answer.body)),
        }
    }

    fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.place.prefix)
    }

    /// Sends a request, and retries transient failures.
    async fn send_with_retries(&self, call: &S3Call<'_>) -> io::Result<S3Answer> {
        let mut tries = 0;
        loop {
            tries += 1;
            let late = |_| io::Error::from(io::ErrorKind::TimedOut);
            let answer = timeout(ANSWER_TIMEOUT, self.send_once(call)).await.map_err(late).flatten();
            let is_passing = match &answer {
                Ok(S3Answer { status, .. }) => {
                    status.is_server_error()
                        || *status == StatusCode::TOO_MANY_REQUESTS
                        || *status == StatusCode::CONFLICT
                }
                Err(_) => true,
            };
            if !is_passing || tries >= ATTEMPTS_MAX {
                return answer;
            }
            sleep(RETRY_DELAY * 3_u32.pow(tries - 1)).await;
        }
    }

    async fn send_once(&self, call: &S3Call<'_>) -> io::Result<S3Answer> {
        let kept = self.idle.lock().pop().filter(S3Sender::is_ready);
        let mut sender = match kept {
            Some(sender) => sender,
            None => connect::connect(&self.peer).await?,
        };
        let response = sender.send_request(self.request(call)?).await.map_err(io::Error::other)?;
        let status = response.status();
        let etag = response.headers().get("etag").and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(sender);
        }
        Ok(S3Answer { status, etag, body })
    }

    fn request(&self, call: &S3Call<'_>) -> io::Result<Request<Full<Bytes>>> {
        let time = amz_date();
        let path = match call.name {
            "" => format!("/{}", percent_encode(&self.place.bucket, false)),
            name => format!("/{}/{}", percent_encode(&self.place.bucket, false), percent_encode(name, true)),
        };
        let standard = if self.place.tls { 443 } else { 80 };
        let host = match self.place.port {
            port if port == standard => self.place.host.clone(),
            port => format!("{}:{port}", self.place.host),
        };
        let body_hash = sha256_hex(&call.body);
        let mut headers =
            vec![("host", host.as_str()), ("x-amz-content-sha256", &body_hash), ("x-amz-date", &time)];
        if let Some(session) = &self.identity.session {
            headers.push(("x-amz-security-token", session));
        }
        headers.extend(call.headers.iter().map(|(name, value)| (*name, value.as_str())));
        let requested = CanonicalRequest {
            method: call.method,
            path: &path,
            query: &call.query,
            headers: &headers,
            body_hash: &body_hash,
        };
        let scope = Scope { region: &self.place.region, service: SERVICE };
        let signed = authorization(&self.identity, scope, &time, &requested);
        let uri =
            if call.query.is_empty() { path } else { format!("{path}?{}", canonical_query(&call.query)) };
        let mut request = Request::builder().method(call.method).uri(uri).header("authorization", signed);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(Full::new(call.body.clone())).map_err(io::Error::other)
    }
}

/// Error for a rejected request, with the store's code and message.
fn response_error(what: &str, status: StatusCode, body: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(body);
    let message =
        |tag| xml_elements(&text, tag).next().unwrap_or_default().chars().take(200).collect::<String>();
    io::Error::other(format!(
        "failed to {what}: the object store answered {status} {}: {}",
        message("Code"),
        message("Message")
    ))
}

/// The texts inside `<tag>…</tag>`.
fn xml_elements<'a>(text: &'a str, tag: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(open.as_str())?;
        let (inside, after) = after.split_once(close.as_str())?;
        rest = after;
        Some(inside)
    })
}

impl std::fmt::Debug for S3Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("S3").field("place", &self.place).finish_non_exhaustive()
    }
}
