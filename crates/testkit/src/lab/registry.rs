//! A small image registry in this process, with configurable faults.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{
    collections::HashMap,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::stream;
use parking_lot::Mutex;
use tokio::net::TcpListener;

const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const CHUNK: usize = 16 * 1024;

/// Delivery of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerDelivery {
    Fast,
    /// One chunk per interval.
    Slow(Duration),
    /// Half of the layer, then no more data.
    Stall,
    /// With a wrong byte.
    Corrupt,
}

pub struct Registry {
    shared: Arc<RegistryState>,
    address: String,
    server: tokio::task::JoinHandle<()>,
}

struct RegistryState {
    /// By `REPOSITORY/manifests/TAG-OR-DIGEST` and `REPOSITORY/blobs/DIGEST`.
    things: Mutex<HashMap<String, StoredBlob>>,
    layers: Mutex<LayerDelivery>,
    /// Required `USERNAME:PASSWORD`; `None` allows anonymous access.
    password: Mutex<Option<String>>,
    /// Number of responses that are being sent.
    open: AtomicUsize,
    manifests_requested: AtomicUsize,
    /// Digest and first byte of each request for a layer.
    layers_requested: Mutex<Vec<(String, usize)>>,
    /// True to accept requests and not answer them.
    is_silent: AtomicBool,
    /// False to send layers without stating their length.
    declares_length: AtomicBool,
}

/// Content of an image besides its layer.
#[derive(Clone, Copy, Debug)]
pub struct ImageOptions<'a> {
    pub architecture: &'a str,
    /// Field `config` of the configuration, as JSON.
    pub config: &'a str,
}

impl Default for ImageOptions<'_> {
    fn default() -> Self {
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        Self { architecture, config: r#"{"Cmd": ["/bin/true"]}"# }
    }
}

#[derive(Clone)]
struct StoredBlob {
    bytes: Bytes,
    kind: &'static str,
    digest: String,
    is_layer: bool,
}

impl Registry {
    pub async fn start() -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST).await
    }

    /// Listens on an address of this machine that hosts of a lab can reach.
    pub async fn start_at(address: Ipv4Addr) -> Self {
        let shared = Arc::new(RegistryState {
            things: Mutex::default(),
            layers: Mutex::new(LayerDelivery::Fast),
            password: Mutex::default(),
            open: AtomicUsize::new(0),
            manifests_requested: AtomicUsize::new(0),
            layers_requested: Mutex::default(),
            is_silent: AtomicBool::new(false),
            declares_length: AtomicBool::new(true),
        });
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let router = Router::new().fallback(handle_request).with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { shared, address, server }
    }

    pub fn set_layers(&self, layers: LayerDelivery) {
        *self.shared.layers.lock() = layers;
    }

    pub fn set_password(&self, username: &str, password: &str) {
        *self.shared.password.lock() = Some(format!("{username}:{password}"));
    }

    /// Number of layers that are being sent.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    pub fn manifests_requested(&self) -> usize {
        self.shared.manifests_requested.load(Ordering::SeqCst)
    }

    /// Digest and first byte of each request for a layer.
    pub fn layers_requested(&self) -> Vec<(String, usize)> {
        self.shared.layers_requested.lock().clone()
    }

    /// Accepts requests from now on, and does not answer them; or answers again.
    pub fn set_silent(&self, is_silent: bool) {
        self.shared.is_silent.store(is_silent, Ordering::SeqCst);
    }

    /// Whether responses with layers state their length, as most registries do.
    pub fn set_declares_length(&self, declares_length: bool) {
        self.shared.declares_length.store(declares_length, Ordering::SeqCst);
    }

    /// Host and port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Adds an image with one layer, and returns its name by tag and by digest.
    pub fn put(&self, repository: &str, tag: &str, layer: Vec<u8>) -> (String, String) {
        self.put_with(repository, tag, layer, ImageOptions::default())
    }

    pub fn put_with(
        &self,
        repository: &str,
        tag: &str,
        layer: Vec<u8>,
        options: ImageOptions<'_>,
    ) -> (String, String) {
        let diff = digest(&layer);
        self.put_layers(repository, tag, vec![(layer, diff)], options)
    }

    /// Adds an image; each layer comes with the digest of its uncompressed contents.
    pub fn put_layers(
        &self,
        repository: &str,
        tag: &str,
        layers: Vec<(Vec<u8>, String)>,
        options: ImageOptions<'_>,
    ) -> (String, String) {
        let sizes: Vec<u64> = layers.iter().map(|(layer, _)| layer.len() as u64).collect();
        self.put_sized(repository, tag, layers, &sizes, options)
    }

    /// Adds an image whose manifest declares these sizes of its layers.
    pub fn put_sized(
        &self,
        repository: &str,
        tag: &str,
        layers: Vec<(Vec<u8>, String)>,
        sizes: &[u64],
        options: ImageOptions<'_>,
    ) -> (String, String) {
        let content: serde_json::Value = serde_json::from_str(options.config).unwrap();
        let diffs: Vec<&String> = layers.iter().map(|(_, diff)| diff).collect();
        let config = serde_json::json!({
            "architecture": options.architecture,
            "os": "linux",
            "config": content,
            "rootfs": {"type": "layers", "diff_ids": diffs},
            "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "a test"}],
        });
        let config = serde_json::to_vec(&config).unwrap();
        let described: Vec<_> = layers
            .iter()
            .zip(sizes)
            .map(|((layer, _), size)| {
                serde_json::json!({"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                    "size": size, "digest": digest(layer)})
            })
            .collect();
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": config.len(), "digest": digest(&config)},
            "layers": described,
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let manifest_digest = digest(&manifest);
        let mut things = self.shared.things.lock();
        let mut keep = |path: String, bytes: Vec<u8>, kind, is_layer| {
            let thing = StoredBlob { digest: digest(&bytes), bytes: Bytes::from(bytes), kind, is_layer };
            things.insert(path, thing);
        };
        keep(format!("{repository}/blobs/{}", digest(&config)), config, "application/octet-stream", false);
        for (layer, _) in layers {
            let path = format!("{repository}/blobs/{}", digest(&layer));
            keep(path, layer, "application/octet-stream", true);
        }
        keep(format!("{repository}/manifests/{tag}"), manifest.clone(), MANIFEST, false);
        keep(format!("{repository}/manifests/{manifest_digest}"), manifest, MANIFEST, false);
        let name = format!("{}/{repository}", self.address);
        (format!("{name}:{tag}"), format!("{name}@{manifest_digest}"))
    }

    /// Name of an image that does not exist here.
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.address)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Digest of a layer.
pub fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    format!("sha256:{}", hex::encode(digest))
}

