//! Connections to an object store: names without the C library, TLS with the machine's roots.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ADDRESSES_MAX: usize = 8;
/// Where systems keep the certificates they trust.
const ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

pub(super) type Sender = SendRequest<Full<Bytes>>;

/// Where the store answers.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) host: String,
    pub(super) port: u16,
    tls: Option<TlsConnector>,
}

impl Peer {
    /// Over TLS, `roots` is a file of certificates to trust instead of the system's.
    pub(super) fn new(host: &str, port: u16, tls: bool, roots: Option<&str>) -> io::Result<Self> {
        let tls = if tls { Some(connector(roots)?) } else { None };
        Ok(Self { host: host.to_owned(), port, tls })
    }

    pub(super) async fn connect(&self) -> io::Result<Sender> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        timeout(CONNECT_TIMEOUT, self.dial()).await.map_err(late)?
    }

    async fn dial(&self) -> io::Result<Sender> {
        let stream = TcpStream::connect(self.addresses().await?.as_slice()).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => join(stream).await,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
                join(tls.connect(name, stream).await?).await
            }
        }
    }

    async fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let with_port = |address: IpAddr| SocketAddr::new(address, self.port);
        if let Ok(address) = self.host.parse() {
            return Ok(vec![with_port(address)]);
        }
        let resolver = hickory_resolver::TokioResolver::builder_tokio()
            .and_then(|builder| builder.build())
            .map_err(io::Error::other)?;
        let found = resolver.lookup_ip(self.host.as_str()).await.map_err(io::Error::other)?;
        Ok(found.iter().take(ADDRESSES_MAX).map(with_port).collect())
    }
}

async fn join(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<Sender> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // Its errors are seen by whoever waits for an answer on it.
    tokio::spawn(connection);
    Ok(sender)
}

fn connector(roots: Option<&str>) -> io::Result<TlsConnector> {
    let named = roots.map_or_else(|| ROOTS.to_vec(), |file| vec![file]);
    let file = named.iter().find(|file| std::path::Path::new(file).exists()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("no certificates to trust in {}", named.join(", ")))
    })?;
    let mut store = RootCertStore::empty();
    let read = CertificateDer::pem_file_iter(file).map_err(io::Error::other)?;
    // Bundles hold certificates that nobody can use; those are left out.
    store.add_parsable_certificates(read.filter_map(Result::ok));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(store)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
