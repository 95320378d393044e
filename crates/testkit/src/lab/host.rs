//! One host of a lab.

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;

use super::{
    GUEST, HOSTS_MAX, HostInit, LabId, STEP_TIMEOUT, WORKER, cgroups,
    program::{run, run_for_stdout, wait_until},
    systemd,
};
use crate::without_engine::{HIDE_ENGINE, HIDE_OCI_PROGRAMS};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Directories of a host that survive its reboot.
const PERSISTENT_DIRS: [&str; 4] = ["etc", "var", "root", "home"];
/// Files of this machine's `/etc` that a host needs: accounts, permissions, libraries.
const ETC_FILES: [&str; 24] = [
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "default",
    "environment",
    "group",
    "gshadow",
    "host.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "pam.d",
    "passwd",
    "profile",
    "security",
    "shadow",
    "shells",
    "sudo.conf",
    "sudoers",
];
const WORKER_ID: u32 = 2000;
const GUEST_ID: u32 = 2001;

/// A host. Its processes end with it.
#[derive(Debug)]
pub struct LabHost {
    place: LabId,
    number: usize,
    init: HostInit,
    /// Process that keeps the host's namespaces alive, while it is up.
    keeper: Mutex<Option<Child>>,
}

/// A process on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostProcess {
    /// Process ID in the namespace of this machine, not of the host.
    pub pid: u32,
    /// Command line with arguments.
    pub command: String,
}

impl LabHost {
    /// Writes the host's files.
    pub(super) fn install(place: &LabId, number: usize, all: usize, init: HostInit) -> Result<Self> {
        let host = Self { place: place.clone(), number, init, keeper: Mutex::new(None) };
        let dir = host.dir();
        for name in PERSISTENT_DIRS {
            fs::create_dir_all(dir.join(name))?;
        }
        let etc = dir.join("etc").display().to_string();
        let needed =
            ETC_FILES.iter().map(|name| format!("/etc/{name}")).filter(|path| Path::new(path).exists());
        let needed: Vec<String> = needed.collect();
        let needed = needed.iter().map(String::as_str);
        run("cp", &["-a"].into_iter().chain(needed).chain([etc.as_str()]).collect::<Vec<_>>())?;
        for name in ["lib", "log", "tmp", "spool", "cache", "empty"] {
            fs::create_dir_all(dir.join("var").join(name))?;
        }
        symlink("/run", dir.join("var/run"))?;
        fs::create_dir_all(dir.join("etc/ssh"))?;
        let listed = (1..=all.min(HOSTS_MAX)).map(|n| format!("{} h{n}\n", place.host_address(n)));
        let hosts = format!("127.0.0.1 localhost\n{}", listed.collect::<String>());
        fs::write(dir.join("etc/hosts"), hosts)?;
        if init == HostInit::Systemd {
            systemd::install(&dir)?;
        }
        // Jobs of most tests write files of their host.
        fs::create_dir_all(dir.join("etc/windlass"))?;
        fs::write(dir.join("etc/windlass/policy.yml"), "processes: own\n")?;
        host.make_host_key()?;
        fs::write(dir.join("etc/ssh/sshd_config"), SSHD_CONFIG)?;
        host.add_user("root", 0, Path::new("root"))?;
        host.add_user(WORKER, WORKER_ID, &Path::new("home").join(WORKER))?;
        host.add_user(GUEST, GUEST_ID, &Path::new("home").join(GUEST))?;
        fs::create_dir_all(dir.join("etc/sudoers.d"))?;
        let rule = dir.join("etc/sudoers.d").join(WORKER);
        fs::write(&rule, format!("{WORKER} ALL=(ALL) NOPASSWD: ALL\n"))?;
        fs::set_permissions(&rule, fs::Permissions::from_mode(0o440))?;
        Ok(host)
    }

