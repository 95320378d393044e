//! Monitor of the real pipelines: which replica processes which row, and which hints are lost.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, BatchPipeline, DbTime, Engine, Lease, Pipeline, Queue, Settings};
use windlass_server::{db::Db, pipelines::PipelineRegistry};

use crate::{invariants::Violation, network::ReplicaFreeze, rng::Rng};

/// Rows in progress over all replicas, and the violations found.
#[derive(Clone, Default)]
pub(super) struct PassMonitor(Arc<Mutex<MonitorState>>);

#[derive(Default)]
struct MonitorState {
    working: BTreeMap<(&'static str, Uuid), ActivePass>,
    violations: Vec<Violation>,
    passes: u64,
    /// Time of the last jump of the database's clock.
    jumped: Option<Instant>,
}

#[derive(Clone)]
struct ActivePass {
    replica: usize,
    epoch: i64,
    requested_at: Instant,
    freeze: ReplicaFreeze,
}

impl PassMonitor {
    /// Records a jump of the database's clock: earlier leases may end before their holders can know. Their writes and
    /// calls are fenced all the same.
    pub(super) fn record_clock_jump(&self) {
        self.0.lock().jumped = Some(Instant::now());
    }

    pub(super) fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }

    pub(super) fn passes(&self) -> u64 {
        self.0.lock().passes
    }

    /// Records that a replica starts a pass over a row. No other replica may process it, unless the one with the older
    /// lease could not know that it ended: it is frozen, or the database's clock has jumped since it claimed the row.
    /// (Its writes and calls are fenced; another checker covers that.)
    fn enter(&self, queue: Queue, lease: &Lease, replica: usize, freeze: &ReplicaFreeze) -> PassGuard {
        let mut seen = self.0.lock();
        seen.passes += 1;
        let key = (queue.table, lease.id);
        let me = ActivePass {
            replica,
            epoch: lease.epoch,
            requested_at: lease.requested_at,
            freeze: freeze.clone(),
        };
        let jumped = seen.jumped;
        let other = seen.working.remove(&key);
        if let Some(other) = &other {
            let older = if other.epoch < me.epoch { other } else { &me };
            if !older.freeze.was_frozen() && jumped.is_none_or(|at| at < older.requested_at) {
                let what = format!(
                    "{} {}: replica {replica} starts a pass while the pass of replica {} is still running",
                    queue.table, lease.id, other.replica
                );
                seen.violations.push(Violation { id: "L9", what });
            }
        }
        // The holder of the newer lease is the one that the next pass must not overlap.
        let newer = match other {
            Some(other) if other.epoch > me.epoch => other,
            _ => me,
        };
        seen.working.insert(key, newer);
        PassGuard { watch: self.clone(), key, epoch: lease.epoch }
    }
}

/// Marks a row as in progress until the pass has finished or is dropped.
pub(super) struct PassGuard {
    watch: PassMonitor,
    key: (&'static str, Uuid),
    epoch: i64,
}

impl Drop for PassGuard {
    fn drop(&mut self) {
        let mut seen = self.watch.0.lock();
        if seen.working.get(&self.key).is_some_and(|w| w.epoch == self.epoch) {
            seen.working.remove(&self.key);
        }
    }
}

/// Installs pipelines into an engine, each with a monitor.
pub(super) struct MonitoredInstaller<'a> {
    pub engine: &'a mut Engine<Db>,
    pub settings: Settings,
    pub probe: PipelineProbe,
}

/// State that each monitored pipeline carries.
#[derive(Clone)]
pub(super) struct PipelineProbe {
    pub watch: PassMonitor,
    pub replica: usize,
    pub freeze: ReplicaFreeze,
    pub rng: Arc<Mutex<Rng>>,
    /// Percentage of hints that are lost.
    pub hints_lost: Arc<Mutex<u64>>,
}

impl PipelineProbe {
    fn enter(&self, queue: Queue, lease: &Lease) -> PassGuard {
        self.watch.enter(queue, lease, self.replica, &self.freeze)
    }

    /// Drops some hints.
    fn drop_hints(&self, applied: ApplyOutcome) -> ApplyOutcome {
        match applied {
            ApplyOutcome::Written { due_in_us, mut wake } => {
                let percent = *self.hints_lost.lock();
                wake.retain(|_| !self.rng.lock().chance(percent));
                ApplyOutcome::Written { due_in_us, wake }
            }
            ApplyOutcome::Unchanged { .. } | ApplyOutcome::LeaseLost | ApplyOutcome::RelatedBusy => applied,
        }
    }
}

