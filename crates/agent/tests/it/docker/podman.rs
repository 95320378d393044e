//! The same runtime on Podman's service, as far as this host supports Podman.

use std::{
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use windlass_agent::shim::runtime::{FoundState, Runtime};
use windlass_testkit::wait::{eventually_async, is_listening};

use super::{DockerHost, read, wait_written};
use crate::support::{
    TempDir,
    engine::{client, spawn, stop_child},
    temp_dir,
};

/// A private service, with private storage.
struct PodmanService {
    child: Child,
    scratch: TempDir,
}

impl PodmanService {
    async fn start() -> Self {
        let scratch = temp_dir("podman").unwrap();
        let dir = scratch.path();
        let mut command = Command::new("podman");
        command.arg("--root").arg(dir.join("root")).arg("--runroot").arg(dir.join("run"));
        command.arg("--tmpdir").arg(dir.join("tmp")).args([
            "--storage-driver",
            "vfs",
            "--cgroup-manager",
            "cgroupfs",
        ]);
        command.args(["--runtime", "runc", "--events-backend", "file"]);
        command
            .args(["system", "service", "--time", "0"])
            .arg(format!("unix://{}/podman.sock", dir.display()));
        let child = spawn(command, &dir.join("podman.log"));
        let socket = dir.join("podman.sock");
        let service = Self { child, scratch };
        eventually_async("podman listens", async || is_listening(&socket).then_some(())).await;
        // The first response with new storage is slow.
        client(&socket).version().await.unwrap();
        service
    }

    fn path(&self) -> &Path {
        self.scratch.path()
    }
}

impl Drop for PodmanService {
    fn drop(&mut self) {
        stop_child(&mut self.child);
    }
}

#[tokio::test]
async fn docker_runtime_runs_tasks_over_podman() {
    let service = PodmanService::start().await;
    let host = DockerHost::at(&service.path().join("podman.sock"), |_| {}).await;
    let task = host.task("echo first >&2; echo $WINDLASS_TASK_ID > /windlass/run/out; exit 7").await;
    host.docker.pull(&task, None, super::ignore_progress()).await.unwrap();
    let handle = host.docker.create(&task).await.unwrap();
    assert_eq!(host.docker.create(&task).await.unwrap(), handle);
    assert_eq!(host.docker.found().await.unwrap()[0].state, FoundState::Created);
    assert_eq!(host.docker.start(&task, &handle).await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (Some(7), None));
    assert_eq!(exit.tail, ["first"]);
    assert_eq!(read(&task, "out"), task.spec.id.to_string());
    host.docker.start(&task, &handle).await.unwrap();
    assert_eq!(host.docker.found().await.unwrap()[0].state, FoundState::Ended, "not run again");
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();

    let long = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&long).await;
    wait_written(&long, "up").await;
    host.docker.stop(&long.dir, &handle, Duration::from_secs(1)).await.unwrap();
    assert_eq!(host.wait(&long, &handle).await.lost, None);
    host.docker.remove(&long.dir, None).await.unwrap();
    assert_eq!(host.docker.found().await.unwrap(), []);
}
