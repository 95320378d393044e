//! A proxy between two of ours that makes the way between them bad: slow, in drops, cut, held, or doubled.
//!
//! It carries TCP and unix sockets. What it does to connections is its [`Weather`], which may change at any time and
//! reaches connections that are open. It counts what it did, so that a fault that never happened is no proof.

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

/// Bytes that are carried at once.
const CHUNK_BYTES: usize = 16 * 1024;
/// Of a doubled connection so much is remembered; a longer one is doubled as far as this.
const REPLAY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// How often drops fall in a second.
const DRIPS_PER_SECOND: u64 = 20;

/// What happens to whatever passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionFaults {
    /// Each piece comes so much later, give or take a third: a fixed time would keep in step with who tries again.
    pub latency: Duration,
    /// Bytes a second; 0 is no limit.
    pub drip: u64,
    /// A connection ends without a word after so many bytes, both ways together.
    pub cut_after: Option<u64>,
    /// Nothing passes, and nobody is told.
    pub hold: bool,
    /// Who comes is turned away.
    pub refuse: bool,
    /// What a client sent is sent once more from the start, on a connection of its own, so long after its end.
    pub replay_after: Option<Duration>,
}

/// What the proxy did.
#[derive(Debug, Default)]
pub struct FaultCounts {
    pub connections: AtomicU64,
    pub delayed: AtomicU64,
    pub cut: AtomicU64,
    pub held: AtomicU64,
    pub refused: AtomicU64,
    pub replayed: AtomicU64,
}

/// Where something listens.
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
    weather: watch::Sender<ConnectionFaults>,
    /// Grows with each cut: connections of an older number end.
    cuts: watch::Sender<u64>,
    counts: FaultCounts,
    rng: Mutex<Rng>,
}

/// It carries until it is dropped; connections that are open then are cut.
pub struct FaultProxy {
    shared: Arc<ProxyState>,
    address: String,
    /// A socket whose place was taken, to be given back.
    displaced: Option<(PathBuf, PathBuf)>,
    server: JoinHandle<()>,
}

impl FaultProxy {
    /// On a port of this machine's loopback.
    pub async fn tcp(to: impl Into<String>, seed: u64) -> io::Result<Self> {
        Self::tcp_at("127.0.0.1:0", to, seed).await
    }

    /// On an address that hosts of a lab reach as well.
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

    /// Takes the place of a socket that somebody listens on; whoever connects by its path comes here first.
    pub fn before(socket: &Path, seed: u64) -> io::Result<Self> {
        let aside = socket.with_extension("aside");
        std::fs::rename(socket, &aside)?;
        let mut proxy = Self::unix(socket, &aside, seed)?;
        // Whoever could reach the one can reach the other.
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
            weather: watch::Sender::new(ConnectionFaults::default()),
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

    pub fn set(&self, weather: ConnectionFaults) {
        self.shared.weather.send_replace(weather);
    }

    pub fn counts(&self) -> &FaultCounts {
        &self.shared.counts
    }

    /// Ends every connection that is open, without a word.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.cut();
        self.server.abort();
        if let Some((socket, aside)) = &self.displaced {
            // Not when its owner has come back to its place meanwhile.
            let _ = std::fs::rename(aside, socket);
        }
    }
}

async fn accept(listener: ProxyListener, shared: Arc<ProxyState>) {
    while let Ok(client) = listener.accept().await {
        shared.counts.connections.fetch_add(1, Ordering::Relaxed);
        if shared.weather.borrow().refuse {
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

/// One connection, from its beginning to its end.
async fn proxy_connection(client: Box<dyn ProxyStream>, shared: Arc<ProxyState>) {
    let Ok(server) = connect(&shared.to).await else { return };
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let (passed, mut said) = (AtomicU64::new(0), Vec::new());
    let mut cuts = shared.cuts.subscribe();
    tokio::select! {
        () = async {
            tokio::join!(
                copy_with_faults(&mut from_client, &mut to_server, &shared, &passed, Some(&mut said)),
                copy_with_faults(&mut from_server, &mut to_client, &shared, &passed, None),
            );
        } => {}
        () = wait_for_cut(&shared, &passed) => { shared.counts.cut.fetch_add(1, Ordering::Relaxed); }
        _ = cuts.changed() => { shared.counts.cut.fetch_add(1, Ordering::Relaxed); }
    }
    let replay = shared.weather.borrow().replay_after;
    if let Some(after) = replay.filter(|_| !said.is_empty()) {
        let after = jitter(&shared, after);
        tokio::time::sleep(after).await;
        let _ = replay_request(&said, &shared).await;
    }
}

/// Until more bytes have passed than may.
async fn wait_for_cut(shared: &ProxyState, passed: &AtomicU64) {
    loop {
        let limit = shared.weather.borrow().cut_after;
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
        let most = match shared.weather.borrow().drip {
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

/// What the weather does to one piece.
async fn apply_delay(shared: &ProxyState) {
    let mut weather = shared.weather.subscribe();
    let now = *weather.borrow();
    let mut wait = jitter(shared, now.latency);
    if now.drip > 0 {
        wait += jitter(shared, Duration::from_secs(1)) / u32::try_from(DRIPS_PER_SECOND).unwrap_or(1);
    }
    if !wait.is_zero() {
        shared.counts.delayed.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(wait).await;
    }
    if weather.borrow().hold {
        shared.counts.held.fetch_add(1, Ordering::Relaxed);
        // It ends with the proxy, if it never clears up.
        let _ = weather.wait_for(|weather| !weather.hold).await;
    }
}

fn jitter(shared: &ProxyState, time: Duration) -> Duration {
    time * u32::try_from(shared.rng.lock().between(67, 133)).unwrap_or(100) / 100
}

/// The same words on another connection; the answer goes nowhere.
async fn replay_request(said: &[u8], shared: &ProxyState) -> io::Result<()> {
    let mut server = connect(&shared.to).await?;
    server.write_all(said).await?;
    server.flush().await?;
    shared.counts.replayed.fetch_add(1, Ordering::Relaxed);
    let mut answer = vec![0; CHUNK_BYTES];
    // Until the other side has nothing more to say, or waits for more from us.
    while let Ok(Ok(1..)) = tokio::time::timeout(Duration::from_secs(1), server.read(&mut answer)).await {}
    Ok(())
}
