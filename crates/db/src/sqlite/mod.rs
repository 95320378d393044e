//! SQLite: one writer thread that commits in groups, parallel reader threads, one process per file.

mod conn;
mod inline;
mod lock;
mod readers;
mod writer;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::oneshot;

pub(super) use conn::{Conn, insert_sql};
pub(super) use inline::InlineSqlite;
pub(super) use lock::FileLock;

use self::{readers::Readers, writer::SqliteWriter};
use super::{
    clock::Clock,
    counters::Counters,
    error::DbError,
    ids::Ids,
    migrate,
    unit::{Unit, WriteOutcome},
    value::{Row, Val},
};

type ReplySender<T> = oneshot::Sender<Result<T, DbError>>;

/// An open database file.
pub(super) struct SqliteFile {
    writer: SqliteWriter,
    readers: Readers,
    clock: Clock,
}

impl SqliteFile {
    pub(super) fn open(path: &Path, ids: Ids, counters: Arc<Counters>) -> Result<Self, DbError> {
        let lock = FileLock::take(path)?;
        let clock = Clock::wall();
        let mut conn = Conn::writer(path, clock.clone(), ids.clone())?;
        migrate::sqlite(&conn)?;
        // The previous user of the file is dead, and with it all holders of leases.
        void_leases(&conn, 0)?;
        let last = conn.query("SELECT recorded_at FROM events ORDER BY seq DESC LIMIT 1", &[])?;
        if let Some(last) = last.first() {
            clock.resume_from(last.int(0)?);
        }
        conn.learn_indexes()?;
        let readers = Readers::start(path, &clock, &ids, &counters)?;
        Ok(Self { writer: SqliteWriter::start(conn, lock, counters)?, readers, clock })
    }

    /// Current time, as a statement would return it; the server is the database here.
    pub(super) fn now(&self) -> i64 {
        self.clock.now()
    }

    pub(super) async fn read(&self, sql: String, params: Vec<Val>) -> Result<Vec<Row>, DbError> {
        self.readers.read(sql, params).await
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<WriteOutcome, DbError> {
        self.writer.write(unit).await
    }

    /// Returns after all queued units are committed and the file is free for the next server.
    pub(super) async fn close(&self) {
        self.writer.close().await;
    }

    pub(super) async fn prepare(&self, sql: String) -> Result<usize, DbError> {
        self.writer.prepare(sql).await
    }

    pub(super) async fn migrate_again(&self) -> Result<(), DbError> {
        self.writer.migrate_again().await
    }

    /// Reads a PRAGMA of the writing connection; the readers' would not show how commits are made.
    pub(super) async fn pragma(&self, name: &'static str) -> Result<Vec<Row>, DbError> {
        self.writer.pragma(name).await
    }
}

/// Expires all leases and increases all epochs by this much. Requires exclusive use of the file.
pub(super) fn void_leases(conn: &Conn, epochs_ahead: i64) -> Result<(), DbError> {
    let sql = "SELECT m.name FROM sqlite_schema m, pragma_table_info(m.name) c \
               WHERE m.type = 'table' AND c.name = 'lock_expires_at'";
    for row in conn.query(sql, &[])? {
        let table = row.text(0)?;
        conn.query(
            &format!(
                "UPDATE {table} SET lock_expires_at = 0 WHERE lock_token IS NOT NULL AND lock_expires_at > 0"
            ),
            &[],
        )?;
        if epochs_ahead > 0 {
            conn.query(&format!("UPDATE {table} SET lock_epoch = lock_epoch + $1"), &[epochs_ahead.into()])?;
        }
    }
    Ok(())
}

/// Path of a file next to a database, named as SQLite does.
pub(super) fn suffixed(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

impl migrate::Sqlite for Conn {
    fn script(&self, sql: &str) -> Result<(), DbError> {
        Self::script(self, sql)
    }

    fn query(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        Self::query(self, sql, params)
    }
}
