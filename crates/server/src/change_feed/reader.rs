//! One reader of the feed: what it may see, and what it has missed.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream::unfold};
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::{Instant, timeout},
};
use windlass_api::{
    changes::{FeedEvent, FeedHello, FeedResync, StreamRequest},
    overview::{Summary, SummaryRequest},
};
use windlass_model::id::ProjectId;

use super::{ChangeFeed, EVENTS_MAX, FeedBatch, FeedItem, LOOK_BACK, batch};
use crate::{
    app::App,
    auth::Caller,
    db::{changes, projects},
    error::{Error, Result},
    services::{SseEvent, SseStream, overview, queue::auth::user_uuid},
    ui_assets,
};

/// Interval of keepalives.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time between two summaries, and between two looks at the reader's projects.
const COUNTS_INTERVAL: Duration = Duration::from_secs(2);
const PROJECTS_INTERVAL: Duration = Duration::from_secs(2);
/// Age of events that may have become visible after the last one that a reader received.
const LOOK_BACK_US: i64 = 60_000_000;
const KINDS: [&str; 8] = ["run", "job", "instance", "fleet", "volume", "gateway", "managed-job", "container"];

struct FeedReader {
    app: App,
    caller: Caller,
    batches: Receiver<Arc<FeedBatch>>,
    pending: VecDeque<SseEvent<FeedEvent>>,
    /// Requested projects by name; empty: all.
    projects: Vec<String>,
    /// Requested kinds; empty: all.
    kinds: Vec<String>,
    visible: HashSet<ProjectId>,
    visible_at: Instant,
    /// Position of the last event.
    seq: u64,
    /// Last summary that was sent, and its time.
    counts: Option<Summary>,
    counts_at: Option<Instant>,
    /// Time of the last change; the summary must have been read after it.
    changed_at: Option<Instant>,
}

/// Opens the feed. `last` is the position of a reader that reconnects.
pub(crate) async fn stream(
    app: &App,
    caller: &Caller,
    requested: StreamRequest,
    last: Option<u64>,
) -> Result<SseStream<FeedEvent>> {
    let split = |list: Option<String>| -> Vec<String> {
        let list = list.unwrap_or_default();
        list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let kinds = split(requested.kinds);
    if let Some(unknown) = kinds.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
        let msg = format!("unknown kind `{}`; known kinds: {}", unknown.escape_debug(), KINDS.join(", "));
        return Err(Error::refused(msg));
    }
    // Before the position is read, so that nothing between the two is lost.
    let batches = ChangeFeed::subscribe(app).await?;
    let mut reader = FeedReader {
        app: app.clone(),
        caller: caller.clone(),
        batches,
        pending: VecDeque::new(),
        projects: split(requested.projects),
        kinds,
        visible: HashSet::new(),
        visible_at: Instant::now(),
        seq: 0,
        counts: None,
        counts_at: None,
        changed_at: Some(Instant::now()),
    };
    reader.visible = reader.visible_projects().await?;
    reader.begin(last.or(requested.since)).await?;
    Ok(unfold(reader, |mut reader| async move { Some((reader.next().await?, reader)) }).boxed())
}

impl FeedReader {
    async fn visible_projects(&self) -> Result<HashSet<ProjectId>> {
        let user = &self.caller.user;
        let all = projects::visible(self.app.db(), user.id, user.admin).await?;
        let is_requested = |name: &String| self.projects.is_empty() || self.projects.contains(name);
        Ok(all.into_iter().filter(|(_, name, _)| is_requested(name)).map(|(id, ..)| id).collect())
    }

    /// Sends the position, and what a reconnecting reader missed.
    async fn begin(&mut self, since: Option<u64>) -> Result<()> {
        let newest = changes::newest(self.app.db()).await?;
        self.seq = u64::try_from(newest).unwrap_or(0);
        let hello = FeedHello {
            seq: self.seq,
            server_version: env!("CARGO_PKG_VERSION").to_owned(),
            ui_version: ui_assets::VERSION.to_owned(),
            now: self.app.db().now().await?,
        };
        self.push("hello", FeedEvent::Hello(hello));
        let Some(since) = since else { return Ok(()) };
        let missed = self.missed(i64::try_from(since).unwrap_or(i64::MAX), newest).await?;
        match missed {
            Some(items) => items.into_iter().for_each(|item| self.offer(&item, Instant::now())),
            None => self.push("resync", FeedEvent::Resync(FeedResync {})),
        }
        Ok(())
    }

