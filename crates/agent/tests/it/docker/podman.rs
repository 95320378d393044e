//! The same runtime on Podman's service, as far as this host supports Podman.

use std::{
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use windlass_agent::shim::runtime::{FoundState, Runtime};
use windlass_testkit::wait::{eventually_async, is_listening};

use super::{CONNECT_TO_METADATA, DockerHost, limits::check_mounts, read, wait_written};
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
        Self::start_with(podman).await
    }

    /// A service in a mount namespace of its own, to which mounts of the host do not propagate.
    async fn start_in_own_namespace() -> Self {
        Self::start_with(|dir| {
            let podman = podman(dir);
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private"]).arg(podman.get_program());
            command.args(podman.get_args());
            command
        })
        .await
    }

    async fn start_with(command: impl FnOnce(&Path) -> Command) -> Self {
        let scratch = temp_dir("podman").unwrap();
        let dir = scratch.path();
        let mut command = command(dir);
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
        // Its interface outlives the service.
        let _ = podman(self.path()).args(["network", "rm", "--force", "windlass"]).output();
        stop_child(&mut self.child);
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

fn iptables(words: &str) -> String {
    let output = Command::new("iptables").args(["-w", "3", "-t", "mangle"]).args(words.split(' ')).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
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

#[tokio::test]
async fn podman_tasks_on_the_bridge_reach_neither_each_other_nor_cloud_metadata() {
    let service = PodmanService::start().await;
    let host = DockerHost::at(&service.path().join("podman.sock"), |_| {}).await;
    let script = "cd /windlass/run; mkdir /www; echo me > /www/name; httpd -p 8000 -h /www";
    let served = host.bridged_task(&format!("{script}; hostname -i > address; touch up; sleep 600")).await;
    let running = host.start(&served).await;
    wait_written(&served, "up").await;
    let address = read(&served, "address");
    // The loopback proves that the request itself works.
    let ask = "ask() { timeout 3 wget -q -O - http://$1:8000/name || echo none; }";
    let script = format!("{script}; {ask}; ask 127.0.0.1 > out; ask {address} >> out; exit 0");
    let neighbour = host.bridged_task(&script).await;
    let network = host.engine.inspect_network("windlass", None).await.unwrap();
    let subnet = network.ipam.unwrap().config.unwrap().remove(0).subnet.unwrap();
    let rules = iptables("-S FORWARD");
    let rules: Vec<&str> = rules.lines().filter(|rule| rule.contains(&format!("-s {subnet} "))).collect();
    let message = host.message(&neighbour).await;
    let mut refusals = Vec::new();
    for task in [host.task(CONNECT_TO_METADATA).await, host.bridged_task(CONNECT_TO_METADATA).await] {
        refusals.push(host.connect_to_metadata(&task).await);
        host.docker.remove(&task.dir, None).await.unwrap();
    }
    host.docker.stop(&served.dir, &running, Duration::from_secs(1)).await.unwrap();
    for task in [&served, &neighbour] {
        host.docker.remove(&task.dir, None).await.unwrap();
    }
    for rule in &rules {
        iptables(&rule.replacen("-A ", "-D ", 1));
    }
    assert!(rules.iter().any(|rule| rule.contains("-d 169.254.169.254/32 -j DROP")), "{rules:?}");
    assert_eq!(message, "me\nnone", "{address}: {rules:?}");
    assert!(refusals.iter().all(|message| message.contains("Operation not permitted")), "{refusals:?}");
}

#[tokio::test]
async fn podman_tasks_cannot_create_namespaces() {
    let service = PodmanService::start().await;
    let host = DockerHost::at(&service.path().join("podman.sock"), |_| {}).await;
    // The filter of Podman itself permits it.
    let script =
        "cd /windlass/run; unshare -U true 2> /dev/null && echo made > out || echo refused > out; exit 0";
    let task = host.task(script).await;
    assert_eq!(host.message(&task).await, "refused");
    host.docker.remove(&task.dir, None).await.unwrap();
}

#[tokio::test]
async fn podman_mounts_directories_without_set_user_id_programs_and_devices() {
    let service = PodmanService::start().await;
    // Podman does not bind the mounts below a directory.
    check_mounts(&DockerHost::at(&service.path().join("podman.sock"), |_| {}).await, false).await;
}

#[tokio::test]
async fn mounts_are_restricted_for_an_engine_in_another_mount_namespace() {
    let service = PodmanService::start_in_own_namespace().await;
    check_mounts(&DockerHost::at(&service.path().join("podman.sock"), |_| {}).await, false).await;
}
