//! Test proxy, with replicas of all kinds behind it and raw bytes in front of it.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use windlass_gateway::{
    AccessLog, AccessRecord, DirectConnector, Gatekeeper, ListenerConfig, ListenerLimits, Proxy, ProxyLimits,
    RequestRouting, Routes, ServiceWaker, Verdict,
    route::{ReplicaRoute, ReplicaTarget, RouteSnapshot, Service},
};
use windlass_testkit::wait::{TIMEOUT, eventually_async};

/// Waits with a timeout.
pub(crate) async fn with_timeout<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(TIMEOUT, what).await.expect("it takes too long")
}

/// Waits for a state.
pub(crate) async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    eventually_async(what, async || is_so().then_some(())).await;
}

/// Task that is aborted on drop.
pub(crate) struct AbortOnDrop(pub(crate) JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) type UpstreamResponse = Response<BoxBody<Bytes, Infallible>>;

pub(crate) fn text_response(text: impl Into<Bytes>) -> UpstreamResponse {
    Response::new(Full::new(text.into()).boxed())
}

/// Test replica that counts its connections.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    pub(crate) connections: Arc<AtomicUsize>,
    _task: AbortOnDrop,
}

impl Upstream {
    /// Passes each raw connection to `talk`.
    pub(crate) async fn raw<F, T>(talk: F) -> Self
    where
        F: Fn(TcpStream) -> T + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let task = tokio::spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                open.spawn(talk(stream));
            }
        });
        Self { address, connections, _task: AbortOnDrop(task) }
    }

    pub(crate) async fn http<F, T>(answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> T + Send + Sync + 'static,
        T: Future<Output = UpstreamResponse> + Send + 'static,
    {
        let answer = Arc::new(answer);
        Self::raw(move |stream| {
            let answer = Arc::clone(&answer);
            async move {
                let service = service_fn(move |request| {
                    let answer = Arc::clone(&answer);
                    async move { Ok::<_, Infallible>(answer(request).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                let _ = connection.await;
            }
        })
        .await
    }

    /// Responds with the request: method, path and all headers.
    pub(crate) async fn echo() -> Self {
        Self::http(|request| async move {
            let mut message = format!("{} {}\n", request.method(), request.uri());
            for (name, value) in request.headers() {
                message.push_str(&format!("{name}: {}\n", value.to_str().unwrap()));
            }
            let body = request.into_body().collect().await.unwrap().to_bytes();
            message.push_str(&format!("\n{}", String::from_utf8_lossy(&body)));
            text_response(message)
        })
        .await
    }

    pub(crate) async fn replying(word: &'static str) -> Self {
        Self::http(move |_| async move { text_response(word) }).await
    }

    pub(crate) fn replica(&self, id: &str) -> ReplicaRoute {
        ReplicaRoute { id: id.to_owned(), target: ReplicaTarget::Tcp { address: self.address } }
    }
}

/// Returns an address without a listener.
pub(crate) async fn unused_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

pub(crate) fn service(replicas: Vec<ReplicaRoute>) -> Service {
    Service {
        domains: vec!["llm.test".to_owned()],
        auth: false,
        answer_ms: 30_000,
        ..Service::new("main", "llm").with_replicas(replicas)
    }
}

/// Test tokens: `good` is a member of `main` until it is revoked, `away` cannot be checked. The server knows those, and
/// `chosen`.
pub(crate) struct Tokens {
    revoked: CancellationToken,
}

impl Gatekeeper for Tokens {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
        let verdict = match (token, project) {
            ("good", "main") => Verdict::Allow { identity: Some("ann.sig".parse().unwrap()) },
            ("away", _) => Verdict::Unknown,
            _ => Verdict::Deny,
        };
        Box::pin(std::future::ready(verdict))
    }

    fn is_known<'a>(
        &'a self,
        token: &'a str,
        _project: &'a str,
        _peer: IpAddr,
    ) -> BoxFuture<'a, Option<bool>> {
        Box::pin(std::future::ready(Some(matches!(token, "good" | "away" | "chosen"))))
    }

    fn wait_until_revoked(&self, _token: &str, _project: &str) -> BoxFuture<'static, ()> {
        Box::pin(self.revoked.clone().cancelled_owned())
    }
}

/// Records services that were woken, and access records.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) woken: Mutex<Vec<String>>,
    pub(crate) records: Mutex<Vec<AccessRecord>>,
}

impl ServiceWaker for Recorder {
    fn wake(&self, project: &str, run: &str) {
        self.woken.lock().push(format!("{project}/{run}"));
    }
}

impl AccessLog for Recorder {
    fn record(&self, record: AccessRecord) {
        self.records.lock().push(record);
    }
}

