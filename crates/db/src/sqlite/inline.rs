//! SQLite in memory, on the caller's thread and clock: for the deterministic simulation.
//!
//! Several replicas share one instance. A call is complete when it returns; nothing runs in parallel, so the same seed
//! gives the same history.

use std::sync::Arc;

use parking_lot::Mutex;

use super::conn::Conn;
use crate::{
    clock::Clock,
    error::DbError,
    ids::Ids,
    migrate,
    unit::{Unit, WriteOutcome},
    value::{Row, Val},
};

pub(crate) struct InlineSqlite {
    conn: Mutex<Conn>,
}

impl InlineSqlite {
    pub(crate) fn open(read: Arc<dyn Fn() -> i64 + Send + Sync>, ids: Ids) -> Result<Self, DbError> {
        let mut conn = Conn::memory(Clock::of(read), ids)?;
        migrate::sqlite(&conn)?;
        conn.learn_indexes()?;
        Ok(Self { conn: Mutex::new(conn) })
    }

    pub(crate) fn read(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        self.conn.lock().read(sql, params)
    }

    pub(crate) fn write(&self, unit: &Unit) -> Result<WriteOutcome, DbError> {
        let conn = self.conn.lock();
        let now = conn.begin()?;
        conn.unit_alone(unit, now)
    }

    pub(crate) fn migrate_again(&self) -> Result<(), DbError> {
        migrate::sqlite(&*self.conn.lock())
    }

    pub(crate) fn prepare(&self, sql: &str) -> Result<usize, DbError> {
        self.conn.lock().prepare(sql)
    }
}
