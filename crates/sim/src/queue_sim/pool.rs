//! A lower scheduler: workers that start and stop, their jobs, and commands that fail.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{Instant, sleep},
};
use windlass_model::dispatch::{Attempt, ContainerNeeds, capacity::ResourceAmount};

use super::SharedQueueState;
use crate::rng::Rng;

const WORKERS_MAX: usize = 10;
const GIB: u64 = 1 << 30;
/// Worker sizes. The second never starts, the fourth not in the first minutes.
pub(super) const WORKER_SIZES: [ResourceAmount; 5] = [
    ResourceAmount { cpus: 2, memory: 4 * GIB, gpus: 0 },
    ResourceAmount { cpus: 4, memory: 4 * GIB, gpus: 0 },
    ResourceAmount { cpus: 4, memory: 8 * GIB, gpus: 0 },
    ResourceAmount { cpus: 8, memory: 8 * GIB, gpus: 0 },
    ResourceAmount { cpus: 8, memory: 16 * GIB, gpus: 0 },
];
const UNAVAILABLE_SIZE: usize = 1;
const LATE_SIZE: usize = 3;
const LATE_SIZE_DELAY: Duration = Duration::from_secs(180);
/// Delay before a size that failed to start is requested again.
const SIZE_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Failure rate of requests to the scheduler, in percent.
pub(super) const FAILURE_PERCENT: u64 = 10;
const RATE_LIMIT_PERCENT: u64 = 3;
const RATE_LIMIT_PERIOD: Duration = Duration::from_secs(20);
/// Shorter than many programs, so that their executors find out that they were abandoned.
const SILENT_PERIOD: Duration = Duration::from_secs(30);
const DOWN_PERIOD: Duration = Duration::from_secs(90);
const IDLE_MAX: Duration = Duration::from_secs(60);
/// The scheduler ends jobs that take longer.
const TIME_LIMIT: Duration = Duration::from_secs(150);
/// Time for which ended jobs are listed.
const ENDED_SHOWN_FOR: Duration = Duration::from_secs(300);
const TICK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerState {
    Booting,
    Up,
    /// Finishes its jobs and accepts no more.
    Broken,
    /// Its state is unknown.
    Silent,
    /// The scheduler has abandoned it. Its processes do not know that.
    Down,
}

pub(super) struct PoolWorker {
    pub(super) number: u64,
    pub(super) size: ResourceAmount,
    pub(super) state: WorkerState,
    since: Instant,
    /// Time at which it starts, or at which its fault begins.
    next_at: Option<Instant>,
    failures: u32,
}

pub(super) struct PoolJob {
    pub(super) attempt: Attempt,
    pub(super) needs: ContainerNeeds,
    pub(super) priority: u64,
    pub(super) token: String,
    pub(super) worker: Option<u64>,
    pub(super) begun: Option<Instant>,
    pub(super) over: Option<Instant>,
    pub(super) stop: watch::Sender<bool>,
    pub(super) task: Option<AbortHandle>,
}

pub(super) struct Pool {
    pub(super) rng: Rng,
    opened: Instant,
    pub(super) workers: Vec<PoolWorker>,
    pub(super) jobs: BTreeMap<u64, PoolJob>,
    pub(super) next_job: u64,
    next_worker: u64,
    pub(super) demand: Vec<ContainerNeeds>,
    shunned: BTreeMap<usize, Instant>,
    limited_until: Option<Instant>,
    pub(super) submitted: BTreeSet<Attempt>,
    /// Value at the last poll.
    pub(super) was_whole: bool,
    /// Containers with jobs at the last poll.
    pub(super) seen_alive: Vec<String>,
}

impl Pool {
    pub(super) fn new(rng: Rng, opened: Instant) -> Self {
        Self {
            rng,
            opened,
            workers: Vec::new(),
            jobs: BTreeMap::new(),
            next_job: 1,
            next_worker: 0,
            demand: Vec::new(),
            shunned: BTreeMap::new(),
            limited_until: None,
            submitted: BTreeSet::new(),
            was_whole: true,
            seen_alive: Vec::new(),
        }
    }

    fn worker(&self, number: Option<u64>) -> Option<&PoolWorker> {
        self.workers.iter().find(|worker| Some(worker.number) == number)
    }

    pub(super) fn is_silent(&self, job: &PoolJob) -> bool {
        self.worker(job.worker).is_some_and(|worker| worker.state == WorkerState::Silent)
    }

    /// Containers with jobs that have not ended, or had not at the last poll of the dispatcher.
    pub(super) fn alive(&self) -> Vec<String> {
        let alive = self.jobs.values().filter(|job| job.over.is_none());
        alive.map(|job| job.attempt.uuid.clone()).chain(self.seen_alive.iter().cloned()).collect()
    }

    pub(super) fn is_known_alive(&self, attempt: &Attempt) -> bool {
        let lifetimes =
            |job: &&PoolJob| job.attempt == *attempt && job.over.is_none() && !self.is_silent(job);
        self.jobs.values().any(|job| lifetimes(&job))
    }

