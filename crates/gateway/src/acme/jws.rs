//! Signed requests of ACME: JSON Web Signatures with P-256.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Key of an ACME account.
pub struct AccountKey {
    pair: EcdsaKeyPair,
    pkcs8: Vec<u8>,
}

impl std::fmt::Debug for AccountKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AccountKey(…)")
    }
}

/// Failure to generate or load the key of an account.
#[derive(Debug, thiserror::Error)]
#[error("failed to create or use an ACME key")]
pub struct KeyError;

impl AccountKey {
    pub fn generate() -> Result<Self, KeyError> {
        let made = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new());
        Self::load(made.map_err(|_| KeyError)?.as_ref())
    }

    pub fn load(pkcs8: &[u8]) -> Result<Self, KeyError> {
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8, &SystemRandom::new());
        Ok(Self { pair: pair.map_err(|_| KeyError)?, pkcs8: pkcs8.to_vec() })
    }

    /// Returns the secret key, to be stored and loaded again.
    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    fn jwk(&self) -> Value {
        // 0x04, then the two coordinates of 32 bytes each.
        let point = self.pair.public_key().as_ref();
        let coordinate = |from: usize| base64url(point.get(from..from + 32).unwrap_or_default());
        // In alphabetical order, as the thumbprint requires.
        json!({ "crv": "P-256", "kty": "EC", "x": coordinate(1), "y": coordinate(33) })
    }

    /// Returns the key authorization for a challenge, which proves possession of this key.
    pub(super) fn key_authorization(&self, token: &str) -> String {
        format!("{token}.{}", base64url(&Sha256::digest(self.jwk().to_string())))
    }

    /// Encodes a signed request. Without an account URL it contains the public key itself. Without a payload it is a
    /// read.
    pub(super) fn sign(
        &self,
        url: &str,
        nonce: &str,
        account: Option<&str>,
        payload: Option<&Value>,
    ) -> Result<Vec<u8>, KeyError> {
        let mut protected = json!({ "alg": "ES256", "nonce": nonce, "url": url });
        match account {
            Some(account) => protected["kid"] = json!(account),
            None => protected["jwk"] = self.jwk(),
        }
        let protected = base64url(protected.to_string().as_bytes());
        let payload = payload.map_or_else(String::new, |payload| base64url(payload.to_string().as_bytes()));
        let signed = format!("{protected}.{payload}");
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes()).map_err(|_| KeyError)?;
        let document =
            json!({ "protected": protected, "payload": payload, "signature": base64url(signature.as_ref()) });
        Ok(document.to_string().into_bytes())
    }
}

pub(super) fn base64url(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}
