//! Certificates by server name, replaceable while connections are open.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, date_time_ymd};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

/// Refusal of a certificate.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("failed to read the certificate of `{name}`")]
    Certificate {
        name: String,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("the certificate chain of `{name}` is empty")]
    Empty { name: String },
    #[error("failed to read the private key of `{name}`")]
    Key {
        name: String,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("cannot use the certificate of `{name}` with its private key")]
    Mismatch {
        name: String,
        #[source]
        source: rustls::Error,
    },
    #[error("failed to set up TLS")]
    Setup(#[source] rustls::Error),
    #[error("failed to create a self-signed certificate")]
    SelfSigned(#[from] rcgen::Error),
}

/// Certificate with its key, as PEM.
pub struct CertificatePem {
    /// Name, `*.example.org`, or `*` for all names without another certificate.
    pub name: String,
    pub chain: Vec<u8>,
    pub key: Vec<u8>,
}

impl CertificatePem {
    /// Creates a self-signed certificate for these names and addresses. Clients trust this exact certificate, so it does
    /// not expire.
    pub fn self_signed(names: &[String]) -> Result<Self, TlsError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "windlass");
        params.not_before = date_time_ymd(2024, 1, 1);
        params.not_after = date_time_ymd(9999, 12, 31);
        let certificate = params.self_signed(&key)?;
        Ok(Self {
            name: "*".to_owned(),
            chain: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        })
    }
}

impl std::fmt::Debug for CertificatePem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pem").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Certificates in use.
#[derive(Debug, Default)]
pub struct Certificates {
    by_name: RwLock<HashMap<String, Arc<CertifiedKey>>>,
}

impl Certificates {
    /// Adds a certificate, or replaces the one with the same name. Open connections are not affected.
    pub fn put(&self, pem: &CertificatePem) -> Result<(), TlsError> {
        let name = pem.name.to_ascii_lowercase();
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem.chain)
            .collect::<Result<_, _>>()
            .map_err(|source| TlsError::Certificate { name: name.clone(), source })?;
        if chain.is_empty() {
            return Err(TlsError::Empty { name });
        }
        let key = PrivateKeyDer::from_pem_slice(&pem.key)
            .map_err(|source| TlsError::Key { name: name.clone(), source })?;
        let key = CertifiedKey::from_der(chain, key, &ring::default_provider())
            .map_err(|source| TlsError::Mismatch { name: name.clone(), source })?;
        self.by_name.write().insert(name, Arc::new(key));
        Ok(())
    }

    pub fn remove(&self, name: &str) {
        self.by_name.write().remove(&name.to_ascii_lowercase());
    }

    /// Returns whether there is a certificate for exactly this name.
    pub fn has_own(&self, name: &str) -> bool {
        self.by_name.read().contains_key(&name.to_ascii_lowercase())
    }

    pub fn has(&self, name: &str) -> bool {
        self.find(Some(name)).is_some()
    }

    fn find(&self, name: Option<&str>) -> Option<Arc<CertifiedKey>> {
        let by_name = self.by_name.read();
        let own = name.and_then(|name| {
            let name = name.to_ascii_lowercase();
            let wildcard = || name.split_once('.').and_then(|(_, rest)| by_name.get(&format!("*.{rest}")));
            by_name.get(&name).or_else(wildcard)
        });
        own.or_else(|| by_name.get("*")).cloned()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.find(hello.server_name())
    }
}

/// Server configuration with TLS 1.2 and 1.3, HTTP/2 preferred over HTTP/1.1.
pub fn server_config(certificates: Arc<Certificates>) -> Result<Arc<ServerConfig>, TlsError> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .map_err(TlsError::Setup)?
        .with_no_client_auth()
        .with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