    pub(super) fn describe_leftovers(&self) -> Option<String> {
        let jobs: Vec<String> =
            self.jobs.values().filter(|job| job.over.is_none()).map(|job| job.attempt.to_string()).collect();
        let workers: Vec<u64> = self.workers.iter().map(|worker| worker.number).collect();
        let is_empty = jobs.is_empty() && workers.is_empty();
        (!is_empty).then(|| format!("jobs {jobs:?} on workers {workers:?}"))
    }

    /// Marks a job as ended, regardless of its executor.
    pub(super) fn end(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.over.get_or_insert_with(Instant::now);
        }
    }

    /// Records the end of an executor, and so of its job.
    pub(super) fn ended(&mut self, id: u64, failed: bool) {
        // A silent worker does not report it.
        if self.jobs.get(&id).is_some_and(|job| self.is_silent(job)) {
            return;
        }
        self.end(id);
        let number = self.jobs.get(&id).and_then(|job| job.worker);
        if let Some(worker) = self.workers.iter_mut().find(|worker| Some(worker.number) == number) {
            worker.since = Instant::now();
            worker.failures += u32::from(failed);
            // A worker on which nothing starts is taken out of service.
            if worker.failures >= 2 && worker.state == WorkerState::Up && worker.number % 7 == 1 {
                worker.state = WorkerState::Broken;
            }
        }
    }

    pub(super) fn kill(&mut self, id: u64) {
        if let Some(task) = self.jobs.get_mut(&id).and_then(|job| job.task.take()) {
            task.abort();
        }
        self.ended(id, false);
    }

    pub(super) fn free(&self, worker: &PoolWorker) -> ResourceAmount {
        let theirs = self.jobs.values().filter(|job| job.worker == Some(worker.number) && job.over.is_none());
        theirs.fold(worker.size, |free, job| free.saturating_sub(to_amount(&job.needs)))
    }

    /// Assigns workers to waiting jobs, highest priority first.
    pub(super) fn assign(&mut self) -> Vec<u64> {
        let mut waiting: Vec<(u64, u64)> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.worker.is_none() && job.over.is_none())
            .map(|(id, job)| (u64::MAX - job.priority, *id))
            .collect();
        waiting.sort_unstable();
        let mut begun = Vec::new();
        for (_, id) in waiting {
            let Some(needs) = self.jobs.get(&id).map(|job| to_amount(&job.needs)) else { continue };
            let fits =
                |worker: &&PoolWorker| worker.state == WorkerState::Up && can_hold(self.free(worker), needs);
            let tightest = self.workers.iter().filter(fits).min_by_key(|worker| self.free(worker).cpus);
            let Some(number) = tightest.map(|worker| worker.number) else { continue };
            if let Some(job) = self.jobs.get_mut(&id) {
                job.worker = Some(number);
                job.begun = Some(Instant::now());
                begun.push(id);
            }
        }
        begun
    }

    fn advance_workers(&mut self, fired: &mut Vec<&'static str>) {
        let now = Instant::now();
        let mut lost = Vec::new();
        for worker in &mut self.workers {
            let is_due = worker.next_at.is_some_and(|at| now >= at);
            let next = match worker.state {
                WorkerState::Booting if is_due => WorkerState::Up,
                WorkerState::Up if is_due && worker.number % 7 == 0 => WorkerState::Silent,
                WorkerState::Up if is_due && worker.number % 7 == 2 => WorkerState::Broken,
                WorkerState::Silent if now - worker.since > SILENT_PERIOD => WorkerState::Down,
                same @ (WorkerState::Booting
                | WorkerState::Up
                | WorkerState::Broken
                | WorkerState::Silent
                | WorkerState::Down) => same,
            };
            if next == worker.state {
                continue;
            }
            worker.next_at = match (next, worker.number % 7) {
                (WorkerState::Up, 0) => Some(now + self.rng.millis(1_000, 90_000)),
                (WorkerState::Up, 2) => Some(now + self.rng.millis(1_000, 200_000)),
                _ => None,
            };
            match next {
                WorkerState::Silent => fired.push("worker silent"),
                WorkerState::Broken => fired.push("worker broken"),
                WorkerState::Down => lost.push(worker.number),
                WorkerState::Booting | WorkerState::Up => {}
            }
            (worker.state, worker.since) = (next, now);
        }
        let late = |job: &PoolJob| job.begun.is_some_and(|begun| now - begun > TIME_LIMIT);
        let over: Vec<(u64, bool)> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.over.is_none() && !self.is_silent(job))
            .filter_map(|(id, job)| {
                let is_lost = job.worker.is_some_and(|worker| lost.contains(&worker));
                (is_lost || late(job)).then_some((*id, is_lost))
            })
            .collect();
        for (id, is_lost) in over {
            if is_lost { self.end(id) } else { self.kill(id) }
        }
        self.jobs.retain(|_, job| job.over.is_none_or(|over| now - over < ENDED_SHOWN_FOR));
    }

    fn create_workers(&mut self, fired: &mut Vec<&'static str>) {
        let now = Instant::now();
        if self.limited_until.is_some_and(|until| now < until) {
            return;
        }
        // Includes jobs that were submitted before their worker disappeared.
        let waiting = self.jobs.values().filter(|job| job.worker.is_none() && job.over.is_none());
        let mut wanted: Vec<ContainerNeeds> = waiting.map(|job| job.needs.clone()).collect();
        wanted.append(&mut self.demand);
        for needs in wanted {
            if self.workers.len() >= WORKERS_MAX {
                return;
            }
            let is_coming = |worker: &PoolWorker| {
                worker.state == WorkerState::Booting && can_hold(worker.size, to_amount(&needs))
            };
            if self.workers.iter().any(is_coming) {
                continue;
            }
            let shunned = |kind: &usize| self.shunned.get(kind).is_some_and(|until| now < *until);
            let kind = (0..WORKER_SIZES.len())
                .find(|kind| can_hold(WORKER_SIZES[*kind], to_amount(&needs)) && !shunned(kind));
            let Some(kind) = kind else { continue };
            if self.rng.chance(RATE_LIMIT_PERCENT) {
                fired.push("rate limit");
                self.limited_until = Some(now + RATE_LIMIT_PERIOD);
                return;
            }
            let never = kind == UNAVAILABLE_SIZE || kind == LATE_SIZE && now - self.opened < LATE_SIZE_DELAY;
            if never || self.rng.chance(FAILURE_PERCENT) {
                fired.push(match kind {
                    UNAVAILABLE_SIZE => "size never available",
                    LATE_SIZE if never => "size unavailable at first",
                    _ => "create refused",
                });
                self.shunned.insert(kind, now + SIZE_RETRY_DELAY);
                continue;
            }
            let ready = now + self.rng.millis(5_000, 60_000);
            self.workers.push(PoolWorker {
                number: self.next_worker,
                size: WORKER_SIZES[kind],
                state: WorkerState::Booting,
                since: now,
                next_at: Some(ready),
                failures: 0,
            });
            self.next_worker += 1;
        }
    }

    fn destroy_idle_workers(&mut self, fired: &mut Vec<&'static str>) {
        let now = Instant::now();
        let is_used = |worker: &PoolWorker| {
            self.jobs.values().any(|job| job.worker == Some(worker.number) && job.over.is_none())
        };
        let mut unused: Vec<u64> = Vec::new();
        for worker in &self.workers {
            let is_wanted = match worker.state {
                WorkerState::Booting | WorkerState::Silent => true,
                WorkerState::Up => is_used(worker) || now - worker.since < IDLE_MAX,
                WorkerState::Broken => is_used(worker),
                WorkerState::Down => now - worker.since < DOWN_PERIOD,
            };
            if !is_wanted {
                unused.push(worker.number);
            }
        }
        for number in unused {
            if self.rng.chance(FAILURE_PERCENT) {
                fired.push("destroy refused");
                continue;
            }
            self.workers.retain(|worker| worker.number != number);
            let theirs: Vec<u64> =
                self.jobs.iter().filter(|(_, job)| job.worker == Some(number)).map(|(id, _)| *id).collect();
            for id in theirs {
                self.kill(id);
            }
        }
    }
}

