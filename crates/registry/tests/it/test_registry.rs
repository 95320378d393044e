//! In-process registry: manifests, blobs, authentication, redirects and injected faults.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const TOKEN: &str = "a-token-of-the-test";

pub(crate) struct Registry {
    shared: Arc<Shared>,
    address: String,
}

#[derive(Default)]
struct Shared {
    address: Mutex<String>,
    /// Type and bytes by `REPOSITORY/manifests/VERSION` and `REPOSITORY/blobs/DIGEST`.
    objects: Mutex<HashMap<String, (&'static str, Bytes)>>,
    password: Mutex<Option<String>>,
    requires_tokens: Mutex<bool>,
    issued_scopes: Mutex<Vec<String>>,
    /// Number of calls that are answered with 503 before the next successful one.
    failures: AtomicUsize,
    /// Server of blobs, if it is another one.
    blob_server: Mutex<Option<String>>,
    redirected_requests: Mutex<Vec<String>>,
    /// Number of blob responses that break in the middle.
    broken_blobs: AtomicUsize,
    range_requests: AtomicUsize,
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes)))
}

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // Ends with the runtime of the test.
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

impl Registry {
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(Shared::default());
        let address = serve(Router::new().fallback(handle_request).with_state(Arc::clone(&shared))).await;
        shared.address.lock().clone_from(&address);
        Self { shared, address }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.address)
    }

    fn store(&self, path: String, kind: &'static str, bytes: &[u8]) {
        self.shared.objects.lock().insert(path, (kind, Bytes::copy_from_slice(bytes)));
    }

    /// Stores an image of one layer; returns the digest of its manifest.
    pub(crate) fn push(&self, repository: &str, tag: &str, architecture: &str, layer: &[u8]) -> String {
        let config =
            json!({"os": "linux", "architecture": architecture, "config": {"Cmd": ["serve"]}}).to_string();
        let layer_entry = json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(layer),
            "size": layer.len()});
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer_entry],
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(config.as_bytes()),
                "size": config.len()}})
        .to_string();
        let binary = "application/octet-stream";
        self.store(format!("{repository}/blobs/{}", digest(config.as_bytes())), binary, config.as_bytes());
        self.store(format!("{repository}/blobs/{}", digest(layer)), binary, layer);
        let own = digest(manifest.as_bytes());
        self.store(format!("{repository}/manifests/{tag}"), MANIFEST, manifest.as_bytes());
        self.store(format!("{repository}/manifests/{own}"), MANIFEST, manifest.as_bytes());
        own
    }

    pub(crate) fn push_index(&self, repository: &str, tag: &str, images: &[(&str, &str)]) {
        let manifests: Vec<_> = images
            .iter()
            .map(|(architecture, digest)| {
                json!({"mediaType": MANIFEST, "digest": digest, "size": 1,
                    "platform": {"os": "linux", "architecture": architecture}})
            })
            .collect();
        let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
        self.store(format!("{repository}/manifests/{tag}"), INDEX, index.as_bytes());
    }

    pub(crate) fn replace_manifest(&self, repository: &str, version: &str, bytes: &[u8]) {
        self.store(format!("{repository}/manifests/{version}"), MANIFEST, bytes);
    }

    pub(crate) fn replace_blob(&self, repository: &str, digest: &str, bytes: &[u8]) {
        self.store(format!("{repository}/blobs/{digest}"), "application/octet-stream", bytes);
    }

    pub(crate) fn set_password(&self, username: &str, password: &str) {
        let pair = STANDARD.encode(format!("{username}:{password}"));
        *self.shared.password.lock() = Some(format!("Basic {pair}"));
    }

    pub(crate) fn require_tokens(&self) {
        *self.shared.requires_tokens.lock() = true;
    }

    /// Returns the scopes for which tokens were issued.
    pub(crate) fn issued_scopes(&self) -> Vec<String> {
        self.shared.issued_scopes.lock().clone()
    }

    pub(crate) fn fail_next(&self, calls: usize) {
        self.shared.failures.store(calls, Ordering::SeqCst);
    }

    /// Serves blobs from another server from now on.
    pub(crate) async fn redirect_blobs(&self) {
        let other =
            serve(Router::new().fallback(handle_redirected).with_state(Arc::clone(&self.shared))).await;
        *self.shared.blob_server.lock() = Some(other);
    }

    pub(crate) fn redirected_requests(&self) -> Vec<String> {
        self.shared.redirected_requests.lock().clone()
    }

    pub(crate) fn break_blobs(&self, times: usize) {
        self.shared.broken_blobs.store(times, Ordering::SeqCst);
    }

    pub(crate) fn range_requests(&self) -> usize {
        self.shared.range_requests.load(Ordering::SeqCst)
    }
}

