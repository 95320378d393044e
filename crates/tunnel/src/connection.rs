//! One SSH connection: log-in, channels, and whether the host still answers.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use russh::{
    Preferred, cipher,
    client::{self, AuthResult, Handle},
    keys::{PrivateKeyWithHashAlg, PublicKeyOrCertificate},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Semaphore,
    time::timeout,
};
use windlass_dial::{AddressError, AllowedAddresses, DialError, connect_first};

use crate::{HostKey, HostKeyPin, SshDestination, Stream, TunnelError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVES_MISSED: usize = 3;

/// Key exchanges are work for the processor. With a thousand hosts at once, all would be late.
static KEY_EXCHANGES: Semaphore = Semaphore::const_new(64);

/// A live connection. Cheap to share; it ends when the last holder lets go.
pub struct Connection {
    pub(crate) name: String,
    handle: Handle<HostKeyVerifier>,
    /// Bytes a channel may hold for its reader.
    cap: usize,
    /// What the host has shown, and under which name it is kept.
    host_key: Option<HostKeyEntry>,
    /// The connection below, when this one goes through another host.
    via: Option<Arc<Connection>>,
}

/// A host key seen for the first time, to be kept and reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostKeyEntry {
    /// As in [`Target::known_as`].
    pub host: String,
    pub key: HostKey,
}

impl Connection {
    /// Connects and logs in, through other hosts where the target says so. First-seen host keys are returned.
    pub async fn open(target: &SshDestination, cap: usize) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        Self::open_allowed(target, cap, &AllowedAddresses::Any).await
    }

    /// The same, if the address of the first host on the way is allowed.
    pub(crate) async fn open_allowed(
        target: &SshDestination,
        cap: usize,
        allowed: &AllowedAddresses,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        let Some(via) = &target.via else {
            let tcp = connect(target, allowed).await?;
            return Self::handshake(tcp, None, target, cap).await;
        };
        let (below, mut learned) = Box::pin(Self::open_allowed(via, cap, allowed)).await?;
        let (connection, more) = Self::open_through(Arc::new(below), target, cap).await?;
        learned.extend(more);
        Ok((connection, learned))
    }

    /// The same through a connection that is there already.
    pub(crate) async fn open_through(
        below: Arc<Self>,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        let stream =
            below.open_tcp(&target.host, target.port).await.map_err(|error| jump_error(error, target))?;
        Self::handshake(stream, Some(below), target, cap).await
    }

    async fn handshake(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        via: Option<Arc<Self>>,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        // Never closed, so an error would be a permit nobody gives: go on without.
        let _turn = KEY_EXCHANGES.acquire().await;
        let name = target.name();
        let shown = Arc::new(Mutex::new(None));
        let checker = HostKeyVerifier { pin: target.pin.clone(), presented: Arc::clone(&shown) };
        let connected = client::connect_stream(client_config(), stream, checker);
        let connected = with_timeout(&name, "exchange keys", CONNECT_TIMEOUT, connected).await?;
        let shown = shown.lock().take();
        let mut handle = match (connected, &target.pin, &shown) {
            (Ok(handle), _, _) => handle,
            (Err(_), HostKeyPin::Known(expected), Some(shown)) if expected != shown => {
                let (expected, shown) = (Box::new(expected.clone()), Box::new(shown.clone()));
                return Err(TunnelError::HostKeyChanged { host: name, expected, shown });
            }
            (Err(source), _, _) => {
                let source = Arc::new(source);
                return Err(TunnelError::Protocol { host: name, what: "exchange keys", source });
            }
        };
        with_timeout(&name, "log in", CONNECT_TIMEOUT, log_in(&mut handle, target)).await??;
        let shown = shown.map(|key| HostKeyEntry { host: target.known_hosts_name(), key });
        let learned = match &target.pin {
            HostKeyPin::FirstUse => shown.iter().cloned().collect(),
            HostKeyPin::Known(_) => Vec::new(),
        };
        Ok((Self { name, handle, cap, host_key: shown, via }, learned))
    }

    /// The keys that all hosts on the way have shown, pinned before or not: the farthest host last.
    pub fn host_keys(&self) -> Vec<HostKeyEntry> {
        let mut keys = self.via.as_ref().map(|via| via.host_keys()).unwrap_or_default();
        keys.extend(self.host_key.clone());
        keys
    }

    /// A stream to a unix socket on the host.
    pub async fn open_unix(&self, path: &str) -> Result<Stream, TunnelError> {
        let open = async { self.handle.channel_open_direct_streamlocal(path).await };
        self.open_channel("open a unix socket", open).await
    }

    /// A stream to an address as the host sees it.
    pub async fn open_tcp(&self, host: &str, port: u16) -> Result<Stream, TunnelError> {
        let from = ("127.0.0.1", 0);
        let open = async {
            let handle = &self.handle;
            handle.channel_open_direct_tcpip(host, u32::from(port), from.0, from.1).await
        };
        self.open_channel("open a port", open).await
    }

    pub(crate) async fn open_session(&self) -> Result<russh::Channel<client::Msg>, TunnelError> {
        let open = async { self.handle.channel_open_session().await };
        let opened = with_timeout(&self.name, "open a session", OPEN_TIMEOUT, open).await?;
        opened.map_err(|source| self.protocol_error("open a session", source))
    }

    async fn open_channel(
        &self,
        what: &'static str,
        open: impl Future<Output = Result<russh::Channel<client::Msg>, russh::Error>>,
    ) -> Result<Stream, TunnelError> {
        let channel = with_timeout(&self.name, what, OPEN_TIMEOUT, open).await?;
        channel
            .map(|channel| Stream::new(channel, self.cap))
            .map_err(|source| self.protocol_error(what, source))
    }

    /// Asks the host for a sign of life and waits for it.
    pub async fn ping(&self, limit: Duration) -> Result<(), TunnelError> {
        let answered = with_timeout(&self.name, "answer a ping", limit, self.handle.send_ping()).await?;
        // The library calls a ping answered as well when the connection went while it waited.
        let answered = answered.and(if self.is_closed() { Err(russh::Error::Disconnect) } else { Ok(()) });
        answered.map_err(|source| self.protocol_error("answer a ping", source))
    }

    /// The transport below is gone. An open one may still be silent: see [`Self::ping`].
    pub fn is_closed(&self) -> bool {
        self.handle.is_closed()
    }

    pub(crate) fn protocol_error(&self, what: &'static str, source: russh::Error) -> TunnelError {
        TunnelError::Protocol { host: self.name.clone(), what, source: Arc::new(source) }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("name", &self.name).finish_non_exhaustive()
    }
}

