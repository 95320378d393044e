//! A write as data: a guard, then changes; all of it or nothing.

use uuid::Uuid;

use super::value::{Row, Val};

/// `UPDATE table SET … WHERE id = ? AND lock_token = ?`: must match one row, else the unit is stale
/// and nothing of it is kept.
#[derive(Clone, Debug)]
pub struct Guard {
    pub table: &'static str,
    pub id: Uuid,
    pub token: Uuid,
    pub set: Vec<(&'static str, Val)>,
}

#[derive(Clone, Debug)]
pub enum Change {
    /// Plain insert; bulk on Postgres when many units insert the same columns.
    Insert { table: &'static str, values: Vec<(&'static str, Val)> },
    /// Any statement. `$1…$n` parameters; `now_us()` is the unit's time.
    Exec { sql: &'static str, params: Vec<Val>, expect: Expect },
    /// A statement with RETURNING; its rows come back in `Written::Done`.
    Query { sql: &'static str, params: Vec<Val> },
}

/// How many rows a change must touch for the unit to stand.
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

#[derive(Clone, Debug)]
pub enum Written {
    /// Committed. `rows` has one entry per `Query` change, in order.
    Done { now: i64, rows: Vec<Vec<Row>> },
    /// The guard, or the change at this position, did not match: nothing was kept.
    Stale { at: Option<usize> },
}
