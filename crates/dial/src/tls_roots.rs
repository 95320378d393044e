//! TLS trust roots.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem, pem::PemObject as _},
    sign::{CertifiedKey, SingleCertAndKey},
};
use tokio_rustls::TlsConnector;

/// Environment variable with a file of certificates to trust instead of the system's, as in most programs.
const CA_FILE_VARIABLE: &str = "SSL_CERT_FILE";
/// Usual locations of the system's trusted certificates.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Prefix of every certificate in PEM.
const PEM_PREFIX: &str = "-----BEGIN";

#[derive(Debug, thiserror::Error)]
pub enum TlsRootsError {
    #[error("no trusted certificates found in {}", SYSTEM.join(", "))]
    NoSystemBundle,
    #[error("failed to read the certificates in `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: pem::Error,
    },
    #[error("no certificates found in {place}")]
    Empty { place: String },
    #[error("failed to set up TLS")]
    Setup(#[from] Error),
}

/// Trusted certificates.
#[derive(Clone)]
pub struct TlsRoots {
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for TlsRoots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

impl TlsRoots {
    /// Loads the given certificates, or the system's without any.
    pub fn load(given: Option<&str>) -> Result<Self, TlsRootsError> {
        given.map_or_else(Self::from_system, Self::from_certificates)
    }

    /// Loads the certificates that this machine trusts.
    pub fn from_system() -> Result<Self, TlsRootsError> {
        let (all, path) = read_system_bundle()?;
        Self::build(&all, &[], &path.display().to_string())
    }

    /// Trusts servers that present one of these certificates, under any name, and those with a certificate issued by
    /// one of them. `given` is a file of certificates, or the certificates themselves as PEM.
    pub fn from_certificates(given: &str) -> Result<Self, TlsRootsError> {
        if given.trim_start().starts_with(PEM_PREFIX) {
            let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(given.as_bytes()).collect();
            let path = PathBuf::from("PEM");
            let given = read.map_err(|source| TlsRootsError::Read { path, source })?;
            return Self::build(&given, &given, "the given PEM text");
        }
        let path = Path::new(given);
        let unreadable = |source| TlsRootsError::Read { path: path.to_owned(), source };
        let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(unreadable)?.collect();
        let read = read.map_err(unreadable)?;
        Self::build(&read, &read, given)
    }

    fn build(
        all: &[CertificateDer<'static>],
        known: &[CertificateDer<'static>],
        place: &str,
    ) -> Result<Self, TlsRootsError> {
        if all.is_empty() {
            return Err(TlsRootsError::Empty { place: place.to_owned() });
        }
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(all.iter().cloned());
        let authorities = if roots.is_empty() {
            None
        } else {
            let built =
                WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
            Some(built.map_err(|error| Error::General(error.to_string()))?)
        };
        let known = PinningVerifier { pinned: known.to_vec(), authorities, provider: provider.clone() };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(known))
            .with_no_client_auth();
        Ok(Self { config: Arc::new(config) })
    }

    /// Presents this certificate to servers that ask for one.
    pub fn with_identity(&self, identity: &ClientIdentity) -> Result<Self, TlsRootsError> {
        let ClientIdentity { chain, key } = identity;
        let signer = ring::sign::any_supported_type(key)?;
        let certified = CertifiedKey::new(chain.clone(), signer);
        let mut config = ClientConfig::clone(&self.config);
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
        Ok(Self { config: Arc::new(config) })
    }

    pub(crate) fn connector(&self) -> TlsConnector {
        TlsConnector::from(self.config.clone())
    }
}

/// Certificate and key by which a server identifies this client.
pub struct ClientIdentity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// Omits the key.
impl std::fmt::Debug for ClientIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientIdentity").field("certificates", &self.chain.len()).finish_non_exhaustive()
    }
}

impl ClientIdentity {
    /// Reads two PEM files.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsRootsError> {
        let unreadable = |path: &Path| {
            let path = path.to_owned();
            |source| TlsRootsError::Read { path, source }
        };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_file_iter(certificate).map_err(unreadable(certificate))?.collect();
        let chain = chain.map_err(unreadable(certificate))?;
        if chain.is_empty() {
            return Err(TlsRootsError::Empty { place: certificate.display().to_string() });
        }
        let key = PrivateKeyDer::from_pem_file(key).map_err(unreadable(key))?;
        Ok(Self { chain, key })
    }
}

/// Returns the certificates that this machine trusts, for callers that set up TLS themselves.
pub fn system_certificates() -> Result<Vec<CertificateDer<'static>>, TlsRootsError> {
    let (all, path) = read_system_bundle()?;
    if all.is_empty() { Err(TlsRootsError::Empty { place: path.display().to_string() }) } else { Ok(all) }
}

fn read_system_bundle() -> Result<(Vec<CertificateDer<'static>>, PathBuf), TlsRootsError> {
    let chosen = std::env::var_os(CA_FILE_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
    let system = || SYSTEM.iter().map(PathBuf::from).find(|path| path.exists());
    let path = chosen.or_else(system).ok_or(TlsRootsError::NoSystemBundle)?;
    let read = CertificateDer::pem_file_iter(&path)
        .map_err(|source| TlsRootsError::Read { path: path.clone(), source })?;
    // Bundles contain certificates that cannot be parsed; those are skipped.
    Ok((read.filter_map(Result::ok).collect(), path))
}

/// Verifier that accepts the pinned certificates themselves before it does the usual verification.
#[derive(Debug)]
struct PinningVerifier {
    pinned: Vec<CertificateDer<'static>>,
    authorities: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinningVerifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.pinned.iter().any(|one| one == shown) {
            return Ok(ServerCertVerified::assertion());
        }
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        self.authorities.as_ref().ok_or(unknown)?.verify_server_cert(shown, between, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
