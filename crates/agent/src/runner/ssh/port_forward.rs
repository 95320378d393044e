//! Forwarded connections: to ports and sockets that are reachable from here, and from listeners opened here.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use russh::{Channel, ChannelOpenFailure, ChannelWriteHalf, server};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use windlass_api::agent::RUNNER_PORT;

use super::{
    channel_io::{ChannelInput, Channels, read_chunk},
    run_as_user,
};
use crate::{http, runner::user::Account};

/// Time after which a channel is closed from here, if the client does not close it after both directions have ended.
const CLOSE_GRACE: Duration = Duration::from_secs(10);
/// Time limit for trying all addresses of a name.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections of a listener that wait for their channel to open.
const OPENING_MAX: usize = 32;
/// Buffer size in bytes between a channel and a server in this process, per direction.
const PIPE_BYTES: usize = 64 * 1024;

/// Request of a client to connect to something from here.
pub(super) struct OpenRequest {
    pub(super) channel: Channel<server::Msg>,
    pub(super) reply: server::ChannelOpenHandle,
    pub(super) inlet: ChannelInput,
    pub(super) channels: Arc<Channels>,
}

pub(super) async fn forward_to_port(opening: OpenRequest, host: String, port: u32) {
    let Ok(port) = u16::try_from(port) else {
        return refuse(opening, ChannelOpenFailure::ConnectFailed).await;
    };
    match windlass_dial::connect(&host, port, CONNECT_TIMEOUT).await {
        Ok(stream) => accept_and_copy(opening, stream).await,
        Err(error) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to connect to forwarded port");
            refuse(opening, ChannelOpenFailure::ConnectFailed).await;
        }
    }
}

/// Returns whether this is the port of the task on which a runner's own API listens.
pub(super) fn is_runner_port(host: &str, port: u32) -> bool {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let is_here = bare.eq_ignore_ascii_case("localhost")
        || bare.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback());
    is_here && port == u32::from(RUNNER_PORT)
}

/// Serves the connection in this process, without a port that every process in the task could reach.
pub(super) async fn forward_to_runner(opening: OpenRequest, router: axum::Router) {
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(http::serve_stream(far, router, stop));
    accept_and_copy(opening, near).await;
}

pub(super) async fn forward_to_socket(opening: OpenRequest, path: String, account: Account) {
    let connected = run_as_user::run_as(&account, move || {
        let stream = std::os::unix::net::UnixStream::connect(path)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    });
    match connected.await.and_then(UnixStream::from_std) {
        Ok(stream) => accept_and_copy(opening, stream).await,
        Err(_) => refuse(opening, ChannelOpenFailure::ConnectFailed).await,
    }
}

async fn refuse(opening: OpenRequest, why: ChannelOpenFailure) {
    opening.channels.remove(opening.channel.id());
    opening.reply.reject(why).await;
}

async fn accept_and_copy(opening: OpenRequest, stream: impl AsyncRead + AsyncWrite + Unpin) {
    opening.reply.accept().await;
    let id = opening.channel.id();
    let (_, write) = opening.channel.split();
    copy_both_ways(stream, &write, &opening.inlet).await;
    opening.channels.remove(id);
}

/// Copies in both directions until both have ended. Each end is forwarded when it occurs.
async fn copy_both_ways(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    write: &ChannelWriteHalf<server::Msg>,
    inlet: &ChannelInput,
) {
    let (mut from, mut to) = tokio::io::split(stream);
    let inward = async {
        while let Some(piece) = inlet.inflow.take().await {
            if to.write_all(&piece).await.is_err() {
                inlet.inflow.refuse();
                return false;
            }
        }
        to.shutdown().await.is_ok()
    };
    let outward = async {
        while let Ok(piece) = read_chunk(&mut from).await {
            if piece.is_empty() || write.data_bytes(piece).await.is_err() {
                break;
            }
        }
        let _ = write.eof().await;
    };
    tokio::pin!(inward, outward);
    let (mut delivered, mut sent, mut closed) = (None, false, false);
    while delivered.is_none() || !sent {
        tokio::select! {
            whole = &mut inward, if delivered.is_none() => delivered = Some(whole),
            () = &mut outward, if !sent => sent = true,
            // Data received before the client closed is still delivered.
            () = inlet.closed.cancelled(), if !closed => (closed, sent) = (true, true),
            () = inlet.over.cancelled() => return,
        }
    }
    // The library also forgets a channel that the client closes first; a channel closed from here stays in its tables
    // until the connection ends.
    let whole = delivered == Some(true);
    if closed || whole && timeout(CLOSE_GRACE, inlet.closed.cancelled()).await.is_ok() {
        return;
    }
    let _ = write.close().await;
}

/// Data with which a listener forwards a connection to the client.
#[derive(Clone)]
pub(super) struct ReverseForward {
    pub(super) handle: server::Handle,
    pub(super) channels: Arc<Channels>,
    /// Cancelled when the listener ends.
    pub(super) until: CancellationToken,
}

