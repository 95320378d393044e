//! Name resolution without the C library's name service, which a static binary cannot load.
//!
//! In order: literal addresses, `localhost`, `/etc/hosts`, then the servers of `/etc/resolv.conf`.

use std::{
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use hickory_resolver::TokioResolver;
use tokio::time::timeout;

const HOSTS_FILE: &str = "/etc/hosts";
/// Maximum number of bytes that are read from the file.
const HOSTS_BYTES_MAX: u64 = 4 << 20;
/// Maximum duration of a lookup, retries and search domains included.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of addresses of a name to try.
const ADDRESSES_MAX: usize = 8;

/// Failure to resolve a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to resolve {name}: {why}")]
pub struct LookupError {
    pub name: String,
    pub why: String,
}

/// Resolves a name to at least one address, in the order in which to try them.
pub async fn lookup(name: &str) -> Result<Vec<IpAddr>, LookupError> {
    if let Some(known) = resolve_locally(name, &read_hosts_file().unwrap_or_default()) {
        return Ok(known);
    }
    let none = |why: String| LookupError { name: name.to_owned(), why };
    let resolver = TokioResolver::builder_tokio().and_then(|builder| builder.build());
    let resolver = resolver.map_err(|error| none(error.to_string()))?;
    let answer = timeout(LOOKUP_TIMEOUT, resolver.lookup_ip(name)).await;
    let answer = answer.map_err(|_| none(format!("no response within {} s", LOOKUP_TIMEOUT.as_secs())))?;
    let answer = answer.map_err(|error| none(describe_failure(&error.to_string())))?;
    let found: Vec<IpAddr> = answer.iter().take(ADDRESSES_MAX).collect();
    if found.is_empty() { Err(none("it has no address".to_owned())) } else { Ok(found) }
}

/// The resolver's message about a name without addresses contains its query.
fn describe_failure(message: &str) -> String {
    if message.contains("no records found") { "host name not found".to_owned() } else { message.to_owned() }
}

fn read_hosts_file() -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(HOSTS_FILE).ok()?.take(HOSTS_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn resolve_locally(name: &str, hosts: &str) -> Option<Vec<IpAddr>> {
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    if let Ok(address) = bare.parse() {
        return Some(vec![address]);
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if name == "localhost" || name.ends_with(".localhost") {
        // Never resolved over the network. IPv4 first, because most servers listen on it.
        return Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let listed = hosts.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|word| word.eq_ignore_ascii_case(&name)).then_some(address)
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
    fn a_name_without_addresses_is_reported_as_not_found() {
        let raw =
            "DNS error: no records found for Query { name: Name(\"nowhere.invalid.\"), query_type: AAAA }";
        assert_eq!(describe_failure(raw), "host name not found");
        assert_eq!(describe_failure("request timed out"), "request timed out");
    }

    #[test]
    fn ip_addresses_localhost_and_hosts_file_entries_resolve_without_dns() {
        let table: [(&str, &[&str]); 10] = [
            ("192.0.2.1", &["192.0.2.1"]),
            ("2001:db8::1", &["2001:db8::1"]),
            ("[2001:db8::1]", &["2001:db8::1"]),
            ("LOCALHOST.", &["127.0.0.1", "::1"]),
            ("app.localhost", &["127.0.0.1", "::1"]),
            ("gpu-1", &["10.0.0.7", "10.0.0.8"]),
            ("GPU-1.lab", &["10.0.0.7"]),
            ("gpu-2", &[]),
            ("gpu-3", &[]),
            ("gpu-4", &[]),
        ];
        for (name, addresses) in table {
            let found = resolve_locally(name, HOSTS_TEXT).unwrap_or_default();
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, addresses, "{name}");
        }
    }
}
