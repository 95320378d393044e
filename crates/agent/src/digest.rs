//! Hex digests, which identify credentials, tokens and copies of the agent.

use sha2::{Digest as _, Sha256};

/// Returns the SHA-256 digest as hex.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
