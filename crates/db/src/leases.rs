//! The engine's lease store on both databases.
//!
//! Every operation is one statement, so it is one transaction with one time. Names of tables and statuses are constants
//! of the code, never input. The rules are the engine's; its conformance suite runs on both databases.

use std::{borrow::Cow, time::Duration};

use tokio::time::Instant;
use uuid::Uuid;
use windlass_engine::{
    Claim, Lease, LeaseKey, LeaseStore, Queue, RelatedLock, RelatedLockOutcome, StoreError,
};

use super::{
    Db, DbError, Dialect, Row, Store, Unit, Val,
    lease_sql::{LOCK_TTL_MAX, POLL_WIDTH, QueueSql, UNLOCK, held_sql, micros, related_sql, reserve_sql},
    postgres::{ClockReading, Pool},
};
use crate::params;

impl Db {
    /// Runs statements of the lease store: on Postgres each by itself on the connection reserved for them, on SQLite in
    /// one unit.
    async fn lease(
        &self,
        what: &'static str,
        statements: Vec<(Cow<'static, str>, Vec<Val>)>,
    ) -> Result<Vec<Vec<Row>>, StoreError> {
        let failed = |error: DbError| StoreError::Failed { what, source: Box::new(error) };
        let Store::Postgres(pool) = &*self.store else {
            let add = |unit: Unit, (sql, params): (Cow<'static, str>, Vec<Val>)| unit.query(sql, params);
            let unit = statements.into_iter().fold(Unit::new(), add);
            let written = self.write_as(what, unit).await.and_then(super::WriteOutcome::done);
            return written.map(|(_, rows)| rows).map_err(failed);
        };
        self.before(what).await.map_err(failed)?;
        let requested = statements.iter().map(|(sql, params)| pool.lease(what, sql, params));
        let answers = futures_util::future::try_join_all(requested).await.map_err(failed)?;
        self.after(what).await.map_err(failed)?;
        Ok(answers)
    }

    /// Polls the rows that can be claimed, after checking the database's clock. `None` if the clock keeps jumping.
    async fn poll(
        &self,
        texts: &'static QueueSql,
        queue: &Queue,
        ttl: Duration,
    ) -> Result<Option<QueuePoll>, DbError> {
        for _ in 0..POLL_ATTEMPTS_MAX {
            let start = Instant::now();
            self.counters.count_poll();
            let poll = self.query(texts.poll.as_str(), params![queue.pipeline]).await?;
            let mut poll = QueuePoll::read(&poll)?;
            let (Store::Postgres(pool), Some(reported)) = (&*self.store, poll.reported) else {
                return Ok(Some(poll));
            };
            if pool.check_clock(start, reported, ttl).await? {
                poll.expired &= pool.watch().is_trusted();
                return Ok(Some(poll));
            }
        }
        Ok(None)
    }

    /// Claims on Postgres: the poll and the claim of unlocked rows are one statement. A jump of the clock is detected
    /// after it, and the times of the leases are corrected by it.
    async fn claim_at_once(
        &self,
        pool: &Pool,
        texts: &'static QueueSql,
        queue: &Queue,
        limit: usize,
        ttl: Duration,
    ) -> Result<Claim, StoreError> {
        let failed = |error: DbError| StoreError::Failed { what: "claim", source: Box::new(error) };
        self.counters.count_poll();
        let requested_at = Instant::now();
        let params = params![limit, micros(ttl), queue.pipeline];
        let answers = self.lease("claim", vec![(texts.poll_and_claim.as_str().into(), params)]).await?;
        let rows = answers.first().map(Vec::as_slice).unwrap_or_default();
        let mut poll = QueuePoll::read(rows).map_err(failed)?;
        let taken = rows.iter().filter(|row| !matches!(row.opt_uuid(POLL_WIDTH), Ok(None)));
        let mut leases = read_claim(taken, POLL_WIDTH, requested_at).map_err(failed)?;
        self.counters.count_claim(leases.len());
        if let Some(reported) = poll.reported {
            let jump = pool.watch().jump(requested_at, Instant::now(), reported.now).unwrap_or(0);
            leases.iter_mut().for_each(|lease| lease.claimed_at -= jump);
            // Expired locks are left alone after a jump, until their holders could have renewed them.
            poll.expired &= pool.check_clock(requested_at, reported, ttl).await.map_err(failed)?;
            poll.expired &= pool.watch().is_trusted();
        }
        if poll.expired && leases.len() < limit {
            let left = limit - leases.len();
            leases.extend(self.claim_rows(&texts.claim, queue, left, ttl, &poll).await?);
        }
        Ok(Claim { leases, next_due_in: poll.next_due_in })
    }

    /// Claims the rows that a poll found.
    async fn claim_rows(
        &self,
        sql: &'static str,
        queue: &Queue,
        limit: usize,
        ttl: Duration,
        poll: &QueuePoll,
    ) -> Result<Vec<Lease>, StoreError> {
        let failed = |error: DbError| StoreError::Failed { what: "claim", source: Box::new(error) };
        let requested_at = Instant::now();
        let mut params = params![limit, micros(ttl), queue.pipeline];
        if poll.expired {
            params.push(poll.reported.map_or(i64::MAX, |reported| reported.now).into());
        }
        let answers = self.lease("claim", vec![(sql.into(), params)]).await?;
        let mut leases = read_claim(answers.iter().flatten(), 0, requested_at).map_err(failed)?;
        self.counters.count_claim(leases.len());
        if let (Store::Postgres(pool), Some(first)) = (&*self.store, leases.first()) {
            // The clock jumped after the poll: the next poll corrects it, and decisions in the meantime use the
            // corrected time.
            let jump = pool.watch().jump(requested_at, Instant::now(), first.claimed_at).unwrap_or(0);
            leases.iter_mut().for_each(|lease| lease.claimed_at -= jump);
        }
        Ok(leases)
    }

    /// Repairs rows that were written between a jump of the clock and its correction: they would be due too late, or
    /// locked for too long.
    async fn set_right(&self, texts: &'static QueueSql, ttl: Duration) -> Result<(), StoreError> {
        tracing::warn!("database clock jumped; corrected due times and lock expiries");
        let [due, locks] = &texts.set_right;
        let ttl = params![micros(ttl.max(LOCK_TTL_MAX))];
        let statements = vec![(due.as_str().into(), Vec::new()), (locks.as_str().into(), ttl)];
        self.lease("correct due times", statements).await.map(drop)
    }

    async fn lease_ids(
        &self,
        what: &'static str,
        sql: String,
        params: Vec<Val>,
    ) -> Result<Vec<Uuid>, StoreError> {
        let answers = self.lease(what, vec![(sql.into(), params)]).await?;
        let ids: Result<Vec<Uuid>, DbError> = answers.iter().flatten().map(|row| row.uuid(0)).collect();
        ids.map_err(|error| StoreError::Failed { what, source: Box::new(error) })
    }
}

impl LeaseStore for Db {
    async fn claim(&self, queue: &Queue, limit: usize, ttl: Duration) -> Result<Claim, StoreError> {
        let texts = QueueSql::of(self.dialect(), queue);
        if let Store::Postgres(pool) = &*self.store
            && !pool.watch().is_close_poll_due(queue.pipeline)
        {
            return self.claim_at_once(pool, texts, queue, limit, ttl).await;
        }
        let failed = |error: DbError| StoreError::Failed { what: "claim", source: Box::new(error) };
        // Most polls find nothing. A poll is a read and blocks no writer.
        let Some(poll) = self.poll(texts, queue, ttl).await.map_err(failed)? else {
            return Ok(Claim::default());
        };
        if poll.is_orphaned {
            self.set_right(texts, ttl).await?;
        }
        let claim = match (poll.free || poll.is_orphaned, poll.expired) {
            (false, false) => return Ok(Claim { leases: Vec::new(), next_due_in: poll.next_due_in }),
            (true, false) => &texts.claim_free,
            (_, true) => &texts.claim,
        };
        let leases = self.claim_rows(claim, queue, limit, ttl, &poll).await?;
        Ok(Claim { leases, next_due_in: poll.next_due_in })
    }

    async fn extend(&self, queue: &Queue, held: &[LeaseKey], ttl: Duration) -> Result<Vec<Uuid>, StoreError> {
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let set = "lock_expires_at = now_us() + $3";
        let (ids, pairs) = keys(held.iter());
        let sql = held_sql(self.dialect(), queue.table, set);
        self.lease_ids("extend", sql, vec![ids, pairs, micros(ttl).into()]).await
    }

    async fn finish(
        &self,
        queue: &Queue,
        done: &[(LeaseKey, Option<Duration>)],
    ) -> Result<Vec<Uuid>, StoreError> {
        if done.is_empty() {
            return Ok(Vec::new());
        }
        let (ids, pairs) = keys(done.iter().map(|(held, _)| held));
        let due: serde_json::Map<String, serde_json::Value> = done
            .iter()
            .filter_map(|(held, due_in)| Some((held.id.to_string(), micros((*due_in)?).to_string().into())))
            .collect();
        // A row that is not in the document has no due time: the sum with NULL is NULL.
        let due_in = match self.dialect() {
            Dialect::Sqlite => "CAST($3 ->> id AS BIGINT)",
            Dialect::Postgres => "CAST(CAST(CAST($3 AS TEXT) AS JSON) ->> id AS BIGINT)",
        };
        let due_at = super::unit::assign("due_at", &format!("now_us() + {due_in}"));
        let set = format!("{UNLOCK}, last_processed_at = now_us(), {due_at}");
        let sql = held_sql(self.dialect(), queue.table, &set);
        let due = serde_json::Value::Object(due).to_string();
        self.lease_ids("finish", sql, vec![ids, pairs, due.into()]).await
    }

    async fn mark_due(&self, table: &'static str, ids: &[Uuid]) -> Result<(), StoreError> {
        let sql = format!(
            "UPDATE {table} SET due_at = NULL WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
             RETURNING id"
        );
        self.lease_ids("poke", sql, vec![Val::list(ids)]).await.map(drop)
    }

    async fn hand_back(&self, queue: &Queue, held: &[LeaseKey]) -> Result<(), StoreError> {
        self.unlock("hand back", queue.table, held).await
    }

    async fn reset(&self, queue: &Queue, held: LeaseKey) -> Result<bool, StoreError> {
        let set = "lock_token = NULL, lock_expires_at = NULL, last_processed_at = now_us()";
        let (ids, pairs) = keys([held].iter());
        let sql = held_sql(self.dialect(), queue.table, set);
        Ok(!self.lease_ids("reset", sql, vec![ids, pairs]).await?.is_empty())
    }

    async fn lock_related(&self, lock: RelatedLock<'_>) -> Result<RelatedLockOutcome, StoreError> {
        let requested_at = Instant::now();
        let owner = format!("{}:{}", lock.pipeline, lock.item);
        let ids = Val::list(lock.ids);
        let sql = related_sql(self.dialect(), lock.table);
        let params = vec![ids.clone(), owner.as_str().into(), micros(lock.ttl).into(), lock.ids.len().into()];
        let answers = self.lease("lock related", vec![(sql.into(), params)]).await?;
        let taken: Result<Vec<Lease>, DbError> =
            answers.iter().flatten().map(|row| read_lease(row, 0, requested_at)).collect();
        let mut taken =
            taken.map_err(|error| StoreError::Failed { what: "lock related", source: Box::new(error) })?;
        // RETURNING has no order; the caller matches the leases with its ids by position.
        taken.sort_by_key(|lease| lock.ids.iter().position(|id| *id == lease.id));
        if taken.len() == lock.ids.len() {
            return Ok(RelatedLockOutcome::Locked(taken));
        }
        if lock.reserve {
            // Not in one transaction with the attempt: a row that is claimed in between is just not reserved.
            self.lease("reserve", vec![(reserve_sql(lock.table).into(), vec![ids, owner.into()])]).await?;
        }
        Ok(RelatedLockOutcome::Busy)
    }

    async fn unlock_related(&self, table: &'static str, held: &[LeaseKey]) -> Result<(), StoreError> {
        self.unlock("unlock related", table, held).await
    }
}

impl Db {
    async fn unlock(
        &self,
        what: &'static str,
        table: &'static str,
        held: &[LeaseKey],
    ) -> Result<(), StoreError> {
        if held.is_empty() {
            return Ok(());
        }
        let (ids, pairs) = keys(held.iter());
        self.lease_ids(what, held_sql(self.dialect(), table, UNLOCK), vec![ids, pairs]).await.map(drop)
    }
}

/// Polls after a jump: one that detects it, one in a new session, and some more because other replicas correct it too.
const POLL_ATTEMPTS_MAX: usize = 5;

/// Ids, which find the rows, and pairs of id and token, which prove that the caller holds them.
fn keys<'a>(held: impl Iterator<Item = &'a LeaseKey> + Clone) -> (Val, Val) {
    let ids = Val::list(held.clone().map(|held| held.id));
    (ids, Val::list(held.map(|held| format!("{}:{}", held.id, held.token))))
}

struct QueuePoll {
    free: bool,
    expired: bool,
    next_due_in: Option<Duration>,
    is_orphaned: bool,
    /// Of Postgres's clock; SQLite uses the process's.
    reported: Option<ClockReading>,
}

impl QueuePoll {
    fn read(rows: &[Row]) -> Result<Self, DbError> {
        let Some(row) = rows.first() else {
            return Ok(Self {
                free: false,
                expired: false,
                next_due_in: None,
                is_orphaned: false,
                reported: None,
            });
        };
        let next = row.opt_int(2)?.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0)));
        let reported = match (row.opt_int(4)?, row.opt_bool(5)?, row.opt_int(6)?) {
            (Some(now), Some(is_old), Some(version)) => Some(ClockReading { now, version, is_old }),
            _ => None,
        };
        Ok(Self {
            free: row.bool(0)?,
            expired: row.bool(1)?,
            next_due_in: next,
            is_orphaned: row.bool(3)?,
            reported,
        })
    }
}

/// Reads leases, whose columns begin at `at`.
fn read_claim<'a>(
    rows: impl Iterator<Item = &'a Row>,
    at: usize,
    requested_at: Instant,
) -> Result<Vec<Lease>, DbError> {
    let mut taken = Vec::new();
    for row in rows {
        taken.push((row.int(at + 4)?, read_lease(row, at, requested_at)?));
    }
    // RETURNING has no order.
    taken.sort_unstable_by_key(|(last_processed_at, lease)| (*last_processed_at, lease.id));
    Ok(taken.into_iter().map(|(_, lease)| lease).collect())
}

fn read_lease(row: &Row, at: usize, requested_at: Instant) -> Result<Lease, DbError> {
    Ok(Lease {
        id: row.uuid(at)?,
        token: row.uuid(at + 1)?,
        epoch: row.int(at + 2)?,
        claimed_at: row.int(at + 3)?,
        requested_at,
    })
}