pub(super) fn to_amount(needs: &ContainerNeeds) -> ResourceAmount {
    ResourceAmount { cpus: needs.cpus, memory: needs.memory, gpus: needs.gpus }
}

pub(super) fn can_hold(size: ResourceAmount, needs: ResourceAmount) -> bool {
    size.cpus >= needs.cpus && size.memory >= needs.memory
}

/// Adds jobs with the dispatcher's tag for unknown attempts, as left by an earlier process.
pub(super) fn add_orphan_jobs(state: &SharedQueueState, at: usize) {
    let mut state = state.lock();
    let pool = &mut state.pools[at];
    for number in 0..3 {
        let id = pool.next_job;
        pool.next_job += 1;
        let attempt = Attempt { uuid: format!("wlass-dz642-stray{number}"), number: 1 };
        let needs = ContainerNeeds { cpus: 1, memory: GIB, ..ContainerNeeds::default() };
        let job = PoolJob {
            attempt,
            needs,
            priority: 1,
            token: String::new(),
            worker: None,
            begun: None,
            over: None,
            stop: watch::Sender::new(false),
            task: None,
        };
        pool.jobs.insert(id, job);
    }
    state.record_fault("stale tag");
}

/// Runs the scheduler's loop.
pub(super) async fn run_scheduler(state: SharedQueueState, at: usize) {
    loop {
        sleep(TICK).await;
        let mut state = state.lock();
        let mut fired = Vec::new();
        let pool = &mut state.pools[at];
        pool.advance_workers(&mut fired);
        pool.create_workers(&mut fired);
        pool.destroy_idle_workers(&mut fired);
        for fault in fired {
            state.record_fault(fault);
        }
    }
}
