//! A private container engine that can be killed, stopped, frozen and restarted.
//!
//! containerd runs next to dockerd, so that containers survive while dockerd is down. There is no bridge and no
//! firewall rule, so that several engines do not conflict.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{TempDir, wait::is_listening};

use super::program::{run, try_run, wait_until};

const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// File that fills the disk of an engine with a small disk.
const FILLER_FILE: &str = "filler";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    Plain,
    /// Containers survive the engine.
    LiveRestore,
    /// Disk size for images and containers, in megabytes.
    SmallDisk(u64),
}

#[derive(Debug)]
pub struct Engine {
    containerd: Child,
    dockerd: Option<Child>,
    kind: EngineKind,
    dir: TempDir,
}

impl Engine {
    pub fn start(kind: EngineKind) -> Result<Self> {
        let temp = crate::temp_dir("lab-engine")?;
        let dir = temp.path();
        if let EngineKind::SmallDisk(size) = kind {
            let data = dir.join("data");
            fs::create_dir(&data)?;
            let at = data.display().to_string();
            run("mount", &["-t", "tmpfs", "-o", &format!("size={size}m"), "tmpfs", &at])?;
        }
        let settings = format!(
            "version = 2\nroot = \"{0}/c\"\nstate = \"{0}/s\"\ndisabled_plugins = \
             [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = \"{0}/containerd.sock\"\n",
            dir.display()
        );
        fs::write(dir.join("containerd.toml"), settings)?;
        let mut command = ends_with_parent("containerd");
        command.arg("--config").arg(dir.join("containerd.toml"));
        let containerd = spawn(&mut command, &dir.join("containerd.log"))?;
        let mut engine = Self { containerd, dockerd: None, kind, dir: temp };
        let socket = engine.dir.path().join("containerd.sock");
        ensure!(wait_until(START_TIMEOUT, || is_listening(&socket)), "containerd does not come up");
        engine.start_dockerd()?;
        Ok(engine)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    /// Starts the engine, also after it was killed, and waits until it responds.
    pub fn start_dockerd(&mut self) -> Result<()> {
        let dir = self.dir.path();
        let mut command = ends_with_parent("dockerd");
        command.arg("--containerd").arg(dir.join("containerd.sock"));
        command.arg("--data-root").arg(dir.join("data")).arg("--exec-root").arg(dir.join("exec"));
        command.arg("--pidfile").arg(dir.join("docker.pid"));
        command.arg("-H").arg(format!("unix://{}", self.socket().display()));
        command.args(["--bridge=none", "--iptables=false", "--ip6tables=false", "--log-level=warn"]);
        if self.kind == EngineKind::LiveRestore {
            command.arg("--live-restore");
        }
        let _ = fs::remove_file(dir.join("docker.pid"));
        let log = dir.join("dockerd.log");
        self.dockerd = Some(spawn(&mut command, &log)?);
        let up = || self.docker(&["version"]).is_ok();
        let message = || fs::read_to_string(&log).unwrap_or_default();
        ensure!(wait_until(START_TIMEOUT, up), "dockerd does not come up: {}", message());
        Ok(())
    }

    /// Runs `docker` with these arguments and returns its output.
    pub fn docker(&self, args: &[&str]) -> Result<String> {
        let host = format!("unix://{}", self.socket().display());
        super::program::run_for_stdout("docker", &[&["--host", &host], args].concat())
    }

    /// Kills dockerd as a power cut would; containers continue.
    pub fn kill_dockerd(&mut self) -> Result<()> {
        let mut child = self.dockerd.take().context("dockerd is down")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Stops dockerd as `systemctl stop` would.
    pub fn stop_dockerd(&mut self) -> Result<()> {
        let mut child = self.dockerd.take().context("dockerd is down")?;
        run("kill", &["-TERM", &child.id().to_string()])?;
        ensure!(wait_until(STOP_TIMEOUT, || !matches!(child.try_wait(), Ok(None))), "dockerd does not end");
        Ok(())
    }

    /// Fills the rest of its disk, until [`Engine::free_disk`].
    pub fn fill(&self) -> Result<()> {
        let mut file = File::create(self.dir.path().join("data").join(FILLER_FILE))?;
        let chunk = [0; 4096];
        loop {
            match file.write_all(&chunk) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub fn free_disk(&self) -> Result<()> {
        Ok(fs::remove_file(self.dir.path().join("data").join(FILLER_FILE))?)
    }

    pub fn freeze(&self) -> Result<()> {
        self.signal("-STOP")
    }

    pub fn thaw(&self) -> Result<()> {
        self.signal("-CONT")
    }

    fn signal(&self, name: &str) -> Result<()> {
        let pid = self.dockerd.as_ref().context("dockerd is down")?.id();
        run("kill", &[name, &pid.to_string()])
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A frozen engine would not respond.
        let _ = self.thaw();
        let ids = self.docker(&["ps", "--all", "--quiet"]).unwrap_or_default();
        for id in ids.split_whitespace() {
            let _ = self.docker(&["rm", "--force", "--volumes", id]);
        }
        let _ = self.docker(&["network", "rm", "windlass"]);
        let _ = self.stop_dockerd();
        if let Some(mut child) = self.dockerd.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Containers that survived the engine are held by helper processes with this directory in their arguments.
        for pid in processes_naming(self.dir.path()) {
            if pid != self.containerd.id() {
                let _ = try_run("kill", &["-9", &pid.to_string()]);
            }
        }
        let _ = try_run("kill", &["-TERM", &self.containerd.id().to_string()]);
        if !wait_until(STOP_TIMEOUT, || !matches!(self.containerd.try_wait(), Ok(None))) {
            let _ = self.containerd.kill();
            let _ = self.containerd.wait();
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        let mut ours: Vec<&str> =
            points.filter(|point| Path::new(point).starts_with(self.dir.path())).collect();
        ours.reverse();
        for point in ours {
            let _ = try_run("umount", &["-l", point]);
        }
    }
}

/// Returns a command that ends with this process, for any reason.
fn ends_with_parent(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(program).current_dir("/");
    command
}

fn spawn(command: &mut Command, log: &Path) -> Result<Child> {
    let log = File::options().create(true).append(true).open(log)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("start {:?}", command.get_program()))
}

/// Returns the processes with the directory in their arguments. Its name is random, so they belong to this engine.
fn processes_naming(dir: &Path) -> Vec<u32> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let names = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&*dir.to_string_lossy())
    };
    pids.filter(|pid| *pid != own).filter(names).collect()
}
