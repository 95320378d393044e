//! Texts of the statements of the lease store.

use std::{fmt::Write as _, sync::LazyLock, time::Duration};

use parking_lot::Mutex;
use windlass_engine::{Queue, settings::URGENT_AFTER};

use super::Dialect;

/// Maximum time for which a lock is held without renewal.
pub(super) const LOCK_TTL_MAX: Duration = Duration::from_secs(60);
/// A row written this far in the future was written with a wrong clock.
const MISDATED_AFTER_US: i64 = 5_000_000;
pub(super) const UNLOCK: &str = "lock_token = NULL, lock_expires_at = NULL, lock_owner = NULL";
const CLAIM_COLUMNS: &str = "id, lock_token, lock_epoch, now_us(), last_processed_at";

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
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
pub(super) struct QueueSql {
    /// On Postgres it also finds rows that were written with a wrong clock.
    pub(super) poll: String,
    /// Only used on Postgres: SQLite polls on another thread than that of its one writer.
    pub(super) poll_and_claim: String,
    /// Only unlocked rows: there are hardly ever others to claim.
    pub(super) claim_free: String,
    pub(super) claim: String,
    /// For unlocked rows, and for locked ones.
    pub(super) set_right: [String; 2],
}

impl QueueSql {
    /// Returns the cached statements. Queues are constants of the code, so there are few, and they are never evicted.
    pub(super) fn of(dialect: Dialect, queue: &Queue) -> &'static Self {
        static KNOWN: LazyLock<Mutex<Vec<CachedSql>>> = LazyLock::new(Mutex::default);
        let mut known = KNOWN.lock();
        let found = known.iter().find(|(of, kept, _)| of == &dialect && kept == queue);
        if let Some((_, _, texts)) = found {
            return texts;
        }
        let texts: &'static Self = Box::leak(Box::new(Self {
            poll: format!("SELECT {}", poll_columns(dialect, queue, PollScope::Close, "$1")),
            poll_and_claim: poll_and_claim_sql(dialect, queue),
            claim_free: claim_free_sql(dialect, queue),
            claim: claim_sql(dialect, queue),
            set_right: repair_sql(dialect, queue),
        }));
        known.push((dialect, *queue, texts));
        texts
    }
}

/// Selects rows to claim among those in a state, in the order of the queue.
fn due_rows_sql(dialect: Dialect, queue: &Queue, state: &str) -> String {
    let (table, statuses, now) = (queue.table, statuses(queue), now(dialect));
    let skip = match dialect {
        Dialect::Sqlite => "",
        Dialect::Postgres => " FOR NO KEY UPDATE SKIP LOCKED",
    };
    let late = urgency_sql(now);
    format!(
        "SELECT id, {late} AS late, last_processed_at FROM {table} WHERE {state} AND status IN ({statuses}) \
         AND {DUE} <= {now} AND (lock_owner IS NULL OR lock_owner = $3) \
         ORDER BY {late}, last_processed_at, id LIMIT $1{skip}"
    )
}

/// Claims the rows of a relation.
fn take_sql(table: &str, from: &str) -> String {
    format!(
        "UPDATE {table} SET lock_token = new_uuid(), lock_expires_at = now_us() + $2, lock_owner = $3, \
         lock_epoch = lock_epoch + 1, due_at = coalesce(due_at, now_us()) WHERE id IN (SELECT id FROM {from}) \
         RETURNING {CLAIM_COLUMNS}"
    )
}

/// State of rows without a holder.
const UNLOCKED: &str = "lock_token IS NULL AND NOT finished";

fn claim_free_sql(dialect: Dialect, queue: &Queue) -> String {
    let free = due_rows_sql(dialect, queue, UNLOCKED);
    match dialect {
        Dialect::Sqlite => take_sql(queue.table, &format!("({free})")),
        Dialect::Postgres => {
            format!("WITH free AS MATERIALIZED ({free}) {}", take_sql(queue.table, "free"))
        }
    }
}

