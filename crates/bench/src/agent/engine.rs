//! The container engine to compare with, and a small image for it.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Variable with the engine's socket; `cargo xtask bench` starts a private engine.
const SOCKET_VARIABLE: &str = "WINDLASS_TEST_DOCKER";
const IMAGE: &str = "windlass-bench/busybox:1";

pub(crate) struct BenchEngine {
    pub(crate) socket: PathBuf,
    pub(crate) image: String,
}

impl BenchEngine {
    /// Creates an image with only a static busybox.
    pub(crate) fn from_environment(scratch: &Path) -> Result<Self> {
        let socket = std::env::var_os(SOCKET_VARIABLE)
            .with_context(|| format!("`{SOCKET_VARIABLE}` is not set to the socket of a container engine"))?;
        let engine = Self { socket: socket.into(), image: IMAGE.to_owned() };
        let (root, archive) = (scratch.join("image"), scratch.join("image.tar"));
        std::fs::create_dir_all(root.join("bin"))?;
        std::fs::copy("/usr/bin/busybox", root.join("bin/busybox"))
            .context("failed to copy busybox (package busybox-static)")?;
        for name in ["sh", "echo"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        check_output(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
        check_output(engine.docker().arg("import").arg(&archive).arg(IMAGE))?;
        Ok(engine)
    }

    /// Creates a bridge network, unless it exists. The engine has no default one.
    pub(crate) fn create_network(&self, name: &str) -> Result<()> {
        let mut inspect = self.docker();
        inspect.args(["network", "inspect", name]).stdout(Stdio::null()).stderr(Stdio::null());
        if inspect.status()?.success() {
            return Ok(());
        }
        check_output(self.docker().args(["network", "create", name]))
    }

    fn docker(&self) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", self.socket.display()));
        command
    }

    /// Runs `docker run` with `echo`: returns the time until the output, and until the command ended.
    pub(crate) fn run(&self, network: &[&str]) -> Result<(Duration, Duration)> {
        self.run_image(IMAGE, network)
    }

    /// Removes an image, so that the next start pulls it.
    pub(crate) fn remove_image(&self, image: &str) -> Result<()> {
        check_output(self.docker().args(["rmi", "--force", image]))
    }

    /// The same as [`Self::run`] with another image, which is pulled if the engine does not have it.
    pub(crate) fn run_image(&self, image: &str, network: &[&str]) -> Result<(Duration, Duration)> {
        let mut command = self.docker();
        command.args(["run", "--rm", "--network"]).args(network).args([image, "echo", "hello"]);
        let started = Instant::now();
        let mut child = command.stdout(Stdio::piped()).spawn().context("failed to start docker")?;
        let mut message = [0; 6];
        child
            .stdout
            .take()
            .context("no output")?
            .read_exact(&mut message)
            .context("docker run printed nothing")?;
        let line = started.elapsed();
        ensure!(child.wait()?.success(), "docker run failed");
        Ok((line, started.elapsed()))
    }
}

impl Drop for BenchEngine {
    fn drop(&mut self) {
        let _ = self.docker().args(["rmi", "--force", IMAGE]).stdout(Stdio::null()).status();
    }
}

fn check_output(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("failed to start {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