async fn handle_request(State(shared): State<Arc<RegistryState>>, request: Request) -> Response {
    if shared.is_silent.load(Ordering::SeqCst) {
        std::future::pending::<()>().await;
    }
    if !is_authorized(&shared, request.headers()) {
        let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"test\"")];
        return (StatusCode::UNAUTHORIZED, challenge, error_body("UNAUTHORIZED", "authentication required"))
            .into_response();
    }
    let path = request.uri().path();
    if path == "/v2/" {
        return "{}".into_response();
    }
    if path.contains("/manifests/") {
        shared.manifests_requested.fetch_add(1, Ordering::SeqCst);
    }
    let thing = path.strip_prefix("/v2/").and_then(|path| shared.things.lock().get(path).cloned());
    let Some(thing) = thing else {
        return (StatusCode::NOT_FOUND, error_body("MANIFEST_UNKNOWN", "manifest unknown")).into_response();
    };
    let mut thing = thing;
    let mut status = StatusCode::OK;
    if thing.is_layer && request.method() == Method::GET {
        let from = range_start(request.headers());
        shared.layers_requested.lock().push((thing.digest.clone(), from));
        if from > 0 {
            status = StatusCode::PARTIAL_CONTENT;
            thing.bytes = thing.bytes.slice(from..);
        }
    }
    let body = if request.method() == Method::HEAD { Body::empty() } else { blob_body(&shared, &thing) };
    let mut response = Response::builder().status(status).header(header::CONTENT_TYPE, thing.kind);
    if !thing.is_layer || shared.declares_length.load(Ordering::SeqCst) {
        response = response.header(header::CONTENT_LENGTH, thing.bytes.len());
    }
    response.header("Docker-Content-Digest", thing.digest).body(body).unwrap()
}

/// First byte of `Range: bytes=N-`; 0 without such a header.
fn range_start(headers: &HeaderMap) -> usize {
    let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()).unwrap_or(0)
}

fn error_body(code: &str, message: &str) -> String {
    serde_json::json!({"errors": [{"code": code, "message": message}]}).to_string()
}

fn is_authorized(shared: &RegistryState, headers: &HeaderMap) -> bool {
    let Some(expected) = shared.password.lock().clone() else { return true };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    given == Some(&format!("Basic {}", STANDARD.encode(expected)))
}

/// Counts a response while it is being sent.
struct TransferGuard(Arc<RegistryState>);

impl Drop for TransferGuard {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn blob_body(shared: &Arc<RegistryState>, thing: &StoredBlob) -> Body {
    let layers = if thing.is_layer { *shared.layers.lock() } else { LayerDelivery::Fast };
    let mut bytes = thing.bytes.to_vec();
    let (pause, stop) = match layers {
        LayerDelivery::Fast => (Duration::ZERO, bytes.len()),
        LayerDelivery::Slow(pause) => (pause, bytes.len()),
        LayerDelivery::Stall => (Duration::ZERO, bytes.len() / 2),
        LayerDelivery::Corrupt => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            (Duration::ZERO, bytes.len())
        }
    };
    shared.open.fetch_add(1, Ordering::SeqCst);
    let open = TransferGuard(Arc::clone(shared));
    let bytes = Bytes::from(bytes);
    Body::from_stream(stream::unfold((0, open), move |(at, open)| {
        let bytes = bytes.clone();
        async move {
            if at >= bytes.len() {
                return None;
            }
            if at >= stop {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(pause).await;
            let end = (at + CHUNK).min(bytes.len());
            Some((Ok::<_, std::io::Error>(bytes.slice(at..end)), (end, open)))
        }
    }))
}
