//! TLS to Postgres, configured with the usual options of Postgres: `sslmode`, `sslrootcert`, `sslcert` and `sslkey` of
//! the database URL, else `PGSSLMODE` and the like.
//!
//! By default, TLS is optional for a database on this machine, and any other database must prove its name: otherwise
//! the password and all data would be readable on the network.

use std::{
    fmt,
    future::Future,
    io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem, pem::PemObject as _},
    server::ParsedCertificate,
};
use sha2::{Digest as _, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{
    Config,
    config::{Host, SslMode},
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream},
};
use tokio_rustls::TlsConnector;

use crate::{counters::Counters, error::DbError};

/// Value of `sslrootcert` for the trust roots of this machine.
const SYSTEM_ROOTS: &str = "system";
/// ALPN name of the Postgres protocol, for connections that begin with TLS directly.
const ALPN_PROTOCOL: &[u8] = b"postgresql";
/// Error message of the driver for a database without TLS.
const NO_TLS_MESSAGE: &str = "server does not support TLS";

#[derive(Debug, thiserror::Error)]
pub(super) enum TlsError {
    #[error(
        "invalid `sslmode` value `{word}`: expected `disable`, `prefer`, `require`, `verify-ca` or \
         `verify-full`; hint: use `prefer` instead of `allow`"
    )]
    Mode { word: String },
    #[error("`sslrootcert=system` requires `sslmode=verify-full`, which checks the host name")]
    WeakSystem,
    #[error("`sslcert` and `sslkey` must be set together")]
    Pair,
    #[error("invalid percent-encoding in the database URL: `{text}`")]
    Encoding { text: String },
    #[error("failed to read `{}`", path.display())]
    Pem {
        path: PathBuf,
        #[source]
        source: pem::Error,
    },
    #[error("`{}` contains no certificate", path.display())]
    Empty { path: PathBuf },
    #[error("failed to read `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the private key `{}` is readable by other users; hint: run `chmod 600 {}`", path.display(), path.display())]
    KeyPermissions { path: PathBuf },
    #[error("no trusted certificates found; hint: set `sslrootcert=FILE`")]
    System(#[source] windlass_dial::TlsRootsError),
    #[error("failed to set up TLS for the database")]
    Setup(#[from] rustls::Error),
    #[error("failed to set up the verification of the database's certificate")]
    Verifier(#[from] rustls::client::VerifierBuilderError),
}

/// Extent of the certificate check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl Mode {
    fn parse(word: &str) -> Result<Self, TlsError> {
        match word {
            "disable" => Ok(Self::Disable),
            "prefer" => Ok(Self::Prefer),
            "require" => Ok(Self::Require),
            "verify-ca" => Ok(Self::VerifyCa),
            "verify-full" => Ok(Self::VerifyFull),
            _ => Err(TlsError::Mode { word: word.to_owned() }),
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Disable => "disable",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        }
    }

    const fn for_driver(self) -> SslMode {
        match self {
            Self::Disable => SslMode::Disable,
            Self::Prefer => SslMode::Prefer,
            Self::Require | Self::VerifyCa | Self::VerifyFull => SslMode::Require,
        }
    }
}

/// TLS options from the URL or else the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TlsOptions {
    mode: Option<String>,
    root_cert: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

impl TlsOptions {
    fn option_mut(&mut self, name: &str) -> Option<&mut Option<String>> {
        match name {
            "sslmode" => Some(&mut self.mode),
            "sslrootcert" => Some(&mut self.root_cert),
            "sslcert" => Some(&mut self.cert),
            "sslkey" => Some(&mut self.key),
            _ => None,
        }
    }

    /// Removes the TLS options from the URL. The driver reads the rest, and rejects what it does not know.
    fn read(url: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<(String, Self), TlsError> {
        let mut requested = Self::default();
        let (place, query) = url.split_once('?').unwrap_or((url, ""));
        let mut rest = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match requested.option_mut(name) {
                Some(slot) => *slot = Some(percent_decoded(value)?),
                None => rest.push(pair),
            }
        }
        for (name, variable) in [
            ("sslmode", "PGSSLMODE"),
            ("sslrootcert", "PGSSLROOTCERT"),
            ("sslcert", "PGSSLCERT"),
            ("sslkey", "PGSSLKEY"),
        ] {
            if let Some(slot) = requested.option_mut(name)
                && slot.is_none()
            {
                *slot = env(variable).filter(|value| !value.is_empty());
            }
        }
        let url = if rest.is_empty() { place.to_owned() } else { format!("{place}?{}", rest.join("&")) };
        Ok((url, requested))
    }
}

fn percent_decoded(text: &str) -> Result<String, TlsError> {
    let wrong = || TlsError::Encoding { text: text.to_owned() };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()).ok_or_else(wrong)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| wrong())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

