//! The runtime on a real container engine. The first process of these containers is a script of the test instead of the
//! runner.

mod end_to_end;
mod faults;
mod lifecycle;
mod limits;
mod networks;
mod podman;
mod pulls;
mod reachability;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use bollard::Docker as Engine;
use windlass_agent::{
    shim::{
        docker::{DockerRuntime, DockerSettings},
        runtime::{Exit, Handle, PolicyLimits, PreparedTask, ProgressCallback, Runtime, RuntimeError},
    },
    task_dir::{self, TaskDir},
};
use windlass_api::agent::shim::{NetworkMode, TaskSpec};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};

use crate::support::{self, TempDir, engine, images::Image, temp_dir};

const SCRIPT: &str = "script";
/// Connects to the cloud's metadata address as soon as the test permits it.
const CONNECT_TO_METADATA: &str = "cd /windlass/run; until [ -e go ]; do sleep 0.05; done
    timeout 3 wget -q -O - http://169.254.169.254/ > out 2>&1; exit 0";

/// A host with an engine: everything that it created is removed when it is dropped.
struct DockerHost {
    docker: DockerRuntime,
    engine: Engine,
    socket: PathBuf,
    scratch: TempDir,
}

impl DockerHost {
    async fn new() -> Self {
        Self::at(&engine::shared_socket(), |_| {}).await
    }

    async fn at(socket: &Path, change: impl FnOnce(&mut DockerSettings)) -> Self {
        let scratch = temp_dir("docker").unwrap();
        let settings = settings(socket, scratch.path(), change);
        let docker = eventually_ok_async("the engine answers", async || {
            match DockerRuntime::connect(settings.clone()).await {
                // An engine that has just started on a busy host.
                Err(error @ RuntimeError::Away { .. }) => Err(error),
                connected => Ok(connected.unwrap()),
            }
        })
        .await;
        Self { docker, engine: engine::client(socket), socket: socket.to_owned(), scratch }
    }

    /// Returns a task on the host's network whose container runs `script`.
    async fn task(&self, script: &str) -> PreparedTask {
        let image = Image::Busybox.ensure(&self.engine).await;
        self.task_with_image(&image, script)
    }

    fn task_with_image(&self, image: &str, script: &str) -> PreparedTask {
        let id = SubmissionId::from(uuid::Uuid::from_bytes(random()));
        let spec: TaskSpec = serde_json::from_value(serde_json::json!({
            "id": id, "name": "docker-test", "image_name": image, "container_user": "root", "network_mode": "host",
        }))
        .unwrap();
        let dir = TaskDir::new(self.scratch.path(), id);
        fs::create_dir_all(dir.run()).unwrap();
        fs::write(dir.run().join(SCRIPT), script).unwrap();
        let capabilities = ["CHOWN", "DAC_OVERRIDE", "SETUID", "SETGID", "KILL"].map(str::to_owned).to_vec();
        PreparedTask {
            spec,
            dir,
            gpus: Vec::new(),
            binds: Vec::new(),
            publish: Vec::new(),
            limits: PolicyLimits { pids: 256, new_privileges: false, capabilities },
            env: Vec::new(),
        }
    }

    /// Returns such a task on the bridge, with a port.
    async fn bridged_task(&self, script: &str) -> PreparedTask {
        let mut task = self.task(script).await;
        task.spec.network_mode = NetworkMode::Bridge;
        task.publish = vec![8000];
        task
    }

    async fn start(&self, task: &PreparedTask) -> Handle {
        let handle = self.docker.create(task).await.unwrap();
        self.docker.start(task, &handle).await.unwrap();
        handle
    }

    async fn wait(&self, task: &PreparedTask, handle: &Handle) -> Exit {
        tokio::time::timeout(TIMEOUT, self.docker.wait(task, handle)).await.unwrap().unwrap()
    }

    /// Runs a task to its end.
    async fn run(&self, task: &PreparedTask) -> Exit {
        let handle = self.start(task).await;
        self.wait(task, &handle).await
    }

    /// Connects to the cloud's metadata address after the start was reported, as a job does, and returns the result.
    async fn connect_to_metadata(&self, task: &PreparedTask) -> String {
        let handle = self.start(task).await;
        fs::write(task.dir.run().join("go"), "").unwrap();
        let exit = self.wait(task, &handle).await;
        assert_eq!(exit.code, Some(0), "{exit:?}");
        read(task, "out")
    }

    /// Runs a script to its end and returns the contents of `out` in the run directory.
    async fn message(&self, task: &PreparedTask) -> String {
        let exit = self.run(task).await;
        assert_eq!(exit.code, Some(0), "{exit:?}");
        read(task, "out")
    }
}

impl Drop for DockerHost {
    fn drop(&mut self) {
        // A separate thread, since the test's runtime may be ending.
        let docker = self.docker.clone();
        let home = self.scratch.path().to_owned();
        let cleaned = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for found in docker.found().await.unwrap_or_default() {
                    let dir = TaskDir::new(&home, found.task);
                    let _ = docker.remove(&dir, Some(&found.handle)).await;
                }
            });
        });
        let _ = cleaned.join();
    }
}

fn settings(socket: &Path, home: &Path, change: impl FnOnce(&mut DockerSettings)) -> DockerSettings {
    let mut settings = DockerSettings::new(socket.to_owned(), home.to_owned()).unwrap();
    settings.agent = support::agent().to_owned();
    settings.entrypoint = vec!["/bin/sh".into(), format!("{}/{SCRIPT}", task_dir::RUN_DIR_IN_CONTAINER)];
    change(&mut settings);
    settings
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

fn read(task: &PreparedTask, name: &str) -> String {
    fs::read_to_string(task.dir.run().join(name)).unwrap().trim().to_owned()
}

async fn wait_written(task: &PreparedTask, name: &str) {
    let path = task.dir.run().join(name);
    eventually_async(&format!("the task writes {name}"), async || path.exists().then_some(())).await;
}

fn ignore_progress() -> ProgressCallback {
    Arc::new(|_| {})
}

fn is_unavailable(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Away { .. })
}
