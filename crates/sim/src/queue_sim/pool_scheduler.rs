//! A dispatcher's connection to its pool, with lost commands and lost responses.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use windlass_api::queue_client::QueueHttpClient;
use windlass_dispatch::scheduler::{Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest};
use windlass_model::{
    dispatch::{
        Attempt, ContainerNeeds, SchedulerJob, SchedulerJobState, SchedulerSnapshot,
        capacity::ResourceAmount,
        select::{Capacity, Fit},
    },
    time::Timestamp,
};

use super::{
    SharedQueueState,
    executor::{ExecutorBehaviour, execute},
    pool::{FAILURE_PERCENT, PoolJob, WORKER_SIZES, WorkerState, can_hold, to_amount},
};

/// IDs of foreign jobs, which are never listed and must not be touched.
const FOREIGN: u64 = 1_000_000;

/// A dispatcher's connection to its pool.
pub(super) struct PoolScheduler {
    state: SharedQueueState,
    at: usize,
    begun: Instant,
    ended: Mutex<BTreeMap<Attempt, Timestamp>>,
    /// For executors; each has a separate token.
    client: QueueHttpClient,
}

/// Result of a command.
enum CommandOutcome {
    Delivered,
    /// Not delivered; the sender does not know.
    Lost,
    /// Delivered; the sender does not know.
    Unanswered,
}

impl PoolScheduler {
    pub(super) fn new(state: SharedQueueState, at: usize, begun: Instant, client: QueueHttpClient) -> Self {
        Self { state, at, begun, ended: Mutex::default(), client }
    }

    fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    async fn send_command(&self) -> CommandOutcome {
        let (time, fails, half) = {
            let rng = &mut self.state.lock().pools[self.at].rng;
            (rng.millis(5, 200), rng.chance(FAILURE_PERCENT), rng.chance(50))
        };
        sleep(time).await;
        if !fails {
            return CommandOutcome::Delivered;
        }
        let fault = if half { "command lost" } else { "command unanswered" };
        self.state.lock().record_fault(fault);
        if half { CommandOutcome::Lost } else { CommandOutcome::Unanswered }
    }

    /// Starts an executor for each job that got a worker.
    fn start(&self) {
        let mut state = self.state.lock();
        let pool = &mut state.pools[self.at];
        let mut faults = Vec::new();
        for id in pool.assign() {
            let drawn = ExecutorBehaviour::draw(&mut pool.rng);
            let Some(job) = pool.jobs.get_mut(&id) else { continue };
            let has_executor = job.worker.is_none_or(|worker| worker % 7 != 1);
            let behaviour = if job.token.is_empty() {
                ExecutorBehaviour::ForeignProcess
            } else if has_executor {
                drawn
            } else {
                ExecutorBehaviour::Missing
            };
            faults.extend(behaviour.fault());
            let client = self.client.with_token(&job.token);
            let (attempt, reported) = (job.attempt.clone(), job.stop.subscribe());
            let (shared, at) = (self.state.clone(), self.at);
            let task = tokio::spawn(async move {
                let failed = execute(&client, &attempt, behaviour, reported, &shared).await;
                shared.lock().pools[at].ended(id, failed);
            });
            job.task = Some(task.abort_handle());
        }
        for fault in faults {
            state.record_fault(fault);
        }
    }
}

fn scheduler_error(program: &'static str) -> SchedulerError {
    SchedulerError::Failed { program, message: "simulated".to_owned(), code: None }
}

impl Scheduler for PoolScheduler {
    type Room = PoolCapacity;

    async fn snapshot(&self) -> Result<SchedulerSnapshot, SchedulerError> {
        self.state.lock().rounds[self.at].push(Instant::now());
        if !matches!(self.send_command().await, CommandOutcome::Delivered) {
            return Err(scheduler_error("look"));
        }
        self.start();
        let requested_at = self.now();
        let mut state = self.state.lock();
        let pool = &mut state.pools[self.at];
        let mut ended = self.ended.lock();
        // The scheduler reports jobs of a silent worker as unknown, or omits them.
        let is_shown = |job: &PoolJob| {
            job.over.is_some() || !pool.is_silent(job) || job.worker.is_some_and(|worker| worker % 14 == 7)
        };
        let jobs: Vec<SchedulerJob> = pool
            .jobs
            .iter()
            .filter(|(_, job)| is_shown(job))
            .map(|(id, job)| {
                let life = match job.over {
                    Some(_) => {
                        SchedulerJobState::Ended(*ended.entry(job.attempt.clone()).or_insert(requested_at))
                    }
                    None if pool.is_silent(job) => SchedulerJobState::Unknown,
                    None if job.worker.is_none() => SchedulerJobState::Waiting,
                    None => SchedulerJobState::Running,
                };
                let priority = Some(job.priority);
                SchedulerJob {
                    attempt: job.attempt.clone(),
                    id: id.to_string(),
                    state: life,
                    priority,
                    message: None,
                }
            })
            .collect();
        ended.retain(|attempt, _| jobs.iter().any(|job| job.attempt == *attempt));
        let is_whole = !pool.workers.iter().any(|worker| worker.state == WorkerState::Silent);
        pool.was_whole = is_whole;
        let alive = jobs.iter().filter(|job| !job.state.is_ended());
        pool.seen_alive = alive.map(|job| job.attempt.uuid.clone()).collect();
        Ok(SchedulerSnapshot { jobs, requested_at, is_complete: is_whole })
    }

