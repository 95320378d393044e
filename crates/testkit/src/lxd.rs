//! A real LXD server on this machine, with a network and the image of the tests; all removed by its guard.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{
    TempDir,
    wait::{eventually_ok, is_listening},
};

/// Alias of the image.
pub const IMAGE: &str = "windlass-test";
/// Environment variable with the directory of the image, which `cargo xtask test` builds.
pub const IMAGE_VARIABLE: &str = "WINDLASS_TEST_LXD_IMAGE";

pub struct LxdServer {
    dir: TempDir,
    daemon: Child,
    network: String,
}

impl LxdServer {
    /// Starts a server with a storage pool, a network and the image.
    ///
    /// # Panics
    /// If LXD is not installed or does not start, or if there is no image.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn start() -> Self {
        let image = std::env::var_os(IMAGE_VARIABLE).map(PathBuf::from);
        let image = image
            .expect("WINDLASS_TEST_LXD_IMAGE is not set: `cargo xtask test` builds the image and sets it");
        let dir = crate::temp_dir("lxd").expect("make the directory of LXD");
        let log = fs::File::create(dir.path().join("daemon.log")).expect("create the log of LXD");
        let daemon = Command::new("lxd")
            .args(["--group", "root"])
            .env("LXD_DIR", dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("share the log of LXD"))
            .stderr(log)
            .spawn()
            .expect("start lxd: is its package installed?");
        // An interface name has at most 15 characters.
        let mut random = [0_u8; 5];
        getrandom::fill(&mut random).expect("random bytes");
        let network = format!("wl{}", hex::encode(random));
        let server = Self { dir, daemon, network };
        // LXD itself finds no free subnet where it may not send pings.
        let subnet = format!("10.{}.{}.1/24", 128 + random[0] % 100, random[1]);
        server.set_up(&image, &subnet);
        server
    }

    fn set_up(&self, image: &Path, subnet: &str) {
        let socket = self.socket();
        eventually_ok("LXD listens", || if is_listening(&socket) { Ok(()) } else { Err(self.log()) });
        self.run(["storage", "create", "default", "dir"]);
        let network = self.network.as_str();
        let address = format!("ipv4.address={subnet}");
        self.run(["network", "create", network, &address, "ipv4.nat=false", "ipv6.address=none"]);
        self.run(["profile", "device", "add", "default", "root", "disk", "path=/", "pool=default"]);
        let link = format!("network={network}");
        self.run(["profile", "device", "add", "default", "eth0", "nic", &link]);
        let (metadata, root) = (image.join("metadata.tar.gz"), image.join("rootfs.squashfs"));
        self.run([
            OsStr::new("image"),
            OsStr::new("import"),
            metadata.as_os_str(),
            root.as_os_str(),
            OsStr::new("--alias"),
            OsStr::new(IMAGE),
        ]);
    }

    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("unix.socket")
    }

    /// Value of `url` in the settings of the backend.
    #[must_use]
    pub fn url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Listens for HTTPS on this port of the loopback address; returns the URL, and the file of the server's certificate.
    pub fn listen(&self, port: u16) -> (String, PathBuf) {
        self.run(["config", "set", "core.https_address", &format!("127.0.0.1:{port}")]);
        (format!("https://127.0.0.1:{port}"), self.dir.path().join("server.crt"))
    }

    /// Runs `lxc` and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    #[expect(clippy::panic, reason = "for tests")]
    pub fn run<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, args: I) -> String {
        let output = self.output(args);
        if !output.status.success() {
            panic!("lxc failed: {}\n{}", String::from_utf8_lossy(&output.stderr), self.log());
        }
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn output<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, args: I) -> Output {
        let mut command = Command::new("lxc");
        command.args(args).env("LXD_DIR", self.dir.path()).env("LXD_CONF", self.dir.path().join("client"));
        command.stdin(Stdio::null()).output().expect("start lxc: is its package installed?")
    }

    /// Names of all instances.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests")]
    pub fn instances(&self) -> Vec<String> {
        let list = self.run(["list", "--format", "json"]);
        let list: Value = serde_json::from_str(&list).expect("a list of instances in JSON");
        let names = list.as_array().into_iter().flatten().filter_map(|one| one["name"].as_str());
        names.map(str::to_owned).collect()
    }

    /// Last lines of the log.
    #[must_use]
    pub fn log(&self) -> String {
        let text = fs::read_to_string(self.dir.path().join("daemon.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    fn clean_up(&mut self) {
        let list = self.output(["list", "--format", "csv", "-c", "n"]);
        for name in String::from_utf8_lossy(&list.stdout).lines() {
            self.output(["delete", "--force", name]);
        }
        // Takes its DHCP server with it.
        self.output(["profile", "device", "remove", "default", "eth0"]);
        self.output(["network", "delete", &self.network]);
        if let Some(pid) = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.daemon.wait();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let inside = |line: &str| {
            let at = PathBuf::from(line.split(' ').nth(1)?);
            at.starts_with(self.dir.path()).then_some(at)
        };
        let mut inner: Vec<PathBuf> = mounts.lines().filter_map(inside).collect();
        inner.sort();
        for at in inner.iter().rev() {
            let _ = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Drop for LxdServer {
    fn drop(&mut self) {
        self.clean_up();
    }
}
