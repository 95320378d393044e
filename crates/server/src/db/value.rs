//! Values and rows that mean the same on both databases.

use uuid::Uuid;

/// A parameter. Times are BIGINT microseconds, ids lower-case text, JSON text, flags BOOLEAN.
#[derive(Clone, Debug, PartialEq)]
pub enum Val {
    Null,
    Bool(bool),
    Int(i64),
    Real(f64),
    Text(String),
    Bytes(Vec<u8>),
    /// The database's time, the same for everything one unit writes.
    Now,
    /// That time plus so many microseconds.
    NowPlus(i64),
}

/// One row of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Row(pub Vec<Val>);

impl From<Uuid> for Val {
    fn from(id: Uuid) -> Self {
        Self::Text(id.to_string())
    }
}
