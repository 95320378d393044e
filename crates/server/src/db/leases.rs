//! The engine's lease store on both databases.
//!
//! Every operation is one statement, so it is one transaction with one time. Names of tables and statuses are constants
//! of the code, never input. The rules are the engine's; its conformance suite runs on both databases.

use std::{borrow::Cow, fmt::Write as _, sync::LazyLock, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;
use windlass_engine::{
    Claim, Lease, LeaseKey, LeaseStore, Queue, RelatedLock, RelatedLockOutcome, StoreError,
    settings::URGENT_AFTER,
};

use super::{Db, DbError, Dialect, Row, Store, Unit, Val, postgres::ClockReading};
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
            let closely = match &*self.store {
                Store::Postgres(pool) => pool.watch().is_close_poll_due(queue.pipeline),
                Store::File(_) | Store::Inline(_) => false,
            };
            self.counters.count_poll();
            let text = if closely { &texts.inspect_closely } else { &texts.poll };
            let poll = self.query(text.as_str(), params![queue.pipeline]).await?;
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
        let failed = |error: DbError| StoreError::Failed { what: "claim", source: Box::new(error) };
        // Most polls find nothing. A poll is a read and blocks no writer.
        let texts = QueueSql::of(self.dialect(), queue);
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
        let requested_at = Instant::now();
        let mut params = params![limit, micros(ttl), queue.pipeline];
        if poll.expired {
            params.push(poll.reported.map_or(i64::MAX, |reported| reported.now).into());
        }
        let answers = self.lease("claim", vec![(claim.as_str().into(), params)]).await?;
        let mut leases = read_claim(&answers, requested_at).map_err(failed)?;
        self.counters.count_claim(leases.len());
        if let (Store::Postgres(pool), Some(first)) = (&*self.store, leases.first()) {
            // The clock jumped after the poll: the next poll corrects it, and decisions in the meantime use the
            // corrected time.
            let jump = pool.watch().jump(requested_at, Instant::now(), first.claimed_at).unwrap_or(0);
            leases.iter_mut().for_each(|lease| lease.claimed_at -= jump);
        }
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
            answers.iter().flatten().map(|row| read_lease(row, requested_at)).collect();
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
/// Maximum time for which a lock is held without renewal.
const LOCK_TTL_MAX: Duration = Duration::from_secs(60);
/// A row written this far in the future was written with a wrong clock.
const MISDATED_AFTER_US: i64 = 5_000_000;
const UNLOCK: &str = "lock_token = NULL, lock_expires_at = NULL, lock_owner = NULL";
const CLAIM_COLUMNS: &str = "id, lock_token, lock_epoch, now_us(), last_processed_at";

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Ids, which find the rows, and pairs of id and token, which prove that the caller holds them.
fn keys<'a>(held: impl Iterator<Item = &'a LeaseKey> + Clone) -> (Val, Val) {
    let ids = Val::list(held.clone().map(|held| held.id));
    (ids, Val::list(held.map(|held| format!("{}:{}", held.id, held.token))))
}

/// Clause that locks rows, in the order of ids, so that two batches cannot deadlock. SQLite has one writer and needs
/// none.
fn row_locks(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Sqlite => "",
        Dialect::Postgres => " ORDER BY id FOR NO KEY UPDATE",
    }
}

fn statuses(queue: &Queue) -> String {
    let mut list = String::new();
    for status in queue.statuses {
        let _ = write!(list, "{}'{status}'", if list.is_empty() { "" } else { ", " });
    }
    list
}

/// Current time, evaluated once for all rows: Postgres would evaluate it for each.
fn now(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Sqlite => "now_us()",
        Dialect::Postgres => "(SELECT now_us())",
    }
}

/// Sort key: rows that were marked due come before rows whose due time passed; one that has waited for long counts as
/// marked.
fn urgency_sql(now: &str) -> String {
    format!("CASE WHEN due_at > {now} - {} THEN 1 ELSE 0 END", micros(URGENT_AFTER))
}

/// Due time of a row as indexed: a row without a time sorts first.
const DUE: &str = "coalesce(due_at, 0)";

