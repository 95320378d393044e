//! Packet rules of the bridge, in a separate table: addresses are translated for the outside, nothing reaches a
//! container that it did not request, and containers do not reach the metadata of the machine.
//!
//! The table is replaced as a whole. A chain whose name contains a hash of the rules shows that it is up to date.

use std::{io, net::Ipv4Addr, process::Stdio};

use rustix::net::netlink;

use super::{
    Bridge,
    netlink::{APPEND, CREATE, EXCLUSIVE, Message, NetlinkSocket, attribute, nested, text},
};
use crate::digest::sha256_hex;

const TABLE: &str = "windlass";
/// Table of a host that forwarded no packets before it had a bridge, and has no `iptables`.
const GUARD_TABLE: &str = "windlass-guard";
/// Addresses where clouds serve metadata of the machine, including its credentials.
pub(super) const METADATA_ADDRESSES: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(100, 100, 100, 200),
];
const DNS_PORT: u16 = 53;

const SUBSYSTEM: u16 = 10;
const FAMILY_IPV4: u8 = 2;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const NEW_RULE: u16 = 6;

const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
const INPUT_NAME: u32 = 6;
const OUTPUT_NAME: u32 = 7;
const PROTOCOL: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const SOURCE_OFFSET: u32 = 12;
const DESTINATION_OFFSET: u32 = 16;
const PORT_OFFSET: u32 = 2;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Bits of the state of a connection: established, related.
const KNOWN_CONNECTION: u32 = 2 | 4;

/// Chain and the hook that it is attached to.
struct Chain {
    name: &'static str,
    kind: &'static str,
    hook: u32,
    priority: i32,
    rules: Vec<Rule>,
}

type Expression = Vec<u8>;
type Rule = Vec<Expression>;

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

fn expression(name: &str, data: &[Vec<u8>]) -> Expression {
    nested(1, &[text(1, name), nested(2, data)])
}

fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    nested(kind, &[attribute(1, bytes)])
}

fn compare(operator: u32, bytes: &[u8]) -> Expression {
    expression("cmp", &[number(1, REGISTER), number(2, operator), value(3, bytes)])
}

fn load_meta(key: u32) -> Expression {
    expression("meta", &[number(1, REGISTER), number(2, key)])
}

fn load_packet(base: u32, offset: u32, length: u32) -> Expression {
    expression("payload", &[number(1, REGISTER), number(2, base), number(3, offset), number(4, length)])
}

fn interface(key: u32, operator: u32, name: &str) -> Vec<Expression> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(16, 0);
    vec![load_meta(key), compare(operator, &bytes)]
}

fn masked(mask: &[u8; 4]) -> Expression {
    let data = [number(1, REGISTER), number(2, REGISTER), number(3, 4), value(4, mask), value(5, &[0; 4])];
    expression("bitwise", &data)
}

/// Matches packets from inside or outside the network of the bridge.
fn source_network(bridge: &Bridge, operator: u32) -> Vec<Expression> {
    let mask = super::mask(bridge.prefix);
    let network = u32::from(bridge.gateway) & mask;
    vec![
        load_packet(NETWORK_HEADER, SOURCE_OFFSET, 4),
        masked(&mask.to_be_bytes()),
        compare(operator, &network.to_be_bytes()),
    ]
}

fn destination(address: Ipv4Addr) -> Vec<Expression> {
    vec![load_packet(NETWORK_HEADER, DESTINATION_OFFSET, 4), compare(EQUAL, &address.octets())]
}

fn known_connection() -> Vec<Expression> {
    let load = expression("ct", &[number(1, REGISTER), number(2, 0)]);
    // In the byte order of the host, unlike fields of packets.
    let mask = KNOWN_CONNECTION.to_ne_bytes();
    vec![load, masked(&mask), compare(NOT_EQUAL, &[0; 4])]
}

fn verdict(code: u32) -> Expression {
    let data = nested(2, &[nested(2, &[number(1, code)])]);
    expression("immediate", &[number(1, VERDICT_REGISTER), data])
}

fn masquerade() -> Expression {
    expression("masq", &[])
}

fn rule(parts: &[&[Expression]], end: Expression) -> Rule {
    parts.iter().flat_map(|part| part.iter().cloned()).chain([end]).collect()
}

fn chains(bridge: &Bridge) -> Vec<Chain> {
    let name = bridge.name.as_str();
    let from_bridge = interface(INPUT_NAME, EQUAL, name);
    let to_bridge = interface(OUTPUT_NAME, EQUAL, name);
    let mut first = vec![rule(&[&from_bridge, &source_network(bridge, NOT_EQUAL)], verdict(DROP))];
    for address in METADATA_ADDRESSES {
        // Some clouds provide name service there.
        for protocol in [UDP, TCP] {
            let dns = [
                load_meta(PROTOCOL),
                compare(EQUAL, &[protocol]),
                load_packet(TRANSPORT_HEADER, PORT_OFFSET, 2),
                compare(EQUAL, &DNS_PORT.to_be_bytes()),
            ];
            first.push(rule(&[&from_bridge, &destination(address), &dns], verdict(ACCEPT)));
        }
        first.push(rule(&[&from_bridge, &destination(address)], verdict(DROP)));
    }
    let forward =
        vec![rule(&[&to_bridge, &known_connection()], verdict(ACCEPT)), rule(&[&to_bridge], verdict(DROP))];
    let leaving = interface(OUTPUT_NAME, NOT_EQUAL, name);
    let translate = vec![rule(&[&source_network(bridge, EQUAL), &leaving], masquerade())];
    vec![
        // Before any rule of another table can change an address.
        Chain { name: "prerouting", kind: "filter", hook: 0, priority: -300, rules: first },
        Chain { name: "forward", kind: "filter", hook: 2, priority: 0, rules: forward },
        Chain { name: "postrouting", kind: "nat", hook: 4, priority: 100, rules: translate },
    ]
}

