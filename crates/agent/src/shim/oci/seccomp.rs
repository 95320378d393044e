//! Filter of system calls of a container: that of Docker.
//!
//! The table is what Docker 20.10 permits a container by default. It differs from that version where later ones do:
//! `io_uring` and sockets to a hypervisor are not permitted, calls of newer kernels are. A test compares it with the
//! engine of the tests.
//!
//! Podman gets it in a file, because its own filter permits every container to create namespaces and to mount in them.

use std::{fs, io, path::Path};

use serde_json::{Value, json};

/// Calls that are always permitted.
const PERMITTED: &str = "
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32
    clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
    clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
    execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir
    fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork
    fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex
    futex_requeue futex_time64 futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area
    getcpu getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32
    getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresgid32 getresuid
    getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getuid32 getxattr
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents
    io_pgetevents io_pgetevents_time64 io_setup io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listxattr
    llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64 madvise map_shadow_stack membarrier
    memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2 mprotect
    mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64
    mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep
    newfstatat _newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
    pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6
    pselect6_time64 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recv recvfrom recvmmsg
    recvmmsg_time64 recvmsg remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget
    semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list
    set_thread_area set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups
    setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32
    setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32 setxattr shmat shmctl shmdt shmget shutdown
    sigaltstack signalfd signalfd4 sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs
    statfs64 statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
    timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create
    timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64
    ugetrlimit umask uname unlink unlinkat utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid
    waitpid write writev
";

/// Calls that a capability permits in addition.
const PERMITTED_BY_CAPABILITY: [(&str, &[&str]); 14] = [
    ("BPF", &["bpf"]),
    ("DAC_READ_SEARCH", &["open_by_handle_at"]),
    ("PERFMON", &["perf_event_open"]),
    (
        "SYS_ADMIN",
        &[
            "bpf",
            "clone",
            "clone3",
            "fanotify_init",
            "fsconfig",
            "fsmount",
            "fsopen",
            "fspick",
            "lookup_dcookie",
            "mount",
            "mount_setattr",
            "move_mount",
            "open_tree",
            "perf_event_open",
            "quotactl",
            "quotactl_fd",
            "setdomainname",
            "sethostname",
            "setns",
            "syslog",
            "umount",
            "umount2",
            "unshare",
        ],
    ),
    ("SYS_BOOT", &["reboot"]),
    ("SYS_CHROOT", &["chroot"]),
    ("SYS_MODULE", &["delete_module", "init_module", "finit_module"]),
    ("SYS_NICE", &["get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"]),
    ("SYS_PACCT", &["acct"]),
    (
        "SYS_PTRACE",
        &["kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace"],
    ),
    ("SYS_RAWIO", &["iopl", "ioperm"]),
    ("SYS_TIME", &["settimeofday", "stime", "clock_settime", "clock_settime64"]),
    ("SYS_TTY_CONFIG", &["vhangup"]),
    ("SYSLOG", &["syslog"]),
];

/// Permitted values of the argument of `personality`: Linux, BSD, and each with `UNAME26`; and the query.
const PERSONALITIES: [u64; 5] = [0, 8, 0x20000, 0x20008, 0xffff_ffff];
/// Flags of `clone` that create namespaces.
const NAMESPACE_FLAGS: u64 = 0x7e02_0000;
/// Sockets between a virtual machine and its host.
const AF_VSOCK: u64 = 40;
const ENOSYS: u32 = 38;

