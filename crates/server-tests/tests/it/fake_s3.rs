//! A small S3 server that checks the signature of every request.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use ring::hmac;
use sha2::{Digest, Sha256};
use tokio::{net::TcpListener, task::JoinHandle};
use windlass_server::logs::objects::s3::{S3Bucket, S3Credentials, S3Location};

const KEY: &str = "KEYOFTHESETESTS";
const SECRET: &str = "secret/of+these tests";
const BUCKET: &str = "logs-of-jobs";
/// Fewer names per page than requested, which S3 allows.
const PAGE_MAX: usize = 7;

#[derive(Default)]
pub(crate) struct FakeS3State {
    pub(crate) objects: Mutex<BTreeMap<String, Bytes>>,
    /// Number of requests to answer with 500 before they are processed, and after.
    pub(crate) fail_before: AtomicUsize,
    pub(crate) fail_after: AtomicUsize,
    /// True for a store that ignores `If-None-Match` and replaces objects.
    pub(crate) ignores_conditions: bool,
}

pub(crate) struct FakeS3 {
    pub(crate) shop: Arc<FakeS3State>,
    port: u16,
    task: JoinHandle<()>,
}

impl Drop for FakeS3 {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeS3 {
    pub(crate) async fn start(shop: FakeS3State) -> Self {
        let shop = Arc::new(shop);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = Arc::clone(&shop);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shop = Arc::clone(&serving);
                tokio::spawn(async move {
                    let service = service_fn(move |request| handle_request(Arc::clone(&shop), request));
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { shop, port, task }
    }

    pub(crate) fn bucket_with(&self, secret: &str) -> S3Bucket {
        let place = S3Location {
            bucket: BUCKET.into(),
            prefix: "a/b/".into(),
            region: "eu-test-1".into(),
            host: "127.0.0.1".into(),
            port: self.port,
            tls: false,
            roots: None,
            credentials: None,
        };
        let identity = S3Credentials {
            key: KEY.into(),
            secret: secret.into(),
            session: Some("lent for a while".into()),
        };
        S3Bucket::new(place, identity).unwrap()
    }

    pub(crate) fn bucket(&self) -> S3Bucket {
        self.bucket_with(SECRET)
    }
}

fn take_fault(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn response(status: u16, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::new(body.into())).unwrap()
}

async fn handle_request(
    shop: Arc<FakeS3State>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    if take_fault(&shop.fail_before) {
        return Ok(response(500, "<Error><Code>InternalError</Code></Error>"));
    }
    if let Err(why) = check_signature(&head, &body) {
        return Ok(response(
            403,
            format!("<Error><Code>SignatureDoesNotMatch</Code><Message>{why}</Message></Error>"),
        ));
    }
    let path =
        head.uri.path().strip_prefix(&format!("/{BUCKET}")).unwrap_or("?").trim_start_matches('/').to_owned();
    let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok());
    let mut objects = shop.objects.lock();
    let answer = match (head.method.as_str(), path.as_str()) {
        ("GET", "") => list_objects(&objects, head.uri.query().unwrap_or_default()),
        ("GET", name) => match objects.get(name) {
            None => response(404, "<Error><Code>NoSuchKey</Code></Error>"),
            Some(object) => {
                let end: usize = header("range").unwrap().strip_prefix("bytes=0-").unwrap().parse().unwrap();
                response(206, object.slice(..object.len().min(end + 1)))
            }
        },
        ("PUT", name) => {
            let only_new = header("if-none-match") == Some("*") && !shop.ignores_conditions;
            if only_new && objects.contains_key(name) {
                response(412, "<Error><Code>PreconditionFailed</Code></Error>")
            } else {
                objects.insert(name.to_owned(), body);
                response(200, "")
            }
        }
        ("DELETE", name) => {
            objects.remove(name);
            response(204, "")
        }
        other => response(405, format!("{other:?}")),
    };
    Ok(if take_fault(&shop.fail_after) {
        response(503, "<Error><Code>SlowDown</Code></Error>")
    } else {
        answer
    })
}

fn list_objects(objects: &BTreeMap<String, Bytes>, query: &str) -> Response<Full<Bytes>> {
    let requested: BTreeMap<String, String> = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(n, v)| (n.into(), v.replace("%2F", "/")))
        .collect();
    let (prefix, after) = (&requested["prefix"], requested.get("start-after").cloned().unwrap_or_default());
    let found: Vec<_> =
        objects.iter().filter(|(name, _)| name.starts_with(prefix.as_str()) && **name > after).collect();
    let mut text = format!("<ListBucketResult><IsTruncated>{}</IsTruncated>", found.len() > PAGE_MAX);
    for (name, object) in found.iter().take(PAGE_MAX) {
        text += &format!("<Contents><Key>{name}</Key><Size>{}</Size></Contents>", object.len());
    }
    response(200, text + "</ListBucketResult>")
}

/// Computes the signature of the received request, independently of the client's implementation.
fn check_signature(head: &hyper::http::request::Parts, body: &[u8]) -> Result<(), String> {
    let header = |name: &str| {
        head.headers.get(name).and_then(|value| value.to_str().ok()).ok_or_else(|| format!("no {name}"))
    };
    let authorization = header("authorization")?;
    let rest = authorization.strip_prefix("AWS4-HMAC-SHA256 ").ok_or("another kind")?;
    let parts: BTreeMap<&str, &str> = rest.split(',').filter_map(|part| part.split_once('=')).collect();
    let credential: Vec<&str> = parts["Credential"].split('/').collect();
    let [key, day, region, service, last] = credential[..] else { return Err("credential".into()) };
    let time = header("x-amz-date")?;
    if key != KEY || !time.starts_with(day) || (region, service, last) != ("eu-test-1", "s3", "aws4_request")
    {
        return Err(format!("scope {credential:?} at {time}"));
    }
    if header("x-amz-content-sha256")? != hex::encode(Sha256::digest(body)) {
        return Err("another body".into());
    }
    let names: Vec<&str> = parts["SignedHeaders"].split(';').collect();
    for must in ["host", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token"] {
        if !names.contains(&must) {
            return Err(format!("{must} is not signed"));
        }
    }
    let mut query: Vec<&str> = head.uri.query().unwrap_or_default().split('&').collect();
    query.sort_unstable();
    let mut text = vec![head.method.to_string(), head.uri.path().to_owned(), query.join("&")];
    for name in &names {
        text.push(format!("{name}:{}", header(name)?));
    }
    text.extend([String::new(), names.join(";"), hex::encode(Sha256::digest(body))]);
    let digest = hex::encode(Sha256::digest(text.join("\n").as_bytes()));
    let scope = credential[1..].join("/");
    let sign = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
    };
    let key = [day, region, service, last]
        .iter()
        .fold(format!("AWS4{SECRET}").into_bytes(), |key, part| sign(&key, part));
    let expect = hex::encode(sign(&key, &format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{digest}")));
    if parts["Signature"] == expect { Ok(()) } else { Err("another signature".into()) }
}