async fn connect(target: &SshDestination, allowed: &AllowedAddresses) -> Result<TcpStream, TunnelError> {
    let failed = |source| TunnelError::Connect { host: target.name(), source: Arc::new(source) };
    let found = allowed.lookup(&target.host).await.map_err(|error| match error {
        AddressError::Lookup(error) => TunnelError::Lookup { host: target.name(), said: error.why },
        AddressError::NotAllowed { .. } => TunnelError::NotAllowed { host: target.name() },
    })?;
    let connected = connect_first(&target.host, &found, target.port, CONNECT_TIMEOUT).await;
    connected.map_err(|error| match error {
        DialError::Lookup(error) => TunnelError::Lookup { host: target.name(), said: error.why },
        DialError::Connect { source, .. } | DialError::Tls { source, .. } => failed(source),
    })
}

/// A host on the way that answers and cannot go on says so for the host behind it.
fn jump_error(error: TunnelError, target: &SshDestination) -> TunnelError {
    if let TunnelError::Protocol { source, .. } = &error
        && let russh::Error::ChannelOpenFailure(_) = **source
    {
        let (host, source) = (target.name(), Arc::clone(source));
        return TunnelError::Protocol { host, what: "connect through the jump host", source };
    }
    error
}

async fn log_in(handle: &mut Handle<HostKeyVerifier>, target: &SshDestination) -> Result<(), TunnelError> {
    let failed =
        |source| TunnelError::Protocol { host: target.name(), what: "log in", source: Arc::new(source) };
    let rsa_hash = handle.best_supported_rsa_hash().await.map_err(failed)?.flatten();
    for key in &target.keys {
        let hash = if key.0.algorithm().is_rsa() { rsa_hash } else { None };
        let key = PrivateKeyWithHashAlg::new(Arc::clone(&key.0), hash);
        match handle.authenticate_publickey(&target.user, key).await.map_err(failed)? {
            AuthResult::Success => return Ok(()),
            AuthResult::Failure { .. } => {}
        }
    }
    let (host, user) = (target.name(), target.user.clone());
    Err(TunnelError::Denied { host, user, offered: target.keys.len() })
}

/// AES-GCM costs half the processor time of the library's first choice on hardware of this century.
fn client_config() -> Arc<client::Config> {
    const CIPHERS: &[cipher::Name] =
        &[cipher::AES_256_GCM, cipher::CHACHA20_POLY1305, cipher::AES_256_CTR, cipher::AES_128_CTR];
    Arc::new(client::Config {
        preferred: Preferred { cipher: CIPHERS.into(), ..Preferred::default() },
        keepalive_interval: Some(KEEPALIVE_INTERVAL),
        keepalive_max: KEEPALIVES_MISSED,
        inactivity_timeout: None,
        nodelay: true,
        ..client::Config::default()
    })
}

async fn with_timeout<T>(
    host: &str,
    what: &'static str,
    limit: Duration,
    work: impl Future<Output = T>,
) -> Result<T, TunnelError> {
    let late = |_| TunnelError::Timeout { host: host.to_owned(), what, limit };
    timeout(limit, work).await.map_err(late)
}

/// Compares the host's key with the pinned one, and remembers what it showed.
struct HostKeyVerifier {
    pin: HostKeyPin,
    presented: Arc<Mutex<Option<HostKey>>>,
}

impl client::Handler for HostKeyVerifier {
    type Error = russh::Error;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, Self::Error> {
        let key = HostKey::from_presented(key);
        let good = match &self.pin {
            HostKeyPin::Known(expected) => *expected == key,
            HostKeyPin::FirstUse => true,
        };
        *self.presented.lock() = Some(key);
        Ok(good)
    }
}
