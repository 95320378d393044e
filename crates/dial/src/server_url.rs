//! Server URLs.

use crate::{ClientIdentity, Endpoint, TlsRoots, TlsRootsError};

#[derive(Debug, thiserror::Error)]
pub enum ServerUrlError {
    #[error("invalid server URL `{url}`: expected http://HOST:PORT or https://HOST:PORT")]
    Address { url: String },
    #[error(transparent)]
    TlsRoots(#[from] TlsRootsError),
}

/// Parsed `http://HOST:PORT/BASE`, or the same with `https`.
#[derive(Clone, Debug)]
pub struct ServerUrl {
    pub endpoint: Endpoint,
    /// Host and port as they appear in the URL.
    pub authority: String,
    /// Path prefix of every request, without a trailing slash.
    pub base: String,
}

impl ServerUrl {
    /// `certificate` identifies an `https` server that the machine does not trust by itself.
    pub fn parse(url: &str, certificate: Option<&str>) -> Result<Self, ServerUrlError> {
        Self::parse_with(url, certificate, None)
    }

    /// Does the same for a server that identifies its clients by their certificate.
    pub fn parse_as(
        url: &str,
        certificate: Option<&str>,
        identity: &ClientIdentity,
    ) -> Result<Self, ServerUrlError> {
        Self::parse_with(url, certificate, Some(identity))
    }

    fn parse_with(
        url: &str,
        certificate: Option<&str>,
        identity: Option<&ClientIdentity>,
    ) -> Result<Self, ServerUrlError> {
        let wrong = || ServerUrlError::Address { url: url.to_owned() };
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let (authority, base) = rest.split_once('/').unwrap_or((rest, ""));
        let usual = match scheme {
            "http" => 80,
            "https" => 443,
            _ => return Err(wrong()),
        };
        let (host, port) = host_and_port(authority, usual).ok_or_else(wrong)?;
        let peer = match scheme {
            "https" => {
                let roots = TlsRoots::load(certificate)?;
                let roots = match identity {
                    Some(identity) => roots.with_identity(identity)?,
                    None => roots,
                };
                Endpoint::with_tls(host, port, &roots)
            }
            _ => Endpoint::plain(host, port),
        };
        let base = base.trim_end_matches('/');
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        Ok(Self { endpoint: peer, authority: authority.to_owned(), base })
    }

    /// Returns the URL without its path.
    pub fn origin(&self) -> String {
        let scheme = if self.endpoint.has_tls() { "https" } else { "http" };
        format!("{scheme}://{}", self.authority)
    }
}

fn host_and_port(authority: &str, usual: u16) -> Option<(&str, u16)> {
    let end = authority.rfind(']').unwrap_or(0);
    let colon = authority[end..].rfind(':').map(|at| at + end);
    let (host, port) = match colon {
        Some(at) => (&authority[..at], authority[at + 1..].parse().ok()?),
        None => (authority, usual),
    };
    let is_odd = |letter: char| letter.is_whitespace() || letter.is_control() || "@?#%\\".contains(letter);
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    (!host.is_empty() && !host.contains(is_odd) && (is_bracketed || !host.contains(':')))
        .then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_urls_are_parsed_into_endpoint_authority_and_base_path() {
        let table = [
            ("http://host", "host:80", "host", ""),
            ("http://host:3000/", "host:3000", "host:3000", ""),
            ("http://[::1]:3000/base/", "[::1]:3000", "[::1]:3000", "/base"),
            ("http://[::1]", "[::1]:80", "[::1]", ""),
            ("http://10.0.0.7:1/a/b", "10.0.0.7:1", "10.0.0.7:1", "/a/b"),
        ];
        for (url, name, authority, base) in table {
            let place = ServerUrl::parse(url, None).unwrap();
            let got = (place.endpoint.name(), place.authority, place.base);
            assert_eq!(got, (name.to_owned(), authority.to_owned(), base.to_owned()), "{url}");
        }
    }

    #[test]
    fn malformed_server_urls_are_rejected() {
        let wrong = [
            "host:3000",
            "ftp://host",
            "http://",
            "http://:80",
            "http://host:port",
            "http://a b",
            "http://me@host",
            "http://::1:3000",
            "http://host:70000",
        ];
        for url in wrong {
            assert!(matches!(ServerUrl::parse(url, None), Err(ServerUrlError::Address { .. })), "{url}");
        }
    }
}
