//! Wire types between the server and the agents: one HTTP API for the shim of a host, one for the runner of a task.
//!
//! The calls and their bodies are those of dstack's public agents, so that either server can drive either agent. The
//! additions of windlass are in headers and in extra fields, which the others ignore.

pub mod client;
pub mod events;
pub mod port_pass;
pub mod ports;
pub mod runner;
pub mod shim;

/// Epoch of the lock under which a call is made. The shim rejects an epoch lower than it has seen for the submission.
pub const EPOCH_HEADER: &str = "windlass-epoch";
/// Sent with status 412: the epoch that the shim has seen.
pub const EPOCH_SEEN_HEADER: &str = "windlass-epoch-seen";
/// Ed25519 signature (base64) of `SIGNED_PREFIX` followed by the exact bytes of the body.
pub const SIGNATURE_HEADER: &str = "windlass-signature";
/// Prevents the signature of a task specification from being valid for anything else.
pub const SIGNED_PREFIX: &[u8] = b"windlass task specification 1\n";
/// Sent with log bytes: the offset after the last byte that the stream holds now.
pub const LOG_END_HEADER: &str = "windlass-log-end";
/// Sent with log bytes: `true` if nothing will be appended to the stream.
pub const LOG_COMPLETE_HEADER: &str = "windlass-log-complete";

/// `Upgrade` protocol of a connection that is forwarded to a port: raw bytes.
pub const PORT_PROTOCOL: &str = "tcp";

/// Port of the runner's HTTP API inside a container, if it uses TCP.
pub const RUNNER_PORT: u16 = 10999;
/// Port of the embedded SSH server inside a container.
pub const SSH_PORT: u16 = 10022;
/// Port of the shim's HTTP API on the loopback interface, if enabled.
pub const SHIM_PORT: u16 = 10998;

use serde::{Deserialize, Serialize};

/// Name and version of the service that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub service: String,
    pub version: String,
}
