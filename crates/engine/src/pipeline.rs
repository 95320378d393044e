//! One pass over one row, in the one order there is: load, observe, decide, act, apply.

use std::{future::Future, time::Duration};

use crate::store::{DbTime, Lease, Queue};

/// What became of an apply. Losing the lease is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApplyOutcome {
    /// Committed under the lease. `due_in_us` is when the row wants to be seen again (`None`: it does not,
    /// or another pipeline takes it from here), `wake` names the pipelines that care about what was written.
    Written { due_in_us: Option<i64>, wake: Vec<&'static str> },
    /// Nothing was written and there is nothing to write but the lock columns: the engine unlocks the row,
    /// together with those of other workers, and it is due again after `due_in` (`None`: at once).
    Unchanged { due_in: Option<Duration> },
    /// Somebody else holds the row by now; nothing was written.
    LeaseLost,
    /// A related row is locked by somebody else: the engine resets the row and it comes round again.
    RelatedBusy,
}

/// The hands of one kind of row.
pub trait Pipeline: Send + Sync + 'static {
    type Row: Send + Sync;
    type Observation: Send;
    type Plan: Send;
    type Error: std::error::Error + Send + Sync + 'static;

    fn queue(&self) -> Queue;

    /// Reads the row as it is now. `None`: it is gone, or no longer ours to process.
    fn load(&self, lease: &Lease) -> impl Future<Output = Result<Option<Self::Row>, Self::Error>> + Send;

    /// Reads the world. No transaction is open.
    fn observe(
        &self,
        lease: &Lease,
        row: &Self::Row,
    ) -> impl Future<Output = Result<Self::Observation, Self::Error>> + Send;

    /// Pure. `now` is the database's time.
    fn decide(row: &Self::Row, seen: Self::Observation, now: DbTime) -> Self::Plan;

    /// Changes the world; idempotent; every call to an agent carries `lease.epoch`.
    fn act(
        &self,
        lease: &Lease,
        row: &Self::Row,
        plan: &mut Self::Plan,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// One short transaction, guarded by the row's id and the lease's token.
    fn apply(
        &self,
        lease: &Lease,
        row: Self::Row,
        plan: Self::Plan,
    ) -> impl Future<Output = Result<ApplyOutcome, Self::Error>> + Send;
}