    fn add_user(&self, name: &str, id: u32, home: &Path) -> Result<()> {
        let (dir, at) = (self.dir(), self.dir().join(home));
        fs::create_dir_all(at.join(".ssh"))?;
        let public = fs::read(self.place.key_file().with_extension("pub"))?;
        fs::write(at.join(".ssh/authorized_keys"), public)?;
        run("chown", &["-R", &format!("{id}:{id}"), &at.display().to_string()])?;
        if id == 0 {
            return Ok(());
        }
        let append = |file: &str, line: String| -> Result<()> {
            let mut file = fs::OpenOptions::new().append(true).open(dir.join(file))?;
            Ok(file.write_all(line.as_bytes())?)
        };
        append("etc/passwd", format!("{name}:x:{id}:{id}::/{}:/bin/bash\n", home.display()))?;
        append("etc/group", format!("{name}:x:{id}:\n"))?;
        append("etc/shadow", format!("{name}:*:19000:0:99999:7:::\n"))
    }

    fn make_host_key(&self) -> Result<()> {
        let file = self.dir().join("etc/ssh/host_key");
        let _ = fs::remove_file(&file);
        let file = file.display().to_string();
        run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-C", "", "-f", &file])
    }

    /// Starts the host's first process, which becomes its SSH server.
    pub(super) fn boot(&self) -> Result<()> {
        let parts = cgroups::create(&self.place.namespace(self.number));
        let mut script = String::from("set -e\n");
        let aside = self.dir().join("aside");
        fs::create_dir_all(&aside)?;
        let aside = aside.display();
        for part in &parts {
            let (mount, at) = (part.mount.display(), part.part.display());
            script += &format!("echo 0 > {}/cgroup.procs\n", part.first.display());
            // The whole hierarchy is hidden, because programs use the first matching entry in the list of mounts.
            script +=
                &format!("mount --bind {at} {aside}\numount -l {mount}\nmount --move {aside} {mount}\n");
        }
        let (hide, exec) = match self.init {
            HostInit::Sshd => (String::new(), "exec /usr/sbin/sshd -D -e\n".to_owned()),
            HostInit::Systemd => systemd::boot_script(&self.dir()),
        };
        script += &hide;
        for name in PERSISTENT_DIRS {
            script += &format!("mount --bind {}/{name} /{name}\n", self.dir().display());
        }
        // Directory for programs that administrators, and other agents, install.
        let own = self.dir().join("local-bin");
        fs::create_dir_all(&own)?;
        script += &format!("mount --bind {} /usr/local/bin\n", own.display());
        // Each boot has a unique ID.
        fs::write(self.dir().join("boot_id"), format!("{}\n", random_uuid()?))?;
        script += &format!("mount --bind {}/boot_id /proc/sys/kernel/random/boot_id\n", self.dir().display());
        script += &format!(
            "hostname {}\nmount -t tmpfs tmpfs /run\nmkdir /run/sshd /run/lock\nmount -t tmpfs -o mode=1777 tmpfs /tmp\n\
             mount -o remount,bind,ro /\ncd /\n{exec}",
            self.name()
        );
        fs::write(self.dir().join("boot"), script)?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir().join("log"))?;
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.place.namespace(self.number)));
        command.args([
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]);
        command.arg("/bin/sh").arg(self.dir().join("boot"));
        command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        *self.keeper.lock() = Some(command.spawn().context("start a host")?);
        Ok(())
    }

    pub(super) fn wait_for_sshd(&self) -> Result<()> {
        let up = || TcpStream::connect_timeout(&SocketAddr::new(self.addr(), 22), CONNECT_TIMEOUT).is_ok();
        let inside = || self.run("ss -Hlnt sport = :22").is_ok_and(|out| !out.stdout.is_empty());
        let is_up = wait_until(STEP_TIMEOUT, || up() || inside());
        ensure!(is_up, "{} does not come up: {}", self.name(), self.log());
        Ok(())
    }

    /// Name on the host itself: `h1`, `h2`, …
    pub fn name(&self) -> String {
        format!("h{}", self.number)
    }

    pub fn addr(&self) -> IpAddr {
        self.place.host_address(self.number).into()
    }

    /// Text of the private key for its accounts.
    pub fn login_key(&self) -> Result<String> {
        Ok(fs::read_to_string(self.place.key_file())?)
    }

    /// Host key: one line as in `known_hosts`, without the host.
    pub fn host_key_line(&self) -> Result<String> {
        let line = fs::read_to_string(self.dir().join("etc/ssh/host_key.pub"))?;
        Ok(line.trim().to_owned())
    }

    /// Path of a host's file on this machine: below `/etc`, `/var`, `/root` or `/home`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir().join(path.trim_start_matches('/'))
    }

    /// Runs a shell command on the host as root, without SSH; works without the network.
    pub fn run(&self, command: &str) -> Result<Output> {
        let pid = self.first()?.to_string();
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--"]);
        nsenter.args(["/bin/sh", "-c", command]).stdin(Stdio::null());
        nsenter.output().context("run a command on a host")
    }

    /// Hides the container engines of this machine from the host until its next boot, as if none was installed; on request
    /// also `crun` and `runc`.
    pub fn hide_engine(&self, with_oci_programs: bool) -> Result<()> {
        let hide = if with_oci_programs { "yes" } else { "" };
        let script = format!("{HIDE_OCI_PROGRAMS}={hide}; set -- /run/without-engine\n{HIDE_ENGINE}");
        let output = self.run(&script)?;
        ensure!(output.status.success(), "{}: {}", self.name(), String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Processes of the host, including the SSH server.
    pub fn processes(&self) -> Result<Vec<HostProcess>> {
        let own = fs::read_link(format!("/proc/{}/ns/pid", self.first()?))?;
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if fs::read_link(entry.path().join("ns/pid")).is_ok_and(|space| space == own) {
                let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let command = String::from_utf8_lossy(&command).replace('\0', " ").trim().to_owned();
                found.push(HostProcess { pid, command });
            }
        }
        Ok(found)
    }

    /// Blocks all traffic of the host.
    pub fn partition(&self) -> Result<()> {
        self.set_switch_port("down")
    }

    pub fn heal(&self) -> Result<()> {
        self.set_switch_port("up")
    }

    fn set_switch_port(&self, to: &str) -> Result<()> {
        let port = self.name();
        run("ip", &["-n", &self.place.switch(), "link", "set", &port, to])
    }

    /// Makes the host unreachable for this machine, but not for other hosts.
    pub fn hide(&self) -> Result<()> {
        let space = self.place.namespace(self.number);
        let here: Ipv4Addr = self.place.address(1);
        run("ip", &["-n", &space, "route", "add", "blackhole", &format!("{here}/32")])
    }

    /// Ends all processes of the host at once; it stays down until [`Self::power_on`].
    pub fn power_off(&self) -> Result<()> {
        let first = self.first();
        let Some(mut keeper) = self.keeper.lock().take() else { return Ok(()) };
        // When the first process of a namespace ends, the kernel ends all others before it.
        let killed = first.and_then(|pid| run("kill", &["-9", &pid.to_string()]));
        if killed.is_err() {
            keeper.kill()?;
        }
        keeper.wait()?;
        // A real machine loses its groups too.
        cgroups::remove(&self.place.namespace(self.number));
        Ok(())
    }

    pub fn power_on(&self) -> Result<()> {
        ensure!(self.keeper.lock().is_none(), "{} is up", self.name());
        self.boot()?;
        self.wait_for_sshd()
    }

    pub fn reboot(&self) -> Result<()> {
        self.power_off()?;
        self.power_on()
    }

    /// Changes the host key, as if another machine used the address.
    pub fn change_host_key(&self) -> Result<()> {
        self.make_host_key()?;
        self.reboot()
    }

    fn dir(&self) -> PathBuf {
        self.place.dir.join(self.name())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir().join("log")).unwrap_or_default()
    }

    /// Process ID of the host's first process.
    fn first(&self) -> Result<u32> {
        let Some(keeper) = self.keeper.lock().as_ref().map(Child::id) else {
            bail!("{} is down", self.name())
        };
        let children = format!("/proc/{keeper}/task/{keeper}/children");
        let first = run_for_stdout("cat", &[&children])?;
        first.parse().with_context(|| format!("{} has no first process: {}", self.name(), self.log()))
    }
}

impl Drop for LabHost {
    fn drop(&mut self) {
        let _ = self.power_off();
    }
}

fn random_uuid() -> Result<uuid::Uuid> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("draw a number")?;
    Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
}

const SSHD_CONFIG: &str = "\
Port 22
ListenAddress 0.0.0.0
HostKey /etc/ssh/host_key
AuthorizedKeysFile .ssh/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxStartups 200
MaxSessions 200
PermitRootLogin yes
Subsystem sftp internal-sftp
UseDNS no
";
