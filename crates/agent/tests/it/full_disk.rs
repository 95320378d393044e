//! A host with a full disk: the tasks that fill it can still be ended and removed, also by a shim that starts then.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::json;
use windlass_agent::shim::journal::JournalEvent;
use windlass_api::agent::{runner::JobRecord, shim::TaskStatus};
use windlass_testkit::wait::{TIMEOUT, eventually_ok_async};

use crate::support::{
    leftover_check::{count_records, leftovers},
    shim::{CREDENTIAL, Setup, Shim, random_uuid},
};

/// A file system of a few megabytes.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: &Path) -> Self {
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), c"size=8m").unwrap();
        Self(path.to_owned())
    }

    /// Writes until the disk is full.
    fn fill(&self, file: &Path) {
        let mut file = fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
        for size in [64 * 1024, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
        if let Some(scratch) = self.0.parent() {
            let _ = fs::remove_dir_all(scratch);
        }
    }
}

/// The shim is dropped before its disk.
struct FullDiskHost {
    shim: Shim,
    disk: SmallDisk,
}

impl FullDiskHost {
    fn new() -> Self {
        let mut shim = Shim::start(Setup::process());
        shim.stop();
        let disk = SmallDisk::mount(&shim.home());
        shim.enrol(&shim.home(), &[CREDENTIAL]);
        shim.restart();
        Self { shim, disk }
    }

    /// Fills the disk until the journal cannot grow.
    async fn fill(&self, file: &Path) {
        let until = Instant::now() + TIMEOUT;
        loop {
            self.disk.fill(file);
            let call = format!("/api/tasks/{}/remove", random_uuid());
            if self.shim.client().epoch(1).post(&call, &json!({})).await.status == 500 {
                return;
            }
            assert!(Instant::now() < until, "the journal still grows");
        }
    }
}

#[tokio::test]
async fn f11_a_task_that_filled_the_disk_can_be_ended_and_removed_after_a_shim_restart() {
    let mut host = FullDiskHost::new();
    let id = host.shim.submit(&host.shim.spec("greedy"), 1).await;
    host.shim.wait_for(id, TaskStatus::Running).await;
    host.fill(&host.shim.home().join("tasks").join(id.to_string()).join("scratch/filling")).await;
    host.shim.kill();
    host.shim.restart();
    let shim = &host.shim;
    shim.wait_for(id, TaskStatus::Running).await;
    let client = shim.client().epoch(1);
    // It cannot be recorded, but happens.
    client.post(&format!("/api/tasks/{id}/terminate"), &json!({"timeout": 0})).await;
    shim.wait_for(id, TaskStatus::Terminated).await;
    eventually_ok_async("the task is removed", async || {
        let removed = client.post(&format!("/api/tasks/{id}/remove"), &json!({})).await;
        if removed.status == 200 { Ok(()) } else { Err(shim.log()) }
    })
    .await;
    assert_eq!(count_records(&shim.home(), id, |kind| *kind == JournalEvent::Removed), 1);
    let disk = format!("mount {}", shim.home().display());
    let mut left = leftovers(&shim.home(), &[id]).await;
    left.retain(|one| *one != disk);
    assert_eq!(left, Vec::<String>::new());
    // There is space again.
    let next = shim.submit(&shim.spec("next"), 1).await;
    shim.wait_for(next, TaskStatus::Running).await;
}

/// Only the reason of the end has to be recorded then.
#[tokio::test]
async fn f11_o2_a_job_that_fills_the_disk_with_output_fails_with_detail_no_disk() {
    let host = FullDiskHost::new();
    let shim = &host.shim;
    let id = shim.submit(&shim.spec("wordy"), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    let job = json!({"run": {"id": "0", "run_spec": {"run_name": "wordy"}},
        "job_spec": {"commands": ["/bin/sh", "-c", "yes fills the disk"]}});
    shim.play(id, &job).await;
    let last = eventually_ok_async("the job ends", async || {
        let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
        let last = record.states.last().filter(|last| last.state != "running");
        last.cloned().ok_or_else(|| format!("{record:?}\n{}", shim.log()))
    })
    .await;
    assert_eq!((last.state.as_str(), last.detail.as_deref()), ("failed", Some("no_disk")));
}