/// Proxy with a listener.
pub(crate) struct TestProxy {
    pub(crate) address: SocketAddr,
    pub(crate) routes: Arc<Routes>,
    pub(crate) seen: Arc<Recorder>,
    /// Revokes the rights of callers with the token `good`.
    pub(crate) revoked: CancellationToken,
    pub(crate) stop: CancellationToken,
    pub(crate) task: AbortOnDrop,
    generation: AtomicU64,
    _stop: DropGuard,
}

pub(crate) struct TestSettings {
    pub(crate) bounds: ProxyLimits,
    pub(crate) limits: ListenerLimits,
    pub(crate) listener: RequestRouting,
    pub(crate) challenges: Option<Arc<windlass_gateway::acme::Challenges>>,
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
}

pub(crate) fn default_settings() -> TestSettings {
    TestSettings {
        bounds: ProxyLimits::USUAL,
        limits: ListenerLimits::USUAL,
        listener: RequestRouting::Hosts,
        challenges: None,
        tls: None,
    }
}

pub(crate) fn path_settings() -> TestSettings {
    let listener =
        RequestRouting::ByPath { services: "/proxy/services".to_owned(), models: "/proxy/models".to_owned() };
    TestSettings { listener, ..default_settings() }
}

impl TestProxy {
    pub(crate) async fn new(services: Vec<Service>) -> Self {
        Self::with(default_settings(), services).await
    }

    pub(crate) async fn with(setting: TestSettings, services: Vec<Service>) -> Self {
        let routes = Arc::new(Routes::default());
        let seen = Arc::new(Recorder::default());
        let revoked = CancellationToken::new();
        let proxy = Proxy {
            routes: Arc::clone(&routes),
            connector: Arc::new(DirectConnector),
            gatekeeper: Arc::new(Tokens { revoked: revoked.clone() }),
            waker: Arc::clone(&seen) as Arc<dyn ServiceWaker>,
            log: Some(Arc::clone(&seen) as Arc<dyn AccessLog>),
            certificates: None,
            limits: setting.bounds,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let listening = ListenerConfig {
            proxy: Arc::new(proxy),
            routing: setting.listener,
            challenges: setting.challenges,
            tls: setting.tls,
            limits: setting.limits,
        };
        let task = tokio::spawn(windlass_gateway::serve(listener, listening, stop.clone()));
        let generation = AtomicU64::new(0);
        let guard = stop.clone().drop_guard();
        let bed =
            Self { address, routes, seen, revoked, stop, task: AbortOnDrop(task), generation, _stop: guard };
        bed.replace(services);
        bed
    }

    pub(crate) fn replace(&self, services: Vec<Service>) -> Vec<Arc<windlass_gateway::Replica>> {
        let generation = self.generation.fetch_add(1, Ordering::SeqCst) + 1;
        self.routes.replace(RouteSnapshot { generation, services }).unwrap()
    }

    /// Sends raw bytes on a new connection and reads until its end.
    pub(crate) async fn raw(&self, bytes: impl AsRef<[u8]>) -> String {
        raw(self.address, bytes).await
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> TestResponse {
        self.request("GET", path, &[], "").await
    }

    /// Sends one request on a separate connection.
    pub(crate) async fn request(
        &self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &str,
    ) -> TestResponse {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\n");
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        TestResponse::parse(&self.raw(format!("{head}\r\n{body}")).await)
    }
}

pub(crate) async fn raw(address: SocketAddr, bytes: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that refuses early may close before it has read everything.
    let _ = stream.write_all(bytes.as_ref()).await;
    let mut answer = Vec::new();
    let _ = with_timeout(stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Parsed response. Chunks are joined.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) fields: HashMap<String, String>,
    pub(crate) body: String,
}

impl TestResponse {
    pub(crate) fn parse(answer: &str) -> Self {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        let fields: HashMap<String, String> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let chunked = fields.get("transfer-encoding").is_some_and(|coding| coding == "chunked");
        let body = if chunked { join_chunks(body) } else { body.to_owned() };
        Self { status: status.unwrap_or(0), fields, body }
    }

    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

fn join_chunks(mut body: &str) -> String {
    let mut joined = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 {
            break;
        }
        joined.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    joined
}

/// Reads until the bytes end with `end`.
pub(crate) async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(end.as_bytes()) {
        let byte = with_timeout(stream.read_u8()).await;
        match byte {
            Ok(byte) => bytes.push(byte),
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&bytes)),
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Reads exactly the head of a request.
pub(crate) async fn read_head(stream: &mut TcpStream) -> String {
    read_until(stream, "\r\n\r\n").await
}