impl ReverseForward {
    async fn serve_stream(
        self,
        channel: Result<Channel<server::Msg>, russh::Error>,
        stream: impl AsyncRead + AsyncWrite + Unpin,
    ) {
        let Ok(channel) = channel else { return };
        let id = channel.id();
        let inlet = self.channels.enter(id);
        let (_, write) = channel.split();
        copy_both_ways(stream, &write, &inlet).await;
        self.channels.remove(id);
    }
}

/// Listens on the loopback only, as sshd does by default. Returns the port.
pub(super) async fn listen(port: u16, account: &Account) -> io::Result<(Vec<TcpListener>, u16)> {
    let first = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), account).await?;
    let port = first.local_addr()?.port();
    let mut all = vec![first];
    // Not every host supports IPv6.
    all.extend(bind(SocketAddr::from((Ipv6Addr::LOCALHOST, port)), account).await.ok());
    Ok((all, port))
}

/// Binds with the user's rights: ports below 1024 are privileged.
async fn bind(address: SocketAddr, account: &Account) -> io::Result<TcpListener> {
    let bound = run_as_user::run_as(account, move || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    TcpListener::from_std(bound.await?)
}

/// Forwards incoming connections to the client. `address` and `port` identify the listener for the client.
pub(super) async fn serve_port(listener: TcpListener, address: String, port: u32, backward: ReverseForward) {
    let places = Arc::new(tokio::sync::Semaphore::new(OPENING_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted: io::Result<(TcpStream, SocketAddr)> = tokio::select! {
            accepted = listener.accept() => accepted,
            () = backward.until.cancelled() => return,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        if backward.channels.is_full() {
            continue;
        }
        let (backward, address) = (backward.clone(), address.clone());
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            let opened = backward.handle.channel_open_forwarded_tcpip(
                address,
                port,
                peer.ip().to_string(),
                u32::from(peer.port()),
            );
            let channel = opened.await;
            drop(place);
            backward.serve_stream(channel, stream).await;
        });
    }
}

/// Listening unix socket, created with the user's rights; its file is removed when it is dropped.
pub(super) struct NamedSocket {
    listener: UnixListener,
    remove: Vec<PathBuf>,
}

impl Drop for NamedSocket {
    fn drop(&mut self) {
        for path in &self.remove {
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
        }
    }
}

pub(super) async fn listen_socket(path: PathBuf, account: &Account) -> io::Result<NamedSocket> {
    let remove = vec![path.clone()];
    let bound = run_as_user::run_as(account, move || bind_socket(&path)).await?;
    Ok(NamedSocket { listener: UnixListener::from_std(bound)?, remove })
}

fn bind_socket(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let listener = std::os::unix::net::UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Creates a socket for `SSH_AUTH_SOCK` in a separate directory that only the user may enter.
pub(super) async fn listen_agent(account: &Account) -> io::Result<(NamedSocket, PathBuf)> {
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(|_| io::Error::other("failed to generate random bytes"))?;
    let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    // An image may have no /tmp.
    let bases =
        [PathBuf::from("/tmp"), PathBuf::from("/dev/shm"), PathBuf::from("/run"), account.home.clone()];
    let made = run_as_user::run_as(account, move || {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for base in bases {
            let dir = base.join(format!("ssh-{name}"));
            match std::fs::create_dir(&dir) {
                Ok(()) => {}
                Err(error) => {
                    last = error;
                    continue;
                }
            }
            std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
            let path = dir.join("agent");
            match bind_socket(&path) {
                Ok(listener) => return Ok((listener, dir, path)),
                Err(error) => {
                    let _ = std::fs::remove_dir(&dir);
                    last = error;
                }
            }
        }
        Err(last)
    });
    let (listener, dir, path) = made.await?;
    let named = NamedSocket { listener: UnixListener::from_std(listener)?, remove: vec![path.clone(), dir] };
    Ok((named, path))
}

/// Target of a unix socket at the client's side.
pub(super) enum ClientEnd {
    Agent,
    Socket(String),
}

pub(super) async fn serve_socket(named: NamedSocket, far: ClientEnd, backward: ReverseForward) {
    let far = Arc::new(far);
    let places = Arc::new(tokio::sync::Semaphore::new(OPENING_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = named.listener.accept() => accepted,
            () = backward.until.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        if backward.channels.is_full() {
            continue;
        }
        let (backward, far) = (backward.clone(), Arc::clone(&far));
        tokio::spawn(async move {
            let channel = match far.as_ref() {
                ClientEnd::Agent => backward.handle.channel_open_agent().await,
                ClientEnd::Socket(path) => {
                    backward.handle.channel_open_forwarded_streamlocal(path.clone()).await
                }
            };
            drop(place);
            backward.serve_stream(channel, stream).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_runner_port_on_a_loopback_address_is_the_runner() {
        for host in ["localhost", "LocalHost", "127.0.0.1", "127.8.0.1", "::1", "[::1]", "::ffff:127.0.0.1"] {
            assert!(is_runner_port(host, u32::from(RUNNER_PORT)), "{host}");
            assert!(!is_runner_port(host, u32::from(RUNNER_PORT) + 1), "{host}");
        }
        for host in ["", "0.0.0.0", "10.0.0.1", "::2", "localhost.example", "runner"] {
            assert!(!is_runner_port(host, u32::from(RUNNER_PORT)), "{host}");
        }
    }
}
