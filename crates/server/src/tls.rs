//! The server's TLS certificate: configured, or self-signed once and kept in the data directory.

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio_rustls::TlsAcceptor;
use windlass_gateway::tls::CertificatePem;
use windlass_model::error_chain::format_chain as described;

/// Address and certificate of the TLS listener.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    pub address: SocketAddr,
    /// Certificate and key, as PEM files.
    pub given: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsSetupError {
    #[error("failed to read or write `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to parse `{}`", path.display())]
    Pem {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("cannot use the certificate with its key")]
    Use(#[from] rustls::Error),
    #[error("failed to create a certificate")]
    Make(#[source] windlass_gateway::tls::TlsError),
}

/// TLS on the plain port: the Arvados client always uses TLS. The certificate is created for the first such connection.
pub(crate) struct FallbackTls {
    wanted: TlsSettings,
    data_dir: PathBuf,
    made: OnceLock<Option<TlsAcceptor>>,
}

impl FallbackTls {
    pub(crate) fn new(address: SocketAddr, data_dir: &Path) -> Self {
        let wanted = TlsSettings { address, given: None };
        Self { wanted, data_dir: data_dir.to_owned(), made: OnceLock::new() }
    }

    /// Returns `None` if TLS is unavailable; the reason was logged.
    pub(crate) fn acceptor(&self) -> Option<TlsAcceptor> {
        let make = || match acceptor(&self.wanted, &self.data_dir) {
            Ok(acceptor) => Some(acceptor),
            Err(error) => {
                tracing::warn!(error = described(&error), "failed to prepare TLS for the plain port");
                None
            }
        };
        self.made.get_or_init(make).clone()
    }
}

pub(crate) fn acceptor(wanted: &TlsSettings, data_dir: &Path) -> Result<TlsAcceptor, TlsSetupError> {
    let (chain, key) = match &wanted.given {
        Some(given) => given.clone(),
        None => ensure_self_signed(wanted, data_dir)?,
    };
    let pem = |path: &Path| {
        let path = path.to_owned();
        move |source| TlsSetupError::Pem { path, source }
    };
    let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&chain)
        .map_err(pem(&chain))?
        .collect::<Result<_, _>>()
        .map_err(pem(&chain))?;
    let private = PrivateKeyDer::from_pem_file(&key).map_err(pem(&key))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)?
        .with_no_client_auth()
        .with_single_cert(certificates, private)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Creates a self-signed certificate at the first start. Clients that trust `tls/cert.pem` trust this server until the
/// file is deleted.
fn ensure_self_signed(wanted: &TlsSettings, data_dir: &Path) -> Result<(PathBuf, PathBuf), TlsSetupError> {
    let folder = data_dir.join("tls");
    let (chain, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    if chain.exists() && key.exists() {
        return Ok((chain, key));
    }
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    if let Ok(host) = rustix::system::uname().nodename().to_str() {
        names.push(host.to_owned());
    }
    let address = wanted.address.ip();
    if !address.is_unspecified() && !address.is_loopback() {
        names.push(address.to_string());
    }
    let certificate = CertificatePem::self_signed(&names).map_err(TlsSetupError::Make)?;
    crate::encryption::create_private_dirs(&folder)
        .map_err(|source| TlsSetupError::File { path: folder, source })?;
    write_file(&key, 0o600, &certificate.key)?;
    write_file(&chain, 0o644, &certificate.chain)?;
    Ok((chain, key))
}

fn write_file(path: &Path, mode: u32, content: &[u8]) -> Result<(), TlsSetupError> {
    let failed = |source| TlsSetupError::File { path: path.to_owned(), source };
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)
        .map_err(failed)?;
    file.write_all(content).map_err(failed)
}