type CachedSql = (Dialect, Queue, &'static QueueSql);

/// Statements of one queue, cached. Polls are frequent, and formatting the text costs as much as the poll.
struct QueueSql {
    poll: String,
    /// Also finds rows that were written with a wrong clock.
    inspect_closely: String,
    /// Only unlocked rows: there are hardly ever others to claim.
    claim_free: String,
    claim: String,
    /// For unlocked rows, and for locked ones.
    set_right: [String; 2],
}

impl QueueSql {
    /// Returns the cached statements. Queues are constants of the code, so there are few, and they are never evicted.
    fn of(dialect: Dialect, queue: &Queue) -> &'static Self {
        static KNOWN: LazyLock<Mutex<Vec<CachedSql>>> = LazyLock::new(Mutex::default);
        let mut known = KNOWN.lock();
        let found = known.iter().find(|(of, kept, _)| of == &dialect && kept == queue);
        if let Some((_, _, texts)) = found {
            return texts;
        }
        let texts: &'static Self = Box::leak(Box::new(Self {
            poll: poll_sql(dialect, queue, false),
            inspect_closely: poll_sql(dialect, queue, true),
            claim_free: claim_sql(dialect, queue, false),
            claim: claim_sql(dialect, queue, true),
            set_right: repair_sql(dialect, queue),
        }));
        known.push((dialect, *queue, texts));
        texts
    }
}

/// Two branches, one for each partial index: unlocked rows, and expired locks. The second is left out if the poll saw
/// none: SQLite treats each branch as a separate table. A lock that had not expired at the poll is not expired now: the
/// clock may have been set in between.
fn claim_sql(dialect: Dialect, queue: &Queue, with_expired: bool) -> String {
    let (table, statuses, now) = (queue.table, statuses(queue), now(dialect));
    let skip = match dialect {
        Dialect::Sqlite => "",
        Dialect::Postgres => " FOR NO KEY UPDATE SKIP LOCKED",
    };
    let late = urgency_sql(now);
    let branch = |state: &str| {
        format!(
            "SELECT id, {late} AS late, last_processed_at FROM {table} WHERE {state} AND status IN ({statuses}) \
             AND {DUE} <= {now} AND (lock_owner IS NULL OR lock_owner = $3) \
             ORDER BY {late}, last_processed_at, id LIMIT $1{skip}"
        )
    };
    let free = branch("lock_token IS NULL AND NOT finished");
    let take = format!(
        "UPDATE {table} SET lock_token = new_uuid(), lock_expires_at = now_us() + $2, lock_owner = $3, \
         lock_epoch = lock_epoch + 1, due_at = coalesce(due_at, now_us())"
    );
    if with_expired {
        let expired = branch(&format!(
            "lock_token IS NOT NULL AND lock_expires_at <= {now} AND lock_expires_at <= $4 AND NOT finished"
        ));
        return format!(
            "WITH free AS MATERIALIZED ({free}), expired AS MATERIALIZED ({expired}), \
             c AS MATERIALIZED (SELECT id FROM (SELECT * FROM free UNION ALL SELECT * FROM expired) AS both_of \
             ORDER BY late, last_processed_at, id LIMIT $1) {take} WHERE id IN (SELECT id FROM c) RETURNING {CLAIM_COLUMNS}"
        );
    }
    match dialect {
        Dialect::Sqlite => {
            format!("{take} WHERE id IN (SELECT id FROM ({free})) RETURNING {CLAIM_COLUMNS}")
        }
        Dialect::Postgres => format!(
            "WITH free AS MATERIALIZED ({free}) {take} WHERE id IN (SELECT id FROM free) RETURNING {CLAIM_COLUMNS}"
        ),
    }
}

/// Determines whether there is a row to claim, unlocked or with an expired lock, and the time until the next row is
/// due. Rows locked by others are left out: their holders set when they are due next.
fn poll_sql(dialect: Dialect, queue: &Queue, closely: bool) -> String {
    let (table, statuses, now) = (queue.table, statuses(queue), now(dialect));
    let mine = "NOT finished AND (lock_owner IS NULL OR lock_owner = $1)";
    // The earliest row of each status is the first of its part of the index; the earliest of all statuses would be a
    // scan.
    let mut next = String::new();
    for status in queue.statuses {
        let _ = write!(
            next,
            "{}SELECT (SELECT {DUE} FROM {table} WHERE lock_token IS NULL AND {mine} AND status = '{status}' \
             AND {DUE} > {now} ORDER BY {DUE} LIMIT 1) AS at",
            if next.is_empty() { "" } else { " UNION ALL " }
        );
    }
    // SQLite uses the process's clock, which is never set.
    let clock = match dialect {
        Dialect::Sqlite => "FALSE, NULL, NULL, NULL".to_owned(),
        Dialect::Postgres => {
            let [due, locks] = misdated_sql(&statuses);
            // No index covers these: they are searched for while the clock is not trusted, and now and then.
            let orphaned = match closely {
                true => format!(
                    "EXISTS (SELECT 1 FROM {table} WHERE {due}) \
                     OR EXISTS (SELECT 1 FROM {table} WHERE {locks} + {})",
                    micros(LOCK_TTL_MAX)
                ),
                false => "FALSE".to_owned(),
            };
            format!(
                "{orphaned}, now_us(), (SELECT version FROM clock) <> clock_setting('windlass.version'), \
                 clock_setting('windlass.version')"
            )
        }
    };
    format!(
        "SELECT EXISTS (SELECT 1 FROM {table} WHERE lock_token IS NULL AND {mine} AND status IN ({statuses}) \
         AND {DUE} <= {now}), \
         EXISTS (SELECT 1 FROM {table} WHERE lock_token IS NOT NULL AND lock_expires_at <= {now} AND {mine} \
         AND status IN ({statuses}) AND {DUE} <= {now}), \
         (SELECT min(at) - now_us() FROM ({next}) AS due), {clock}"
    )
}

