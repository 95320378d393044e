//! The loop of every dispatcher: read the queue and the scheduler, reconcile held containers, and dispatch what fits.
//!
//! A round that cannot read one of the two does nothing that could be wrong: it starts nothing and ends nothing. The
//! next round finds whatever was not finished. The process may be killed at any moment.

use std::{collections::BTreeMap, time::Duration};

use futures_util::stream::{self, StreamExt as _};
use tokio::time::Instant;
use windlass_api::queue_client::QueueError;
use windlass_model::{
    container::Status,
    dispatch::{
        Attempt, ContainerView, QueueSnapshot, SchedulerJobState, SchedulerSnapshot,
        capacity::NodeClass,
        reconcile::{ReconcileState, ReconcileStep, ReleaseReason, is_orphan, reconcile},
        select::{Capacity as _, ReportedReasons, RetryLimiter, Selection, select},
    },
    error_chain::format_chain,
    time::{Span, Timestamp},
};

use crate::{
    queue_client::QueueClient,
    scheduler::{
        NODE_LOST, OUT_OF_MEMORY, Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest, TIMED_OUT,
    },
};

/// Maximum number of containers dispatched in one round; other dispatchers of the same queue get their share.
const DISPATCHES_MAX: usize = 50;
/// Maximum number of concurrent calls that only report events.
const EVENT_CONCURRENCY: usize = 8;
/// Maximum number of containers whose wait reason is reported in one round; others follow in the next ones.
const WAIT_REPORTS_MAX: usize = 20;
const DISPATCHED: &str = "dispatched";
/// Interval of announcements. Servers consider a dispatcher offline after two minutes.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(30);
/// Time after which a job that does not end by itself is killed, in addition to the time that its program has to exit.
const FORCE_AFTER: Duration = Duration::from_secs(120);
/// Interval of repeated stop requests: one may be lost.
const STOP_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum RoundError {
    #[error("failed to read the queue")]
    QueueSnapshot(#[from] QueueError),
    #[error("failed to query the scheduler")]
    Scheduler(#[from] SchedulerError),
    #[error("another dispatcher uses this token ({by}): waiting until it stops")]
    Waits { by: String },
}

/// Stop requests for an attempt.
#[derive(Clone, Copy, Debug)]
struct StopProgress {
    since: Instant,
    last: Instant,
    /// Time that the program has to exit, as of the last request.
    grace: Span,
}

/// Summary of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundSummary {
    pub held: usize,
    pub taken: usize,
    pub waiting: usize,
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// Start of the clock, shared with the scheduler.
    pub begun: Instant,
    /// Time after which a lock without a job is released.
    pub lost_after: Span,
    /// Variables for executors, in addition to those of each attempt.
    pub environment: Vec<(String, String)>,
    /// Time that other processes with the same token wait after the last renewal of the lease.
    pub lease: Duration,
}

pub struct Dispatcher<S> {
    client: QueueClient,
    scheduler: S,
    settings: Settings,
    memory: ReconcileState,
    message: ReportedReasons,
    tries: RetryLimiter,
    /// Wait reason last reported for each attempt.
    waits: BTreeMap<Attempt, String>,
    /// Stop requests, by attempt.
    stopping: BTreeMap<Attempt, StopProgress>,
    /// Time of the last announcement.
    announced: Option<Instant>,
    /// Time at which the token's lease was last renewed.
    leased: Option<Instant>,
}

impl<S: Scheduler + Sync> Dispatcher<S> {
    pub fn new(client: QueueClient, scheduler: S, settings: Settings) -> Self {
        Self {
            client,
            scheduler,
            memory: ReconcileState::new(settings.lost_after),
            settings,
            message: ReportedReasons::default(),
            tries: RetryLimiter::default(),
            waits: BTreeMap::new(),
            stopping: BTreeMap::new(),
            announced: None,
            leased: None,
        }
    }

    /// Acquires or renews the token's lease. Without it nothing may be done, because another process may hold it.
    async fn hold_lease(&mut self) -> Result<(), RoundError> {
        let start = Instant::now();
        let age = self.leased.map(|at| start - at);
        if age.is_some_and(|age| age < self.settings.lease / 3) {
            return Ok(());
        }
        match self.client.hold(self.settings.lease.as_secs().max(1)).await {
            Ok(None) => {
                self.leased = Some(start);
                Ok(())
            }
            Ok(Some(by)) => {
                self.leased = None;
                Err(RoundError::Waits { by })
            }
            // The lease has not expired, so no other process holds it.
            Err(_) if age.is_some_and(|age| age < self.settings.lease) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Releases the lease, so that another process with the same token can start at once.
    pub async fn release(&self) {
        if self.leased.is_some()
            && let Err(error) = self.client.hold(0).await
        {
            tracing::debug!(error = %format_chain(&error), "failed to release the lease");
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.settings.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    pub async fn round(&mut self) -> Result<RoundSummary, RoundError> {
        self.hold_lease().await?;
        self.announce().await;
        let lower = self.scheduler.snapshot().await?;
        // Finished jobs that are still held are in the list of held containers; other finished ones are not needed.
        let live = lower.jobs.iter().filter(|job| !job.state.is_ended());
        let mut tracked: Vec<String> = live.map(|job| job.attempt.uuid.clone()).collect();
        tracked.sort();
        tracked.dedup();
        let requested_at = self.now();
        let queue = self.client.snapshot(&tracked, requested_at).await?;
        for step in reconcile(&queue, &lower, &mut self.memory) {
            self.apply_step(step, &lower, &queue).await;
        }
        self.stopping.retain(|attempt, _| lower.find(attempt).is_some_and(|job| !job.state.is_ended()));
        let taken = self.dispatch_queued(&queue, &lower).await?;
        self.report_waits(&queue, &lower).await;
        let held = queue.containers.iter().filter(|one| one.is_held()).count();
        let is_waiting = |one: &&ContainerView| one.status == Status::Queued && one.priority > 0;
        let waiting = queue.containers.iter().filter(is_waiting).count();
        Ok(RoundSummary { held, taken, waiting })
    }

    /// Waits until the scheduler may have more capacity than in the last snapshot.
    pub async fn changed(&self) {
        self.scheduler.changed().await;
    }

    /// Reports what containers wait for that the scheduler has not started. Informational only.
    async fn report_waits(&mut self, queue: &QueueSnapshot, lower: &SchedulerSnapshot) {
        let why = |container: &ContainerView| {
            let job =
                lower.find(&container.attempt()).filter(|job| job.state == SchedulerJobState::Waiting)?;
            Some(format!("waits in the scheduler: {}", job.message.as_deref()?))
        };
        let held = queue.containers.iter().filter(|one| one.is_held() && one.status == Status::Locked);
        let all: BTreeMap<Attempt, String> =
            held.filter_map(|one| Some((one.attempt(), why(one)?))).collect();
        self.waits.retain(|attempt, _| all.contains_key(attempt));
        let is_news = |(attempt, why): &(&Attempt, &String)| self.waits.get(*attempt) != Some(*why);
        let news: Vec<(Attempt, String)> = all
            .iter()
            .filter(is_news)
            .take(WAIT_REPORTS_MAX)
            .map(|(attempt, why)| (attempt.clone(), why.clone()))
            .collect();
        for (attempt, why) in news {
            match self.client.waits(&attempt, &why).await {
                // A refusal means that it has started meanwhile, or belongs to another dispatcher.
                Err(error) if !error.is_refusal() => {
                    tracing::warn!(%attempt, error = %format_chain(&error), "failed to report wait reason");
                    return;
                }
                Ok(()) | Err(_) => drop(self.waits.insert(attempt, why)),
            }
        }
    }

    /// Announces the capacity. No container depends on it: failures are retried.
    async fn announce(&mut self) {
        if self.announced.is_some_and(|at| at.elapsed() < ANNOUNCE_EVERY) {
            return;
        }
        let reported = async {
            let kinds = self.scheduler.kinds().await?;
            Ok::<(), RoundError>(self.client.announce(&kinds).await?)
        };
        match reported.await {
            Ok(()) => self.announced = Some(Instant::now()),
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "failed to announce capacity to the server")
            }
        }
    }

    /// Applies a step. If it fails, the next round repeats it.
    async fn apply_step(&mut self, step: ReconcileStep, lower: &SchedulerSnapshot, queue: &QueueSnapshot) {
        let done = match &step {
            ReconcileStep::Stop { attempt, job } => self.stop(attempt, job, queue.find(&attempt.uuid)).await,
            ReconcileStep::StopOrphan { attempt, job } => self.stop_orphan(attempt, job, lower).await,
            ReconcileStep::Renice { job, priority, .. } => {
                self.scheduler.renice(job, *priority).await.map_err(RoundError::from)
            }
            ReconcileStep::Cancel { attempt, why } => {
                let (reason, text, event) = describe_cleanup(*why, scheduler_message(attempt, lower));
                let cancelled = self.client.cancel(attempt, reason, &text).await;
                self.reported(cancelled, attempt, event, &text).await
            }
            ReconcileStep::Unlock { attempt, why, released } => {
                let (_, text, event) = describe_cleanup(*why, scheduler_message(attempt, lower));
                let unlocked = self.client.unlock(attempt, *released).await;
                self.reported(unlocked, attempt, event, &text).await
            }
        };
        if let Err(error) = done {
            tracing::warn!(?step, error = %format_chain(&error), "failed to apply step");
        }
    }

    /// Reports the event of a step. A refusal means that the final update came first: then there is nothing to clean
    /// up.
    async fn reported(
        &self,
        done: Result<(), QueueError>,
        attempt: &Attempt,
        event: Option<&str>,
        text: &str,
    ) -> Result<(), RoundError> {
        match done {
            Ok(()) => {
                if let Some(event) = event {
                    self.client.say(&attempt.uuid, event, text, Some(attempt.number)).await?;
                }
                Ok(())
            }
            Err(error) if error.is_refusal() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Requests a job to stop, and again from time to time or if the time of its program changed. Forces it if that is
    /// over.
    async fn stop(
        &mut self,
        attempt: &Attempt,
        job: &str,
        container: Option<&ContainerView>,
    ) -> Result<(), RoundError> {
        let now = Instant::now();
        let grace = container.map_or(Span::ZERO, |container| container.needs.stop_duration);
        let before = self.stopping.get(attempt);
        let since = before.map_or(now, |before| before.since);
        let limit = FORCE_AFTER + Duration::from_secs(u64::try_from(grace.as_secs()).unwrap_or_default());
        let pressure = if now - since > limit { StopMode::Force } else { StopMode::Request };
        let is_recent = |before: &StopProgress| before.grace == grace && now - before.last < STOP_INTERVAL;
        if pressure == StopMode::Request && before.is_some_and(is_recent) {
            return Ok(());
        }
        self.scheduler.stop(job, pressure).await?;
        self.stopping.insert(attempt.clone(), StopProgress { since, last: now, grace });
        Ok(())
    }

    async fn stop_orphan(
        &mut self,
        attempt: &Attempt,
        job: &str,
        lower: &SchedulerSnapshot,
    ) -> Result<(), RoundError> {
        let now = self.client.find(&attempt.uuid).await?;
        match lower.find(attempt) {
            Some(seen) if is_orphan(now.as_ref(), seen) => self.stop(attempt, job, None).await,
            Some(_) | None => Ok(()),
        }
    }

    /// Dispatches first and reports afterwards, all at once: containers that wait for capacity must not wait for
    /// reports.
    async fn dispatch_queued(
        &mut self,
        queue: &QueueSnapshot,
        lower: &SchedulerSnapshot,
    ) -> Result<usize, RoundError> {
        let mut room = self.scheduler.room(lower).await?;
        let (mut words, mut taken, mut failed) = (Vec::new(), 0, None);
        let kinds = room.node_classes();
        for choice in select(queue, &mut room, DISPATCHES_MAX, &mut self.message, &mut self.tries) {
            match choice {
                Selection::Leave { uuid, why } => words.push(DispatchEvent::not_run(uuid, why)),
                Selection::Take { uuid } => {
                    // A job that was started under an earlier lock and still runs is stopped first.
                    let runs = lower.jobs.iter().any(|job| job.attempt.uuid == uuid && !job.state.is_ended());
                    if runs {
                        continue;
                    }
                    match self.take(queue, uuid, &kinds).await {
                        Ok(word) => {
                            taken += usize::from(word.as_ref().is_some_and(|word| word.event == DISPATCHED));
                            words.extend(word);
                        }
                        Err(error) => {
                            failed = Some(error);
                            break;
                        }
                    }
                }
            }
        }
        let this = &*self;
        let reported =
            stream::iter(words).map(|word| this.send_event(word)).buffer_unordered(EVENT_CONCURRENCY);
        // A report that fails does not delay the others.
        let reported: Vec<Result<(), RoundError>> = reported.collect().await;
        let reported: Result<(), RoundError> = reported.into_iter().collect();
        match failed {
            Some(error) => Err(error),
            None => reported.map(|()| taken),
        }
    }

    /// Reports an event. A container that another dispatcher has locked meanwhile needs none.
    async fn send_event(&self, word: DispatchEvent) -> Result<(), RoundError> {
        match self.client.say(&word.uuid, word.event, &word.text, word.attempt).await {
            Ok(()) => Ok(()),
            Err(error) if error.is_refusal() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Locks a container and submits it, and returns the event to report.
    async fn take(
        &mut self,
        queue: &QueueSnapshot,
        uuid: String,
        kinds: &[NodeClass],
    ) -> Result<Option<DispatchEvent>, RoundError> {
        let Some(container) = queue.find(&uuid) else { return Ok(None) };
        let lock = match self.client.lock(&uuid).await {
            Ok(lock) => lock,
            Err(error) if error.is_refusal() => {
                let text = error.to_string();
                return Ok(Some(DispatchEvent { uuid, event: "lock_failed", text, attempt: None }));
            }
            Err(error) => return Err(error.into()),
        };
        self.tries.record_attempt(&uuid, self.now());
        let mut environment = self.settings.environment.clone();
        environment.push(("WINDLASS_QUEUE_URL".to_owned(), self.client.url()));
        let order = SubmitRequest {
            attempt: lock.attempt.clone(),
            priority: container.priority,
            needs: container.needs.clone(),
            environment,
            token: lock.executor_token,
        };
        let attempt = Some(lock.attempt.number);
        match self.scheduler.submit(&order).await {
            Ok(job) => {
                let text = format!("submitted as {job}");
                Ok(Some(DispatchEvent { uuid, event: DISPATCHED, text, attempt }))
            }
            Err(SubmitError::Refused { why }) => {
                self.client.unlock(&lock.attempt, true).await?;
                let now = self.now();
                let why = match self.scheduler.refuses_for_long() {
                    true => self.tries.refused(container, &why, kinds, now),
                    false => why,
                };
                Ok(self.message.record(&uuid, &why).then(|| DispatchEvent::not_run(uuid, why)))
            }
            // It may run: the next snapshot finds it by its name, or the lock is released after a while.
            Err(SubmitError::Unclear(unclear)) => {
                tracing::warn!(attempt = %lock.attempt, error = %format_chain(&unclear), "submission is unclear");
                Ok(None)
            }
        }
    }
}

/// Event of the dispatcher, to be reported.
struct DispatchEvent {
    uuid: String,
    event: &'static str,
    text: String,
    attempt: Option<u64>,
}

impl DispatchEvent {
    fn not_run(uuid: String, why: String) -> Self {
        Self { uuid, event: "decided_not_to_run", text: why, attempt: None }
    }
}

/// Returns the scheduler's message about the job of an attempt.
fn scheduler_message<'a>(attempt: &Attempt, lower: &'a SchedulerSnapshot) -> Option<&'a str> {
    lower.find(attempt).and_then(|job| job.message.as_deref())
}

/// Returns the reason for the container, the message for people, and the event for the log.
fn describe_cleanup(
    why: ReleaseReason,
    message: Option<&str>,
) -> (&'static str, String, Option<&'static str>) {
    match why {
        ReleaseReason::Crashed => {
            let (reason, text) = match message {
                Some(message) if message.starts_with(NODE_LOST) => ("node_lost", "its node was lost"),
                Some(message) if message.starts_with(OUT_OF_MEMORY) => {
                    ("oom_killed", "it used more memory than it requested")
                }
                Some(message) if message.starts_with(TIMED_OUT) => {
                    ("max_run_time", "it exceeded `max_run_time`")
                }
                Some(_) | None => ("crashed", "the job ended without a result"),
            };
            let message =
                message.map(|message| format!(": the scheduler reported {message}")).unwrap_or_default();
            (reason, format!("{text}{message}"), Some("cleaned_up_crashed"))
        }
        ReleaseReason::Abandoned => {
            ("abandoned", "the scheduler has no job for it".to_owned(), Some("cleaned_up_abandoned"))
        }
        ReleaseReason::PriorityZero => ("priority_zero", "its priority is 0".to_owned(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::{ReleaseReason, describe_cleanup};

    #[test]
    fn crash_message_names_a_lost_node_or_quotes_the_scheduler() {
        let reported = |message| {
            let (reason, text, _) = describe_cleanup(ReleaseReason::Crashed, message);
            (reason, text)
        };
        let lost = "its node was lost: the scheduler reported NODE_FAIL on n3";
        assert_eq!(reported(Some("NODE_FAIL on n3")), ("node_lost", lost.to_owned()));
        assert_eq!(reported(Some("OUT_OF_MEMORY")).0, "oom_killed");
        assert_eq!(reported(Some("TIMEOUT (TimeLimit)")).0, "max_run_time");
        let failed = "the job ended without a result: the scheduler reported FAILED (NonZeroExitCode)";
        assert_eq!(reported(Some("FAILED (NonZeroExitCode)")), ("crashed", failed.to_owned()));
        assert_eq!(reported(None), ("crashed", "the job ended without a result".to_owned()));
    }
}
