//! The loop of every dispatcher: look at the queue and at the scheduler, settle what is held, take what fits.
//!
//! A round that cannot see one of the two does nothing that could be wrong: it places nothing and ends nothing.
//! Whatever it did not finish, the next one finds again. It may be killed at any moment.

use std::{collections::BTreeMap, time::Duration};

use futures_util::stream::{self, StreamExt as _};
use tokio::time::Instant;
use windlass_api::queue::QueueError;
use windlass_model::{
    causes::chain,
    container::Status,
    dispatch::{
        Attempt, ContainerView, QueueSnapshot, SchedulerJobState, SchedulerSnapshot,
        choose::{Capacity as _, ReportedReasons, RetryLimiter, Selection, select},
        room::NodeClass,
        settle::{ReconcileState, ReconcileStep, ReleaseReason, is_stray, reconcile},
    },
    time::{Span, Timestamp},
};

use crate::{
    queue::QueueClient,
    scheduler::{
        NODE_LOST, OUT_OF_MEMORY, Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest, TIMED_OUT,
    },
};

/// Containers taken in one round; others of the same queue get their chance.
const DISPATCHES_MAX: usize = 50;
/// Calls under way at once for what is only told.
const EVENT_CONCURRENCY: usize = 8;
/// Containers of which one round tells what they wait for in the scheduler; others follow in the next ones.
const WAIT_REPORTS_MAX: usize = 20;
const DISPATCHED: &str = "dispatched";
/// Servers count on one that they have heard of in the last two minutes.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(30);
/// A job that does not end by itself is ended by force after this time.
const FORCE_AFTER: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum RoundError {
    #[error("look at the queue")]
    QueueSnapshot(#[from] QueueError),
    #[error("look at the scheduler")]
    Scheduler(#[from] SchedulerError),
    #[error("another dispatcher works with this token ({by}): this one waits until it is gone")]
    Waits { by: String },
}

/// What a round did, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundSummary {
    pub held: usize,
    pub taken: usize,
    pub waiting: usize,
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the scheduler's clock begins too.
    pub begun: Instant,
    /// A lock that stands without a job for longer is given back.
    pub lost_after: Span,
    /// For executors, beside what each of them gets.
    pub environment: Vec<(String, String)>,
    /// For how long other processes with the same token wait for this one after they last heard of it.
    pub lease: Duration,
}

pub struct Dispatcher<S> {
    door: QueueClient,
    scheduler: S,
    settings: Settings,
    memory: ReconcileState,
    said: ReportedReasons,
    tries: RetryLimiter,
    /// What each attempt was last said to wait for in the scheduler.
    waits: BTreeMap<Attempt, String>,
    /// Since when each attempt was asked to stop.
    stopping: BTreeMap<Attempt, Instant>,
    /// When it last said what is behind it.
    announced: Option<Instant>,
    /// When it last took the lease of its token.
    leased: Option<Instant>,
}

impl<S: Scheduler + Sync> Dispatcher<S> {
    pub fn new(door: QueueClient, scheduler: S, settings: Settings) -> Self {
        Self {
            door,
            scheduler,
            memory: ReconcileState::new(settings.lost_after),
            settings,
            said: ReportedReasons::default(),
            tries: RetryLimiter::default(),
            waits: BTreeMap::new(),
            stopping: BTreeMap::new(),
            announced: None,
            leased: None,
        }
    }

    /// Takes the lease of the token, or keeps it. Without it nothing may be done: another process does it.
    async fn hold_lease(&mut self) -> Result<(), RoundError> {
        let asked = Instant::now();
        let age = self.leased.map(|at| asked - at);
        if age.is_some_and(|age| age < self.settings.lease / 3) {
            return Ok(());
        }
        match self.door.hold(self.settings.lease.as_secs().max(1)).await {
            Ok(None) => {
                self.leased = Some(asked);
                Ok(())
            }
            Ok(Some(by)) => {
                self.leased = None;
                Err(RoundError::Waits { by })
            }
            // Nobody else has it yet.
            Err(_) if age.is_some_and(|age| age < self.settings.lease) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets another process with the same token begin at once.
    pub async fn release(&self) {
        if self.leased.is_some()
            && let Err(error) = self.door.hold(0).await
        {
            tracing::debug!(error = %chain(&error), "give the lease back");
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.settings.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    pub async fn round(&mut self) -> Result<RoundSummary, RoundError> {
        self.hold_lease().await?;
        self.announce().await;
        let lower = self.scheduler.look().await?;
        // What is over and still held comes with what is held; the rest of it is of no interest.
        let live = lower.jobs.iter().filter(|job| !job.life.is_over());
        let mut tracked: Vec<String> = live.map(|job| job.attempt.uuid.clone()).collect();
        tracked.sort();
        tracked.dedup();
        let asked_at = self.now();
        let queue = self.door.look(&tracked, asked_at).await?;
        for step in reconcile(&queue, &lower, &mut self.memory) {
            self.apply_step(step, &lower).await;
        }
        self.stopping.retain(|attempt, _| lower.find(attempt).is_some_and(|job| !job.life.is_over()));
        let taken = self.dispatch_queued(&queue, &lower).await?;
        self.report_waits(&queue, &lower).await;
        let held = queue.containers.iter().filter(|one| one.is_held()).count();
        let is_waiting = |one: &&ContainerView| one.status == Status::Queued && one.priority > 0;
        let waiting = queue.containers.iter().filter(is_waiting).count();
        Ok(RoundSummary { held, taken, waiting })
    }

    /// Until a look may find more room than the last.
    pub async fn changed(&self) {
        self.scheduler.changed().await;
    }

    /// Says what containers wait for that the scheduler has not started. Nothing depends on it.
    async fn report_waits(&mut self, queue: &QueueSnapshot, lower: &SchedulerSnapshot) {
        let why = |container: &ContainerView| {
            let job =
                lower.find(&container.attempt()).filter(|job| job.life == SchedulerJobState::Waiting)?;
            Some(format!("waits in the scheduler: {}", job.said.as_deref()?))
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
            match self.door.waits(&attempt, &why).await {
                // It has started meanwhile, or is another's.
                Err(error) if !error.is_refusal() => {
                    tracing::warn!(%attempt, error = %chain(&error), "failed to say what a container waits for");
                    return;
                }
                Ok(()) | Err(_) => drop(self.waits.insert(attempt, why)),
            }
        }
    }

    /// Nobody's containers wait for this: what goes wrong is tried again.
    async fn announce(&mut self) {
        if self.announced.is_some_and(|at| at.elapsed() < ANNOUNCE_EVERY) {
            return;
        }
        let told = async {
            let kinds = self.scheduler.kinds().await?;
            Ok::<(), RoundError>(self.door.announce(&kinds).await?)
        };
        match told.await {
            Ok(()) => self.announced = Some(Instant::now()),
            Err(error) => tracing::warn!(error = %chain(&error), "say what is behind this dispatcher"),
        }
    }

    /// What could not be done comes again next round.
    async fn apply_step(&mut self, step: ReconcileStep, lower: &SchedulerSnapshot) {
        let done = match &step {
            ReconcileStep::Stop { attempt, job } => self.stop(attempt, job).await,
            ReconcileStep::StopOrphan { attempt, job } => self.stop_stray(attempt, job, lower).await,
            ReconcileStep::Renice { job, priority, .. } => {
                self.scheduler.renice(job, *priority).await.map_err(RoundError::from)
            }
            ReconcileStep::Cancel { attempt, why } => {
                let (reason, text, event) = words(*why, said(attempt, lower));
                let cancelled = self.door.cancel(attempt, reason, &text).await;
                self.told(cancelled, attempt, event, &text).await
            }
            ReconcileStep::Unlock { attempt, why, released } => {
                let (_, text, event) = words(*why, said(attempt, lower));
                let unlocked = self.door.unlock(attempt, *released).await;
                self.told(unlocked, attempt, event, &text).await
            }
        };
        if let Err(error) = done {
            tracing::warn!(?step, error = %chain(&error), "take a step");
        }
    }

    /// A refusal means that the last word came first: there is nothing to clean up then.
    async fn told(
        &self,
        done: Result<(), QueueError>,
        attempt: &Attempt,
        event: Option<&str>,
        text: &str,
    ) -> Result<(), RoundError> {
        match done {
            Ok(()) => {
                if let Some(event) = event {
                    self.door.say(&attempt.uuid, event, text, Some(attempt.number)).await?;
                }
                Ok(())
            }
            Err(error) if error.is_refusal() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    async fn stop(&mut self, attempt: &Attempt, job: &str) -> Result<(), RoundError> {
        let since = *self.stopping.entry(attempt.clone()).or_insert_with(Instant::now);
        let pressure = if since.elapsed() > FORCE_AFTER { StopMode::Force } else { StopMode::Ask };
        Ok(self.scheduler.stop(job, pressure).await?)
    }

    async fn stop_stray(
        &mut self,
        attempt: &Attempt,
        job: &str,
        lower: &SchedulerSnapshot,
    ) -> Result<(), RoundError> {
        let now = self.door.find(&attempt.uuid).await?;
        match lower.find(attempt) {
            Some(seen) if is_stray(now.as_ref(), seen) => self.stop(attempt, job).await,
            Some(_) | None => Ok(()),
        }
    }

    /// Takes first and tells afterwards, all at once: whoever waits for room must not wait for words.
    async fn dispatch_queued(
        &mut self,
        queue: &QueueSnapshot,
        lower: &SchedulerSnapshot,
    ) -> Result<usize, RoundError> {
        let mut room = self.scheduler.room(lower).await?;
        let (mut words, mut taken, mut failed) = (Vec::new(), 0, None);
        let kinds = room.kinds();
        for choice in select(queue, &mut room, DISPATCHES_MAX, &mut self.said, &mut self.tries) {
            match choice {
                Selection::Leave { uuid, why } => words.push(DispatchEvent::not_run(uuid, why)),
                Selection::Take { uuid } => {
                    // One that was started under an earlier lock and still runs is stopped first.
                    let runs = lower.jobs.iter().any(|job| job.attempt.uuid == uuid && !job.life.is_over());
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
        let told = stream::iter(words).map(|word| this.tell(word)).buffer_unordered(EVENT_CONCURRENCY);
        // What cannot be told does not keep back the rest.
        let told: Vec<Result<(), RoundError>> = told.collect().await;
        let told: Result<(), RoundError> = told.into_iter().collect();
        match failed {
            Some(error) => Err(error),
            None => told.map(|()| taken),
        }
    }

    /// A container that somebody took meanwhile needs no word.
    async fn tell(&self, word: DispatchEvent) -> Result<(), RoundError> {
        match self.door.say(&word.uuid, word.event, &word.text, word.attempt).await {
            Ok(()) => Ok(()),
            Err(error) if error.is_refusal() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Locks it and hands it over, and returns what is to be told of that.
    async fn take(
        &mut self,
        queue: &QueueSnapshot,
        uuid: String,
        kinds: &[NodeClass],
    ) -> Result<Option<DispatchEvent>, RoundError> {
        let Some(container) = queue.find(&uuid) else { return Ok(None) };
        let lock = match self.door.lock(&uuid).await {
            Ok(lock) => lock,
            Err(error) if error.is_refusal() => {
                let text = error.to_string();
                return Ok(Some(DispatchEvent { uuid, event: "lock_failed", text, attempt: None }));
            }
            Err(error) => return Err(error.into()),
        };
        self.tries.took(&uuid, self.now());
        let mut environment = self.settings.environment.clone();
        environment.push(("WINDLASS_QUEUE_URL".to_owned(), self.door.url()));
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
                let text = format!("handed over as {job}");
                Ok(Some(DispatchEvent { uuid, event: DISPATCHED, text, attempt }))
            }
            Err(SubmitError::Refused { why }) => {
                self.door.unlock(&lock.attempt, true).await?;
                let now = self.now();
                let why = match self.scheduler.refuses_for_long() {
                    true => self.tries.refused(container, &why, kinds, now),
                    false => why,
                };
                Ok(self.said.is_news(&uuid, &why).then(|| DispatchEvent::not_run(uuid, why)))
            }
            // It may run: the next look finds it by its name, or the lock is given back after a while.
            Err(SubmitError::Unclear(unclear)) => {
                tracing::warn!(attempt = %lock.attempt, error = %chain(&unclear), "hand a container over");
                Ok(None)
            }
        }
    }
}

/// One of the dispatcher's events, to be told.
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

/// What the scheduler says of the job of an attempt.
fn said<'a>(attempt: &Attempt, lower: &'a SchedulerSnapshot) -> Option<&'a str> {
    lower.find(attempt).and_then(|job| job.said.as_deref())
}

/// For the container, for people, and for the log.
fn words(why: ReleaseReason, said: Option<&str>) -> (&'static str, String, Option<&'static str>) {
    match why {
        ReleaseReason::Crashed => {
            let (reason, text) = match said {
                Some(said) if said.starts_with(NODE_LOST) => ("node_lost", "its node was lost"),
                Some(said) if said.starts_with(OUT_OF_MEMORY) => {
                    ("oom_killed", "it used more memory than it asked for")
                }
                Some(said) if said.starts_with(TIMED_OUT) => ("max_run_time", "it ran longer than it may"),
                Some(_) | None => ("crashed", "the job ended and left no result"),
            };
            let said = said.map(|said| format!(": the scheduler says {said}")).unwrap_or_default();
            (reason, format!("{text}{said}"), Some("cleaned_up_crashed"))
        }
        ReleaseReason::Abandoned => {
            ("abandoned", "nobody knows of a job for it".to_owned(), Some("cleaned_up_abandoned"))
        }
        ReleaseReason::PriorityZero => ("priority_zero", "its priority is 0".to_owned(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::{ReleaseReason, words};

    #[test]
    fn a_lost_node_is_named_and_other_ends_say_what_the_scheduler_says() {
        let told = |said| {
            let (reason, text, _) = words(ReleaseReason::Crashed, said);
            (reason, text)
        };
        let lost = "its node was lost: the scheduler says NODE_FAIL on n3";
        assert_eq!(told(Some("NODE_FAIL on n3")), ("node_lost", lost.to_owned()));
        assert_eq!(told(Some("OUT_OF_MEMORY")).0, "oom_killed");
        assert_eq!(told(Some("TIMEOUT (TimeLimit)")).0, "max_run_time");
        let failed = "the job ended and left no result: the scheduler says FAILED (NonZeroExitCode)";
        assert_eq!(told(Some("FAILED (NonZeroExitCode)")), ("crashed", failed.to_owned()));
        assert_eq!(told(None), ("crashed", "the job ended and left no result".to_owned()));
    }
}