/// Address of the database and the required proof of its identity.
#[derive(Clone)]
pub(super) struct PostgresTarget {
    pub(super) config: Config,
    pub(super) tls: MakeTls,
    pub(super) counters: Arc<Counters>,
    mode: Mode,
    is_default: bool,
}

impl PostgresTarget {
    /// Reads a URL and, where it sets nothing, the environment.
    pub(super) fn read(url: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Self, DbError> {
        let wrong = |error: TlsError| DbError::open("the database URL", error);
        let (url, requested) = TlsOptions::read(url, env).map_err(wrong)?;
        let mut config: Config = url.parse().map_err(|error| DbError::open("the database URL", error))?;
        let given = requested.mode.as_deref().map(Mode::parse).transpose().map_err(wrong)?;
        let mode = match given {
            // No TLS over a local socket, as everywhere with Postgres.
            _ if all_hosts(&config, is_socket) => Mode::Disable,
            Some(mode) => mode,
            None if requested.root_cert.as_deref() == Some(SYSTEM_ROOTS) => Mode::VerifyFull,
            None if all_hosts(&config, is_loopback) => Mode::Prefer,
            None => Mode::VerifyFull,
        };
        config.ssl_mode(mode.for_driver());
        let tls = MakeTls::new(mode, &requested).map_err(wrong)?;
        Ok(Self { config, tls, counters: Arc::default(), mode, is_default: given.is_none() })
    }

    /// Adds a hint to the error if the database does not support TLS.
    pub(super) fn explain(&self, error: DbError) -> DbError {
        let DbError::Unavailable { source, .. } = &error else { return error };
        let mut cause: Option<&dyn std::error::Error> = Some(&**source);
        while let Some(message) = cause {
            if message.to_string().contains(NO_TLS_MESSAGE) {
                let why = if self.is_default { "the default for remote hosts" } else { "set" };
                let mode = self.mode.as_str();
                return DbError::Plain { mode, why, source: Arc::clone(source) };
            }
            cause = message.source();
        }
        error
    }
}

fn all_hosts(config: &Config, is_so: fn(&Config, usize) -> bool) -> bool {
    let count = config.get_hosts().len().max(config.get_hostaddrs().len());
    count > 0 && (0..count).all(|at| is_so(config, at))
}

fn is_socket(config: &Config, at: usize) -> bool {
    config.get_hostaddrs().is_empty() && matches!(config.get_hosts().get(at), Some(Host::Unix(_)))
}

fn is_loopback(config: &Config, at: usize) -> bool {
    if let Some(address) = config.get_hostaddrs().get(at) {
        return address.is_loopback();
    }
    match config.get_hosts().get(at) {
        Some(Host::Unix(_)) => true,
        Some(Host::Tcp(name)) => {
            name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        None => false,
    }
}

/// Starts TLS on connections to the database. Cheap to clone.
#[derive(Clone)]
pub(super) struct MakeTls {
    connector: TlsConnector,
    mode: Mode,
}

impl MakeTls {
    fn new(mode: Mode, requested: &TlsOptions) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let check = CertificateCheck::new(mode, requested.root_cert.as_deref(), &provider)?;
        let verifier = Arc::new(Verifier { check, provider: Arc::clone(&provider) });
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match (&requested.cert, &requested.key) {
            _ if mode == Mode::Disable => builder.with_no_client_auth(),
            (None, None) => builder.with_no_client_auth(),
            (Some(cert), Some(key)) => {
                builder.with_client_auth_cert(certificates(Path::new(cert))?, private_key(Path::new(key))?)?
            }
            (Some(_), None) | (None, Some(_)) => return Err(TlsError::Pair),
        };
        config.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), mode })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |source| TlsError::Pem { path: path.to_owned(), source };
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(unreadable)?.collect();
    let read = read.map_err(unreadable)?;
    if read.is_empty() { Err(TlsError::Empty { path: path.to_owned() }) } else { Ok(read) }
}

