//! HTTP GET over a new connection, and URL resolution for redirects.

use std::{net::IpAddr, time::Duration};

use http_body_util::Empty;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    client::conn::http1::handshake,
    header,
};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use windlass_dial::{AllowedAddresses, DialError, Endpoint, TlsRoots, TlsRootsError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the response head.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(transparent)]
    Connect(#[from] DialError),
    #[error(transparent)]
    TlsRoots(#[from] TlsRootsError),
    #[error("the connection to {host} failed")]
    Http {
        host: String,
        #[source]
        source: hyper::Error,
    },
    #[error("{host} did not respond in time")]
    Timeout { host: String },
    #[error("invalid URL `{url}`: expected http:// or https:// with a host and a path")]
    InvalidUrl { url: String },
    #[error("{host} redirected too many times")]
    TooManyRedirects { host: String },
    #[error("{host} redirected from https to http, which is not allowed")]
    InsecureRedirect { host: String },
}

/// An absolute http or https URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) tls: bool,
    /// Host and port as written.
    pub(crate) authority: String,
    /// Path and query.
    pub(crate) path: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, FetchError> {
        let wrong = || FetchError::InvalidUrl { url: text.to_owned() };
        let (tls, rest) = match text.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => return Err(wrong()),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let path = path.split('#').next().unwrap_or_default();
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let url = Self { tls, authority: authority.to_owned(), path };
        url.host_and_port().map(|_| url.clone()).ok_or_else(wrong)
    }

    /// Resolves a `Location` header against this URL.
    pub(crate) fn join(&self, location: &str) -> Result<Self, FetchError> {
        if location.contains("://") {
            return Self::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", if self.tls { "https" } else { "http" }));
        }
        if location.starts_with('/') {
            return Ok(Self { path: location.to_owned(), ..self.clone() });
        }
        let path = self.path.split('?').next().unwrap_or_default();
        let parent = path.rfind('/').map_or("/", |slash| &path[..=slash]);
        Ok(Self { path: format!("{parent}{location}"), ..self.clone() })
    }

    fn host_and_port(&self) -> Option<(&str, u16)> {
        let usual = if self.tls { 443 } else { 80 };
        let end = self.authority.rfind(']').map_or(0, |bracket| bracket + 1);
        let (host, port) = match self.authority[end..].rfind(':') {
            Some(colon) => (&self.authority[..end + colon], self.authority[end + colon + 1..].parse().ok()?),
            None => (self.authority.as_str(), usual),
        };
        let is_odd = |letter: char| letter.is_whitespace() || letter.is_control() || "@\\%".contains(letter);
        (!host.is_empty() && !host.contains(is_odd)).then_some((host, port))
    }
}

/// Returns whether the host is a loopback address. Such registries usually have no certificate.
pub(crate) fn is_loopback(authority: &str) -> bool {
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Sends a GET request and returns the response head with the unread body.
pub(crate) async fn get(
    url: &Url,
    headers: &[(header::HeaderName, String)],
    allowed: AllowedAddresses,
    trust: impl FnOnce() -> Result<TlsRoots, TlsRootsError>,
) -> Result<Response<Incoming>, FetchError> {
    let host = || url.authority.clone();
    let wrong = || FetchError::InvalidUrl { url: format!("{}{}", url.authority, url.path) };
    let (name, port) = url.host_and_port().ok_or_else(wrong)?;
    let peer = if url.tls { Endpoint::with_tls(name, port, &trust()?) } else { Endpoint::plain(name, port) };
    let peer = peer.with_allowed(allowed);
    let mut request = Request::get(&url.path).header(header::HOST, &url.authority);
    request = request.header(header::USER_AGENT, concat!("windlass/", env!("CARGO_PKG_VERSION")));
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|_| wrong())?;
    let stream = peer.connect(CONNECT_TIMEOUT).await?;
    let exchange = |source| FetchError::Http { host: host(), source };
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(exchange)?;
    // Ends when the body is read or dropped.
    tokio::spawn(connection);
    let answered = timeout(RESPONSE_TIMEOUT, sender.send_request(request)).await;
    answered.map_err(|_| FetchError::Timeout { host: host() })?.map_err(exchange)
}

/// Percent-encodes a query value.
pub(crate) fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:/,".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_locations_are_resolved_against_the_request_url() {
        let from = Url::parse("https://r.test:5000/v2/a/blobs/x?q=1").unwrap();
        let table = [
            ("https://cdn.test/x?sig=1", "https cdn.test /x?sig=1"),
            ("http://cdn.test", "http cdn.test /"),
            ("//cdn.test/x", "https cdn.test /x"),
            ("/other", "https r.test:5000 /other"),
            ("y", "https r.test:5000 /v2/a/blobs/y"),
        ];
        for (location, expected) in table {
            let to = from.join(location).unwrap();
            let scheme = if to.tls { "https" } else { "http" };
            assert_eq!(format!("{scheme} {} {}", to.authority, to.path), expected);
        }
        for wrong in ["ftp://x/y", "https:///x", "https://me@x/y", "https://x:port/y"] {
            assert!(from.join(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn loopback_registries_are_recognised_by_their_address() {
        assert!(is_loopback("localhost") && is_loopback("localhost:5000") && is_loopback("127.0.0.1:5000"));
        assert!(!is_loopback("ghcr.io") && !is_loopback("10.0.0.1:5000"));
    }
}
