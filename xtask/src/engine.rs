//! A private container engine: own directories, own socket, gone with its guard.
//!
//! containerd runs beside dockerd, not below it: only then do containers survive a restart of dockerd, as they
//! do on real hosts. Both are tied to our life by `setpriv`: when this process dies in whatever way, they stop.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{
    process::{self, Guarded, Scratch},
    setup,
};

const READY_WITHIN: Duration = Duration::from_secs(60);
/// How tests and benchmarks learn where the engine listens.
pub(crate) const VARIABLE: &str = "WINDLASS_TEST_DOCKER";

pub(crate) struct Engine {
    pub(crate) socket: PathBuf,
    // Order matters: dockerd stops before containerd, both before their directory goes.
    _dockerd: Guarded,
    _containerd: Guarded,
    home: Scratch,
}

impl Engine {
    pub(crate) fn start() -> Result<Self> {
        ensure!(setup::is_root()?, "a container engine needs root: run this command as root");
        let home = Scratch::new("engine")?;
        let at = |name: &str| home.path().join(name);
        std::fs::write(at("containerd.toml"), containerd_settings(home.path()))?;

        let mut containerd = tied("containerd");
        containerd.arg("--config").arg(at("containerd.toml"));
        let mut containerd = Guarded::spawn(quiet(&mut containerd, &at("containerd.log"))?, "TERM")?;
        process::wait_until(&mut containerd, READY_WITHIN, "containerd listens", || {
            UnixStream::connect(at("containerd.sock")).is_ok()
        })?;

        let socket = at("docker.sock");
        let mut dockerd = tied("dockerd");
        dockerd.arg("--containerd").arg(at("containerd.sock")).arg("--data-root").arg(at("data"));
        dockerd.arg("--exec-root").arg(at("exec")).arg("--pidfile").arg(at("docker.pid"));
        dockerd.arg("--host").arg(format!("unix://{}", socket.display()));
        // The default bridge belongs to the machine's own engine, if it has one.
        dockerd.args(["--bridge", "none", "--default-address-pool", "base=10.209.0.0/16,size=24"]);
        let mut dockerd = Guarded::spawn(quiet(&mut dockerd, &at("dockerd.log"))?, "TERM")?;
        process::wait_until(&mut dockerd, READY_WITHIN, "dockerd listens", || answers(&socket))
            .with_context(|| format!("dockerd said: {}", last_lines(&at("dockerd.log"))))?;
        Ok(Self { socket, _dockerd: dockerd, _containerd: containerd, home })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A container still running here is one that a test left behind; its mounts would outlive the directory.
        let docker = |args: &[&str]| {
            let mut command = Command::new("docker");
            command.arg("--host").arg(format!("unix://{}", self.socket.display())).args(args);
            process::read(&mut command)
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

fn tied(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(program).current_dir("/");
    command
}

fn quiet<'a>(command: &'a mut Command, log: &Path) -> Result<&'a mut Command> {
    let log = std::fs::File::create(log)?;
    Ok(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log))
}

fn answers(socket: &Path) -> bool {
    process::answers("docker", &["--host", &format!("unix://{}", socket.display()), "version"])
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
    fn a_private_docker_engine_answers_and_leaves_nothing_behind() {
        let engine = Engine::start().unwrap();
        let (socket, home) = (engine.socket.clone(), engine.home.path().to_owned());
        assert!(answers(&socket));
        drop(engine);
        assert!(!home.exists());
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        assert!(!mounts.contains(home.to_str().unwrap()), "{mounts}");
    }
}
