//! Names to addresses, without the C library's name service: a static binary cannot load that.
//!
//! In order: addresses as they are written, `localhost`, `/etc/hosts`, then the servers of `/etc/resolv.conf`.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use hickory_resolver::TokioResolver;
use tokio::{net::TcpStream, time::timeout};

const HOSTS: &str = "/etc/hosts";
/// More of the file is not read.
const HOSTS_BYTES_MAX: u64 = 4 << 20;
/// A lookup takes at most this long, retries and search domains included.
const LOOKUP_WITHIN: Duration = Duration::from_secs(5);
/// More addresses of one name are not tried.
const ADDRESSES_MAX: usize = 4;

/// A connection to the first address that takes one, all tried within `limit`.
pub(crate) async fn connect(name: &str, port: u16, limit: Duration) -> Result<TcpStream, ConnectError> {
    let found = lookup(name).await.map_err(ConnectError::Lookup)?;
    // A silent first address must leave time for the next.
    let each = limit / u32::try_from(found.len()).unwrap_or(1).max(1);
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in found {
        match timeout(each, TcpStream::connect(SocketAddr::new(address, port))).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(ConnectError::Io(last))
}

#[derive(Debug)]
pub(crate) enum ConnectError {
    /// Why the name has no address.
    Lookup(String),
    Io(io::Error),
}

/// The addresses of a name, at least one; or why it has none.
pub async fn lookup(name: &str) -> Result<Vec<IpAddr>, String> {
    if let Some(known) = without_network(name, &hosts().unwrap_or_default()) {
        return Ok(known);
    }
    let resolver = TokioResolver::builder_tokio().and_then(|builder| builder.build());
    let resolver = resolver.map_err(|error| error.to_string())?;
    let answer = timeout(LOOKUP_WITHIN, resolver.lookup_ip(name)).await;
    let answer = answer.map_err(|_| format!("no answer within {} s", LOOKUP_WITHIN.as_secs()))?;
    let found: Vec<IpAddr> = answer.map_err(|error| error.to_string())?.iter().take(ADDRESSES_MAX).collect();
    if found.is_empty() { Err("it has no address".to_owned()) } else { Ok(found) }
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
    let name = name.strip_suffix('.').unwrap_or(name);
    if name.eq_ignore_ascii_case("localhost") {
        // Never asked of the network, and IPv4 first: that is what most servers listen on.
        return Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let listed = hosts.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|word| word.eq_ignore_ascii_case(name)).then_some(address)
    });
    let listed: Vec<IpAddr> = listed.take(ADDRESSES_MAX).collect();
    (!listed.is_empty()).then_some(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS_TEXT: &str = "127.0.0.1 localhost\n10.0.0.7\tgpu-1.lab Gpu-1 # a remark: gpu-2\n\
        10.0.0.8 other gpu-1\nrubbish gpu-3\n# 10.0.0.9 gpu-4\n";

    #[test]
    fn addresses_localhost_and_the_hosts_file_need_no_network() {
        let table: [(&str, &[&str]); 9] = [
            ("192.0.2.1", &["192.0.2.1"]),
            ("2001:db8::1", &["2001:db8::1"]),
            ("[2001:db8::1]", &["2001:db8::1"]),
            ("LOCALHOST.", &["127.0.0.1", "::1"]),
            ("gpu-1", &["10.0.0.7", "10.0.0.8"]),
            ("GPU-1.lab", &["10.0.0.7"]),
            ("gpu-2", &[]),
            ("gpu-3", &[]),
            ("gpu-4", &[]),
        ];
        for (name, addresses) in table {
            let found = without_network(name, HOSTS_TEXT).unwrap_or_default();
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, addresses, "{name}");
        }
    }
}
