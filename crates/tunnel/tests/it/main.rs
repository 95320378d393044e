//! Tests of the tunnel against the real OpenSSH server.

#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod connection;
mod pool;
mod sshd;
