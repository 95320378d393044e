//! How a gateway speaks to the server: one call, one connection, plain or with TLS.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, StatusCode, Uri,
    client::conn::http1,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use windlass_api::Operation;

use crate::connect::Stream;

/// The largest answer: the routes of ten thousand services.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
/// As much of a refusal is shown.
const WORDS_MAX: usize = 300;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(
        "read the server's address `{url}`: want `http://HOST:PORT`, or `https://HOST:PORT` with its certificate"
    )]
    Address { url: String },
    #[error("read the certificate of the server in `{}`", path.display())]
    Certificate {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("set up TLS to the server")]
    Tls(#[source] rustls::Error),
    #[error("find the server: {why}")]
    Lookup { why: String },
    #[error("connect to the server")]
    Connect(#[source] std::io::Error),
    #[error("exchange with the server")]
    Exchange(#[source] hyper::Error),
    #[error("build a request to the server")]
    Build(#[source] hyper::http::Error),
    #[error("write a request to the server")]
    Encode(#[source] serde_json::Error),
    #[error("understand the server's answer")]
    Decode(#[source] serde_json::Error),
    #[error("read the server's answer: it is too long, or was cut")]
    Body,
    #[error("the server took longer than {} s", after.as_secs())]
    Late { after: Duration },
    /// The token is not that of a gateway that exists.
    #[error("the server does not know this gateway's token")]
    Denied,
    #[error("the server answered {status}: {words}")]
    Refused { status: StatusCode, words: String },
}

/// The server, as it is found.
pub struct Server {
    host: String,
    port: u16,
    base: String,
    authority: String,
    authorization: HeaderValue,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Server {
    /// `certificate` is what an `https` server is known by.
    pub fn new(url: &str, token: &str, certificate: Option<&Path>) -> Result<Self, ServerError> {
        let wrong = || ServerError::Address { url: url.to_owned() };
        let parsed: Uri = url.parse().map_err(|_| wrong())?;
        let authority = parsed.authority().ok_or_else(wrong)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let (tls, usual) = match (parsed.scheme_str(), certificate) {
            (Some("http"), _) => (None, 80),
            (Some("https"), Some(path)) => {
                let name = ServerName::try_from(host.clone()).map_err(|_| wrong())?;
                (Some((connector(path)?, name)), 443)
            }
            _ => return Err(wrong()),
        };
        let mut authorization =
            HeaderValue::try_from(format!("Bearer {}", token.trim())).map_err(|_| ServerError::Denied)?;
        authorization.set_sensitive(true);
        Ok(Self {
            port: authority.port_u16().unwrap_or(usual),
            base: parsed.path().trim_end_matches('/').to_owned(),
            authority: authority.to_string(),
            host,
            authorization,
            tls,
        })
    }

    pub async fn call<O: Operation>(
        &self,
        request: &O::Request,
        within: Duration,
    ) -> Result<O::Response, ServerError> {
        let answer = timeout(within, self.exchange::<O>(request)).await;
        let answer = answer.map_err(|_| ServerError::Late { after: within })??;
        serde_json::from_slice(&answer).map_err(ServerError::Decode)
    }

    async fn exchange<O: Operation>(&self, request: &O::Request) -> Result<Bytes, ServerError> {
        let body = serde_json::to_vec(request).map_err(ServerError::Encode)?;
        let request = Request::post(format!("{}{}", self.base, O::PATH))
            .header(header::HOST, &self.authority)
            .header(header::AUTHORIZATION, self.authorization.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Full::new(Bytes::from(body)))
            .map_err(ServerError::Build)?;
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(ServerError::Exchange)?;
        let connection = tokio::spawn(connection);
        let answered = async {
            let answer = sender.send_request(request).await.map_err(ServerError::Exchange)?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await;
            let body = body.map_err(|_| ServerError::Body)?.to_bytes();
            match status {
                status if status.is_success() => Ok(body),
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(ServerError::Denied),
                status => {
                    let words = String::from_utf8_lossy(&body).chars().take(WORDS_MAX).collect();
                    Err(ServerError::Refused { status, words })
                }
            }
        };
        let answered = answered.await;
        connection.abort();
        answered
    }

    async fn connect(&self) -> Result<Stream, ServerError> {
        let found = windlass_tunnel::lookup(&self.host).await.map_err(|why| ServerError::Lookup { why })?;
        let addresses: Vec<SocketAddr> = found.into_iter().map(|ip| SocketAddr::new(ip, self.port)).collect();
        let stream = TcpStream::connect(addresses.as_slice()).await.map_err(ServerError::Connect)?;
        stream.set_nodelay(true).map_err(ServerError::Connect)?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await.map_err(ServerError::Connect)?;
                Ok(Box::new(stream))
            }
        }
    }
}

/// Trusts what is in one file, and nothing else.
pub(super) fn connector(path: &Path) -> Result<TlsConnector, ServerError> {
    let unreadable = |source| ServerError::Certificate { path: path.to_owned(), source };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
        roots.add(certificate.map_err(unreadable)?).map_err(ServerError::Tls)?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .map_err(ServerError::Tls)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
