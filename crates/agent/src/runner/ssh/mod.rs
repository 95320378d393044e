//! The SSH server inside the runner: images need no sshd.
//!
//! Owns     the port for SSH clients: authentication (`keys`), open connections (`connections`), programs with and
//!          without a terminal (`program`, `terminal`), files (`sftp`), forwarded ports and sockets (`forward`).
//! Bounds   every queue: data from a client is stored per channel (`inflow`) up to a limit, and a channel whose
//!          reader is slow gets a tiny window, so it can neither fill memory nor stop other channels.
//! Why not  the image's own sshd? Most images have none, and installing one at start costs seconds and a network.

mod channel_io;
pub mod cli;
mod command;
mod connection;
mod connection_tracker;
mod keys;
mod port_forward;
mod program;
mod receive_buffer;
mod run_as_user;
mod sftp;
mod terminal;
mod throttled_socket;

use std::{borrow::Cow, net::SocketAddr, sync::Arc, time::Duration};

use russh::{MethodKind, MethodSet, Preferred, SshId, cipher, compression, server};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use self::{
    channel_io::Channels, connection::Connection, receive_buffer::ConnectionBacklog,
    throttled_socket::ThrottledSocket,
};
pub use self::{
    connection_tracker::ConnectionTracker,
    keys::{AuthorizedKeys, HostKey, KeyError},
};
use super::login_session::SessionProvider;

/// Maximum number of connections; further ones are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// Maximum number of these that have not authenticated.
const UNAUTHENTICATED_MAX: usize = 64;
/// Time that a client has to authenticate.
const LOGIN_GRACE: Duration = Duration::from_secs(30);
/// Maximum number of keys that a client may try: users with many keys in an agent need more than a few.
const AUTH_ATTEMPTS_MAX: usize = 20;
/// Time without data from a client after which it is probed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Number of unanswered probes after which a client is disconnected.
const KEEPALIVE_MAX: usize = 3;
/// Time that connections have to close when the server stops.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Configuration of the server.
#[derive(Clone)]
pub struct Config {
    /// Keys that may log in as any user; in addition a user's own `~/.ssh/authorized_keys` counts for that user.
    pub keys: AuthorizedKeys,
    pub host_key: HostKey,
    /// Called for each session. A login as `root` is root with these variables, any other name is this account. `None`:
    /// there are no sessions, files or forwarded ports, only what `runner` answers.
    pub sessions: Option<SessionProvider>,
    pub connections: ConnectionTracker,
    /// Serves connections forwarded to the runner's port of the loopback, if no process listens there.
    pub runner: Option<axum::Router>,
}

/// Serves until `stop`; then every connection is closed and its programs receive SIGHUP.
pub async fn serve(listener: TcpListener, config: Config, stop: CancellationToken) {
    let protocol = Arc::new(server_config(&config.host_key));
    let config = Arc::new(config);
    let others = Arc::new(Semaphore::new(UNAUTHENTICATED_MAX));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = stop.cancelled() => break,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or a client that disconnected at once: neither is a reason to stop the server.
                tracing::warn!(%error, "failed to accept SSH connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(other) = Arc::clone(&others).try_acquire_owned() else { continue };
        if connections.len() >= CONNECTIONS_MAX {
            continue;
        }
        let (config, protocol, stop) = (Arc::clone(&config), Arc::clone(&protocol), stop.clone());
        connections.spawn(async move {
            serve_connection(socket, peer, config, protocol, other, stop).await;
        });
    }
    drop(listener);
    let _ = timeout(DISCONNECT_TIMEOUT * 2, async { while connections.join_next().await.is_some() {} }).await;
}

async fn serve_connection(
    socket: TcpStream,
    peer: SocketAddr,
    config: Arc<Config>,
    protocol: Arc<server::Config>,
    other: tokio::sync::OwnedSemaphorePermit,
    stop: CancellationToken,
) {
    let Ok(local) = socket.local_addr() else { return };
    let _ = socket.set_nodelay(true);
    let cut = CancellationToken::new();
    // However this function ends, the library's task ends with it.
    let _cut = cut.clone().drop_guard();
    let over = CancellationToken::new();
    let _over = over.clone().drop_guard();
    let admitted = CancellationToken::new();
    let total = Arc::new(ConnectionBacklog::default());
    let channels = Channels::new(over.clone(), Arc::clone(&total));
    let handler = Connection::new(config, (peer, local), admitted.clone(), channels, over);
    let begun = server::run_stream(protocol, ThrottledSocket::new(socket, cut.clone(), total), handler);
    let mut session = match timeout(LOGIN_GRACE, begun).await {
        Ok(Ok(session)) => session,
        Ok(Err(_)) | Err(_) => return,
    };
    tokio::select! {
        _ = &mut session => return,
        () = admitted.cancelled() => {}
        () = tokio::time::sleep(LOGIN_GRACE) => return,
        () = stop.cancelled() => return disconnect(session).await,
    }
    drop(other);
    tokio::select! {
        ended = &mut session => {
            if let Err(error) = ended {
                tracing::debug!(%peer, error = &error as &dyn std::error::Error, "SSH connection failed");
            }
        }
        () = stop.cancelled() => disconnect(session).await,
    }
}

async fn disconnect(session: server::RunningSession<Connection>) {
    let handle = session.handle();
    let _ = timeout(DISCONNECT_TIMEOUT, async {
        let _ = handle
            .disconnect(russh::Disconnect::ByApplication, "the job has ended".to_owned(), String::new())
            .await;
        session.await
    })
    .await;
}

fn server_config(host_key: &HostKey) -> server::Config {
    server::Config {
        server_id: SshId::Standard(Cow::Borrowed(concat!("SSH-2.0-windlass_", env!("CARGO_PKG_VERSION")))),
        methods: MethodSet::from([MethodKind::PublicKey].as_slice()),
        auth_rejection_time: Duration::from_millis(20),
        auth_rejection_time_initial: Some(Duration::ZERO),
        keys: vec![host_key.0.clone()],
        window_size: receive_buffer::WINDOW,
        max_auth_attempts: AUTH_ATTEMPTS_MAX,
        // A tunnel may be idle for days.
        inactivity_timeout: None,
        keepalive_interval: Some(KEEPALIVE_INTERVAL),
        keepalive_max: KEEPALIVE_MAX,
        nodelay: true,
        preferred: Preferred {
            // Uses half the processor time of chacha20 on processors with AES instructions.
            cipher: Cow::Borrowed(&[
                cipher::AES_256_GCM,
                cipher::AES_128_GCM,
                cipher::CHACHA20_POLY1305,
                cipher::AES_256_CTR,
                cipher::AES_128_CTR,
            ]),
            compression: Cow::Borrowed(&[compression::NONE]),
            ..Preferred::DEFAULT
        },
        ..server::Config::default()
    }
}
