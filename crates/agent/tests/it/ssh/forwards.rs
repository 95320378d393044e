//! Ports, sockets and agents forwarded over SSH.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use windlass_testkit::ports;
use windlass_testkit::wait::TIMEOUT;

use super::{KillOnDrop, SshServer, noise, run, sessions::resident_kib, spawn, text, wait_until};

/// A client that holds one connection for others.
pub(super) struct ControlMaster {
    _child: KillOnDrop,
    socket: PathBuf,
}

impl ControlMaster {
    /// Returns `ssh` over the master's connection.
    pub(super) fn ssh(&self, server: &SshServer) -> Command {
        server.ssh(&["-S", self.socket.to_str().unwrap()])
    }
}

/// Starts a master with these options and waits until it responds.
pub(super) fn start_master(server: &SshServer, options: &[&str]) -> ControlMaster {
    let socket = server.at("control");
    let mut ssh = server.ssh(
        &[&["-M", "-N", "-o", "ExitOnForwardFailure=yes", "-S", socket.to_str().unwrap()], options].concat(),
    );
    let child = KillOnDrop(spawn(ssh.stdin(Stdio::null())));
    let master = ControlMaster { _child: child, socket };
    wait_until("the master answers", || {
        let mut check = server.ssh(&["-S", master.socket.to_str().unwrap(), "-O", "check"]);
        run(&mut check, b"").status.success().then_some(())
    });
    master
}

/// Connects to a local port, once the client listens on it: a master responds before its forwards are set up.
fn connect_port(port: u16) -> TcpStream {
    wait_until("the port is forwarded", || TcpStream::connect(("127.0.0.1", port)).ok())
}

/// Connects to a socket, once a process listens on it: its file exists a moment before.
pub(super) fn connect_socket(socket: &Path) -> UnixStream {
    wait_until("the socket is listened on", || UnixStream::connect(socket).ok())
}

/// Responds to every connection with the received bytes in reverse, once the sender has ended.
fn echo_reversed(mut stream: impl Read + Write) {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    all.reverse();
    let _ = stream.write_all(&all);
}

fn tcp_service() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || echo_reversed(stream));
        }
    });
    address
}

fn set_timeouts(stream: &TcpStream) {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
}

/// Sends, ends, and reads the response: half-closes must pass in both directions.
#[track_caller]
fn check_echo(mut stream: TcpStream, bytes: &[u8]) {
    set_timeouts(&stream);
    let mut to = stream.try_clone().unwrap();
    let sent = bytes.to_vec();
    let feed = std::thread::spawn(move || {
        to.write_all(&sent).unwrap();
        to.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    feed.join().unwrap();
    back.reverse();
    assert!(back == bytes, "{} of {} bytes came back right", back.len(), bytes.len());
}

#[test]
fn local_port_forwarding_reaches_remote_ports() {
    let server = SshServer::start();
    let (port, service) = (ports::reserve_free_port(), tcp_service());
    let _master = start_master(&server, &["-L", &format!("{port}:localhost:{}", service.port())]);
    check_echo(connect_port(port), b"hello");
    check_echo(connect_port(port), &noise(10 << 20));
    let several: Vec<_> = (0..40)
        .map(|round: usize| {
            let stream = connect_port(port);
            std::thread::spawn(move || check_echo(stream, &noise(1000 * round)))
        })
        .collect();
    several.into_iter().for_each(|each| each.join().unwrap());
}

#[test]
fn a_forward_to_a_closed_port_is_refused_and_the_connection_stays_open() {
    let server = SshServer::start();
    let (port, closed) = (ports::reserve_free_port(), ports::reserve_free_port());
    let master = start_master(&server, &["-L", &format!("{port}:127.0.0.1:{closed}")]);
    let mut stream = connect_port(port);
    set_timeouts(&stream);
    assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
    assert_eq!(text(&run(master.ssh(&server).arg("echo alive"), b"").stdout), "alive\n");
}

#[test]
fn unix_sockets_are_forwarded_in_both_directions() {
    let server = SshServer::start();
    let (near, far) = (server.at("near.sock"), server.home().join("far.sock"));
    let listener = UnixListener::bind(&far).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            echo_reversed(stream);
        }
    });
    let (offered, behind) = (server.home().join("offered.sock"), tcp_service());
    let _master = start_master(
        &server,
        &[
            "-L",
            &format!("{}:{}", near.display(), far.display()),
            "-R",
            &format!("{}:{behind}", offered.display()),
        ],
    );
    for socket in [&near, &offered] {
        let mut stream = connect_socket(socket);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(b"abc").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut back = String::new();
        stream.read_to_string(&mut back).unwrap();
        assert_eq!(back, "cba");
    }
    drop(_master);
    wait_until("the offered socket is gone with its client", || (!offered.exists()).then_some(()));
}