fn message(kind: u16, flags: u16, attributes: &[Vec<u8>]) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, flags, &[FAMILY_IPV4, 0, 0, 0], attributes)
}

fn batch_mark(kind: u16) -> Message {
    Message::new(kind, 0, &[&[0, 0][..], &SUBSYSTEM.to_be_bytes()].concat(), &[])
}

fn create_chain(table: &str, chain: &Chain) -> Vec<Message> {
    let hook = [number(1, chain.hook), attribute(2, &chain.priority.to_be_bytes())];
    let attributes = [text(1, table), text(3, chain.name), nested(4, &hook), text(7, chain.kind)];
    let mut messages = vec![message(NEW_CHAIN, CREATE | EXCLUSIVE, &attributes)];
    for rule in &chain.rules {
        let attributes = [text(1, table), text(2, chain.name), nested(4, rule)];
        messages.push(message(NEW_RULE, CREATE | APPEND, &attributes));
    }
    messages
}

/// Name of the chain that shows which rules the table has.
fn mark(chains: &[Chain]) -> String {
    let mut bytes = Vec::new();
    for chain in chains {
        bytes.extend(chain.name.bytes());
        bytes.extend(chain.rules.iter().flatten().flatten());
    }
    format!("rules-{}", &sha256_hex(&bytes)[..12])
}

/// Adds the rules unless they are there.
pub(super) fn ensure(bridge: &Bridge) -> io::Result<()> {
    ensure_table(TABLE, &chains(bridge))
}

fn ensure_table(table: &str, chains: &[Chain]) -> io::Result<()> {
    let mut socket = NetlinkSocket::open(Some(netlink::NETFILTER))?;
    let name = text(1, table);
    let mark = text(3, &mark(chains));
    match socket.request(message(GET_CHAIN, 0, &[name.clone(), mark.clone()])) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let mut batch = vec![
        batch_mark(BATCH_BEGIN),
        // It must exist to be deleted.
        message(NEW_TABLE, CREATE, std::slice::from_ref(&name)),
        message(DELETE_TABLE, 0, std::slice::from_ref(&name)),
        message(NEW_TABLE, CREATE, std::slice::from_ref(&name)),
    ];
    batch.extend(chains.iter().flat_map(|chain| create_chain(table, chain)));
    batch.push(message(NEW_CHAIN, CREATE | EXCLUSIVE, &[name, mark]));
    let last = batch.len() - 1;
    batch.push(batch_mark(BATCH_END));
    socket.send(&batch, last)
}

/// Prevents that this host forwards packets for others once it forwards those of the bridge.
pub(super) fn guard_forwarding(bridge: &Bridge) -> io::Result<()> {
    if run_iptables(&["-P", "FORWARD", "DROP"]).is_some() {
        // As engines do: other programs add rules for what they forward.
        return Ok(());
    }
    let name = bridge.name.as_str();
    let others = [interface(INPUT_NAME, NOT_EQUAL, name), interface(OUTPUT_NAME, NOT_EQUAL, name)];
    let rules = vec![rule(&[&others[0], &others[1]], verdict(DROP))];
    ensure_table(GUARD_TABLE, &[Chain { name: "forward", kind: "filter", hook: 2, priority: 0, rules }])
}

/// Lets the rules of `iptables` pass packets of the bridge: other tables cannot permit what that one drops. Best effort:
/// without the program, there are no such rules.
pub(super) fn permit_forwarding(bridge: &Bridge) {
    let Some(rules) = run_iptables(&["-S", "FORWARD"]) else { return };
    if !rules.lines().any(|line| line == "-P FORWARD DROP") {
        return;
    }
    let name = bridge.name.as_str();
    let outgoing = ["-i", name, "-j", "ACCEPT"];
    let incoming = ["-o", name, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"];
    for rule in [&outgoing[..], &incoming[..]] {
        let check: Vec<&str> = ["-C", "FORWARD"].into_iter().chain(rule.iter().copied()).collect();
        if run_iptables(&check).is_none() {
            let insert: Vec<&str> = ["-I", "FORWARD"].into_iter().chain(rule.iter().copied()).collect();
            if run_iptables(&insert).is_none() {
                tracing::warn!(rule = insert.join(" "), "failed to add firewall rule");
            }
        }
    }
}

/// Returns the output of `iptables` if it succeeded.
fn run_iptables(words: &[&str]) -> Option<String> {
    let mut command = std::process::Command::new("iptables");
    command.args(["-w", "3"]).args(words).env_clear();
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
