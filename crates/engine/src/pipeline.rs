//! One pass over one row, in a fixed order: load, observe, decide, act, apply.

use std::{future::Future, time::Duration};

use crate::store::{DbTime, Lease, Queue};

/// Outcome of an apply. A lost lease is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApplyOutcome {
    /// Committed under the lease. `due_in_us` is when the row is due again (`None`: never, or another pipeline
    /// continues with it), `wake` names the pipelines that depend on what was written.
    Written { due_in_us: Option<i64>, wake: Vec<&'static str> },
    /// Nothing was written and there is nothing to write but the lock columns: the engine unlocks the row, together
    /// with those of other workers, and it is due again after `due_in` (`None`: at once).
    Unchanged { due_in: Option<Duration> },
    /// The lease is no longer valid; nothing was written.
    LeaseLost,
    /// A related row is locked by another holder: the engine resets the row, which is processed again later.
    RelatedBusy,
}

/// Controller of one kind of row.
pub trait Pipeline: Send + Sync + 'static {
    type Row: Send + Sync;
    type Observation: Send;
    type Plan: Send;
    type Error: std::error::Error + Send + Sync + 'static;

    fn queue(&self) -> Queue;

    /// Reads the current row. `None`: it is gone, or this pipeline no longer processes it.
    fn load(&self, lease: &Lease) -> impl Future<Output = Result<Option<Self::Row>, Self::Error>> + Send;

    /// Reads the state of agents and backends. No transaction is open.
    fn observe(
        &self,
        lease: &Lease,
        row: &Self::Row,
    ) -> impl Future<Output = Result<Self::Observation, Self::Error>> + Send;

    /// Computes the plan. Pure; `now` is the database's time.
    fn decide(row: &Self::Row, seen: Self::Observation, now: DbTime) -> Self::Plan;

    /// Performs the external effects; idempotent; every call to an agent carries `lease.epoch`.
    fn act(
        &self,
        lease: &Lease,
        row: &Self::Row,
        plan: &mut Self::Plan,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Writes the plan in one short transaction, guarded by the row's id and the lease's token.
    fn apply(
        &self,
        lease: &Lease,
        row: Self::Row,
        plan: Self::Plan,
    ) -> impl Future<Output = Result<ApplyOutcome, Self::Error>> + Send;
}
