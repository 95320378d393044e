//! A proxy between two components that degrades their connection: slow, throttled, cut, stalled or replayed.
//!
//! It proxies TCP and unix sockets. [`Weather`] describes the faults; it may change at any time and applies to open
//! connections. The proxy counts its faults, so that a test can prove that they happened.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
};

use crate::rng::Rng;

/// Maximum size of a chunk.
const CHUNK_BYTES: usize = 16 * 1024;
/// Number of bytes of a replayed connection that are stored; a longer one is replayed up to this size.
const REPLAY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Number of throttled writes per second.
const DRIPS_PER_SECOND: u64 = 20;

/// Faults of the proxied connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionFaults {
    /// Delay of each chunk, with a jitter of one third: a fixed delay would stay in phase with retries.
    pub latency: Duration,
    /// Bytes per second; 0 is no limit.
    pub drip: u64,
    /// Number of bytes, in both directions together, after which a connection is cut without notice.
    pub cut_after: Option<u64>,
    /// Stalls all data, without an error.
    pub hold: bool,
    /// Rejects new connections.
    pub refuse: bool,
    /// Delay after the end of a connection before the client's bytes are sent again from the start, on a separate
    /// connection.
    pub replay_after: Option<Duration>,
}

/// Number of injected faults.
#[derive(Debug, Default)]
pub struct FaultCounts {
    pub connections: AtomicU64,
    pub delayed: AtomicU64,
    pub cut: AtomicU64,
    pub held: AtomicU64,
    pub refused: AtomicU64,
    pub replayed: AtomicU64,
}

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Tcp(String),
    Unix(PathBuf),
}

trait ProxyStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> ProxyStream for S {}

enum ProxyListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl ProxyListener {
    async fn accept(&self) -> io::Result<Box<dyn ProxyStream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

struct ProxyState {
    to: Endpoint,
    faults: watch::Sender<ConnectionFaults>,
    /// Increases with each cut: older connections end.
    cuts: watch::Sender<u64>,
    counts: FaultCounts,
    rng: Mutex<Rng>,
}

/// Proxies until it is dropped; connections that are open then are cut.
pub struct FaultProxy {
    shared: Arc<ProxyState>,
    address: String,
    /// A replaced socket, to be restored on drop.
    displaced: Option<(PathBuf, PathBuf)>,
    server: JoinHandle<()>,
}

impl FaultProxy {
    /// Listens on a free loopback port.
    pub async fn tcp(to: impl Into<String>, seed: u64) -> io::Result<Self> {
        Self::tcp_at("127.0.0.1:0", to, seed).await
    }

    /// Listens on an address that hosts of a lab reach as well.
    pub async fn tcp_at(at: &str, to: impl Into<String>, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(at).await?;
        let address = listener.local_addr()?.to_string();
        Ok(Self::serve(ProxyListener::Tcp(listener), Endpoint::Tcp(to.into()), address, seed))
    }

    pub fn unix(at: &Path, to: &Path, seed: u64) -> io::Result<Self> {
        let listener = UnixListener::bind(at)?;
        let address = at.display().to_string();
        Ok(Self::serve(ProxyListener::Unix(listener), Endpoint::Unix(to.to_owned()), address, seed))
    }

    /// Replaces a listening socket: clients that connect to its path reach the proxy.
    pub fn before(socket: &Path, seed: u64) -> io::Result<Self> {
        let aside = socket.with_extension("aside");
        std::fs::rename(socket, &aside)?;
        let mut proxy = Self::unix(socket, &aside, seed)?;
        // The proxy's socket gets the owner and the permissions of the original.
        let meta = std::fs::metadata(&aside)?;
        std::fs::set_permissions(socket, meta.permissions())?;
        use std::os::unix::fs::MetadataExt as _;
        std::os::unix::fs::chown(socket, Some(meta.uid()), Some(meta.gid()))?;
        proxy.displaced = Some((socket.to_owned(), aside));
        Ok(proxy)
    }

    fn serve(listener: ProxyListener, to: Endpoint, address: String, seed: u64) -> Self {
        let shared = Arc::new(ProxyState {
            to,
            faults: watch::Sender::new(ConnectionFaults::default()),
            cuts: watch::Sender::new(0),
            counts: FaultCounts::default(),
            rng: Mutex::new(Rng::new(seed)),
        });
        let server = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { shared, address, displaced: None, server }
    }

    /// `HOST:PORT`, or the path of a socket.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn set(&self, faults: ConnectionFaults) {
        self.shared.faults.send_replace(faults);
    }

    pub fn counts(&self) -> &FaultCounts {
        &self.shared.counts
    }