/// Reads a key. As with other clients of Postgres, it must be private to its owner, or belong to root and be readable
/// by a group.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let seen = std::fs::metadata(path).map_err(|source| TlsError::File { path: path.to_owned(), source })?;
    let is_closed = seen.mode() & 0o077 == 0 || (seen.uid() == 0 && seen.mode() & 0o037 == 0);
    if !is_closed {
        return Err(TlsError::KeyPermissions { path: path.to_owned() });
    }
    PrivateKeyDer::from_pem_file(path).map_err(|source| TlsError::Pem { path: path.to_owned(), source })
}

/// Requirements on a certificate.
#[derive(Debug)]
enum CertificateCheck {
    /// Any certificate is accepted: the connection is encrypted, but the server is not authenticated.
    None,
    /// It is one of these, or signed by one of these.
    Authority { known: Vec<CertificateDer<'static>>, authorities: Option<Arc<WebPkiServerVerifier>> },
    /// As `Authority`, and it contains the name of the database host.
    Name { known: Vec<CertificateDer<'static>>, authorities: Option<Arc<WebPkiServerVerifier>> },
}

impl CertificateCheck {
    fn new(mode: Mode, root_cert: Option<&str>, provider: &Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let is_system = root_cert == Some(SYSTEM_ROOTS);
        if is_system && !matches!(mode, Mode::VerifyFull | Mode::Disable) {
            return Err(TlsError::WeakSystem);
        }
        let known = match (mode, root_cert) {
            (Mode::Disable, _) | (Mode::Prefer | Mode::Require, None) => return Ok(Self::None),
            (_, Some(path)) if !is_system => certificates(Path::new(path))?,
            (_, Some(_) | None) => windlass_dial::system_certificates().map_err(TlsError::System)?,
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(known.iter().cloned());
        let authorities = if roots.is_empty() {
            None
        } else {
            let built = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            Some(built.build()?)
        };
        // If a root certificate is configured it is checked: `require` with one is `verify-ca`, as with `psql`.
        Ok(match mode {
            Mode::VerifyFull => Self::Name { known, authorities },
            Mode::Disable | Mode::Prefer | Mode::Require | Mode::VerifyCa => {
                Self::Authority { known, authorities }
            }
        })
    }
}

#[derive(Debug)]
struct Verifier {
    check: CertificateCheck,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let good = Ok(ServerCertVerified::assertion());
        let vouched = |authorities: &Option<Arc<WebPkiServerVerifier>>| {
            let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
            authorities.as_ref().ok_or(unknown)?.verify_server_cert(shown, between, name, ocsp, now)
        };
        match &self.check {
            CertificateCheck::None => good,
            CertificateCheck::Authority { known, .. } if known.contains(shown) => good,
            // Names are checked last: if only the name does not match, everything else is valid.
            CertificateCheck::Authority { authorities, .. } => match vouched(authorities) {
                Err(rustls::Error::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                )) => good,
                verdict => verdict,
            },
            CertificateCheck::Name { known, .. } if known.contains(shown) => {
                verify_server_name(&ParsedCertificate::try_from(shown)?, name)?;
                good
            }
            CertificateCheck::Name { authorities, .. } => vouched(authorities),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Traits of the driver's streams.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Duplex for S {}

impl<S: Duplex> MakeTlsConnect<S> for MakeTls {
    type Stream = EncryptedStream<S>;
    type TlsConnect = Handshake;
    type Error = HandshakeError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, HandshakeError> {
        Ok(Handshake { tls: self.clone(), host: host.to_owned() })
    }
}

/// A connection before its TLS handshake.
pub(super) struct Handshake {
    tls: MakeTls,
    host: String,
}

#[derive(Debug, thiserror::Error)]
#[error("TLS handshake with the database at `{host}` failed (sslmode={})", mode.as_str())]
pub(super) struct HandshakeError {
    host: String,
    mode: Mode,
    #[source]
    source: io::Error,
}

/// Returns whether the database was reached but failed verification, or does not support TLS: a retry would fail the
/// same way.
pub(super) fn is_final(error: &tokio_postgres::Error) -> bool {
    let Some(source) = std::error::Error::source(error) else { return false };
    let is_wrong = |failed: &HandshakeError| failed.source.kind() == io::ErrorKind::InvalidData;
    source.downcast_ref::<HandshakeError>().is_some_and(is_wrong) || source.to_string() == NO_TLS_MESSAGE
}

type HandshakeFuture<S> = Pin<Box<dyn Future<Output = Result<EncryptedStream<S>, HandshakeError>> + Send>>;

impl<S: Duplex> TlsConnect<S> for Handshake {
    type Stream = EncryptedStream<S>;
    type Error = HandshakeError;
    type Future = HandshakeFuture<S>;

    fn connect(self, stream: S) -> HandshakeFuture<S> {
        Box::pin(async move {
            let Self { tls, host } = self;
            let failed = |source| HandshakeError { host: host.clone(), mode: tls.mode, source };
            let name = ServerName::try_from(host.clone());
            let name = name.map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
            let stream = tls.connector.connect(name, stream).await.map_err(failed)?;
            Ok(EncryptedStream(Box::new(stream)))
        })
    }
}

/// An encrypted connection.
pub(super) struct EncryptedStream<S>(Box<tokio_rustls::client::TlsStream<S>>);

impl<S> fmt::Debug for EncryptedStream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Encrypted")
    }
}

impl<S: Duplex> TlsStream for EncryptedStream<S> {
    /// Binds the proof of the password to this connection.
    fn channel_binding(&self) -> ChannelBinding {
        let (_, session) = self.0.get_ref();
        let shown = session.peer_certificates().and_then(<[_]>::first);
        match shown.and_then(|certificate| fingerprint(certificate)) {
            Some(hash) => ChannelBinding::tls_server_end_point(hash),
            None => ChannelBinding::none(),
        }
    }
}

impl<S: Duplex> AsyncRead for EncryptedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(context, buffer)
    }
}

