//! Events that agents push, one stream per connection.
//!
//! An event carries no decision: it makes a row due and wakes its pipeline, or starts the copy of a log. A lost event
//! costs only time. The agent of a host affects only the rows of its instance, and its events are read at no more
//! than [`BATCH_MAX`] per [`BATCH_INTERVAL`], however many it sends.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, sleep_until, timeout},
};
use windlass_api::agent::{
    client::{ShimClient, ShimError, ShimEvents},
    events::{ShimEvent, ShimEventKind},
};
use windlass_model::{
    error_chain::format_chain,
    id::{InstanceId, ProjectId, RunId, SubmissionId},
};

use super::{
    AgentApi, CallContext,
    connection_pool::{AgentConnection, InstanceSlot},
    http_agents::{HttpAgents, Inner},
};
use crate::{
    db::{Change, Unit, WriteOutcome, agents as rows, agents::JobSelection},
    hints::Hint,
    logs::{Log, LogSource},
};

/// Maximum number of events that are processed together.
const BATCH_MAX: usize = 256;
/// Interval between two batches of one host. The first event after a quiet period does not wait.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time without data. The agent sends a keepalive at least every 10 s.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
const OPEN_TIMEOUT: Duration = Duration::from_secs(9);
/// Delay before a rejected stream is opened again; it grows with each failure.
const REOPEN_DELAY_MIN: Duration = Duration::from_secs(1);
const REOPEN_DELAY_MAX: Duration = Duration::from_secs(30);
/// Write attempts per batch. After that, the rows wait for their next scheduled passes.
const WRITE_ATTEMPTS_MAX: usize = 4;
const WRITE_RETRY_DELAY: Duration = Duration::from_millis(200);
/// Cache of the owners of jobs: for how long an owner is kept, which does not change; for how long it is kept that a
/// job does not belong to this instance, which may change; and the maximum number of entries.
const OWNER_TTL: Duration = Duration::from_secs(600);
const UNKNOWN_OWNER_TTL: Duration = Duration::from_secs(10);
const OWNERS_MAX: usize = 1024;
/// Maximum length of a shim's boot id.
const BOOT_ID_BYTES_MAX: usize = 128;

struct EventListener {
    inner: Weak<Inner>,
    slot: Weak<InstanceSlot>,
    line: Weak<AgentConnection>,
    shim: ShimClient,
    instance: InstanceId,
    /// Project and run of each job; `None`: the job does not belong to this instance.
    places: HashMap<SubmissionId, (Instant, Option<(ProjectId, RunId)>)>,
    /// Hash of the problems that the host last reported.
    problems: u64,
}

/// Changes that the events of one batch request.
#[derive(Debug, Default)]
struct EventBatch {
    events: usize,
    all_jobs: bool,
    jobs: BTreeSet<SubmissionId>,
    logs: BTreeSet<(SubmissionId, u8)>,
    instance: bool,
    received: Option<(String, u64)>,
}

/// Cause of the end of a stream.
enum StreamEnd {
    /// The connection was lost too.
    ConnectionLost,
    /// Only the stream failed.
    StreamFailed(String),
}

/// Starts a listener that lives as long as the connection.
pub(super) fn start(
    inner: Weak<Inner>,
    slot: &Arc<InstanceSlot>,
    line: &Arc<AgentConnection>,
    came_back: bool,
) -> AbortHandle {
    let ear = EventListener {
        inner,
        slot: Arc::downgrade(slot),
        line: Arc::downgrade(line),
        shim: line.shim.clone(),
        instance: slot.instance,
        places: HashMap::new(),
        problems: fingerprint(&[]),
    };
    tokio::spawn(ear.run(came_back)).abort_handle()
}

