//! Container engines for tests: the shared one, and private ones to be killed, frozen and restarted.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bollard::{API_DEFAULT_VERSION, Docker};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use windlass_testkit::wait::{eventually_async, eventually_ok_async, is_listening};

use super::{TempDir, temp_dir};

const SHARED_SOCKET_VARIABLE: &str = "WINDLASS_TEST_DOCKER";
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Socket of the engine that all tests share. It is never stopped, and a test only touches what it created itself.
pub(crate) fn shared_socket() -> PathBuf {
    match std::env::var_os(SHARED_SOCKET_VARIABLE) {
        Some(path) => path.into(),
        None => panic!(
            "{SHARED_SOCKET_VARIABLE} must name the socket of a container engine; `cargo xtask test` sets it"
        ),
    }
}

pub(crate) fn client(socket: &Path) -> Docker {
    // The oldest version in use: all engines support the calls of the tests.
    let version = bollard::ClientVersion { major_version: 1, minor_version: 41 };
    assert!(&version < API_DEFAULT_VERSION);
    Docker::connect_with_unix(&socket.to_string_lossy(), 120, &version).unwrap()
}

/// A private engine: containerd and dockerd are separate, so that dockerd can be killed and restarted while containers
/// continue. It has no bridge and does not change the firewall, so that several do not conflict.
pub(crate) struct PrivateEngine {
    containerd: Child,
    dockerd: Option<Child>,
    kind: EngineKind,
    scratch: TempDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    Plain,
    /// Containers outlive the engine.
    LiveRestore,
    /// Number of bytes for images and containers.
    SmallDisk(u64),
}

impl PrivateEngine {
    pub(crate) async fn start(kind: EngineKind) -> Self {
        let scratch = temp_dir("engine").unwrap();
        let dir = scratch.path();
        if let EngineKind::SmallDisk(size) = kind {
            let data = dir.join("data");
            fs::create_dir(&data).unwrap();
            let options = std::ffi::CString::new(format!("size={size}")).unwrap();
            rustix::mount::mount("tmpfs", &data, "tmpfs", rustix::mount::MountFlags::empty(), &*options)
                .unwrap();
        }
        let config = format!(
            "version = 2\nroot = \"{0}/c\"\nstate = \"{0}/s\"\ndisabled_plugins = \
             [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = \"{0}/containerd.sock\"\n",
            dir.display()
        );
        fs::write(dir.join("containerd.toml"), config).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(dir.join("containerd.toml"));
        let containerd = spawn(command, &dir.join("containerd.log"));
        let mut engine = Self { containerd, dockerd: None, kind, scratch };
        let socket = engine.scratch.path().join("containerd.sock");
        eventually_async("containerd listens", async || is_listening(&socket).then_some(())).await;
        engine.start_dockerd().await;
        engine
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.scratch.path().join("docker.sock")
    }

    /// Starts the engine, also after it was killed, and waits until it responds.
    pub(crate) async fn start_dockerd(&mut self) {
        let dir = self.scratch.path();
        let mut command = Command::new("dockerd");
        command.arg("--containerd").arg(dir.join("containerd.sock"));
        command.arg("--data-root").arg(dir.join("data")).arg("--exec-root").arg(dir.join("exec"));
        command.arg("--pidfile").arg(dir.join("docker.pid"));
        command.arg("-H").arg(format!("unix://{}", self.socket().display()));
        command.args(["--bridge=none", "--iptables=false", "--ip6tables=false", "--log-level=warn"]);
        if self.kind == EngineKind::LiveRestore {
            command.arg("--live-restore");
        }
        let _ = fs::remove_file(dir.join("docker.pid"));
        self.dockerd = Some(spawn(command, &dir.join("dockerd.log")));
        let socket = self.socket();
        eventually_ok_async("dockerd answers", async || {
            if socket.exists() {
                let engine = client(&socket);
                if matches!(tokio::time::timeout(Duration::from_secs(2), engine.ping()).await, Ok(Ok(_))) {
                    return Ok(());
                }
            }
            Err(self.log())
        })
        .await;
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("dockerd.log")).unwrap_or_default()
    }

    fn dockerd(&self) -> Pid {
        let child = self.dockerd.as_ref().unwrap();
        Pid::from_raw(i32::try_from(child.id()).unwrap())
    }

    /// Ends it like a power failure: containers continue.
    pub(crate) fn kill_dockerd(&mut self) {
        let mut child = self.dockerd.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends it like `systemctl stop`.
    pub(crate) async fn stop_dockerd(&mut self) {
        let mut child = self.dockerd.take().unwrap();
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
        eventually_async("dockerd ends", async || child.try_wait().unwrap()).await;
    }

    pub(crate) fn freeze(&self) {
        kill(self.dockerd(), Signal::SIGSTOP).unwrap();
    }

    pub(crate) fn thaw(&self) {
        kill(self.dockerd(), Signal::SIGCONT).unwrap();
    }
}

impl Drop for PrivateEngine {
    fn drop(&mut self) {
        let dir = self.scratch.path().to_owned();
        if self.dockerd.is_some() {
            // A frozen engine would not receive the call.
            let _ = kill(self.dockerd(), Signal::SIGCONT);
            remove_network(self.socket());
        }
        if let Some(mut child) = self.dockerd.take() {
            stop_child(&mut child);
        }
        // Containers that outlived the engine have helper processes with this directory in their arguments.
        for pid in processes_naming(&dir) {
            if pid.as_raw().cast_unsigned() != self.containerd.id() {
                let _ = kill(pid, Signal::SIGKILL);
            }
        }
        stop_child(&mut self.containerd);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
        let mut ours: Vec<&Path> = points.filter(|point| point.starts_with(&dir)).collect();
        ours.reverse();
        for point in ours {
            let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// Removes the bridge of tasks, which would outlive its engine as an interface of the host.
fn remove_network(socket: PathBuf) {
    let removed = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let removal = async { client(&socket).remove_network("windlass").await };
        let _ = runtime.block_on(async { tokio::time::timeout(SHUTDOWN_TIMEOUT, removal).await });
    });
    let _ = removed.join();
}

/// Sends SIGTERM, then kills.
pub(crate) fn stop_child(child: &mut Child) {
    let Ok(pid) = i32::try_from(child.id()) else { return };
    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            let _ = child.kill();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the processes with the directory in their arguments. It is a scratch directory, so they belong to the test.
fn processes_naming(dir: &Path) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let own = i32::try_from(std::process::id()).unwrap();
    let names = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&*dir.to_string_lossy())
    };
    pids.filter(|pid| *pid != own).filter(names).map(Pid::from_raw).collect()
}

pub(crate) fn spawn(mut command: Command, log: &Path) -> Child {
    let log = File::options().create(true).append(true).open(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let name = command.get_program().to_owned();
    command.spawn().unwrap_or_else(|error| panic!("start {}: {error}", name.display()))
}
