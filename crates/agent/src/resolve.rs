//! Names to addresses without the C library's name service, which a static binary cannot load.
//!
//! In order: addresses as they are written, `localhost`, `/etc/hosts`, then the servers of `/etc/resolv.conf`.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use hickory_resolver::{TokioResolver, net::NetError};
use tokio::{net::TcpStream, time::timeout};

const HOSTS: &str = "/etc/hosts";
/// More of the file is not read.
const HOSTS_BYTES_MAX: u64 = 4 << 20;
/// A lookup takes at most this long, retries and search domains included.
const LOOKUP_MAX: Duration = Duration::from_secs(10);
/// One address is given this long to answer before the next is tried.
const ATTEMPT_MAX: Duration = Duration::from_secs(10);
/// More addresses of one name are not tried.
const ADDRESSES_MAX: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the resolver's configuration")]
    Configuration(#[source] Box<NetError>),
    #[error("look up {name}")]
    Lookup {
        name: String,
        #[source]
        source: Box<NetError>,
    },
    #[error("look up {name}: no answer in {} s", LOOKUP_MAX.as_secs())]
    Slow { name: String },
    #[error("look up {name}: it has no address")]
    NoAddress { name: String },
    #[error("connect to {name} port {port}")]
    Connect {
        name: String,
        port: u16,
        #[source]
        source: io::Error,
    },
}

/// The addresses of a name: at least one, in the order in which to try them.
pub async fn lookup(name: &str) -> Result<Vec<IpAddr>, Error> {
    if let Some(known) = without_network(name, hosts().as_deref().unwrap_or_default()) {
        return Ok(known);
    }
    let resolver = TokioResolver::builder_tokio()
        .and_then(|builder| builder.build())
        .map_err(|source| Error::Configuration(Box::new(source)))?;
    let answer = timeout(LOOKUP_MAX, resolver.lookup_ip(name))
        .await
        .map_err(|_| Error::Slow { name: name.to_owned() })?
        .map_err(|source| Error::Lookup { name: name.to_owned(), source: Box::new(source) })?;
    let found: Vec<IpAddr> = answer.iter().take(ADDRESSES_MAX).collect();
    if found.is_empty() {
        return Err(Error::NoAddress { name: name.to_owned() });
    }
    Ok(found)
}

/// A connection to the first address of `name` that takes one.
pub async fn connect(name: &str, port: u16) -> Result<TcpStream, Error> {
    let failed = |source| Error::Connect { name: name.to_owned(), port, source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in lookup(name).await? {
        match timeout(ATTEMPT_MAX, TcpStream::connect(SocketAddr::new(address, port))).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failed(last))
}

fn hosts() -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(HOSTS).ok()?.take(HOSTS_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn without_network(name: &str, hosts: &str) -> Option<Vec<IpAddr>> {
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    if let Ok(address) = bare.parse() {
        return Some(vec![address]);
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let listed: Vec<IpAddr> = hosts
        .lines()
        .filter_map(|line| {
            let mut words = line.split('#').next()?.split_whitespace();
            let address = words.next()?.parse().ok()?;
            words.any(|word| word.eq_ignore_ascii_case(&name)).then_some(address)
        })
        .take(ADDRESSES_MAX)
        .collect();
    if name == "localhost" || name.ends_with(".localhost") {
        // Never asked of the network, and IPv4 first: that is what most servers listen on.
        return Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    (!listed.is_empty()).then_some(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS_TEXT: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost # a remark\n\
        10.0.0.7\tnode-0.cluster Node-0\n10.0.0.8 other node-0\nrubbish node-1\n# 10.0.0.9 node-2\n";

    #[track_caller]
    fn check(name: &str, addresses: &[&str]) {
        let found = without_network(name, HOSTS_TEXT).unwrap_or_default();
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, addresses, "{name}");
    }

    #[test]
    fn addresses_are_taken_as_written() {
        check("192.0.2.1", &["192.0.2.1"]);
        check("2001:db8::1", &["2001:db8::1"]);
        check("[2001:db8::1]", &["2001:db8::1"]);
    }

    #[test]
    fn localhost_is_here_whatever_the_network_says() {
        check("localhost", &["127.0.0.1", "::1"]);
        check("LOCALHOST.", &["127.0.0.1", "::1"]);
        check("app.localhost", &["127.0.0.1", "::1"]);
    }

    #[test]
    fn the_hosts_file_knows_names_by_any_spelling() {
        check("node-0", &["10.0.0.7", "10.0.0.8"]);
        check("NODE-0.cluster", &["10.0.0.7"]);
        check("ip6-localhost", &["::1"]);
        check("node-1", &[]);
        check("node-2", &[]);
    }

    #[tokio::test]
    async fn a_connection_goes_to_the_address_that_listens() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(connect("localhost", port).await.is_ok());
        drop(listener);
        let refused = connect("localhost", port).await.unwrap_err();
        assert_eq!(refused.to_string(), format!("connect to localhost port {port}"));
    }
}
