//! A private container engine with separate directories and a separate socket, stopped by its guard.
//!
//! containerd runs next to dockerd, not as its child: only then do containers survive a restart of dockerd, as on real
//! hosts. `setpriv` ties both to this process: they stop when it ends for any reason.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    process::{self, ChildGuard, ScratchDir},
    setup,
};

const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// `docker network ls` takes milliseconds, even on a loaded machine.
const HANG_TIMEOUT: &str = "30";
const STACKS_TIMEOUT: Duration = Duration::from_secs(10);
/// Functions that deadlock in Docker before 20.10.27 (moby issue 46661): no container starts after that.
const DEADLOCK_FUNCTIONS: [&str; 2] = ["processEndpointDelete", "getSvcRecords"];
/// Variable with the engine's socket, for tests and benchmarks.
pub(crate) const SOCKET_VARIABLE: &str = "WINDLASS_TEST_DOCKER";

pub(crate) struct Engine {
    pub(crate) socket: PathBuf,
    // Drop order: dockerd stops before containerd, both before their directory is deleted.
    _dockerd: ChildGuard,
    _containerd: ChildGuard,
    home: ScratchDir,
}

impl Engine {
    pub(crate) fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    fn start_with(options: &[&str]) -> Result<Self> {
        ensure!(setup::is_root()?, "a container engine requires root: run this command as root");
        let home = ScratchDir::new("engine")?;
        let at = |name: &str| home.path().join(name);
        std::fs::write(at("containerd.toml"), containerd_settings(home.path()))?;

        let mut containerd = ends_with_parent("containerd");
        containerd.arg("--config").arg(at("containerd.toml"));
        let mut containerd =
            ChildGuard::spawn(redirect_to_log(&mut containerd, &at("containerd.log"))?, "TERM")?;
        process::wait_until(&mut containerd, READY_TIMEOUT, "containerd listens", || {
            UnixStream::connect(at("containerd.sock")).is_ok()
        })?;

        let socket = at("docker.sock");
        let mut dockerd = ends_with_parent("dockerd");
        dockerd.arg("--containerd").arg(at("containerd.sock")).arg("--data-root").arg(at("data"));
        dockerd.arg("--exec-root").arg(at("exec")).arg("--pidfile").arg(at("docker.pid"));
        dockerd.arg("--host").arg(format!("unix://{}", socket.display()));
        // The default bridge belongs to the engine of the machine, if there is one.
        dockerd.args(["--bridge", "none", "--default-address-pool", "base=10.209.0.0/16,size=24"]);
        // Debian's Docker 20.10.24 can deadlock between containers that start and others that end at the same time.
        // Both sides hold their locks for less than a microsecond: on one thread they practically never conflict.
        dockerd.env("GOMAXPROCS", "1").args(options);
        let mut dockerd = ChildGuard::spawn(redirect_to_log(&mut dockerd, &at("dockerd.log"))?, "TERM")?;
        process::wait_until(&mut dockerd, READY_TIMEOUT, "dockerd listens", || is_answering(&socket))
            .with_context(|| {
                format!("failed to start dockerd; its log ends with: {}", last_lines(&at("dockerd.log")))
            })?;
        Ok(Self { socket, _dockerd: dockerd, _containerd: containerd, home })
    }

    /// Explains why the engine no longer responds: a cause of failed tests that is not a bug in them.
    pub(crate) fn explain_hang(&self) -> Option<String> {
        let host = format!("unix://{}", self.socket.display());
        if process::succeeds("timeout", &[HANG_TIMEOUT, "docker", "--host", &host, "network", "ls"]) {
            return None;
        }
        let stacks = self.stacks().unwrap_or_default();
        let known = DEADLOCK_FUNCTIONS.iter().all(|name| stacks.contains(name));
        let why = if known { "known deadlock of Docker before 20.10.27" } else { "unknown reason" };
        Some(format!("the container engine does not respond: {why}\n{stacks}"))
    }

    /// Returns the stacks of all goroutines, which dockerd writes on a signal.
    fn stacks(&self) -> Option<String> {
        let pid = std::fs::read_to_string(self.home.path().join("docker.pid")).ok()?;
        let began = Instant::now();
        process::run_for_stdout(Command::new("kill").args(["-USR1", pid.trim()])).ok()?;
        let mut before = String::new();
        while began.elapsed() < STACKS_TIMEOUT {
            std::thread::sleep(Duration::from_millis(200));
            let files = std::fs::read_dir(self.home.path().join("exec")).ok()?.flatten();
            let mut files = files.filter(|file| file.file_name().to_string_lossy().starts_with("goroutine"));
            let stacks =
                files.next().and_then(|file| std::fs::read_to_string(file.path()).ok()).unwrap_or_default();
            // The file is complete when it has stopped growing.
            if !stacks.is_empty() && stacks == before {
                return Some(stacks);
            }
            before = stacks;
        }
        None
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A container that is still running was left behind by a test; its mounts would outlive the directory.
        let docker = |args: &[&str]| {
            let mut command = Command::new("docker");
            command.arg("--host").arg(format!("unix://{}", self.socket.display())).args(args);
            process::run_for_stdout(&mut command)
        };
        let ids = docker(&["ps", "--all", "--quiet"]).unwrap_or_default();
        for id in ids.split_whitespace() {
            let _ = docker(&["rm", "--force", "--volumes", id]);
        }
        for id in docker(&["network", "ls", "--quiet", "--filter", "type=custom"]).unwrap_or_default().lines()
        {
            let _ = docker(&["network", "rm", id]);
        }
        let _ = &self.home;
    }
}

fn containerd_settings(home: &Path) -> String {
    let home = home.display();
    format!(
        "version = 2\nroot = \"{home}/containerd\"\nstate = \"{home}/containerd-state\"\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = \"{home}/containerd.sock\"\n"
    )
}

fn ends_with_parent(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(program).current_dir("/");
    command
}

fn redirect_to_log<'a>(command: &'a mut Command, log: &Path) -> Result<&'a mut Command> {
    let log = std::fs::File::create(log)?;
    Ok(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log))
}

fn is_answering(socket: &Path) -> bool {
    process::succeeds("docker", &["--host", &format!("unix://{}", socket.display()), "version"])
}

fn last_lines(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(3).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_docker_engine_responds_dumps_its_stacks_and_cleans_up() {
        // Two engines that set up one firewall at the same time fail: the engine of the other tests has it.
        let engine = Engine::start_with(&["--iptables=false", "--ip6tables=false"]).unwrap();
        assert_eq!(engine.explain_hang(), None);
        assert!(engine.stacks().unwrap().contains("goroutine 1 "));
        let (socket, home) = (engine.socket.clone(), engine.home.path().to_owned());
        assert!(is_answering(&socket));
        drop(engine);
        assert!(!home.exists());
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        assert!(!mounts.contains(home.to_str().unwrap()), "{mounts}");
    }
}
