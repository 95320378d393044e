//! For tests: a job that tries every known way to escape from its sandbox, and prints the result of each.
//!
//! Each line is `NAME<tab>refused|reached<tab>DETAIL`. Arguments set the targets: `--read NAME=PATH`, `--socket
//! NAME=PATH`, `--pid NAME=PID`, `--server NAME=ADDRESS`, and `--canary TEXT`, a text in the environment of another job.
//! A successful escape does no harm: times and names are set to their current values, signals are empty. With
//! `--without-changes yes` it makes only the attempts that change nothing even without a sandbox.

use std::{
    fs, io,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    path::Path,
    process::Command,
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::{
        ptrace,
        signal::kill,
        socket::{AddressFamily, SockFlag, SockType, socket},
        stat::{Mode, SFlag, makedev, mknod},
        time::TimeSpec,
        uio::{RemoteIoVec, process_vm_readv},
    },
    time::{ClockId, clock_gettime, clock_settime},
    unistd::{Gid, Pid, Uid, chown, chroot, gethostname, setgid, setgroups, sethostname, setuid},
};
use rustix::{
    io::Errno as NetErrno,
    net::{self, Protocol, SendFlags, SocketFlags, SocketType, ipproto},
};

/// Timeout for an address that does not respond.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(700);
const METADATA_ADDRESS: &str = "169.254.169.254:80";
/// Flag of Linux: connects and sends at once.
const MSG_FASTOPEN: u32 = 0x2000_0000;
const METADATA_ADDRESS_IN_IPV6: &str = "[::ffff:169.254.169.254]:80";

/// Targets on the machine outside of the sandbox.
#[derive(Default)]
struct EscapeTargets {
    reads: Vec<(String, String)>,
    sockets: Vec<(String, String)>,
    pids: Vec<(String, i32)>,
    servers: Vec<(String, String)>,
    canary: String,
    without_changes: bool,
}

fn parse_targets() -> EscapeTargets {
    let mut found = EscapeTargets::default();
    let mut args = std::env::args().skip(1);
    while let (Some(flag), Some(value)) = (args.next(), args.next()) {
        let (name, target) = value.split_once('=').unwrap_or((&value, ""));
        let named = || (name.to_owned(), target.to_owned());
        match flag.as_str() {
            "--read" => found.reads.push(named()),
            "--socket" => found.sockets.push(named()),
            "--pid" => found.pids.push((name.to_owned(), target.parse().unwrap_or(0))),
            "--server" => found.servers.push(named()),
            "--canary" => found.canary = value,
            "--without-changes" => found.without_changes = true,
            _ => {}
        }
    }
    found
}

/// Result of an escape attempt: what it reached, or why it was refused.
type EscapeOutcome = Result<String, String>;

fn print_outcome(name: &str, outcome: &EscapeOutcome) {
    let line = match outcome {
        Ok(reached) => format!("{name}\treached\t{}", reached.escape_debug()),
        Err(reason) => format!("{name}\trefused\t{}", reason.escape_debug()),
    };
    let _ = writeln!(io::stdout(), "{line}");
}

fn from_nix_result<T>(result: nix::Result<T>) -> EscapeOutcome {
    result.map(|_| "allowed".to_owned()).map_err(|error| error.to_string())
}

fn from_io_result<T>(result: io::Result<T>) -> EscapeOutcome {
    result.map(|_| "allowed".to_owned()).map_err(|error| error.to_string())
}

fn main() {
    let targets = parse_targets();
    // Images may have no directory for temporary files.
    let _ = fs::create_dir_all(std::env::temp_dir());
    files(&targets);
    processes(&targets);
    sockets(&targets);
    servers(&targets);
    if !targets.without_changes {
        kernel();
        control_groups();
        network();
        privileges();
    }
}

