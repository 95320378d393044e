//! Test hosts: network namespaces of this machine, each with a real OpenSSH server.
//!
//! ```text
//! let lab = Lab::start(2)?;                    // needs root, OpenSSH, iproute2, util-linux; sudo for `worker`
//! let host = lab.host(1);                      // counted from one, as their names h1, h2, …
//! host.addr(); host.login_key()?; host.host_key_line()?; lab.key_file();
//! host.run("ls /var/lib")?; host.processes()?; host.path("/var/lib/windlass");
//! host.partition()?; host.heal()?; host.reboot()?; host.hide()?; host.change_host_key()?;
//! ```
//!
//! A host has its own network, processes, name, users, control groups, `/etc`, `/var`, `/root`, `/home`, `/run` and
//! `/tmp`; the last two are empty after a reboot. The rest of the machine is readable. Users: `root`, [`WORKER`] who
//! may use sudo without a password, and [`GUEST`] who may not; the lab's one key is authorised for all three accounts.
//!
//! The first process of a host is its SSH server; [`Lab::with_systemd`] uses a real systemd instead, with no services
//! except the SSH server and those that a test adds.
//!
//! Labs of several tests and processes are separated by their number. A lab is removed by its guard; the remains of a
//! killed test are removed when the next lab starts.

mod cgroups;
pub mod engine;
mod host;
mod program;
pub mod registry;
mod systemd;

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

pub use self::host::{HostProcess, LabHost};
use self::program::{run, run_for_stdout, try_run};

/// May use sudo without a password.
pub const WORKER: &str = "worker";
/// Has no additional rights.
pub const GUEST: &str = "guest";

/// Maximum number of labs on one machine.
const LABS_MAX: u16 = 4096;
/// The networks of labs are `10.213.0.0/24` and above.
const NETWORK_PREFIX: [u8; 2] = [10, 213];
const HOSTS_MAX: usize = 200;
/// Offset of the host addresses: the first host has the next one.
const FIRST_HOST_OFFSET: u8 = 10;
/// Longer than any step takes, even on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A network of hosts.
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<LabHost>,
    site: LabNetwork,
}

/// First process of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostInit {
    Sshd,
    Systemd,
}

/// Identity of a lab.
#[derive(Clone, Debug)]
struct LabId {
    number: u16,
    dir: PathBuf,
}

/// The network and the files of the hosts; dropped after them.
#[derive(Debug)]
struct LabNetwork {
    place: LabId,
    /// A process that can acquire the lock knows that the lab is abandoned.
    _lock: fs::File,
}

impl Lab {
    /// Starts a lab with all hosts up.
    pub fn start(hosts: usize) -> Result<Self> {
        Self::start_with_init(hosts, HostInit::Sshd)
    }

    /// Starts a lab with systemd on each host.
    pub fn with_systemd(hosts: usize) -> Result<Self> {
        ensure!(Path::new(systemd::PROGRAM).exists(), "{} is missing", systemd::PROGRAM);
        Self::start_with_init(hosts, HostInit::Systemd)
    }

    fn start_with_init(hosts: usize, init: HostInit) -> Result<Self> {
        ensure!(hosts <= HOSTS_MAX, "a lab has at most {HOSTS_MAX} hosts");
        ensure!(run_for_stdout("id", &["-u"])? == "0", "a lab needs root: it makes network namespaces");
        for program in ["/usr/sbin/sshd", "/usr/bin/unshare", "/usr/bin/nsenter"] {
            ensure!(Path::new(program).exists(), "{program} is missing");
        }
        let mut lab = Self { hosts: Vec::new(), site: LabNetwork::claim(hosts)? };
        for number in 1..=hosts {
            lab.hosts.push(LabHost::install(&lab.site.place, number, hosts, init)?);
        }
        for host in &lab.hosts {
            host.boot()?;
        }
        for host in &lab.hosts {
            host.wait_for_sshd()?;
        }
        Ok(lab)
    }

    /// Returns a host, counted from one.
    ///
    /// # Panics
    ///
    /// If there is no such host.
    pub fn host(&self, number: usize) -> &LabHost {
        &self.hosts[number - 1]
    }

    pub fn hosts(&self) -> &[LabHost] {
        &self.hosts
    }

    /// Private key for all accounts of all hosts.
    pub fn key_file(&self) -> PathBuf {
        self.site.place.key_file()
    }

    /// Text of the private key and of its public half.
    pub fn key_pair(&self) -> Result<(String, String)> {
        let public = self.key_file().with_extension("pub");
        Ok((fs::read_to_string(self.key_file())?, fs::read_to_string(public)?.trim().to_owned()))
    }

    /// Network of all hosts, in CIDR notation.
    pub fn network(&self) -> String {
        format!("{}/24", self.site.place.address(0))
    }

    /// Address of this machine in the lab's network.
    pub fn gateway(&self) -> Ipv4Addr {
        self.site.place.address(1)
    }
}

