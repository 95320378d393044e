//! Lifecycles of tasks with a runtime that the test controls. The real runtimes are tested with the binary.

mod calls;
mod disk;
mod fake;
mod gpus;
mod lifecycle;
mod restarts;

use std::{sync::Arc, time::Duration};

use windlass_api::agent::shim::{InstanceMount, TaskInfo, TaskSpec, TaskStatus, TerminateRequest};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{eventually_async, eventually_ok_async};
use windlass_testkit::{TempDir, temp_dir};

use self::fake::{FakeHost, RecordingObserver};
use super::*;
use crate::{
    host::gpu::{Gpu, Vendor},
    shim::journal::{Record, invariants},
};

pub(super) fn id(n: u128) -> SubmissionId {
    SubmissionId(uuid::Uuid::from_u128(n))
}

/// A host: its home, its containers, and the shim while it is up.
pub(super) struct TestHost {
    home: TempDir,
    fake: FakeHost,
    watcher: RecordingObserver,
    tasks: Option<Arc<Tasks>>,
    settings: TasksSettings,
}

impl TestHost {
    async fn new(name: &str) -> Self {
        let mut env = Self::stopped(name);
        env.start().await;
        env
    }

    /// Creates a host without a running shim.
    fn stopped(name: &str) -> Self {
        let home = temp_dir(name).unwrap();
        let gpus = (0..4).map(gpu).collect();
        let mut settings = TasksSettings::on_disk(home.path().to_owned(), gpus);
        settings.boot = "boot-1".to_owned();
        settings.answer_within = Duration::from_secs(2);
        Self { home, fake: FakeHost::default(), watcher: RecordingObserver::default(), tasks: None, settings }
    }

    async fn start(&mut self) {
        let runtime = Arc::new(self.fake.clone());
        let host = Arc::new(self.fake.clone());
        let watcher = Arc::new(self.watcher.clone());
        self.tasks = Some(Tasks::open(self.settings.clone(), runtime, host, watcher).await.unwrap());
    }

    /// Stops the shim like kill -9: without any notification.
    async fn kill(&mut self) {
        if let Some(tasks) = self.tasks.take() {
            tasks.close().await;
        }
    }

    async fn restart(&mut self) {
        self.kill().await;
        self.settings.pause_at = None;
        self.start().await;
    }

    fn tasks(&self) -> &Arc<Tasks> {
        self.tasks.as_ref().unwrap()
    }

    async fn submit(&self, n: u128) -> SubmissionId {
        self.tasks().submit(spec(n), Some(1)).await.unwrap();
        id(n)
    }

    #[track_caller]
    fn wait_for_status(
        &self,
        id: SubmissionId,
        status: TaskStatus,
    ) -> impl Future<Output = TaskInfo> + use<> {
        let tasks = Arc::clone(self.tasks());
        let what = format!("{id} is {status:?}");
        async move {
            eventually_ok_async(&what, async || {
                let info = tasks.info(id);
                info.filter(|info| info.status == status).ok_or_else(|| format!("{:?}", tasks.info(id)))
            })
            .await
        }
    }

    async fn wait_until(&self, what: &str, is_so: impl Fn(&FakeHost) -> bool) {
        eventually_async(what, async || is_so(&self.fake).then_some(())).await;
    }

    fn records(&self) -> Vec<Record> {
        journal::read(&self.home.path().join("journal")).unwrap().records
    }

    fn kinds(&self, id: SubmissionId) -> Vec<JournalEvent> {
        self.records()
            .into_iter()
            .filter(|record| record.submission == id)
            .map(|record| record.kind)
            .collect()
    }

    /// Checks all invariants of the journal, and that nothing runs twice or holds resources of others.
    #[track_caller]
    fn check(&self) {
        assert_eq!(invariants::violations(&self.records()), Vec::<String>::new());
        let state = self.fake.0.lock();
        assert!(state.starts.values().all(|count| *count == 1), "{:?}", state.starts);
    }

    /// Checks that no resource is held.
    #[track_caller]
    fn check_empty(&self) {
        self.check();
        assert_eq!(self.tasks().free_gpu_count(), 4);
        let state = self.fake.0.lock();
        assert!(state.keys.is_empty(), "{:?}", state.keys);
        assert!(state.mounts.is_empty(), "{:?}", state.mounts);
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        if let Some(tasks) = &self.tasks {
            tasks.closed.cancel();
        }
        // A file that was being written when the lifecycles were stopped may appear after the first attempt.
        for _ in 0..100 {
            if std::fs::remove_dir_all(&self.home).is_ok() || !self.home.path().exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        vendor: Vendor::Nvidia,
        id: format!("GPU-{index}"),
        index,
        name: "H100".to_owned(),
        memory_mib: 81920,
        compute_capability: None,
        devices: Vec::new(),
    }
}

/// Returns a task that needs every kind of resource.
pub(super) fn spec(n: u128) -> TaskSpec {
    let mut spec: TaskSpec = serde_json::from_value(serde_json::json!({
        "id": id(n).to_string(), "name": "train", "image_name": "debian:12", "gpu": 1,
        "host_ssh_user": "ubuntu", "host_ssh_keys": ["ssh-ed25519 AAAA"],
        "registry_username": "me", "registry_password": "canary-secret",
    }))
    .unwrap();
    spec.instance_mounts =
        vec![InstanceMount { instance_path: "/mnt".to_owned(), path: "/mnt".to_owned(), optional: false }];
    spec
}

pub(super) fn terminate_request(reason: &str, timeout: u64) -> TerminateRequest {
    TerminateRequest {
        termination_reason: reason.to_owned(),
        termination_message: "because".to_owned(),
        timeout,
    }
}
