//! HTTP server of shim and runner: HTTP/1.1 and HTTP/2 without TLS, on unix sockets and TCP, with limits on everything
//! that a client may send, and errors as plain text.
//!
//! ```text
//! let listener = http::bind_unix(&path)?;                    // or tokio's TcpListener
//! http::serve(listener, router, stop.clone()).await;         // returns after `stop` and a short grace period
//!
//! async fn submit(http::Json(body): http::Json<Submit>) -> Result<(), http::Refusal> {
//!     Err(http::Refusal::conflict("the job was started"))    // 409, text/plain
//! }
//! ```

use std::{
    fs,
    future::Future,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixListener as StdUnixListener},
    },
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, Request, rejection::BytesRejection},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use rustix::fs::{Mode, OFlags};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::digest::sha256_hex;

/// Maximum size in bytes of the body of a request that is not an upload.
pub const BODY_BYTES_MAX: usize = 1 << 20;
const HEADERS_MAX: usize = 100;
const HEAD_BYTES_MAX: usize = 32 * 1024;
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit for receiving a body that is read whole.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECTIONS_MAX: usize = 1024;
/// Maximum number of concurrent requests on one HTTP/2 connection.
const STREAMS_MAX: u32 = 512;
/// Flow-control window per stream. One slow reader must not use up the window of its connection.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 32 * 1024 * 1024;
/// Interval of HTTP/2 pings. A peer that does not answer one within `PING_TIMEOUT` is disconnected.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that requests in flight have to finish when the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Delay after a failed accept. When no file descriptors are left, retrying at once does not help.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Source of connections.
pub trait Listener: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    fn accept(&mut self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for UnixListener {
    type Stream = UnixStream;
    async fn accept(&mut self) -> io::Result<UnixStream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;
    async fn accept(&mut self) -> io::Result<TcpStream> {
        let (stream, _) = Self::accept(self).await?;
        // Small responses must not wait for more data; a socket that refuses the option is about to fail anyway.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

/// Serves until `stop`, then lets requests in flight finish within `SHUTDOWN_GRACE`.
pub async fn serve<L: Listener>(mut listener: L, router: Router, stop: CancellationToken) {
    let router = router.layer(DefaultBodyLimit::max(BODY_BYTES_MAX));
    let builder = builder();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            // A permit comes first: connections that cannot be served yet wait in the kernel's queue.
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            Ok((place, listener.accept().await?))
        };
        let accepted: io::Result<_> = tokio::select! {
            accepted = next => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = stop.cancelled() => break,
        };
        let (place, stream) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if !is_transient(&error) {
                    tracing::warn!(%error, "failed to accept connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
                continue;
            }
        };
        let (builder, router, stop) = (builder.clone(), router.clone(), stop.clone());
        connections.spawn(async move {
            serve_connection(&builder, stream, router, &stop).await;
            drop(place);
        });
    }
    drop(listener);
    let rest = async { while connections.join_next().await.is_some() {} };
    if timeout(SHUTDOWN_GRACE, rest).await.is_err() {
        tracing::debug!("requests in flight were cancelled");
    }
}

/// Serves one connection that did not come from a listener.
pub async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    stop: CancellationToken,
) {
    serve_connection(&builder(), stream, router.layer(DefaultBodyLimit::max(BODY_BYTES_MAX)), &stop).await;
}

async fn serve_connection(
    builder: &auto::Builder<TokioExecutor>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    stop: &CancellationToken,
) {
    let service = TowerToHyperService::new(router);
    let connection =
        builder.serve_connection_with_upgrades(TokioIo::new(FirstBytesTimeout::new(stream)), service);
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "connection failed");
    }
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .enable_connect_protocol();
    builder
}

/// Disconnects a peer that sends nothing.
///
/// The version of HTTP is detected from the first bytes, and until those have arrived no timeout of either version
/// applies: without this, a peer that connects and sends nothing would occupy a connection slot without limit.
struct FirstBytesTimeout<S> {
    stream: S,
    /// Deadline, and the number of bytes still missing; `None` once they have arrived.
    silent: Option<(Pin<Box<Sleep>>, usize)>,
}

/// Length of the HTTP/2 connection preface, which determines the version.
const PREFACE_BYTES: usize = 24;

impl<S> FirstBytesTimeout<S> {
    fn new(stream: S) -> Self {
        Self::within(HEAD_TIMEOUT, stream)
    }

    fn within(timeout: Duration, stream: S) -> Self {
        Self { stream, silent: Some((Box::pin(sleep(timeout)), PREFACE_BYTES)) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FirstBytesTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let Some((deadline, missing)) = &mut self.silent else { return read };
        match read {
            Poll::Pending => deadline.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into())),
            Poll::Ready(read) => {
                *missing = missing.saturating_sub(buffer.filled().len() - before);
                if *missing == 0 {
                    self.silent = None;
                }
                Poll::Ready(read)
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FirstBytesTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Binds a unix socket at `path`, which may be longer than the kernel's limit. Replaces the socket of a dead process,
/// but not that of a living one.
pub fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "a socket path needs a directory and a name");
    let parent = path.parent().ok_or_else(wrong)?;
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let name = path.file_name().ok_or_else(wrong)?;
    let dir: OwnedFd =
        rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let short = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
    let listener = match StdUnixListener::bind(&short) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale_socket(&short)? => {
            fs::remove_file(&short)?;
            StdUnixListener::bind(&short)?
        }
        bound => bound?,
    };
    fs::set_permissions(&short, fs::Permissions::from_mode(mode))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Returns whether the path is a socket without a listener. Any other file of that name is left alone.
fn is_stale_socket(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Ok(false),
        Err(error) => Ok(error.kind() == io::ErrorKind::ConnectionRefused),
    }
}

