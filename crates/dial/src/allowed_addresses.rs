//! Filter for addresses that users supply.
//!
//! A user who names a host makes this machine connect to it. Addresses of this machine, and those that only it can
//! reach, are refused unless they are explicitly allowed.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    str::FromStr,
};

use crate::{LookupError, lookup};

/// Metadata services of clouds, which return credentials of the machine; in addition to the link-local address that
/// most clouds use.
const METADATA_ADDRESSES: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
];

/// Address range such as `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid network `{0}`: expected an address, or a network like `10.0.0.0/8`")]
pub struct NetworkError(String);

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let wrong = || NetworkError(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(longest);
        if prefix <= longest { Ok(Self { address, prefix }) } else { Err(wrong()) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Network {
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => u128::from(ours.to_bits() ^ theirs.to_bits()) << 96,
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => ours.to_bits() ^ theirs.to_bits(),
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
        };
        differ.leading_zeros() >= self.prefix
    }
}

/// Addresses that may be dialled.
#[derive(Clone, Debug, Default)]
pub enum AllowedAddresses {
    /// All addresses.
    #[default]
    Any,
    /// All except addresses of this machine and loopback, link-local, multicast and metadata addresses; those in the
    /// networks are allowed.
    External { but: Vec<Network> },
    /// All except those that [`External`](Self::External) refuses and those of private networks; those in the networks
    /// are allowed.
    Public { but: Vec<Network> },
}

/// Failure to obtain an allowed address for a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The name has addresses, but none is allowed. The error does not disclose them.
    #[error("the address of {name} is not allowed")]
    NotAllowed { name: String },
}

impl AllowedAddresses {
    /// Returns whether a literal address is allowed, as far as can be determined without the addresses of this machine.
    /// A name is always allowed here: its addresses are checked when it is dialled.
    pub fn admits_literal(&self, host: &str) -> bool {
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let Ok(address) = bare.parse() else { return true };
        self.is_listed(address) || !self.is_refused_everywhere(address)
    }

    pub fn admits(&self, address: IpAddr) -> bool {
        self.is_listed(address) || !(self.is_refused_everywhere(address) || is_local_address(address))
    }

    /// Returns whether the address is refused on every machine, unless it is listed.
    fn is_refused_everywhere(&self, address: IpAddr) -> bool {
        match self {
            Self::Any => false,
            Self::External { .. } => is_special(address),
            Self::Public { .. } => is_special(address) || is_private(address),
        }
    }

    fn is_listed(&self, address: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::External { but } | Self::Public { but } => {
                but.iter().any(|network| network.contains(address))
            }
        }
    }

    /// Resolves a name to its allowed addresses. A caller that dials one of them dials exactly what was checked, even
    /// if the name resolves differently a moment later.
    pub async fn lookup(&self, name: &str) -> Result<Vec<IpAddr>, AddressError> {
        let mut found = lookup(name).await?;
        found.retain(|address| self.admits(*address));
        if found.is_empty() { Err(AddressError::NotAllowed { name: name.to_owned() }) } else { Ok(found) }
    }
}

/// Converts an IPv6 address that embeds an IPv4 address (mapped, NAT64) to that IPv4 address.
fn canonical_address(address: IpAddr) -> IpAddr {
    let IpAddr::V6(six) = address.to_canonical() else { return address.to_canonical() };
    match six.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            IpAddr::V4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        _ => IpAddr::V6(six),
    }
}

fn is_special(address: IpAddr) -> bool {
    let address = canonical_address(address);
    METADATA_ADDRESSES.contains(&address)
        || match address {
            IpAddr::V4(four) => {
                four.is_loopback()
                    || four.is_link_local()
                    || four.is_multicast()
                    || four.is_broadcast()
                    || four.octets()[0] == 0
            }
            IpAddr::V6(six) => {
                six.is_loopback() || six.is_unspecified() || six.is_multicast() || six.is_unicast_link_local()
            }
        }
}

/// Returns whether the address belongs to a network that the internet does not route to: private networks, networks of
/// carriers, and reserved ranges.
fn is_private(address: IpAddr) -> bool {
    match canonical_address(address) {
        IpAddr::V4(four) => is_private_v4(four),
        IpAddr::V6(six) => match six.segments() {
            // Unique local and site-local addresses, and the prefix of local NAT64.
            [first, ..] if first & 0xfe00 == 0xfc00 || first & 0xffc0 == 0xfec0 => true,
            [0x64, 0xff9b, 1, ..] => true,
            // 6to4 and the obsolete compatible form embed an IPv4 address.
            [0x2002, high, low, ..] | [0, 0, 0, 0, 0, 0, high, low] => {
                let four = Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
                is_private_v4(four) || is_special(four.into())
            }
            _ => false,
        },
    }
}

