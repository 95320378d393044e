//! Simulation of runs: the real pipelines and the real SQL on virtual time, with seeded faults.
//!
//! One seed is one history: two or three replicas, a few hosts with GPUs and a cloud with more of them, users who
//! submit and stop runs, launch and cancel managed jobs and change fleets and volumes, and faults of every kind:
//! replicas killed at any await or frozen beyond their leases, lost and duplicated hints and calls, partitioned and
//! rebooted hosts, slow connections, commits whose acknowledgement is lost, a database clock that jumps, a cloud that
//! is full, unresponsive or slow, preempts machines and does not detach disks. Then the faults stop, and everything
//! must end; finally everything is deleted, and nothing may remain. Checkers read the events, the journals of hosts and
//! cloud, the rows and the stored logs of jobs; never the server's own logs.

mod db_faults;
mod history;
mod memory_logs;
mod pass_monitor;
mod replica;
#[cfg(test)]
mod schedules;
mod workload;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use windlass_engine::settings::LEASE_TTL;
use windlass_model::{id::InstanceId, plan::place::RESERVE_AFTER};
use windlass_server::{
    db::{Db, instance_queue, invariant_queries},
    encryption::Keyring,
    params,
};

use self::{
    memory_logs::MemoryLogs,
    pass_monitor::PassMonitor,
    replica::{Replica, SharedState},
    workload::Workload,
};
use crate::{
    cloud,
    invariants::{self, History, Violation},
    network::{NetworkFaultRates, SharedSimState, SimState},
    rng::Rng,
    runs::db_faults::DbFaultRates,
};

/// 2026-01-01, the start of every simulated history.
const EPOCH_US: i64 = 1_767_225_600_000_000;
/// Duration of the faults.
const FAULT_PERIOD: Duration = Duration::from_secs(8 * 60);
/// Time limit for recovery after the faults. The longest legal wait is the delay of a retry.
const DRAIN_MAX: Duration = Duration::from_secs(60 * 60);
/// Time limit for the deletion of everything.
const SWEEP_MAX: Duration = Duration::from_secs(60 * 60);
/// One in this number of seeds has managed jobs, which are the most expensive part.
const MANAGED_EVERY: u64 = 2;
/// Share of the preferred fault in percent, for seeds with one.
const BIAS_PERCENT: u64 = 70;
/// Time of the stream of small jobs before the large one.
const LARGE_AFTER: Duration = Duration::from_secs(120);
/// Time limit for the start of the large job: until it reserves a host, until the longest of the others ends, and for what
/// happens between.
const START_MAX: Duration = Duration::from_secs(
    RESERVE_AFTER.as_secs().unsigned_abs() + workload::pool::STREAM_RUN_MAX_MS / 1_000 + 90,
);
/// Maximum number of jobs that wait in the stream: a host that is not divided runs them one after the other before the
/// simulation ends.
const STREAM_WAITING_MAX: i64 = 24;
/// Chance of a crash of a server between two small jobs.
const CALM_CRASH_PERCENT: u64 = 4;
/// Interval of the safety checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(120);

/// The result of one seed.
#[derive(Debug)]
pub struct Report {
    pub seed: u64,
    pub violations: Vec<Violation>,
    /// Hash of the whole event history: the same seed must produce the same one.
    pub trace: u64,
    /// Number of faults of each kind that occurred.
    pub fired: BTreeMap<&'static str, u64>,
    pub runs: usize,
    /// Number of preemptions by the scheduler.
    pub preemptions: usize,
    pub managed_jobs: usize,
    /// Ends of managed tasks, and what happened to them.
    pub outcomes: BTreeMap<String, u64>,
    pub passes: u64,
    /// Database calls of all replicas.
    pub calls: u64,
    pub virtual_secs: u64,
}

/// The preferred fault of a seed, which exposes a planted bug that depends on it sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultBias {
    /// All faults at random.
    Mixed,
    /// The database's clock often jumps ahead: leases end earlier than their holders can know.
    ClockJumps,
    /// Most calls are slow: passes take longer than a lease.
    SlowCalls,
}

/// Users of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenancy {
    /// One project.
    Single,
    /// Several projects that share hosts, with quotas, classes and preemption.
    Shared,
}

/// Runs one seed from start to end.
pub fn simulate(seed: u64) -> Result<Report> {
    simulate_keeping(seed, Tenancy::Single, None)
}

/// Runs one seed with several projects that share hosts.
pub fn simulate_shared(seed: u64) -> Result<Report> {
    simulate_keeping(seed, Tenancy::Shared, None)
}

