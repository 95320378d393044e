//! Lease store in memory: the reference for the databases, and the store of the engine's tests.
//!
//! Its clock is tokio's plus an offset that tests may change, so it follows `tokio::time::pause` and can differ from
//! the server's clock as a real database may.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    settings::URGENT_AFTER,
    store::{Claim, DbTime, Lease, LeaseKey, LeaseStore, Queue, RelatedLock, RelatedLockOutcome, StoreError},
};

/// Initial time of the clock: an arbitrary date, in microseconds.
const EPOCH: DbTime = 1_700_000_000_000_000;

/// The lock columns of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub id: Uuid,
    pub status: String,
    pub last_processed_at: DbTime,
    pub due_at: Option<DbTime>,
    pub lock_token: Option<Uuid>,
    pub lock_expires_at: Option<DbTime>,
    pub lock_owner: Option<String>,
    pub lock_epoch: i64,
}

impl Row {
    /// Creates an unlocked row that was never claimed and is due.
    pub fn new(id: Uuid, status: &str, last_processed_at: DbTime) -> Self {
        Self {
            id,
            status: status.to_owned(),
            last_processed_at,
            due_at: None,
            lock_token: None,
            lock_expires_at: None,
            lock_owner: None,
            lock_epoch: 0,
        }
    }

    fn is_free(&self, now: DbTime) -> bool {
        self.lock_expires_at.is_none_or(|at| at <= now)
    }

    fn is_open_to(&self, owner: &str) -> bool {
        self.lock_owner.as_deref().is_none_or(|held_by| held_by == owner)
    }

    fn lock(&mut self, taken: &LockParams, owner: &str, token: Uuid) -> Lease {
        self.lock_token = Some(token);
        self.lock_expires_at = Some(taken.now + micros(taken.ttl));
        self.lock_owner = Some(owner.to_owned());
        self.lock_epoch += 1;
        Lease {
            id: self.id,
            token,
            epoch: self.lock_epoch,
            claimed_at: taken.now,
            requested_at: taken.requested_at,
        }
    }

    fn unlock(&mut self) {
        self.lock_token = None;
        self.lock_expires_at = None;
        self.lock_owner = None;
    }
}

/// Parameters that all rows of one claim share.
struct LockParams {
    now: DbTime,
    requested_at: Instant,
    ttl: Duration,
}

type Table = BTreeMap<Uuid, Row>;

#[derive(Debug)]
pub struct MemoryStore {
    tables: Mutex<BTreeMap<&'static str, Table>>,
    started: Instant,
    offset_us: AtomicI64,
    tokens: AtomicU64,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    pub fn new() -> Self {
        Self {
            tables: Mutex::default(),
            started: Instant::now(),
            offset_us: AtomicI64::new(0),
            tokens: AtomicU64::new(0),
        }
    }

    /// Returns the current time of the store.
    pub fn now(&self) -> DbTime {
        EPOCH + micros(self.started.elapsed()) + self.offset_us.load(Ordering::Relaxed)
    }

    /// Shifts the store's clock against all others.
    pub fn skew(&self, by_us: i64) {
        self.offset_us.fetch_add(by_us, Ordering::Relaxed);
    }

    /// Adds the row or replaces the one with its id.
    pub fn put(&self, table: &'static str, row: Row) {
        self.tables.lock().entry(table).or_default().insert(row.id, row);
    }

    pub fn row(&self, table: &'static str, id: Uuid) -> Option<Row> {
        self.tables.lock().get(table)?.get(&id).cloned()
    }

    pub fn rows(&self, table: &'static str) -> Vec<Row> {
        self.tables.lock().get(table).map(|rows| rows.values().cloned().collect()).unwrap_or_default()
    }

    /// Performs the apply of a pipeline: changes the row under its lock and unlocks it, in one step. Returns false, and
    /// changes nothing, if it is no longer held.
    pub fn apply(&self, table: &'static str, held: LeaseKey, change: impl FnOnce(&mut Row, DbTime)) -> bool {
        let now = self.now();
        self.with_locked_row(table, held, |row| {
            change(row, now);
            row.last_processed_at = now;
            row.unlock();
        })
    }

    fn fresh_token(&self) -> Uuid {
        Uuid::from_u64_pair(0x7077_696e_646c_6173, self.tokens.fetch_add(1, Ordering::Relaxed))
    }

    fn with_locked_row(&self, table: &'static str, held: LeaseKey, change: impl FnOnce(&mut Row)) -> bool {
        let mut tables = self.tables.lock();
        let row = tables.get_mut(table).and_then(|rows| rows.get_mut(&held.id));
        match row.filter(|row| row.lock_token == Some(held.token)) {
            Some(row) => {
                change(row);
                true
            }
            None => false,
        }
    }
}