/// Returns the section `seccomp` of a container's configuration. `capabilities` are those of the container.
pub(crate) fn profile(capabilities: &[String]) -> Value {
    let has = |name: &str| capabilities.iter().any(|one| one == name);
    let allow = |names: &[&str]| json!({"names": names, "action": "SCMP_ACT_ALLOW"});
    let allow_if = |name: &str, index: u32, value: u64, op: &str| json!({"names": [name], "action": "SCMP_ACT_ALLOW", "args": [{"index": index, "value": value, "op": op}]});
    let permitted: Vec<&str> = PERMITTED.split_whitespace().collect();
    let mut calls = vec![
        allow(&permitted),
        // A filter that was installed before a tracer existed cannot be circumvented by tracing, since kernel 4.8.
        allow(&["ptrace", "process_vm_readv", "process_vm_writev"]),
        allow_if("socket", 0, AF_VSOCK, "SCMP_CMP_NE"),
    ];
    calls.extend(PERSONALITIES.map(|value| allow_if("personality", 0, value, "SCMP_CMP_EQ")));
    calls.push(allow(architecture::OWN_CALLS));
    if !has("SYS_ADMIN") {
        let mut clone = allow_if("clone", 0, NAMESPACE_FLAGS, "SCMP_CMP_MASKED_EQ");
        clone["args"][0]["valueTwo"] = 0.into();
        calls.push(clone);
        // Its flags are behind a pointer, which a filter cannot read: programs fall back to `clone`.
        calls.push(json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    let by_capability = PERMITTED_BY_CAPABILITY.iter().filter(|(name, _)| has(name));
    calls.extend(by_capability.map(|(_, names)| allow(names)));
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": architecture::NAMES,
        "syscalls": calls,
    })
}

/// Writes the filter to a file for an engine, and returns the engine's option that names it.
pub(crate) fn write_profile(path: &Path, capabilities: &[String]) -> io::Result<String> {
    fs::write(path, profile(capabilities).to_string())?;
    Ok(profile_option(path))
}

/// Writes the filter for Apptainer, which gives every refused call the same error. Programs fall back from `clone3` to `clone`
/// only if the former does not exist, which is the result of a traced call that has no tracer. A program that traces
/// another one can let it make the call.
pub(crate) fn write_profile_for_apptainer(path: &Path, capabilities: &[String]) -> io::Result<String> {
    let mut profile = profile(capabilities);
    for call in profile["syscalls"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        if call.remove("errnoRet").is_some() {
            call.insert("action".to_owned(), "SCMP_ACT_TRACE".into());
        }
    }
    fs::write(path, profile.to_string())?;
    Ok(profile_option(path))
}

/// Security option of an engine that names the file of a filter.
pub(crate) fn profile_option(path: &Path) -> String {
    format!("seccomp={}", path.display())
}

#[cfg(target_arch = "x86_64")]
mod architecture {
    pub(super) const NAMES: &[&str] = &["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"];
    pub(super) const OWN_CALLS: &[&str] = &["arch_prctl", "modify_ldt"];
}

#[cfg(target_arch = "aarch64")]
mod architecture {
    pub(super) const NAMES: &[&str] = &["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"];
    pub(super) const OWN_CALLS: &[&str] = &[
        "arm_fadvise64_64",
        "arm_sync_file_range",
        "sync_file_range2",
        "breakpoint",
        "cacheflush",
        "set_tls",
    ];
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn permitted(capabilities: &[&str]) -> BTreeSet<String> {
        let capabilities: Vec<String> = capabilities.iter().map(|name| (*name).to_owned()).collect();
        let profile = profile(&capabilities);
        let calls = profile["syscalls"].as_array().unwrap().iter();
        let allowed = calls.filter(|one| one["action"] == "SCMP_ACT_ALLOW" && one["args"].is_null());
        let names = allowed.flat_map(|one| one["names"].as_array().unwrap().clone());
        names.map(|name| name.as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn calls_that_change_the_host_need_a_capability() {
        let none = permitted(&[]);
        for (capability, call) in [
            ("SYS_ADMIN", "mount"),
            ("SYS_ADMIN", "unshare"),
            ("SYS_ADMIN", "setns"),
            ("SYS_MODULE", "init_module"),
            ("SYS_BOOT", "reboot"),
            ("SYS_TIME", "clock_settime"),
            ("DAC_READ_SEARCH", "open_by_handle_at"),
            ("SYS_CHROOT", "chroot"),
            ("BPF", "bpf"),
        ] {
            assert!(!none.contains(call), "{call}");
            assert!(permitted(&[capability]).contains(call), "{call} with {capability}");
        }
        for call in
            ["keyctl", "add_key", "kexec_load", "io_uring_setup", "userfaultfd", "swapon", "pivot_root"]
        {
            assert!(!permitted(&["SYS_ADMIN", "SYS_PTRACE"]).contains(call), "{call}");
        }
        assert!(none.contains("execve") && none.contains("openat2") && none.contains("clock_gettime"));
    }
}