fn is_private_v4(address: Ipv4Addr) -> bool {
    match address.octets() {
        [100, second, ..] => second & 0xc0 == 64,
        [192, 0, 0, _] => true,
        [198, second, ..] => second & 0xfe == 18,
        [first, ..] if first >= 240 => true,
        _ => address.is_private(),
    }
}

/// Returns whether the address belongs to this machine: the route to it then has the address itself as its source.
/// Sends nothing.
fn is_local_address(address: IpAddr) -> bool {
    let address = canonical_address(address);
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let from = UdpSocket::bind(SocketAddr::new(any, 0)).and_then(|socket| {
        socket.connect(SocketAddr::new(address, 9))?;
        socket.local_addr()
    });
    from.is_ok_and(|from| from.ip() == address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn external(but: &[&str]) -> AllowedAddresses {
        AllowedAddresses::External { but: but.iter().map(|text| text.parse().unwrap()).collect() }
    }

    #[test]
    fn special_addresses_are_not_dialled_in_any_notation() {
        let policy = external(&[]);
        for text in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "100.100.100.200",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
        ] {
            assert!(!policy.admits(text.parse().unwrap()), "{text}");
            assert!(!policy.admits_literal(text) && !policy.admits_literal(&format!("[{text}]")), "{text}");
            assert!(AllowedAddresses::Any.admits(text.parse().unwrap()), "{text}");
        }
        for text in ["192.0.2.1", "10.1.2.3", "2001:db8::1", "fd12::1"] {
            assert!(policy.admits(text.parse().unwrap()), "{text}");
        }
        assert!(policy.admits_literal("localhost"), "a name is looked at when it is dialled");
    }

    #[test]
    fn addresses_of_private_networks_are_public_in_no_notation() {
        let policy = |but: &[&str]| AllowedAddresses::Public {
            but: but.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let private = [
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.7.7",
            "100.64.0.1",
            "100.127.255.255",
            "192.0.0.8",
            "198.18.0.1",
            "198.19.9.9",
            "240.0.0.1",
            "169.254.3.4",
            "127.0.0.1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "::ffff:10.1.2.3",
            "64:ff9b::a01:203",
            "64:ff9b:1::1",
            "2002:a01:203::1",
            "2002:7f00:1::1",
            "::10.1.2.3",
        ];
        for text in private {
            let address: IpAddr = text.parse().unwrap();
            assert!(!policy(&[]).admits(address) && !policy(&[]).admits_literal(text), "{text}");
            assert!(policy(&[&address.to_canonical().to_string()]).admits(address), "{text} is listed");
        }
        for text in ["192.0.2.1", "172.32.0.1", "100.128.0.1", "198.20.0.1", "2001:db8::1", "2002:808:808::1"]
        {
            assert!(policy(&[]).admits(text.parse().unwrap()), "{text}");
        }
        let two = policy(&["10.1.0.0/16"]);
        assert!(two.admits("10.1.9.9".parse().unwrap()) && !two.admits("10.2.0.1".parse().unwrap()));
    }

    #[test]
    fn explicitly_allowed_networks_are_dialled() {
        let policy = external(&["127.0.0.0/8", "::1", "169.254.1.0/24"]);
        for text in ["127.0.0.1", "127.255.0.1", "::1", "169.254.1.7", "::ffff:127.0.0.1"] {
            assert!(policy.admits(text.parse().unwrap()), "{text}");
        }
        for text in ["169.254.169.254", "::", "fe80::1"] {
            assert!(!policy.admits(text.parse().unwrap()), "{text}");
        }
        for text in ["10.0.0.0/33", "::/129", "x", "10.0.0.0/", "/8", ""] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_name_that_resolves_to_this_machine_is_not_dialled() {
        let refused = external(&[]).lookup("localhost").await;
        assert_eq!(refused, Err(AddressError::NotAllowed { name: "localhost".into() }));
        let found = external(&["127.0.0.0/8"]).lookup("localhost").await.unwrap();
        assert_eq!(found, [IpAddr::V4(Ipv4Addr::LOCALHOST)], "only what is allowed");
    }

    #[test]
    fn addresses_of_this_machine_are_recognised_and_not_dialled() {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        // A machine without a default route has no address to test.
        if socket.connect("192.0.2.1:9").is_ok() {
            let own = socket.local_addr().unwrap().ip();
            assert!(is_local_address(own) && !external(&[]).admits(own), "{own}");
        }
        assert!(!is_local_address("192.0.2.1".parse().unwrap()));
    }
}