impl LabId {
    fn new(number: u16) -> Self {
        Self { number, dir: std::env::temp_dir().join(format!("{DIR_PREFIX}{number}")) }
    }

    /// Prefix for interfaces, namespaces and groups; an interface name has at most 15 characters.
    fn name(&self) -> String {
        format!("wlab{}", self.number)
    }

    fn switch(&self) -> String {
        format!("{}-sw", self.name())
    }

    fn namespace(&self, host: usize) -> String {
        format!("{}-h{host}", self.name())
    }

    fn address(&self, last: u8) -> Ipv4Addr {
        let [high, low] = self.number.to_be_bytes();
        Ipv4Addr::new(NETWORK_PREFIX[0], NETWORK_PREFIX[1] + high, low, last)
    }

    fn host_address(&self, host: usize) -> Ipv4Addr {
        self.address(FIRST_HOST_OFFSET + u8::try_from(host).unwrap_or(u8::MAX - FIRST_HOST_OFFSET))
    }

    fn key_file(&self) -> PathBuf {
        self.dir.join("key")
    }
}

const DIR_PREFIX: &str = "windlass-lab-";

impl LabNetwork {
    /// Claims a free number and creates the network of a lab.
    fn claim(hosts: usize) -> Result<Self> {
        // One process at a time: the cleanup must not remove a lab that is being created.
        let all = fs::File::create(std::env::temp_dir().join("windlass-lab.lock"))?;
        all.lock()?;
        remove_stale_labs()?;
        let mut random = [0u8; 2];
        getrandom::fill(&mut random).context("draw a number")?;
        let first = u16::from_be_bytes(random) % LABS_MAX;
        let mut numbers = (0..LABS_MAX).map(|step| (first + step) % LABS_MAX);
        let free = numbers.find(|number| fs::create_dir(&LabId::new(*number).dir).is_ok());
        let Some(number) = free else { bail!("{LABS_MAX} labs are in use") };
        let place = LabId::new(number);
        let lock = fs::File::create(place.dir.join("lock"))?;
        lock.lock()?;
        let site = Self { place, _lock: lock };
        site.make_network(hosts)?;
        let key = site.place.key_file().display().to_string();
        run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", &key])?;
        Ok(site)
    }

    /// Creates the network. The switch has a separate namespace, so that this machine's rules for bridged packets do
    /// not apply to it.
    fn make_network(&self, hosts: usize) -> Result<()> {
        let place = &self.place;
        let (name, switch) = (place.name(), place.switch());
        let ip = |words: &str| run("ip", &words.split(' ').collect::<Vec<_>>());
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add br0 type bridge forward_delay 0"))?;
        ip(&format!("-n {switch} link set br0 up"))?;
        ip(&format!("link add {name} type veth peer name uplink netns {switch}"))?;
        ip(&format!("-n {switch} link set uplink master br0 up"))?;
        ip(&format!("addr add {}/24 dev {name}", place.address(1)))?;
        ip(&format!("link set {name} up"))?;
        for host in 1..=hosts {
            let (namespace, address) = (place.namespace(host), place.host_address(host));
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {switch} link add h{host} type veth peer name eth0 netns {namespace}"))?;
            ip(&format!("-n {switch} link set h{host} master br0 up"))?;
            ip(&format!("-n {namespace} addr add {address}/24 dev eth0"))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {namespace} route add default via {}", place.address(1)))?;
        }
        Ok(())
    }
}

impl Drop for LabNetwork {
    fn drop(&mut self) {
        remove_lab(&self.place);
    }
}

/// Removes labs of ended processes.
fn remove_stale_labs() -> Result<()> {
    for entry in fs::read_dir(std::env::temp_dir())?.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(DIR_PREFIX)?.parse().ok());
        let Some(number) = number else { continue };
        let place = LabId::new(number);
        let is_free = match fs::File::open(place.dir.join("lock")) {
            Ok(lock) => lock.try_lock().is_ok(),
            Err(_) => true,
        };
        if is_free {
            remove_lab(&place);
        }
    }
    Ok(())
}

/// Removes everything of a lab, also of an incomplete one.
fn remove_lab(place: &LabId) {
    let prefix = format!("{}-", place.name());
    let spaces = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let spaces = spaces.filter_map(|entry| entry.file_name().into_string().ok());
    for space in spaces.filter(|space| space.starts_with(&prefix)) {
        program::wait_until(STEP_TIMEOUT, || {
            let inside = run_for_stdout("ip", &["netns", "pids", &space]).unwrap_or_default();
            let inside: Vec<&str> = inside.split_whitespace().collect();
            if !inside.is_empty() {
                let _ = try_run("kill", &[&["-9"], inside.as_slice()].concat());
            }
            inside.is_empty()
        });
        let _ = try_run("ip", &["netns", "del", &space]);
    }
    let _ = try_run("ip", &["link", "del", &place.name()]);
    cgroups::remove(&prefix);
    let _ = fs::remove_dir_all(&place.dir);
}
