//! Containers without an engine: the same behaviour as with one, and what is different. The first process of these
//! containers is a script of the test instead of the runner.

mod confinement;
mod devices;
mod end_to_end;
mod kills;
mod lifecycle;
mod limits;
mod networks;
mod pulls;
mod rootless;

use std::{fs, path::PathBuf, sync::Arc};

use windlass_agent::{
    shim::{
        oci::{OciRuntime, OciSettings},
        runtime::{Exit, Handle, PolicyLimits, PreparedTask, ProgressCallback, Runtime},
    },
    task_dir::{self, TaskDir},
};
use windlass_api::agent::shim::{NetworkMode, TaskSpec};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{TIMEOUT, eventually_async};

use crate::support::{self, TempDir, images::Image, leftover_check, oci, shim::random_uuid, temp_dir};

const SCRIPT: &str = "script";

/// A host without an engine: everything that it created is removed when it is dropped.
struct OciHost {
    oci: OciRuntime,
    /// Home of the shim.
    home: PathBuf,
    scratch: TempDir,
}

impl OciHost {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut OciSettings)) -> Self {
        let scratch = temp_dir("oci").unwrap();
        let oci = open_runtime(&scratch, change);
        Self { oci, home: scratch.path().to_owned(), scratch }
    }

    /// A host whose home is a directory below `scratch`.
    fn at(scratch: TempDir, home: PathBuf) -> Self {
        let oci = open_runtime(&scratch, |settings| settings.home.clone_from(&home));
        Self { oci, home, scratch }
    }

    /// Returns a task whose container runs `script`, with its image pulled.
    async fn task(&self, script: &str) -> PreparedTask {
        self.task_with_image(Image::Busybox, script).await
    }

    /// Returns a task with a separate network, whose port 8000 is published.
    async fn bridged_task(&self, script: &str) -> PreparedTask {
        let mut task = self.task(script).await;
        task.spec.network_mode = NetworkMode::Bridge;
        task.publish = vec![8000];
        task
    }

    /// Opens the runtime again, as the next shim does.
    fn reopen(&self) -> OciRuntime {
        open_runtime(&self.scratch, |_| {})
    }

    async fn task_with_image(&self, image: Image, script: &str) -> PreparedTask {
        let task = self.task_named(&oci::serve_image(image), script);
        self.oci.pull(&task, None, ignore_progress()).await.unwrap();
        task
    }

    fn task_named(&self, image: &str, script: &str) -> PreparedTask {
        let id = SubmissionId(random_uuid());
        let spec: TaskSpec = serde_json::from_value(serde_json::json!({
            "id": id, "name": "oci-test", "image_name": image, "container_user": "root", "network_mode": "host",
        }))
        .unwrap();
        let dir = TaskDir::new(&self.home, id);
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

    async fn start(&self, task: &PreparedTask) -> Handle {
        let handle = self.oci.create(task).await.unwrap();
        self.oci.start(task, &handle).await.unwrap();
        handle
    }

    async fn wait(&self, task: &PreparedTask, handle: &Handle) -> Exit {
        tokio::time::timeout(TIMEOUT, self.oci.wait(task, handle)).await.unwrap().unwrap()
    }

    /// Runs a task to its end.
    async fn run(&self, task: &PreparedTask) -> Exit {
        let handle = self.start(task).await;
        self.wait(task, &handle).await
    }

    /// Runs a script to its end and returns the contents of `out` in the run directory.
    async fn message(&self, task: &PreparedTask) -> String {
        let exit = self.run(task).await;
        assert_eq!(exit.code, Some(0), "{exit:?}");
        read(task, "out")
    }

    /// Removes the task and checks that nothing of it is left on the host.
    async fn remove(&self, task: &PreparedTask) {
        self.oci.remove(&task.dir, None).await.unwrap();
        fs::remove_dir_all(task.dir.root()).unwrap();
        eventually_async("nothing is left over", async || {
            leftover_check::leftovers(self.scratch.path(), &[task.spec.id]).await.is_empty().then_some(())
        })
        .await;
    }
}

impl Drop for OciHost {
    fn drop(&mut self) {
        // A separate thread, since the test's runtime may be ending.
        let runtime = self.oci.clone();
        let home = self.home.clone();
        let cleaned = std::thread::spawn(move || {
            let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            executor.block_on(async {
                for found in runtime.found().await.unwrap_or_default() {
                    let _ = runtime.remove(&TaskDir::new(&home, found.task), Some(&found.handle)).await;
                }
            });
        });
        let _ = cleaned.join();
    }
}

fn open_runtime(scratch: &TempDir, change: impl FnOnce(&mut OciSettings)) -> OciRuntime {
    let mut settings = OciSettings::new(scratch.path().to_owned(), oci::require_program()).unwrap();
    settings.agent = support::agent().to_owned();
    settings.entrypoint = vec!["/bin/sh".into(), format!("{}/{SCRIPT}", task_dir::RUN_DIR_IN_CONTAINER)];
    change(&mut settings);
    OciRuntime::open(settings).unwrap()
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