/// Connects to the socket of a handle (see `confine::DirHandle::socket`).
pub async fn connect_unix(socket: &OwnedFd) -> io::Result<UnixStream> {
    UnixStream::connect(Path::new("/proc/self/fd").join(socket.as_raw_fd().to_string())).await
}

/// Error response: a status and a message, sent as plain text.
#[derive(Clone, Debug)]
pub struct ErrorResponse {
    pub status: StatusCode,
    pub text: String,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ErrorResponse {
    pub fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), headers: Vec::new() }
    }

    pub fn bad_request(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }
    pub fn unauthorized(text: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, text)
            .header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
    }
    pub fn forbidden(text: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, text)
    }
    pub fn not_found(text: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, text)
    }
    pub fn conflict(text: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, text)
    }
    pub fn internal(text: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, text)
    }

    pub fn header(mut self, name: HeaderName, value: impl Into<HeaderValue>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.text).into_response();
        for (name, value) in self.headers {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// JSON body: 413 if longer than [`BODY_BYTES_MAX`], 415 for another content type, 400 if it cannot be parsed.
#[derive(Clone, Debug)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = ErrorResponse;
    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        let RawJson(bytes) = RawJson::from_request(request, state).await?;
        parse_json(&bytes).map(Self)
    }
}

/// Unparsed bytes of a JSON body, with the same limits.
#[derive(Clone, Debug)]
pub struct RawJson(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for RawJson {
    type Rejection = ErrorResponse;
    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        check_content_type(request.headers())?;
        match timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await {
            Ok(read) => read.map(Self).map_err(body_error),
            Err(_) => Err(ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, "timed out reading the body")),
        }
    }
}

/// Parses a JSON body that was received as bytes.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ErrorResponse> {
    serde_json::from_slice(bytes)
        .map_err(|error| ErrorResponse::bad_request(format!("invalid request body: {error}")))
}

fn body_error(rejection: BytesRejection) -> ErrorResponse {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let text = format!("the request body exceeds {BODY_BYTES_MAX} bytes");
        return ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, text);
    }
    ErrorResponse::bad_request("the request body ended early")
}

/// Accepts JSON and a missing content type; refuses any other.
fn check_content_type(headers: &HeaderMap) -> Result<(), ErrorResponse> {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = kind.to_str().unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let text = format!("the content type must be application/json, not `{}`", kind.escape_debug());
    Err(ErrorResponse::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text))
}

/// Returns the token of an `Authorization: Bearer …` header.
pub fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Returns whether `secret` has one of these hashes, in the same time for every result.
pub fn matches_hash<'a>(secret: &str, hashes: impl IntoIterator<Item = &'a str>) -> bool {
    use subtle::ConstantTimeEq;
    let given = sha256_hex(secret.as_bytes());
    let mut found = subtle::Choice::from(0);
    for hash in hashes {
        found |= given.as_bytes().ct_eq(hash.to_ascii_lowercase().as_bytes());
    }
    found.into()
}

/// Responds 404 for an unknown route; as plain text, like every other error.
pub async fn unknown_route() -> ErrorResponse {
    ErrorResponse::not_found("no such route")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_matches_any_of_its_hashes() {
        let (old, new) = (sha256_hex(b"old"), sha256_hex(b"new").to_ascii_uppercase());
        assert!(matches_hash("old", [old.as_str(), new.as_str()]));
        assert!(matches_hash("new", [old.as_str(), new.as_str()]));
        assert!(!matches_hash("other", [old.as_str(), new.as_str()]));
        assert!(!matches_hash("", []));
        assert!(!matches_hash("", [""]));
    }

    #[test]
    fn only_bearer_credentials_are_accepted_and_the_scheme_ignores_case() {
        let headers = |value: &'static str| {
            HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))])
        };
        assert_eq!(bearer_token(&headers("Bearer abc")), Some("abc"));
        assert_eq!(bearer_token(&headers("bearer abc")), Some("abc"));
        assert_eq!(bearer_token(&headers("Basic abc")), None);
        assert_eq!(bearer_token(&headers("abc")), None);
        assert_eq!(bearer_token(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn a_connection_times_out_only_until_its_first_bytes_arrive() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let time_limit = Duration::from_millis(50);
        for message in ["", "PRI * HTT"] {
            let (mut peer, stream) = tokio::io::duplex(100);
            peer.write_all(message.as_bytes()).await.unwrap();
            let mut text = Vec::new();
            let read = FirstBytesTimeout::within(time_limit, stream).read_to_end(&mut text).await;
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut, "{message}");
            assert_eq!(text, message.as_bytes());
        }
        let (mut peer, stream) = tokio::io::duplex(100);
        let mut prompt = FirstBytesTimeout::within(time_limit, stream);
        peer.write_all(&[b'x'; PREFACE_BYTES]).await.unwrap();
        prompt.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
        let waited = timeout(time_limit * 3, prompt.read_u8()).await;
        assert!(waited.is_err(), "{waited:?}");
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
        let dir = windlass_testkit::temp_dir(&"x".repeat(100)).unwrap();
        let path = dir.path().join("api.sock");
        let first = bind_unix(&path, 0o660).unwrap();
        assert_eq!(bind_unix(&path, 0o660).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        drop(first);
        bind_unix(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "a file").unwrap();
        assert!(bind_unix(&path, 0o600).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
    }
}