impl PipelineRegistry for MonitoredInstaller<'_> {
    fn add<P: Pipeline>(&mut self, pipeline: P) {
        self.engine
            .spawn(MonitoredPipeline { inner: pipeline, probe: self.probe.clone() }, self.settings.clone());
    }

    fn add_batch<P: BatchPipeline>(&mut self, pipeline: P) {
        self.engine.spawn_batch(
            MonitoredBatch { inner: pipeline, probe: self.probe.clone() },
            self.settings.clone(),
        );
    }
}

struct MonitoredPipeline<P> {
    inner: P,
    probe: PipelineProbe,
}

impl<P: Pipeline> Pipeline for MonitoredPipeline<P> {
    type Row = (P::Row, PassGuard);
    type Observation = P::Observation;
    type Plan = P::Plan;
    type Error = P::Error;

    fn queue(&self) -> Queue {
        self.inner.queue()
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Self::Row>, P::Error> {
        let working = self.probe.enter(self.queue(), lease);
        Ok(self.inner.load(lease).await?.map(|row| (row, working)))
    }

    async fn observe(&self, lease: &Lease, row: &Self::Row) -> Result<P::Observation, P::Error> {
        self.inner.observe(lease, &row.0).await
    }

    fn decide(row: &Self::Row, seen: P::Observation, now: DbTime) -> P::Plan {
        P::decide(&row.0, seen, now)
    }

    async fn act(&self, lease: &Lease, row: &Self::Row, plan: &mut P::Plan) -> Result<(), P::Error> {
        self.inner.act(lease, &row.0, plan).await
    }

    async fn apply(&self, lease: &Lease, row: Self::Row, plan: P::Plan) -> Result<ApplyOutcome, P::Error> {
        let (row, working) = row;
        // From here on the lease guards the write, and after the commit any replica may claim the row.
        drop(working);
        self.inner.apply(lease, row, plan).await.map(|applied| self.probe.drop_hints(applied))
    }
}

struct MonitoredBatch<P> {
    inner: P,
    probe: PipelineProbe,
}

impl<P: BatchPipeline> BatchPipeline for MonitoredBatch<P> {
    type Error = P::Error;

    fn queue(&self) -> Queue {
        self.inner.queue()
    }

    async fn process(&self, leases: Vec<Lease>) -> Result<Vec<(Uuid, ApplyOutcome)>, P::Error> {
        // A batch reads and writes without external calls: its guards are sufficient.
        let outcomes = self.inner.process(leases).await?;
        Ok(outcomes.into_iter().map(|(id, applied)| (id, self.probe.drop_hints(applied))).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    const QUEUE: Queue = Queue { pipeline: "instances", table: "instances", statuses: &[] };

    fn lease(epoch: i64) -> Lease {
        Lease {
            id: Uuid::nil(),
            token: Uuid::from_u128(1),
            epoch,
            claimed_at: 0,
            requested_at: Instant::now(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn two_concurrent_passes_on_a_row_are_a_violation_in_either_order() {
        for (first, second) in [(1, 2), (2, 1)] {
            let watch = PassMonitor::default();
            let _first = watch.enter(QUEUE, &lease(first), 0, &ReplicaFreeze::default());
            let _second = watch.enter(QUEUE, &lease(second), 1, &ReplicaFreeze::default());
            assert_eq!(watch.violations().len(), 1, "{first} before {second}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_jump_excuses_only_leases_taken_before_it() {
        for late in [1, 2] {
            let watch = PassMonitor::default();
            let old = lease(1);
            advance(Duration::from_secs(1)).await;
            watch.record_clock_jump();
            advance(Duration::from_secs(1)).await;
            let new = lease(2);
            let (first, second) = if late == 1 { (&new, &old) } else { (&old, &new) };
            let _first = watch.enter(QUEUE, first, 0, &ReplicaFreeze::default());
            let _second = watch.enter(QUEUE, second, 1, &ReplicaFreeze::default());
            assert_eq!(watch.violations(), [], "the older lease starts {late}.");
            let _third = watch.enter(QUEUE, &lease(3), 2, &ReplicaFreeze::default());
            assert_eq!(watch.violations().len(), 1, "the newer lease is still in work");
        }
    }
}
