//! The log store of this process, with its open logs: those that are being copied or followed.
//!
//! Nothing is kept in memory for any other log. Followers are notified of every append made through this process.
//! Appends of other replicas are found by polling.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;
use windlass_model::id::{ProjectId, RunId};

use super::{Log, LogChunk, LogFuture, LogRange, LogStore};

/// Cheap to share; one per process.
pub struct NotifyingLogStore {
    store: Arc<dyn LogStore>,
    open: Arc<OpenLogTable>,
}

type OpenLogTable = Mutex<HashMap<Log, Arc<OpenLogState>>>;

struct OpenLogState {
    /// Allows one copy of a log at a time; the others wait for it.
    copying: tokio::sync::Mutex<()>,
    /// True if growth was reported since the last read of the host.
    received: AtomicBool,
    news: watch::Sender<LogStatus>,
}

/// State of an open log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogStatus {
    /// End of the log when it was last appended to or polled.
    pub end: u64,
    /// Result of the job, once it has ended: nothing is appended any more.
    pub over: Option<JobResult>,
}

/// Result of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobResult {
    pub status: &'static str,
    pub exit_status: Option<i64>,
    pub termination_reason: Option<String>,
}

/// Handle of an open log. The log is closed when the last handle is dropped.
pub(super) struct OpenLog {
    log: Log,
    state: Arc<OpenLogState>,
    table: Arc<OpenLogTable>,
}

impl std::fmt::Debug for NotifyingLogStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("open", &self.open.lock().len()).finish_non_exhaustive()
    }
}

impl NotifyingLogStore {
    pub fn new(store: Arc<dyn LogStore>) -> Self {
        Self { store, open: Arc::default() }
    }

    /// Number of logs that this process copies or follows.
    pub fn open_log_count(&self) -> usize {
        self.open.lock().len()
    }

    /// Subscribes to changes of a log.
    pub fn follow(&self, log: &Log) -> LogSubscription {
        let open = self.open(log);
        LogSubscription { news: open.state.news.subscribe(), _open: open }
    }

    /// The logs that are followed and whose job has not ended.
    pub(super) fn followed(&self) -> Vec<Log> {
        let table = self.open.lock();
        let waited =
            |state: &OpenLogState| state.news.receiver_count() > 0 && state.news.borrow().over.is_none();
        table.iter().filter(|(_, state)| waited(state)).map(|(log, _)| *log).collect()
    }

    pub(super) fn open(&self, log: &Log) -> OpenLog {
        let mut table = self.open.lock();
        let state = table.entry(*log).or_insert_with(|| {
            let news = watch::Sender::default();
            Arc::new(OpenLogState {
                copying: tokio::sync::Mutex::default(),
                received: AtomicBool::new(false),
                news,
            })
        });
        OpenLog { log: *log, state: Arc::clone(state), table: Arc::clone(&self.open) }
    }

    /// Notifies followers of the end of the log.
    pub(super) fn notify(&self, log: &Log, end: u64) {
        if let Some(state) = self.open.lock().get(log) {
            state.news.send_if_modified(|news| {
                let grew = end > news.end;
                news.end = end.max(news.end);
                grew
            });
        }
    }

    /// Notifies followers that the job has ended and nothing more is appended.
    pub(super) fn publish_job_result(&self, log: &Log, over: JobResult) {
        if let Some(state) = self.open.lock().get(log) {
            state.news.send_if_modified(|news| news.over.replace(over).is_none());
        }
    }
}

impl OpenLog {
    pub(super) async fn copying(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.state.copying.lock().await
    }

    /// Records that the log grew. Returns whether this is the first report since the last read of the host.
    pub(super) fn mark_grown(&self) -> bool {
        !self.state.received.swap(true, Ordering::SeqCst)
    }

    /// Makes the next report of growth start another copy.
    pub(super) fn clear_grown(&self) {
        self.state.received.store(false, Ordering::SeqCst);
    }
}

impl Drop for OpenLog {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        // Two references: the table's and this one. No other can be created while the table is locked.
        if let Entry::Occupied(entry) = table.entry(self.log)
            && Arc::ptr_eq(entry.get(), &self.state)
            && Arc::strong_count(&self.state) == 2
        {
            entry.remove();
        }
    }
}

/// A subscription to one log.
pub struct LogSubscription {
    news: watch::Receiver<LogStatus>,
    _open: OpenLog,
}

impl LogSubscription {
    /// The present state; [`Follow::changed`] waits for a later one.
    pub fn news(&mut self) -> LogStatus {
        self.news.borrow_and_update().clone()
    }

    pub async fn changed(&mut self) {
        if self.news.changed().await.is_err() {
            // The sender lives as long as this subscription.
            std::future::pending::<()>().await;
        }
    }
}

impl LogStore for NotifyingLogStore {
    fn append_to_files<'a>(
        &'a self,
        log: &'a Log,
        offset: u64,
        at: i64,
        bytes: &'a [u8],
    ) -> LogFuture<'a, u64> {
        Box::pin(async move {
            let end = self.store.append_to_files(log, offset, at, bytes).await?;
            self.notify(log, end);
            Ok(end)
        })
    }

    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64> {
        self.store.end(log)
    }

    fn read<'a>(&'a self, log: &'a Log, range: LogRange) -> LogFuture<'a, Vec<LogChunk>> {
        self.store.read(log, range)
    }

    fn sync<'a>(&'a self, log: &'a Log) -> LogFuture<'a, ()> {
        self.store.sync(log)
    }

    fn remove(&self, project: ProjectId, run: RunId) -> LogFuture<'_, ()> {
        self.store.remove(project, run)
    }

    fn poll_interval(&self) -> Duration {
        self.store.poll_interval()
    }

    fn flush(&self) -> BoxFuture<'_, io::Result<()>> {
        self.store.flush()
    }

    fn check(&self) -> BoxFuture<'_, io::Result<()>> {
        self.store.check()
    }
}
