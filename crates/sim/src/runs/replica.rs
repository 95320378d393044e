//! One simulated server replica: its engine, its connections, and its failures.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_backend::{Backend, Backends};
use windlass_engine::{Engine, Hints, Settings};
use windlass_model::{
    decide::{jobs_running::UNREACHABLE_GRACE, managed_jobs::slots::SlotLimits},
    retry,
};
use windlass_server::{
    db::Db,
    encryption::Keyring,
    logs::{LogStore, notifying_store::NotifyingLogStore},
    parsed_run_spec::RunSpecCache,
    pipelines::{self, PipelineContext},
};

use super::{
    db_faults::{DbFaultRates, FaultyDbLink},
    pass_monitor::{MonitoredInstaller, PassMonitor, PipelineProbe},
};
use crate::{
    cloud::{SimBackend, SimRemoteBackend},
    network::{ReplicaFreeze, SharedSimState, SimNetwork},
    rng::Rng,
};

/// Delays after the first, second, … poll that found nothing.
const IDLE_DELAYS: &[Duration] = &[Duration::from_secs(2), Duration::from_secs(5)];

/// Few slots, so that managed jobs wait for them.
pub(super) const JOB_LIMITS: SlotLimits = SlotLimits { max_launching: 2, max_alive: 3 };

/// State that all replicas share in addition to the database.
#[derive(Clone)]
pub(super) struct SharedState {
    pub(super) logs: Arc<dyn LogStore>,
    pub(super) keys: Arc<Keyring>,
    /// Database calls of all replicas.
    pub(super) calls: Arc<AtomicU64>,
}

pub(super) struct Replica {
    num: usize,
    db: Db,
    state: SharedSimState,
    watch: PassMonitor,
    shared: SharedState,
    rng: Rng,
    freeze: ReplicaFreeze,
    fault_rates: Arc<Mutex<DbFaultRates>>,
    hints_lost: Arc<Mutex<u64>>,
    running: Option<Engine<Db>>,
    back_at: Option<Instant>,
    pub(super) fired: BTreeMap<&'static str, u64>,
}

impl Replica {
    pub(super) fn new(
        num: usize,
        db: &Db,
        state: &SharedSimState,
        watch: &PassMonitor,
        shared: SharedState,
        rng: Rng,
    ) -> Self {
        Self {
            shared,
            num,
            db: db.clone(),
            state: state.clone(),
            watch: watch.clone(),
            rng,
            freeze: ReplicaFreeze::default(),
            fault_rates: Arc::default(),
            hints_lost: Arc::default(),
            running: None,
            back_at: None,
            fired: BTreeMap::new(),
        }
    }

    pub(super) fn start(&mut self) {
        // A new process is not frozen, even if its predecessor was.
        self.freeze = ReplicaFreeze::default();
        self.back_at = None;
        let rng = Arc::new(Mutex::new(self.rng.fork()));
        let network = FaultyDbLink {
            freeze: self.freeze.clone(),
            rng: rng.clone(),
            fault_rates: self.fault_rates.clone(),
            calls: self.shared.calls.clone(),
        };
        let db = self.db.with_fault_hook(Arc::new(network));
        let net = SimNetwork { state: self.state.clone(), freeze: self.freeze.clone() };
        let context = PipelineContext {
            db: db.clone(),
            agents: Arc::new(net),
            backends: Backends::new([
                Arc::new(self.cloud_backend()) as Arc<dyn Backend>,
                Arc::new(SimRemoteBackend(self.cloud_backend())) as Arc<dyn Backend>,
            ]),
            logs: Arc::new(NotifyingLogStore::new(self.shared.logs.clone())),
            keys: self.shared.keys.clone(),
            shapes: RunSpecCache::default(),
            lost_after: UNREACHABLE_GRACE,
            retry_delay: retry::DELAY_FIRST,
            job_limits: JOB_LIMITS,
            images: Default::default(),
            local_processes: Default::default(),
            limits: windlass_server::limits::Limits::default(),
        };
        let mut engine = Engine::new(Arc::new(db), Hints::new());
        let probe = PipelineProbe {
            watch: self.watch.clone(),
            replica: self.num,
            freeze: self.freeze.clone(),
            rng,
            hints_lost: self.hints_lost.clone(),
        };
        let mut settings = Settings::standard(self.rng.draw());
        // Few workers, so that queues build up and leases are held by waiting rows.
        settings.workers = 4;
        // Idle polls are most of the work of a quiet replica; a longer interval finds the same rows.
        settings.idle_delays = IDLE_DELAYS;
        pipelines::register_all(&context, &mut MonitoredInstaller { engine: &mut engine, settings, probe });
        self.running = Some(engine);
    }

    fn cloud_backend(&self) -> SimBackend {
        SimBackend { state: self.state.clone(), freeze: self.freeze.clone() }
    }

    /// Kills the replica: every task stops at its current await.
    pub(super) fn kill(&mut self, back_after: Duration) {
        if self.running.take().is_some() {
            self.count("replica killed");
            self.back_at = Some(Instant::now() + back_after);
        }
    }

    pub(super) fn start_if_due(&mut self) {
        if self.back_at.is_some_and(|at| Instant::now() >= at) {
            self.start();
        }
    }

    pub(super) fn freeze(&mut self, lasts: Duration) {
        if self.running.is_some() {
            self.freeze.until(Instant::now() + lasts);
            self.count("replica frozen");
        }
    }

    pub(super) fn set_misfortune(&mut self, fault_rates: DbFaultRates, hints_lost: u64) {
        *self.fault_rates.lock() = fault_rates;
        *self.hints_lost.lock() = hints_lost;
    }

    /// Restores the replica to normal operation.
    pub(super) fn recover(&mut self) {
        if self.running.is_none() {
            self.start();
        }
    }

    /// Wakes a pipeline of this replica, as the API does after a write.
    pub(super) fn hint(&self, pipeline: &'static str) {
        if let Some(engine) = &self.running {
            engine.hints().hint(pipeline);
        }
    }

    fn count(&mut self, fault: &'static str) {
        *self.fired.entry(fault).or_default() += 1;
    }
}