/// Conditions for unlocked rows that were written in the future, and for rows whose lock expires later than now plus
/// the caller's suffix.
fn misdated_sql(statuses: &str) -> [String; 2] {
    [
        format!(
            "lock_token IS NULL AND NOT finished AND status IN ({statuses}) \
             AND last_processed_at > now_us() + {MISDATED_AFTER_US}"
        ),
        format!(
            "lock_token IS NOT NULL AND NOT finished AND status IN ({statuses}) \
             AND lock_expires_at > now_us() + {MISDATED_AFTER_US}"
        ),
    ]
}

/// Makes unlocked rows due at once. Locked rows get the duration of a whole lock: a live holder renews it, that of a
/// dead one expires.
fn repair_sql(dialect: Dialect, queue: &Queue) -> [String; 2] {
    let table = queue.table;
    let [due, locks] = misdated_sql(&statuses(queue));
    let update = |set: &str, orphaned: &str| {
        format!(
            "WITH astray AS MATERIALIZED (SELECT id FROM {table} WHERE {orphaned}{}) \
             UPDATE {table} SET {set} WHERE id IN (SELECT id FROM astray) RETURNING id",
            row_locks(dialect)
        )
    };
    [
        update("due_at = NULL, last_processed_at = now_us()", &due),
        update("due_at = NULL, lock_expires_at = now_us() + $1", &format!("{locks} + $1")),
    ]
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

fn read_claim(answers: &[Vec<Row>], requested_at: Instant) -> Result<Vec<Lease>, DbError> {
    let mut taken = Vec::new();
    for row in answers.first().into_iter().flatten() {
        taken.push((row.int(4)?, read_lease(row, requested_at)?));
    }
    // RETURNING has no order.
    taken.sort_unstable_by_key(|(last_processed_at, lease)| (*last_processed_at, lease.id));
    Ok(taken.into_iter().map(|(_, lease)| lease).collect())
}

fn read_lease(row: &Row, requested_at: Instant) -> Result<Lease, DbError> {
    Ok(Lease {
        id: row.uuid(0)?,
        token: row.uuid(1)?,
        epoch: row.int(2)?,
        claimed_at: row.int(3)?,
        requested_at,
    })
}

/// Changes the rows that have the right tokens; returns their ids.
fn held_sql(dialect: Dialect, table: &str, set: &str) -> String {
    format!(
        "WITH held AS MATERIALIZED (SELECT id FROM {table} \
         WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
         AND id || ':' || lock_token IN (SELECT value FROM json_each(CAST($2 AS TEXT))){}) \
         UPDATE {table} SET {set} WHERE id IN (SELECT id FROM held) RETURNING id",
        row_locks(dialect)
    )
}

/// Locks all of the rows or none. They must be ours already, or free: an owner on a row reserves it, and an expired
/// lock is left to its owner.
fn related_sql(dialect: Dialect, table: &str) -> String {
    format!(
        "WITH open AS MATERIALIZED (SELECT id FROM {table} \
         WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND (lock_owner = $2 OR \
         (lock_owner IS NULL AND (lock_token IS NULL OR lock_expires_at <= now_us()))){}) \
         UPDATE {table} SET lock_token = new_uuid(), lock_expires_at = now_us() + $3, lock_owner = $2, \
         lock_epoch = lock_epoch + 1 WHERE id IN (SELECT id FROM open) \
         AND (SELECT count(*) FROM open) = $4 RETURNING {CLAIM_COLUMNS}",
        row_locks(dialect)
    )
}

fn reserve_sql(table: &str) -> String {
    format!(
        "UPDATE {table} SET lock_owner = $2 WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
         AND lock_owner IS NULL AND (lock_token IS NULL OR lock_expires_at <= now_us()) RETURNING id"
    )
}
