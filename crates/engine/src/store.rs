//! What the crank asks of a database: claim, extend, finish, hand back, and lock related rows.
//!
//! Lock columns of every row a pipeline owns: `status, last_processed_at, due_at, lock_token,
//! lock_expires_at, lock_owner, lock_epoch`. All times are written and compared by the database's
//! clock; no server clock takes part.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use uuid::Uuid;

/// Microseconds since 1970 by the database's clock.
pub type DbTime = i64;

/// The rows a pipeline claims: those of `table` in one of `statuses` that are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The pipeline's name, and the `lock_owner` it writes.
    pub pipeline: &'static str,
    pub table: &'static str,
    pub statuses: &'static [&'static str],
}

/// A row taken: who holds it and which take this is.
#[derive(Clone, Debug)]
pub struct Lease {
    pub id: Uuid,
    pub token: Uuid,
    /// Grows by one with every take of the row; travels with each call to an agent.
    pub epoch: i64,
    /// When the row was taken, by the database's clock.
    pub claimed_at: DbTime,
    /// The local moment just before the claim was sent: expiry counts from here, so that the holder
    /// gives up before anybody else may take over.
    pub requested_at: Instant,
}

impl Lease {
    /// The database's time now, by way of the local monotonic clock.
    pub fn now(&self) -> DbTime {
        self.claimed_at + i64::try_from(self.requested_at.elapsed().as_micros()).unwrap_or(i64::MAX)
    }

    pub fn key(&self) -> LeaseKey {
        LeaseKey { id: self.id, token: self.token }
    }
}

/// Proof of holding a row: every write of the item is guarded by both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseKey {
    pub id: Uuid,
    pub token: Uuid,
}

#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// Oldest `last_processed_at` first.
    pub leases: Vec<Lease>,
    /// Time until the earliest row of this queue that is not due yet, if any. Rows locked by others are
    /// not counted.
    pub next_due_in: Option<Duration>,
}

/// Lock rows of another table for one item of a pipeline.
///
/// The owner is `PIPELINE:ITEM`, so whoever holds the item holds these too: they need no heartbeat,
/// and a new holder of the same item takes them over at once.
#[derive(Clone, Debug)]
pub struct RelatedLock<'a> {
    pub table: &'static str,
    pub ids: &'a [Uuid],
    pub pipeline: &'static str,
    pub item: Uuid,
    pub ttl: Duration,
    /// On failure leave the owner on what was free (and on nothing else), so that other pipelines let go
    /// and the next try gets all of them. Only for rows with one possible parent: two parents that
    /// reserve halves of one set would wait for each other.
    pub reserve: bool,
}

#[derive(Clone, Debug)]
pub enum RelatedLockOutcome {
    /// All of them, each with its own token and epoch.
    Locked(Vec<Lease>),
    /// At least one is held by somebody else; nothing is locked.
    Busy,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{what} in the lease store")]
    Failed {
        what: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Implemented in memory here, on SQLite and Postgres by the server; one conformance suite for all.
pub trait LeaseStore: Send + Sync + 'static {
    /// Takes up to `limit` rows: status in the queue's, due, unlocked or expired, owner empty or ours
    /// (`PIPELINE`, not `PIPELINE:ITEM`); oldest `last_processed_at` first, then by id. Each gets a fresh
    /// token, `epoch + 1`, our owner, and expiry = database now + `ttl`. Two claimers never get the same
    /// row.
    fn claim(
        &self,
        queue: &Queue,
        limit: usize,
        ttl: Duration,
    ) -> impl Future<Output = Result<Claim, StoreError>> + Send;

    /// Moves the expiry of rows still held; the answer names those. The rest are lost.
    fn extend(
        &self,
        queue: &Queue,
        held: &[LeaseKey],
        ttl: Duration,
    ) -> impl Future<Output = Result<Vec<Uuid>, StoreError>> + Send;

    /// The plainest apply: unlock, `last_processed_at` = now, due again after `due_in` (`None` = at once).
    /// Answers the ids that were still held; the others were stale and nothing was written for them.
    fn finish(
        &self,
        queue: &Queue,
        done: &[(LeaseKey, Option<Duration>)],
    ) -> impl Future<Output = Result<Vec<Uuid>, StoreError>> + Send;

    /// Gives rows back untouched (graceful stop): token, expiry and owner cleared, `last_processed_at` kept.
    fn hand_back(
        &self,
        queue: &Queue,
        held: &[LeaseKey],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// A needed related lock is busy: clear token and expiry, keep the owner, `last_processed_at` = now.
    /// False when the row was no longer held.
    fn reset(&self, queue: &Queue, held: LeaseKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Somebody left a request on these rows: they are due at once. For a row that is held, the holder's own
    /// due time does not bury the wish; it comes round again right after the pass.
    fn mark_due(
        &self,
        table: &'static str,
        ids: &[Uuid],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// All of the rows or none. A row can be had when it is unlocked or expired with no owner or ours
    /// (`PIPELINE:ITEM`), and whenever its owner is ours: that lock was taken by an earlier holder of the
    /// same item. A row that does not exist cannot be had.
    fn lock_related(
        &self,
        lock: RelatedLock<'_>,
    ) -> impl Future<Output = Result<RelatedLockOutcome, StoreError>> + Send;

    /// Unlocks related rows that carry these tokens and clears their owner.
    fn unlock_related(
        &self,
        table: &'static str,
        held: &[LeaseKey],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