impl<S: Duplex> AsyncWrite for EncryptedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(context)
    }
}

/// Object identifiers of signatures without their last number, which selects the hash.
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
const ECDSA_SHA2: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03];
const ECDSA_SHA1: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x01];

/// Hash of a certificate by the algorithm of its signature, SHA-256 where that is older (RFC 5929,
/// `tls-server-end-point`). `None`: the signature names no hash.
fn fingerprint(certificate: &[u8]) -> Option<Vec<u8>> {
    // SEQUENCE { signed part, SEQUENCE { OBJECT IDENTIFIER … }, signature }
    let (outer, _) = element(certificate, 0x30)?;
    let (_, after) = element(outer, 0x30)?;
    let (algorithm, _) = element(after, 0x30)?;
    let (id, _) = element(algorithm, 0x06)?;
    let (last, family) = id.split_last()?;
    match (family, last) {
        // MD5, SHA-1 and SHA-256 by RSA; SHA-1 and SHA-256 by ECDSA.
        (RSA, 4 | 5 | 11) | (ECDSA_SHA2, 2) => Some(Sha256::digest(certificate).to_vec()),
        (RSA, 12) | (ECDSA_SHA2, 3) => Some(Sha384::digest(certificate).to_vec()),
        (RSA, 13) | (ECDSA_SHA2, 4) => Some(Sha512::digest(certificate).to_vec()),
        _ if id == ECDSA_SHA1 => Some(Sha256::digest(certificate).to_vec()),
        _ => None,
    }
}

