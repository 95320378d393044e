//! Hashes as text: how credentials, tokens and copies of the agent are named.

use sha2::{Digest as _, Sha256};

/// SHA-256, as hex.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
