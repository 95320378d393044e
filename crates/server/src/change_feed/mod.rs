//! Feed of changes: one task per server reads new events, builds the rows that they concern once, and passes them to all
//! readers.
//!
//! On Postgres numbers of events are drawn before the commit, so an event may become visible after one with a higher
//! number. The numbers between are remembered as gaps and looked for until they appear or are too old to belong to an
//! open transaction.

mod batch;
mod reader;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::broadcast,
    time::{Instant, sleep},
};
use windlass_api::{changes::FeedEvent, overview::Summary};
use windlass_model::id::{ProjectId, UserId};

pub(crate) use self::reader::stream;
use crate::{
    app::App,
    db::{DbError, changes},
    error::Error,
};

/// Interval at which new events are read. Events of one object within it become one change.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Longer than any transaction of the server.
const GAP_MAX_AGE: Duration = Duration::from_secs(60);
/// With more gaps, or more new events at once, readers start again.
const GAPS_MAX: usize = 2000;
const EVENTS_MAX: i64 = 2000;
/// Numbers below the newest one that may still appear when the feed starts or a reader reconnects.
const LOOK_BACK: i64 = 200;
/// Batches that a slow reader may be behind.
const BATCHES_MAX: usize = 256;
/// Scopes whose last summary is kept.
const SUMMARIES_MAX: usize = 200;

/// A change or the disappearance of an object.
#[derive(Clone, Debug)]
struct FeedItem {
    seq: u64,
    kind: &'static str,
    /// `None`: the object belongs to no project.
    project: Option<ProjectId>,
    /// Owner of a container, by the name of the user in the queue.
    owner: Option<String>,
    event: FeedEvent,
}

/// Changes that were found together.
#[derive(Debug)]
struct FeedBatch {
    found_at: Instant,
    /// `None`: events were skipped.
    items: Option<Vec<FeedItem>>,
}

/// Everything that a summary depends on: the projects, in order, and the user unless it is a global admin.
type SummaryScope = (Vec<ProjectId>, Option<UserId>);
/// A summary, with the time before it was read.
type SharedSummary = Arc<tokio::sync::Mutex<Option<(Instant, Summary)>>>;

/// The feed of a server.
#[derive(Debug)]
pub(crate) struct ChangeFeed {
    batches: broadcast::Sender<Arc<FeedBatch>>,
    state: Mutex<FeedState>,
    /// Held while the reading task starts: a reader learns its own position only when that of the task is known.
    starting: tokio::sync::Mutex<()>,
    /// Summaries that readers with the same rights share: a change concerns all of them at the same time.
    summaries: Mutex<HashMap<SummaryScope, SharedSummary>>,
}

#[derive(Debug, Default)]
struct FeedState {
    is_running: bool,
}

impl Default for ChangeFeed {
    fn default() -> Self {
        Self {
            batches: broadcast::Sender::new(BATCHES_MAX),
            state: Mutex::default(),
            starting: tokio::sync::Mutex::default(),
            summaries: Mutex::default(),
        }
    }
}

/// Numbers of events that have been passed on.
#[derive(Debug)]
struct Position {
    newest: i64,
    /// Lower numbers that have not appeared, with the times at which they were noticed.
    gaps: BTreeMap<i64, Instant>,
    /// Last log record of the container queue; they become visible in their order.
    newest_log: i64,
}

impl Position {
    fn new(newest: i64, newest_log: i64) -> Self {
        Self { newest, gaps: BTreeMap::new(), newest_log }
    }

    /// Records an event. Returns false if it was recorded before.
    fn record(&mut self, seq: i64, now: Instant) -> bool {
        if seq > self.newest {
            self.gaps.extend((self.newest + 1..seq).map(|gap| (gap, now)));
            self.newest = seq;
            return true;
        }
        self.gaps.remove(&seq).is_some()
    }

    /// Removes gaps of transactions that were rolled back.
    fn forget_old_gaps(&mut self, now: Instant) {
        self.gaps.retain(|_, since| now.duration_since(*since) < GAP_MAX_AGE);
    }
}

impl ChangeFeed {
    /// Subscribes to changes, and starts the task that reads them if it is not running. All changes after this call are
    /// received.
    async fn subscribe(app: &App) -> Result<broadcast::Receiver<Arc<FeedBatch>>, DbError> {
        let feed = app.changes();
        // Counted before the state is read, so that a running task does not end.
        let receiver = feed.batches.subscribe();
        let _starting = feed.starting.lock().await;
        let is_running = feed.state.lock().is_running;
        if !is_running {
            let position = current_position(app).await?;
            feed.state.lock().is_running = true;
            tokio::spawn(read_events(app.clone(), position));
        }
        Ok(receiver)
    }

