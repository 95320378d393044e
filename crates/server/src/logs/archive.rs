//! The log store of this process: what is kept, who copies at the moment, and who waits for more.
//!
//! A log is *open* here while somebody copies or follows it; nothing is remembered of any other. Whoever follows is
//! told of every append made through here. Appends of other replicas are seen by looking.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::watch;
use windlass_model::id::{ProjectId, RunId};

use super::{Answer, Log, Piece, Range, Store};

/// Cheap to share; one per process.
pub struct Archive {
    store: Arc<dyn Store>,
    open: Arc<Table>,
}

type Table = Mutex<HashMap<Log, Arc<State>>>;

struct State {
    /// One copy of a log at a time; the others wait for it.
    copying: tokio::sync::Mutex<()>,
    /// Somebody heard of more since the last look.
    heard: AtomicBool,
    /// Where the log ended when it was last appended to.
    end: watch::Sender<u64>,
}

/// An open log. It is closed with the last of them.
pub(super) struct Open {
    log: Log,
    state: Arc<State>,
    table: Arc<Table>,
}

impl std::fmt::Debug for Archive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("open", &self.open.lock().len()).finish_non_exhaustive()
    }
}

impl Archive {
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, open: Arc::default() }
    }

    /// How many logs somebody copies or follows here.
    pub fn open_logs(&self) -> usize {
        self.open.lock().len()
    }

    /// Tells of appends to this log from now on.
    pub fn follow(&self, log: &Log) -> Follow {
        let open = self.open(log);
        Follow { end: open.state.end.subscribe(), _open: open }
    }

    pub(super) fn open(&self, log: &Log) -> Open {
        let mut table = self.open.lock();
        let state = table.entry(*log).or_insert_with(|| {
            let end = watch::Sender::new(0);
            Arc::new(State { copying: tokio::sync::Mutex::default(), heard: AtomicBool::new(false), end })
        });
        Open { log: *log, state: Arc::clone(state), table: Arc::clone(&self.open) }
    }

    fn tell(&self, log: &Log, end: u64) {
        if let Some(state) = self.open.lock().get(log) {
            // Nobody may listen: then nobody is told.
            state.end.send_if_modified(|known| {
                let grew = end > *known;
                *known = end.max(*known);
                grew
            });
        }
    }
}

impl Open {
    pub(super) async fn copying(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.state.copying.lock().await
    }

    /// Whether this is the first to hear of more since the last look.
    pub(super) fn hear(&self) -> bool {
        !self.state.heard.swap(true, Ordering::SeqCst)
    }

    /// Whoever hears of more from now on needs another look.
    pub(super) fn look(&self) {
        self.state.heard.store(false, Ordering::SeqCst);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        // The table's and this one; nobody can get another while the table is locked.
        if let Entry::Occupied(entry) = table.entry(self.log)
            && Arc::ptr_eq(entry.get(), &self.state)
            && Arc::strong_count(&self.state) == 2
        {
            entry.remove();
        }
    }
}

/// News of one log.
pub struct Follow {
    end: watch::Receiver<u64>,
    _open: Open,
}

impl Follow {
    /// Returns when this process has appended since the last call.
    pub async fn grown(&mut self) {
        if self.end.changed().await.is_err() {
            // The sender lives as long as this.
            std::future::pending::<()>().await;
        }
    }
}

impl Store for Archive {
    fn append<'a>(&'a self, log: &'a Log, offset: u64, at: i64, bytes: &'a [u8]) -> Answer<'a, u64> {
        Box::pin(async move {
            let end = self.store.append(log, offset, at, bytes).await?;
            self.tell(log, end);
            Ok(end)
        })
    }

    fn end<'a>(&'a self, log: &'a Log) -> Answer<'a, u64> {
        self.store.end(log)
    }

    fn read<'a>(&'a self, log: &'a Log, range: Range) -> Answer<'a, Vec<Piece>> {
        self.store.read(log, range)
    }

    fn sync<'a>(&'a self, log: &'a Log) -> Answer<'a, ()> {
        self.store.sync(log)
    }

    fn remove(&self, project: ProjectId, run: RunId) -> Answer<'_, ()> {
        self.store.remove(project, run)
    }
}