    /// Cuts every open connection without notice.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.cut();
        self.server.abort();
        if let Some((socket, aside)) = &self.displaced {
            // Not if the original listener has recreated its socket meanwhile.
            let _ = std::fs::rename(aside, socket);
        }
    }
}

async fn accept(listener: ProxyListener, shared: Arc<ProxyState>) {
    while let Ok(client) = listener.accept().await {
        shared.counts.connections.fetch_add(1, Ordering::Relaxed);
        if shared.faults.borrow().refuse {
            shared.counts.refused.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        tokio::spawn(proxy_connection(client, Arc::clone(&shared)));
    }
}

async fn connect(to: &Endpoint) -> io::Result<Box<dyn ProxyStream>> {
    Ok(match to {
        Endpoint::Tcp(address) => Box::new(TcpStream::connect(address).await?),
        Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

/// Proxies one connection from its start to its end.
async fn proxy_connection(client: Box<dyn ProxyStream>, shared: Arc<ProxyState>) {
    let Ok(server) = connect(&shared.to).await else { return };
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let (passed, mut message) = (AtomicU64::new(0), Vec::new());
    let mut cuts = shared.cuts.subscribe();
    tokio::select! {
        () = async {
            tokio::join!(
                copy_with_faults(&mut from_client, &mut to_server, &shared, &passed, Some(&mut message)),
                copy_with_faults(&mut from_server, &mut to_client, &shared, &passed, None),
            );
        } => {}
        () = wait_for_cut(&shared, &passed) => { shared.counts.cut.fetch_add(1, Ordering::Relaxed); }
        _ = cuts.changed() => { shared.counts.cut.fetch_add(1, Ordering::Relaxed); }
    }
    let replay = shared.faults.borrow().replay_after;
    if let Some(after) = replay.filter(|_| !message.is_empty()) {
        let after = jitter(&shared, after);
        tokio::time::sleep(after).await;
        let _ = replay_request(&message, &shared).await;
    }
}

/// Waits until more bytes have passed than allowed.
async fn wait_for_cut(shared: &ProxyState, passed: &AtomicU64) {
    loop {
        let limit = shared.faults.borrow().cut_after;
        if limit.is_some_and(|limit| passed.load(Ordering::Relaxed) >= limit) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn copy_with_faults(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    shared: &ProxyState,
    passed: &AtomicU64,
    mut memory: Option<&mut Vec<u8>>,
) {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let most = match shared.faults.borrow().drip {
            0 => CHUNK_BYTES,
            rate => usize::try_from((rate / DRIPS_PER_SECOND).max(1)).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES),
        };
        let Ok(read @ 1..) = from.read(&mut buffer[..most]).await else { break };
        apply_delay(shared).await;
        if let Some(memory) = memory.as_deref_mut().filter(|memory| memory.len() < REPLAY_BYTES_MAX) {
            memory.extend_from_slice(&buffer[..read]);
        }
        if to.write_all(&buffer[..read]).await.is_err() || to.flush().await.is_err() {
            break;
        }
        passed.fetch_add(read as u64, Ordering::Relaxed);
    }
    let _ = to.shutdown().await;
}

/// Applies the delays to one chunk.
async fn apply_delay(shared: &ProxyState) {
    let mut faults = shared.faults.subscribe();
    let now = *faults.borrow();
    let mut wait = jitter(shared, now.latency);
    if now.drip > 0 {
        wait += jitter(shared, Duration::from_secs(1)) / u32::try_from(DRIPS_PER_SECOND).unwrap_or(1);
    }
    if !wait.is_zero() {
        shared.counts.delayed.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(wait).await;
    }
    if faults.borrow().hold {
        shared.counts.held.fetch_add(1, Ordering::Relaxed);
        // Ends with the proxy, if the stall is never lifted.
        let _ = faults.wait_for(|faults| !faults.hold).await;
    }
}

fn jitter(shared: &ProxyState, time: Duration) -> Duration {
    time * u32::try_from(shared.rng.lock().between(67, 133)).unwrap_or(100) / 100
}

/// Sends the same bytes on another connection; the response is discarded.
async fn replay_request(message: &[u8], shared: &ProxyState) -> io::Result<()> {
    let mut server = connect(&shared.to).await?;
    server.write_all(message).await?;
    server.flush().await?;
    shared.counts.replayed.fetch_add(1, Ordering::Relaxed);
    let mut answer = vec![0; CHUNK_BYTES];
    // Until the other side closes, or waits for more input.
    while let Ok(Ok(1..)) = tokio::time::timeout(Duration::from_secs(1), server.read(&mut answer)).await {}
    Ok(())
}
