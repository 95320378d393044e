//! Keys: login keys of the server, and host keys.

use std::{fmt, sync::Arc};

use russh::keys::{HashAlg, PrivateKey, PublicKey, PublicKeyOrCertificate, decode_secret_key};

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("failed to read the private key")]
    Private(#[source] russh::keys::Error),
    #[error("failed to read the host key")]
    Host(#[source] russh::keys::ssh_key::Error),
}

/// Private key to log in with.
#[derive(Clone)]
pub struct LoginKey(pub(crate) Arc<PrivateKey>);

impl LoginKey {
    /// Parses OpenSSH, PKCS#8 or PKCS#1 text, without a passphrase.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        decode_secret_key(text, None).map(|key| Self(Arc::new(key))).map_err(KeyError::Private)
    }

    /// Returns the public key as one line of `authorized_keys`.
    pub fn public_line(&self) -> String {
        self.0.public_key().to_openssh().unwrap_or_default()
    }
}

impl fmt::Debug for LoginKey {
    /// Shows the public key only, because the text may be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.0.public_key().fingerprint(HashAlg::Sha256))
    }
}

/// Public key that a host has proven to own.
#[derive(Clone, PartialEq, Eq)]
pub struct HostKey(PublicKey);

impl HostKey {
    /// Parses one line as in `known_hosts`, without the host: `ssh-ed25519 AAAA…`.
    pub fn parse(line: &str) -> Result<Self, KeyError> {
        let mut key = PublicKey::from_openssh(line).map_err(KeyError::Host)?;
        key.set_comment("");
        Ok(Self(key))
    }

    /// Returns the line to store.
    pub fn to_openssh(&self) -> String {
        self.0.to_openssh().unwrap_or_default()
    }

    pub(crate) fn from_presented(key: &PublicKeyOrCertificate) -> Self {
        let mut key = match key {
            PublicKeyOrCertificate::PublicKey { key, .. } => key.clone(),
            PublicKeyOrCertificate::Certificate(certificate) => certificate.public_key().clone().into(),
        };
        key.set_comment("");
        Self(key)
    }
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fingerprint(HashAlg::Sha256).fmt(f)
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({self})")
    }
}
