//! SSH connection: login, channels and liveness checks.

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

/// Limits concurrent key exchanges, which are CPU-bound: with a thousand at once, all would time out.
static KEY_EXCHANGES: Semaphore = Semaphore::const_new(64);

/// Live connection. Cheap to share; it is closed with the last reference.
pub struct Connection {
    pub(crate) name: String,
    handle: Handle<HostKeyVerifier>,
    /// Maximum number of bytes that a channel buffers for its reader.
    cap: usize,
    /// Host key that was presented, with the name under which it is stored.
    host_key: Option<HostKeyEntry>,
    /// Connection to the jump host, if this one goes through another host.
    via: Option<Arc<Connection>>,
}

/// Host key seen for the first time, to be stored and reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostKeyEntry {
    /// Name as in [`crate::SshDestination::known_hosts_name`].
    pub host: String,
    pub key: HostKey,
}

impl Connection {
    /// Connects and logs in, through jump hosts if the target has any. Returns host keys that were seen for the first
    /// time.
    pub async fn open(target: &SshDestination, cap: usize) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        Self::open_allowed(target, cap, &AllowedAddresses::Any).await
    }

    /// As `open`, if the address of the first host of the path is allowed.
    pub(crate) async fn open_allowed(
        target: &SshDestination,
        cap: usize,
        allowed: &AllowedAddresses,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        let Some(via) = &target.via else {
            let tcp = connect(target, allowed).await?;
            return Self::handshake(tcp, None, target, cap).await;
        };
        let (below, mut host_keys) = Box::pin(Self::open_allowed(via, cap, allowed)).await?;
        let (connection, more) = Self::open_through(Arc::new(below), target, cap).await?;
        host_keys.extend(more);
        Ok((connection, host_keys))
    }

    /// As `open`, through an existing connection.
    pub(crate) async fn open_through(
        below: Arc<Self>,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        let stream =
            below.open_tcp(&target.host, target.port).await.map_err(|error| jump_error(error, target))?;
        Self::handshake(stream, Some(below), target, cap).await
    }

    pub(crate) async fn handshake(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        via: Option<Arc<Self>>,
        target: &SshDestination,
        cap: usize,
    ) -> Result<(Self, Vec<HostKeyEntry>), TunnelError> {
        // The semaphore is never closed, so acquiring cannot fail.
        let _round = KEY_EXCHANGES.acquire().await;
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
        let host_keys = match &target.pin {
            HostKeyPin::FirstUse => shown.iter().cloned().collect(),
            HostKeyPin::Known(_) => Vec::new(),
        };
        Ok((Self { name, handle, cap, host_key: shown, via }, host_keys))
    }

    /// Returns the keys of all hosts of the path, pinned before or not; the destination is the last.
    pub fn host_keys(&self) -> Vec<HostKeyEntry> {
        let mut keys = self.via.as_ref().map(|via| via.host_keys()).unwrap_or_default();
        keys.extend(self.host_key.clone());
        keys
    }

    /// Opens a stream to a unix socket on the host.
    pub async fn open_unix(&self, path: &str) -> Result<Stream, TunnelError> {
        let open = async { self.handle.channel_open_direct_streamlocal(path).await };
        self.open_channel("open a unix socket", open).await
    }

    /// Opens a stream to an address, as resolved on the host.
    pub async fn open_tcp(&self, host: &str, port: u16) -> Result<Stream, TunnelError> {
        let from = ("127.0.0.1", 0);
        let open = async {
            let handle = &self.handle;
            handle.channel_open_direct_tcpip(host, u32::from(port), from.0, from.1).await
        };
        self.open_channel("open a port", open).await
    }

    /// Starts a command on the host and opens a stream to its standard input and output.
    pub async fn open_command(&self, command: &str) -> Result<Stream, TunnelError> {
        let channel = self.open_session().await?;
        let failed = |source| self.protocol_error("run a command", source);
        channel.exec(false, command).await.map_err(failed)?;
        Ok(Stream::new(channel, self.cap))
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

    /// Sends a ping and waits for the reply.
    pub async fn ping(&self, limit: Duration) -> Result<(), TunnelError> {
        let answered = with_timeout(&self.name, "answer a ping", limit, self.handle.send_ping()).await?;
        // The library also reports success if the connection was closed while the ping was pending.
        let answered = answered.and(if self.is_closed() { Err(russh::Error::Disconnect) } else { Ok(()) });
        answered.map_err(|source| self.protocol_error("answer a ping", source))
    }

    /// True if the transport is closed. An open connection may still be unresponsive: see [`Self::ping`].
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
        AddressError::Lookup(error) => TunnelError::Lookup { host: target.name(), message: error.why },
        AddressError::NotAllowed { .. } => TunnelError::NotAllowed { host: target.name() },
    })?;
    let connected = connect_first(&target.host, &found, target.port, CONNECT_TIMEOUT).await;
    connected.map_err(|error| match error {
        DialError::Lookup(error) => TunnelError::Lookup { host: target.name(), message: error.why },
        DialError::NotAllowed { .. } => TunnelError::NotAllowed { host: target.name() },
        DialError::Connect { source, .. } | DialError::Tls { source, .. } => failed(source),
    })
}

/// Attributes the failure of a responsive jump host to connect to the host behind it.
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

/// AES-GCM needs half the CPU time of the library's first choice on current hardware.
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

/// Compares the host's key with the pinned one, and records the presented key.
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