/// Runs one seed with a preferred fault.
pub fn simulate_with(seed: u64, bias: FaultBias) -> Result<Report> {
    virtual_time_runtime()?.block_on(async { RunSim::begin(seed, bias, Tenancy::Single)?.play().await })
}

/// Runs one seed. If it violates an invariant, its database is stored in that directory as `seed-N.db`.
pub fn simulate_keeping(seed: u64, tenancy: Tenancy, folder: Option<&Path>) -> Result<Report> {
    // Inside the runtime, so that all time is virtual.
    virtual_time_runtime()?.block_on(async {
        let sim = RunSim::begin(seed, FaultBias::Mixed, tenancy)?;
        let db = sim.db.clone();
        let report = sim.play().await?;
        if let Some(folder) = folder.filter(|_| !report.violations.is_empty()) {
            std::fs::create_dir_all(folder)?;
            let file = folder.join(format!("seed-{seed}.db"));
            db.query(invariant_queries::VACUUM_INTO, params![file.display().to_string()]).await?;
        }
        Ok(report)
    })
}

fn virtual_time_runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?)
}

struct RunSim {
    seed: u64,
    bias: FaultBias,
    rng: Rng,
    state: SharedSimState,
    db: Db,
    /// Offset of the database's clock from true time, in microseconds.
    clock_ahead: Arc<AtomicI64>,
    workload: Workload,
    replicas: Vec<Replica>,
    watch: PassMonitor,
    logs: Arc<MemoryLogs>,
    calls: Arc<AtomicU64>,
    history: History,
    started: Instant,
    /// Seconds that the large job of shared hosts waited.
    started_after: Option<u64>,
}

/// A key without access to anything, for hosts without logins.
fn ssh_key() -> Result<String> {
    let key = ssh_key::PrivateKey::from(ssh_key::private::Ed25519Keypair::from_seed(&[7; 32]));
    Ok(key.to_openssh(ssh_key::LineEnding::LF)?.to_string())
}

