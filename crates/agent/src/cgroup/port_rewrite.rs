//! Separate ports for a task on a shared network: a port that it binds is rewritten to another port of the host.
//!
//! A program that listens on port 8000 listens on another port of the host, and connections of the program, its runner
//! or anything else in its group to port 8000 of the loopback lead there. So several tasks that all use port 8000 can
//! run on one host as plain processes. The kernel does the rewriting: four small programs are attached to the task's
//! control group (version 2), and disappear with it. Attaching them requires root.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
};

use nix::libc;

/// Map from the port that a program uses to the port of the host.
pub type PortMap = BTreeMap<u16, u16>;

const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;
/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR`.
const SOCK_ADDR: u32 = 18;
/// `BPF_F_ALLOW_MULTI`: the group may have other programs too.
const ALLOW_MULTI: u32 = 2;
/// A program that calls no kernel functions may have any licence.
const LICENCE: &[u8] = b"Apache-2.0\0";
const NAME: &[u8; 16] = b"windlass_ports\0\0";

/// Attach point in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    Bind4 = 8,
    Bind6 = 9,
    Connect4 = 10,
    Connect6 = 11,
    SendTo4 = 14,
    SendTo6 = 15,
}

const HOOKS: [Hook; 4] = [Hook::Bind4, Hook::Bind6, Hook::Connect4, Hook::Connect6];

/// Offsets of `struct bpf_sock_addr`.
pub(super) const IP4: i16 = 4;
pub(super) const IP6: i16 = 8;
pub(super) const PORT: i16 = 24;

/// Encodes one BPF instruction, eight bytes.
pub(super) fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[0] = code;
    bytes[1] = to | from << 4;
    bytes[2..4].copy_from_slice(&offset.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    bytes
}

/// Step of the program; jumps are resolved when all steps are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BpfStep {
    /// Register ← field of the address.
    Load {
        to: u8,
        offset: i16,
    },
    /// Register ← register & value.
    And {
        to: u8,
        value: i32,
    },
    /// Lets the call through unless the register holds the value.
    ReturnUnless {
        register: u8,
        value: i32,
    },
    /// Goes to the next pair unless the register holds the value.
    NextPairUnless {
        register: u8,
        value: i32,
    },
    Set {
        to: u8,
        value: i32,
    },
    /// Field of the address ← register.
    Store {
        from: u8,
        offset: i16,
    },
    Return,
}

/// Number of steps per pair of ports: `NextPairUnless` skips the rest of them.
const STEPS_PER_PAIR: i16 = 4;
/// Register that holds the address on entry.
const CONTEXT: u8 = 1;

/// Returns a port in the form of the address field: network order in the lower half of a 32-bit word.
pub(super) fn port_word(port: u16) -> i32 {
    i32::from(u16::from_ne_bytes(port.to_be_bytes()))
}

fn rewrite_steps(hook: Hook, ports: &PortMap) -> Vec<BpfStep> {
    let mut steps = Vec::new();
    match hook {
        Hook::Bind4 | Hook::Bind6 | Hook::SendTo4 | Hook::SendTo6 => {}
        // 127.0.0.0/8: the first byte is the lowest.
        Hook::Connect4 => steps.extend([
            BpfStep::Load { to: 3, offset: IP4 },
            BpfStep::And { to: 3, value: 0xff },
            BpfStep::ReturnUnless { register: 3, value: 127 },
        ]),
        // ::1
        Hook::Connect6 => {
            for (part, value) in [(0, 0), (4, 0), (8, 0), (12, i32::from_ne_bytes([0, 0, 0, 1]))] {
                steps.push(BpfStep::Load { to: 3, offset: IP6 + part });
                steps.push(BpfStep::ReturnUnless { register: 3, value });
            }
        }
    }
    steps.push(BpfStep::Load { to: 2, offset: PORT });
    for (&from, &to) in ports {
        steps.extend([
            BpfStep::NextPairUnless { register: 2, value: port_word(from) },
            BpfStep::Set { to: 2, value: port_word(to) },
            BpfStep::Store { from: 2, offset: PORT },
            BpfStep::Return,
        ]);
    }
    steps
}

fn program(hook: Hook, ports: &PortMap) -> Vec<u8> {
    let steps = rewrite_steps(hook, ports);
    let count = i16::try_from(steps.len()).unwrap_or(i16::MAX);
    let mut bytes = Vec::new();
    for (at, step) in (0..).zip(&steps) {
        let to_end: i16 = count - at - 1;
        bytes.extend(match *step {
            BpfStep::Load { to, offset } => instruction(0x61, to, CONTEXT, offset, 0),
            BpfStep::And { to, value } => instruction(0x57, to, 0, 0, value),
            BpfStep::ReturnUnless { register, value } => instruction(0x55, register, 0, to_end, value),
            BpfStep::NextPairUnless { register, value } => {
                instruction(0x55, register, 0, STEPS_PER_PAIR - 1, value)
            }
            BpfStep::Set { to, value } => instruction(0xb7, to, 0, 0, value),
            BpfStep::Store { from, offset } => instruction(0x63, CONTEXT, from, offset, 0),
            BpfStep::Return => instruction(0x05, 0, 0, to_end, 0),
        });
    }
    // The call continues: return 1.
    bytes.extend(instruction(0xb7, 0, 0, 0, 1));
    bytes.extend(instruction(0x95, 0, 0, 0, 0));
    bytes
}

/// `union bpf_attr` of `BPF_PROG_LOAD`, up to the last field used.
#[repr(C)]
#[derive(Default)]
struct ProgLoadAttr {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    hook: u32,
}

/// `union bpf_attr` of `BPF_PROG_ATTACH`, up to the last field used.
#[repr(C)]
struct ProgAttachAttr {
    group: u32,
    program: u32,
    hook: u32,
    flags: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    #[expect(unsafe_code, reason = "no crate we use has this call")]
    // SAFETY: the kernel reads as many bytes as the size states, and the buffers that they point to outlive the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

pub(super) fn load(hook: Hook, instructions: &[u8]) -> io::Result<OwnedFd> {
    let attributes = ProgLoadAttr {
        kind: SOCK_ADDR,
        count: u32::try_from(instructions.len() / 8).unwrap_or(u32::MAX),
        instructions: instructions.as_ptr() as u64,
        licence: LICENCE.as_ptr() as u64,
        name: *NAME,
        hook: hook as u32,
        ..ProgLoadAttr::default()
    };
    let number = bpf(PROG_LOAD, &attributes)?;
    let number = i32::try_from(number).map_err(io::Error::other)?;
    #[expect(unsafe_code, reason = "a new descriptor has no owner yet")]
    // SAFETY: the kernel has just opened this descriptor, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes the kernel rewrite the ports of everything in the group, a directory of version 2, for as long as it exists.
pub fn rewrite_ports(group: &Path, ports: &PortMap) -> io::Result<()> {
    if ports.iter().all(|(from, to)| from == to) {
        return Ok(());
    }
    HOOKS.into_iter().try_for_each(|hook| attach(group, hook, &program(hook, ports)))
}

/// Attaches a program to everything in the group.
pub(super) fn attach(group: &Path, hook: Hook, instructions: &[u8]) -> io::Result<()> {
    let group = File::open(group)?;
    let program = load(hook, instructions)?;
    let number = |descriptor: i32| u32::try_from(descriptor).map_err(io::Error::other);
    let attributes = ProgAttachAttr {
        group: number(group.as_raw_fd())?,
        program: number(program.as_raw_fd())?,
        hook: hook as u32,
        flags: ALLOW_MULTI,
    };
    bpf(PROG_ATTACH, &attributes).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bpf_jump_lands_inside_the_program() {
        let ports = PortMap::from([(8000, 40001), (9000, 40002), (65535, 1)]);
        for hook in HOOKS {
            let bytes = program(hook, &ports);
            let count = i64::try_from(bytes.len() / 8).unwrap();
            for (at, one) in (0_i64..).zip(bytes.chunks_exact(8)) {
                let jump = i64::from(i16::from_ne_bytes([one[2], one[3]]));
                if matches!(one[0], 0x05 | 0x55) {
                    assert!((0..count).contains(&(at + 1 + jump)), "{hook:?} {at}: {jump}");
                }
            }
            assert_eq!(bytes[bytes.len() - 8], 0x95, "the last one leaves");
        }
    }

    #[test]
    fn ports_are_compared_in_network_byte_order() {
        assert_eq!(port_word(8000).to_ne_bytes()[..2], [0x1f, 0x40]);
    }
}