    /// Returns whether the reading task shall end because there is no reader.
    fn ends(&self) -> bool {
        let mut state = self.state.lock();
        let ends = self.batches.receiver_count() == 0;
        state.is_running = !ends;
        ends
    }

    fn send(&self, found_at: Instant, items: Option<Vec<FeedItem>>) {
        // Fails only if there is no reader.
        let _ = self.batches.send(Arc::new(FeedBatch { found_at, items }));
    }

    /// Last summary of this scope, which its readers replace one after the other.
    fn shared_summary(&self, scope: SummaryScope) -> SharedSummary {
        let mut summaries = self.summaries.lock();
        if summaries.len() >= SUMMARIES_MAX {
            summaries.clear();
        }
        Arc::clone(summaries.entry(scope).or_default())
    }
}

/// Reads events until there are no readers or the server stops.
async fn read_events(app: App, mut position: Position) {
    loop {
        if app.changes().ends() {
            return;
        }
        if let Err(error) = read_once(&app, &mut position).await {
            tracing::debug!(%error, "failed to read changes");
        }
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            () = app.closed() => return,
        }
    }
}

async fn read_once(app: &App, at: &mut Position) -> Result<(), Error> {
    let found = new_events(app, at).await?;
    let is_too_much = i64::try_from(found.len()).is_ok_and(|count| count >= EVENTS_MAX);
    if is_too_much || at.gaps.len() > GAPS_MAX {
        *at = current_position(app).await?;
        app.changes().send(Instant::now(), None);
        return Ok(());
    }
    let (containers, newest_log) = changes::changed_containers(app.db(), at.newest_log, EVENTS_MAX).await?;
    at.newest_log = newest_log;
    let found_at = Instant::now();
    match items(app, found, &containers, at.newest).await {
        Ok(items) if items.is_empty() => Ok(()),
        Ok(items) => {
            app.changes().send(found_at, Some(items));
            Ok(())
        }
        Err(error) => {
            // The events are recorded as passed on, so readers must read their lists again.
            app.changes().send(found_at, None);
            Err(error)
        }
    }
}

/// Items of events and of changed containers.
async fn items(
    app: &App,
    events: Vec<changes::FeedEvent>,
    containers: &[String],
    newest: i64,
) -> Result<Vec<FeedItem>, Error> {
    let seq = u64::try_from(newest).unwrap_or(0);
    let mut items = batch::items(app, events, seq).await?;
    items.extend(batch::containers(app, containers, seq).await?);
    Ok(items)
}

/// Position after the newest event. Numbers below it that are missing may belong to open transactions.
async fn current_position(app: &App) -> Result<Position, DbError> {
    let newest = changes::newest(app.db()).await?;
    let first = newest.saturating_sub(LOOK_BACK).max(0);
    let mut position = Position::new(first, changes::newest_log(app.db()).await?);
    let now = Instant::now();
    for seq in changes::list_numbers(app.db(), first, newest).await? {
        position.record(seq, now);
    }
    Ok(position)
}

/// Events that have become visible, in the order of their numbers.
async fn new_events(app: &App, at: &mut Position) -> Result<Vec<changes::FeedEvent>, DbError> {
    let now = Instant::now();
    at.forget_old_gaps(now);
    let gaps: Vec<i64> = at.gaps.keys().copied().collect();
    let mut found = changes::list_among(app.db(), &gaps).await?;
    found.extend(changes::list_after(app.db(), at.newest, EVENTS_MAX).await?);
    found.retain(|event| at.record(event.seq, now));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_event_that_appears_late_is_passed_on_once() {
        let mut at = Position::new(10, 0);
        let now = Instant::now();
        assert!(at.record(11, now) && at.record(14, now));
        assert_eq!(at.gaps.keys().copied().collect::<Vec<_>>(), [12, 13]);
        assert!(!at.record(11, now) && !at.record(14, now) && !at.record(3, now));
        assert!(at.record(13, now));
        assert!(!at.record(13, now));
        tokio::time::advance(GAP_MAX_AGE).await;
        at.forget_old_gaps(Instant::now());
        assert!(at.gaps.is_empty() && !at.record(12, Instant::now()), "its transaction was rolled back");
    }
}