/// First element of DER data if it has this tag, and the data after it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (first, rest) = der.split_first()?;
    let (short, mut rest) = rest.split_first()?;
    let mut length = usize::from(*short);
    if length >= 0x80 {
        let count = length & 0x7f;
        if count == 0 || count > 4 {
            return None;
        }
        length = rest.get(..count)?.iter().fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
        rest = &rest[count..];
    }
    (*first == tag && length <= rest.len()).then(|| rest.split_at(length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn silent(_: &str) -> Option<String> {
        None
    }

    fn mode(url: &str) -> &'static str {
        PostgresTarget::read(url, &silent).unwrap().mode.as_str()
    }

    fn problem(url: &str) -> String {
        let error = PostgresTarget::read(url, &silent).err().expect(url);
        windlass_model::error_chain::format_chain(&error)
    }

    #[test]
    fn a_remote_database_is_fully_verified_unless_configured_otherwise() {
        for (url, expected) in [
            ("postgres://w@localhost/w", "prefer"),
            ("postgres://w@127.0.0.1:5433/w", "prefer"),
            ("postgres://w@[::1]/w", "prefer"),
            ("postgres:///w?host=/run/postgresql", "disable"),
            ("postgres:///w?host=/run/postgresql&sslmode=require", "disable"),
            ("postgres://w@localhost/w?sslmode=require", "require"),
            ("postgres://w@db.example/w?sslmode=disable", "disable"),
            ("postgres://w@db.example/w?sslmode=prefer", "prefer"),
            ("postgres://w@10.0.0.7/w?connect_timeout=3&sslmode=require", "require"),
            ("postgres://w@localhost,10.0.0.7/w?sslmode=disable", "disable"),
        ] {
            assert_eq!(mode(url), expected, "{url}");
        }
        // These read the trust roots of the machine, which may be empty.
        for url in
            ["postgres://w@db.example/w", "postgres://w@10.0.0.7/w", "postgres://w@localhost,10.0.0.7/w"]
        {
            match PostgresTarget::read(url, &silent) {
                Ok(target) => assert_eq!((target.mode, target.is_default), (Mode::VerifyFull, true), "{url}"),
                Err(error) => assert!(matches!(error, DbError::Open { .. }), "{url}: {error}"),
            }
        }
    }

    #[test]
    fn url_parameters_override_the_environment() {
        let env = |name: &str| (name == "PGSSLMODE").then(|| "require".to_owned());
        let read = |url| PostgresTarget::read(url, &env).unwrap().mode;
        assert_eq!(read("postgres://w@db.example/w"), Mode::Require);
        assert_eq!(read("postgres://w@db.example/w?sslmode=disable"), Mode::Disable);
        let (rest, requested) =
            TlsOptions::read("postgres://w:p%40@h/w?sslrootcert=/a%20b&options=x&sslcert=c", &env).unwrap();
        assert_eq!(rest, "postgres://w:p%40@h/w?options=x");
        assert_eq!((requested.root_cert.as_deref(), requested.cert.as_deref()), (Some("/a b"), Some("c")));
    }

    #[test]
    fn unsupported_tls_options_are_refused_by_name() {
        for (query, part) in [
            ("sslmode=allow", "`allow`"),
            ("sslmode=sometimes", "`sometimes`"),
            ("sslmode=require&sslrootcert=system", "verify-full"),
            ("sslmode=require&sslcert=/c", "set together"),
            ("sslmode=verify-full&sslrootcert=/nowhere", "/nowhere"),
            ("sslmode=require&sslrootcert=%zz", "%zz"),
            ("sslmode=require&sslcrl=/x", "sslcrl"),
        ] {
            let message = problem(&format!("postgres://w@db.example/w?{query}"));
            assert!(message.contains(part), "{query}: {message}");
        }
    }

    proptest! {
        #[test]
        fn fuzz_of_database_urls(text in "(?s).{0,80}", query in "[a-z=&%/0-9?]{0,60}") {
            let _ = percent_decoded(&text);
            let _ = PostgresTarget::read(&text, &silent);
            let _ = PostgresTarget::read(&format!("postgres://w@h/w?{query}&sslmode={text}"), &silent);
        }

        #[test]
        fn fuzz_of_database_certificates(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = fingerprint(&bytes);
        }
    }
}
