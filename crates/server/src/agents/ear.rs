//! What hosts tell without being asked, one stream per connection.
//!
//! An event carries no decision: it makes a row due and wakes the pipeline that looks, or has a log copied. A lost
//! one costs time and nothing else. A host has a say over the rows of its own instance alone, and however much it
//! tells, it is read no faster than [`BATCH_MAX`] events in each [`BATCH_INTERVAL`].

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
    causes::chain,
    id::{InstanceId, ProjectId, RunId, SubmissionId},
};

use super::{
    AgentApi, CallContext,
    lines::{AgentConnection, InstanceSlot},
    wire::{HttpAgents, Inner},
};
use crate::{
    db::{Change, Unit, WriteOutcome, agents as rows, agents::JobSelection},
    logs::{Log, LogSource},
    pipelines,
};

/// Events dealt with at once.
const BATCH_MAX: usize = 256;
/// Between two batches of one host. The first event after a quiet moment does not wait.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);
/// A stream says at least every 10 s that it lives.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
const OPEN_TIMEOUT: Duration = Duration::from_secs(9);
/// A stream that is refused is asked for again, later each time.
const REOPEN_DELAY_MIN: Duration = Duration::from_secs(1);
const REOPEN_DELAY_MAX: Duration = Duration::from_secs(30);
/// Writes of a batch before it is left to the passes that look anyway.
const WRITE_ATTEMPTS_MAX: usize = 4;
const WRITE_RETRY_DELAY: Duration = Duration::from_millis(200);
/// How long it is remembered where a job of this instance belongs, which does not change; that one is none of it, which
/// may; and of how many.
const OWNER_TTL: Duration = Duration::from_secs(600);
const UNKNOWN_OWNER_TTL: Duration = Duration::from_secs(10);
const OWNERS_MAX: usize = 1024;
/// Longest name of a start of a shim.
const BOOT_ID_BYTES_MAX: usize = 128;

struct EventListener {
    inner: Weak<Inner>,
    slot: Weak<InstanceSlot>,
    line: Weak<AgentConnection>,
    shim: ShimClient,
    instance: InstanceId,
    /// Where a job belongs; `None`: it is none of this instance.
    places: HashMap<SubmissionId, (Instant, Option<(ProjectId, RunId)>)>,
    /// What was wrong with the host, as a hash.
    problems: u64,
}

/// What the events of one batch ask for.
#[derive(Debug, Default)]
struct EventBatch {
    events: usize,
    all_jobs: bool,
    jobs: BTreeSet<SubmissionId>,
    logs: BTreeSet<(SubmissionId, u8)>,
    instance: bool,
    heard: Option<(String, u64)>,
}

/// Why a stream ended.
enum StreamEnd {
    /// With its connection.
    ConnectionLost,
    /// Alone.
    StreamFailed(String),
}