fn files(targets: &EscapeTargets) {
    for (name, path) in &targets.reads {
        let outcome = if Path::new(path).is_dir() {
            match fs::read_dir(path).map(|entries| entries.flatten().count()) {
                Ok(0) => Err("empty".to_owned()),
                Ok(entries) => Ok(format!("{entries} entries")),
                Err(error) => Err(error.to_string()),
            }
        } else {
            match fs::read(path) {
                // A hidden file is covered by an empty one.
                Ok(bytes) if bytes.is_empty() => Err("empty".to_owned()),
                Ok(bytes) => Ok(format!("{} bytes", bytes.len())),
                Err(error) => Err(error.to_string()),
            }
        };
        print_outcome(&format!("read {name}"), &outcome);
        let written = if fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device()) {
            Err("covered by a device that keeps nothing".to_owned())
        } else {
            from_io_result(fs::OpenOptions::new().append(true).open(path))
        };
        print_outcome(&format!("write {name}"), &written);
    }
    print_outcome(
        "read the machine's shadow file",
        &try_on_machine_root("etc/shadow", |path| from_io_result(fs::read(path))),
    );
    print_outcome(
        "write to the machine's /etc",
        &try_on_machine_root("etc/windlass-ways-out", try_create_file),
    );
    print_outcome(
        "write to the machine's programs",
        &try_on_machine_root("usr/bin/windlass-ways-out", try_create_file),
    );
    print_outcome("raw memory", &from_io_result(fs::File::open("/dev/mem")));
    print_outcome("the kernel's messages", &from_io_result(fs::File::open("/dev/kmsg")));
    print_outcome("the first disk", &try_open_disk());
}

/// The same path may belong to the container, which is no escape: the machine's root is reachable through its first
/// process, if at all.
fn try_on_machine_root(path: &str, attempt: impl Fn(&Path) -> EscapeOutcome) -> EscapeOutcome {
    // Test images contain a shell and this program; machines have a package manager.
    let machine =
        ["/", "/proc/1/root"].into_iter().find(|root| Path::new(root).join("usr/bin/dpkg").exists());
    match machine {
        Some(root) => attempt(&Path::new(root).join(path)),
        None => Err("only the container's own".to_owned()),
    }
}

fn try_create_file(path: &Path) -> EscapeOutcome {
    let outcome = from_io_result(fs::File::create(path));
    let _ = fs::remove_file(path);
    outcome
}

