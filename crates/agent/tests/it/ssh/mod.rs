//! The SSH server of the runner, tested with real clients.

mod authentication;
mod files;
mod forwards;
mod late_readers;
mod log_access;
mod sessions;

use std::{
    io::{Read, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use windlass_testkit::rng::Rng;
use windlass_testkit::wait::eventually;

use crate::support::{TempDir, agent, temp_dir};

/// An SSH server of the agent with an accepted key pair, and a home for its sessions.
pub(crate) struct SshServer {
    scratch: TempDir,
    child: KillOnDrop,
    pub(crate) address: SocketAddr,
}

/// Killed and waited for at the end of the test.
pub(crate) struct KillOnDrop(pub(crate) Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl SshServer {
    pub(crate) fn start() -> Self {
        Self::with(&[], &[])
    }

    pub(crate) fn with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let scratch = temp_dir("ssh").unwrap();
        let at = |name: &str| scratch.path().join(name);
        make_key(&at("id"), "ed25519");
        std::fs::create_dir(at("home")).unwrap();
        // As under nohup: sessions must not inherit the signals that the server ignores.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "trap '' INT QUIT HUP; exec \"$0\" \"$@\""])
            .arg(agent())
            .args(["runner", "ssh", "--listen", "127.0.0.1:0", "--authorized-keys"])
            .arg(at("id.pub"))
            .arg("--host-key")
            .arg(at("host_key"))
            .arg("--address-file")
            .arg(at("address"));
        if !args.contains(&"--home") {
            command.arg("--home").arg(at("home"));
        }
        command.args(args).envs(env.iter().copied());
        Self::begin(scratch, command)
    }

    /// Starts a server in a root directory with nothing but the agent and the random devices that every container has:
    /// no shell, no users, no terminals.
    pub(crate) fn in_an_empty_image() -> Self {
        let scratch = temp_dir("ssh").unwrap();
        make_key(&scratch.path().join("id"), "ed25519");
        std::fs::copy(agent(), scratch.path().join("agent")).unwrap();
        std::fs::create_dir(scratch.path().join("dev")).unwrap();
        for (name, number) in [("random", "8"), ("urandom", "9")] {
            let device = scratch.path().join("dev").join(name);
            let made = run(Command::new("mknod").arg(device).args(["c", "1", number]), b"");
            assert!(made.status.success(), "{}", text(&made.stderr));
        }
        let mut command = Command::new("chroot");
        command
            .arg(scratch.path())
            .args(["/agent", "runner", "ssh", "--listen", "127.0.0.1:0", "--authorized-keys", "/id.pub"])
            .args(["--host-key", "/host_key", "--address-file", "/address"]);
        Self::begin(scratch, command)
    }

    fn begin(scratch: TempDir, mut command: Command) -> Self {
        let mut child = KillOnDrop(command.stdin(Stdio::null()).spawn().unwrap());
        let file = scratch.path().join("address");
        let address = wait_until("the server listens", || {
            assert_eq!(child.0.try_wait().unwrap(), None, "the server ended");
            std::fs::read_to_string(&file).ok()?.parse().ok()
        });
        Self { scratch, child, address }
    }

    /// Requests the server to end and waits until it has.
    pub(crate) fn stop(&mut self) {
        let status = Command::new("kill").arg(self.pid().to_string()).status().unwrap();
        assert!(status.success());
        wait_until("the server ends", || self.child.0.try_wait().unwrap());
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.at("home")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub(crate) fn options(&self) -> Vec<String> {
        options(self.scratch.path())
    }

    pub(crate) fn client(&self, program: &str, port_flag: &str) -> Command {
        client(self.scratch.path(), program, port_flag, self.address.port())
    }

    /// Returns `ssh OPTIONS root@SERVER`, ready for a command.
    pub(crate) fn ssh(&self, options: &[&str]) -> Command {
        let mut command = self.client("ssh", "-p");
        command.args(options).arg("root@127.0.0.1");
        command
    }

    /// Runs a command on the server and returns its standard output.
    pub(crate) fn command_output(&self, command: &str) -> String {
        let output = run(self.ssh(&[]).arg(command), b"");
        assert!(output.status.success(), "{command}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

/// Options of every client: no configuration of this host, the key `id` in `dir`, and the server's key once learned.
fn options(dir: &Path) -> Vec<String> {
    let mut options = vec!["-F".to_owned(), "/dev/null".to_owned()];
    for option in [
        format!("UserKnownHostsFile={}", dir.join("known_hosts").display()),
        "GlobalKnownHostsFile=/dev/null".to_owned(),
        "StrictHostKeyChecking=accept-new".to_owned(),
        "IdentitiesOnly=yes".to_owned(),
        "LogLevel=ERROR".to_owned(),
        "ConnectTimeout=20".to_owned(),
        format!("IdentityFile={}", dir.join("id").display()),
    ] {
        options.extend(["-o".to_owned(), option]);
    }
    options
}

/// Returns a client with the key `id` in `dir`, for a server on this host.
pub(crate) fn client(dir: &Path, program: &str, port_flag: &str, port: u16) -> Command {
    let mut command = Command::new(program);
    command.args(options(dir)).args([port_flag, &port.to_string()]);
    command.env("HOME", dir).env_remove("SSH_AUTH_SOCK");
    command
}

pub(crate) fn make_key(path: &Path, kind: &str) {
    let made = run(Command::new("ssh-keygen").args(["-q", "-t", kind, "-N", "", "-f"]).arg(path), b"");
    assert!(made.status.success(), "{}", text(&made.stderr));
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Polls until there is a result; a state that is never reached fails the test by name.
#[track_caller]
pub(crate) fn wait_until<T>(state: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let mut answer = None;
    eventually(state, || {
        answer = check();
        answer.is_some()
    });
    answer.unwrap()
}

/// Starts a program; one that is not installed fails the test by the name of its package.
#[track_caller]
pub(crate) fn spawn(command: &mut Command) -> Child {
    let program = command.get_program().to_string_lossy().into_owned();
    command.spawn().unwrap_or_else(|error| {
        let package = match program.as_str() {
            "rsync" => "rsync",
            "git" => "git",
            _ => "openssh-client",
        };
        panic!("start {program}: {error} (Debian package: {package})")
    })
}

/// Runs a program to its end with this input.
#[track_caller]
pub(crate) fn run(command: &mut Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let shown = format!("{command:?}");
    let mut child = KillOnDrop(spawn(command));
    let mut stdin = child.0.stdin.take().unwrap();
    let input = input.to_vec();
    let feed = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = drain(child.0.stdout.take().unwrap());
    let errors = drain(child.0.stderr.take().unwrap());
    let status = wait_until(&format!("{shown} ends"), || child.0.try_wait().unwrap());
    feed.join().unwrap();
    Output { status, stdout: output.join().unwrap(), stderr: errors.join().unwrap() }
}

fn drain(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// Returns bytes that do not repeat soon, so that a lost or repeated block is noticed.
pub(crate) fn noise(count: usize) -> Vec<u8> {
    Rng::new(1).bytes(count)
}