impl RunSim {
    fn begin(seed: u64, bias: FaultBias, tenancy: Tenancy) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let started = Instant::now();
        let clock_ahead = Arc::new(AtomicI64::new(0));
        let ahead = clock_ahead.clone();
        let clock = move || {
            let elapsed = i64::try_from(started.elapsed().as_micros()).unwrap_or(i64::MAX);
            EPOCH_US + elapsed + ahead.load(Ordering::Relaxed)
        };
        let db = Db::open_inline(Arc::new(clock), rng.draw())?;
        let (logs, keys) = (Arc::new(MemoryLogs::default()), Arc::new(Keyring::ephemeral()?));
        let workload = Workload::random(
            &mut rng,
            &db,
            keys.clone(),
            (seed.is_multiple_of(MANAGED_EVERY), tenancy == Tenancy::Shared),
        )?;
        let state = SimState::new(EPOCH_US, rng.fork());
        let watch = PassMonitor::default();
        let count = rng.between(2, 3) as usize;
        let calls: Arc<AtomicU64> = Arc::default();
        let shared = SharedState { logs: logs.clone(), keys, calls: calls.clone() };
        let replicas =
            (0..count).map(|n| Replica::new(n, &db, &state, &watch, shared.clone(), rng.fork())).collect();
        Ok(Self {
            seed,
            bias,
            rng,
            state,
            db,
            clock_ahead,
            workload,
            replicas,
            watch,
            logs,
            calls,
            history: History::default(),
            started,
            started_after: None,
        })
    }

    /// Creates everything that exists before the replicas start.
    async fn prepare(&mut self) -> Result<()> {
        let limits = replica::JOB_LIMITS;
        for statement in invariant_queries::slot_watch::statements(limits.max_launching, limits.max_alive) {
            self.db.query(statement, Vec::new()).await?;
        }
        if self.workload.has_pool() {
            for statement in invariant_queries::pool_watch::statements() {
                self.db.query(statement, Vec::new()).await?;
            }
        }
        self.workload.set_up_env(&mut self.rng, &self.db, &self.state).await
    }

    async fn play(mut self) -> Result<Report> {
        self.prepare().await?;
        self.set_misfortune(true);
        for replica in &mut self.replicas {
            replica.start();
        }
        let mut violations = self.bias().await?;
        if violations.is_empty() {
            violations = self.recover_and_check().await?;
        }
        if violations.is_empty() && self.workload.has_pool() {
            violations = self.calm().await?;
        }
        if violations.is_empty() {
            violations = self.sweep().await?;
        }
        self.read().await?;
        let history = &self.history;
        let mut hasher = DefaultHasher::new();
        for event in &history.events {
            (event.at, &event.entity, event.entity_id, &event.from, &event.to, event.epoch).hash(&mut hasher);
        }
        let mut fired = self.state.lock().fired.clone();
        for replica in &self.replicas {
            for (fault, times) in &replica.fired {
                *fired.entry(fault).or_default() += times;
            }
        }
        Ok(Report {
            seed: self.seed,
            violations,
            trace: hasher.finish(),
            fired,
            runs: history.runs.len(),
            preemptions: history.pool.preemptions.len(),
            managed_jobs: history.managed.len(),
            outcomes: invariants::managed::count_outcomes(history),
            passes: self.watch.passes(),
            calls: self.calls.load(Ordering::Relaxed),
            virtual_secs: self.started.elapsed().as_secs(),
        })
    }

    fn set_misfortune(&mut self, on: bool) {
        let (rates, fault_rates, hints_lost) = if on {
            let mut rates = NetworkFaultRates {
                lost: self.rng.between(0, 6),
                unanswered: self.rng.between(0, 6),
                doubled: self.rng.between(0, 8),
                slow: self.rng.between(0, 10),
            };
            let mut fault_rates = DbFaultRates {
                refused: self.rng.between(0, 2),
                acknowledgement_lost: self.rng.between(0, 2),
                slow: self.rng.between(0, 5),
            };
            if self.bias == FaultBias::SlowCalls {
                (rates.slow, fault_rates.slow) = (BIAS_PERCENT, BIAS_PERCENT);
            }
            (rates, fault_rates, *self.rng.pick(&[0, 20, 100]))
        } else {
            (NetworkFaultRates::default(), DbFaultRates::default(), 0)
        };
        let bad = |rng: &mut Rng, most: u64| if on { rng.between(0, most) } else { 0 };
        let cloud = cloud::CloudFaultRates {
            lost: bad(&mut self.rng, 6),
            unanswered: bad(&mut self.rng, 6),
            slow: bad(&mut self.rng, 10),
            no_capacity: bad(&mut self.rng, 40),
            slow_boot: bad(&mut self.rng, 30),
            never_boots: bad(&mut self.rng, 6),
            listed_late: bad(&mut self.rng, 30),
            attach_refused: bad(&mut self.rng, 30),
            attach_hangs: bad(&mut self.rng, 30),
            detach_hangs: bad(&mut self.rng, 60),
        };
        self.state.lock().cloud.rates = cloud;
        self.state.lock().set_rates(rates);
        for replica in &mut self.replicas {
            replica.set_misfortune(fault_rates, hints_lost);
        }
    }

    /// Performs user actions and injects faults until the fault period has passed.
    async fn bias(&mut self) -> Result<Vec<Violation>> {
        let mut inspected = Instant::now();
        while self.started.elapsed() < FAULT_PERIOD {
            sleep(self.rng.millis(100, 12_000)).await;
            if self.rng.chance(55) {
                self.workload.act(&mut self.rng, &self.db, &self.replicas).await?;
            } else {
                self.inject_fault();
            }
            for replica in &mut self.replicas {
                replica.start_if_due();
            }
            if inspected.elapsed() >= CHECK_INTERVAL {
                inspected = Instant::now();
                let found = self.check().await?;
                if !found.is_empty() {
                    return Ok(found);
                }
            }
        }
        Ok(Vec::new())
    }

    fn inject_fault(&mut self) {
        let victim = self.rng.between(0, self.replicas.len() as u64 - 1) as usize;
        let jumps = self.bias == FaultBias::ClockJumps && self.rng.chance(BIAS_PERCENT);
        match if jumps { 12 } else { self.rng.between(1, 12) } {
            1..=4 => {
                let back = self.rng.millis(100, 60_000);
                self.replicas[victim].kill(back);
            }
            5 | 6 => {
                let lasts = self.rng.millis(1_000, 90_000);
                self.replicas[victim].freeze(lasts);
            }
            7 | 8 => {
                let lasts = self.rng.millis(1_000, 300_000);
                if let Some(host) = self.random_host() {
                    self.state.lock().cut(host, lasts);
                }
            }
            9 => {
                if let Some(host) = self.random_host() {
                    self.state.lock().reboot(host);
                }
            }
            10 => self.state.lock().lose_machine(true),
            11 => self.state.lock().lose_machine(false),
            _ => {
                // Only ahead: the database's time never goes back.
                let by = self.rng.between(0, 20_000_000);
                self.watch.record_clock_jump();
                self.clock_ahead.fetch_add(i64::try_from(by).unwrap_or_default(), Ordering::Relaxed);
            }
        }
    }

    fn random_host(&mut self) -> Option<InstanceId> {
        let up = self.state.lock().up();
        (!up.is_empty()).then(|| *self.rng.pick(&up))
    }

    /// Stops the faults and checks that everything ends without violations.
    async fn recover_and_check(&mut self) -> Result<Vec<Violation>> {
        self.set_misfortune(false);
        self.state.lock().heal();
        for replica in &mut self.replicas {
            replica.recover();
        }
        self.workload.stop_schedules(&self.db).await?;
        let deadline = Instant::now() + DRAIN_MAX;
        loop {
            sleep(CHECK_INTERVAL).await;
            let mut found = self.check().await?;
            found.extend(invariants::check_ssh_hosts(&self.history));
            if !found.is_empty() {
                return Ok(found);
            }
            let open = invariants::check_after_faults(&self.history);
            if open.is_empty() || Instant::now() >= deadline {
                return Ok(open);
            }
        }
    }

    /// Submits a stream of small jobs of several projects and a large one of another project, without faults of hosts. The
    /// large one must start in time, and each preemption must be followed by the start for which it is. Servers crash one
    /// at a time, which may delay everything by a lease.
    async fn calm(&mut self) -> Result<Vec<Violation>> {
        // Hosts that failed are not replaced.
        let fleet = self.workload.hosts_fleet().0;
        let is_up = |row: &invariants::InstanceRow| row.fleet_id == Some(fleet) && !row.finished;
        if self.history.instances.iter().filter(|row| is_up(row)).count() == 0 {
            return Ok(Vec::new());
        }
        self.workload.begin_calm(&mut self.rng, &self.db).await?;
        let since = Instant::now();
        let (mut large, mut crashes, mut crashed_until) = (None, 0_u32, since);
        while since.elapsed() < LARGE_AFTER + START_MAX + LEASE_TTL * crashes {
            if Instant::now() >= crashed_until && self.rng.chance(CALM_CRASH_PERCENT) {
                crashed_until = self.crash_replica();
                crashes += 1;
                self.history.pool.crashes.push(self.db.now().await?.0);
            }
            for replica in &mut self.replicas {
                replica.start_if_due();
            }
            let waiting = instance_queue::queue(&self.db, STREAM_WAITING_MAX).await?.len();
            if i64::try_from(waiting)? < STREAM_WAITING_MAX {
                self.workload.submit_small(&mut self.rng, &self.db).await?;
            }
            if large.is_none() && since.elapsed() >= LARGE_AFTER {
                let run = self.workload.submit_large(&mut self.rng, &self.db).await?;
                large = run.map(|run| (run, Instant::now()));
            }
            let at = self.rng.between(0, self.replicas.len() as u64 - 1) as usize;
            self.replicas[at].hint("jobs_submitted");
            sleep(self.rng.millis(500, 6_000)).await;
            if let Some((run, submitted)) = large
                && self.has_started(run.0).await?
            {
                self.started_after = Some(submitted.elapsed().as_secs());
                break;
            }
        }
        if self.started_after.is_none() {
            let limit = START_MAX + LEASE_TTL * crashes;
            let what = format!("the large job did not start within {} s", limit.as_secs());
            return Ok(vec![Violation { id: "S1", what }]);
        }
        self.recover_and_check().await
    }

    /// Kills or freezes a replica, and returns the time when it runs again.
    fn crash_replica(&mut self) -> Instant {
        let victim = self.rng.between(0, self.replicas.len() as u64 - 1) as usize;
        let lasts = self.rng.millis(1_000, 40_000);
        if self.rng.chance(60) {
            self.replicas[victim].kill(lasts);
        } else {
            self.replicas[victim].freeze(lasts);
        }
        Instant::now() + lasts
    }

    async fn has_started(&self, run: Uuid) -> Result<bool> {
        Ok(!self.db.query(invariant_queries::PLACED_JOBS, params![run]).await?.is_empty())
    }

    /// Deletes everything and checks that nothing remains that costs money.
    async fn sweep(&mut self) -> Result<Vec<Violation>> {
        let deadline = Instant::now() + SWEEP_MAX;
        loop {
            self.workload.sweep(&self.db).await?;
            sleep(CHECK_INTERVAL).await;
            let found = self.check().await?;
            if !found.is_empty() {
                return Ok(found);
            }
            let left = invariants::check_after_deletion(&self.history);
            if left.is_empty() || Instant::now() >= deadline {
                return Ok(left);
            }
        }
    }

    async fn read(&mut self) -> Result<()> {
        history::read_history(&mut self.history, &self.db, &self.state, &self.workload, &self.logs).await
    }

    async fn check(&mut self) -> Result<Vec<Violation>> {
        self.read().await?;
        let mut found = invariants::check_always(&self.history);
        found.extend(self.watch.violations());
        Ok(found)
    }
}