    async fn room(&self, _lower: &SchedulerSnapshot) -> Result<PoolCapacity, SchedulerError> {
        if !matches!(self.send_command().await, CommandOutcome::Delivered) {
            return Err(scheduler_error("room"));
        }
        let mut state = self.state.lock();
        let pool = &mut state.pools[self.at];
        pool.demand.clear();
        let up = pool.workers.iter().filter(|worker| worker.state == WorkerState::Up);
        let free = up.map(|worker| pool.free(worker)).collect();
        Ok(PoolCapacity { free, state: self.state.clone(), at: self.at })
    }

    async fn submit(&self, order: &SubmitRequest) -> Result<String, SubmitError> {
        let spoken = self.send_command().await;
        if matches!(spoken, CommandOutcome::Lost) {
            return Err(SubmitError::Unclear(scheduler_error("submit")));
        }
        let token = order.token.clone();
        let id = {
            let mut state = self.state.lock();
            state.tokens.push((order.attempt.uuid.clone(), order.attempt.number, token.clone()));
            let pool = &mut state.pools[self.at];
            if pool.rng.chance(2) {
                state.record_fault("submission refused");
                return Err(SubmitError::Refused { why: "simulated".to_owned() });
            }
            let id = pool.next_job;
            pool.next_job += 1;
            let is_first = pool.submitted.insert(order.attempt.clone());
            let job = PoolJob {
                attempt: order.attempt.clone(),
                needs: order.needs.clone(),
                priority: order.priority,
                token,
                worker: None,
                begun: None,
                over: None,
                stop: watch::Sender::new(false),
                task: None,
            };
            pool.jobs.insert(id, job);
            if !is_first {
                state.record_violation("C6", format!("{} was submitted twice", order.attempt));
            }
            id
        };
        self.start();
        match spoken {
            CommandOutcome::Delivered => Ok(id.to_string()),
            CommandOutcome::Lost | CommandOutcome::Unanswered => {
                Err(SubmitError::Unclear(scheduler_error("submit")))
            }
        }
    }

    async fn stop(&self, job: &str, pressure: StopMode) -> Result<(), SchedulerError> {
        let spoken = self.send_command().await;
        if matches!(spoken, CommandOutcome::Lost) {
            return Err(scheduler_error("stop"));
        }
        let id: u64 = job.parse().unwrap_or(FOREIGN);
        let mut state = self.state.lock();
        let pool = &mut state.pools[self.at];
        let Some(found) = pool.jobs.get(&id) else {
            state.record_violation("C5", format!("job {job} was stopped, but is not from the queue"));
            return Ok(());
        };
        match pressure {
            // The job has no worker that could be asked.
            StopMode::Request if found.worker.is_none() => pool.end(id),
            StopMode::Request if pool.is_silent(found) => {}
            StopMode::Request => {
                let _ = found.stop.send(true);
            }
            StopMode::Force => pool.kill(id),
        }
        match spoken {
            CommandOutcome::Delivered => Ok(()),
            CommandOutcome::Lost | CommandOutcome::Unanswered => Err(scheduler_error("stop")),
        }
    }

    async fn renice(&self, job: &str, priority: u64) -> Result<(), SchedulerError> {
        let spoken = self.send_command().await;
        if let (CommandOutcome::Delivered | CommandOutcome::Unanswered, Ok(id)) =
            (&spoken, job.parse::<u64>())
        {
            let mut state = self.state.lock();
            if let Some(job) = state.pools[self.at].jobs.get_mut(&id) {
                job.priority = priority;
            }
        }
        if matches!(spoken, CommandOutcome::Delivered) { Ok(()) } else { Err(scheduler_error("renice")) }
    }
}

/// Free capacity of the workers that are up.
pub(super) struct PoolCapacity {
    free: Vec<ResourceAmount>,
    state: SharedQueueState,
    at: usize,
}

impl PoolCapacity {
    /// Returns the best fit.
    fn find(&self, needs: &ContainerNeeds) -> Option<usize> {
        let fits = |at: &usize| can_hold(self.free[*at], to_amount(needs));
        (0..self.free.len()).filter(fits).min_by_key(|at| self.free[*at].cpus)
    }
}

impl Capacity for PoolCapacity {
    fn check_fit(&self, needs: &ContainerNeeds) -> Fit {
        if self.find(needs).is_some() {
            return Fit::Now;
        }
        if !WORKER_SIZES.iter().any(|kind| can_hold(*kind, to_amount(needs))) {
            return Fit::Never("no worker fits".to_owned());
        }
        self.state.lock().pools[self.at].demand.push(needs.clone());
        Fit::Later("waiting for a worker".to_owned())
    }

    fn allocate(&mut self, needs: &ContainerNeeds) {
        if let Some(at) = self.find(needs) {
            self.free[at] = self.free[at].saturating_sub(to_amount(needs));
        }
    }

    fn reserve(&mut self, needs: &ContainerNeeds) {
        let most = (0..self.free.len()).max_by_key(|at| self.free[*at].cpus);
        if let Some(at) = most {
            self.free[at] = self.free[at].saturating_sub(to_amount(needs));
        }
    }
}
