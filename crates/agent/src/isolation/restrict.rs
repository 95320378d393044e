//! Privileges that a process of the job drops permanently before its program runs.
//!
//! The filter denies what container engines deny by default: system calls that change the host, and calls that few
//! programs need and many attacks use. A denied call fails with EPERM, so that programs can work without it.

use std::{io, sync::OnceLock};

use nix::libc::{self, sock_filter};

/// Set if every process that this process starts for the job is restricted.
static FILTER: OnceLock<Vec<sock_filter>> = OnceLock::new();

/// Highest possible capability. Capabilities are numbered from 0; the kernel rejects the first number that it does not
/// know.
const CAPABILITIES_MAX: libc::c_ulong = 63;
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET)
    .cast_unsigned();
/// `CLONE_NEWTIME`: only `unshare` supports it; `clone` treats the bit as a part of the exit signal.
const NEW_TIME: u32 = 0x80;
/// Inserts characters into a terminal as if they were typed.
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
/// Sockets between a virtual machine and its host.
const AF_VSOCK: u32 = 40;

// Since kernel 5.1 new system calls have the same number on every architecture.
const IO_URING_SETUP: libc::c_long = 425;
const IO_URING_ENTER: libc::c_long = 426;
const IO_URING_REGISTER: libc::c_long = 427;
const OPEN_TREE: libc::c_long = 428;
const MOVE_MOUNT: libc::c_long = 429;
const FSOPEN: libc::c_long = 430;
const FSCONFIG: libc::c_long = 431;
const FSMOUNT: libc::c_long = 432;
const FSPICK: libc::c_long = 433;
const CLONE3: libc::c_long = 435;
const PIDFD_GETFD: libc::c_long = 438;
const MOUNT_SETATTR: libc::c_long = 442;
const QUOTACTL_FD: libc::c_long = 443;

const DENIED_CALLS: [libc::c_long; 48] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
    libc::SYS_chroot,
    OPEN_TREE,
    MOVE_MOUNT,
    FSOPEN,
    FSCONFIG,
    FSMOUNT,
    FSPICK,
    MOUNT_SETATTR,
    QUOTACTL_FD,
    PIDFD_GETFD,
    IO_URING_SETUP,
    IO_URING_ENTER,
    IO_URING_REGISTER,
    arch::KEXEC_FILE_LOAD,
    arch::OWN[0],
    arch::OWN[1],
];

#[cfg(target_arch = "x86_64")]
mod arch {
    use nix::libc;

    pub(super) const AUDIT: u32 = 0xc000_003e;
    pub(super) const KEXEC_FILE_LOAD: libc::c_long = 320;
    /// Calls that grant access to I/O ports.
    pub(super) const OWN: [libc::c_long; 2] = [libc::SYS_iopl, libc::SYS_ioperm];
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use nix::libc;

    pub(super) const AUDIT: u32 = 0xc000_00b7;
    pub(super) const KEXEC_FILE_LOAD: libc::c_long = 294;
    /// There are none on this architecture; these two are in the list already.
    pub(super) const OWN: [libc::c_long; 2] = [libc::SYS_mount, libc::SYS_umount2];
}

/// First call number of the second system call table of x86-64 (x32).
#[cfg(target_arch = "x86_64")]
const SECOND_TABLE: u32 = 0x4000_0000;

// Offsets in `struct seccomp_data`; for the arguments, the lower half on little-endian machines.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;
const SECOND_ARGUMENT: u32 = 24;

const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
#[cfg(target_arch = "x86_64")]
const IF_AT_LEAST: u16 = 0x35;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const FAIL: u32 = 0x0005_0000;

const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn fail_with(errno: i32) -> sock_filter {
    instruction(RETURN, 0, 0, FAIL | errno.cast_unsigned())
}

fn call_number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

