//! Endpoint of a server, and connections to it.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::{AddressError, AllowedAddresses, LookupError, TlsRoots, lookup};

/// Bidirectional byte stream.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

pub type Stream = Box<dyn Io>;

/// Failure to connect.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The name has addresses, but this machine does not dial any of them.
    #[error("the address of {name} is not allowed")]
    NotAllowed { name: String },
    #[error("failed to connect to {name}")]
    Connect {
        name: String,
        #[source]
        source: io::Error,
    },
    /// The server's certificate is not trusted, or the server does not support TLS.
    #[error("TLS handshake with {name} failed")]
    Tls {
        name: String,
        #[source]
        source: io::Error,
    },
}

/// Conversion for callers that only handle I/O errors: keeps the kind, and the text contains the cause.
impl From<DialError> for io::Error {
    fn from(error: DialError) -> Self {
        match &error {
            DialError::Lookup(_) => Self::new(io::ErrorKind::NotFound, error.to_string()),
            DialError::NotAllowed { .. } => Self::new(io::ErrorKind::PermissionDenied, error.to_string()),
            DialError::Connect { source, .. } | DialError::Tls { source, .. } => {
                Self::new(source.kind(), format!("{error}: {source}"))
            }
        }
    }
}

/// Connects to the first address of a name that accepts, within `limit` for all addresses together.
pub async fn connect(host: &str, port: u16, limit: Duration) -> Result<TcpStream, DialError> {
    let found = lookup(host).await?;
    connect_first(host, &found, port, limit).await
}

/// Connects to the first of these addresses of a name that accepts, within `limit` for all addresses together.
pub async fn connect_first(
    host: &str,
    found: &[IpAddr],
    port: u16,
    limit: Duration,
) -> Result<TcpStream, DialError> {
    // An unresponsive first address must leave time for the next.
    let each = limit / u32::try_from(found.len()).unwrap_or(1).max(1);
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in found {
        match timeout(each, TcpStream::connect(SocketAddr::new(*address, port))).await {
            Ok(Ok(stream)) => {
                // A socket on which this fails is about to fail anyway.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(DialError::Connect { name: format_host_port(host, port), source: last })
}

/// Server on the network, with or without TLS.
#[derive(Clone)]
pub struct Endpoint {
    host: String,
    port: u16,
    tls: Option<TlsConnector>,
    allowed: AllowedAddresses,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", if self.tls.is_some() { "tls " } else { "" }, self.name())
    }
}

impl Endpoint {
    pub fn plain(host: &str, port: u16) -> Self {
        Self { host: strip_brackets(host).to_owned(), port, tls: None, allowed: AllowedAddresses::Any }
    }

    pub fn with_tls(host: &str, port: u16, trust: &TlsRoots) -> Self {
        let (host, tls) = (strip_brackets(host).to_owned(), Some(trust.connector()));
        Self { host, port, tls, allowed: AllowedAddresses::Any }
    }

    /// Restricts the addresses that are dialled, for a host that a user named.
    #[must_use]
    pub fn with_allowed(self, allowed: AllowedAddresses) -> Self {
        Self { allowed, ..self }
    }

    /// Returns `HOST:PORT`.
    pub fn name(&self) -> String {
        format_host_port(&self.host, self.port)
    }

    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    pub async fn connect(&self, limit: Duration) -> Result<Stream, DialError> {
        let found = self.allowed.lookup(&self.host).await.map_err(|error| match error {
            AddressError::Lookup(error) => DialError::Lookup(error),
            AddressError::NotAllowed { name } => DialError::NotAllowed { name },
        })?;
        let stream = connect_first(&self.host, &found, self.port, limit).await?;
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let failed = |source| DialError::Tls { name: self.name(), source };
        let name =
            ServerName::try_from(self.host.clone()).map_err(|error| failed(io::Error::other(error)))?;
        let agreed = timeout(limit, tls.connect(name, stream)).await;
        let stream = agreed.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
        Ok(Box::new(stream))
    }
}

/// Removes the brackets of an IPv6 address, which are part of URLs only.
fn strip_brackets(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

fn format_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn connect_reaches_a_listening_port_and_names_a_closed_one() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(connect("localhost", port, LIMIT).await.is_ok());
        drop(listener);
        let refused = connect("localhost", port, LIMIT).await.unwrap_err();
        assert_eq!(refused.to_string(), format!("failed to connect to localhost:{port}"));
    }

    #[tokio::test]
    async fn an_endpoint_with_restricted_addresses_does_not_dial_this_machine() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::plain("localhost", listener.local_addr().unwrap().port());
        let restricted = endpoint.clone().with_allowed(AllowedAddresses::External { but: vec![] });
        let refused = restricted.connect(LIMIT).await.err().unwrap();
        assert_eq!(refused.to_string(), "the address of localhost is not allowed");
        assert!(endpoint.connect(LIMIT).await.is_ok());
    }

    #[test]
    fn endpoint_names_put_ipv6_addresses_in_brackets() {
        assert_eq!(Endpoint::plain("[::1]", 80).name(), "[::1]:80");
        assert_eq!(Endpoint::plain("::1", 80).name(), "[::1]:80");
        assert_eq!(Endpoint::plain("a.test", 8080).name(), "a.test:8080");
    }
}