fn try_open_disk() -> EscapeOutcome {
    let entries = fs::read_dir("/sys/block").map_err(|error| error.to_string())?;
    let mut last = "there is none".to_owned();
    for entry in entries.flatten() {
        let Ok(numbers) = fs::read_to_string(entry.path().join("dev")) else { continue };
        match fs::File::open(Path::new("/dev").join(entry.file_name())) {
            Ok(_) => return Ok(entry.file_name().to_string_lossy().into_owned()),
            Err(error) => last = error.to_string(),
        }
        // Create a device node for it.
        let Some((major, minor)) = numbers.trim().split_once(':') else { continue };
        let (Ok(major), Ok(minor)) = (major.parse(), minor.parse()) else { continue };
        let node = std::env::temp_dir().join("windlass-ways-out-disk");
        let device = makedev(major, minor);
        if let Err(error) = mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR, device) {
            last = error.to_string();
            continue;
        }
        let opened = fs::File::open(&node);
        let _ = fs::remove_file(&node);
        match opened {
            Ok(_) => return Ok("by a node of its own".to_owned()),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

fn processes(targets: &EscapeTargets) {
    print_outcome("the environment of another job", &try_other_environment(&targets.canary));
    for (name, pid) in &targets.pids {
        if *pid <= 0 {
            continue;
        }
        let process = Pid::from_raw(*pid);
        print_outcome(&format!("signal {name}"), &from_nix_result(kill(process, None)));
        let attached = ptrace::seize(process, ptrace::Options::empty());
        let _ = ptrace::detach(process, None);
        print_outcome(&format!("trace {name}"), &from_nix_result(attached));
        print_outcome(&format!("read the memory of {name}"), &from_nix_result(memory(process)));
        for (what, file) in [("files", "root/etc"), ("environment", "environ"), ("descriptors", "fd")] {
            let path = format!("/proc/{pid}/{file}");
            let inspected = if file == "environ" {
                from_io_result(fs::read(&path))
            } else {
                from_io_result(fs::read_dir(&path))
            };
            print_outcome(&format!("the {what} of {name}"), &inspected);
        }
    }
}

fn memory(process: Pid) -> nix::Result<usize> {
    let mut buffer = [0_u8; 8];
    let local = io::IoSliceMut::new(&mut buffer);
    process_vm_readv(process, &mut [local], &[RemoteIoVec { base: 0x1000, len: 8 }]).or_else(|error| {
        // The permission is checked before the address.
        if error == Errno::EFAULT { Ok(0) } else { Err(error) }
    })
}

fn try_other_environment(canary: &str) -> EscapeOutcome {
    let mut seen = 0;
    for entry in fs::read_dir("/proc").map_err(|error| error.to_string())?.flatten() {
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        seen += 1;
        if environment.windows(canary.len()).any(|part| part == canary.as_bytes()) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Err(format!("not in the {seen} that can be read"))
}

fn sockets(targets: &EscapeTargets) {
    for (name, path) in &targets.sockets {
        print_outcome(&format!("connect to {name}"), &from_io_result(UnixStream::connect(path)));
    }
}

fn kernel() {
    let here = std::env::temp_dir();
    let none: Option<&str> = None;
    print_outcome(
        "mount",
        &from_nix_result(mount(Some("none"), &here, Some("tmpfs"), MsFlags::empty(), none)),
    );
    print_outcome(
        "mount what is elsewhere",
        &from_nix_result(mount(Some("/"), &here, none, MsFlags::MS_BIND, none)),
    );
    for cover in ["/proc", "/tmp", "/dev/shm"] {
        print_outcome(&format!("take {cover} away"), &from_nix_result(umount2(cover, MntFlags::MNT_DETACH)));
    }
    print_outcome("a namespace of users", &from_nix_result(unshare(CloneFlags::CLONE_NEWUSER)));
    print_outcome("a namespace of mounts", &from_nix_result(unshare(CloneFlags::CLONE_NEWNS)));
    let outside = fs::File::open("/proc/1/ns/mnt").map_err(|error| error.to_string());
    print_outcome(
        "enter the first process's mounts",
        &outside.and_then(|file| from_nix_result(setns(file, CloneFlags::CLONE_NEWNS))),
    );
    print_outcome("set the name of the machine", &from_nix_result(gethostname().and_then(sethostname)));
    let now = || clock_gettime(ClockId::CLOCK_REALTIME);
    print_outcome(
        "set the clock",
        &from_nix_result(now().and_then(|now: TimeSpec| clock_settime(ClockId::CLOCK_REALTIME, now))),
    );
    for name in ["core_pattern", "modprobe"] {
        let path = format!("/proc/sys/kernel/{name}");
        print_outcome(
            &format!("write the kernel's {name}"),
            &from_io_result(fs::OpenOptions::new().write(true).open(path)),
        );
    }
    print_outcome(
        "write the kernel's trigger",
        &from_io_result(fs::OpenOptions::new().write(true).open("/proc/sysrq-trigger")),
    );
}

fn control_groups() {
    let Ok(own) = fs::read_to_string("/proc/self/cgroup") else { return };
    let root = Path::new("/sys/fs/cgroup");
    let mut left: EscapeOutcome = Err("there are none".to_owned());
    let mut raised: EscapeOutcome = Err("there are none".to_owned());
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let hierarchy = root.join(controllers.trim_start_matches("name="));
        let inside = hierarchy.join(path.trim_start_matches('/'));
        let procs = fs::OpenOptions::new().write(true).open(hierarchy.join("cgroup.procs"));
        let leave = procs.and_then(|mut file| file.write_all(std::process::id().to_string().as_bytes()));
        left = first_success(left, from_io_result(leave));
        for limit in ["memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max"] {
            raised = first_success(
                raised,
                from_io_result(fs::OpenOptions::new().write(true).open(inside.join(limit))),
            );
        }
    }
    print_outcome("leave its control group", &left);
    print_outcome("raise its limits", &raised);
}

fn first_success(one: EscapeOutcome, other: EscapeOutcome) -> EscapeOutcome {
    if one.is_ok() { one } else { other }
}

fn network() {
    for (name, address) in [
        ("the cloud's metadata", METADATA_ADDRESS),
        ("the cloud's metadata in IPv6 notation", METADATA_ADDRESS_IN_IPV6),
    ] {
        let connected = address
            .parse::<SocketAddr>()
            .map_err(io::Error::other)
            .and_then(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT));
        print_outcome(name, &from_io_result(connected));
    }
    let sent = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        socket.send_to(b"?", METADATA_ADDRESS)?;
        socket.recv(&mut [0; 16])
    });
    print_outcome("the cloud's metadata by datagram", &from_io_result(sent));
    print_outcome("the cloud's metadata by several paths", &try_other_stream(ipproto::MPTCP, false));
    print_outcome("the cloud's metadata in the first packet", &try_other_stream(ipproto::TCP, true));
    let packets = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None);
    print_outcome("the network's packets", &from_nix_result(packets));
    let raw = net::socket(net::AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW));
    print_outcome("raw packets", &raw.map(|_| "allowed".to_owned()).map_err(|error| error.to_string()));
}