/// Checks an argument of this call, and fails the call if the test is true.
fn deny_by_argument(call: libc::c_long, argument: u32, test: u16, value: u32) -> [sock_filter; 4] {
    [
        instruction(IF_EQUAL, 0, 3, call_number(call)),
        instruction(LOAD, 0, 0, argument),
        instruction(test, 0, 1, value),
        fail_with(libc::EPERM),
    ]
}

fn build_filter() -> Vec<sock_filter> {
    let mut steps = vec![
        instruction(LOAD, 0, 0, ARCH),
        instruction(IF_EQUAL, 1, 0, arch::AUDIT),
        // Programs for other architectures: their calls have other numbers.
        fail_with(libc::ENOSYS),
        instruction(LOAD, 0, 0, NUMBER),
    ];
    #[cfg(target_arch = "x86_64")]
    steps.extend([instruction(IF_AT_LEAST, 0, 1, SECOND_TABLE), fail_with(libc::ENOSYS)]);
    for call in DENIED_CALLS {
        steps.extend([instruction(IF_EQUAL, 0, 1, call_number(call)), fail_with(libc::EPERM)]);
    }
    // Its flags are behind a pointer, which a filter cannot read: programs fall back to `clone`.
    steps.extend([instruction(IF_EQUAL, 0, 1, call_number(CLONE3)), fail_with(libc::ENOSYS)]);
    // Each of these replaces the loaded value, so the number is loaded again.
    for test in [
        deny_by_argument(libc::SYS_clone, FIRST_ARGUMENT, IF_ANY_BIT, NAMESPACES),
        deny_by_argument(libc::SYS_unshare, FIRST_ARGUMENT, IF_ANY_BIT, NAMESPACES | NEW_TIME),
        deny_by_argument(libc::SYS_ioctl, SECOND_ARGUMENT, IF_EQUAL, TIOCSTI),
        deny_by_argument(libc::SYS_ioctl, SECOND_ARGUMENT, IF_EQUAL, TIOCLINUX),
        deny_by_argument(libc::SYS_socket, FIRST_ARGUMENT, IF_EQUAL, AF_VSOCK),
    ] {
        steps.push(instruction(LOAD, 0, 0, NUMBER));
        steps.extend(test);
    }
    steps.push(instruction(RETURN, 0, 0, ALLOW));
    steps
}

/// Restricts everything that this process starts for the job from now on.
pub fn restrict_children() {
    let _ = FILTER.set(build_filter());
}

/// Privileges that are dropped between fork and exec; none if the task is not confined. Allocates no memory.
#[derive(Clone, Copy)]
pub struct Restrictions {
    filter: Option<&'static [sock_filter]>,
}

impl Restrictions {
    /// Restrictions for processes that this process starts.
    pub fn for_children() -> Self {
        Self { filter: FILTER.get().map(Vec::as_slice) }
    }

    /// Returns whether the task is confined: then no process of the job is root.
    pub fn are_active(self) -> bool {
        self.filter.is_some()
    }

    /// Drops capabilities. Called while the process is still root: afterwards it would not be permitted.
    pub fn drop_capabilities(self) -> io::Result<()> {
        if self.filter.is_none() {
            return Ok(());
        }
        drop_bounding_set()?;
        clear_inheritable()
    }

    /// Installs the filter. Called after the process has become the job's user.
    pub fn seal(self) -> io::Result<()> {
        let Some(filter) = self.filter else { return Ok(()) };
        install_filter(filter)
    }
}

/// Restricts this process and everything that it starts. For a process that keeps its user.
pub fn restrict_self() -> io::Result<()> {
    drop_bounding_set()?;
    set_capabilities(&[CapabilitySets::default(); 2])?;
    install_filter(&build_filter())
}

/// Restricts this process to some capabilities, given by their numbers, for good.
pub fn restrict_self_to(capabilities: &[u32]) -> io::Result<()> {
    let kept = capabilities.iter().fold(0_u64, |set, number| set | 1 << number);
    for capability in 0..=CAPABILITIES_MAX {
        if kept >> capability & 1 == 1 {
            continue;
        }
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            done => done?,
        }
    }
    let half = |set: u64| u32::try_from(set & u64::from(u32::MAX)).unwrap_or_default();
    let sets = [kept, kept >> 32].map(|set| {
        let set = half(set);
        CapabilitySets { effective: set, permitted: set, inheritable: 0 }
    });
    set_capabilities(&sets)?;
    install_filter(&build_filter())
}