fn error_response(status: StatusCode, message: &str) -> Response {
    (status, json!({"errors": [{"code": "TEST", "message": message}]}).to_string()).into_response()
}

fn count_down(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

async fn handle_request(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if path == "/token" {
        return issue_token(&shared, authorization, request.uri().query().unwrap_or_default());
    }
    if count_down(&shared.failures) {
        return error_response(StatusCode::SERVICE_UNAVAILABLE, "out of order");
    }
    let requires_tokens = *shared.requires_tokens.lock();
    let expected =
        if requires_tokens { Some(format!("Bearer {TOKEN}")) } else { shared.password.lock().clone() };
    if expected.is_some() && expected.as_deref() != authorization {
        let own = shared.address.lock().clone();
        let challenge = if requires_tokens {
            format!("Bearer realm=\"http://{own}/token\",service=\"test\"")
        } else {
            "Basic realm=\"test\"".to_owned()
        };
        let refused = error_response(StatusCode::UNAUTHORIZED, "authentication required");
        return ([(header::WWW_AUTHENTICATE, challenge)], refused).into_response();
    }
    let Some(wanted) = path.strip_prefix("/v2/") else {
        return error_response(StatusCode::NOT_FOUND, "no such path");
    };
    let other = shared.blob_server.lock().clone().filter(|_| wanted.contains("/blobs/"));
    if let Some(other) = other.filter(|_| !wanted.ends_with(&config_digest(&shared))) {
        return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, format!("http://{other}{path}"))])
            .into_response();
    }
    object_response(&shared, wanted, request.headers())
}

/// Returns the digest of the configuration, which is not redirected: only layers are on the other server.
fn config_digest(_shared: &Shared) -> String {
    digest(
        json!({"os": "linux", "architecture": "amd64", "config": {"Cmd": ["serve"]}}).to_string().as_bytes(),
    )
}

fn issue_token(shared: &Shared, authorization: Option<&str>, query: &str) -> Response {
    let password = shared.password.lock().clone();
    if password.is_some() && password.as_deref() != authorization {
        return error_response(StatusCode::UNAUTHORIZED, "wrong password");
    }
    let scope = query.split('&').find_map(|part| part.strip_prefix("scope=")).unwrap_or_default();
    shared.issued_scopes.lock().push(scope.to_owned());
    json!({"token": TOKEN, "expires_in": 300}).to_string().into_response()
}

async fn handle_redirected(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let seen =
        request.headers().get(header::AUTHORIZATION).map_or("no authorization", |_| "an authorization");
    shared.redirected_requests.lock().push(seen.to_owned());
    object_response(&shared, request.uri().path().trim_start_matches("/v2/"), request.headers())
}

fn object_response(shared: &Shared, path: &str, headers: &HeaderMap) -> Response {
    let found = shared.objects.lock().get(path).cloned();
    let Some((kind, bytes)) = found else { return error_response(StatusCode::NOT_FOUND, "manifest unknown") };
    let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let from = range.and_then(|text| text.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    if from.is_some() {
        shared.range_requests.fetch_add(1, Ordering::SeqCst);
    }
    let rest = bytes.slice(from.unwrap_or(0)..);
    let status = if from.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let length = rest.len();
    let is_large = length > 10_000;
    let body = if is_large && count_down(&shared.broken_blobs) {
        // Half of the announced bytes, then an error instead of the rest.
        let half = rest.slice(..length / 2);
        let first = futures_util::stream::once(async move { Ok(half) });
        let rest = futures_util::stream::once(async {
            // The server sends what it has before it polls again.
            tokio::task::yield_now().await;
            Err(std::io::Error::other("broken by order"))
        });
        Body::from_stream(futures_util::StreamExt::chain(first, rest))
    } else {
        Body::from(rest)
    };
    Response::builder()
        .status(status)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CONTENT_LENGTH, length)
        .body(body)
        .unwrap()
}
