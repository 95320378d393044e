//! Container runtimes beside the Docker of the tests: a private Podman, and images for the runtime without an engine.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use windlass_testkit::{
    TempDir, temp_dir,
    wait::{eventually_async, is_listening},
};

use crate::test_env::{HostMode, TestEnv, engine_socket};

/// A private service of Podman, with private storage.
pub(crate) struct PodmanService {
    child: Child,
    dir: TempDir,
    /// Held until the service has ended: two of them could choose one subnet for their networks at the same time.
    _only_one: fs::File,
}

impl PodmanService {
    pub(crate) async fn start() -> Self {
        let only_one = fs::File::create(std::env::temp_dir().join("windlass-e2e-podman.lock")).unwrap();
        only_one.lock().unwrap();
        let dir = temp_dir("podman").unwrap();
        let mut command = podman(dir.path());
        command
            .args(["system", "service", "--time", "0"])
            .arg(format!("unix://{}/podman.sock", dir.path().display()));
        let log = fs::File::create(dir.path().join("podman.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let service = Self { child, dir, _only_one: only_one };
        let socket = service.socket();
        eventually_async("podman listens", async || is_listening(&socket).then_some(())).await;
        service
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("podman.sock")
    }

    /// A directory with a program `podman` that has this service's storage and networks.
    pub(crate) fn program_dir(&self) -> PathBuf {
        let dir = self.dir.path().join("bin");
        fs::create_dir_all(&dir).unwrap();
        let command = podman(self.dir.path());
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        // The search path contains this directory first.
        let program =
            ["/usr/bin/podman", "/usr/local/bin/podman"].into_iter().find(|path| Path::new(path).exists());
        let script = format!("#!/bin/sh\nexec {} {} \"$@\"\n", program.unwrap(), words.join(" "));
        let path = dir.join("podman");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        dir
    }
}

impl Drop for PodmanService {
    fn drop(&mut self) {
        // Its containers, its interface and the agent's firewall rules outlive the service.
        let _ = podman(self.dir.path()).args(["rm", "--all", "--force", "--time", "0"]).output();
        let format = "{{range .Subnets}}{{.Subnet}}{{end}}";
        let subnet =
            podman(self.dir.path()).args(["network", "inspect", "--format", format, "windlass"]).output();
        let subnet = subnet
            .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
            .unwrap_or_default();
        let rules = format!(
            "[ -n '{subnet}' ] && iptables -w 3 -t mangle -S FORWARD | grep -e '-s {subnet} ' | sed 's/^-A/-D/' | \
             while read rule; do iptables -w 3 -t mangle $rule; done"
        );
        let _ = Command::new("sh").args(["-c", &rules]).output();
        let _ = podman(self.dir.path()).args(["network", "rm", "--force", "windlass"]).output();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program, with private storage and networks.
fn podman(dir: &Path) -> Command {
    let mut command = Command::new("podman");
    command.arg("--root").arg(dir.join("root")).arg("--runroot").arg(dir.join("run"));
    command.arg("--tmpdir").arg(dir.join("tmp")).arg("--network-config-dir").arg(dir.join("networks"));
    command.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
    command.args(["--runtime", "runc", "--events-backend", "file"]);
    command
}

/// Images of the Docker engine as archives, which the runtime without an engine reads.
pub(crate) struct ImageArchives(TempDir);

impl ImageArchives {
    pub(crate) fn new() -> Self {
        Self(temp_dir("image-archives").unwrap())
    }

    /// Saves an image, and returns its name for a task.
    pub(crate) fn save(&self, image: &str) -> String {
        let path = self.0.path().join(image.replace(['/', ':'], "-")).with_extension("tar");
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", engine_socket().display()));
        let output = command.args(["save", "-o"]).arg(&path).arg(image).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // An agent that is not root reads it, too.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        format!("docker-archive:{}", path.display())
    }

    /// Starts a server whose machine runs containers without an engine, and may read these archives.
    pub(crate) async fn start_server(&self) -> TestEnv {
        self.start(TestEnv::new_unstarted(HostMode::Processes)).await
    }

    /// The same with a server, and so an agent, that is not root.
    pub(crate) async fn start_unprivileged_server(&self) -> TestEnv {
        self.start(TestEnv::new_unprivileged()).await
    }

    async fn start(&self, env: TestEnv) -> TestEnv {
        let policy = self.0.path().join("policy.yml");
        fs::write(&policy, format!("mounts: [{}]\n", self.0.path().display())).unwrap();
        let mut env = env
            .with_env("WINDLASS_SERVER_LOCAL_RUNTIME", "any-oci")
            .with_env("WINDLASS_AGENT_POLICY", policy);
        env.start().await;
        env
    }
}