#[test]
fn remote_port_forwarding_reaches_local_ports() {
    let server = SshServer::start();
    let (port, service) = (ports::reserve_free_port(), tcp_service());
    let master = start_master(&server, &["-R", &format!("{port}:{service}")]);
    check_echo(connect_port(port), &noise(3 << 20));
    // Requested by the master later, on a port of the system's choice, and released.
    let allot = |operation: &str, forward: &str| {
        let mut ssh = server.ssh(&["-S", master.socket.to_str().unwrap(), "-O", operation, "-R", forward]);
        text(&run(&mut ssh, b"").stdout)
    };
    let allotted: u16 = allot("forward", &format!("0:{service}")).trim().parse().unwrap();
    check_echo(connect_port(allotted), b"more");
    allot("cancel", &format!("{port}:{service}"));
    wait_until("the port is closed", || TcpStream::connect(("127.0.0.1", port)).is_err().then_some(()));
    drop(master);
    wait_until("the other port is closed", || {
        TcpStream::connect(("127.0.0.1", allotted)).is_err().then_some(())
    });
}

#[test]
fn a_socks_proxy_resolves_names_on_the_server() {
    let server = SshServer::start();
    let (port, service) = (ports::reserve_free_port(), tcp_service());
    let _master = start_master(&server, &["-D", &port.to_string()]);
    let mut stream = connect_port(port);
    set_timeouts(&stream);
    stream.write_all(&[5, 1, 0]).unwrap();
    let mut answer = [0u8; 2];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [5, 0]);
    let mut request = vec![5, 1, 0, 3, 9];
    request.extend(b"localhost");
    request.extend(service.port().to_be_bytes());
    stream.write_all(&request).unwrap();
    let mut answer = [0u8; 10];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..2], [5, 0]);
    check_echo(stream, b"through the proxy");
}

#[test]
fn one_server_can_be_the_jump_host_to_another() {
    let (first, second) = (SshServer::start(), SshServer::start());
    let proxy = format!(
        "ProxyCommand=ssh {} -p {} -W %h:%p root@127.0.0.1",
        first.options().join(" "),
        first.address.port()
    );
    let output = run(second.ssh(&["-o", &proxy]).arg("cat; echo $SSH_CONNECTION >&2"), &noise(2 << 20));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(output.stdout == noise(2 << 20));
    // And with the client's option for it.
    std::fs::create_dir_all(second.home().join(".ssh")).unwrap();
    std::fs::copy(first.at("id.pub"), second.home().join(".ssh/authorized_keys")).unwrap();
    let config = first.at("config");
    let options = first.options();
    let settings: String = options
        .iter()
        .filter(|option| option.contains('='))
        .map(|option| option.replacen('=', " ", 1) + "\n")
        .collect();
    std::fs::write(&config, settings).unwrap();
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(&config).arg("-J").arg(format!("root@127.0.0.1:{}", first.address.port()));
    ssh.args(["-p", &second.address.port().to_string(), "root@127.0.0.1", "echo jumped"]);
    let output = run(ssh.env("HOME", first.at("")), b"");
    assert_eq!(text(&output.stdout), "jumped\n", "{}", text(&output.stderr));
}