#[expect(unsafe_code, reason = "a setting of the process that no crate we use has")]
fn prctl(operation: libc::c_int, argument: libc::c_ulong) -> io::Result<()> {
    // SAFETY: only settings of this process are changed, and no memory is read or written.
    let answer = unsafe { libc::prctl(operation, argument, 0, 0, 0) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Prevents other processes of the same user from reading the memory of this process or tracing it.
pub fn hide_memory() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..=CAPABILITIES_MAX {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            done => done?,
        }
    }
    Ok(())
}

/// `struct __user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

/// `_LINUX_CAPABILITY_VERSION_3`: each set is two 32-bit integers.
const HEADER: CapabilityHeader = CapabilityHeader { version: 0x2008_0522, pid: 0 };

#[expect(unsafe_code, reason = "no crate we use has this call")]
fn set_capabilities(sets: &[CapabilitySets; 2]) -> io::Result<()> {
    // SAFETY: the kernel reads both structures, which have the layout of its version 3.
    let answer = unsafe { libc::syscall(libc::SYS_capset, std::ptr::from_ref(&HEADER), sets.as_ptr()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Clears the inheritable set. The kernel clears the ambient set along with it.
#[expect(unsafe_code, reason = "no crate we use has this call")]
fn clear_inheritable() -> io::Result<()> {
    let mut sets = [CapabilitySets::default(); 2];
    // SAFETY: the kernel writes two structures of the layout of its version 3.
    let answer = unsafe { libc::syscall(libc::SYS_capget, std::ptr::from_ref(&HEADER), sets.as_mut_ptr()) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    for set in &mut sets {
        set.inheritable = 0;
    }
    set_capabilities(&sets)
}

#[expect(unsafe_code, reason = "no crate we use has this call")]
fn install_filter(filter: &[sock_filter]) -> io::Result<()> {
    set_no_new_privileges()?;
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).unwrap_or(u16::MAX),
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which outlives the call; it only reads it.
    let answer = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, std::ptr::from_ref(&program), 0, 0)
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_jump_of_the_seccomp_filter_lands_inside_the_filter() {
        let steps = build_filter();
        for (at, one) in steps.iter().enumerate() {
            if matches!(one.code, IF_EQUAL | IF_ANY_BIT | 0x35) {
                let furthest = at + 1 + usize::from(one.jt.max(one.jf));
                assert!(furthest < steps.len(), "{at}: {one:?}");
            }
        }
        assert_eq!(steps.last().map(|last| (last.code, last.k)), Some((RETURN, ALLOW)));
    }

    /// A filter applies to the thread that installed it.
    #[test]
    fn filtered_system_calls_fail_and_others_work() {
        let tried = std::thread::spawn(|| {
            install_filter(&build_filter()).unwrap();
            let mounted =
                rustix::mount::mount("none", "/tmp", "tmpfs", rustix::mount::MountFlags::empty(), None);
            #[expect(unsafe_code, reason = "the call is to be refused")]
            // SAFETY: the call fails; if it did not, the new namespace would be empty and belong to this thread only.
            let unshared = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
            let unshared = (unshared, io::Error::last_os_error().raw_os_error());
            // Threads and files still work.
            let thread = std::thread::spawn(|| std::fs::read("/proc/self/stat").is_ok()).join();
            (mounted, unshared, thread.is_ok_and(|read| read))
        });
        let (mounted, unshared, thread) = tried.join().unwrap();
        assert_eq!(mounted, Err(rustix::io::Errno::PERM));
        assert_eq!(unshared, (-1, Some(libc::EPERM)));
        assert!(thread, "threads start and files are read");
    }
}
