//! Watches the files of tasks and publishes an event when output grows or a job changes state. Several writes are
//! combined into one event.
//!
//! Also notifies the rest of the shim of changes of tasks: it is the observer of the task table.

use std::{
    collections::HashMap,
    io::{self, Read, Seek, SeekFrom},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use windlass_api::agent::{
    events::ShimEventKind,
    runner::JobState,
    shim::{TaskInfo, TaskStatus},
};
use windlass_model::id::SubmissionId;

use super::{events::EventLog, tasks::Observer};
use crate::{
    safe_open::DirHandle,
    spool::{Stream, Watcher},
    task_dir::{self, TaskDir},
};

/// Growth within this time is reported once.
const BATCH_DELAY: Duration = Duration::from_millis(20);
/// Fallback interval: a notification may be lost, or the kernel may have no watches left.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum size of the states file. A job has few states; a longer file was not written by the runner.
pub const STATES_BYTES_MAX: u64 = 256 * 1024;

/// Cheap to clone; all clones share one state.
#[derive(Clone)]
pub struct OutputWatcher {
    shared: Arc<Shared>,
}

struct Shared {
    home: std::path::PathBuf,
    events: EventLog,
    watcher: Watcher,
    watched: Mutex<HashMap<SubmissionId, WatchedTask>>,
    on_change: Box<dyn Fn(&TaskInfo) + Send + Sync>,
}

struct WatchedTask {
    /// Cancelled when nothing more will be written.
    ended: CancellationToken,
    cursor: Option<Arc<Mutex<FileCursor>>>,
}

impl OutputWatcher {
    /// `on_change` is called for every change of a task, in addition to the events.
    pub fn new(
        home: &std::path::Path,
        events: EventLog,
        on_change: impl Fn(&TaskInfo) + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared {
            home: home.to_owned(),
            events,
            watcher: Watcher::default(),
            watched: Mutex::new(HashMap::new()),
            on_change: Box::new(on_change),
        };
        Self { shared: Arc::new(shared) }
    }

    pub fn watcher(&self) -> Watcher {
        self.shared.watcher.clone()
    }

    /// Returns a token that is cancelled once the task has terminated: the files on disk are complete then.
    pub fn ended(&self, id: SubmissionId) -> CancellationToken {
        let watched = self.shared.watched.lock();
        watched.get(&id).map_or_else(CancellationToken::new, |watched| watched.ended.clone())
    }

    /// Watches the tasks that existed before this start.
    pub fn watch_existing(&self, tasks: &[TaskInfo]) {
        for info in tasks {
            self.on_status(info);
        }
    }

    fn on_status(&self, info: &TaskInfo) {
        match info.status {
            TaskStatus::Running => self.watch(info.id),
            TaskStatus::Terminated => self.end(info.id),
            TaskStatus::Queued
            | TaskStatus::Pending
            | TaskStatus::Preparing
            | TaskStatus::Pulling
            | TaskStatus::Creating => {}
        }
    }

    /// Starts to watch a task whose directory exists.
    fn watch(&self, id: SubmissionId) {
        let mut watched = self.shared.watched.lock();
        let entry = watched
            .entry(id)
            .or_insert_with(|| WatchedTask { ended: CancellationToken::new(), cursor: None });
        if entry.cursor.is_some() || entry.ended.is_cancelled() {
            return;
        }
        // A simulated host has no directories.
        let Ok(run) = DirHandle::open(&TaskDir::new(&self.shared.home, id).run()) else { return };
        let cursor = Arc::new(Mutex::new(FileCursor { id, run, job: 0, runner: 0, states: 0 }));
        entry.cursor = Some(Arc::clone(&cursor));
        let (events, watcher) = (self.shared.events.clone(), self.shared.watcher.clone());
        let ended = entry.ended.clone();
        tokio::spawn(async move {
            let mut wake = watcher.dir(&cursor.lock().run);
            loop {
                cursor.lock().publish_changes(&events);
                tokio::time::sleep(BATCH_DELAY).await;
                let woken = async {
                    match &mut wake {
                        Some(dir) => drop(dir.wake.changed().await),
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = woken => {}
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                    () = ended.cancelled() => return,
                }
            }
        });
    }

    /// Reads the files for the last time, before the end is reported.
    fn end(&self, id: SubmissionId) {
        let mut watched = self.shared.watched.lock();
        let entry = watched
            .entry(id)
            .or_insert_with(|| WatchedTask { ended: CancellationToken::new(), cursor: None });
        if let Some(cursor) = entry.cursor.take() {
            cursor.lock().publish_changes(&self.shared.events);
        }
        entry.ended.cancel();
    }
}

impl Observer for OutputWatcher {
    fn changed(&self, info: &TaskInfo) {
        self.on_status(info);
        (self.shared.on_change)(info);
        self.shared.events.publish(ShimEventKind::Task { info: info.clone() });
    }

    fn removed(&self, id: SubmissionId) {
        if let Some(watched) = self.shared.watched.lock().remove(&id) {
            watched.ended.cancel();
        }
        self.shared.events.publish(ShimEventKind::Gone { id });
    }
}

/// Positions in a task's files up to which events were published.
struct FileCursor {
    id: SubmissionId,
    run: DirHandle,
    job: u64,
    runner: u64,
    states: u64,
}

impl FileCursor {
    fn publish_changes(&mut self, events: &EventLog) {
        let id = self.id;
        for (stream, reported) in [(Stream::Job, &mut self.job), (Stream::Runner, &mut self.runner)] {
            let end = file_length(&self.run, stream.log_name());
            if end > *reported {
                *reported = end;
                events.publish(ShimEventKind::Log { id, stream: stream.as_str().to_owned(), end });
            }
        }
        // A file that cannot be read, or not yet, produces no event.
        let Ok((states, next)) = read_states(&self.run, self.states) else { return };
        self.states = next;
        for state in states {
            events.publish(ShimEventKind::Job { id, state });
        }
    }
}

fn file_length(run: &DirHandle, name: &str) -> u64 {
    run.file(name).and_then(|file| file.metadata()).map_or(0, |meta| meta.len())
}

/// Returns the job's states from an offset in the file, and the offset after the last complete line.
pub fn read_states(run: &DirHandle, from: u64) -> io::Result<(Vec<JobState>, u64)> {
    let mut file = run.file(task_dir::STATES)?;
    file.seek(SeekFrom::Start(from))?;
    let mut text = Vec::new();
    file.take(STATES_BYTES_MAX.saturating_sub(from)).read_to_end(&mut text)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    // Lines that are not states are skipped.
    let lines = text[..whole].split(|byte| *byte == b'\n');
    let states = lines.filter_map(|line| serde_json::from_slice(line).ok()).collect();
    Ok((states, from + whole as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shim::events::StreamItem;

    fn info(id: SubmissionId, status: &str) -> TaskInfo {
        let json = serde_json::json!({
            "id": id, "status": status, "termination_reason": "", "termination_message": "", "ports": null,
            "image_pull_progress": null, "container_name": "", "container_id": "", "gpus_ids": [],
        });
        serde_json::from_value(json).unwrap()
    }

    #[tokio::test]
    async fn states_and_output_are_published_before_the_end_of_the_task() {
        let home = windlass_testkit::temp_dir("growth").unwrap();
        let id = SubmissionId(uuid::Uuid::from_u128(5));
        let run = TaskDir::new(home.path(), id).run();
        std::fs::create_dir_all(&run).unwrap();
        let events = EventLog::new("b");
        let growth = OutputWatcher::new(home.path(), events.clone(), |_| {});
        growth.changed(&info(id, "running"));
        assert!(!growth.ended(id).is_cancelled());
        std::fs::write(run.join("job.log"), "hello").unwrap();
        let state = r#"{"state":"running","timestamp":1}"#;
        std::fs::write(run.join("states.jsonl"), format!("{state}\nnoise\n{state}\n{{\"state\":")).unwrap();
        growth.changed(&info(id, "terminated"));
        assert!(growth.ended(id).is_cancelled());
        let mut reader = events.reader(Some(0), None);
        let StreamItem::Events(reported) = reader.next().await else { panic!("events") };
        let reported: Vec<&str> = reported
            .iter()
            .map(|event| match &event.kind {
                ShimEventKind::Task { .. } => "task",
                ShimEventKind::Log { end, .. } => {
                    assert_eq!(*end, 5);
                    "log"
                }
                ShimEventKind::Job { state, .. } => state.state.as_str(),
                ShimEventKind::Reset { .. }
                | ShimEventKind::Gone { .. }
                | ShimEventKind::Health { .. }
                | ShimEventKind::Alive => "other",
            })
            .collect();
        assert_eq!(reported, ["task", "log", "running", "running", "task"]);
    }
}