/// Listens for as long as the connection lives.
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
            let heard = self.line.upgrade().is_some_and(|line| line.hears.swap(false, Ordering::Relaxed));
            match ended {
                StreamEnd::ConnectionLost => break,
                StreamEnd::StreamFailed(why) => {
                    if heard {
                        mark_all_due(self.inner.clone(), self.instance).await;
                    }
                    tracing::debug!(instance = %self.instance, why, "hear of events");
                    if let Some(slot) = self.slot.upgrade() {
                        *slot.heard.lock() = None;
                    }
                    sleep(again).await;
                    again = (again * 2).min(REOPEN_DELAY_MAX);
                }
            }
        }
        let Some(slot) = self.slot.upgrade() else { return };
        if slot.lose(&self.line) {
            // The connection took this task along when it was given up: somebody else must tell.
            tokio::spawn(mark_all_due(self.inner.clone(), self.instance));
        }
    }

    async fn listen(&mut self) -> StreamEnd {
        let heard = self.slot.upgrade().and_then(|slot| slot.heard.lock().clone());
        let after = heard.as_ref().map(|(boot, seq)| (boot.as_str(), *seq));
        let mut events = match timeout(OPEN_TIMEOUT, self.shim.events(after)).await {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return over(&error),
            Err(_) => return StreamEnd::StreamFailed("the stream does not begin".into()),
        };
        if let Some(line) = self.line.upgrade() {
            line.hears.store(true, Ordering::Relaxed);
        }
        let mut last = None;
        loop {
            let mut batch = EventBatch {
                heard: self.slot.upgrade().and_then(|slot| slot.heard.lock().clone()),
                ..EventBatch::default()
            };
            if let Err(ended) = self.receive_batch(&mut events, &mut batch).await {
                self.deliver(&batch).await;
                return ended;
            }
            if let Some(last) = last {
                sleep_until(last + BATCH_INTERVAL).await;
                // More may have come while we waited.
                if let Err(ended) = self.drain(&mut events, &mut batch) {
                    self.deliver(&batch).await;
                    return ended;
                }
            }
            self.deliver(&batch).await;
            last = Some(Instant::now());
        }
    }

    /// Waits for something, and takes what lies there with it.
    async fn receive_batch(
        &mut self,
        events: &mut ShimEvents,
        batch: &mut EventBatch,
    ) -> Result<(), StreamEnd> {
        let first = timeout(SILENCE_TIMEOUT, events.next()).await;
        let first = first.map_err(|_| StreamEnd::StreamFailed("the stream says nothing".into()))?;
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
        let event = next.map_err(|error| over(&error))?.ok_or(StreamEnd::ConnectionLost)?;
        batch.events += 1;
        if let Some((_, seq)) = &mut batch.heard {
            *seq = event.seq;
        }
        match event.kind {
            ShimEventKind::Reset { boot } => {
                if boot.len() > BOOT_ID_BYTES_MAX {
                    return Err(StreamEnd::StreamFailed("the name of its start is too long".into()));
                }
                batch.heard = Some((boot, event.seq));
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

    /// Rows first, logs after them: copying takes its time.
    async fn deliver(&mut self, batch: &EventBatch) {
        mark_due(&self.inner, self.instance, batch).await;
        for (submission, stream) in &batch.logs {
            self.copy(*submission, STREAMS[usize::from(*stream)]).await;
        }
        if let (Some(slot), Some(heard)) = (self.slot.upgrade(), &batch.heard) {
            *slot.heard.lock() = Some(heard.clone());
        }
    }

    async fn copy(&mut self, submission: SubmissionId, stream: LogSource) {
        let Some(inner) = self.inner.upgrade() else { return };
        let Some((project, run)) = self.place(&inner, submission).await else { return };
        let log = Log { project, run, submission, stream };
        // Reading is not fenced.
        let call = CallContext { instance: self.instance, submission, epoch: 0 };
        let copier = inner.copier.clone();
        let agents: Arc<dyn AgentApi> = Arc::new(HttpAgents::of(inner));
        copier.heard(&agents, call, log);
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

/// Has the instance and its jobs looked at: its host was lost, or is back, or tells nothing any more.
pub(super) async fn mark_all_due(inner: Weak<Inner>, instance: InstanceId) {
    mark_due(&inner, instance, &EventBatch { instance: true, all_jobs: true, ..EventBatch::default() }).await;
}

/// Makes rows due in one transaction, and wakes their pipelines after it.
async fn mark_due(inner: &Weak<Inner>, instance: InstanceId, batch: &EventBatch) {
    let changes = batch.changes(instance);
    if changes.is_empty() {
        return;
    }
    for _ in 0..WRITE_ATTEMPTS_MAX {
        let Some(inner) = inner.upgrade() else { return };
        match inner.db.write(Unit::new().and(changes.clone())).await.and_then(WriteOutcome::done) {
            Ok((_, rows)) => {
                let jobs = rows.iter().flatten().filter_map(|row| row.text(0).ok());
                let mut wake: BTreeSet<_> = jobs.map(|status| pipelines::pipeline_for_job(&status)).collect();
                wake.extend(batch.instance.then_some(pipelines::INSTANCES_PIPELINE));
                wake.into_iter().for_each(|pipeline| inner.hints.hint(pipeline));
                return;
            }
            Err(error) => tracing::debug!(%instance, %error, "make rows due"),
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

fn over(error: &ShimError) -> StreamEnd {
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
        | ShimError::TooLong => StreamEnd::StreamFailed(chain(error)),
    }
}

fn fingerprint(problems: &[String]) -> u64 {
    let mut hasher = DefaultHasher::new();
    problems.hash(&mut hasher);
    hasher.finish()
}
