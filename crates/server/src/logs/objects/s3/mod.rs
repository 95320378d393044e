//! A bucket of an S3-compatible store: AWS, MinIO, Ceph and others.
//!
//! Only four calls are needed, so the client is part of this crate: a library would bring fifty more and a second TLS
//! implementation. The store must support `If-None-Match: *` on writes; without it two writers could replace each
//! other's objects. [`Bucket::check`] tests this at the start.

mod connect;
mod sign;

use std::{io, time::Duration};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, body::Bytes};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use windlass_dial::Endpoint;

pub use self::sign::S3Credentials;
use self::{
    connect::S3Sender,
    sign::{CanonicalRequest, authorization, canonical_query, percent_encode, sha256_hex},
};
use super::{Bucket, BucketFuture, HEADER_BYTES, OBJECT_BYTES_MAX, ObjectPage};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of one response. A list of a thousand names takes about half a megabyte.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;
const PAGE_MAX: usize = 1000;
/// Maximum number of idle connections that are kept.
const IDLE_MAX: usize = 16;
const ATTEMPTS_MAX: u32 = 4;
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Location of a bucket.
#[derive(Clone, Debug)]
pub struct S3Location {
    pub bucket: String,
    /// Prepended to every name; empty, or ends with a slash.
    pub prefix: String,
    pub region: String,
    pub host: String,
    pub port: u16,
    pub tls: bool,
    /// A file of certificates to trust instead of the system's.
    pub roots: Option<String>,
}

pub struct S3Bucket {
    place: S3Location,
    identity: S3Credentials,
    peer: Endpoint,
    idle: Mutex<Vec<S3Sender>>,
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

    /// Checks that the bucket exists, is writable, and refuses to write a name twice.
    async fn check_conditional_writes(&self) -> io::Result<()> {
        let name = format!("check/{:016x}", getrandom::u64().map_err(io::Error::other)?);
        let first = self.link_new_file(&name, b"first".to_vec()).await?;
        let second = self.link_new_file(&name, b"second".to_vec()).await?;
        self.delete(&name).await?;
        if first && !second {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the object store does not support `If-None-Match: *` on writes; two servers could overwrite \
             each other's logs",
        ))
    }

    fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.place.prefix)
    }

    /// Sends a request, and retries transient failures.
    async fn send_with_retries(&self, call: &S3Call<'_>) -> io::Result<(StatusCode, Bytes)> {
        let mut tries = 0;
        loop {
            tries += 1;
            let late = |_| io::Error::from(io::ErrorKind::TimedOut);
            let answer = timeout(ANSWER_TIMEOUT, self.send_once(call)).await.map_err(late).flatten();
            let is_passing = match &answer {
                Ok((status, _)) => {
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

    async fn send_once(&self, call: &S3Call<'_>) -> io::Result<(StatusCode, Bytes)> {
        let kept = self.idle.lock().pop().filter(S3Sender::is_ready);
        let mut sender = match kept {
            Some(sender) => sender,
            None => connect::connect(&self.peer).await?,
        };
        let response = sender.send_request(self.request(call)?).await.map_err(io::Error::other)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(sender);
        }
        Ok((status, body))
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
        let signed = authorization(&self.identity, &self.place.region, &time, &requested);
        let uri =
            if call.query.is_empty() { path } else { format!("{path}?{}", canonical_query(&call.query)) };
        let mut request = Request::builder().method(call.method).uri(uri).header("authorization", signed);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(Full::new(call.body.clone())).map_err(io::Error::other)
    }
}

#[expect(clippy::disallowed_methods, reason = "a signature is good at one moment, by the wall clock")]
fn amz_date() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since.as_secs()).ok().and_then(|secs| jiff::Timestamp::from_second(secs).ok());
    now.unwrap_or_default().strftime("%Y%m%dT%H%M%SZ").to_string()
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

impl Bucket for S3Bucket {
    fn link_new_file<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BucketFuture<'a, bool> {
        Box::pin(async move {
            let name = self.full_name(name);
            let headers = vec![("if-none-match", "*".to_owned())];
            let body = Bytes::from(bytes);
            let call = S3Call { method: "PUT", name: &name, query: vec![], headers, body: body.clone() };
            match self.send_with_retries(&call).await? {
                (StatusCode::OK, _) => Ok(true),
                // A retried write whose first response was lost finds its own object.
                (StatusCode::PRECONDITION_FAILED, _) => Ok(false),
                (status, body) => Err(response_error("write an object", status, &body)),
            }
        })
    }

    fn get<'a>(&'a self, name: &'a str, limit: Option<usize>) -> BucketFuture<'a, Option<Vec<u8>>> {
        Box::pin(async move {
            let name = self.full_name(name);
            let limit = limit.unwrap_or(HEADER_BYTES + OBJECT_BYTES_MAX);
            let headers = vec![("range", format!("bytes=0-{}", limit.max(1) - 1))];
            let call = S3Call { method: "GET", name: &name, query: vec![], headers, body: Bytes::new() };
            match self.send_with_retries(&call).await? {
                (StatusCode::OK | StatusCode::PARTIAL_CONTENT, body) => {
                    Ok(Some(body[..body.len().min(limit)].to_vec()))
                }
                (StatusCode::NOT_FOUND, _) => Ok(None),
                (status, body) => Err(response_error("read an object", status, &body)),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> BucketFuture<'a, ObjectPage> {
        Box::pin(async move {
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
            let (status, body) = self.send_with_retries(&call).await?;
            if status != StatusCode::OK {
                return Err(response_error("list objects", status, &body));
            }
            let text = std::str::from_utf8(&body).map_err(io::Error::other)?;
            // The names need no XML escapes: they consist of ids, words and digits.
            let objects = xml_elements(text, "Contents")
                .filter_map(|object| {
                    let name = xml_elements(object, "Key").next()?.strip_prefix(&self.place.prefix)?;
                    Some((name.to_owned(), xml_elements(object, "Size").next()?.parse().ok()?))
                })
                .collect();
            Ok(ObjectPage { objects, more: xml_elements(text, "IsTruncated").next() == Some("true") })
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BucketFuture<'a, ()> {
        Box::pin(async move {
            let name = self.full_name(name);
            let call =
                S3Call { method: "DELETE", name: &name, query: vec![], headers: vec![], body: Bytes::new() };
            match self.send_with_retries(&call).await? {
                (StatusCode::OK | StatusCode::NO_CONTENT | StatusCode::NOT_FOUND, _) => Ok(()),
                (status, body) => Err(response_error("delete an object", status, &body)),
            }
        })
    }

    fn check(&self) -> BucketFuture<'_, ()> {
        Box::pin(self.check_conditional_writes())
    }

    /// A list is a request that costs money.
    fn fresh_for(&self) -> Duration {
        Duration::from_secs(5)
    }
}

impl std::fmt::Debug for S3Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("S3").field("place", &self.place).finish_non_exhaustive()
    }
}
