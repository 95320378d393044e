//! A write as data: a guard, then changes; applied as a whole or not at all.
//!
//! ```text
//! Unit::apply("jobs", lease.held(), Some(2_000_000), vec![("status", "running".into())])
//!     .insert("events", events::row(…))
//!     .exec(SQL, params![id])
//! ```
//! Put inserts first or last: on Postgres these are made in bulk together with other units' inserts. Those between two
//! statements are run one by one, in order.

use std::borrow::Cow;

use uuid::Uuid;
use windlass_engine::LeaseKey;

use super::{
    error::DbError,
    value::{Row, Val},
};

/// Columns and their values.
pub type Values = Vec<(&'static str, Val)>;

/// `UPDATE table SET … WHERE id = ? AND lock_token = ?`: must match one row, else the unit is stale and none of it is
/// written.
#[derive(Clone, Debug)]
pub struct Guard {
    pub table: &'static str,
    pub id: Uuid,
    pub token: Uuid,
    pub set: Values,
}

#[derive(Clone, Debug)]
pub enum Change {
    /// Plain insert; bulk on Postgres when many units insert the same columns.
    Insert { table: &'static str, values: Values },
    /// Any statement. `$1…$n` parameters; `now_us()` is the unit's time.
    Exec { sql: Cow<'static, str>, params: Vec<Val>, expect: Expect },
    /// A statement with RETURNING; its rows are returned in `Written::Done`.
    Query { sql: Cow<'static, str>, params: Vec<Val> },
}

/// Number of rows that a change must affect for the unit to be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    Any,
    One,
}

#[derive(Clone, Debug, Default)]
pub struct Unit {
    pub guard: Option<Guard>,
    pub changes: Vec<Change>,
}

impl Unit {
    pub fn new() -> Self {
        Self::default()
    }

    /// A write under a lease that keeps the lease: the row stays locked.
    pub fn guarded(table: &'static str, held: LeaseKey, set: Values) -> Self {
        Self::new().guard(table, held, set)
    }

    /// The write that ends a pass: the row is unlocked, `last_processed_at` is the unit's time, and the row is due
    /// again after `due_in_us` (`None`: at once).
    pub fn apply(table: &'static str, held: LeaseKey, due_in_us: Option<i64>, set: Values) -> Self {
        let mut all = Self::unlocked(due_in_us);
        all.extend(set);
        Self::new().guard(table, held, all)
    }

    /// Columns of a row that its holder unlocks.
    pub fn unlocked(due_in_us: Option<i64>) -> Values {
        vec![
            ("lock_token", Val::Null),
            ("lock_expires_at", Val::Null),
            ("lock_owner", Val::Null),
            ("last_processed_at", Val::Now),
            ("due_at", due_in_us.map_or(Val::Null, Val::NowPlus)),
        ]
    }

    #[must_use]
    pub fn guard(mut self, table: &'static str, held: LeaseKey, set: Values) -> Self {
        self.guard = Some(Guard { table, id: held.id, token: held.token, set });
        self
    }

    #[must_use]
    pub fn insert(mut self, table: &'static str, values: Values) -> Self {
        self.changes.push(Change::Insert { table, values });
        self
    }

    #[must_use]
    pub fn exec(mut self, sql: impl Into<Cow<'static, str>>, params: Vec<Val>) -> Self {
        self.changes.push(Change::Exec { sql: sql.into(), params, expect: Expect::Any });
        self
    }

    /// Adds a statement that must affect exactly one row, or the whole unit is `Stale { at: Some(position) }`.
    #[must_use]
    pub fn expect_one(mut self, sql: impl Into<Cow<'static, str>>, params: Vec<Val>) -> Self {
        self.changes.push(Change::Exec { sql: sql.into(), params, expect: Expect::One });
        self
    }

    #[must_use]
    pub fn query(mut self, sql: impl Into<Cow<'static, str>>, params: Vec<Val>) -> Self {
        self.changes.push(Change::Query { sql: sql.into(), params });
        self
    }

    /// Appends changes.
    #[must_use]
    pub fn and(mut self, changes: impl IntoIterator<Item = Change>) -> Self {
        self.changes.extend(changes);
        self
    }
}

/// `column = value` in a statement that unlocks a row. A process that marks a locked row due clears its `due_at` (a
/// claim always sets it), and the holder's next due time must not overwrite that.
pub(super) fn assign(column: &str, value: &str) -> String {
    match column {
        // Postgres infers the type text for a bare parameter next to NULL.
        "due_at" => format!("due_at = CASE WHEN due_at IS NULL THEN NULL ELSE CAST({value} AS BIGINT) END"),
        _ => format!("{column} = {value}"),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum WriteOutcome {
    /// Committed. `rows` has one entry per `Query` change, in order.
    Done { now: i64, rows: Vec<Vec<Row>> },
    /// The guard (`None`), or the change at this position, did not match: nothing was written.
    Stale { at: Option<usize> },
}

impl WriteOutcome {
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }

    /// Time and rows, for writes that cannot be stale unless the code is wrong.
    pub fn done(self) -> Result<(i64, Vec<Vec<Row>>), DbError> {
        match self {
            Self::Done { now, rows } => Ok((now, rows)),
            Self::Stale { at } => Err(DbError::Stale { at }),
        }
    }
}