impl EventListener {
    async fn run(mut self, came_back: bool) {
        if came_back {
            mark_all_due(self.inner.clone(), self.instance).await;
        }
        let mut again = REOPEN_DELAY_MIN;
        while !self.shim.is_closed() {
            let ended = self.listen().await;
            let received =
                self.line.upgrade().is_some_and(|line| line.is_listening.swap(false, Ordering::Relaxed));
            match ended {
                StreamEnd::ConnectionLost => break,
                StreamEnd::StreamFailed(why) => {
                    if received {
                        mark_all_due(self.inner.clone(), self.instance).await;
                    }
                    tracing::debug!(instance = %self.instance, why, "event stream failed");
                    if let Some(slot) = self.slot.upgrade() {
                        *slot.received.lock() = None;
                    }
                    sleep(again).await;
                    again = (again * 2).min(REOPEN_DELAY_MAX);
                }
            }
        }
        let Some(slot) = self.slot.upgrade() else { return };
        if slot.lose(&self.line) {
            // This task is aborted together with the connection, so a separate task must mark the rows due.
            tokio::spawn(mark_all_due(self.inner.clone(), self.instance));
        }
    }

    async fn listen(&mut self) -> StreamEnd {
        let received = self.slot.upgrade().and_then(|slot| slot.received.lock().clone());
        let after = received.as_ref().map(|(boot, seq)| (boot.as_str(), *seq));
        let mut events = match timeout(OPEN_TIMEOUT, self.shim.events(after)).await {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return stream_end(&error),
            Err(_) => return StreamEnd::StreamFailed("timed out while opening the stream".into()),
        };
        if let Some(line) = self.line.upgrade() {
            line.is_listening.store(true, Ordering::Relaxed);
        }
        let mut last = None;
        loop {
            let mut batch = EventBatch {
                received: self.slot.upgrade().and_then(|slot| slot.received.lock().clone()),
                ..EventBatch::default()
            };
            if let Err(ended) = self.receive_batch(&mut events, &mut batch).await {
                self.deliver(&batch).await;
                return ended;
            }
            if let Some(last) = last {
                sleep_until(last + BATCH_INTERVAL).await;
                // More events may have arrived during the sleep.
                if let Err(ended) = self.drain(&mut events, &mut batch) {
                    self.deliver(&batch).await;
                    return ended;
                }
            }
            self.deliver(&batch).await;
            last = Some(Instant::now());
        }
    }

    /// Waits for an event, then also reads all events that are already available.
    async fn receive_batch(
        &mut self,
        events: &mut ShimEvents,
        batch: &mut EventBatch,
    ) -> Result<(), StreamEnd> {
        let first = timeout(SILENCE_TIMEOUT, events.next()).await;
        let first = first.map_err(|_| StreamEnd::StreamFailed("timed out waiting for data".into()))?;
        self.take(first, batch)?;
        self.drain(events, batch)
    }

    fn drain(&mut self, events: &mut ShimEvents, batch: &mut EventBatch) -> Result<(), StreamEnd> {
        while batch.events < BATCH_MAX {
            let Some(next) = events.next().now_or_never() else { break };
            self.take(next, batch)?;
        }
        Ok(())
    }

    fn take(
        &mut self,
        next: Result<Option<ShimEvent>, ShimError>,
        batch: &mut EventBatch,
    ) -> Result<(), StreamEnd> {
        let event = next.map_err(|error| stream_end(&error))?.ok_or(StreamEnd::ConnectionLost)?;
        batch.events += 1;
        if let Some((_, seq)) = &mut batch.received {
            *seq = event.seq;
        }
        match event.kind {
            ShimEventKind::Reset { boot } => {
                if boot.len() > BOOT_ID_BYTES_MAX {
                    return Err(StreamEnd::StreamFailed("the boot id is too long".into()));
                }
                batch.received = Some((boot, event.seq));
                batch.all_jobs = true;
            }
            ShimEventKind::Task { info } => {
                batch.jobs.insert(info.id);
            }
            ShimEventKind::Gone { id } | ShimEventKind::Job { id, .. } => {
                batch.jobs.insert(id);
            }
            ShimEventKind::Log { id, stream, .. } => {
                let known = STREAMS.iter().position(|known| known.name() == stream);
                batch.logs.extend(known.map(|at| (id, at as u8)));
            }
            ShimEventKind::Health { problems } => {
                let seen = fingerprint(&problems);
                batch.instance |= std::mem::replace(&mut self.problems, seen) != seen;
            }
            ShimEventKind::Alive => {}
        }
        Ok(())
    }

