//! Private OpenSSH server on a free port, stopped on drop.

use std::{
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use windlass_testkit::wait::{eventually, eventually_ok};
use windlass_testkit::{TempDir, temp_dir};
use windlass_tunnel::{HostKey, HostKeyPin, LoginKey, SshDestination};

pub(crate) struct Sshd {
    home: TempDir,
    pub(crate) port: u16,
    child: Option<Child>,
}

impl Sshd {
    pub(crate) fn start() -> Self {
        assert!(Path::new("/usr/sbin/sshd").exists(), "sshd is missing: apt-get install openssh-server");
        let home = temp_dir("sshd").unwrap();
        // The server's privilege separation directory, which Debian creates at boot only.
        std::fs::create_dir_all("/run/sshd").unwrap();
        let mut sshd = Self { home, port: 0, child: None };
        sshd.make_key("host");
        sshd.make_key("user");
        sshd.serve();
        sshd
    }

    fn make_key(&self, name: &str) {
        let _ = std::fs::remove_file(self.home().join(name));
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(self.home().join(name));
        assert!(keygen.status().unwrap().success());
    }

    /// Starts the server, on its previous port or a free one.
    fn serve(&mut self) {
        if self.port == 0 {
            self.port = windlass_testkit::ports::reserve_free_port();
        }
        let at = |name: &str| self.home().join(name).display().to_string();
        std::fs::copy(self.home().join("user.pub"), self.home().join("authorized")).unwrap();
        std::fs::set_permissions(self.home().join("authorized"), PermissionsExt::from_mode(0o600)).unwrap();
        let settings = format!(
            "Port {}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nPidFile none\nMaxStartups 200\nMaxSessions 200\nPermitRootLogin yes\n",
            self.port,
            at("host"),
            at("authorized"),
        );
        std::fs::write(self.home().join("sshd_config"), settings).unwrap();
        let log = std::fs::File::create(self.home().join("log")).unwrap();
        let mut command = Command::new("/usr/sbin/sshd");
        command.args(["-D", "-e", "-f", &at("sshd_config")]).stdin(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        eventually_ok("sshd listens", || {
            let connected = TcpStream::connect(("127.0.0.1", self.port));
            connected.map_err(|_| std::fs::read_to_string(self.home().join("log")).unwrap_or_default())
        });
    }

    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    /// Stops the server and all its sessions.
    pub(crate) fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // While frozen it starts no more sessions: each holds the port from its first moment.
        let _ = Command::new("kill").args(["-STOP", &child.id().to_string()]).status();
        let sessions = descendants(child.id());
        // In one call: there may be a thousand.
        let words = sessions.iter().map(u32::to_string);
        let _ = Command::new("kill").arg("-9").args(words).stderr(Stdio::null()).status();
        let _ = child.kill();
        let _ = child.wait();
        eventually("sshd's sessions end", || !sessions.iter().any(|pid| is_alive(*pid)));
    }

    pub(crate) fn restart(&mut self) {
        self.stop();
        self.serve();
    }

    /// Simulates the replacement of the machine by another with the same address.
    pub(crate) fn change_host_key(&mut self) {
        self.make_key("host");
        self.restart();
    }

    /// `STOP` and `CONT` freeze and resume the server with its sessions: the host exists but does not respond.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().unwrap().id();
        for pid in descendants(pid).into_iter().chain([pid]) {
            let _ = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
        }
    }

    /// Returns the number of connections that it serves.
    pub(crate) fn connections(&self) -> usize {
        let pid = self.child.as_ref().unwrap().id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().count()
    }

    pub(crate) fn host_key(&self) -> HostKey {
        let line = std::fs::read_to_string(self.home().join("host.pub")).unwrap();
        HostKey::parse(line.trim()).unwrap()
    }

    pub(crate) fn target(&self) -> SshDestination {
        let key = std::fs::read_to_string(self.home().join("user")).unwrap();
        SshDestination {
            host: "127.0.0.1".into(),
            port: self.port,
            user: "root".into(),
            keys: vec![LoginKey::parse(&key).unwrap()],
            pin: HostKeyPin::Known(self.host_key()),
            via: None,
        }
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns whether a process runs. A process that has ended may remain as a zombie until it is waited for.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.trim_start().chars().next())
        .is_some_and(|state| state != 'Z')
}

/// Returns all descendants of a process.
fn descendants(pid: u32) -> Vec<u32> {
    let children = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let direct = children.split_whitespace().filter_map(|word| word.parse().ok());
    direct.flat_map(|child| descendants(child).into_iter().chain([child])).collect()
}
