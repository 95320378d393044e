//! Blocking of the metadata address for tasks: clouds provide there the credentials of an instance.
//!
//! A program that reaches it has the rights of the instance in its cloud. BPF programs like those of [`super::ports`]
//! deny connecting or sending there, for everything in the group of a task. Name service at the same address (port 53)
//! stays allowed: some clouds provide it there.

use std::{io, net::Ipv6Addr, path::Path};

use super::port_rewrite::{self, Hook, instruction};

/// AWS, GCP, Azure and others; the credentials of AWS's containers; Alibaba.
const IPV4: [[u8; 4]; 4] =
    [[169, 254, 169, 254], [169, 254, 170, 2], [169, 254, 170, 23], [100, 100, 100, 200]];
/// AWS, its containers, GCP.
const IPV6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];
const DNS_PORT: u16 = 53;
const HOOKS: [Hook; 4] = [Hook::Connect4, Hook::Connect6, Hook::SendTo4, Hook::SendTo6];

const LOAD: u8 = 0x61;
/// Jumps over `offset` instructions unless the register holds the value; compared as 32 bits.
const JUMP_UNLESS: u8 = 0x56;
const SET: u8 = 0xb7;
const EXIT: u8 = 0x95;
const CONTEXT: u8 = 1;
const REFUSE: i32 = 0;
const ALLOW: i32 = 1;

/// The 32-bit words of an address, each with the offset of its field.
type AddressWords = Vec<(i16, i32)>;

fn address_words(bytes: &[u8], first: i16) -> AddressWords {
    let parts = bytes.chunks_exact(4).map(|part| i32::from_ne_bytes([part[0], part[1], part[2], part[3]]));
    (0..).step_by(4).map(|at: i16| first + at).zip(parts).collect()
}

fn blocked_addresses(hook: Hook) -> Vec<AddressWords> {
    match hook {
        Hook::Connect6 | Hook::SendTo6 => {
            let mapped = IPV4.map(|address| std::net::Ipv4Addr::from(address).to_ipv6_mapped());
            { IPV6.into_iter().chain(mapped) }
                .map(|address| address_words(&address.octets(), port_rewrite::IP6))
                .collect()
        }
        Hook::Connect4 | Hook::SendTo4 | Hook::Bind4 | Hook::Bind6 => {
            IPV4.iter().map(|address| address_words(address, port_rewrite::IP4)).collect()
        }
    }
}

fn program(hook: Hook) -> Vec<u8> {
    let mut bytes = Vec::new();
    let leave = |with: i32| [instruction(SET, 0, 0, 0, with), instruction(EXIT, 0, 0, 0, 0)].concat();
    bytes.extend(instruction(LOAD, 2, CONTEXT, port_rewrite::PORT, 0));
    bytes.extend(instruction(JUMP_UNLESS, 2, 0, 2, port_rewrite::port_word(DNS_PORT)));
    bytes.extend(leave(ALLOW));
    for address in blocked_addresses(hook) {
        let mut left = i16::try_from(address.len()).unwrap_or_default();
        for (offset, value) in address {
            left -= 1;
            bytes.extend(instruction(LOAD, 3, CONTEXT, offset, 0));
            // Jumps over the tests of the other words, two instructions each, and over the two that refuse.
            bytes.extend(instruction(JUMP_UNLESS, 3, 0, 2 * left + 2, value));
        }
        bytes.extend(leave(REFUSE));
    }
    bytes.extend(leave(ALLOW));
    bytes
}

/// Blocks the addresses for everything in the group, a directory of version 2, for as long as it exists.
pub fn block(group: &Path) -> io::Result<()> {
    HOOKS.into_iter().try_for_each(|hook| port_rewrite::attach(group, hook, &program(hook)))
}

/// Checks whether this kernel accepts such programs from this process.
pub fn check_supported() -> io::Result<()> {
    HOOKS.into_iter().try_for_each(|hook| port_rewrite::load(hook, &program(hook)).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bpf_jump_lands_inside_the_program() {
        for hook in HOOKS {
            let bytes = program(hook);
            let count = i64::try_from(bytes.len() / 8).unwrap();
            for (at, one) in (0_i64..).zip(bytes.chunks_exact(8)) {
                let jump = i64::from(i16::from_ne_bytes([one[2], one[3]]));
                if one[0] == JUMP_UNLESS {
                    assert!((0..count).contains(&(at + 1 + jump)), "{hook:?} {at}: {jump}");
                }
            }
            assert_eq!(bytes[bytes.len() - 8], EXIT, "the last one leaves");
        }
    }
}
