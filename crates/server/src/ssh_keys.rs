//! Generates SSH keys for users and for the nodes of a replica.

use ssh_key::{LineEnding, PrivateKey, private::Ed25519Keypair};

#[derive(Debug, thiserror::Error)]
pub enum KeyPairError {
    #[error("failed to generate random bytes for an SSH key")]
    Random(#[from] getrandom::Error),
    #[error("failed to encode an SSH key")]
    Write(#[from] ssh_key::Error),
}

pub(crate) fn generate_key_pair(name: &str) -> Result<(String, String), KeyPairError> {
    let mut seed = [0_u8; 32];
    getrandom::fill(&mut seed)?;
    key_pair_from_seed(&seed, name)
}

/// Returns the public and the private key of a secret seed.
pub(crate) fn key_pair_from_seed(seed: &[u8; 32], name: &str) -> Result<(String, String), KeyPairError> {
    let mut key = PrivateKey::from(Ed25519Keypair::from_seed(seed));
    key.set_comment(name);
    // Clients compare the public key byte for byte with the one in run specs, newline included.
    let public = key.public_key().to_openssh()? + "\n";
    Ok((public, key.to_openssh(LineEnding::LF)?.to_string()))
}