impl LeaseStore for MemoryStore {
    async fn claim(&self, queue: &Queue, limit: usize, ttl: Duration) -> Result<Claim, StoreError> {
        let taken = LockParams { now: self.now(), requested_at: Instant::now(), ttl };
        let mut tables = self.tables.lock();
        let Some(rows) = tables.get_mut(queue.table) else { return Ok(Claim::default()) };
        let urgent = taken.now - i64::try_from(URGENT_AFTER.as_micros()).unwrap_or(i64::MAX);
        let mut due = Vec::new();
        let mut next_due_at: Option<DbTime> = None;
        for row in rows.values() {
            if !queue.statuses.contains(&row.status.as_str())
                || !row.is_free(taken.now)
                || !row.is_open_to(queue.pipeline)
            {
                continue;
            }
            match row.due_at.filter(|at| *at > taken.now) {
                Some(at) => next_due_at = Some(next_due_at.map_or(at, |earliest| earliest.min(at))),
                None => due.push((row.due_at > Some(urgent), row.last_processed_at, row.id)),
            }
        }
        due.sort_unstable();
        due.truncate(limit);
        // Claimed rows are processed in the order of their last pass.
        due.sort_unstable_by_key(|(_, last, id)| (*last, *id));
        let take = |(_, _, id)| {
            rows.get_mut(&id).map(|row: &mut Row| {
                row.due_at.get_or_insert(taken.now);
                row.lock(&taken, queue.pipeline, self.fresh_token())
            })
        };
        let leases = due.into_iter().filter_map(take).collect();
        let next_due_in =
            next_due_at.map(|at| Duration::from_micros(u64::try_from(at - taken.now).unwrap_or(0)));
        Ok(Claim { leases, next_due_in })
    }

    async fn extend(&self, queue: &Queue, held: &[LeaseKey], ttl: Duration) -> Result<Vec<Uuid>, StoreError> {
        let expires_at = self.now() + micros(ttl);
        let still = |held: &&LeaseKey| {
            self.with_locked_row(queue.table, **held, |row| row.lock_expires_at = Some(expires_at))
        };
        Ok(held.iter().filter(still).map(|held| held.id).collect())
    }

    async fn finish(
        &self,
        queue: &Queue,
        done: &[(LeaseKey, Option<Duration>)],
    ) -> Result<Vec<Uuid>, StoreError> {
        let now = self.now();
        let still = |(held, due_in): &&(LeaseKey, Option<Duration>)| {
            self.with_locked_row(queue.table, *held, |row| {
                row.last_processed_at = now;
                // Cleared while it was held: a pass was requested.
                row.due_at = row.due_at.and(due_in.map(|due_in| now + micros(due_in)));
                row.unlock();
            })
        };
        Ok(done.iter().filter(still).map(|(held, _)| held.id).collect())
    }

    async fn mark_due(&self, table: &'static str, ids: &[Uuid]) -> Result<(), StoreError> {
        let mut tables = self.tables.lock();
        for id in ids {
            if let Some(row) = tables.get_mut(table).and_then(|rows| rows.get_mut(id)) {
                row.due_at = None;
            }
        }
        Ok(())
    }

    async fn hand_back(&self, queue: &Queue, held: &[LeaseKey]) -> Result<(), StoreError> {
        for held in held {
            self.with_locked_row(queue.table, *held, Row::unlock);
        }
        Ok(())
    }

    async fn reset(&self, queue: &Queue, held: LeaseKey) -> Result<bool, StoreError> {
        let now = self.now();
        Ok(self.with_locked_row(queue.table, held, |row| {
            row.lock_token = None;
            row.lock_expires_at = None;
            row.last_processed_at = now;
        }))
    }

    async fn lock_related(&self, lock: RelatedLock<'_>) -> Result<RelatedLockOutcome, StoreError> {
        let taken = LockParams { now: self.now(), requested_at: Instant::now(), ttl: lock.ttl };
        let owner = format!("{}:{}", lock.pipeline, lock.item);
        let mut tables = self.tables.lock();
        let rows = tables.entry(lock.table).or_default();
        let can_be_had = |row: &Row| {
            row.lock_owner.as_deref() == Some(&owner) || (row.lock_owner.is_none() && row.is_free(taken.now))
        };
        if lock.ids.iter().all(|id| rows.get(id).is_some_and(can_be_had)) {
            let take =
                |id| rows.get_mut(id).map(|row: &mut Row| row.lock(&taken, &owner, self.fresh_token()));
            return Ok(RelatedLockOutcome::Locked(lock.ids.iter().filter_map(take).collect()));
        }
        if lock.reserve {
            for id in lock.ids {
                if let Some(row) = rows.get_mut(id).filter(|row| can_be_had(row)) {
                    row.lock_owner = Some(owner.clone());
                }
            }
        }
        Ok(RelatedLockOutcome::Busy)
    }

    async fn unlock_related(&self, table: &'static str, held: &[LeaseKey]) -> Result<(), StoreError> {
        for held in held {
            self.with_locked_row(table, *held, Row::unlock);
        }
        Ok(())
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