    /// Writes rows before copying logs, because copying takes time.
    async fn deliver(&mut self, batch: &EventBatch) {
        mark_due(&self.inner, self.instance, batch).await;
        for (submission, stream) in &batch.logs {
            self.copy(*submission, STREAMS[usize::from(*stream)]).await;
        }
        if let (Some(slot), Some(received)) = (self.slot.upgrade(), &batch.received) {
            *slot.received.lock() = Some(received.clone());
        }
    }

    async fn copy(&mut self, submission: SubmissionId, stream: LogSource) {
        let Some(inner) = self.inner.upgrade() else { return };
        let Some((project, run)) = self.place(&inner, submission).await else { return };
        let log = Log { project, run, submission, stream };
        // Reads are not fenced.
        let call = CallContext { instance: self.instance, submission, epoch: 0 };
        let copier = inner.copier.clone();
        let agents: Arc<dyn AgentApi> = Arc::new(HttpAgents::of(inner));
        copier.received(&agents, call, log);
    }

    async fn place(&mut self, inner: &Inner, job: SubmissionId) -> Option<(ProjectId, RunId)> {
        if let Some((at, place)) = self.places.get(&job)
            && at.elapsed() < if place.is_some() { OWNER_TTL } else { UNKNOWN_OWNER_TTL }
        {
            return *place;
        }
        let place = rows::owner_of(&inner.db, job, self.instance).await.ok()?;
        if self.places.len() >= OWNERS_MAX {
            self.places.clear();
        }
        self.places.insert(job, (Instant::now(), place));
        place
    }
}

/// Makes the instance and its jobs due: the connection to its host was lost, restored, or no longer carries events.
pub(super) async fn mark_all_due(inner: Weak<Inner>, instance: InstanceId) {
    mark_due(&inner, instance, &EventBatch { instance: true, all_jobs: true, ..EventBatch::default() }).await;
}

/// Makes rows due in one transaction, then wakes their pipelines.
async fn mark_due(inner: &Weak<Inner>, instance: InstanceId, batch: &EventBatch) {
    let changes = batch.changes(instance);
    if changes.is_empty() {
        return;
    }
    for _ in 0..WRITE_ATTEMPTS_MAX {
        let Some(inner) = inner.upgrade() else { return };
        match inner.db.write(Unit::new().and(changes.clone())).await.and_then(WriteOutcome::done) {
            Ok((_, rows)) => {
                let jobs = rows.iter().flatten().filter_map(|row| row.str(0).ok()?.parse().ok());
                let mut wake: BTreeSet<_> = jobs.map(Hint::for_placed_job).collect();
                wake.extend(batch.instance.then_some(Hint::Instances));
                wake.into_iter().for_each(|hint| inner.hints.hint(hint.as_str()));
                return;
            }
            Err(error) => tracing::debug!(%instance, %error, "failed to mark rows due"),
        }
        drop(inner);
        sleep(WRITE_RETRY_DELAY).await;
    }
}

impl EventBatch {
    fn changes(&self, instance: InstanceId) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.all_jobs {
            changes.push(rows::mark_jobs_due(instance, &JobSelection::All));
        } else if !self.jobs.is_empty() {
            changes.push(rows::mark_jobs_due(
                instance,
                &JobSelection::Only(self.jobs.iter().copied().collect()),
            ));
        }
        if self.instance {
            changes.push(rows::mark_instance_due(instance));
        }
        changes
    }
}

const STREAMS: [LogSource; 2] = [LogSource::Job, LogSource::Runner];

fn stream_end(error: &ShimError) -> StreamEnd {
    match error {
        ShimError::Exchange(_) => StreamEnd::ConnectionLost,
        ShimError::Unauthorized { .. }
        | ShimError::Forbidden { .. }
        | ShimError::StaleEpoch { .. }
        | ShimError::TaskNotFound
        | ShimError::TaskRemoved
        | ShimError::Conflict { .. }
        | ShimError::Status { .. }
        | ShimError::Encode(_)
        | ShimError::Decode(_)
        | ShimError::Build(_)
        | ShimError::TooLong => StreamEnd::StreamFailed(format_chain(error)),
    }
}

fn fingerprint(problems: &[String]) -> u64 {
    let mut hasher = DefaultHasher::new();
    problems.hash(&mut hasher);
    hasher.finish()
}