/// Two branches, one for each partial index: unlocked rows, and expired locks. The second is left out if the poll saw
/// none: SQLite treats each branch as a separate table. A lock that had not expired at the poll is not expired now: the
/// clock may have been set in between.
fn claim_sql(dialect: Dialect, queue: &Queue) -> String {
    let free = due_rows_sql(dialect, queue, UNLOCKED);
    let expired = due_rows_sql(
        dialect,
        queue,
        &format!(
            "lock_token IS NOT NULL AND lock_expires_at <= {} AND lock_expires_at <= $4 AND NOT finished",
            now(dialect)
        ),
    );
    format!(
        "WITH free AS MATERIALIZED ({free}), expired AS MATERIALIZED ({expired}), \
         c AS MATERIALIZED (SELECT id FROM (SELECT * FROM free UNION ALL SELECT * FROM expired) AS both_of \
         ORDER BY late, last_processed_at, id LIMIT $1) {}",
        take_sql(queue.table, "c")
    )
}

/// Claims unlocked rows, and returns the columns of a poll with each, or alone if there are none.
fn poll_and_claim_sql(dialect: Dialect, queue: &Queue) -> String {
    let free = due_rows_sql(dialect, queue, UNLOCKED);
    let take = take_sql(queue.table, "free");
    let poll = poll_columns(dialect, queue, PollScope::WithClaim, "$3");
    format!(
        "WITH free AS MATERIALIZED ({free}), taken AS ({take}) \
         SELECT {poll}, taken.* FROM (SELECT 1) AS always LEFT JOIN taken ON TRUE"
    )
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PollScope {
    /// With a claim of unlocked rows in the same statement.
    WithClaim,
    /// Alone; on Postgres it also finds rows that were written with a wrong clock.
    Close,
}

/// Number of columns of a poll.
pub(super) const POLL_WIDTH: usize = 7;

/// Determines whether there is a row to claim, unlocked or with an expired lock, and the time until the next row is
/// due. Rows locked by others are left out: their holders set when they are due next.
fn poll_columns(dialect: Dialect, queue: &Queue, scope: PollScope, owner: &str) -> String {
    let (table, statuses, now) = (queue.table, statuses(queue), now(dialect));
    let mine = format!("NOT finished AND (lock_owner IS NULL OR lock_owner = {owner})");
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
            let orphaned = match scope {
                PollScope::Close => format!(
                    "EXISTS (SELECT 1 FROM {table} WHERE {due}) \
                     OR EXISTS (SELECT 1 FROM {table} WHERE {locks} + {})",
                    micros(LOCK_TTL_MAX)
                ),
                PollScope::WithClaim => "FALSE".to_owned(),
            };
            format!(
                "{orphaned}, (SELECT now_us()), (SELECT version FROM clock) <> clock_setting('windlass.version'), \
                 clock_setting('windlass.version')"
            )
        }
    };
    let free = match scope {
        // They are claimed by the same statement.
        PollScope::WithClaim => "FALSE".to_owned(),
        PollScope::Close => format!(
            "EXISTS (SELECT 1 FROM {table} WHERE lock_token IS NULL AND {mine} AND status IN ({statuses}) \
             AND {DUE} <= {now})"
        ),
    };
    format!(
        "{free}, \
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
            "WITH misdated AS MATERIALIZED (SELECT id FROM {table} WHERE {orphaned}{}) \
             UPDATE {table} SET {set} WHERE id IN (SELECT id FROM misdated) RETURNING id",
            row_locks(dialect)
        )
    };
    [
        update("due_at = NULL, last_processed_at = now_us()", &due),
        update("due_at = NULL, lock_expires_at = now_us() + $1", &format!("{locks} + $1")),
    ]
}

/// Changes the rows that have the right tokens; returns their ids.
pub(super) fn held_sql(dialect: Dialect, table: &str, set: &str) -> String {
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
pub(super) fn related_sql(dialect: Dialect, table: &str) -> String {
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

pub(super) fn reserve_sql(table: &str) -> String {
    format!(
        "UPDATE {table} SET lock_owner = $2 WHERE id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
         AND lock_owner IS NULL AND (lock_token IS NULL OR lock_expires_at <= now_us()) RETURNING id"
    )
}