    /// Changes after a position; `None` if there are too many, or if it is not a position of this database.
    async fn missed(&self, since: i64, newest: i64) -> Result<Option<Vec<FeedItem>>> {
        if since > newest {
            return Ok(None);
        }
        let now = self.app.db().now().await?;
        let limit = EVENTS_MAX + LOOK_BACK;
        let mut events = changes::list_after(self.app.db(), since.saturating_sub(LOOK_BACK), limit).await?;
        // What became visible late is recent; a reader may receive the rest twice, but need not.
        events.retain(|event| event.seq > since || now.0 - event.recorded_at.0 < LOOK_BACK_US);
        if i64::try_from(events.len()).is_ok_and(|count| count >= EVENTS_MAX) {
            return Ok(None);
        }
        batch::items(&self.app, events, self.seq).await.map(Some)
    }

    fn push(&mut self, name: &'static str, data: FeedEvent) {
        self.pending.push_back(SseEvent::Event { id: self.seq, name, data });
    }

    /// Queues a change if the reader may see it and requested it.
    fn offer(&mut self, item: &FeedItem, found_at: Instant) {
        let is_requested = self.kinds.is_empty() || self.kinds.iter().any(|kind| kind == item.kind);
        let is_admin = self.caller.user.admin;
        let is_visible = match (&item.project, &item.owner) {
            (Some(project), _) => self.visible.contains(project),
            (None, Some(owner)) => is_admin || *owner == user_uuid(self.caller.user.id),
            (None, None) => is_admin,
        };
        if !is_visible {
            return;
        }
        self.changed_at = Some(found_at);
        if !is_requested {
            return;
        }
        self.seq = self.seq.max(item.seq);
        let name = if matches!(item.event, FeedEvent::Gone(_)) { "gone" } else { "change" };
        self.push(name, item.event.clone());
    }

    /// Next event; `None` if the reader can no longer be served.
    async fn next(&mut self) -> Option<SseEvent<FeedEvent>> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            if self.refresh().await.is_err() {
                // The reader reconnects.
                return None;
            }
            if !self.pending.is_empty() {
                continue;
            }
            let wait = if self.changed_at.is_some() { COUNTS_INTERVAL } else { ALIVE_INTERVAL };
            match timeout(wait, self.batches.recv()).await {
                Ok(Ok(batch)) => match &batch.items {
                    Some(items) => items.iter().for_each(|item| self.offer(item, batch.found_at)),
                    None => self.push("resync", FeedEvent::Resync(FeedResync {})),
                },
                Ok(Err(RecvError::Lagged(_))) => self.push("resync", FeedEvent::Resync(FeedResync {})),
                Ok(Err(RecvError::Closed)) => return None,
                Err(_) if self.changed_at.is_some() => {}
                Err(_) => return Some(SseEvent::Alive),
            }
        }
    }

    /// Reads the reader's projects and, after changes, the summary.
    async fn refresh(&mut self) -> Result<()> {
        if self.visible_at.elapsed() >= PROJECTS_INTERVAL {
            self.visible_at = Instant::now();
            let visible = self.visible_projects().await?;
            if visible != self.visible {
                self.visible = visible;
                self.push("resync", FeedEvent::Resync(FeedResync {}));
            }
        }
        let is_due = self.counts_at.is_none_or(|at| at.elapsed() >= COUNTS_INTERVAL);
        if let Some(changed_at) = self.changed_at.filter(|_| is_due) {
            (self.changed_at, self.counts_at) = (None, Some(Instant::now()));
            let summary = self.summary(changed_at).await?;
            let is_same = self.counts.as_ref().is_some_and(|last| {
                Summary { as_of: 0, cost: summary.cost, ..last.clone() }
                    == Summary { as_of: 0, ..summary.clone() }
            });
            if !is_same {
                self.counts = Some(summary.clone());
                self.push("counts", FeedEvent::Counts(Box::new(summary)));
            }
        }
        Ok(())
    }

    /// A summary that was read after this time: another reader's, if its scope is the same.
    async fn summary(&self, changed_at: Instant) -> Result<Summary> {
        let mut projects: Vec<ProjectId> = self.visible.iter().copied().collect();
        projects.sort_unstable();
        let user = &self.caller.user;
        let shared = self.app.changes().shared_summary((projects, (!user.admin).then_some(user.id)));
        let mut last = shared.lock().await;
        if let Some((read_at, summary)) = &*last
            && *read_at >= changed_at
        {
            return Ok(summary.clone());
        }
        let read_at = Instant::now();
        let requested = SummaryRequest { projects: self.projects.clone() };
        let summary = overview::summary(&self.app, &self.caller, &requested, false).await?;
        *last = Some((read_at, summary.clone()));
        Ok(summary)
    }
}
