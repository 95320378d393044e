//! Operations that the engine needs from a database: claim, extend, finish, hand back, and lock related rows.
//!
//! Lock columns of every row a pipeline owns:
//! `status, last_processed_at, due_at, lock_token, lock_expires_at, lock_owner, lock_epoch`. All times are written and
//! compared by the database's clock; no server clock is involved.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use uuid::Uuid;

/// Microseconds since 1970 by the database's clock.
pub type DbTime = i64;

/// Rows that a pipeline claims: those of `table` in one of `statuses` that are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Name of the pipeline, and the `lock_owner` that it writes.
    pub pipeline: &'static str,
    pub table: &'static str,
    pub statuses: &'static [&'static str],
}

/// A claimed row, with the token and epoch of the claim.
#[derive(Clone, Debug)]
pub struct Lease {
    pub id: Uuid,
    pub token: Uuid,
    /// Increases by one with every claim of the row; sent with each call to an agent.
    pub epoch: i64,
    /// Time of the claim, by the database's clock.
    pub claimed_at: DbTime,
    /// Local time just before the claim was sent: expiry counts from here, so that the holder stops before another
    /// replica may claim the row.
    pub requested_at: Instant,
}

impl Lease {
    /// Returns the current time of the database, derived from the local monotonic clock.
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
    /// Time until the earliest row of this queue that is not due yet, if any. Rows locked by others are not counted.
    pub next_due_in: Option<Duration>,
}

/// Locks rows of another table for one item of a pipeline.
///
/// The owner is `PIPELINE:ITEM`, so the holder of the item also holds these: they need no heartbeat, and a new holder
/// of the same item acquires them at once.
#[derive(Clone, Debug)]
pub struct RelatedLock<'a> {
    pub table: &'static str,
    pub ids: &'a [Uuid],
    pub pipeline: &'static str,
    pub item: Uuid,
    pub ttl: Duration,
    /// If the lock fails, leave the owner on the rows that were free (and on no others), so that other pipelines
    /// release them and the next attempt locks all of them. Only for rows with one possible parent: two parents that
    /// reserve halves of one set would wait for each other.
    pub reserve: bool,
}

#[derive(Clone, Debug)]
pub enum RelatedLockOutcome {
    /// All of them, each with its own token and epoch.
    Locked(Vec<Lease>),
    /// At least one has another holder; nothing is locked.
    Busy,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("failed to {what} in the lease store")]
    Failed {
        what: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Implemented in memory here, on SQLite and Postgres by the server; one conformance suite for all.
pub trait LeaseStore: Send + Sync + 'static {
    /// Claims up to `limit` rows: status in the queue's, due, unlocked or expired, owner empty or ours (`PIPELINE`, not
    /// `PIPELINE:ITEM`); oldest `last_processed_at` first, then by id. Each gets a fresh token, `epoch + 1`, our owner,
    /// and expiry = database now + `ttl`. Two callers never claim the same row.
    fn claim(
        &self,
        queue: &Queue,
        limit: usize,
        ttl: Duration,
    ) -> impl Future<Output = Result<Claim, StoreError>> + Send;

    /// Extends the expiry of rows still held and returns their ids. The others are lost.
    fn extend(
        &self,
        queue: &Queue,
        held: &[LeaseKey],
        ttl: Duration,
    ) -> impl Future<Output = Result<Vec<Uuid>, StoreError>> + Send;

    /// Finishes without a change: unlock, `last_processed_at` = now, due again after `due_in` (`None` = at once).
    /// Returns the ids that were still held; the others were stale and nothing was written for them.
    fn finish(
        &self,
        queue: &Queue,
        done: &[(LeaseKey, Option<Duration>)],
    ) -> impl Future<Output = Result<Vec<Uuid>, StoreError>> + Send;

    /// Hands rows back unchanged (graceful stop): token, expiry and owner cleared, `last_processed_at` kept.
    fn hand_back(
        &self,
        queue: &Queue,
        held: &[LeaseKey],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Resets a row whose related lock is busy: clear token and expiry, keep the owner, `last_processed_at` = now.
    /// Returns false if the row was no longer held.
    fn reset(&self, queue: &Queue, held: LeaseKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Marks rows as due at once, for a request that was stored on them. If a row is held, the holder's due time does
    /// not override the mark; another pass follows right after the current one.
    fn mark_due(
        &self,
        table: &'static str,
        ids: &[Uuid],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Locks all of the rows or none. A row can be locked if it is unlocked or expired with no owner or ours
    /// (`PIPELINE:ITEM`), and whenever its owner is ours: that lock belongs to an earlier holder of the same item. A
    /// row that does not exist cannot be locked.
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
