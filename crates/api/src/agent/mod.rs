//! The wire between the server and the agents: one HTTP API for the shim of a host, one for the runner of a task.
//!
//! The calls and their bodies are those of dstack's public agents, so that either server can drive either
//! agent. What windlass adds travels in headers and in extra fields, which the others ignore.

pub mod client;
pub mod events;
pub mod pass;
pub mod ports;
pub mod runner;
pub mod shim;

/// The take of the lock a call is made under. The shim refuses one lower than it has seen for the submission.
pub const EPOCH_HEADER: &str = "windlass-epoch";
/// Beside a refusal with 412: the epoch the shim has seen.
pub const EPOCH_SEEN_HEADER: &str = "windlass-epoch-seen";
/// Ed25519 signature (base64) of `SIGNED_PREFIX` followed by the very bytes of the body.
pub const SIGNATURE_HEADER: &str = "windlass-signature";
/// Keeps a signature of a task specification from being taken for one of anything else.
pub const SIGNED_PREFIX: &[u8] = b"windlass task specification 1\n";
/// Beside log bytes: the offset after the last byte the stream holds now.
pub const LOG_END_HEADER: &str = "windlass-log-end";
/// Beside log bytes: `true` when nothing will be added to the stream.
pub const LOG_COMPLETE_HEADER: &str = "windlass-log-complete";

/// What a connection becomes that is forwarded to a port: bytes as they are.
pub const PORT_PROTOCOL: &str = "tcp";

/// Port of the runner's HTTP inside a container, where TCP is used at all.
pub const RUNNER_PORT: u16 = 10999;
/// Port of the embedded SSH server inside a container.
pub const SSH_PORT: u16 = 10022;
/// Port of the shim's HTTP on the loopback, when asked for.
pub const SHIM_PORT: u16 = 10998;

use serde::{Deserialize, Serialize};

/// Who answers, and in which version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub service: String,
    pub version: String,
}