#[test]
fn the_forwarded_agent_of_the_client_is_usable_by_remote_programs() {
    let server = SshServer::start();
    let socket = server.at("agent.sock");
    let mut agent = Command::new("ssh-agent");
    let _agent = KillOnDrop(spawn(agent.arg("-D").arg("-a").arg(&socket).stdout(Stdio::null())));
    drop(connect_socket(&socket));
    let added =
        run(Command::new("ssh-add").arg("-q").arg(server.at("id")).env("SSH_AUTH_SOCK", &socket), b"");
    assert!(added.status.success(), "{}", text(&added.stderr));
    let output =
        run(server.ssh(&["-A"]).arg("ssh-add -l; echo $SSH_AUTH_SOCK").env("SSH_AUTH_SOCK", &socket), b"");
    let message = text(&output.stdout);
    assert!(message.contains("(ED25519)"), "{message}{}", text(&output.stderr));
    let there = PathBuf::from(message.lines().last().unwrap());
    wait_until("the socket is gone with the connection", || (!there.exists()).then_some(()));
    let without = run(server.ssh(&[]).arg("echo -n \"$SSH_AUTH_SOCK\""), b"");
    assert_eq!(text(&without.stdout), "");
}

#[test]
fn a_request_for_x11_forwarding_is_refused_and_the_command_still_runs() {
    let server = SshServer::start();
    let output = run(server.ssh(&["-X"]).arg("echo -n \"$DISPLAY\"").env("DISPLAY", "localhost:7"), b"");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), String::new()));
}

/// A service that accepts and then neither reads nor writes, until it is dropped.
struct StalledService {
    address: SocketAddr,
    held: Arc<Mutex<Vec<TcpStream>>>,
}

fn start_stalled_service() -> StalledService {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let held = Arc::new(Mutex::new(Vec::new()));
    let hold = Arc::clone(&held);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            hold.lock().push(stream);
        }
    });
    StalledService { address, held }
}

#[test]
fn an_unread_channel_does_not_block_another() {
    let server = SshServer::start();
    let (stuck_port, port) = (ports::reserve_free_port(), ports::reserve_free_port());
    let (stuck, service) = (start_stalled_service(), tcp_service());
    let master = start_master(
        &server,
        &["-L", &format!("{stuck_port}:{}", stuck.address), "-L", &format!("{port}:{service}")],
    );
    // Upstream: a client that sends without limit to a service that never reads.
    let mut flood = connect_port(stuck_port);
    flood.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut sent = 0;
    let piece = noise(1 << 20);
    while let Ok(count) = flood.write(&piece) {
        sent += count;
        assert!(sent < 200 << 20, "nothing holds the sender back");
    }
    // Downstream: an endless program whose output is not read.
    let mut ssh = master.ssh(&server);
    let _endless = KillOnDrop(spawn(ssh.arg("yes").stdin(Stdio::null()).stdout(Stdio::piped())));

    for round in 0..20 {
        check_echo(connect_port(port), &noise(10_000 * round));
    }
    assert_eq!(text(&run(master.ssh(&server).arg("echo alive"), b"").stdout), "alive\n");
    assert!(resident_kib(server.pid()) < 64 * 1024, "{} KiB", resident_kib(server.pid()));
    // The blocked connection continues when its reader does.
    let mut reader = stuck.held.lock().pop().unwrap();
    set_timeouts(&reader);
    drop(flood);
    let mut arrived = Vec::new();
    reader.read_to_end(&mut arrived).unwrap();
    assert_eq!(arrived.len(), sent);
}

#[test]
fn a_channel_can_upload_while_another_is_blocked() {
    let server = SshServer::start();
    let (stuck_port, port) = (ports::reserve_free_port(), ports::reserve_free_port());
    let (stuck, service) = (start_stalled_service(), tcp_service());
    let _master = start_master(
        &server,
        &["-L", &format!("{stuck_port}:{}", stuck.address), "-L", &format!("{port}:{service}")],
    );
    let mut flood = connect_port(stuck_port);
    flood.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let piece = noise(1 << 20);
    while flood.write(&piece).is_ok() {}
    check_echo(connect_port(port), &noise(40 << 20));
    assert!(resident_kib(server.pid()) < 96 * 1024, "{} KiB", resident_kib(server.pid()));
}