/// Connects to the metadata address with another protocol, or by sending data (TCP fast open). Does not wait for the
/// connection.
fn try_other_stream(protocol: Protocol, by_sending: bool) -> EscapeOutcome {
    let address: SocketAddr = METADATA_ADDRESS.parse().map_err(|_| "no address".to_owned())?;
    let stream =
        net::socket_with(net::AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, Some(protocol));
    let begun = stream.and_then(|stream| {
        if by_sending {
            net::sendto(stream, b"?", SendFlags::from_bits_retain(MSG_FASTOPEN), &address).map(drop)
        } else {
            net::connect(stream, &address)
        }
    });
    match begun {
        // The connection is being made: nothing refused it.
        Ok(()) | Err(NetErrno::INPROGRESS) => Ok("allowed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn servers(targets: &EscapeTargets) {
    for (name, address) in &targets.servers {
        let connected = address
            .parse::<SocketAddr>()
            .map_err(io::Error::other)
            .and_then(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT));
        print_outcome(
            &format!("connect to {name}"),
            &connected.as_ref().map_or_else(|error| Err(error.to_string()), |_| Ok("allowed".to_owned())),
        );
        let used = connected
            .map_err(|error| error.to_string())
            .and_then(|stream| call_without_token(stream, address));
        print_outcome(&format!("use {name} without a token"), &used);
    }
}

/// Reached if the server responds with anything but a refusal of the caller.
fn call_without_token(mut stream: TcpStream, address: &str) -> EscapeOutcome {
    let request = format!(
        "POST /api/users/list HTTP/1.1\r\nHost: {address}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    );
    let mut response = String::new();
    stream
        .write_all(request.as_bytes())
        .and_then(|()| stream.read_to_string(&mut response))
        .map_err(|error| error.to_string())?;
    let status = response.split(' ').nth(1).unwrap_or_default().to_owned();
    if status == "401" || status == "403" {
        Err(format!("status {status}"))
    } else {
        Ok(format!("status {status}"))
    }
}

/// Runs last, because a gained privilege would make other escapes possible.
fn privileges() {
    let own = std::env::temp_dir().join("windlass-ways-out-own");
    let made = fs::write(&own, "").and_then(|()| {
        chown(&own, Some(Uid::from_raw(0)), Some(Gid::from_raw(0))).map_err(io::Error::from)?;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o4755))
    });
    let _ = fs::remove_file(&own);
    print_outcome("a program that becomes root", &from_io_result(made));
    print_outcome("become root by a program that may", &try_setuid_program());
    print_outcome("join root's group beside its own", &from_nix_result(setgroups(&[Gid::from_raw(0)])));
    print_outcome("become root's group", &from_nix_result(setgid(Gid::from_raw(0))));
    print_outcome("become root", &from_nix_result(setuid(Uid::from_raw(0))));
    print_outcome("another root directory", &from_nix_result(chroot("/proc")));
}

/// `su` and `mount` are setuid root; with `no_new_privs` they do not become root.
fn try_setuid_program() -> EscapeOutcome {
    let found = ["/bin/su", "/usr/bin/su", "/bin/mount"].iter().find(|path| Path::new(path).exists());
    let Some(_) = found else { return Err("there is none".to_owned()) };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if status.lines().any(|line| line.starts_with("NoNewPrivs:") && line.ends_with('1')) {
        return Err("no new privileges".to_owned());
    }
    let command_output = Command::new("su").args(["-c", "id -u"]).stdin(std::process::Stdio::null()).output();
    match command_output {
        Ok(output) if output.status.success() && output.stdout == b"0\n" => Ok("root".to_owned()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
